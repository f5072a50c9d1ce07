"""Reading of whole batches from a dataset: collation, epochs, and errors that name samples."""

from __future__ import annotations

import copy
import math
import pickle
import time
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

from paceline.errors import DataError, Problem, StorageError
from paceline.job.samples import Collated, TensorSamples, apart, columns_of, files_of, in_users_data
from paceline.own_random import SampleRandom

Collate = Callable[[list[Any]], Any]
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # pauses before a batch is read again; each pause is twice the last


class SampleRequest(NamedTuple):
    """Sampler's request for the samples of one step; epoch and step are 0-based."""

    epoch: int
    step: int
    indices: list[Any]


class RequestedSamples(Dataset[Any]):
    """Wrapper of the user's dataset that returns one collated batch for each `SampleRequest`.

    `StatefulDataLoader` reads this wrapper, both in the rank and in loader processes.

    A sample's random numbers (torch, NumPy, Python) depend on the seed, the epoch and the sample's index, so every
    plan trains on the same samples. The random numbers of `collate_fn` depend on the seed, the epoch, the step and the
    replica. Reading a batch does not change the random states of the process.

    Attributes:
        draws: whether the dataset or `collate_fn` has used random numbers in this process.
        collate_draws: whether `collate_fn` has used random numbers in this process.
        left_out: indices in the last batch whose samples are None; `collate_fn` omits these samples.
        retry_s: seconds for which reading a batch is retried if a store cannot be reached; 0 raises the first error.
        retry: the attempts before the last batch could be read; None if the first attempt succeeded.
    """

    def __init__(
        self, dataset: Dataset[Any], collate_fn: Collate | None, replica: int, seed: int, *, bulk: bool = False
    ) -> None:
        """Create a reader of a dataset's batches.

        With `bulk`, the reader calls `dataset[indices]` once for a whole batch, and passes the result to `collate_fn`.
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
        self.retry_s = 0.0
        self.retry: Retry | None = None
        self._files = files = files_of(dataset)
        self.in_memory = is_in_memory(dataset)
        self._cannot_draw = (self.in_memory if files is None else not files.draws) and not self.has_own_collate
        self.stateful = isinstance(dataset, Stateful)
        if isinstance(dataset, Stateful):  # torchdata saves the state of an object that has these two methods
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def apart(self) -> RequestedSamples:
        """Return a reader of a copy of the dataset; the copy opens its own files."""
        reader = copy.copy(self)
        reader.dataset = apart(self.dataset)
        reader._files = files_of(reader.dataset)
        reader.read_many = getattr(reader.dataset, "__getitems__", None) if self.read_many is not None else None
        return reader

    def begin_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch`, if it exists and the epoch is new."""
        if epoch != self.epoch:
            self.epoch = epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)

    def check_length(self, expected: int | None) -> None:
        """Refuse a dataset whose length differs from `expected`; None skips the check."""
        if expected is None:
            return
        length = len(self.dataset)  # type: ignore[arg-type]
        if length != expected:
            raise DataError(
                "data.length_changed",
                "replica {replica}: {dataset} has {length} samples at the start of epoch {epoch}, but the run was "
                "set up for {expected}. The length of a training set must not change during a run.",
                replica=self.replica,
                dataset=self.name,
                length=length,
                epoch=self.epoch,
                expected=expected,
            )

    def in_this_process(self, request: SampleRequest) -> Any:
        """Read a batch outside of loader processes, and raise its errors instead of returning them."""
        self.begin_epoch(request.epoch)
        return self._read(request)

    def __getitems__(self, request: SampleRequest) -> Any:
        if get_worker_info() is None:
            return self.in_this_process(request)
        self.begin_epoch(request.epoch)
        if not self._cannot_draw:
            SampleRandom.start(self.seed, request.epoch, request.step, self.replica)
        try:
            return self._read(request)
        except DataError as error:
            return LoaderFailure(error.problems, _portable(error.__cause__ or error))
        except StorageError as error:
            return LoaderFailure(error.problems, error)

    def _read(self, request: SampleRequest) -> Any:
        batch = self.read_or_retry(request.indices, (request.epoch, request.step))
        counts = self._files.counts if self._files is not None and request.indices else {}
        return (
            CountedBatch(batch, self.left_out, counts, self.retry) if self.left_out or counts or self.retry else batch
        )

    def read_or_retry(self, indices: list[int], at: tuple[int, int]) -> Any:
        """Read samples as `read` does, and try again if a store cannot be reached."""
        began = time.monotonic()
        self.retry = None
        try:
            return self.read(indices, at)
        except StorageError as error:
            failed, pause_s = error, _FIRST_PAUSE_S
        first = str(failed)
        while failed.may_pass and time.monotonic() - began + pause_s <= self.retry_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                batch = self.read(indices, at)
            except StorageError as error:
                failed = error
                continue
            self.retry = Retry(time.monotonic() - began, first)
            return batch
        raise failed

    def read(self, indices: list[int], at: tuple[int, int] | None = None) -> Any:
        """Read these samples as one collated batch; return None if `indices` is empty.

        `at` is the batch's epoch and step, which determine the random numbers. If `at` is None, the random numbers
        come from the process's own random states.
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
                self.draws = True  # read this batch again, and seed each sample from now on
            samples = self._samples(indices, at[0])
            states.start(self.seed, *at, self.replica)
            if not self.has_own_collate:
                return self._collate(samples, indices)
            with SampleRandom() as collating:
                batch = self._collate(samples, indices)
                self.collate_draws |= collating.drew()
                return batch

    def length(self) -> int | None:
        """Return the dataset's current length; None if it has no length."""
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def sample(self, index: Any, epoch: int, *, seed: int | None = None) -> Any:
        """Read one sample with the random numbers of an epoch, without collating it.

        If `seed` is given, it replaces the seed of the run.
        """
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
        except (DataError, StorageError):
            raise
        except Exception as error:
            raise self._error(self._culprit(indices), error) from error

    def _collate(self, samples: Any, indices: list[Any]) -> Any:
        own_batches = self.read_many is not None and not self.bulk and not self.has_own_collate
        if own_batches and (columns := columns_of(samples, indices, self.read_many)) is not None:
            return columns
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
        """Return a batch of the given samples, to inspect the shape of a model input."""
        return self.read(indices)

    def _read_each(self, indices: list[Any], epoch: int | None) -> list[Any]:
        samples: list[Any] = []
        try:
            # inlined: a function call per sample would cost as much time as reading a sample of many datasets
            for index in indices:
                if epoch is not None:
                    SampleRandom.start(self.seed, epoch, _number(index))
                samples.append(self.dataset[index])
        except (DataError, StorageError):
            raise
        except Exception as error:
            raise self._error([indices[len(samples)]], error) from error
        return samples

    def _read_one(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except (DataError, StorageError):
            raise
        except Exception as error:
            raise self._error(index if self.bulk else [index], error) from error

    def _culprit(self, indices: list[int]) -> list[int]:
        """Return the first sample that raises an error when read alone; otherwise all samples."""
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


class Retry(NamedTuple):
    """The failed attempts to read a batch that was read at last.

    Attributes:
        seconds: time from the first attempt until the batch was read.
        error: text of the first error.
    """

    seconds: float
    error: str


@dataclass(frozen=True)
class CountedBatch:
    """A batch with further information about how it was read.

    Attributes:
        left_out: indices of the samples that `collate_fn` omitted, because they are None.
        counts: numbers about this batch for the run's record, by name, from the dataset's attribute `counts`.
        retry: the failed attempts to read the batch; None without any.
    """

    batch: Any
    left_out: list[Any]
    counts: dict[str, int]
    retry: Retry | None = None


@dataclass(frozen=True)
class LoaderFailure:
    """Message from a loader process that failed to read a batch."""

    problems: tuple[Problem, ...]
    cause: BaseException


def _portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled, with the original traceback as a note."""
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


def is_in_memory(dataset: Dataset[Any]) -> bool:
    """Return True if the dataset consists of tensors in memory."""
    found = in_users_data(dataset, [])[0]
    return type(found) is TensorDataset or isinstance(found, TensorSamples)


def held_out_batches(
    dataset: Dataset[Any],
    *,
    batch: int,
    replica: int,
    replicas: int,
    in_turn: bool = False,
    retry_s: float = 0.0,
    on_retry: Callable[[Retry], object] = lambda retry: None,
) -> Iterator[Any]:
    """Yield a replica's shard of a validation set in batches of `batch` samples.

    The last batch may be smaller. Batches are collated as in `Loader`.

    By default, the shard is a contiguous part of the set. With `in_turn`, the shard is every `replicas`-th batch of the
    whole set, so the batches do not depend on the number of replicas. Every sample is in exactly one shard. Replicas
    may have different numbers of batches, even none. A sample's random numbers depend only on its index, so every
    evaluation measures the same samples.

    If a store cannot be reached, reading a batch is retried for `retry_s` seconds. `on_retry` is called after each
    batch that was read only in a later attempt.

    Raises:
        DataError: reading a sample raised an error, or samples cannot be collated.
    """
    samples = RequestedSamples(dataset, None, replica, seed=0)
    samples.retry_s = retry_s
    count = len(dataset)  # type: ignore[arg-type]
    if in_turn:
        first, end, stride = replica * batch, count, replicas * batch
    else:
        first, end, stride = replica * count // replicas, (replica + 1) * count // replicas, batch
    for start in range(first, end, stride):
        found = samples.read_or_retry(list(range(start, min(start + batch, end))), (0, start // batch))
        if samples.retry is not None:
            on_retry(samples.retry)
        yield found


def most_batches(samples: int, *, batch: int, replicas: int, in_turn: bool = False) -> int:
    """Return the largest number of batches that `held_out_batches` yields on any replica."""
    if in_turn:
        return math.ceil(samples / (replicas * batch))
    return max(math.ceil(((r + 1) * samples // replicas - r * samples // replicas) / batch) for r in range(replicas))


def padded(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield `count` items: the batches first, then None."""
    return islice(chain(batches, repeat(None)), count)
