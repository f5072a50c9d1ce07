"""Data sets from files of numbers and text."""

from __future__ import annotations

import os
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import DataError
from paceline.extensions import optional_package
from paceline.job.samples import DataSets, TensorSamples, split
from paceline.job.samples import shares as shares_of
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.job.data import Arrays, Text


# the folder of a Python installation also contains files of other projects
_NOT_DATA = {"__pycache__", "site-packages", "dist-packages"}


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Return a context that converts errors for missing or unreadable files to DataErrors.

    The DataError names the file, or `path` if the file is unknown, and the expected kind of file.
    """
    try:
        yield
    except OSError as error:
        place = Path(os.fsdecode(error.filename or path)).absolute()
        raise DataError(
            "data.unreadable",
            "{place}: {reason}. Expected: {expected}",
            place=place,
            reason=error.strerror or error,
            expected=expected,
        ) from error


def folder_entries(folder: Path) -> list[Path]:
    """Return the visible entries of a folder, sorted by name.

    Raises:
        OSError: the folder does not exist or is not readable.
    """
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the visible files below a folder with these suffixes (any case), sorted by path.

    Raises:
        OSError: the folder or one of its subfolders is not readable.
    """

    def fail(error: OSError) -> None:
        raise error

    endings = tuple(suffix.lower() for suffix in suffixes)
    found = []
    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [f for f in folders if f not in _NOT_DATA and not f.startswith(".")]
        found += [os.path.join(place, f) for f in files if f.lower().endswith(endings) and not f.startswith(".")]
    return sorted(found)


Array = npt.NDArray[Any]  # samples on dim 0
_EXPECTED = "a .npz file, a .parquet file, or a folder with one .npy file for each of data.inputs and data.target"


def build_arrays(spec: Arrays, seed: int) -> DataSets:
    """Load all named arrays into memory and check them once.

    The arrays must contain numbers and have equal numbers of rows. NaN, Inf, missing values and negative classes are
    errors.

    One or several input columns (one-dimensional arrays) become a float32 matrix. A single input array with more
    dimensions keeps its shape, and integers in it become int64 (tokens). In the target, integers become int64
    (classes), and other numbers become float32.
    """
    test = _samples(spec, Path(spec.test)) if isinstance(spec.test, str) else None
    return split(_samples(spec, spec.path), spec, seed, test=test)


def _samples(spec: Arrays, path: Path) -> TensorSamples:
    names = (spec.inputs,) if isinstance(spec.inputs, str) else spec.inputs
    with reading(path, _EXPECTED):
        arrays = _read(path, [*names, spec.target])
    for name, array in arrays.items():
        _check_numbers(path, name, array)
    _check_rows(path, arrays)
    inputs = _inputs(path, {name: arrays[name] for name in names})
    target = _target(path, spec.target, arrays[spec.target])
    return TensorSamples(torch.from_numpy(inputs), torch.from_numpy(target))


def _read(path: Path, names: list[str]) -> dict[str, Array]:
    if path.is_dir():
        return _read_npy(path, names)
    path.open("rb").close()  # opened so that missing or unreadable files raise the same error for all formats
    if path.suffix == ".npz":
        return _read_npz(path, names)
    if path.suffix == ".parquet":
        return _read_parquet(path, names)
    raise DataError(
        "data.file_kind",
        "{file}: this kind of file is not supported. Expected: {expected}",
        file=path.absolute(),
        expected=_EXPECTED,
    )


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
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:  # the errors of pyarrow are ValueErrors
        what = f"cannot be read: {error}. Expected: {_EXPECTED}, holding numbers"
        raise DataError("data.file_invalid", "{file}: {reason}", file=file.absolute(), reason=what) from error


def _parquet_column(file: Path, name: str, column: Any) -> Array:
    """Convert a column of numbers to the shape (rows,), and a column of lists to (rows, length)."""
    compute, types = optional_package("pyarrow.compute", "pyarrow"), optional_package("pyarrow.types", "pyarrow")
    _check_no_gaps(file, name, column, compute, 1)
    kind, length = column.type, 0
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = compute.list_value_length(column).to_numpy()
        length = int(lengths[0]) if len(lengths) else 1
        other = np.flatnonzero(lengths != length)
        if len(other):
            raise DataError(
                "data.lengths_differ",
                "{file}: row {row} of column {name!r} has {found} values, but row 0 has {expected}. All rows of a "
                "column must have the same number of values.",
                file=file.absolute(),
                row=other[0],
                name=name,
                found=lengths[other[0]],
                expected=length,
            )
        column = compute.list_flatten(column)
        _check_no_gaps(file, name, column, compute, length)
    if not (types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)):
        raise DataError(
            "data.column_type",
            "{file}: column {name!r} has the type {type}, but only numbers and lists of numbers are supported. "
            "Convert the values to numbers.",
            file=file.absolute(),
            name=name,
            type=kind,
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
                "data.input_shape",
                "{file}: {name!r} has shape {shape}. If the data set has several inputs, each must have the shape "
                "(rows,) or (rows, n).",
                file=path.absolute(),
                name=name,
                shape=array.shape,
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
            "data.class_negative",
            "{file}: row {row} of {name!r} is {value}. Whole numbers are classes, counted from 0. If the target is "
            "a quantity to predict, store it as floats.",
            file=path.absolute(),
            row=row,
            name=name,
            value=array[row],
        )
    return labels


def _finite_floats(path: Path, name: str, array: Array) -> Array:
    with np.errstate(over="ignore"):  # values beyond the range of float32 become Inf, which is reported below
        values = array.astype(np.float32)
    flat = values.reshape(len(values), -1)
    if np.isfinite(flat).all():
        return values
    row, position = np.argwhere(~np.isfinite(flat))[0]
    original = array.reshape(len(values), -1)[row, position]
    place = f"row {row} of column {name!r}" + (f" (value {position} of that row)" if flat.shape[1] > 1 else "")
    advice = "float32 cannot hold it: scale the column" if np.isfinite(original) else "remove or fill such rows"
    raise DataError(
        "data.not_finite",
        "{file}: {place} is {value}; {advice}",
        file=path.absolute(),
        place=place,
        value=original,
        advice=advice,
    )


def _check_names(path: Path, wanted: list[str], found: Iterable[str]) -> None:
    known = sorted(found)
    for name in wanted:
        if name not in known:
            raise DataError(
                "data.column_missing",
                '{file} contains no "{name}", which data.inputs or data.target names. {hint}',
                file=path.absolute(),
                name=name,
                hint=nearest(name, known),
            )


def _check_numbers(path: Path, name: str, array: Array) -> None:
    if array.dtype.kind not in "biuf":
        raise DataError(
            "data.array_type",
            "{file}: {name!r} has the type {dtype}, but only real numbers are supported. Convert the values to "
            "numbers.",
            file=path.absolute(),
            name=name,
            dtype=array.dtype,
        )
    if array.ndim == 0 or array.size == 0:
        raise DataError(
            "data.no_samples",
            "{file}: {name!r} holds no samples (shape {shape})",
            file=path.absolute(),
            name=name,
            shape=array.shape,
        )


def _check_rows(path: Path, arrays: dict[str, Array]) -> None:
    if len({len(array) for array in arrays.values()}) > 1:
        rows = ", ".join(f"{name} has {len(array)}" for name, array in arrays.items())
        raise DataError(
            "data.rows_differ",
            "{file}: the arrays have different numbers of rows: {rows}. Each row is one sample, so all arrays need "
            "the same number of rows.",
            file=path.absolute(),
            rows=rows,
        )


def _check_no_gaps(file: Path, name: str, column: Any, compute: Any, values_per_row: int) -> None:
    if column.null_count:
        row = compute.index(compute.is_null(column), True).as_py() // values_per_row
        raise DataError(
            "data.null",
            "{file}: row {row} of column {name!r} has no value (null). Remove such rows or fill in the values.",
            file=file.absolute(),
            row=row,
            name=name,
        )


MASK = 256  # token that replaces a hidden byte
IGNORED = -100  # label of positions that the loss ignores
HIDDEN_SHARE = 0.15

_EXPECTED_TEXT = "a text file, or a folder of text files"
_MAPPED_FROM_BYTES = 64 << 20  # larger files are memory-mapped; smaller ones are joined in memory
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def build_text(spec: Text, seed: int) -> DataSets:
    """Build windows over the bytes of all files, in the given order.

    The files of a folder are sorted.

    The validation set is the last part of the bytes, and the test set is the part before it. Windows of different sets
    have no bytes in common.
    """
    other = spec.model_copy(update={"path": (Path(spec.test),)}) if isinstance(spec.test, str) else None
    test = None if other is None else _windows(other, seed, shares=(0, 0))[0]
    train, held_out, share = _windows(spec, seed)
    assert train is not None
    return DataSets(train, held_out, test=test or share)


def _windows(
    spec: Text, seed: int, shares: tuple[int, int] | None = None
) -> tuple[Windows | None, Windows | None, Windows | None]:
    """Return the windows of the training, validation and test sets."""
    with reading(spec.path[0], _EXPECTED_TEXT):
        corpus = Corpus(_files(spec))
    # the byte after a window is the target of the window's last position
    overlap = 1 if spec.objective == "causal" else 0
    available = (corpus.size - overlap) // spec.context
    if available < 1:
        raise DataError(
            "data.text_too_short",
            "{file} has {size} bytes of text, but one sample with a context of {context} needs {needed} bytes",
            file=_named(spec),
            size=corpus.size,
            context=spec.context,
            needed=spec.context + overlap,
        )
    samples = min(available, spec.limit or available)
    kept, tested = shares_of(samples, spec) if shares is None else shares
    sides = 1 + bool(kept) + bool(tested)  # the windows of each set end with an overlap of their own
    end = corpus.size if samples == available else samples * spec.context + overlap * sides
    cut = end - kept * spec.context - overlap if kept else end
    before = cut - tested * spec.context - overlap if tested else cut
    if before < spec.context + overlap:
        raise DataError(
            "data.text_too_short_for_validation",
            "{file} has only {size} bytes of text. This is too little for a training sample, a validation sample "
            "and, if data.test is a share, a test sample. Add text or set held_out: 0.",
            file=_named(spec),
            size=end,
        )
    bounds = ((0, before), (cut, end), (before, cut))
    train, held_out, test = (Windows(corpus, a, b, spec, seed) if b > a else None for a, b in bounds)
    return train, held_out, test


class Corpus:
    """The bytes of several files as one sequence.

    Large files are memory-mapped, so the ranks of a host share one copy.
    """

    def __init__(self, files: list[Path]) -> None:
        self._parts: list[Bytes] = []
        sized = [(file, file.stat().st_size) for file in files]
        for mapped, run in groupby((pair for pair in sized if pair[1]), lambda pair: pair[1] >= _MAPPED_FROM_BYTES):
            if mapped:
                self._parts += [np.memmap(file, dtype=np.uint8, mode="r") for file, _ in run]
            else:
                self._parts.append(np.concatenate([np.fromfile(file, dtype=np.uint8) for file, _ in run]))
        self._starts = np.cumsum([0, *map(len, self._parts)]).tolist()

    @property
    def size(self) -> int:
        """Number of bytes in all files together."""
        return int(self._starts[-1])

    def read(self, start: int, size: int) -> Bytes:
        """Read `size` bytes, starting at byte `start`; the range may span several files."""
        part = bisect_right(self._starts, start) - 1
        found = self._parts[part][start - self._starts[part] :][:size]
        if len(found) == size:
            return found
        return np.concatenate([found, self.read(start + len(found), size - len(found))])


class ByteTokenizer:
    """Conversion of bytes, the tokens of `kind: text`, to text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        parts = (b"[mask]" if token == MASK else bytes([token]) for token in tokens)
        return b"".join(parts).decode(errors="replace")


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Adjacent windows of `context` bytes in `corpus[first:end]`.

    A sample is `(input, target)`, both int64 of shape (context,).

    With `causal`, the target is the window one byte later. With `masked`, 15 % of the positions are chosen at random
    (Devlin et al., 2019, arXiv:1810.04805). Of the chosen bytes, 80 % become token 256, 10 % become a random byte, and
    10 % do not change. The target is the original byte at chosen positions and -100 elsewhere. The chosen positions
    depend only on the seed, the epoch and the index.
    """

    labels = None
    tokenizer = ByteTokenizer()

    def __init__(self, corpus: Corpus, first: int, end: int, spec: Text, seed: int) -> None:
        self.corpus, self.first, self.context, self.seed, self.epoch = corpus, first, spec.context, seed, 0
        self.causal = spec.objective == "causal"
        self.samples = (end - first - self.causal) // spec.context

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the bytes that are hidden."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.__getitems__([index])
        return inputs[0], target[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if not all(0 <= i < self.samples for i in indices):
            raise IndexError(f"text sample out of range in {indices}: there are {self.samples}")
        read, context = self.corpus.read, self.context
        tokens = np.stack([read(self.first + i * context, context + self.causal) for i in indices]).astype(np.int64)
        if self.causal:
            both = torch.from_numpy(tokens)
            return both[:, :-1].contiguous(), both[:, 1:].contiguous()
        hidden, target = hide(tokens, keys=sample_keys(self.seed, self.epoch, indices))
        return torch.from_numpy(hidden), torch.from_numpy(target)


def hide(
    tokens: npt.NDArray[np.int64],
    keys: Words,
    *,
    mask: int = MASK,
    vocab: int = 256,
    may_hide: npt.NDArray[np.bool_] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Hide 15 % of the tokens of each row, but at least one token.

    Samples with the same number of tokens therefore have the same number of items.

    Args:
        tokens: tokens of shape (samples, context).
        keys: one random key per sample; the same key hides the same positions.
        mask: token that replaces hidden tokens.
        vocab: number of tokens from which random ones are chosen.
        may_hide: positions that may be hidden, shape (samples, context); by default, all.

    Returns:
        `(input, target)`, each of shape (samples, context).
    """
    context = tokens.shape[1]
    counter: Words = np.arange(1, 2 * context + 1, dtype=np.uint64)
    noise = _mix(keys[:, None] + counter * _GOLDEN)
    order, fate = noise[:, :context], noise[:, context:]
    if may_hide is None:
        count = max(1, round(HIDDEN_SHARE * context))
        chosen = order <= np.partition(order, count - 1, axis=1)[:, count - 1 : count]
    else:
        order = np.where(may_hide, order, np.uint64(2**64 - 1))
        counts = np.maximum(1, np.rint(HIDDEN_SHARE * may_hide.sum(1))).astype(np.int64)
        chosen = (order <= np.take_along_axis(np.sort(order, axis=1), counts[:, None] - 1, axis=1)) & may_hide
    # the high bits become a number in [0, 1); the low bits are used for the random token
    draw = (fate >> np.uint64(11)) * 2.0**-53
    replaced = np.where(draw < 0.8, mask, np.where(draw < 0.9, (fate % np.uint64(vocab)).astype(np.int64), tokens))
    return np.where(chosen, replaced, tokens), np.where(chosen, tokens, IGNORED)


def sample_keys(seed: int, epoch: int, indices: list[int]) -> Words:
    """Return one random key per sample and epoch, for `hide`."""
    epoch_key = _mix(_mix(np.array([seed], dtype=np.uint64) + _GOLDEN) + np.array([epoch], dtype=np.uint64) * _GOLDEN)
    return _mix(epoch_key + np.array(indices, dtype=np.uint64) * _GOLDEN)


def _mix(x: Words) -> Words:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood, 2014), which is equal on every machine."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _files(spec: Text) -> list[Path]:
    files: list[Path] = []
    for path in spec.path:
        found = [Path(file) for file in files_below(path, spec.suffixes)] if path.is_dir() else [path]
        if not found:
            raise DataError(
                "data.no_files",
                "{folder}: this folder contains no {suffixes} file. Name other endings with data.suffixes.",
                folder=path.absolute(),
                suffixes=" ".join(spec.suffixes),
            )
        files += found
    return files


def _named(spec: Text) -> str:
    return ", ".join(str(path.absolute()) for path in spec.path)
