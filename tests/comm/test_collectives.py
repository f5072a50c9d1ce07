"""Collectives over shared memory and over TCP give what a plain computation gives.

On all ranks the same bits: any type, size, layout, group.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.shm.collectives import _CACHED_BYTES, CHUNK_BYTES, SMALL_BYTES
from paceline.errors import SyncError
from ranks import Backend, Ranks

Expected = list[Tensor]
Started = tuple[Any, list[Tensor], Expected]  # the handle, the tensors that it writes to, and what they should hold

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
OPS = ("sum", "min", "max", "product", "avg", "band", "bor", "bxor")
ARENA_BYTES = 6 * CHUNK_BYTES
ours = pytest.mark.parametrize("backend", ["shm", "tcp"])


@dataclass(frozen=True)
class Case:
    """One call. All ranks know the values of all, so each can compute the result for itself."""

    call: str
    dtype: torch.dtype
    numel: int
    op: str
    root: int
    layout: str
    group: int
    later: bool  # waited for at the end, in another order on every rank
    seed: int


# What the tensors hold, and how they lie in memory


def values(case: Case, rank: int, part: int = 0, numel: int | None = None) -> Tensor:
    """Whole numbers so small that every sum and product of four is exact in 8-bit floating point."""
    generator = np.random.default_rng(case.seed * 1000 + rank * 10 + part)
    size = case.numel if numel is None else numel
    low = 0 if case.dtype in (torch.bool, torch.uint8) else -1
    found = torch.from_numpy(generator.integers(low, 3, size, dtype=np.int8))
    if case.dtype.is_complex:
        imaginary = torch.from_numpy(generator.integers(low, 3, size, dtype=np.int8))
        return torch.complex(found.double(), imaginary.double()).to(case.dtype)
    return found.to(torch.float32).to(case.dtype) if case.dtype.is_floating_point else found.to(case.dtype)


def laid_out(flat: Tensor, layout: str, memory: Memory) -> Tensor:
    """A tensor with these values; `flat` may be viewed as its shape."""
    columns = next(c for c in (3, 2, 1) if len(flat) % c == 0)
    rows = len(flat) // columns
    if layout == "strided":
        target = torch.zeros(2 * len(flat), dtype=flat.dtype)[::2]
    elif layout == "odd offset":
        target = torch.zeros(len(flat) + 1, dtype=flat.dtype)[1:]
    elif layout == "transposed":
        target = torch.zeros(columns, rows, dtype=flat.dtype).t()
    elif layout == "channels-last":
        target = torch.zeros(1, rows, columns, 1, dtype=flat.dtype).permute(0, 2, 1, 3)
    elif layout.startswith("arena"):
        target = memory.take(len(flat), flat.dtype, layout)
    else:
        target = torch.zeros(len(flat), dtype=flat.dtype)
    target.copy_(flat.view(target.shape))
    return target


class Memory:
    """Tensors in memory of the transport, if it has some.

    They are at the same place on all ranks, at another on each, or with gaps.
    """

    def __init__(self) -> None:
        arena = of_the_transport(ARENA_BYTES, torch.uint8)
        self.arena, self.rank = torch.zeros(ARENA_BYTES, dtype=torch.uint8) if arena is None else arena, dist.get_rank()
        self.used = self.kept = 0  # bytes; the first `kept` belong to calls that are still under way

    def take(self, numel: int, dtype: torch.dtype, layout: str) -> Tensor:
        stride = 2 if layout == "arena with gaps" else 1
        nbytes = (numel * stride + 8) * dtype.itemsize
        start = self.used + (self.rank * dtype.itemsize if layout == "arena, shifted" else 0)
        self.used += -(-nbytes // 64) * 64
        if self.used > ARENA_BYTES:
            return torch.zeros(numel * stride, dtype=dtype)[::stride]
        return self.arena[start : start + numel * stride * dtype.itemsize].view(dtype)[::stride]


def of_the_transport(numel: int, dtype: torch.dtype) -> Tensor | None:
    """A tensor in shared memory; None over TCP."""
    group: Any = dist.group.WORLD
    shared: Tensor | None = group.transport.empty(numel, dtype)
    assert (shared is not None) == (dist.get_backend() == "shm")
    return shared


def combined(op: str, parts: Sequence[Tensor]) -> Tensor:
    """The plain computation."""
    dtype = parts[0].dtype
    wide = torch.stack([part.to(torch.complex128 if dtype.is_complex else torch.float64) for part in parts])
    if op in ("band", "bor", "bxor"):
        total = parts[0]
        for part in parts[1:]:
            total = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op](total, part)
        return total
    if op in ("min", "max"):
        return (wide.amin(0) if op == "min" else wide.amax(0)).to(dtype)
    total = wide.prod(0) if op == "product" else wide.sum(0)
    if op == "avg":
        total = total / len(parts)
        total = total if dtype.is_floating_point or dtype.is_complex else total.trunc()
    if dtype == torch.uint8:
        total = total.to(torch.int64)
    return total.to(torch.float32).to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else total.to(dtype)


def possible_op(case: Case) -> str:
    """The case's operation where the type has it."""
    if case.dtype.is_complex:
        return "avg" if case.op == "avg" else "sum"
    if case.op in ("band", "bor", "bxor") and case.dtype.is_floating_point:
        return "sum"
    return "sum" if case.op == "avg" and case.dtype == torch.bool else case.op


# The calls: each starts one


class Caller:
    """Starts the calls of one rank."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups, self.memory = groups, Memory()

    def start(self, case: Case) -> Started | None:
        """None where this rank is not in the case's group."""
        self.group = self.groups[case.group % len(self.groups)]
        if self.group is None or self.group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.case, self.root, self.op = case, case.root % self.size, possible_op(case)
        self.reduce_op = {"product": ReduceOp.PRODUCT}.get(self.op, getattr(ReduceOp, self.op.upper()))
        self.memory.used = self.memory.kept
        started: Started = getattr(self, case.call)()
        if case.later:
            self.memory.kept = self.memory.used
        return started

    def of(self, member: int, part: int = 0, numel: int | None = None) -> Tensor:
        return values(self.case, self.ranks[member], part, numel)

    def tensor(self, flat: Tensor) -> Tensor:
        return laid_out(flat, self.case.layout, self.memory)

    def blank(self, numel: int | None = None) -> Tensor:
        return self.tensor(torch.zeros(self.case.numel if numel is None else numel, dtype=self.case.dtype))

    def everybody(self, part: int = 0) -> list[Tensor]:
        return [self.of(member, part) for member in range(self.size)]

    def all_reduce(self) -> Started:
        tensor = self.tensor(self.of(self.rank))
        work = dist.all_reduce(tensor, self.reduce_op, self.group, async_op=True)
        return work, [tensor], [combined(self.op, self.everybody())]

    def reduce(self) -> Started:
        tensor = self.tensor(self.of(self.rank))
        work = dist.reduce(tensor, op=self.reduce_op, group=self.group, async_op=True, group_dst=self.root)
        return work, [tensor], [combined(self.op, self.everybody()) if self.rank == self.root else self.of(self.rank)]

    def broadcast(self) -> Started:
        tensor = self.tensor(self.of(self.rank))
        return (
            dist.broadcast(tensor, group=self.group, async_op=True, group_src=self.root),
            [tensor],
            [self.of(self.root)],
        )

    def all_gather(self) -> Started:
        outputs = [self.blank() for _ in self.ranks]
        return (
            dist.all_gather(outputs, self.tensor(self.of(self.rank)), self.group, async_op=True),
            outputs,
            self.everybody(),
        )

    def all_gather_into_tensor(self) -> Started:
        output = self.blank(self.size * self.case.numel)
        work = dist.all_gather_into_tensor(output, self.tensor(self.of(self.rank)), self.group, async_op=True)
        return work, [output], [torch.cat(self.everybody())]

    def gather(self) -> Started:
        outputs = [self.blank() for _ in self.ranks] if self.rank == self.root else None
        tensor = self.tensor(self.of(self.rank))
        work = dist.gather(tensor, outputs, group=self.group, async_op=True, group_dst=self.root)
        return work, outputs or [], self.everybody() if outputs else []

    def scatter(self) -> Started:
        output = self.blank()
        sources = (
            [self.tensor(self.of(self.root, part)) for part in range(self.size)] if self.rank == self.root else None
        )
        work = dist.scatter(output, sources, group=self.group, async_op=True, group_src=self.root)
        return work, [output], [self.of(self.root, self.rank)]

    def reduce_scatter(self) -> Started:
        output, sources = self.blank(), [self.tensor(self.of(self.rank, part)) for part in range(self.size)]
        work = dist.reduce_scatter(output, sources, self.reduce_op, self.group, async_op=True)
        return work, [output], [combined(self.op, self.everybody(self.rank))]

    def reduce_scatter_tensor(self) -> Started:
        output, source = self.blank(), self.tensor(torch.cat([self.of(self.rank, part) for part in range(self.size)]))
        work = dist.reduce_scatter_tensor(
            output.view(-1) if output.is_contiguous() else output, source, self.reduce_op, self.group, True
        )
        return work, [output], [combined(self.op, self.everybody(self.rank))]

    def all_to_all(self) -> Started:
        """Rank a sends rank b a tensor of its own size."""
        outputs = [self.blank(self._size(a, self.rank)) for a in range(self.size)]
        inputs = [self.tensor(self.of(self.rank, b, self._size(self.rank, b))) for b in range(self.size)]
        expected = [self.of(a, self.rank, self._size(a, self.rank)) for a in range(self.size)]
        return dist.all_to_all(outputs, inputs, self.group, async_op=True), outputs, expected

    def all_to_all_single(self) -> Started:
        sent = [self._size(self.rank, b) for b in range(self.size)]
        come = [self._size(a, self.rank) for a in range(self.size)]
        output = torch.zeros(sum(come), dtype=self.case.dtype)
        source = torch.cat([self.of(self.rank, b, n) for b, n in enumerate(sent)])
        work = dist.all_to_all_single(output, source, come, sent, self.group, async_op=True)
        return work, [output], [torch.cat([self.of(a, self.rank, n) for a, n in enumerate(come)])]

    def _size(self, sender: int, receiver: int) -> int:
        return max(0, self.case.numel - (sender + 2 * receiver) % 3)

    def barrier(self) -> Started:
        return dist.barrier(self.group, async_op=True), [], []


CALLS = sorted(
    name
    for name in vars(Caller)
    if not name.startswith("_") and name not in ("start", "of", "tensor", "blank", "everybody")
)


def run(cases: Sequence[Case]) -> None:
    """Make these calls; raises where a result is wrong."""
    size = dist.get_world_size()
    some = [
        dist.new_group(members, backend=dist.get_backend()) for members in (range(size - 1), [size - 1, 0], range(size))
    ]
    caller = Caller([dist.group.WORLD, *some])
    pending = []
    for case in cases:
        call = caller.start(case)
        if call is not None and case.later:
            pending.append((case, call))
        elif call is not None:
            call[0].wait()
            check(case, call)
    random.Random(dist.get_rank()).shuffle(pending)
    for case, call in pending:
        call[0].wait()
        check(case, call)


def check(case: Case, call: Started) -> None:
    wide = torch.complex128 if case.dtype.is_complex else torch.float64
    for found, expected in zip(*call[1:], strict=True):
        flat = found.reshape(-1).to(wide)
        assert torch.equal(flat, expected.to(wide)), f"{case}: {flat} instead of {expected}"


def numels(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """None, one, some, and just about where the way changes that they go."""
    borders = [
        b // dtype.itemsize for b in (SMALL_BYTES, _CACHED_BYTES, CHUNK_BYTES // 3, CHUNK_BYTES, 2 * CHUNK_BYTES)
    ]
    some = st.sampled_from([0, 1, 2, 3, 7, 64, 1000, 4099])
    return some | some | st.builds(int.__add__, st.sampled_from(borders), st.sampled_from([-1, 0, 1]))


LAYOUTS = (
    "contiguous",
    "strided",
    "odd offset",
    "transposed",
    "channels-last",
    "arena",
    "arena, shifted",
    "arena with gaps",
)
CASES = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st.builds(
        Case,
        call=st.sampled_from(CALLS),
        dtype=st.just(dtype),
        numel=numels(dtype),
        op=st.sampled_from(OPS),
        root=st.integers(0, 3),
        layout=st.sampled_from(LAYOUTS),
        group=st.integers(0, 3),
        later=st.booleans(),
        seed=st.integers(0, 10**6),
    )
)
ON_RANKS = settings(
    max_examples=2,  # of some dozens of calls each
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # a failure names its case; to shrink it would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example],
)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])  # 4 ranks have a group of 3
@ours
@ON_RANKS
@given(cases=st.lists(CASES, min_size=40, max_size=60))
def test_any_calls_after_each_other_and_at_once_give_the_plain_results(
    ranks: Ranks, size: int, backend: Backend, cases: list[Case]
) -> None:
    ranks(size, run, cases, backend=backend, deadline_s=60)


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)), 3])
@ours
def test_every_call_at_every_border(ranks: Ranks, size: int, backend: Backend) -> None:
    ranks(size, run, every_border(), backend=backend)


def every_border() -> list[Case]:
    sizes = (0, 1, 3, *(b // 4 + d for b in (SMALL_BYTES, CHUNK_BYTES) for d in (-1, 0, 1)), CHUNK_BYTES // 2 + 5)
    kinds = [(layout, numel) for numel in sizes for layout in ("contiguous", "strided", "arena")]
    kinds.append(("contiguous", 2**20 + 3))  # sent in many chunks
    return [
        Case(call, torch.float32, numel, "sum", i, layout, 0, later=False, seed=i)
        for call in CALLS
        for i, (layout, numel) in enumerate(kinds)
    ]


def random_sums(dtype: torch.dtype) -> str:
    """A digest of sums of any numbers, whose last bits depend on the order in which they are added."""
    digest = hashlib.sha256()
    for numel in (5, SMALL_BYTES, CHUNK_BYTES + 7):
        own = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
        shared = of_the_transport(numel, dtype)
        for tensor in (own.clone(), own.clone() if shared is None else shared.copy_(own)):
            dist.all_reduce(tensor)
            total = sum(
                torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype).double()
                for r in range(dist.get_world_size())
            )
            torch.testing.assert_close(
                tensor.double(), total, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
            )
            digest.update(bytes(tensor.view(torch.uint8).numpy()))
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])  # over TCP, two ranks exchange whole tensors; more ranks form a ring
@ours
def test_sums_have_the_same_bits_on_all_ranks(ranks: Ranks, size: int, dtype: torch.dtype, backend: Backend) -> None:
    assert len(set(ranks(size, random_sums, dtype, backend=backend))) == 1


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


@ours
def test_tensors_of_every_kind(ranks: Ranks, backend: Backend) -> None:
    ranks(3, strange_tensors, backend=backend)


ALL_REDUCE = "all_reduce sum of float32 x 4"
DIFFERENT = [
    (ALL_REDUCE, "all_reduce sum of float32 x 5"),
    (ALL_REDUCE, "all_reduce sum of float32 x 90000"),
    ("all_reduce sum of float32 x 1000000", "all_reduce sum of float32 x 1000001"),
    (ALL_REDUCE, "all_reduce sum of int32 x 4"),
    (ALL_REDUCE, "all_reduce max of float32 x 4"),
    (ALL_REDUCE, "broadcast of float32 x 4"),
    (ALL_REDUCE, "barrier"),
]


def different() -> list[list[str]]:
    """Errors of a rank that makes another call than the others, in every case in a new group, and of the next call."""
    errors = []
    for calls in DIFFERENT:
        group = dist.new_group(backend=dist.get_backend())
        what, *words = calls[dist.get_rank() % 2].split()
        op = ReduceOp.MAX if "max" in words else ReduceOp.SUM
        said = []
        for _ in range(2):
            try:
                if what == "barrier":
                    dist.barrier(group)
                elif what == "broadcast":
                    dist.broadcast(torch.zeros(4), 0, group)
                else:
                    dist.all_reduce(torch.zeros(int(words[-1]), dtype=getattr(torch, words[2])), op, group)
            except (SyncError, RuntimeError) as error:
                said.append(str(error))
        errors.append(said)
    return errors


@ours
def test_calls_that_differ_are_both_named_and_end_the_group(ranks: Ranks, backend: Backend) -> None:
    for of_rank in ranks(2, different, backend=backend):
        for calls, said in zip(DIFFERENT, of_rank, strict=True):
            # over TCP a rank that has done its part hears of it with its next call
            assert "the ranks made different calls: rank " in said[0]
            assert all(word in said[0] for call in calls for word in call.replace("broadcast of", "broadcast").split())
            assert (
                "this group cannot be used any more, because of an earlier error: the ranks made different calls"
                in said[-1]
            )


def different_messages() -> str:
    group = dist.new_group(backend="tcp")

    def talk() -> None:
        dist.send(torch.zeros(5), 1, group) if dist.get_rank() == 0 else dist.recv(torch.zeros(6), 0, group)
        dist.barrier(group)

    with pytest.raises((SyncError, RuntimeError)) as caught:
        talk()
    return str(caught.value)


def test_over_tcp_messages_that_differ_end_the_group(ranks: Ranks) -> None:
    for error in ranks(2, different_messages, backend="tcp"):
        assert "message of float32 x 5" in error
        assert "message of float32 x 6" in error


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
