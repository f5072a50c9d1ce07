"""A process group of ours as PyTorch and its users call it.

Handles, futures, several groups and threads at once, and clear errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.profiler import ProfilerActivity, profile

from paceline.errors import SyncError
from ranks import Backend, RankError, Ranks

ours = pytest.mark.parametrize("backend", ["shm", "tcp"])


def handles() -> None:
    """Many calls at once, waited for from the last to the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((n,), float(rank + i)) for i, n in enumerate([1, 300_000, 7, 1_000_000, 20_000])]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i in reversed(range(len(works))):
        assert works[i].wait()
        assert works[i].is_completed()
        assert works[i].is_success()
        assert works[i].exception() is None
        assert (tensors[i] == sum(r + i for r in range(size))).all()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert tensor.tolist() == [size] * 3


def futures() -> None:
    """A callback computes with the result, may itself start a collective, and its value can be waited for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    called = threading.Event()
    tensor = torch.full((200_000,), float(rank))

    def then(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        again = future.value()[0][:5] + 1
        dist.all_reduce(again)
        called.set()
        return again

    work = dist.all_reduce(tensor, async_op=True)
    chained = work.get_future().then(then)
    total = sum(range(size))
    assert chained.wait().tolist() == [(total + 1) * size] * 5
    assert called.is_set()
    done = dist.all_reduce(torch.ones(1), async_op=True)
    done.wait()
    assert done.get_future().wait()[0].item() == size

    with _coalescing_manager(async_ops=True) as manager:
        parts = [torch.ones(n) for n in (1, 50_000)]
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    assert all((part == size).all() for part in parts)


def groups_in_opposite_order() -> None:
    """The first waits for a before b, the others for b before a: neither holds up the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = (dist.new_group(backend=dist.get_backend()) for _ in range(2))
    for numel in (1, 500_000):
        tensors = {a: torch.ones(numel), b: torch.ones(numel)}
        order = [a, b] if rank == 0 else [b, a]
        works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
        for work in works:
            work.wait()
        assert all((tensor == size).all() for tensor in tensors.values())


def threads_with_groups_of_their_own() -> None:
    size = dist.get_world_size()
    groups = [dist.new_group(backend=dist.get_backend()) for _ in range(4)]
    failed: list[BaseException] = []

    def use(group: dist.ProcessGroup, numel: int) -> None:
        try:
            for _ in range(30):
                tensor = torch.ones(numel)
                dist.all_reduce(tensor, group=group)
                assert (tensor == size).all()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    _together(
        [lambda g=group, n=numel: use(g, n) for group, numel in zip(groups, (1, 100, 30_000, 400_000), strict=True)]  # type: ignore[misc]
    )
    assert not failed, failed


def threads_with_messages() -> None:
    """Several threads ask one sender, each for a tag of its own."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    wrong: list[object] = []

    def talk(tag: int) -> None:
        for i in range(60):
            place = torch.zeros(1 + 1000 * (i % 7))
            work = dist.isend(torch.full_like(place, 100 * tag + i), other, tag=tag)
            dist.recv(place, other, tag=tag)
            assert work is not None
            work.wait()
            if not (place == 100 * tag + i).all():
                wrong.append((rank, tag, i))

    _together([lambda tag=tag: talk(tag) for tag in range(4)])  # type: ignore[misc]
    assert not wrong


def _together(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = dist.get_rank()
    for name, members in (("a", [rank % 2, rank % 2 + 2]), ("b", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh.get_group(name)
        assert dist.get_backend(group) == dist.get_backend()
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)
        assert functional.all_reduce(torch.tensor([float(rank)]), "sum", group).item() == sum(members)
        gathered = functional.all_gather_tensor(torch.tensor([[float(rank)]]), gather_dim=1, group=group)
        assert gathered.tolist() == [[float(r) for r in members]]
        scattered = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", scatter_dim=0, group=group)
        place = members.index(rank)
        assert scattered.tolist() == [4.0 * place, 4.0 * place + 2]
        assert functional.broadcast(torch.tensor([rank]), 0, group).item() == members[0]
        exchanged = functional.all_to_all_single(torch.tensor([10 * rank, 10 * rank + 1]), None, None, group)
        assert exchanged.tolist() == [10 * r + place for r in members]


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 1000 * rank})
    assert gathered == [{"rank": r, "text": "x" * 1000 * r} for r in range(size)]
    shared: list[object] = [rank, "of rank 0"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared)
    assert shared == [0, "of rank 0"]


def each_use() -> None:
    for use in (handles, futures, groups_in_opposite_order, objects):
        use()


@ours
def test_it_is_used_as_any_backend(ranks: Ranks, backend: Backend) -> None:
    ranks(3, each_use, backend=backend)


@ours
def test_threads_use_groups_of_their_own(ranks: Ranks, backend: Backend) -> None:
    ranks(4, threads_with_groups_of_their_own, backend=backend)


@ours
def test_threads_receive_from_one_sender(ranks: Ranks, backend: Backend) -> None:
    ranks(2, threads_with_messages, backend=backend)


@ours
def test_meshes_and_functional_collectives(ranks: Ranks, backend: Backend) -> None:
    ranks(4, meshes, backend=backend)


def errors_of_calls() -> list[str]:
    group, *others = (dist.new_group(backend=dist.get_backend(), timeout=timedelta(seconds=10)) for _ in range(4))
    errors = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2), op=_make_nccl_premul_sum(2.0), group=group),
        lambda: dist.all_gather([torch.ones(2) for _ in range(dist.get_world_size())], torch.ones(3), others[0]),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), group=others[1]),
        lambda: dist.all_reduce(torch.ones(2).to_sparse(), op=dist.ReduceOp.MAX, group=others[2]),
    ):
        with pytest.raises((ValueError, SyncError, RuntimeError)) as caught:
            call()
        errors.append(str(caught.value))
    return errors


@ours
def test_a_call_that_cannot_be_is_a_clear_error_and_no_wrong_result(ranks: Ranks, backend: Backend) -> None:
    for premul, gather, rows, sparse in ranks(2, errors_of_calls, backend=backend):
        assert "is not offered between CPUs" in premul
        assert "must have the same size, not 3 float32 and 2 float32" in gather
        assert "3 rows cannot be divided evenly among 2 ranks" in rows
        assert "sparse tensors can only be summed" in sparse


def asked_as_torch_asks_a_backend() -> None:
    """A group answers for its device, offers no optional feature, and batches messages."""
    group: Any = dist.group.WORLD
    assert group.get_backend(torch.device("cpu")) is group
    with pytest.raises(RuntimeError, match="No backend type"):
        group.get_backend(torch.device("meta"))
    assert not any(getattr(group, f"supports_{what}") for what in ("coalescing", "splitting", "window", "reconfigure"))
    peer, received = 1 - dist.get_rank(), torch.zeros(4)
    messages = [dist.P2POp(dist.isend, torch.full((4,), float(dist.get_rank())), peer)]
    for work in dist.batch_isend_irecv([*messages, dist.P2POp(dist.irecv, received, peer)]):
        work.wait()
    assert received.tolist() == [peer] * 4


@ours
def test_torch_finds_the_backend_of_a_group(ranks: Ranks, backend: Backend) -> None:
    ranks(2, asked_as_torch_asks_a_backend, backend=backend)


def on_another_device() -> None:
    dist.all_reduce(torch.ones(2, device="meta"))


@ours
def test_a_tensor_of_another_device_is_refused(ranks: Ranks, backend: Backend) -> None:
    with pytest.raises(RankError, match=r"meta|No backend type"):
        ranks(2, on_another_device, backend=backend)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_trace_names_each_collective_and_message_with_its_shapes(ranks: Ranks, backend: Backend) -> None:
    expected = [
        (f"{backend}:all_gather", [[2, 3]]),
        (f"{backend}:all_reduce", [[2, 3]]),
        (f"{backend}:all_reduce", [[4]]),
        (f"{backend}:recv", [[5]]),
        (f"{backend}:send", [[5]]),
    ]
    assert ranks(2, traced, backend=backend) == [expected, expected]


def traced() -> list[tuple[str, list[list[int]]]]:
    other = 1 - dist.get_rank()
    matrix = torch.ones(2, 3)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        dist.all_reduce(matrix)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        dist.all_gather([torch.empty(2, 3), torch.empty(2, 3)], matrix)
        sent = dist.isend(torch.ones(5), other)
        dist.recv(torch.empty(5), other)
        for pending in (work, sent):
            assert pending is not None
            pending.wait()
    dist.all_reduce(matrix)  # no profiler sees it
    return sorted(
        (event.name, event.input_shapes) for event in trace.events() or () if event.name.startswith(("shm:", "tcp:"))
    )
