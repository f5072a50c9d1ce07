"""Rows of files as samples: columns, maps, images, splits and what is refused."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from paceline.data.loader import Loader
from paceline.errors import DataError, JobError, StorageError
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.job.samples import Columns, DataSets
from refusals import raises


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def built(**data: Any) -> DataSets:
    values = {"kind": "records", "held_out": 0} | data
    job = Job(
        model="mlp", data=values, loss="mse", optimizer={"name": "sgd", "lr": 0.1}, global_batch=1, stop={"steps": 1}
    )
    return job.data.build(input_shape=None, seed=0)


def jsonl(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def columns(dataset: Any, indices: Iterable[int]) -> Any:
    batch = dataset.__getitems__(list(indices))
    return batch.values if isinstance(batch, Columns) else default_collate(batch)


def test_inputs_and_target_are_a_tuple_of_tensors(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"x": [1.5, 2], "z": 3, "y": 1, "note": "n"}])
    train = built(path=str(file), inputs=["x", "z"], target="y").train
    x, z, y = train[0]
    assert x.dtype == torch.float32
    assert x.tolist() == [1.5, 2.0]
    assert (z, y) == (3, 1)


def test_a_whole_number_among_fractions_is_a_fraction(tmp_path: Path) -> None:
    rows = [{"x": [0.5, 2], "size": 1.5, "y": 1}, {"x": [1, 2], "size": 3, "y": 0}]
    file = jsonl(tmp_path / "a.jsonl", rows)
    train: Any = built(path=str(file), inputs=["x", "size"], target="y").train
    x, size, y = columns(train, [1])
    assert (x.dtype, size.dtype, y.dtype) == (torch.float32, torch.float32, torch.int64)
    assert columns(train, [0, 1])[1].tolist() == [1.5, 3.0]
    renamed: Any = built(path=str(file), columns={"z": "size", "labels": "y"}).train
    assert renamed[1]["z"].dtype == torch.float32


def test_columns_select_and_rename(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"tokens": [1, 2], "next": [2, 3], "note": "n"}])
    sample = built(path=str(file), columns={"input_ids": "tokens", "labels": "next"}).train[0]
    assert {name: value.tolist() for name, value in sample.items()} == {"input_ids": [1, 2], "labels": [2, 3]}


@pytest.mark.parametrize(
    ("keys", "converted"),
    [
        ({"inputs": "a", "target": "b"}, 2),
        ({"inputs": ["a", "c"]}, 2),
        ({"columns": ["a"]}, 1),
        ({"columns": {"x": "a", "y": "b"}, "inputs": "x", "target": "y"}, 2),
        ({"columns": ["a", "b"], "map": "own.py:sample"}, 2),
        ({"map": "own.py:sample"}, 4),
        ({}, 4),
    ],
)
def test_samples_are_the_same_if_only_their_columns_are_converted(
    keys: dict[str, Any], converted: int, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def sample(row):\n    return row['a'], len(row)\n")
    if "map" in keys:
        keys = {**keys, "map": f"{tmp_path / 'own.py'}:sample"}
    columns = {name: [float(nth + row) for row in range(4)] for nth, name in enumerate("abcd")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    jsonl(tmp_path / "rows.jsonl", [{name: values[row] for name, values in columns.items()} for row in range(4)])
    table: Any = built(path=str(tmp_path / "rows.parquet"), **keys).train
    lines: Any = built(path=str(tmp_path / "rows.jsonl"), **keys).train
    if keys.get("map") and "columns" not in keys:
        assert table[2] == (2.0, 4)
    else:
        assert str(table[2]) == str(lines[2])
    assert len(table.corpus.row(0)) == converted


def test_a_function_of_the_user_makes_samples(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def sample(row):\n    return row['a'] * 2, row['a']\n")
    file = jsonl(tmp_path / "a.jsonl", [{"a": 4}])
    assert built(path=str(file), map=f"{tmp_path / 'mine.py'}:sample").train[0] == (8, 4)


def test_a_row_without_the_column_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"label": 1, "x": 2.0}])
    with raises(DataError, "data.row_without_column", name="labels"):
        built(path=str(file), inputs="x", target="labels")
    with raises(DataError, "data.value_unsupported", name="x"):
        built(path=str(jsonl(tmp_path / "b.jsonl", [{"x": "words", "y": 1}])), inputs="x", target="y")
    with raises(DataError, "data.value_unsupported", name="x"):
        built(path=str(jsonl(tmp_path / "c.jsonl", [{"x": [[1], [1, 2]], "y": 1}])), inputs="x", target="y")


def test_sources_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent.jsonl", tmp_path / "*.jsonl"):
        with pytest.raises((DataError, JobError)):
            built(path=str(path))


def test_held_out_rows_come_from_every_file_and_are_in_no_other_set(tmp_path: Path) -> None:
    for nth, rows in enumerate((50, 5, 1, 44)):
        jsonl(tmp_path / "corpus" / f"{nth}.jsonl", [{"x": float(nth), "y": nth * 100 + row} for row in range(rows)])
    sets = built(path=str(tmp_path / "corpus"), inputs="x", target="y", held_out=0.2, test=0.1)
    found = [[int(part[i][1]) for i in range(len(part))] for part in (*sets[:2], sets.test)]  # type: ignore[arg-type,index]
    assert [len(part) for part in found] == [70, 20, 10]
    assert len({y for part in found for y in part}) == 100
    assert {y // 100 for y in found[1]} >= {0, 3}
    again = built(path=str(tmp_path / "corpus"), inputs="x", target="y", held_out=0.2).held_out
    assert again is not None
    assert [int(again[i][1]) for i in range(len(again))] == found[1], "the test set does not move it"  # type: ignore[arg-type]


def test_images_of_a_folder_are_the_same_as_of_kind_images(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for label in ("ants", "bees"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for nth in range(3):
            pixels = draw.integers(0, 255, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{nth}.png")
    records = built(path=str(tmp_path / "photos"), format="images", shape=[3, 16, 16])
    images: Any = built(kind="images", path=str(tmp_path / "photos"), shape=[3, 16, 16]).train
    batch = columns(records.train, range(6))
    expected = {(float(image.sum()), int(label)) for image, label in (images[i] for i in range(6))}
    assert {(float(image.sum()), int(label)) for image, label in zip(*batch, strict=True)} == expected
    assert records.classes == ["ants", "bees"]


def test_a_damaged_image_is_named_or_replaced(tmp_path: Path) -> None:
    good = io.BytesIO()
    Image.new("RGB", (8, 8), (10, 200, 30)).save(good, "PNG")
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for nth in range(9):
        (tmp_path / "photos" / "a" / f"{nth}.png").write_bytes(good.getvalue())
    (tmp_path / "photos" / "a" / "4.png").write_bytes(good.getvalue()[:40])
    keys: dict[str, Any] = {"path": str(tmp_path / "photos"), "format": "images", "shape": [3, 8, 8]}
    train: Any = built(**keys).train
    with pytest.raises(DataError) as caught:
        train.__getitems__(list(range(9)))
    assert "4.png" in str(caught.value)
    train = built(**keys, on_bad_shard="skip").train
    images, labels = columns(train, range(9))
    assert images.shape == (9, 3, 8, 8)
    assert labels.tolist() == [0] * 9
    assert train.counts == {"replaced": 1}


@pytest.mark.parametrize("key", ["held_out_path", "test"])
def test_images_of_other_folders_keep_the_labels_of_the_training_classes(key: str, tmp_path: Path) -> None:
    train, other = pictures(tmp_path / "train", "abc"), pictures(tmp_path / "other", "bc")
    sets = built(path=str(train), shape=[3, 8, 8], **{key: str(other)})
    found: Any = sets.held_out if key == "held_out_path" else sets.test
    assert [label for _, label in found] == [1, 2]
    with raises(DataError, "data.class_unknown", name="d"):
        built(path=str(train), shape=[3, 8, 8], **{key: str(pictures(tmp_path / "more", "d"))})


def test_sources_whose_labels_mean_different_classes_are_refused(tmp_path: Path) -> None:
    first, second = (
        {"kind": "records", "path": str(pictures(tmp_path / classes, classes)), "shape": [3, 8, 8], "held_out": 0}
        for classes in ("abc", "bc")
    )
    with raises(DataError, "data.classes_of_sources_differ", first="first", second="second"):
        built(kind="mixture", sources={"first": first, "second": second})


def test_images_of_sources_are_normalised_also_one_by_one(tmp_path: Path) -> None:
    folder = str(pictures(tmp_path / "all", "abc"))
    plain = {"kind": "records", "path": folder, "shape": [3, 8, 8], "held_out": 0.3}
    (tmp_path / "mine.py").write_text("import torch\ndef sample(row):\n    return torch.zeros(3, 8, 8), row['label']\n")
    mapped = {"kind": "records", "path": folder, "map": f"{tmp_path / 'mine.py'}:sample", "held_out": 0.3}
    alone: Any = built(path=folder, shape=[3, 8, 8]).train
    for sources in ({"a": plain, "b": mapped}, {"b": mapped, "a": plain}):
        sets = built(kind="mixture", sources=sources)
        for dataset in (sets.train, sets.held_out):
            samples: Any = dataset
            images, _ = default_collate([samples[n] for n in range(len(samples))])
            together, _ = columns(samples, range(len(samples)))
            assert torch.equal(images, together)
            assert images.dtype == torch.float32
    assert torch.equal(alone[0][0], columns(alone, [0])[0][0])


def pictures(folder: Path, classes: str) -> Path:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (10, 12), (40 * number, 90, 200)).save(folder / name / "one.png")
    return folder


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"x": 1.0, "y": 2}])
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with raises(StorageError, "storage.folder_unusable", folder=file / "paceline"):
        built(path=str(file))


def test_samples_collate_with_torchs_own_function(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"x": [1.0, 2.0], "labels": n} for n in range(4)])
    train: Any = built(path=str(file)).train
    batch = default_collate(train.__getitems__([0, 1, 2]))
    assert batch["x"].shape == (3, 2)
    assert batch["labels"].tolist() == [0, 1, 2]


def test_a_mixture_needs_its_names(tmp_path: Path) -> None:
    source = {"kind": "records", "path": str(jsonl(tmp_path / "a.jsonl", [{"x": 1.0, "y": 2}]))}
    for keys in ({"weights": {"b": 1}}, {"repeat": {"b": 1}}, {"schedule": [{"step": 3, "weights": {"b": 1}}]}):
        with raises(JobError, "data.source_unknown", name="b"):
            built(kind="mixture", sources={"a": source}, **keys)
    with raises(JobError, "data.weights_zero"):
        built(kind="mixture", sources={"a": source}, weights={"a": 0})
    for key, value in {"held_out": 0.5, "test": 0.1, "limit": 3}.items():
        with raises(JobError, "data.key_of_sources", key=key):
            built(kind="mixture", sources={"a": source}, **{key: value})
    with raises(JobError, "data.mixture_of_other_source"):
        built(kind="mixture", sources={"a": source}, test=source["path"])


def test_a_cache_that_is_too_small_for_an_epoch_loses_no_sample(tmp_path: Path) -> None:
    for shard in range(12):
        rows = "".join(json.dumps({"x": [shard * 50.0 + row], "y": shard * 50 + row}) + "\n" for row in range(50))
        (tmp_path / f"{shard}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    keys: dict[str, Any] = {"inputs": "x", "target": "y", "shuffle_window": 20, "cache_gb": 4e-6}
    train: Any = built(path=str(tmp_path / "*.gz"), **keys).train
    partition = Partition(PartitionSpec(), samples=600, global_batch=8, seed=0, replica=0, replicas=1, shards=train)
    loader = Loader(train, partition)
    try:
        for _ in range(2):
            assert sorted(int(y) for _, labels in loader for y in labels) == list(range(600))
    finally:
        loader.close()
