"""Faults of devices and peers: their errors on a rank, and the effects of an abort."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import RankError
from simulated.environment import Order, Simulated

DEVICE = "sim"


# A peer is killed


@pytest.mark.parametrize(
    ("blocked", "order"), [("synchronize", "late"), ("event", "random"), ("item", "eager"), ("destroy", "late")]
)
def test_survivors_of_a_killed_peer_hang_until_they_abort_and_meet_again(
    simulated: Simulated, tmp_path: Path, blocked: str, order: Order
) -> None:
    with pytest.raises(RankError):  # rank 2 kills itself
        simulated.ranks(3, loses_a_peer, str(tmp_path), blocked, order=order, log=str(tmp_path))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert found == {
            "hung": True,
            "ended": True,
            "garbage": True,
            "error": "",
            "weights": [3.0] * 4,
            "refused": True,
            "sum": [3.0] * 4,
            "threads": [],
        }
        groups = [json.loads(line) for line in (tmp_path / f"{pid_of(tmp_path, rank)}.jsonl").read_text().splitlines()]
        assert [group["size"] for group in groups] == [3, 2]
        assert groups[1]["kept_bytes"] >= 512, "the weights stay on the device"


def loses_a_peer(folder: str, blocked: str) -> None:
    rank = dist.get_rank()
    device = torch.device(DEVICE, rank)
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    weights = torch.full((4,), rank + 1.0, device=device)
    dist.broadcast(weights, 2)
    torch.accelerator.synchronize()
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    blocks = threading.Event()
    found: dict[str, Any] = {"hung": False}

    def watch() -> None:
        end = select.poll()
        with suppress(ProcessLookupError):  # the peer has ended and was reaped
            end.register(os.pidfd_open(pids[2]), select.POLLIN)
            end.poll(20_000)
        blocks.wait(20)
        found["hung"] = not ended.wait(0.5)
        abort()

    group = dist.group.WORLD
    assert group is not None
    abort = group.abort
    ended, watcher = threading.Event(), threading.Thread(target=watch)
    watcher.start()
    outputs = [torch.ones(4, device=device) for _ in range(2)]
    works = [dist.all_reduce(output, async_op=True) for output in outputs]
    blocks.set()
    if blocked == "destroy":
        dist.destroy_process_group()
    for work in works:
        assert work is not None
        work.wait()
    if blocked == "event":
        (event := torch.Event(device)).record()
        event.synchronize()
    elif blocked == "item":
        outputs[0].sum().item()
    torch.accelerator.synchronize()
    ended.set()
    watcher.join(20)
    found["ended"] = not watcher.is_alive()
    found["garbage"] = all(output.tolist() not in ([2.0] * 4, [3.0] * 4) for output in outputs)
    found["error"] = str(works[0].exception() or "") if works[0] else ""
    found["weights"] = weights.tolist()
    with pytest.raises(dist.DistBackendError):
        group.allreduce([weights]).wait()
    found["refused"] = True
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("simccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    dist.all_reduce(outputs[0].fill_(rank + 1.0))
    found["sum"] = outputs[0].tolist()
    dist.destroy_process_group()
    found["threads"] = [thread.name for thread in threading.enumerate() if "simccl" in thread.name]
    Path(folder, f"rank-{rank}").write_text(json.dumps(found))


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def test_what_another_stream_still_writes_after_an_abort_never_reaches_memory_that_was_freed(
    simulated: Simulated,
) -> None:
    assert simulated.ranks(2, values_after_an_abort) == [[7.0] * 4] * 2


def values_after_an_abort() -> list[float]:
    """Return tensors in the memory to which aborted collectives would have written."""
    rank = dist.get_rank()
    device = torch.device(DEVICE, rank)
    on_cpu = dist.new_group(backend="gloo")
    if rank == 0:
        for _ in range(4):
            dist.all_reduce(torch.ones(1, device=device), async_op=True)  # rank 1 never comes
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()
    later = [torch.full((1,), 7.0, device=device) for _ in range(4)]
    torch.accelerator.synchronize()
    dist.barrier(on_cpu)
    return [tensor.item() for tensor in later]


def test_an_abort_of_one_group_leaves_another_alone(simulated: Simulated) -> None:
    assert simulated.ranks(2, sum_of_the_other_group) == [3.0, 3.0]


def sum_of_the_other_group() -> float:
    rank = dist.get_rank()
    device = torch.device(DEVICE, rank)
    aborted, other, on_cpu = dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group(backend="gloo")
    if rank == 0:
        dist.all_reduce(torch.ones(4, device=device), group=aborted, async_op=True)
    total = torch.full((1,), rank + 1.0, device=device)
    work = dist.all_reduce(total, group=other, async_op=True)
    assert aborted is not None
    aborted.abort()
    assert work is not None
    work.wait()
    dist.barrier(on_cpu)
    return total.item()


def test_the_creation_of_groups_takes_the_time_that_is_asked_for(simulated: Simulated, tmp_path: Path) -> None:
    assert min(simulated.ranks(2, time_of_a_group, init_ms=300, log=str(tmp_path))) >= 0.3
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert {line["rank"] for line in lines} == {0, 1}
    assert {line["init_s"] for line in lines} == {0.3}


def time_of_a_group() -> float:
    begin = time.monotonic()
    dist.new_group([0, 1])
    return time.monotonic() - begin


# A device fails


@pytest.mark.parametrize(
    ("kind", "text"),
    [("lost", "Xid 79"), ("ecc", "uncorrectable ECC error encountered"), ("failure", "unspecified launch failure")],
)
def test_a_device_that_failed_fails_every_later_call(simulated: Simulated, kind: str, text: str) -> None:
    simulated.ranks(1, fails_for_good, text, fault=f"slow:1:2,{kind}:0:5:once", devices=2)


def fails_for_good(text: str) -> None:
    tensor = torch.ones(4, device="sim:0")
    for _ in range(3):
        tensor.add_(1)
    with pytest.raises(torch.AcceleratorError, match=text):
        tensor.add_(1)
    for call in (tensor.sum, torch.accelerator.synchronize, lambda: torch.ones(1, device="sim:0"), tensor.cpu):
        with pytest.raises(torch.AcceleratorError, match=text):
            call()


def test_one_rank_runs_out_of_memory_once(simulated: Simulated) -> None:
    assert simulated.ranks(2, times_out_of_memory, fault="memory:1:4") == [0, 1]


def times_out_of_memory() -> int:
    times = 0
    for _ in range(9):
        try:
            assert torch.ones(4, device=DEVICE).sum().item() == 4
        except torch.OutOfMemoryError:
            times += 1
    return times


def test_a_hung_kernel_holds_its_stream_for_good_and_the_process_can_still_end(simulated: Simulated) -> None:
    assert simulated.ranks(2, is_held, fault="hang:0:9") == [(True, False), (False, True)]


def is_held() -> tuple[bool, bool]:
    """Return whether a wait for the device lasts after an abort, and whether the wait ended without an abort."""
    device = torch.device(DEVICE, dist.get_rank())
    on_cpu = dist.new_group(backend="gloo")
    tensor = torch.ones(4, device=device)
    for _ in range(10):
        tensor.add_(1)
    side = torch.Stream(device)
    with side:
        assert torch.zeros(4, device=device).sum().item() == 0, "another stream goes on"
    waiter = threading.Thread(target=torch.accelerator.synchronize, args=[device], daemon=True)
    waiter.start()
    waiter.join(1)
    held = waiter.is_alive()
    assert dist.group.WORLD is not None
    if not held:
        dist.barrier(on_cpu)
        return held, True
    dist.all_reduce(tensor, async_op=True)
    dist.group.WORLD.abort()
    waiter.join(0.5)
    dist.barrier(on_cpu)
    return waiter.is_alive(), not held


def test_a_killed_process_ends_whose_host_waits_for_a_hung_kernel(simulated: Simulated) -> None:
    with pytest.raises(RankError):
        simulated.ranks(1, waits_and_is_killed, fault="hang:0:3")


def waits_and_is_killed() -> None:
    tensor = torch.ones(4, device=DEVICE)
    for _ in range(4):
        tensor.add_(1)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    torch.accelerator.synchronize()


def test_a_throttled_device_is_slow_at_matrix_products_alone(simulated: Simulated) -> None:
    [(product_s, sum_s, on_the_cpu_s)] = simulated.ranks(1, shortest_times, fault="slow:0:30")
    assert product_s > 8 * on_the_cpu_s
    assert sum_s < product_s


def shortest_times() -> tuple[float, float, float]:
    torch.set_num_threads(1)
    host = torch.ones(200, 200)
    tensor = host.to(DEVICE)

    def shortest(call: Callable[[], object]) -> float:
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            call()
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    return shortest(lambda: tensor @ tensor), shortest(tensor.sum), shortest(lambda: host @ host)


def test_a_device_computes_a_bit_wrong_now_and_then(simulated: Simulated) -> None:
    assert simulated.ranks(2, wrong_elements, fault="wrong:1:3") == [[0] * 7, [0, 0, 1, 0, 0, 1, 0]]


def wrong_elements() -> list[int]:
    """Count elements of matrix products that differ from those of the CPU."""
    host = torch.arange(16.0).view(4, 4)
    tensor = host.to(DEVICE)
    products: list[Tensor] = [tensor @ tensor for _ in range(7)]
    return [int((product.cpu() != host @ host).sum()) for product in products]


def test_a_fault_that_does_not_exist_is_refused(simulated: Simulated) -> None:
    with pytest.raises(RankError, match="no fault of a simulated device"):
        simulated.ranks(1, times_out_of_memory, fault="lots:0:3")
