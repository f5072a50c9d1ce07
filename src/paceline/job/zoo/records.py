"""Data sets of rows in files: splits, and the conversion of rows to samples."""

from __future__ import annotations

import io
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.corpus.host_files import HostFiles, user_cache
from paceline.corpus.order import Ints, Order
from paceline.corpus.rows import Damaged
from paceline.corpus.shards import Corpus, Shard, Where, value_of
from paceline.errors import DataError
from paceline.job.samples import Columns, DataSets, FileSamples, SplitSpec, shares
from paceline.job.spec import load_object
from paceline.job.zoo.images import PHOTO, Normalise, decoded, photo_shape
from paceline.units import count

if TYPE_CHECKING:
    from paceline.job.data import FileSpec, Records

# a rank fetches ahead at most this fraction of the cache, so that ranks do not delete each other's copies
_AHEAD_SHARE = 8
_LOOKED_AT = 64  # rows in which fractions are looked for
_MOST_DAMAGED = 100  # damaged samples in a row after which a data set counts as unreadable


def build_records(spec: Records, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    """Open the files of `kind: records`. Only their indexes and one row are read.

    Raises:
        DataError: there are no files, the files have different formats, a shard is damaged, or the first row has no
            column that the spec names.
    """
    form = RowForm(spec, input_shape)
    return sharded_sets(spec, lambda corpus, spans: RecordSamples(corpus, spans, form, spec), form)


def sharded_sets(
    spec: FileSpec, samples_of: Callable[[Corpus, Spans], ShardedSamples], form: RowForm | None = None
) -> DataSets:
    """Open the files of a spec, and return its training, validation and test sets.

    Args:
        samples_of: function that creates the samples for a part of a corpus.
        form: conversion of rows, which receives the names of the classes of the training files.
    """
    corpus = opened(spec, spec.path)
    if form is not None:
        form.classes = getattr(corpus, "classes", None)
        form.find_fractions(corpus)
    parts = divided(corpus, spec, has_held_out=spec.held_out_path is not None)
    train, held_out, test = (None if part is None else samples_of(corpus, part) for part in parts)
    assert train is not None
    if spec.held_out_path is not None:
        own = opened(spec, spec.held_out_path, corpus.classes)
        held_out = samples_of(own, Spans.first(own, spec.limit))
    if isinstance(spec.test, str):
        own = opened(spec, (spec.test,), corpus.classes)
        test = samples_of(own, Spans.first(own, spec.limit))
    train[0]  # a row without the named column is reported here, not after the ranks have started
    return DataSets(train, held_out, test=test)


def opened(spec: FileSpec, paths: Sequence[Path | str], classes: tuple[str, ...] = ()) -> Corpus:
    """Open the corpus of these paths; labels of images are positions in `classes`."""
    return Corpus.open(
        [str(path) for path in paths],
        format=spec.format,
        cache=host_files(spec),
        on_bad_shard=spec.on_bad_shard,
        classes=classes,
        columns=spec.needed_columns,
    )


def host_files(spec: FileSpec) -> HostFiles:
    """Return the cache of this user on this host."""
    return HostFiles(user_cache("shards"), int(spec.cache_gb * 2**30))


class Spans(NamedTuple):
    """A contiguous range of rows in each shard.

    Attributes:
        firsts: number in the corpus of the range's first row, shape (shards,).
        counts: number of rows, shape (shards,).
    """

    firsts: Ints
    counts: Ints

    @classmethod
    def first(cls, corpus: Corpus, limit: int | None) -> Spans:
        """Return the first `limit` rows of a corpus, or all rows if `limit` is None."""
        starts = np.minimum(corpus.starts, limit if limit is not None else corpus.starts[-1])
        return cls(corpus.starts[:-1], np.diff(starts))


def divided(corpus: Corpus, spec: SplitSpec, *, has_held_out: bool) -> tuple[Spans, Spans | None, Spans | None]:
    """Divide every shard into rows for training, test and validation, in this order.

    The validation rows are the last rows of each shard, in proportion to its size. The validation set therefore covers
    all shards, and no list of rows is kept in memory.

    Returns:
        The rows for training, validation and test; None for a set that takes no rows.
    """
    firsts, counts = Spans.first(corpus, spec.limit)
    rows = int(counts.sum())
    kept, tested = shares(rows, spec, has_held_out=has_held_out) if rows else (0, 0)
    held = _in_proportion(counts, kept)
    test = _in_proportion(counts - held, tested)
    train = counts - held - test
    return (
        Spans(firsts, train),
        Spans(firsts + train + test, held) if kept else None,
        Spans(firsts + train, test) if tested else None,
    )


def _in_proportion(counts: Ints, total: int) -> Ints:
    """Divide `total` over the shards in proportion to their rows, without random choices."""
    ends = np.cumsum(counts).astype(np.float64)
    if not total:
        return np.zeros_like(counts)
    divided: Ints = np.diff(np.floor(ends * (total / ends[-1]) + 0.5).astype(np.int64), prepend=0)
    return divided


class ShardedSamples(FileSamples):
    """Samples of a corpus that are read from its shards on demand.

    Subclasses define `sample` or `read`, and may define `batch`.

    Attributes:
        ahead_bytes: size of the shards that a rank fetches ahead.
        starts: number of the first sample of each shard, and the number of samples, int64, shape (shards + 1,).
        window: number of samples that are shuffled together.
        counts: numbers about the last batch for the run's record. With `on_bad_shard: skip`, `replaced` is the number
            of damaged or refused samples that were replaced by other samples.
        refusals: errors of rows that cannot be converted, which `skip` replaces like damaged rows.
    """

    refusals: tuple[type[DataError], ...] = ()

    def __init__(self, corpus: Corpus, spans: Spans, spec: FileSpec) -> None:
        self.corpus, self.window, self._skips = corpus, spec.shuffle_window, spec.on_bad_shard == "skip"
        self.ahead_bytes = int(spec.cache_gb * 2**30) // _AHEAD_SHARE
        self._firsts = spans.firsts
        self.starts: Ints = np.concatenate(([0], np.cumsum(spans.counts))).astype(np.int64)
        self.counts: dict[str, int] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        self.counts = {}
        return self.alone(self.raw([index])[0])

    def __getitems__(self, indices: list[int]) -> Any:
        self.counts = {}
        return self.batch(self.raw(indices))

    def raw(self, indices: list[int]) -> list[Any]:
        """Read samples as `batch` and `alone` take them, and add to `counts`."""
        return [self._read(index) for index in indices]

    def read(self, index: int, shard: int) -> Any:
        """Read a sample, which is in this shard, for `raw`. May raise Damaged."""
        row = int(self._firsts[shard] + index - self.starts[shard])
        return self.sample(self.corpus.row(row), Where(self.corpus, row))

    def sample(self, row: dict[str, Any], where: Where) -> Any:
        """Convert a row to a sample; errors name `where`."""
        raise NotImplementedError

    def alone(self, sample: Any) -> Any:
        """Return a sample that is not part of a batch."""
        return sample

    def batch(self, samples: list[Any]) -> Any:
        """Return the samples, or their collated columns."""
        return samples

    def epoch_order(
        self, seed: int, epoch: int, batch: int, *, steps: int, shuffle: bool, part: tuple[int, int] | None = None
    ) -> Order:
        """Return the order of an epoch; see `ShardOrder` in `job/partition.py`."""
        starts = self.starts
        if part is not None:
            starts = np.clip(starts, *part) - part[0]
        return Order(starts, seed=seed, epoch=epoch, batch=batch, window=self.window, shuffle=shuffle)

    @property
    def order_settings(self) -> dict[str, Any]:
        """Settings that determine the order of the samples; see `ShardOrder` in `job/partition.py`."""
        sizes = f"{len(self.starts) - 1} with sizes of digest {zlib.crc32(self.starts.tobytes()):08x}"
        return {"shuffle_window": self.window, "shards": sizes}

    def fetch(self, shard: int) -> None:
        """Make a shard local before it is read."""
        self.corpus.fetch(shard)

    def bytes_of(self, shard: int) -> int:
        """Return the size of a shard before it is decompressed."""
        return self.corpus.shards[shard].size

    @property
    def reads_in_place(self) -> bool:
        """True if no shard has to be fetched or converted before it is read."""
        return self.corpus.reads_in_place

    @property
    def corpora(self) -> list[Corpus]:
        """The corpus, in a list."""
        return [self.corpus]

    @property
    def digest(self) -> list[int]:
        """Numbers that change with the list of shards or with the content of a shard."""
        return [int(self.corpus.digest[:12], 16)]

    def _read(self, index: int) -> Any:
        tries = _MOST_DAMAGED if self._skips else 1
        unusable: tuple[type[Exception], ...] = (Damaged, *self.refusals)
        for attempt in range(tries):
            try:
                return self.read(index, bisect_right(self.starts.data, index) - 1)
            except unusable as damage:
                if attempt + 1 == tries:
                    if not isinstance(damage, Damaged):
                        raise
                    raise DataError(
                        "data.row_unreadable",
                        "{shard}: {reason}. Restore this file, or set data.on_bad_shard: skip to replace samples that "
                        "cannot be read.",
                        shard=f"{damage.shard}{'' if damage.row is None else f', row {damage.row}'}",
                        reason=damage.reason,
                    ) from damage
            if not attempt:
                self.counts["replaced"] = self.counts.get("replaced", 0) + 1
            # a fixed stride soon reaches another shard, and is the same on every rank
            index = (index + len(self) // 7 + 1) % len(self)
        raise AssertionError


class RecordSamples(ShardedSamples):
    """Samples of `kind: records`."""

    def __init__(self, corpus: Corpus, spans: Spans, form: RowForm, spec: Records) -> None:
        super().__init__(corpus, spans, spec)
        self.form = form
        self.classes, self.draws = form.classes, form.has_map

    def sample(self, row: dict[str, Any], where: Where) -> Any:
        """Select, transform and convert the columns of a row."""
        return self.form.sample(row, where)

    def alone(self, sample: Any) -> Any:
        """Return a sample with tensors in place of arrays and images."""
        return self.form.alone(sample)

    def batch(self, samples: list[Any]) -> Any:
        """Return the samples, or their collated columns."""
        return self.form.batch(samples)


class RowForm:
    """Conversion of rows to samples: columns, the user's `map`, inputs and target."""

    def __init__(self, spec: Records, input_shape: tuple[int, ...] | None) -> None:
        columns = spec.columns
        self._columns = {name: name for name in columns} if isinstance(columns, tuple) else columns
        self._map: Callable[[dict[str, Any]], Any] | None = None if spec.map is None else load_object(spec.map)
        self._inputs = (spec.inputs,) if isinstance(spec.inputs, str) else spec.inputs
        self._target = spec.target
        self._shape = spec.shape or input_shape
        self.classes: list[str] | None = None
        self._fractions: set[str] = set()

    def find_fractions(self, corpus: Corpus) -> None:
        """Find the columns with fractions in the first rows of the first file.

        In JSON Lines and CSV, a number such as 1 may stand in a column of fractions. It must not make its batch one of
        integers.
        """
        if self._map is not None:
            return
        old = {column: name for name, column in (self._columns or {}).items()}
        for row in range(min(_LOOKED_AT, int(corpus.starts[1]))):
            with suppress(Damaged):
                found = {name for name, value in corpus.row(row).items() if _has_fractions(value)}
                self._fractions.update(old.get(name, name) for name in found)

    def sample(self, row: dict[str, Any], where: Where) -> Any:
        """Convert a row to a sample; errors name `where`.

        Returns:
            The result of `map`, (inputs …, target), or a dict of all columns whose names do not begin with `__`.

        Raises:
            DataError: a column is missing, or its values cannot become tensors.
            Damaged: an image cannot be decoded.
        """
        if self._columns is not None:
            row = {name: value_of(row, column, where) for name, column in self._columns.items()}
        if self._map is not None:
            return self._map(row)
        inputs, target = self._inputs, self._target
        if inputs is None and row.keys() == {"image", "label"}:
            inputs, target = ("image",), "label"
        if inputs is not None:
            values = [self._value(value_of(row, name, where), name, where) for name in inputs]
            return (*values, values[-1] if target is None else self._value(value_of(row, target, where), target, where))
        return {name: self._value(value, name, where) for name, value in row.items() if not name.startswith("__")}

    def alone(self, sample: Any) -> Any:
        """Return a sample with tensors in place of arrays and images."""
        if self._map is None and isinstance(sample, tuple):
            return tuple(map(_tensor, sample))
        if self._map is None:
            return {name: _tensor(value) for name, value in sample.items()}
        return sample

    def batch(self, samples: list[Any]) -> Any:
        """Collate inputs and targets if they have equal shapes; otherwise return the samples."""
        if self._map is None and isinstance(samples[0], tuple):
            columns = [stacked for column in zip(*samples, strict=True) if (stacked := _stacked(column)) is not None]
            if len(columns) == len(samples[0]):
                return Columns(tuple(columns))
        return [self.alone(sample) for sample in samples]

    @property
    def has_map(self) -> bool:
        """True if a function of the user makes the samples."""
        return self._map is not None

    def _value(self, value: Any, name: str, where: Where) -> Any:
        """Return an int, an array of int64 or float32, or the pixels of an image."""
        # tuples of types, because a union costs more than reading a short row
        if isinstance(value, (list, np.ndarray)):
            try:
                array = np.asarray(value)
            except ValueError:
                array = np.asarray(None)
            if array.dtype.kind == "f" or (array.dtype.kind in "iub" and name in self._fractions):
                return array.astype(np.float32)
            if array.dtype.kind in "iub":
                return array.astype(np.int64)
        elif isinstance(value, (bool, int, np.integer)):
            return np.asarray(value, np.float32) if name in self._fractions else int(value)
        elif isinstance(value, (float, np.floating)):
            return np.asarray(value, np.float32)
        elif isinstance(value, (bytes, bytearray, memoryview)) or hasattr(value, "convert"):
            return self._image(value, name, where)
        raise DataError(
            "data.value_unsupported",
            "{where}: column {name} holds {what}, which is not a number, a list of numbers or an image. Select other "
            "columns with data.columns, convert it with data.map, or read text with kind: tokens.",
            where=where,
            name=name,
            what="no value" if value is None else f"a {type(value).__name__}",
        )

    def _image(self, value: Any, name: str, where: Where) -> Pixels:
        if self._shape is None:
            raise DataError(
                "data.image_sizes_differ",
                "images differ in size, and the model does not define an input shape. Give data.shape, e.g. "
                "[3, 224, 224].",
            )
        source = value if hasattr(value, "convert") else io.BytesIO(value)
        try:
            return Pixels(decoded(source, photo_shape("records", self._shape), name))
        except DataError as error:
            if error.code != "data.file_unusable":
                raise
            raise Damaged(str(where), None, f"column {name} {error.problems[0].fields['reason']}") from error


class Pixels(NamedTuple):
    """A decoded image as uint8, shape (channels, height, width); batches are normalized as a whole."""

    values: np.ndarray[Any, np.dtype[np.uint8]]

    def normalised(self) -> Tensor:
        """Return the image as normalized floats, shape (channels, height, width)."""
        image: Tensor = Normalise(*PHOTO[self.values.shape[0]], self.values.shape[1:])(
            torch.from_numpy(self.values[None].copy())
        )[0]
        return image


def _tensor(value: Any) -> Any:
    if isinstance(value, Pixels):
        return value.normalised()
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _has_fractions(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_fractions, value))
    return isinstance(value, (float, np.floating)) or (isinstance(value, np.ndarray) and value.dtype.kind == "f")


def _stacked(column: Sequence[Any]) -> Tensor | None:
    """Collate a column of a batch; return None if values differ in type or shape.

    The result is in this process's own memory. In a loader process, `default_collate` would make a shared memory for
    each tensor, which is then copied if the batch is small.
    """
    first = column[0]
    if any(type(value) is not type(first) for value in column):
        return None
    if isinstance(first, int):
        return torch.tensor(column)
    values = [value.values for value in column] if isinstance(first, Pixels) else list(column)
    if any(value.shape != values[0].shape or value.dtype != values[0].dtype for value in values):
        return None
    # contiguous, also if the channels of images are not
    stacked = torch.from_numpy(np.stack(values, out=np.empty((len(values), *values[0].shape), values[0].dtype)))
    if not isinstance(first, Pixels):
        return stacked
    channels, height, width = values[0].shape
    return Normalise(*PHOTO[channels], (height, width))(stacked)


def changed_shards(before: Sequence[Mapping[str, Any]], now: Sequence[Shard]) -> str | None:
    """Describe which shards have changed since `before`; return None if no shard has."""
    then = {str(shard["name"]): (shard["size"], shard["rows"], shard["digest"]) for shard in before}
    here = {shard.name: (shard.size, shard.rows, shard.digest) for shard in now}
    problems = [
        *(f"{name} is missing" for name in then if name not in here),
        *(f"{name} is new" for name in here if name not in then),
        *(f"{name} has changed" for name in then if name in here and here[name] != then[name]),
    ]
    if not problems:
        return None
    return ", ".join(problems[:5]) + (f" and {count(len(problems) - 5, 'other shard')}" if len(problems) > 5 else "")
