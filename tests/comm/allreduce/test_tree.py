"""Tree all-reduce is exact, with equal bits on all ranks, in log2(ranks) steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.allreduce.tree import family, tree_all_reduce
from paceline.comm.backend import joined
from ranks import Backend, Ranks
from thread_ranks import Wires, in_threads


@settings(max_examples=40)
@given(
    size=st.integers(2, 8),
    numel=st.integers(0, 20),
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.uint8]),
    op=st.sampled_from(["sum", "max"]),
    turn=st.integers(0, 7),
)
def test_every_rank_gets_the_exact_result(size: int, numel: int, dtype: torch.dtype, op: str, turn: int) -> None:
    parts = torch.randint(0, 16, (size, numel), generator=torch.Generator().manual_seed(numel)).to(dtype)
    expected = parts.sum(0, dtype=dtype) if op == "sum" else parts.amax(0)

    def call(wires: Wires) -> Tensor:
        tensor = parts[wires.rank].clone()
        tree_all_reduce(wires, tensor, op, order=[(rank + turn) % size for rank in range(size)])  # type: ignore[arg-type]
        return tensor

    for result in in_threads(size, call):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("size", range(1, 17))
def test_every_place_has_one_parent_and_the_root_is_few_steps_away(size: int) -> None:
    for place in range(size):
        parent, children = family(place, size)
        assert all(family(child, size)[0] == place for child in children)
        assert (parent is None) == (place == 0)
        steps = 0
        while parent is not None:
            assert place in family(parent, size)[1]
            place, steps = parent, steps + 1
            parent = family(place, size)[0]
        assert steps <= (size - 1).bit_length()


def over_a_group() -> list[float]:
    """A sum that is rounded, on this rank."""
    with joined(deadline_s=30) as group:
        tensor = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank))
        tree_all_reduce(group, tensor)
        result: list[float] = tensor.tolist()
        return result


@pytest.mark.parametrize("backend", ["gloo", "shm", "tcp"])
def test_it_runs_over_every_transport_with_the_same_bits_on_every_rank(ranks: Ranks, backend: Backend) -> None:
    first, *others = ranks(3, over_a_group, backend=backend)
    assert others == [first, first]
    exact = sum(torch.randn(1000, generator=torch.Generator().manual_seed(rank)).double() for rank in range(3))
    assert torch.allclose(torch.tensor(first).double(), torch.as_tensor(exact), atol=1e-5)
