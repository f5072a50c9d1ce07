"""Building blocks of data sets: samples in memory, subsets, and the training/validation split."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from paceline.errors import DataError
from paceline.units import count

Labels = npt.NDArray[np.int64]
Batch = tuple[Tensor, ...]

_LOOKED_AT = 64  # maximum number of a tensor's elements that enter its digest
_SMALL = 64  # maximum number of entries in a container that `apart` copies


class SplitSpec(Protocol):
    """The keys of a data spec that determine how its samples are split."""

    @property
    def held_out(self) -> float: ...
    @property
    def test(self) -> float | str | None: ...
    @property
    def limit(self) -> int | None: ...


class TensorSamples(Dataset[Batch]):
    """Samples in two tensors, inputs and targets, with samples on dim 0.

    Indexing with a list returns a collated batch `(inputs, target)` and copies each tensor only once.

    Args:
        inputs: the stored inputs, which may have a more compact type than the model's inputs (e.g. bytes).
        target: class labels (int64, one per sample) or other targets.
        prepare: function that converts a batch of stored inputs to the model's inputs.
    """

    def __init__(self, inputs: Tensor, target: Tensor, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        self.inputs, self.target, self.prepare = inputs, target, prepare

    @property
    def labels(self) -> Labels | None:
        """Class of each sample; None if the targets are not classes."""
        return self.target.numpy() if self.target.dim() == 1 and self.target.dtype == torch.int64 else None

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> Batch:
        inputs, target = self.__getitems__([index])
        return inputs[0], target[0]

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.tensor(indices, dtype=torch.int64)
        inputs = self.inputs.index_select(0, rows)
        return (inputs if self.prepare is None else self.prepare(inputs)), self.target.index_select(0, rows)


class FileSamples(Dataset[Any]):
    """Base class of paceline's data sets that read their files during the run.

    A user's data set may have attributes of the same names with another meaning, so code that uses these attributes
    gets the data set from `files_of`. Subclasses also define `counts`, which holds numbers about the last batch for the
    run's record, `corpora`, a list of all files, and `digest`, a list of numbers that changes with the files.

    Attributes:
        draws: whether reading a sample may use random numbers.
        spans_epochs: whether the samples of an epoch depend on those of earlier epochs.
    """

    draws = False
    spans_epochs = False


def files_of(dataset: Any) -> Any:
    """Return the `FileSamples` without wrappers; None for other data sets."""
    found = in_users_data(dataset, [])[0]
    return found if isinstance(found, FileSamples) else None


def all_files_of(*datasets: Any) -> list[Any]:
    """Return each `FileSamples` of the data sets, also of those that are joined. A data set may be None."""
    found: list[Any] = []
    for dataset in datasets:
        own = in_users_data(dataset, [])[0]
        parts = own.datasets if isinstance(own, ConcatDataset) else [own]
        found += [files for part in parts if (files := files_of(part)) is not None]
    return found


class _Wrapped(Dataset[Any]):
    """Wrapper of a user's data set that passes on its batched access and `set_epoch`."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._batched = getattr(dataset, "__getitems__", None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the user's data set if it has `set_epoch`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def _read(self, indices: list[int]) -> Any:
        return [self.dataset[index] for index in indices] if self._batched is None else self._batched(indices)


class Selection(_Wrapped):
    """A subset of a data set, in the order of `rows`."""

    def __init__(self, dataset: Dataset[Any], rows: Labels) -> None:
        super().__init__(dataset)
        self.rows = rows
        self._dataset_length = _length(dataset)

    @classmethod
    def first(cls, dataset: Dataset[Any], limit: int | None) -> Selection:
        """Return the first `limit` samples, or all samples if `limit` is None."""
        samples = _length(dataset)
        return cls(dataset, np.arange(min(samples, limit or samples)))

    @property
    def labels(self) -> Labels | None:
        """Class of each selected sample (integers); None if the data set has no `labels`."""
        labels = getattr(self.dataset, "labels", None)
        if not isinstance(labels, (np.ndarray, Tensor, Sequence)) or len(labels) != self._dataset_length:
            return None
        array = np.asarray(labels)
        return array[self.rows].astype(np.int64) if array.ndim == 1 and array.dtype.kind in "iu" else None

    def __len__(self) -> int:
        now = _length(self.dataset)
        if now != self._dataset_length:
            raise DataError(
                "data.dataset_length_changed",
                "{class_name} had {before} samples when the job began and has {now} now. Keep its length constant.",
                class_name=type(self.dataset).__name__,
                before=self._dataset_length,
                now=now,
            )
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.rows[index])]

    def __getitems__(self, indices: list[int]) -> Any:
        return self._read(self.rows[indices].tolist())


class Collated(_Wrapped):
    """A data set whose samples the job's `collate` function turns into batches."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        super().__init__(dataset)
        self.collate_fn = collate_fn

    @property
    def labels(self) -> Labels | None:
        """Class of each sample, if the data set has them."""
        labels: Labels | None = getattr(self.dataset, "labels", None)
        return labels

    def __len__(self) -> int:
        return _length(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = self._read(indices)
        columns = columns_of(samples, indices, self._batched)
        if columns is None:
            return list(samples)
        if isinstance(columns, dict):
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return list(zip(*columns, strict=True))


class Columns(NamedTuple):
    """Collated columns of a batch: a tuple or a dict of tensors of equal length.

    A data set may return them from `__getitems__`, in place of a list of samples.
    """

    values: tuple[Tensor, ...] | dict[str, Tensor]


def columns_of(
    batch: Any, indices: list[Any], read_many: Callable[[list[Any]], Any] | None
) -> tuple[Tensor, ...] | dict[str, Tensor] | None:
    """Return the collated columns in the result of `read_many(indices)`; None for a list of samples."""
    if isinstance(batch, Columns):
        return batch.values
    if not isinstance(batch, tuple) or not all(isinstance(part, Tensor) for part in batch):
        return None
    count = len(indices)
    if any(part.dim() == 0 or len(part) != count for part in batch):
        return None
    is_columns = len(batch) != count or count == 1 or read_many is None or len(read_many(indices[:1])) != 1
    return batch if is_columns else None


def apart(dataset: Any) -> Any:
    """Copy the objects of a data set without its data.

    A file or connection that is opened for reading then belongs to the copy. Loader processes are forked with the
    original, so each process opens its own file. Processes that shared a file would change each other's position in it.
    """
    copies: dict[int, Any] = {}
    kept: list[Any] = []  # kept alive so that no id in `copies` is reused
    packages = {_package(dataset)}

    def copied(value: Any, *, always: bool = False) -> Any:
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, MethodType):
            return MethodType(value.__func__, copied(value.__self__))
        if type(value) in (list, tuple, dict) and len(value) <= _SMALL:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            inner = {key: copied(part) for key, part in pairs}
            return inner if isinstance(value, dict) else type(value)(inner.values())
        if isinstance(value, Dataset) or always:
            packages.add(_package(value))
        elif isinstance(value, (nn.Module, Tensor, type)) or _package(value) not in packages:
            return value
        if not hasattr(value, "__dict__"):
            return value
        new = value
        with suppress(Exception):  # an object that cannot be copied is shared
            new = copy.copy(value)
        copies[id(value)] = new
        kept.append(value)
        if new is not value:
            vars(new).update({name: copied(part) for name, part in vars(value).items()})
        return new

    return copied(dataset, always=True)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def digest_of(value: Any) -> int:
    """Return a checksum that is very likely to differ for two different samples.

    The checksum of a tensor depends on its shape, its dtype and some of its elements.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().float().numpy() if value.dtype == torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return zlib.crc32(repr((value.shape, value.reshape(-1)[:_LOOKED_AT].tolist())).encode())
        flat = value.reshape(-1)
        looked_at = flat[:: max(1, -(-flat.size // _LOOKED_AT))]
        return zlib.crc32(looked_at.tobytes(), zlib.crc32(f"{value.shape} {value.dtype}".encode()))
    if isinstance(value, Mapping):
        return zlib.crc32(repr([(str(key), digest_of(inner)) for key, inner in value.items()]).encode())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([digest_of(inner) for inner in value]).encode())
    if isinstance(value, (str, bytes, int, float, bool, np.generic)) or value is None:
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "tobytes"):  # for example an image
        return zlib.crc32(value.tobytes())
    if hasattr(value, "__dict__") and vars(value):
        return digest_of(vars(value))
    return zlib.crc32(type(value).__qualname__.encode())


def in_users_data(dataset: Any, indices: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the user's own data set without wrappers, and the samples' indices in it."""
    found = list(indices)
    while isinstance(dataset, _Wrapped):
        if isinstance(dataset, Selection):
            found = [int(dataset.rows[index]) for index in found]
        dataset = dataset.dataset
    return dataset, found


def split(
    dataset: Dataset[Any],
    spec: SplitSpec,
    seed: int,
    *,
    held_out: Dataset[Any] | None = None,
    test: Dataset[Any] | None = None,
) -> DataSets:
    """Split the first `spec.limit` samples into a training, a validation and a test set.

    `seed` determines which samples become the validation set, with a share of `spec.held_out`, and the test set, with a
    share of `spec.test`. These sets have no sample in common, and the validation set does not depend on the test set.
    All sets keep the order of the samples.

    Args:
        held_out: a separate validation set, which is also limited to `spec.limit` samples.
        test: a separate test set, which is also limited to `spec.limit` samples.

    Raises:
        DataError: there are too few samples to give each set at least one.
    """
    samples = min(_length(dataset), spec.limit or _length(dataset))
    kept, tested = shares(samples, spec, has_held_out=held_out is not None)
    order = np.random.default_rng(seed).permutation(samples)
    own = [None if other is None else Selection.first(other, spec.limit) for other in (held_out, test)]
    return DataSets(
        Selection(dataset, np.sort(order[kept + tested :])),
        Selection(dataset, np.sort(order[:kept])) if kept else own[0],
        test=Selection(dataset, np.sort(order[kept : kept + tested])) if tested else own[1],
    )


def shares(samples: int, spec: SplitSpec, *, has_held_out: bool = False) -> tuple[int, int]:
    """Return the numbers of validation and test samples for the shares in the spec.

    The numbers are rounded. They are at least 1 unless the share is 0.

    Raises:
        DataError: no sample would be left for training.
    """
    held_out = 0.0 if has_held_out else spec.held_out
    test = spec.test if isinstance(spec.test, float) else 0.0
    kept, tested = (max(1, round(samples * share)) if share else 0 for share in (held_out, test))
    if kept + tested >= samples:
        raise DataError(
            "data.nothing_left_to_train",
            "data.{keys} of {samples} leaves no samples for training. Provide more samples or a smaller share, or "
            "set held_out: 0 to train without a validation set.",
            keys=[f"{key}={share:g}" for key, share in (("held_out", held_out), ("test", test)) if share],
            samples=count(samples, "sample"),
        )
    return kept, tested


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__


class DataSets(NamedTuple):
    """The training, validation and test sets that `DataSpec.build` returns.

    `held_out` is the validation set. `held_out` and `test` are None if the job has no such set. `synthetic` is True for
    generated data.
    """

    train: Dataset[Any]
    held_out: Dataset[Any] | None
    synthetic: bool = False
    test: Dataset[Any] | None = None

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, from the data set's attribute `classes`; None without such an attribute."""
        names: Any = getattr(in_users_data(self.train, [])[0], "classes", None)
        known = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        return list(names) if known else None
