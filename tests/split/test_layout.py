"""Layouts of composed splits: the ranks' parts cover a tensor exactly once.

Boxes say where each part lies.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.split.layout import ShardLayout

Axis = tuple[int, int, tuple[int, ...] | None]  # dimension, parts, sections as multiples of the parts


def full_of(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def slices(layout: ShardLayout, ranks: int) -> list[ShardLayout]:
    """As FSDP2 divides dimension 0: equal chunks, the last ones smaller or empty."""
    rows = layout.shape[0]
    size = -(-rows // ranks)
    return [layout.narrow(0, min(r * size, rows), min((r + 1) * size, rows)) for r in range(ranks)]


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    tp=st.integers(1, 3),
    fsdp=st.integers(1, 4),
    fused=st.booleans(),
    dim=st.integers(0, 1),
)
def test_all_parts_together_hold_every_element_once(
    rows: int, columns: int, tp: int, fsdp: int, fused: bool, dim: int
) -> None:
    """Tensor parallel on either dimension, a fused matrix by its sections, then fully sharded."""
    shape = [3 * tp * rows, 2 * tp * columns]
    sections = (tp * rows, 2 * tp * rows) if dim == 0 else (tp * columns, tp * columns)
    full, seen = full_of(tuple(shape)), []
    rebuilt = torch.full_like(full, -1)
    for part in range(tp):
        for own in slices(ShardLayout.whole(shape).divide(dim, part, tp, sections if fused else None), fsdp):
            taken = own.take(full)
            assert tuple(taken.shape) == own.shape
            own.put(taken, rebuilt)
            seen += taken.flatten().tolist()
            for box in own.boxes():
                assert torch.equal(box.of(taken), box.within(full))
    assert sorted(seen) == list(range(full.numel()))
    assert torch.equal(rebuilt, full)


@given(st.lists(st.integers(0, 3), max_size=3))
def test_a_whole_tensor_is_one_box_and_an_empty_one_none(shape: list[int]) -> None:
    layout = ShardLayout.whole(shape)
    assert layout.is_whole
    assert [box.shape for box in layout.boxes()] == ([tuple(shape)] if layout.numel else [])
    assert torch.equal(layout.take(full_of(tuple(shape))), full_of(tuple(shape)))


def test_a_fused_matrix_gives_each_rank_its_rows_of_every_section() -> None:
    """Query, key and value of two heads each: rank 1 has the second head of all three."""
    own = ShardLayout.whole((12, 2)).divide(0, 1, 2, (4, 4, 4))
    assert own.kept[0] == ((2, 4), (6, 8), (10, 12))
    assert own.take(full_of((12, 2)))[:, 0].tolist() == [4, 6, 12, 14, 20, 22]


def test_experts_and_columns_divide_different_dimensions_of_one_tensor() -> None:
    parts = [ShardLayout.whole((4, 6)).divide(0, e, 2).divide(1, t, 3) for e, t in product(range(2), range(3))]
    assert sorted(x for part in parts for x in part.take(full_of((4, 6))).flatten().tolist()) == list(range(24))


def test_what_cannot_be_divided_says_why() -> None:
    with pytest.raises(ValueError, match="6 is not a multiple of 4"):
        ShardLayout.whole((6, 2)).divide(0, 0, 4)
    with pytest.raises(ValueError, match="the sections sum to 4, not to 6"):
        ShardLayout.whole((6, 2)).divide(0, 0, 2, (2, 2))
    with pytest.raises(ValueError, match=r"shape \(2, 6\), not \(6, 2\)"):
        ShardLayout.whole((6, 2)).take(torch.zeros(2, 6))
