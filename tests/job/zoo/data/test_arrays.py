"""Arrays and tables.

Real NumPy and Parquet files in, tensors of the promised kinds out, and every defect told by row and column.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.job.data import DataSpec
from paceline.job.samples import DataSets
from refusals import raises


def build(path: Path, **values: Any) -> DataSets:
    spec = TypeAdapter(DataSpec).validate_python({"kind": "arrays", "path": path, **values})
    sets: DataSets = spec.build(input_shape=None, seed=0)
    return sets


def all_of(path: Path, **values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    train: Any = build(path, held_out=0, **values).train
    inputs, target = train.__getitems__(list(range(len(train))))
    return inputs, target


def table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path / "t.parquet")
    return path / "t.parquet"


def archive(path: Path, **arrays: Any) -> Path:
    np.savez(path / "a.npz", **arrays)
    return path / "a.npz"


def test_an_archive_keeps_shapes_and_makes_floats_single_and_classes_whole(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 2, 3))
    inputs, target = all_of(archive(tmp_path, x=x, y=np.arange(6, dtype=np.uint8)))
    assert torch.equal(inputs, torch.from_numpy(x).float())
    assert target.tolist() == list(range(6))
    assert target.dtype == torch.int64
    assert build(tmp_path / "a.npz").train.labels is not None  # type: ignore[attr-defined]


def test_integers_of_several_dimensions_stay_tokens(tmp_path: Path) -> None:
    inputs, target = all_of(archive(tmp_path, x=np.arange(12).reshape(3, 4), y=np.arange(12).reshape(3, 4) - 100))
    assert inputs.dtype == target.dtype == torch.int64
    assert int(target[0, 0]) == -100  # token labels may say "ignored"


def test_a_folder_of_npy_files_is_read_by_their_names(tmp_path: Path) -> None:
    np.save(tmp_path / "pixels.npy", np.ones((4, 5)))
    np.save(tmp_path / "weight.npy", np.arange(4) / 2)
    inputs, target = all_of(tmp_path, inputs="pixels", target="weight")
    assert inputs.shape == (4, 5)
    assert target.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert target.dtype == torch.float32


def test_columns_of_a_table_become_a_float_matrix(tmp_path: Path) -> None:
    path = table(tmp_path, age=[30, 40], height=[1.5, 1.75], smokes=[True, False], y=[0, 1])
    inputs, target = all_of(path, inputs=["age", "height", "smokes"])
    assert inputs.tolist() == [[30.0, 1.5, 1.0], [40.0, 1.75, 0.0]]
    assert inputs.dtype == torch.float32
    assert target.tolist() == [0, 1]
    assert all_of(path, inputs="height")[0].tolist() == [[1.5], [1.75]]


def test_list_columns_become_vectors_and_join_with_others(tmp_path: Path) -> None:
    fixed = pa.array([[1.0, 2.0], [3.0, 4.0]], type=pa.list_(pa.float64(), 2))
    path = table(tmp_path, v=fixed, tokens=[[1, 2, 3], [4, 5, 6]], a=[9.0, 8.0], y=[0.5, 1.5])
    assert all_of(path, inputs="v")[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert all_of(path, inputs="tokens")[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert all_of(path, inputs=["a", "v"])[0].tolist() == [[9.0, 1.0, 2.0], [8.0, 3.0, 4.0]]


def test_a_table_of_many_row_groups_keeps_its_order(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"x": [[float(i), -float(i)] for i in range(1000)], "y": list(range(1000))}),
        tmp_path / "t.parquet",
        row_group_size=64,
    )
    inputs, target = all_of(tmp_path / "t.parquet")
    assert inputs[:, 0].tolist() == target.tolist() == list(range(1000))


@given(rows=st.integers(2, 8), columns=st.integers(1, 4), data=st.data())
def test_the_row_and_column_of_a_value_that_is_not_finite_are_told(rows: int, columns: int, data: Any) -> None:
    import tempfile

    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    bad = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e300]))
    names = [f"c{i}" for i in range(columns)]
    values = {name: np.ones(rows) for name in names}
    values[names[column]][row] = bad
    with tempfile.TemporaryDirectory() as folder:
        path = table(Path(folder), **values, y=np.arange(rows))
        with raises(DataError, "data.not_finite"):
            build(path, inputs=names)


@pytest.mark.parametrize(
    ("arrays", "code", "fields"),
    [
        (
            {"x": np.array([[1.0, 2.0], [3.0, np.nan]]), "y": [0, 1]},
            "data.not_finite",
            {"place": re.compile(r"\b1\b.*'x'.*\b1\b"), "value": "nan"},
        ),
        (
            {"x": np.array([1.0, 1e39]), "y": [0, 1]},
            "data.not_finite",
            {"place": re.compile(r"\b1\b.*'x'"), "value": 1e39},
        ),
        (
            {"x": np.ones(2), "y": [0.0, np.inf]},
            "data.not_finite",
            {"place": re.compile(r"\b1\b.*'y'"), "value": "inf"},
        ),
        ({"x": np.ones(3), "y": [0, 1]}, "data.rows_differ", {"rows": re.compile("x.*3.*y.*2")}),
        ({"x": np.ones(3), "y": [0, -1, 2]}, "data.class_negative", {"row": 1, "name": "y", "value": -1}),
        ({"x": np.ones((0, 3)), "y": np.zeros(0)}, "data.no_samples", {"name": "x", "shape": [0, 3]}),
        ({"x": np.ones(2), "label": [0, 1]}, "data.column_missing", {"name": "y", "hint": re.compile("label, x")}),
        ({"x": np.array(["a", "b"]), "y": [0, 1]}, "data.array_type", {"name": "x", "dtype": "<U1"}),
        (
            {"x": np.array([None, 1], dtype=object), "y": [0, 1]},
            "data.file_invalid",
            {"reason": re.compile("allow_pickle")},
        ),
    ],
)
def test_an_array_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, arrays: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(DataError, code, file=tmp_path / "a.npz", **fields):
        build(archive(tmp_path, **arrays))


def test_one_sample_leaves_none_to_train_on(tmp_path: Path) -> None:
    with raises(DataError, "data.nothing_left_to_train"):
        build(archive(tmp_path, x=np.ones(1), y=[0]))


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"x": [1.0, None, 3.0], "y": [0, 1, 2]}, "data.null"),
        ({"x": [[1.0, 2.0], [3.0, None]], "y": [0, 1]}, "data.null"),
        ({"x": [[1.0], [2.0, 3.0]], "y": [0, 1]}, "data.lengths_differ"),
        ({"x": ["a", "b"], "y": [0, 1]}, "data.column_type"),
        ({"x": [[[1.0]], [[2.0]]], "y": [0, 1]}, "data.column_type"),
        ({"x": [[], []], "y": [0, 1]}, "data.column_type"),
        ({"x": pa.array([], type=pa.list_(pa.float32())), "y": pa.array([], type=pa.int64())}, "data.no_samples"),
        ({"x": [1.0], "Y": [0]}, "data.column_missing"),
    ],
)
def test_a_table_that_cannot_be_trained_on_is_refused(tmp_path: Path, columns: dict[str, Any], code: str) -> None:
    with raises(DataError, code):
        build(table(tmp_path, **columns))


def test_several_inputs_of_many_dimensions_cannot_be_joined(tmp_path: Path) -> None:
    with raises(DataError, "data.input_shape", name="b", shape=[3, 2, 2]):
        build(archive(tmp_path, a=np.ones(3), b=np.ones((3, 2, 2)), y=np.arange(3)), inputs=["a", "b"])


@pytest.mark.parametrize(
    "name", ["cut.npz", "cut.parquet", "junk.npz", "junk.parquet", "empty.npz", "empty.parquet", "folder"]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    whole = {
        ".npz": archive(tmp_path, x=np.ones(100), y=np.ones(100)),
        ".parquet": table(tmp_path, x=np.ones(100), y=np.ones(100)),
    }
    file = tmp_path / name
    if name == "folder":
        file.mkdir()
        np.save(file / "x.npy", np.ones(4))
        (file / "y.npy").write_bytes(b"\x93NUMPY cut")
    elif name.startswith("cut"):
        content = whole[file.suffix].read_bytes()
        file.write_bytes(content[: len(content) // 2])
    else:
        file.write_bytes(b"" if name.startswith("empty") else b"junk" * 100)
    with raises(DataError, "data.file_invalid"):
        build(file)


def test_what_is_no_array_file_is_told_what_was_expected(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    with raises(DataError, "data.file_kind", file=tmp_path):
        build(tmp_path / "x.npy")
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    with raises(DataError, "data.file_invalid"):
        build(tmp_path / "x.npz")
    for name in ("gone", "gone.npz", "gone.parquet"):
        with raises(DataError, "data.unreadable", reason="No such file or directory"):
            build(tmp_path / name)
