"""`simccl` over real ranks: every collective, what it does not forgive, and how it fails."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paceline.comm.positions import own_position
from paceline.split.fsdp import FullySharded
from paceline.split.layout import whole_parts
from ranks import RankError
from simulated import recorder
from simulated.environment import Order, Simulated


@pytest.mark.parametrize("order", ["late", "random", "eager"])
def test_every_collective_gives_what_torch_says(simulated: Simulated, order: Order) -> None:
    assert simulated.ranks(2, wrong_collectives, order=order, seed=7) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["gloo", "tcp"])
def test_collectives_go_over_other_groups_too(simulated: Simulated, inner: str) -> None:
    assert simulated.ranks(3, wrong_collectives, inner=inner) == [[], [], []]


def test_a_collective_is_asynchronous_and_hides_its_result_until_waited_for(simulated: Simulated) -> None:
    simulated.ranks(2, asynchronous, delay_ms="300")


def test_a_collective_ends_though_its_host_never_waits(simulated: Simulated) -> None:
    simulated.ranks(2, host_of_rank_0_does_not_wait)


def test_tensors_that_nccl_does_not_take_are_refused(simulated: Simulated) -> None:
    simulated.ranks(2, refused_tensors)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["late", "random", "eager"])
def test_many_collectives_of_several_groups_on_several_streams_stay_right(simulated: Simulated, order: Order) -> None:
    assert simulated.ranks(4, wrong_rounds, 60, order=order, seed=3, deadline_s=100) == [[]] * 4


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("other collective", ["broadcast from rank 0", "all_reduce"]),
        ("other size", ["all_reduce (SUM) 4 float32", "all_reduce (SUM) 5 float32"]),
        ("other dtype", ["4 float32", "4 float64"]),
        ("other reduction", ["all_reduce (SUM)", "all_reduce (MAX)"]),
        ("other message", ["sent 4 elements of torch.float32", "5 of torch.float32"]),
    ],
)
def test_ranks_that_do_different_things_are_told_so(simulated: Simulated, mistake: str, words: list[str]) -> None:
    texts = simulated.ranks(2, text_of_mistake, mistake)
    assert all(word in texts[1] for word in words), texts
    assert all(word in texts[0] for word in words) or mistake == "other message", texts


def test_a_collective_that_failed_is_the_one_that_its_rank_waits_for(simulated: Simulated) -> None:
    assert simulated.ranks(2, number_awaited_after_a_mistake) == [2, 2]


def test_gathers_of_sharded_layers_have_their_names_in_the_flight_recorder(simulated: Simulated) -> None:
    assert simulated.ranks(2, layers_of_gathers, deadline_s=100) == [["0", "1"]] * 2


def test_a_rank_that_does_not_come_is_named(simulated: Simulated) -> None:
    texts = simulated.ranks(2, text_of_absence, times_out="1:2")
    assert "rank 1" in texts[0], texts
    assert "told not to come" in texts[1], texts


def test_a_rank_whose_device_is_lost_is_named(simulated: Simulated) -> None:
    with pytest.raises(RankError, match="Xid 79"):
        simulated.ranks(2, sums_for_ever, fault="lost:1:40")


def test_a_slow_link_slows(simulated: Simulated) -> None:
    assert all(took_s >= 0.4 for took_s in simulated.ranks(2, time_of_a_sum, link="1:400"))


def wrong_collectives() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("sim", rank)
    total = size * (size + 1) / 2

    def own(*shape: int) -> Tensor:
        return torch.full(shape or (4,), rank + 1.0, device=device)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    def into(output: Any, collective: Callable[..., object], *args: Any, **more: Any) -> Any:
        """The output, or the first elements of a list of outputs, after a collective."""
        collective(output, *args, **more)
        return torch.stack(output)[:, 0] if isinstance(output, list) else output

    def gathered_in_place() -> Any:
        whole = empty(size * 2)
        mine = whole[rank * 2 : rank * 2 + 2].fill_(rank + 1.0)
        return into(whole, dist.all_gather_into_tensor, mine)[::2]

    def to_all() -> Any:
        return into([empty(2) for _ in everyone], dist.all_to_all, [own(2) for _ in everyone])

    def to_root() -> Any:
        found = into(own(), dist.reduce, 0)
        return found if rank == 0 else torch.tensor([total] * 4)

    def gathered_at_root() -> Tensor:
        parts = [empty(4) for _ in range(size)] if rank == 0 else None
        dist.gather(own(), parts, 0)
        return torch.stack(parts)[:, 0] if parts else torch.tensor(everyone)

    def dealt() -> Any:
        given = [torch.full((4,), 3.0 + r, device=device) for r in range(size)] if rank == 0 else None
        return into(empty(4), dist.scatter, given, 0) - rank

    def ring() -> Tensor:
        out = empty(4)
        messages = [dist.P2POp(dist.isend, own(), (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return out

    def in_a_subgroup() -> Any:
        group = dist.new_group([0, 1])
        return into(own(), dist.all_reduce, group=group) if rank < 2 else own() * 0 + 3

    def of_objects() -> Tensor:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, {"rank": rank})
        return torch.tensor([float(entry["rank"]) for entry in found])

    def by_a_future() -> Tensor:
        work = dist.all_reduce(own(), async_op=True)
        assert work is not None
        result: Tensor = work.get_future().then(lambda done: done.value()[0] * 2).wait()
        return result

    def functional() -> Tensor:
        import torch.distributed._functional_collectives as functional_collectives

        assert dist.group.WORLD is not None
        result: Tensor = functional_collectives.all_reduce(own(), "sum", dist.group.WORLD) + 0
        return result

    everyone = [float(r + 1) for r in range(size)]
    op = dist.ReduceOp
    expected: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
        "sum": (lambda: into(own(), dist.all_reduce), [total] * 4),
        "mean": (lambda: into(own(), dist.all_reduce, op=op.AVG), [total / size] * 4),
        "max": (lambda: into(own(), dist.all_reduce, op=op.MAX), [float(size)] * 4),
        "all_gather": (lambda: into([empty(4) for _ in everyone], dist.all_gather, own()), everyone),
        "all_gather in place": (gathered_in_place, everyone),
        "reduce_scatter": (lambda: into(empty(2), dist.reduce_scatter_tensor, own(2 * size)), [total] * 2),
        "broadcast": (lambda: into(own(), dist.broadcast, size - 1), [float(size)] * 4),
        "all_to_all_single": (lambda: into(empty(size), dist.all_to_all_single, own(size)), everyone),
        "all_to_all": (to_all, everyone),
        "reduce": (to_root, [total] * 4),
        "gather": (gathered_at_root, everyone),
        "scatter": (dealt, [3.0] * 4),
        "messages": (ring, [float((rank - 1) % size + 1)] * 4),
        "subgroup": (in_a_subgroup, [3.0] * 4),
        "objects": (of_objects, [float(r) for r in range(size)]),
        "future": (by_a_future, [2 * total] * 4),
        "functional": (functional, [total] * 4),
        "integers": (lambda: into(own(3).long(), dist.all_reduce).double(), [total] * 3),
    }
    wrong = []
    for name, (call, values) in expected.items():
        found = call().tolist()
        if found != values:
            wrong.append(f"{name}: {found}, not {values}")
    dist.barrier()
    return wrong


def asynchronous() -> None:
    rank = dist.get_rank()
    device = torch.device("sim", rank)

    tensor = torch.full((4,), rank + 1.0, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert not work.is_completed()
    early = tensor + 0
    assert early.isnan().all(), "read before `wait`"
    work.wait()
    assert tensor.tolist() == [3.0] * 4
    assert work.is_completed()

    # What is sent is read when it runs: the mistake is to overwrite it before `wait`.
    for waits in (False, True):
        sent, got = torch.full((4,), rank + 1.0, device=device), torch.empty(8, device=device)
        work = dist.all_gather_into_tensor(got, sent, async_op=True)
        if waits:
            work.wait()
        sent.fill_(9)
        torch.accelerator.current_stream().synchronize()
        work.wait()
        assert (got.tolist() == [1.0] * 4 + [2.0] * 4) is waits

    # Behind the current stream alone: what another stream computes has to be waited for.
    for waits in (False, True):
        side, tensor = torch.Stream(device), torch.zeros(4, device=device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            tensor.fill_(1)
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
        dist.all_reduce(tensor)
        assert (tensor.tolist() == [2.0] * 4) is waits


def host_of_rank_0_does_not_wait() -> None:
    rank = dist.get_rank()
    tensor = torch.ones(4, device=f"sim:{rank}")
    on_cpu = dist.new_group(backend="gloo")
    dist.all_reduce(tensor, async_op=True)
    if rank == 1:
        torch.accelerator.synchronize()
        assert tensor.tolist() == [2.0] * 4
    dist.barrier(on_cpu)


def refused_tensors() -> None:
    device = torch.device("sim", dist.get_rank())
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(3))
    with pytest.raises(ValueError, match="non-overlapping and dense"):
        dist.all_reduce(torch.ones(4, 4, device=device)[:, ::2])
    with pytest.raises(ValueError, match="non-overlapping and dense"):
        dist.all_reduce(torch.ones(3, device=device).to_sparse())


def wrong_rounds(rounds: int) -> list[int]:
    """Rounds with a wrong sum: rows and columns of a mesh of 2 by 2 ranks, each on a stream of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    device = torch.device("sim", rank)
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("row", "column"))
    side, wrong = torch.Stream(device), []
    for number in range(rounds):
        own = torch.full((64,), float(rank + number), device=device)
        by_row = own.clone()
        side.wait_stream(torch.accelerator.current_stream())
        own.record_stream(side)
        with side:
            by_column = own * 2
            first = dist.all_reduce(by_column, group=mesh.get_group("column"), async_op=True)
        second = dist.all_reduce(by_row, group=mesh.get_group("row"), async_op=True)
        messages = [
            dist.P2POp(dist.isend, torch.full((8,), float(number + rank), device=device), (rank + 1) % 4),
            dist.P2POp(dist.irecv, received := torch.empty(8, device=device), (rank - 1) % 4),
        ]
        assert first is not None
        assert second is not None
        for work in (first, second, *dist.batch_isend_irecv(messages)):
            work.wait()
        torch.accelerator.current_stream().wait_stream(side)
        sums = [by_row[0], by_column[63], received[7]]
        row, column = rank % 2 + (rank % 2 + 2), 2 * (rank // 2 * 4 + 1)
        expected = [row + 2.0 * number, column + 4.0 * number, number + float((rank - 1) % 4)]
        if number % 3 == 0 and torch.stack(sums).tolist() != expected:
            wrong.append(number)
    return wrong


def text_of_mistake(mistake: str) -> str:
    """The error that a rank gets when rank 1 does something else than rank 0."""
    rank = dist.get_rank()
    device = torch.device("sim", rank)
    size = 5 if rank and "size" in mistake else 4
    tensor = torch.ones(size, device=device, dtype=torch.float64 if rank and "dtype" in mistake else torch.float32)
    try:
        if mistake == "other collective" and rank:
            dist.broadcast(tensor, 0)
        elif mistake == "other message":
            dist.send(tensor, 1) if rank == 0 else dist.recv(torch.ones(5, device=device), 0)
        else:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX if rank and "reduction" in mistake else dist.ReduceOp.SUM)
        torch.accelerator.synchronize()
    except dist.DistBackendError as error:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(tensor) if mistake != "other message" else dist.recv(tensor, 0)
        return str(error)
    return "nothing"


def text_of_absence() -> str:
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    tensor = torch.ones(4, device=f"sim:{rank}")
    try:
        for _ in range(3):
            dist.all_reduce(tensor)
        torch.accelerator.synchronize()
    except dist.DistBackendError as error:
        time.sleep(3 if rank else 0)
        return str(error)
    return "nothing"


def sums_for_ever() -> None:
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    tensor = torch.ones(4, device=f"sim:{dist.get_rank()}")
    while True:
        dist.all_reduce(tensor.mul_(0.5))
        torch.accelerator.synchronize()


def time_of_a_sum() -> float:
    tensor = torch.ones(4, device=f"sim:{dist.get_rank()}")
    torch.accelerator.synchronize()
    begin = time.monotonic()
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    return time.monotonic() - begin


def number_awaited_after_a_mistake() -> int:
    device = torch.device("sim", dist.get_rank())
    dist.all_reduce(torch.ones(4, device=device))
    torch.accelerator.synchronize()
    for _ in range(2):  # no handle remains of the one that fails, and none can begin after it
        with suppress(dist.DistBackendError):
            dist.all_reduce(torch.ones(4 + dist.get_rank(), device=device))
            torch.accelerator.synchronize()
    [wait] = own_position().waits
    return wait.number


def layers_of_gathers() -> list[str]:
    """The names in the stacks of a sharded model's gathers; its first layer is in the unit of the model itself."""
    device = torch.device("sim", dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    mesh = init_device_mesh("sim", (2,))
    named, parts = dict(model.named_parameters()), whole_parts(model)
    FullySharded([model], [model[1]], named, parts, mesh, zero=3, precision="fp32", offload=False, pipelined=False)
    before = len(pickle.loads(recorder.dump())["entries"])
    model(torch.ones(2, 4, device=device))
    torch.accelerator.synchronize()
    entries = pickle.loads(recorder.dump())["entries"][before:]
    names = [[frame["name"] for frame in entry["frames"]] for entry in entries if "gather" in entry["profiling_name"]]
    return [name.removeprefix("layer ") for stack in names for name in stack if name.startswith("layer ")]
