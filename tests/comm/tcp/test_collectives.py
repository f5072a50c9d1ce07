"""Collectives over TCP give what gloo gives, with the same bits on every rank.

Small and large tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.tcp import TcpProcessGroup
from paceline.comm.tcp.process_group import _SMALL_BYTES
from paceline.errors import SyncError
from ranks import Ranks

# elements: to all at once; round the ring; in many pieces
SIZES = [0, 1, 5, 1000, _SMALL_BYTES // 4 + 1, 2**20 + 3]
Use = Callable[[dist.ProcessGroup, Tensor], list[Tensor]]


def numbers(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of this rank; whole, and so small that sums in any order have the same bits."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(-8, 9, (size,), generator=generator).to(dtype)


def all_reduce(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(result := own.clone(), op, group=group)
        results.append(result)
    return results


def reduce(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    dist.reduce(result := own.clone(), 1, group=group)
    return [result] if dist.get_rank() == 1 else []


def broadcast(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    dist.broadcast(result := own.clone(), 1, group=group)
    return [result]


def all_gather(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    results = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(results, own, group=group)
    dist.all_gather_into_tensor(flat := own.new_empty(len(own) * len(results)), own, group=group)
    return [*results, flat]


def gather(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    results = [torch.empty_like(own) for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    dist.gather(own, results, 1, group=group)
    return results or []


def scatter(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    parts = [own + r for r in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    dist.scatter(result := torch.empty_like(own), parts, 1, group=group)
    return [result]


def reduce_scatter(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    results = [torch.empty_like(own), torch.empty_like(own)]
    dist.reduce_scatter(results[0], [own + r for r in range(dist.get_world_size())], group=group)
    dist.reduce_scatter_tensor(results[1], own.repeat(dist.get_world_size()), group=group)
    return results


def all_to_all(group: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    results = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_to_all(results, [own + r for r in range(dist.get_world_size())], group=group)
    return results


USES: tuple[Use, ...] = (all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all)


def as_gloo() -> None:
    assert isinstance(dist.group.WORLD, TcpProcessGroup)
    gloo = dist.new_group(backend="gloo")
    types = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    for use, dtype in itertools.product(USES, types):
        for size in SIZES if dtype is torch.float32 else (1, SIZES[-2]):
            if dtype is torch.bfloat16 and use in (reduce, reduce_scatter):
                continue  # gloo has it not
            own = numbers(size, dtype)
            ours, theirs = use(dist.group.WORLD, own), use(gloo, own)
            for result, expected in zip(ours, theirs, strict=True):
                assert torch.equal(result, expected), (use.__name__, dtype, size)
            assert torch.equal(own, numbers(size, dtype)), "what was given to be sent is as it was"
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_gives_what_gloo_gives(ranks: Ranks, size: int) -> None:
    ranks(size, as_gloo, backend="tcp")


def rounded_sums() -> list[list[int]]:
    """Sums of numbers that are rounded, as whole numbers that have their bits."""
    found = []
    for size in SIZES[1:]:
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
            tensor = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            found.append([size, int(tensor.view(bits).to(torch.int64).mul(torch.arange(1, size + 1)).sum())])
    return found


def test_all_ranks_have_the_same_bits(ranks: Ranks) -> None:
    results = ranks(4, rounded_sums, backend="tcp")
    assert all(result == results[0] for result in results)


def strange_tensors() -> None:
    """With gaps, of eight bits, empty, complex, sparse, and of other sizes for each pair of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wide = torch.full((1000, 60), float(rank))
    dist.all_reduce(wide[:, ::2])
    assert (wide[:, ::2] == sum(range(size))).all()
    assert (wide[:, 1::2] == rank).all()
    small = torch.full((100_000,), 2.0).to(torch.float8_e5m2)
    dist.all_reduce(small, dist.ReduceOp.AVG)
    assert (small.float() == 2).all()
    turning = torch.full((5,), 1 + rank * 1j)
    dist.all_reduce(turning)
    assert (turning == size + sum(range(size)) * 1j).all()
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, size]]), torch.tensor([1.0, 1.0]), (size + 1,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size + [size]
    counts = [(rank + r) % 3 for r in range(size)]
    received = torch.empty(sum(counts))
    dist.all_to_all_single(received, torch.full((sum(counts),), float(rank)), counts, counts)
    assert received.tolist() == [float(r) for r in range(size) for _ in range(counts[r])]


def test_tensors_of_every_kind(ranks: Ranks) -> None:
    ranks(3, strange_tensors, backend="tcp")


def different(case: str) -> str:
    """What a rank hears when the two of a new group make calls that differ."""
    rank, group = dist.get_rank(), dist.new_group(backend="tcp")
    try:
        if case == "size":
            dist.all_reduce(torch.zeros(10 if rank == 0 else 12), group=group)
        elif case == "size of a large one":
            dist.all_reduce(torch.zeros(1_000_000 + rank), group=group)
        elif case == "type":
            dist.all_reduce(torch.zeros(10, dtype=torch.float32 if rank == 0 else torch.float64), group=group)
        elif case == "operation":
            dist.all_reduce(torch.zeros(10), dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX, group)
        elif case == "call":
            dist.barrier(group) if rank == 0 else dist.all_reduce(torch.zeros(10), group=group)
        elif case == "message":
            dist.send(torch.zeros(5), 1, group) if rank == 0 else dist.recv(torch.zeros(6), 0, group)
            dist.barrier(group)
    except (SyncError, RuntimeError) as error:
        with pytest.raises(
            RuntimeError, match="this group cannot be used any more, since: the ranks made different calls"
        ):
            dist.barrier(group)
        # it had done its part, and heard of it later
        return str(error).removeprefix("this group cannot be used any more, since: ")
    return "no error"


DIFFERENT = {
    "size": ("all_reduce sum of float32 x 10", "all_reduce sum of float32 x 12"),
    "size of a large one": ("all_reduce sum of float32 x 1000000", "all_reduce sum of float32 x 1000001"),
    "type": ("all_reduce sum of float32 x 10", "all_reduce sum of float64 x 10"),
    "operation": ("all_reduce sum of float32 x 10", "all_reduce max of float32 x 10"),
    "call": ("barrier", "all_reduce sum of float32 x 10"),
    "message": ("message of float32 x 5", "message of float32 x 6"),
}


def all_that_differ() -> list[str]:
    return [different(case) for case in DIFFERENT]


def test_calls_that_differ_are_named_by_both_ranks(ranks: Ranks) -> None:
    for errors in ranks(2, all_that_differ, backend="tcp"):
        for error, calls in zip(errors, DIFFERENT.values(), strict=True):
            assert error.startswith("the ranks made different calls: rank ")
            for rank, call in enumerate(calls):
                said = error.split(f"rank {rank} (host ")[1].split(", rank")[0]
                assert f", 127.0.0.1) {call}" in said, error


def one_of_four_differs() -> str:
    try:
        dist.all_reduce(torch.zeros(500_000 + (dist.get_rank() == 2)))
        dist.barrier()
    except SyncError as error:
        return str(error)
    return "no error"


def test_ranks_that_do_not_talk_to_the_odd_one_are_told(ranks: Ranks) -> None:
    for error in ranks(4, one_of_four_differs, backend="tcp"):
        assert "all_reduce sum of float32 x 500000" in error
        assert "all_reduce sum of float32 x 500001" in error
