"""Arrays and tables in files: NumPy's `.npz`, a folder of `.npy`, or Parquet."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import DataError
from paceline.job.samples import DataSets, TensorSamples, split
from paceline.job.zoo.data.files import optional_package, reading
from paceline.nearest import nearest

if TYPE_CHECKING:
    from paceline.job.data import Arrays

Array = npt.NDArray[Any]  # samples on dim 0
_EXPECTED = "a .npz file, a .parquet file, or a folder with one .npy file for each of data.inputs and data.target"


def build_arrays(spec: Arrays, seed: int) -> DataSets:
    """Load all named arrays into memory and check them once.

    Checked: numbers, equally many rows, no NaN, Inf or gap, no negative class.

    Inputs: columns (one-dimensional arrays), one or several, become a float32 matrix; a single array of more dimensions
    keeps its shape, its integers as int64 (tokens). Target: integers become int64 (classes), other numbers float32.
    """
    names = (spec.inputs,) if isinstance(spec.inputs, str) else spec.inputs
    with reading(spec.path, _EXPECTED):
        arrays = _read(spec.path, [*names, spec.target])
    for name, array in arrays.items():
        _check_numbers(spec.path, name, array)
    _check_rows(spec.path, arrays)
    inputs = _inputs(spec.path, {name: arrays[name] for name in names})
    target = _target(spec.path, spec.target, arrays[spec.target])
    return split(TensorSamples(torch.from_numpy(inputs), torch.from_numpy(target)), spec, seed)


def _read(path: Path, names: list[str]) -> dict[str, Array]:
    if path.is_dir():
        return _read_npy(path, names)
    path.open("rb").close()  # what is missing or locked is told alike for every format
    if path.suffix == ".npz":
        return _read_npz(path, names)
    if path.suffix == ".parquet":
        return _read_parquet(path, names)
    raise DataError(f"{path.absolute()}: this kind of file is not read. Expected: {_EXPECTED}")


def _read_npy(folder: Path, names: list[str]) -> dict[str, Array]:
    _check_names(folder, names, [file.stem for file in folder.glob("*.npy")])
    arrays = {}
    for name in names:
        with _decoding(folder / f"{name}.npy"):
            arrays[name] = np.load(folder / f"{name}.npy", allow_pickle=False)
    return arrays


def _read_npz(file: Path, names: list[str]) -> dict[str, Array]:
    with _decoding(file):
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array, not an archive of named ones (numpy.savez)")
        with archive:
            _check_names(file, names, archive.files)
            return {name: archive[name] for name in names}


def _read_parquet(file: Path, names: list[str]) -> dict[str, Array]:
    parquet = optional_package("pyarrow.parquet", "pyarrow")
    with _decoding(file), parquet.ParquetFile(file) as content:
        _check_names(file, names, content.schema_arrow.names)
        table = content.read(columns=names)
    return {name: _parquet_column(file, name, table.column(name)) for name in names}


@contextmanager
def _decoding(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:  # pyarrow's errors are ValueErrors
        raise DataError(
            f"{file.absolute()}: cannot be read: {error}. Expected: {_EXPECTED}, holding numbers"
        ) from error


def _parquet_column(file: Path, name: str, column: Any) -> Array:
    """A column of numbers as (rows,); one of lists as (rows, length)."""
    compute, types = optional_package("pyarrow.compute", "pyarrow"), optional_package("pyarrow.types", "pyarrow")
    _check_no_gaps(file, name, column, compute, 1)
    kind, length = column.type, 0
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = compute.list_value_length(column).to_numpy()
        length = int(lengths[0]) if len(lengths) else 1
        other = np.flatnonzero(lengths != length)
        if len(other):
            raise DataError(
                f"{file.absolute()}: row {other[0]} of column {name!r} has {lengths[other[0]]} values and row 0 has "
                f"{length}; all rows of a column need equally many"
            )
        column = compute.list_flatten(column)
        _check_no_gaps(file, name, column, compute, length)
    if not (types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)):
        raise DataError(
            f"{file.absolute()}: column {name!r} is of type {kind}; only numbers and lists of them are read: encode it"
        )
    values: Array = column.to_numpy()
    return values.reshape(-1, length) if length else values


def _inputs(path: Path, arrays: dict[str, Array]) -> Array:
    if len(arrays) == 1:
        (name, array), *_ = arrays.items()
        if array.ndim > 1:
            return array.astype(np.int64) if array.dtype.kind in "iu" else _finite_floats(path, name, array)
    columns = []
    for name, array in arrays.items():
        if array.ndim > 2:
            raise DataError(
                f"{path.absolute()}: {name!r} has shape {array.shape}; of several inputs each is (rows,) or (rows, n)"
            )
        columns.append(_finite_floats(path, name, array).reshape(len(array), -1))
    return np.hstack(columns)


def _target(path: Path, name: str, array: Array) -> Array:
    if array.dtype.kind == "f":
        return _finite_floats(path, name, array)
    labels = array.astype(np.int64)
    if labels.ndim == 1 and labels.min() < 0:
        row = int(np.argmax(labels < 0))
        raise DataError(
            f"{path.absolute()}: row {row} of {name!r} is {array[row]}; whole numbers are classes, counted from 0. "
            "Store the target as floats if it is a quantity to predict"
        )
    return labels


def _finite_floats(path: Path, name: str, array: Array) -> Array:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes Inf, and is reported below
        values = array.astype(np.float32)
    flat = values.reshape(len(values), -1)
    if np.isfinite(flat).all():
        return values
    row, position = np.argwhere(~np.isfinite(flat))[0]
    original = array.reshape(len(values), -1)[row, position]
    place = f"row {row} of column {name!r}" + (f" (value {position} of that row)" if flat.shape[1] > 1 else "")
    advice = "float32 cannot hold it: scale the column" if np.isfinite(original) else "remove or fill such rows"
    raise DataError(f"{path.absolute()}: {place} is {original}; {advice}")


def _check_names(path: Path, wanted: list[str], found: Iterable[str]) -> None:
    known = sorted(found)
    for name in wanted:
        if name not in known:
            raise DataError(
                f'{path.absolute()}: nothing in it is named "{name}" (data.inputs, data.target). {nearest(name, known)}'
            )


def _check_numbers(path: Path, name: str, array: Array) -> None:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path.absolute()}: {name!r} is of type {array.dtype}; only real numbers are read: encode it")
    if array.ndim == 0 or array.size == 0:
        raise DataError(f"{path.absolute()}: {name!r} holds no samples (shape {array.shape})")


def _check_rows(path: Path, arrays: dict[str, Array]) -> None:
    if len({len(array) for array in arrays.values()}) > 1:
        rows = ", ".join(f"{name} has {len(array)}" for name, array in arrays.items())
        raise DataError(
            f"{path.absolute()}: the arrays differ in rows: {rows}; each row is one sample, so give them equally many"
        )


def _check_no_gaps(file: Path, name: str, column: Any, compute: Any, values_per_row: int) -> None:
    if column.null_count:
        row = compute.index(compute.is_null(column), True).as_py() // values_per_row
        raise DataError(
            f"{file.absolute()}: row {row} of column {name!r} has no value (null); remove or fill such rows"
        )
