"""Packing loses no token, fills sequences, and is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.corpus.packing import Packing

GROUPS = st.lists(st.lists(st.integers(0, 90), max_size=40), max_size=5)
CONTEXTS = st.integers(1, 33)


def packed(groups: Sequence[Sequence[int]], context: int, *, join: bool = True) -> Packing:
    return Packing.of([np.array(group, dtype=np.int64) for group in groups], context, join=join)


@given(GROUPS, CONTEXTS, st.booleans())
@settings(deadline=None)
def test_every_token_is_in_exactly_one_pack_and_no_pack_exceeds_the_context(
    groups: list[list[int]], context: int, join: bool
) -> None:
    packing = packed(groups, context, join=join)
    found = []
    for pack in range(len(packing)):
        pieces = packing.pieces(pack)
        assert 0 < sum(piece.length for piece in pieces) <= context
        assert join or len(pieces) == 1
        found += [(piece.document, piece.first + i) for piece in pieces for i in range(piece.length)]
    lengths = [length for group in groups for length in group]
    assert sorted(found) == [(document, i) for document, length in enumerate(lengths) for i in range(length)]
    assert packing.tokens == sum(lengths)


@given(GROUPS, CONTEXTS)
@settings(deadline=None)
def test_a_pack_holds_documents_of_one_group_in_order(groups: list[list[int]], context: int) -> None:
    packing, first = packed(groups, context), 0
    assert packing.groups[-1] == len(packing)
    for group, lengths in enumerate(groups):
        for pack in range(packing.groups[group], packing.groups[group + 1]):
            documents = [piece.document for piece in packing.pieces(pack)]
            assert first <= min(documents) <= max(documents) < first + len(lengths)
            assert documents == sorted(documents)
        first += len(lengths)


@given(st.lists(st.integers(1, 64), max_size=200), st.integers(1, 64))
@settings(deadline=None)
def test_as_many_packs_as_placing_one_piece_after_the_other(lengths: list[int], context: int) -> None:
    pieces = sorted((min(context, n - i) for n in lengths for i in range(0, n, context)), reverse=True)
    rooms: list[int] = []
    for piece in pieces:
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else context) - piece)
    assert len(packed([lengths], context)) == len(rooms)


def test_padding_of_documents_like_those_of_the_web_is_below_one_percent() -> None:
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 20_000).astype(np.int64) + 1
    packing = Packing.of([lengths], 2048, join=True)
    assert packing.padding_share < 0.01
    assert len(packing) <= 1.01 * -(-lengths.sum() // 2048)
    assert packed([lengths.tolist()], 2048, join=False).padding_share > 0.5


def test_documents_of_equal_length_fill_packs() -> None:
    packing = packed([[10] * 1000], 100)
    assert len(packing) == 100
    assert packing.padding_share == 0


@pytest.mark.parametrize("groups", [[], [[]], [[0, 0]]])
def test_nothing_to_pack_is_no_pack(groups: list[list[int]]) -> None:
    packing = packed(groups, 8)
    assert (len(packing), packing.tokens, packing.padding_share) == (0, 0, 0.0)


def test_a_saved_packing_is_the_same(tmp_path: Path) -> None:
    packing = packed([[3, 70, 5], [], [12, 1]], 16)
    packing.save(tmp_path / "packing")
    read = Packing.load(tmp_path / "packing")
    assert (len(read), read.context) == (len(packing), 16)
    assert read.groups.tolist() == packing.groups.tolist()
    assert [read.pieces(pack) for pack in range(len(read))] == [packing.pieces(pack) for pack in range(len(packing))]
