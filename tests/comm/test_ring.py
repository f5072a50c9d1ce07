"""Ring all-reduce is exact, sends the least possible, and shows its steps in a trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.backend import joined
from paceline.comm.group import Messages
from paceline.comm.ring import CHUNK_BYTES, ring_all_reduce
from paceline.errors import SyncError
from ranks import Backend, RankError, Ranks
from thread_ranks import Arrival, Wires, in_threads

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def whole_numbers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sums over up to eight ranks every dtype holds exactly."""
    return torch.randint(0, 16, (numel,), generator=torch.Generator().manual_seed(1000 * numel + rank)).to(dtype)


@settings(max_examples=60)
@given(
    size=st.integers(2, 8),
    numel=st.integers(0, 200),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "max"]),
    chunk=st.integers(1, 64),
    turn=st.integers(0, 7),
)
def test_every_rank_gets_the_exact_result(
    size: int, numel: int, dtype: torch.dtype, op: str, chunk: int, turn: int
) -> None:
    parts = torch.stack([whole_numbers(rank, numel, dtype) for rank in range(size)])
    expected = parts.sum(0, dtype=dtype) if op == "sum" else parts.amax(0)
    order = [(rank + turn) % size for rank in range(size)]

    def call(wires: Wires) -> Tensor:
        tensor = parts[wires.rank].clone()
        ring_all_reduce(wires, tensor, op, order=order, chunk_bytes=chunk * tensor.element_size())  # type: ignore[arg-type]
        return tensor

    for result in in_threads(size, call):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_that_are_rounded_have_the_same_bits_on_every_rank(size: int) -> None:
    def call(wires: Wires) -> Tensor:
        tensor = torch.randn(10_001, generator=torch.Generator().manual_seed(wires.rank))
        ring_all_reduce(wires, tensor, chunk_bytes=4096)
        return tensor

    first, *others = in_threads(size, call)
    exact = sum(torch.randn(10_001, generator=torch.Generator().manual_seed(rank)).double() for rank in range(size))
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first.double(), torch.as_tensor(exact), atol=1e-5)


def test_every_rank_sends_the_least_that_is_possible() -> None:
    def call(wires: Wires) -> int:
        ring_all_reduce(wires, torch.ones(1200))
        return wires.sent_bytes

    assert in_threads(4, call) == [2 * 3 * 1200] * 4, "2 (n - 1) / n of 4800 bytes"


def test_every_element_is_prepared_once_before_it_is_read_and_handed_on_once_when_it_is_final() -> None:
    def call(wires: Wires) -> tuple[Tensor, Tensor]:
        tensor, given_on = torch.zeros(1000, dtype=torch.int64), torch.zeros(1000, dtype=torch.int64)

        def prepare(start: int, end: int) -> None:
            tensor[start:end] += 1

        def finish(start: int, end: int) -> None:
            given_on[start:end] += tensor[start:end]

        ring_all_reduce(wires, tensor, prepare=prepare, finish=finish, chunk_bytes=8 * 17)
        return tensor, given_on

    for tensor, given_on in in_threads(3, call):
        assert tensor.tolist() == given_on.tolist() == [3] * 1000


def test_pieces_follow_each_other_before_the_first_has_arrived() -> None:
    started: list[int] = []

    class Watched(Wires):
        def start_exchange(self, send: Messages, receive: Messages) -> Arrival:
            started.append(1)
            return Counted(self, receive)

    class Counted(Arrival):
        def wait(self) -> None:
            started.append(-1)

    ring_all_reduce(Watched(0, 2, {}), torch.zeros(8 * CHUNK_BYTES // 4))
    under_way = [sum(started[: i + 1]) for i in range(len(started))]
    assert max(under_way) == 4
    assert min(under_way[3:-4]) == 3, "another one starts whenever one ends"


def over_a_group() -> dict[str, object]:
    """Sums over real ranks, and the titles of a trace."""
    with joined(deadline_s=30) as group:
        sums = []
        for numel, dtype in (
            (0, torch.float32),
            (1, torch.int64),
            (3, torch.bfloat16),
            (1_000_003, torch.float32),
            (5, torch.float64),
        ):
            tensor = torch.full((numel,), group.rank + 1, dtype=dtype)
            ring_all_reduce(group, tensor)
            sums.append(sorted(set(tensor.tolist())))
        before = group.sent_bytes
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ring_all_reduce(group, torch.zeros(3_000_000))
        titles = [
            event.name
            for event in sorted(profile.events(), key=lambda e: e.time_range.start)
            if event.name.startswith("ring ")
        ]
        return {"sums": sums, "titles": titles, "sent": group.sent_bytes - before}


@pytest.mark.parametrize("backend", ["gloo", "shm", "tcp"])
def test_it_runs_over_every_transport_and_each_step_is_in_the_trace(ranks: Ranks, backend: Backend) -> None:
    for rank, result in enumerate(ranks(3, over_a_group, backend=backend)):
        assert result["sums"] == [[], [6], [6], [6], [6]]
        assert result["sent"] == 2 * 2 * 4_000_000
        following = (rank + 1) % 3
        assert result["titles"] == [
            f"ring {phase} step {step} of 2: {rank} → {following}, 4 MB"
            for phase in ("reduce-scatter", "all-gather")
            for step in (1, 2)
        ]


def killed_inside(folder: str) -> None:
    """Rank 1 ends in the middle; what the others say goes to files, as the launch fails."""
    with joined(deadline_s=10) as group:
        tensor = torch.zeros(4_000_000)

        def end(start: int, _: int) -> None:
            if group.rank == 1 and start > 1_000_000:
                os._exit(0)

        try:
            ring_all_reduce(group, tensor, prepare=end)
        except SyncError as error:
            Path(folder, f"error-{group.rank}").write_text(str(error))


@pytest.mark.parametrize("backend", ["gloo", "shm", "tcp"])
def test_a_rank_that_dies_inside_is_an_error_and_no_hang(ranks: Ranks, backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 .*ended with exit code \d"):
        ranks(3, killed_inside, str(tmp_path), backend=backend, deadline_s=40)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["error-0", "error-2"]
    assert all(file.read_text() for file in tmp_path.iterdir())
