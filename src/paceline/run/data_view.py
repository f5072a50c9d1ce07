"""What the model gets from a job's data: samples, counts, lengths and statistics.

The data is read as in training, batch by batch. Nothing here depends on the kind of data.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm import Group
from paceline.data.loader import Loader
from paceline.data.samples import RequestedSamples
from paceline.job.batch import Batch, rows
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.job.samples import DataSets, all_files_of, files_of, in_users_data
from paceline.planning.plan import Plan
from paceline.run.build import loader_of
from paceline.run.token_view import Reading, TokenCounts, read_tokens
from paceline.split.mesh import Mesh
from paceline.units import count, digits

MOST_SAMPLES = 2048  # samples of a set that are read for counts and statistics
MOST_SECONDS = 10.0  # longest time for which a set is read, unless the samples to show need more
MOST_IMAGES = 60  # images of the contact sheet
MOST_CLASSES = 20  # classes that are listed one by one
_RAREST = 5
_PLACES = 16  # evenly spread places of an epoch that are read
_TOGETHER = 64  # samples that are collated together, which bounds the memory
_VALUES = 6  # values of a tensor that are shown
Labels = NDArray[np.int64]


@dataclass
class Column:
    """One tensor of the batches of a set.

    Attributes:
        shapes: shapes of single samples; several if samples differ in size.
        low, high, mean: of the finite values; None if there are none.
        nan, inf: numbers of values that are NaN or infinite.
    """

    name: str
    dtype: str
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    low: float | None = None
    high: float | None = None
    nan: int = 0
    inf: int = 0
    _sum: float = 0.0
    _count: int = 0

    @property
    def mean(self) -> float | None:
        """Mean of the finite values."""
        return self._sum / self._count if self._count else None

    @property
    def shape(self) -> str:
        """Shape of a sample, with the range of each dimension that varies."""
        if len({len(shape) for shape in self.shapes}) > 1:
            return "different numbers of dimensions"
        ranges = [(min(sizes), max(sizes)) for sizes in zip(*self.shapes, strict=True)]
        return " × ".join(str(low) if low == high else f"{low}–{high}" for low, high in ranges) or "one value"

    @property
    def statistics(self) -> tuple[str, str, str]:
        """Minimum, mean and maximum in words; integers, which are names of things, have no mean."""
        if "float" in self.dtype:
            low, mean, high = ("–" if value is None else digits(value) for value in (self.low, self.mean, self.high))
            return low, mean, high
        least, most = ("–" if value is None else f"{value:,.0f}" for value in (self.low, self.high))
        return least, "", most

    def add(self, values: Tensor) -> None:
        """Include a batch."""
        self.shapes.add(tuple(values.shape[1:]))
        if not values.numel() or values.is_complex():
            return
        if values.is_floating_point():
            finite = values.isfinite()
            if not finite.all():
                nan = int(values.isnan().sum())
                self.nan, self.inf = self.nan + nan, self.inf + int((~finite).sum()) - nan
                values = values[finite]
        if not values.numel():
            return
        low, high = values.aminmax() if values.dtype != torch.bool else (values.all(), values.any())
        self.low = min(float(low), math.inf if self.low is None else self.low)
        self.high = max(float(high), -math.inf if self.high is None else self.high)
        self._sum += float(values.sum(dtype=torch.float64))
        self._count += values.numel()


@dataclass
class SetView:
    """One data set of the job.

    Attributes:
        samples, batches: numbers in an epoch; None for a stream.
        read: number of samples that were read for `columns` and `tokens`.
        cut: number of tokens of these samples that were cut off, because they are beyond the context.
        timed_out: whether reading ended because of `MOST_SECONDS`.
        classes: number of samples of each class; empty if the target is not a class.
        classes_of: number of samples that `classes` counts.
    """

    name: str
    samples: int | None
    batches: int | None
    read: int = 0
    cut: int = 0
    timed_out: bool = False
    columns: dict[str, Column] = field(default_factory=dict)
    classes: Counter[int] = field(default_factory=Counter)
    classes_of: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)

    def listed_classes(self) -> list[tuple[int, int]]:
        """Return classes and their numbers of samples.

        If there are more than `MOST_CLASSES`, only the most frequent and the rarest are listed.
        """
        if len(self.classes) <= MOST_CLASSES:
            return sorted(self.classes.items())
        ordered = self.classes.most_common()
        return [*ordered[: MOST_CLASSES - _RAREST], *ordered[-_RAREST:]]

    @property
    def statistics_of(self) -> str:
        """Description of the samples that were read."""
        if self.read == self.samples:
            return "all samples"
        spread = "from the start of the stream" if self.samples is None else "evenly spread"
        return f"{count(self.read, 'sample')}, {spread}{', as many as the time allowed' if self.timed_out else ''}"

    @property
    def classes_in(self) -> str:
        """Description of the samples whose classes were counted."""
        return "all samples" if self.classes_of == self.samples else f"{self.classes_of:,} of the samples"


@dataclass(frozen=True)
class Value:
    """One tensor of a sample, in words: its type, its shape and its first values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: str


@dataclass(frozen=True)
class SampleView:
    """One sample as the model gets it.

    Attributes:
        index: number of the sample in the user's data set; None for a stream.
        label: class of the sample; None if the target is not a class.
        reading: the tokens of the sample as text; None if it has no tokens.
    """

    index: Any
    values: list[Value]
    label: int | None
    reading: Reading | None


@dataclass(frozen=True)
class Picture:
    """An image that a sample contains.

    Attributes:
        pixels: bytes of shape (height, width, channels), with 1 or 3 channels.
    """

    index: Any
    label: int | None
    pixels: NDArray[np.uint8]


@dataclass
class DataView:
    """What the model gets from the data of a job.

    Attributes:
        order: description of the order of the samples.
        names: names of the classes, if the data has them.
        sets: the training, validation and test sets that the job has.
        samples: the first samples of epoch 0, in the order of training.
        pictures: the first images of that order; empty if the inputs are not images.
        stretched: whether the pixels of the pictures were rescaled, because the model gets other numbers than 0 to 255
            or 0 to 1.
    """

    job: Job
    order: str
    names: list[str] | None
    synthetic: bool
    sets: list[SetView]
    samples: list[SampleView]
    pictures: list[Picture]
    stretched: bool = False

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number."""
        return self.names[label] if self.names and 0 <= label < len(self.names) else str(label)

    def about(self, sample: SampleView) -> str:
        """Return the title of a sample: its number, its class, and its numbers of tokens."""
        parts = ["sample of the stream" if sample.index is None else f"sample {sample.index}"]
        if sample.label is not None:
            name = self.class_name(sample.label)
            parts.append(f"class {sample.label}" + (f" {name}" if name != str(sample.label) else ""))
        if sample.reading is not None:
            parts += sample.reading.facts
        return " · ".join(parts)

    @property
    def notes(self) -> list[str]:
        """Sentences about what may be wrong with the data."""
        return list(_notes(self))


def view_data(job: Job, samples: int, say: Callable[[str], object] = str) -> DataView:
    """Read a job's data as training does, and describe it.

    Args:
        samples: number of samples to show.
        say: function that is called with the name of each phase.

    Raises:
        DataError: the data is missing, unreadable or invalid, as in training.
        JobError: the model, or the data's own code, cannot be imported.
    """
    say("fetching the data")
    job.fetch()
    say("opening the data")
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    loader = loader_alone(job, data)
    try:
        source = _Training(job, loader, data) if isinstance(loader.partition, Partition) else _Stream(loader)
        shown = _Shown(data, samples)
        sets = [_read("train", data.train, source, say, shown)]
    finally:
        loader.close()
    for name, dataset in (("held out", data.held_out), ("test", data.test)):
        if dataset is not None:
            sets.append(_read(name, dataset, _in_order(dataset, job.global_batch), say))
    pictures, stretched = _pictures(shown.images)
    return DataView(job, source.order, data.classes, data.synthetic, sets, shown.samples, pictures, stretched)


def loader_alone(job: Job, data: DataSets) -> Loader:
    """Return the loader of a single rank, which reads whole global batches."""
    alone = job.partition.model_copy(update={"weights": None, "host_files": False})
    return loader_of(job.model_copy(update={"partition": alone}), Mesh.of(Plan(), Group()), data)


class _Source(Protocol):
    """Batches of one set.

    Attributes:
        samples, steps: numbers of samples and batches in an epoch; None if unknown.
        order: description of the order.
    """

    @property
    def samples(self) -> int | None: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def order(self) -> str: ...

    def batches(self, at_least: int) -> Iterator[tuple[list[Any], Any]]:
        """Yield batches with the indices of their samples, from evenly spread places; see `_read`."""


class _Reader:
    """Reader of single batches of a data set with a length."""

    order = "order of the data set"

    def __init__(self, dataset: Any, samples: int, steps: int, seed: int) -> None:
        self.samples, self.steps = samples, steps
        self._reader = RequestedSamples(dataset, None, 0, seed)
        self._reader.begin_epoch(0)

    def indices(self, start: int) -> Iterator[list[Any]]:
        """Yield the indices of the samples of each step, from `start` on."""
        raise NotImplementedError

    def batches(self, at_least: int) -> Iterator[tuple[list[Any], Any]]:
        assert self.samples is not None
        assert self.steps is not None
        if self.samples <= max(MOST_SAMPLES, at_least):
            yield from self._from(0, self.samples)
            return
        each = max(MOST_SAMPLES // _PLACES, 1)
        # the places are read in an order that is spread at any time, because time may run out
        spread = sorted(range(min(_PLACES, self.steps)), key=lambda place: f"{place:04b}"[::-1])
        for place in spread:
            yield from self._from(place * self.steps // len(spread), max(at_least, each) if place == 0 else each)

    def _from(self, start: int, samples: int) -> Iterator[tuple[list[Any], Any]]:
        left = samples
        for step, indices in enumerate(self.indices(start), start):
            for first in range(0, len(indices), _TOGETHER):
                part = indices[first : first + min(_TOGETHER, left)]
                left -= len(part)
                if part:
                    yield in_users_data(self._reader.dataset, part)[1], self._reader.read(part, (0, step))
            if left <= 0:
                return


class _Training(_Reader):
    """Batches of the first epoch of training."""

    def __init__(self, job: Job, loader: Loader, data: DataSets) -> None:
        partition = loader.partition
        assert isinstance(partition, Partition)
        super().__init__(data.train, partition.samples, partition.steps_per_epoch, job.seed)
        self._partition = partition
        window = getattr(getattr(partition, "shards", None), "window", None)
        within = f" in windows of {window:,}" if window else ""
        order = f"shuffled{within} with seed {job.seed}" if partition.shuffle else "order of the data set"
        self.order = f"{order}, {job.partition.kind}" if job.partition.kind != "uniform" else order

    def indices(self, start: int) -> Iterator[list[Any]]:
        return self._partition.batches(0, start)


class _InOrder(_Reader):
    """Batches of a validation or test set, in the order of the set."""

    def __init__(self, dataset: Any, batch: int) -> None:
        samples = len(dataset)
        super().__init__(dataset, samples, -(-samples // batch), seed=0)
        self._batch = batch

    def indices(self, start: int) -> Iterator[list[Any]]:
        assert self.samples is not None
        for first in range(start * self._batch, self.samples, self._batch):
            yield list(range(first, min(first + self._batch, self.samples)))


class _Stream:
    """Batches of a stream, which can only be read from its start."""

    samples, steps = None, None
    order = "order of the stream"

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def batches(self, at_least: int) -> Iterator[tuple[list[Any], Any]]:
        left = max(MOST_SAMPLES, at_least)
        for batch in self._loader:
            found = rows(batch)
            yield [None] * found, batch
            left -= found
            if left <= 0:
                return


def _in_order(dataset: Any, batch: int) -> _Source:
    try:
        return _InOrder(dataset, batch)
    except TypeError:
        return _Stream(torch.utils.data.DataLoader(dataset, batch_size=batch))


class _Shown:
    """Collects the first samples and images of the training set."""

    def __init__(self, data: DataSets, samples: int) -> None:
        self.wanted = samples
        self.samples: list[SampleView] = []
        self.images: list[tuple[Any, int | None, Tensor]] = []
        self._names = data.classes

    def add(self, indices: Sequence[Any], columns: Mapping[str, Any], found: SetView, tokenizer: Any) -> None:
        """Take what is still missing from a batch."""
        labels = _labels(columns)
        image = next((c for name, c in columns.items() if name != _target_name(columns) and _is_image(c)), None)
        for row, index in enumerate(indices):
            label = None if labels is None else int(labels[row])
            if len(self.samples) < self.wanted:
                values = [_value(name, column[row]) for name, column in columns.items() if isinstance(column, Tensor)]
                self.samples.append(SampleView(index, values, label, read_tokens(columns, row, tokenizer)))
            if image is not None and len(self.images) < MOST_IMAGES:
                self.images.append((index, label, image[row].detach().cpu().clone()))


def _read(
    name: str, dataset: Any, source: _Source, say: Callable[[str], object], shown: _Shown | None = None
) -> SetView:
    """Read batches of a set until enough samples are known, or time is up."""
    found = SetView(name, source.samples, source.steps)
    owners = [in_users_data(dataset, [])[0], *all_files_of(dataset)]
    tokenizer = next(filter(None, (getattr(owner, "tokenizer", None) for owner in owners)), None)
    until, wanted = time.monotonic() + MOST_SECONDS, 0 if shown is None else shown.wanted
    known: Any = getattr(dataset, "labels", None)
    counted = isinstance(known, np.ndarray) and known.ndim == 1 and known.dtype.kind in "iu"
    for indices, batch in source.batches(wanted):
        columns = columns_of(batch)
        if shown is not None:
            shown.add(indices, columns, found, tokenizer)
        for title, column in columns.items():
            if isinstance(column, Tensor):
                found.columns.setdefault(title, Column(title, _dtype(column))).add(column)
        found.tokens.add(columns, tokenizer)
        labels = _labels(columns)
        if labels is not None and not counted:
            found.classes.update(labels.tolist())
        found.read += len(indices)
        found.cut += getattr(files_of(dataset), "counts", {}).get("cut", 0)
        say(f"reading {name}: {found.read:,} samples")
        if time.monotonic() > until and found.read >= wanted:
            found.timed_out = found.read < min(MOST_SAMPLES, math.inf if source.samples is None else source.samples)
            break
    if counted:
        values, counts = np.unique(known, return_counts=True)
        found.classes.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    found.classes_of = found.classes.total()
    return found


def columns_of(batch: Batch) -> dict[str, Any]:
    """Return the tensors of a batch by name.

    Raises:
        DataError: the batch is neither a tuple nor a mapping of tensors.
    """
    rows(batch)
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if len(batch) == 2:
        return {"input": batch[0], "target": batch[1]}
    names = [f"input {number}" for number in range(1, len(batch))] + ["target"]
    return dict(zip(names, batch, strict=True)) if len(batch) > 1 else {"input": batch[0]}


def _target_name(columns: Mapping[str, Any]) -> str:
    return "labels" if "labels" in columns else "target"


def _labels(columns: Mapping[str, Any]) -> Tensor | None:
    """Return the classes of a batch; None if the target is no class."""
    target = columns.get(_target_name(columns))
    if not isinstance(target, Tensor) or target.dim() != 1 or target.is_floating_point() or target.is_complex():
        return None
    return target


def _is_image(column: Any) -> bool:
    return (
        isinstance(column, Tensor)
        and column.dim() == 4
        and (column.shape[1] in (1, 3) or column.shape[3] in (1, 3))
        and min(column.shape[2:] if column.shape[1] in (1, 3) else column.shape[1:3]) > 1
        and not column.is_complex()
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _value(name: str, tensor: Tensor) -> Value:
    flat = tensor.reshape(-1)[:_VALUES].tolist()
    words = ", ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in flat)
    more = ", …" if tensor.numel() > _VALUES else ""
    return Value(name, _dtype(tensor), tuple(tensor.shape), words + more)


def _pictures(images: Sequence[tuple[Any, int | None, Tensor]]) -> tuple[list[Picture], bool]:
    """Convert images to bytes, and return whether their values were rescaled.

    Normalized images are rescaled by channel, from the lowest to the highest value of all images.
    """
    if not images:
        return [], False
    planes = [image if image.shape[0] in (1, 3) else image.permute(2, 0, 1) for _, _, image in images]
    is_bytes = planes[0].dtype == torch.uint8
    shown = [plane.float().nan_to_num(0.0, 0.0, 0.0) for plane in planes]
    lows = torch.stack([plane.flatten(1).amin(1) for plane in shown]).amin(0)
    highs = torch.stack([plane.flatten(1).amax(1) for plane in shown]).amax(0)
    stretched = not is_bytes and not (float(lows.min()) >= 0 and float(highs.max()) <= 1)
    if is_bytes or not stretched:
        lows, highs = torch.zeros_like(lows), torch.full_like(highs, 255.0 if is_bytes else 1.0)
    scale = (255 / (highs - lows).clamp_min(1e-12)).view(-1, 1, 1)
    pictures = []
    for (index, label, _), plane in zip(images, shown, strict=True):
        step = max(1, -(-max(plane.shape[1:]) // 256))  # the page shows images small
        small = plane[:, ::step, ::step]
        pixels = ((small - lows.view(-1, 1, 1)) * scale).round().clamp(0, 255).to(torch.uint8)
        pictures.append(Picture(index, label, pixels.permute(1, 2, 0).contiguous().numpy()))
    return pictures, stretched


def _notes(view: DataView) -> Iterator[str]:
    for found in view.sets:
        for column in found.columns.values():
            if column.nan or column.inf:
                yield f"{found.name}: {column.name} has {column.nan:,} NaN and {column.inf:,} infinite values"
        if found.tokens.without_target:
            number = count(found.tokens.without_target, "sample")
            yield f"{found.name}: no label counts in {number}, which therefore train nothing"
        if found.cut:
            yield f"{found.name}: {count(found.cut, 'token')} of the samples that were read are beyond the context"
    train, *others = view.sets
    complete = train.classes and (train.classes_of == train.samples)
    for other in others:
        unseen = sorted(other.classes.keys() - train.classes.keys())
        if complete and unseen:
            names = ", ".join(view.class_name(label) for label in islice(unseen, 5))
            yield f"{other.name} has classes without a training sample: {names}{', …' if len(unseen) > 5 else ''}"
