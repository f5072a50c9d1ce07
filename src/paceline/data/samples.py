"""Batchwise reading of a dataset: collation, epochs, and errors that name samples."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate, get_worker_info
from torchdata.stateful_dataloader.stateful import Stateful

from paceline.errors import DataError, Problem
from paceline.job.samples import Collated, TensorSamples, apart, are_columns, in_users_data
from paceline.own_random import SampleRandom, seed_from

Collate = Callable[[list[Any]], Any]


class SampleRequest(NamedTuple):
    """Samples of one step, as requested by the loader's sampler; epoch and step are 0-based."""

    epoch: int
    step: int
    indices: list[Any]


class RequestedSamples(Dataset[Any]):
    """The user's dataset for `StatefulDataLoader`: an item is the whole batch of a `SampleRequest`.

    Loader processes use the same class.

    The random numbers of a sample (torch, NumPy, Python) depend on the seed, the epoch and its index, so every plan
    trains on the same samples. The random numbers of `collate_fn` depend on the seed, the epoch, the step and the
    replica. Each batch leaves the random states of the process unchanged.

    Attributes:
        draws: whether the dataset or `collate_fn` has used random numbers in this process.
        collate_draws: whether `collate_fn` has used random numbers in this process.
        left_out: indices of the last batch whose samples are None; `collate_fn` omits them.
    """

    def __init__(
        self, dataset: Dataset[Any], collate_fn: Collate | None, replica: int, seed: int, *, bulk: bool = False
    ) -> None:
        """Create a reader of a dataset's batches.

        With `bulk`, `dataset[indices]` is a whole batch, which `collate_fn` gets.
        """
        if collate_fn is None and isinstance(dataset, Collated):
            collate_fn = dataset.collate_fn
        self.dataset, self.replica, self.seed, self.bulk = dataset, replica, seed, bulk
        self.collate = collate_fn or default_collate
        self.has_own_collate = collate_fn not in (None, default_collate)
        self.read_many: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
        self.epoch: int | None = None
        self.draws = self.collate_draws = False
        self.left_out: list[Any] = []
        kept = type(in_users_data(dataset, [])[0]) in (TensorDataset, TensorSamples)
        self._cannot_draw = kept and not self.has_own_collate
        self.stateful = isinstance(dataset, Stateful)
        if isinstance(dataset, Stateful):  # torchdata looks for a state if an object has these two methods
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def apart(self) -> RequestedSamples:
        """Return a reader of a copied dataset, which opens its own files."""
        reader = copy.copy(self)
        reader.dataset = apart(self.dataset)
        reader.read_many = getattr(reader.dataset, "__getitems__", None) if self.read_many is not None else None
        return reader

    def begin_epoch(self, epoch: int) -> None:
        """Set the dataset's epoch, if it has `set_epoch`."""
        if epoch != self.epoch:
            self.epoch = epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)

    def check_length(self, expected: int | None) -> None:
        """Refuse a dataset whose length has changed; None checks nothing."""
        if expected is None:
            return
        length = len(self.dataset)  # type: ignore[arg-type]
        if length != expected:
            raise DataError(
                "data.length_changed",
                "replica {replica}: {dataset} has {length} samples at the start of epoch {epoch}, but the run was "
                "set up for {expected}. A training set must keep its length while it is used.",
                replica=self.replica,
                dataset=self.name,
                length=length,
                epoch=self.epoch,
                expected=expected,
            )

    def __getitems__(self, request: SampleRequest) -> Any:
        self.begin_epoch(request.epoch)
        if get_worker_info() is None:
            return self._read(request)
        seed_from(self.seed, request.epoch, request.step, self.replica)
        try:
            return self._read(request)
        except DataError as error:
            return LoaderFailure(error.problems, _portable(error.__cause__ or error))

    def _read(self, request: SampleRequest) -> Any:
        batch = self.read(request.indices, (request.epoch, request.step))
        return Shortened(batch, self.left_out) if self.left_out else batch

    def read(self, indices: list[int], at: tuple[int, int] | None = None) -> Any:
        """Read these samples as one collated batch; None without samples.

        The random numbers depend on `at`, the batch's epoch and step, or on the process's own random states.
        """
        if not indices:
            return None
        if at is None or self._cannot_draw:
            return self._collate(self._samples(indices), indices)
        with SampleRandom() as states:
            if not self.draws:
                batch = self._collate(self._samples(indices), indices)
                if not states.drew():
                    return batch
                self.draws = True  # read this batch again; from now on each sample has its own random states
            samples = self._samples(indices, at[0])
            states.start(self.seed, *at, self.replica)
            if not self.has_own_collate:
                return self._collate(samples, indices)
            with SampleRandom() as collating:
                batch = self._collate(samples, indices)
                self.collate_draws |= collating.drew()
                return batch

    def length(self) -> int | None:
        """Return the current number of samples; None for a data set without a length."""
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def sample(self, index: Any, epoch: int, *, seed: int | None = None) -> Any:
        """Read one sample as in the given epoch, not collated; `seed` replaces the run's seed."""
        with SampleRandom() as states:
            states.start(self.seed if seed is None else seed, epoch, _number(index))
            return self._samples([index])

    def _samples(self, indices: list[Any], epoch: int | None = None) -> Any:
        if self.read_many is None and not self.bulk:
            return self._read_each(indices, epoch)
        if epoch is not None:
            parts = []
            for index in indices:
                SampleRandom.start(self.seed, epoch, _number(index))
                parts.append(self._samples([index]))
            return _joined(parts)
        if self.bulk or self.read_many is None:
            return self._read_one(indices)
        try:
            return self.read_many(indices)
        except Exception as error:
            raise self._error(self._culprit(indices), error) from error

    def _collate(self, samples: Any, indices: list[Any]) -> Any:
        own_batches = self.read_many is not None and not self.bulk and not self.has_own_collate
        if own_batches and are_columns(samples, indices, self.read_many):
            return samples
        self.left_out = []
        if self.has_own_collate and isinstance(samples, list) and not self.bulk:
            self.left_out = [index for index, sample in zip(indices, samples, strict=False) if sample is None]
        try:
            return self.collate(samples)
        except Exception as error:
            listed = _listed(in_users_data(self.dataset, indices)[1])
            raise DataError(
                "data.not_collated",
                "replica {replica}: samples {samples} of {name} cannot be collated into a batch: {kind}: {error}. "
                "All samples of a batch must have the same structure, shapes and types, or the loader needs a "
                "collate_fn.",
                replica=self.replica,
                samples=listed,
                name=self.name,
                kind=type(error).__name__,
                error=error,
            ) from error

    def example(self, count: int, indices: list[Any]) -> Any:
        """Return a batch of `count` samples for inspection, with these indices if given."""
        return self.read(indices)

    def _read_each(self, indices: list[Any], epoch: int | None) -> list[Any]:
        samples: list[Any] = []
        try:
            for index in indices:  # in one call, because a call per sample takes as long as many datasets themselves
                if epoch is not None:
                    SampleRandom.start(self.seed, epoch, _number(index))
                samples.append(self.dataset[index])
        except Exception as error:
            raise self._error([indices[len(samples)]], error) from error
        return samples

    def _read_one(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise self._error(index if self.bulk else [index], error) from error

    def _culprit(self, indices: list[int]) -> list[int]:
        """Return the first sample that raises when read alone; all samples if none does."""
        for index in indices:
            alone = False
            with suppress(Exception):
                self.dataset.__getitems__([index])  # type: ignore[attr-defined]
                alone = True
            if not alone:
                return [index]
        return indices

    def _error(self, indices: list[Any], error: Exception) -> DataError:
        indices = in_users_data(self.dataset, indices)[1]
        which = f"sample {indices[0]}" if len(indices) == 1 else f"the batch of samples {_listed(indices)}"
        explained = DataError(
            "data.sample_raised",
            "replica {replica}: {which} of {name} raised {kind}: {error}. Read this sample alone to find the cause "
            "(dataset[{index}]), then repair it or leave it out.",
            replica=self.replica,
            which=which,
            name=self.name,
            kind=type(error).__name__,
            error=error,
            index=indices[0],
        )
        explained.from_users_code = True
        return explained

    @property
    def name(self) -> str:
        """Type name of the user's dataset, or "Subset of its.Type" for a subset."""
        dataset, name = in_users_data(self.dataset, [])[0], ""
        while hasattr(dataset, "dataset"):
            name += f"{type(dataset).__qualname__} of "
            dataset = dataset.dataset
        return f"{name}{type(dataset).__module__}.{type(dataset).__qualname__}"


@dataclass(frozen=True)
class Shortened:
    """A batch from which `collate_fn` omitted samples, because they are None."""

    batch: Any
    left_out: list[Any]


@dataclass(frozen=True)
class LoaderFailure:
    """Message of a loader process that could not make a batch."""

    problems: tuple[Problem, ...]
    cause: BaseException


def _portable(error: BaseException) -> BaseException:
    """Return the error with its traceback as text; a RuntimeError if it cannot be pickled."""
    told = "".join(traceback.format_exception(error))
    portable: BaseException = RuntimeError(f"{type(error).__name__}: {error}")
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))
        portable = error
    portable.add_note(f"In a loader process:\n{told}")
    return portable


def _number(index: Any) -> int:
    return index if isinstance(index, int) else zlib.crc32(repr(index).encode())


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        columns = [_joined(list(column)) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        return [sample for part in parts for sample in part]
    raise DataError(
        "data.random_batch",
        "the data set draws random numbers while it reads a batch, and batches of type {class_name} cannot be "
        "built from single samples. Return a list of samples, or tensors in a tuple or dict.",
        class_name=type(first).__name__,
    )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")


def held_out_batches(
    dataset: Dataset[Any], *, batch: int, replica: int, replicas: int, in_turn: bool = False
) -> Iterator[Any]:
    """Yield a replica's shard of a validation set in batches of `batch` samples.

    The last batch may be smaller. Batches are collated as in `Loader`.

    The shard is contiguous. With `in_turn`, it is every `replicas`-th batch of the whole set, so that the batches do
    not depend on the number of replicas. All shards together have every sample once. Replicas may have different
    numbers of batches, even none. A sample's random numbers depend on its index, so every evaluation measures the same
    samples.

    Raises:
        DataError: a sample raised, or samples cannot be collated.
    """
    samples = RequestedSamples(dataset, None, replica, seed=0)
    count = len(dataset)  # type: ignore[arg-type]
    if in_turn:
        first, end, stride = replica * batch, count, replicas * batch
    else:
        first, end, stride = replica * count // replicas, (replica + 1) * count // replicas, batch
    for start in range(first, end, stride):
        yield samples.read(list(range(start, min(start + batch, end))), (0, start // batch))


def most_batches(samples: int, *, batch: int, replicas: int, in_turn: bool = False) -> int:
    """Return the number of `held_out_batches` of the replica with the most."""
    if in_turn:
        return math.ceil(samples / (replicas * batch))
    return max(math.ceil(((r + 1) * samples // replicas - r * samples // replicas) / batch) for r in range(replicas))


def padded(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield the batches, followed by None up to `count`."""
    return islice(chain(batches, repeat(None)), count)
