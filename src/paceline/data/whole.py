"""Datasets whose batch sizes are unknown until read: iterable datasets, and datasets of whole batches.

Every data-parallel rank reads all data and keeps its shard of each batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from paceline.comm import Group
from paceline.data.samples import Collate, RequestedSamples, SampleRequest
from paceline.errors import DataError
from paceline.job.partition import even_shard, even_shares
from paceline.job.samples import digest_of
from paceline.own_random import OwnRandom


@dataclass
class BatchShard:
    """One rank's share of a batch; every rank has read the whole batch.

    Attributes:
        batch: the collated share; None if the share is empty.
        samples: number of samples of the whole batch.
        digest: digest of the whole batch.
        varied: whether the batch's samples differ from one another.
        worker: index of the loader process that read the batch; 0 if the rank itself read it.
        filler: one collated sample of the batch if the share is empty, otherwise None.
    """

    batch: Any
    samples: int
    digest: int
    varied: bool
    worker: int
    filler: Any = None


class Items(RequestedSamples):
    """Reader for `batch_size=None`: each item is a batch, and each rank keeps its rows."""

    def __init__(
        self, dataset: Dataset[Any], collate_fn: Collate | None, replica: int, replicas: int, seed: int
    ) -> None:
        super().__init__(dataset, collate_fn, replica, seed)
        self.replicas = replicas
        self.read_many = None

    def _read(self, request: SampleRequest) -> Any:
        # all ranks read the same items, so they use equal random numbers
        with OwnRandom(self.seed, request.epoch, request.step):
            item = self._read_one(request.indices[0])
            return self._shared(item, f"item {request.indices[0]} of {self.name}")

    def example(self, count: int, indices: list[Any]) -> Any:
        """Return the first row of the first item, repeated `count` times."""
        return self._repeated(self._read_one(indices[0]), count)

    def _repeated(self, item: Any, count: int) -> Any:
        samples = rows_of(item)
        if samples is None:
            raise DataError(
                "data.rows_unknown",
                "the rows of an item of {name} cannot be counted, but a plan that divides the model needs the number "
                "of rows",
                name=self.name,
            )
        return self._collated(cut(item, [0] * count), f"an item of {self.name}")

    def _shared(self, item: Any, where: str) -> BatchShard:
        samples = rows_of(item)
        if samples is None and self.replicas > 1:
            raise DataError(
                "data.batch_uncuttable",
                "replica {replica}: {where} is a batch of type {class_name}. Its number of samples is not known, "
                "so it cannot be divided over {replicas} ranks. Let the data set return single samples and give "
                "the DataLoader a batch_size. Or return tensors (in tuples, lists or dicts) with one row for each "
                "sample.",
                replica=self.replica,
                where=where,
                class_name=type(item).__name__,
                replicas=self.replicas,
            )
        own = item
        if samples is not None and self.replicas > 1:
            rows = even_shard(samples, self.replica, self.replicas)
            own = cut(item, rows) if rows.stop > rows.start else None
        info, batch = get_worker_info(), None if own is None else self._collated(own, where)
        return BatchShard(batch, 1 if samples is None else samples, digest_of(item), True, info.id if info else 0)

    def _collated(self, part: Any, where: str) -> Any:
        try:
            return self.collate(part)
        except Exception as error:
            raise DataError(
                "data.collate_raised",
                "replica {replica}: collate_fn raised {kind} on {where}: {error}",
                replica=self.replica,
                kind=type(error).__name__,
                where=where,
                error=error,
            ) from error


class Iterated(Items):
    """Reader of an `IterableDataset`: every rank reads the whole stream.

    Each rank keeps only its shard of each batch.

    Loader processes take turns, each with its own iterator, as in a DataLoader. To resume at a position, the reader
    reads the stream from its start up to that position.

    Args:
        batch_size: number of samples per batch; None if the stream yields whole batches.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Collate | None,
        replica: int,
        replicas: int,
        seed: int,
        *,
        batch_size: int | None,
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, collate_fn, replica, replicas, seed)
        self.batch_size, self.drop_last = batch_size, drop_last
        # resuming reads the stream from its start, so restoring the dataset's own state would skip samples
        self.stateful = False
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)
        self._stream: tuple[int, OwnRandom, Iterator[Any]] | None = None
        self._read_so_far = 0

    def check_length(self, expected: int | None) -> None:
        """Do nothing, because a stream has no length."""

    def _read(self, request: SampleRequest) -> Any:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self._stream is None or self._stream[0] != request.epoch or self._read_so_far > request.step // workers:
            own = OwnRandom(self.seed, request.epoch, worker)
            with own:
                self._stream = request.epoch, own, self._iterate()
            self._read_so_far = 0
        with self._stream[1]:
            while self._read_so_far < request.step // workers:
                self._take(self._stream[2])
            taken = self._take(self._stream[2])
        if taken is None:
            return BatchShard(None, 0, 0, False, worker)
        if self.batch_size is None:
            return self._shared(taken[0], f"an item of {self.name}")
        if self.has_own_collate:  # a user's collate_fn may omit samples that are None
            taken = [sample for sample in taken if sample is not None] or taken
        return self._share(taken, worker)

    def example(self, count: int, indices: list[Any]) -> Any:
        """Return a batch of the stream's first sample, `count` times; training still reads that sample."""
        with OwnRandom(self.seed, 0, 0):
            stream = self._iterate()
            if id(stream) == id(self.dataset):
                raise DataError(
                    "data.own_iterator",
                    "{name} is its own iterator, so reading its first sample would consume it. Change __iter__ so "
                    "that it returns a new iterator.",
                    name=self.name,
                )
            first = next(stream, None)
        if first is None:
            raise DataError(
                "data.stream_empty", "{name} is empty: its stream ends before the first sample", name=self.name
            )
        if self.batch_size is None:
            return self._repeated(first, count)
        return self._collated([first] * count, f"a batch of {self.name}")

    def _share(self, samples: list[Any], worker: int) -> BatchShard:
        part = samples[even_shard(len(samples), self.replica, self.replicas)]
        digests = [digest_of(sample) for sample in samples]
        whole = zlib.crc32(repr(digests).encode())
        batch = self._collated(part or samples[:1], f"a batch of {self.name}")
        varied = len(set(digests)) > 1
        kept, filler = (batch, None) if part else (None, batch)
        return BatchShard(kept, len(samples), whole, varied, worker, filler)

    def _take(self, stream: Iterator[Any]) -> list[Any] | None:
        self._read_so_far += 1
        try:
            taken = list(islice(stream, self.batch_size or 1))
        except Exception as error:
            raise self._stream_error(error) from error
        short = self.drop_last and self.batch_size is not None and len(taken) < self.batch_size
        return None if short or not taken else taken

    def _iterate(self) -> Iterator[Any]:
        try:
            return iter(self.dataset)
        except Exception as error:
            raise self._stream_error(error) from error

    def _stream_error(self, error: Exception) -> DataError:
        explained = DataError(
            "data.iteration_raised",
            "replica {replica}: iterating {name} raised {kind}: {error}",
            replica=self.replica,
            name=self.name,
            kind=type(error).__name__,
            error=error,
        )
        explained.from_users_code = True
        return explained


class Flow:
    """Global batches of an iterable data set, with the interface of a `Partition`.

    The size of a batch is unknown until the batch is read. A turn is the index of a requested batch; end markers of
    loader processes count as batches.

    Args:
        length: number of batches per epoch, computed from the dataset's length; None if unknown.
        batch_size: number of samples in a full batch; None if unknown.
        workers: number of loader processes, which take turns.
    """

    def __init__(
        self,
        name: str,
        *,
        data_group: Group,
        world: Group,
        seed: int,
        length: int | None,
        batch_size: int | None,
        workers: int,
    ) -> None:
        self.name, self.world, self.seed = name, world, seed
        self.replica, self.replicas = data_group.rank, data_group.size
        self.length, self.batch_size, self.workers = length, batch_size, workers
        self._totals: dict[int, int] = {}
        self._digests: dict[int, int] = {}  # by loader process: digest of its first batch
        self._ended: set[int] = set()
        self._chain = 0  # digest of all batches that this process has read
        self._last: int | None = None  # digest of the last batch
        self._expected: int | None = None  # expected digest of the last batch that is read again
        self._known = 0  # batches before this turn have been trained on

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches per epoch, computed from the dataset's length.

        Raises:
            DataError: the dataset has no length.
        """
        if self.length is None:
            raise DataError(
                "data.stream_without_length",
                "{name} is an IterableDataset without a length. Define __len__, or count steps instead of epochs.",
                name=self.name,
            )
        return self.length

    def size(self, step: int) -> int:
        """Return a step's number of samples over all ranks.

        If `step` is not the last step read, this is the size of a full batch.
        """
        found = self._totals.get(step, self.batch_size)
        if found is None:
            raise DataError(
                "data.samples_unknown",
                "the number of samples in batch {step} of {name} is unknown until the batch is read",
                step=step,
                name=self.name,
            )
        return found

    def shares(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        """Return each data-parallel rank's number of samples in that step."""
        return even_shares(self.size(step), self.replicas)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[list[Any]]:
        """Yield empty index lists without end, one for each batch to read from the stream."""
        return ([] for _ in count(start_step))

    @property
    def ended(self) -> bool:
        """True if the current epoch has no more batches."""
        return len(self._ended) == max(self.workers, 1)

    def begin(self, turn: int, *, again: bool) -> int:
        """Return the turn at which reading begins.

        With `again`, reading begins at an earlier turn, to verify that the data has not changed.
        """
        if turn == 0:
            self._ended, self._digests, self._last = set(), {}, None
        if not turn or not (again or self._expected is not None):
            return turn
        self._expected = self._last if self._expected is None else self._expected
        self._known = turn
        each = max(self.workers, 1)
        return (turn - 1) // each * each  # the first request goes to the first loader process

    def refuse_workers(self, state: Mapping[str, Any], workers: int) -> None:
        """Refuse a state that was saved with another number of loader processes.

        Raises:
            DataError: the numbers differ.
        """
        if (then := state["workers"]) != workers:
            raise DataError(
                "data.workers_differ",
                "{name} was read by {then} loader processes, and each process reads its own part of the stream. Resume "
                "with num_workers={then} instead of {num_workers}.",
                name=self.name,
                then=then,
                num_workers=workers,
            )

    def gather_states(self) -> None:
        """Do nothing, because every rank knows the whole position."""

    def state_dict(self, turn: int) -> dict[str, Any]:
        """Return the state for `load_state_dict`; the caller saves the turn itself."""
        if turn == 0:
            return {"last": None, "ended": []}
        return {"last": self._last if self._expected is None else self._expected, "ended": sorted(self._ended)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`."""
        self._expected, self._ended = state["last"], set(state["ended"])

    def take(self, turn: int, shard: BatchShard) -> bool | None:
        """Accept the next shard, after comparing the data that all ranks have read.

        Returns True if the shard is to be trained on, False to skip it, and None at the end of the stream.

        Raises:
            DataError: the ranks read different data, the data has changed since the position was saved, or two loader
                processes read the same data; raised on all ranks.
        """
        self._chain = zlib.crc32(f"{self._chain} {shard.digest} {shard.samples}".encode())
        self._compare_ranks(turn)
        if turn < self._known:
            self._check_known(turn, shard)
            return False
        self._last = shard.digest
        if not shard.samples:
            self._ended.add(shard.worker)
            return None if len(self._ended) == max(self.workers, 1) else False
        if turn < self.workers:
            if shard.varied and shard.digest in self._digests.values():
                raise DataError(
                    "data.workers_repeat",
                    "every loader process reads the whole of {name}: two of the {workers} processes began with the "
                    "same batch, so each sample would be used several times. Divide the stream by "
                    "torch.utils.data.get_worker_info(), or set num_workers=1.",
                    name=self.name,
                    workers=self.workers,
                )
            self._digests[turn] = shard.digest
        return True

    def found(self, step: int, samples: int) -> None:
        """Record the number of samples of a step."""
        self._totals = {step: samples}

    def _check_known(self, turn: int, shard: BatchShard) -> None:
        if turn + 1 < self._known:
            return
        expected, self._expected, self._last, self._known = self._expected, None, shard.digest, 0
        if shard.digest != expected:
            raise DataError(
                "data.stream_not_repeatable",
                "{name} returns different data the second time: batch {batch} differs, so training cannot resume "
                "there. iter() must return the same stream in every process, so draw random numbers from a "
                "generator with a seed.",
                name=self.name,
                batch=turn,
            )

    def _compare_ranks(self, turn: int) -> None:
        if self.world.size == 1:
            return
        # ranks cannot reduce inference-mode tensors, and an evaluation may read the stream in inference mode
        with torch.inference_mode(False):
            extremes = torch.tensor([self._chain, -self._chain], dtype=torch.int64, device=self.world.device)
            self.world.all_reduce(extremes, "max")
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise DataError(
                "data.streams_differ",
                "the ranks read different streams from {name}: batch {batch} differs between them. paceline "
                "divides the batches, so every rank must read the whole stream in the same order. Remove any "
                "split by rank (split_dataset_by_node, split_by_node, RANK), and draw random numbers from a "
                "generator with a seed.",
                name=self.name,
                batch=turn,
            )


def rows_of(batch: Any) -> int | None:
    """Return a batch's number of rows (dim 0); None if its tensors differ in length."""
    lengths = set(_lengths(batch))
    return lengths.pop() if len(lengths) == 1 and None not in lengths else None


def cut(batch: Any, rows: slice | list[int]) -> Any:
    """Select the same rows from each tensor, array and list in a batch."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[rows] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: cut(value, rows) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if _is_column(batch):
            return batch[rows] if isinstance(rows, slice) else [batch[row] for row in rows]
        parts = [cut(value, rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _lengths(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim:
            yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths(value)
    elif isinstance(batch, (list, tuple)):
        if _is_column(batch):
            yield len(batch)
        else:
            for value in batch:
                yield from _lengths(value)
    elif not (isinstance(batch, (str, bytes, int, float, bool, np.generic)) or batch is None):
        yield None


def _is_column(values: Any) -> bool:
    """Return True if a list has one plain value per sample, such as file names."""
    return (
        bool(values)
        and not hasattr(values, "_fields")
        and all(isinstance(value, (str, bytes, int, float)) for value in values)
    )
