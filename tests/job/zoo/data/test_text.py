"""Text as bytes.

Every byte predicted at most once, nothing held out that was trained on, and masks that a resumed run repeats.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.job.data import DataSpec
from paceline.job.samples import DataSets
from paceline.job.zoo.arrays import IGNORED, MASK, Corpus, hide
from refusals import raises

LIBRARY = Path(sysconfig.get_path("stdlib"), "json")


def build(path: Any, seed: int = 0, **values: Any) -> DataSets:
    spec = TypeAdapter(DataSpec).validate_python({"kind": "text", "path": path, **values})
    sets: DataSets = spec.build(input_shape=None, seed=seed)
    return sets


def samples(dataset: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [dataset[i] for i in range(len(dataset))]


@given(
    sizes=st.lists(st.integers(0, 80), min_size=1, max_size=3),
    context=st.integers(1, 12),
    held_out=st.sampled_from([0.0, 0.1, 0.5]),
    limit=st.none() | st.integers(1, 20),
)
def test_every_byte_is_predicted_at_most_once_and_none_is_on_both_sides(
    sizes: list[int], context: int, held_out: float, limit: int | None
) -> None:
    everything = bytes(range(sum(sizes)))  # each byte is its own position
    with tempfile.TemporaryDirectory() as folder:
        starts = np.cumsum([0, *sizes])
        files = [Path(folder, f"{i}.txt") for i in range(len(sizes))]
        for file, start, size in zip(files, starts, sizes, strict=False):
            file.write_bytes(everything[start : start + size])
        try:
            train, kept, *_ = build([str(f) for f in files], context=context, held_out=held_out, limit=limit)
        except DataError:
            assert len(everything) < 4 * context + 2 or limit in (1, 2)
            return
    sides = [samples(side) for side in (train, kept) if side is not None]
    predicted = [int(p) for side in sides for _, target in side for p in target]
    touched = [{int(p) for x, y in side for p in (*x, *y)} for side in sides]
    assert len(predicted) == len(set(predicted))
    assert all(torch.equal(x + 1, y) for side in sides for x, y in side)
    assert (kept is None) == (held_out == 0)
    assert len(sides) == 1 or not touched[0] & touched[1]
    assert sum(map(len, sides)) <= (limit or 999)
    if limit is None:
        assert len(everything) - len(predicted) <= 2 * context + 2  # only ends shorter than a window are left over


def test_pythons_own_library_is_read_as_it_is() -> None:
    train, held_out, *_ = build(str(LIBRARY), context=64)
    text = b"".join(f.read_bytes() for f in sorted(LIBRARY.rglob("*.py")))
    inputs, target = train[5]
    assert bytes(inputs.tolist()) == text[5 * 64 : 6 * 64]
    assert bytes(target.tolist()) == text[5 * 64 + 1 : 6 * 64 + 1]
    assert inputs.dtype == target.dtype == torch.int64
    last = samples(held_out)[-1][1]
    assert text.endswith(bytes(last.tolist()))


def test_a_batch_holds_what_its_samples_hold() -> None:
    for objective in ("causal", "masked"):
        train: Any = build(str(LIBRARY), objective=objective).train
        inputs, target = train.__getitems__([9, 2, 4])
        for row, index in enumerate([9, 2, 4]):
            assert torch.equal(inputs[row], train[index][0])
            assert torch.equal(target[row], train[index][1])
        with pytest.raises(IndexError):
            train[len(train)]


def test_a_large_file_stays_on_disk_and_windows_run_across_its_ends(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "a.txt").write_bytes(b"start")
    with (tmp_path / "b.txt").open("wb") as file:
        file.write(b"<")
        file.seek(size - 1)
        file.write(b">")
    (tmp_path / "c.txt").write_bytes(b"end")
    corpus = Corpus([tmp_path / name for name in ("a.txt", "b.txt", "c.txt")])
    assert corpus.size == size + 8
    assert corpus.read(3, 4).tobytes() == b"rt<\0"
    assert corpus.read(size + 3, 5).tobytes() == b"\0>end"
    assert isinstance(corpus.read(10, 4), np.memmap)


def test_masking_hides_fifteen_percent_in_the_proportions_of_bert() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (2000, 100))
    inputs, target = hide(tokens, np.arange(2000, dtype=np.uint64))
    chosen = target != IGNORED
    assert (chosen.sum(axis=1) == 15).all()
    assert (target[chosen] == tokens[chosen]).all()
    assert (inputs[~chosen] == tokens[~chosen]).all()
    hidden = inputs[chosen]
    assert np.mean(hidden == MASK) == pytest.approx(0.8, abs=0.01)
    assert np.mean(hidden == target[chosen]) == pytest.approx(0.1 + 0.1 / 256, abs=0.01)
    random = hidden[(hidden != MASK) & (hidden != target[chosen])]
    assert len(np.unique(random)) == 256
    assert chosen.mean(axis=0) == pytest.approx(np.full(100, 0.15), abs=0.04)


def test_even_the_shortest_window_hides_a_byte() -> None:
    _, target = hide(np.arange(6).reshape(6, 1), np.arange(6, dtype=np.uint64))
    assert target.flatten().tolist() == list(range(6))


def test_the_mask_depends_on_seed_epoch_and_index_alone() -> None:
    train, again, other = (build(str(LIBRARY), seed=seed, objective="masked").train for seed in (3, 3, 4))
    for epoch in (0, 1, 2):
        for dataset in (train, again, other):
            dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        assert torch.equal(train[7][0], again[7][0])
        assert not torch.equal(train[7][0], other[7][0])
    later = train[7][1]
    train.set_epoch(0)  # type: ignore[attr-defined]
    assert not torch.equal(train[7][1], later)


def test_the_mask_is_the_same_on_every_machine_and_release() -> None:
    inputs, target = hide(np.full((1, 40), 65), np.array([42], dtype=np.uint64))
    assert np.flatnonzero(target[0] != IGNORED).tolist() == [4, 18, 21, 24, 36, 39]
    assert inputs[0, [4, 18, 21, 24, 36, 39]].tolist() == [256, 176, 65, 256, 256, 256]


def test_missing_empty_and_short_text_is_refused_by_name(tmp_path: Path) -> None:
    with raises(DataError, "data.unreadable", expected="a text file, or a folder of text files", place=tmp_path):
        build([str(LIBRARY), str(tmp_path / "gone")])
    with raises(DataError, "data.no_files", suffixes=".txt .md .rst .py", folder=tmp_path):
        build(str(tmp_path))
    (tmp_path / "short.txt").write_bytes(b"x" * 127)
    with raises(DataError, "data.text_too_short", context=127, needed=128, size=127):
        build(str(tmp_path), context=127)
    with raises(DataError, "data.nothing_left_to_train"):
        build(str(tmp_path), context=127, objective="masked")
    with raises(DataError, "data.text_too_short_for_validation"):
        build(str(tmp_path), context=63)
    assert samples(build(str(tmp_path), context=127, objective="masked", held_out=0).train)
