"""The batches of one replica: a partition's indices, read through torchdata's `StatefulDataLoader` and resumable at any step."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline.errors import DataError
from paceline.job.partition import Partition
from paceline.train.samples import Collate, Failure, Request, Samples


class Position(NamedTuple):
    """Where a batch stands: its epoch, its step in the epoch (both 0-based), its samples on this replica, and those on all replicas."""

    epoch: int
    step: int
    local: int
    total: int


class Loader:
    """Iterating runs one epoch, or what is left of it, and yields a batch for each step; the next iteration begins the next epoch.

    A batch is what `collate_fn` makes of the samples (torch's `default_collate` where none is given). A dataset whose `__getitems__`
    returns a tuple of tensors has collated already; its batches pass unchanged. A step without a sample on this replica yields None.

    With `num_workers` > 0, so many loader processes read ahead. They live from epoch to epoch, and end when an iteration is broken off, by
    `close`, or with the loader. Each batch there starts from random states of its own (torch, NumPy, Python), so that random augmentation
    repeats after a resume. Without loader processes it draws from the states of the rank.

    Attributes:
        position: of the batch yielded last; None before the first.
        indices: the dataset indices in that batch.

    Raises (while iterating):
        DataError: the dataset no longer has the length that the partition was made for, a sample raised, samples do not fit into one
            batch, or a loader process ended.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        partition: Partition,
        *,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.partition, self.num_workers, self.pin_memory = partition, num_workers, pin_memory
        self.position: Position | None = None
        self.indices: list[int] = []
        self.fills_empty = False  # with a sample that counts for nothing, for loops that compute their own loss
        self._samples = Samples(dataset, collate_fn, partition.replica, partition.seed)
        self._batches: Iterator[Any] | None = None  # torchdata's iterator while an iteration runs
        self._read_by = [partition.replica, partition.replicas, num_workers]
        self._open((0, 0), None)

    def __len__(self) -> int:
        return self.partition.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if self._batches is not None:  # an iteration that was left, but is still referred to
            self.close()
        epoch, start = self._next
        self._samples.begin_epoch(epoch)
        self._samples.check_length(self.partition.held_samples)
        try:
            batches = self._batches = iter(self._loader)
        except RuntimeError as error:
            if self.num_workers:
                raise self._failed_processes(error) from error
            raise
        try:
            for step in range(start, len(self)):
                try:
                    batch = next(batches)
                except RuntimeError as error:
                    if self.num_workers:
                        raise self._failed_processes(error) from error
                    raise
                yield self._receive(batch, epoch, step)
                if self._batches is not batches:  # a state was loaded, or another iteration took over
                    return
            self._resume_from, self._batches = self._reader_state(), None
        finally:
            if self._batches is batches:
                self.close()

    def example(self, count: int) -> Any:
        """A batch of the first `count` samples (the same one again where there are fewer): what a model will be given, for a look at it."""
        return self._samples.read([i % self.partition.held_samples for i in range(count)])

    def state_dict(self) -> dict[str, Any]:
        """The position of the batch to come, as JSON-able values.

        A dataset with `state_dict` and `load_state_dict` has its own state kept in it, which is then to be JSON-able as well.
        """
        epoch, step = self._next
        return {"epoch": epoch, "step": step, "read_by": self._read_by, "reader": self._reader_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, also with other numbers of replicas and loader processes. Ends an iteration that runs.

        A dataset's own state belongs to one replica and its loader processes; it is left out where these are not the same.
        """
        self._end_processes()
        self._open((state["epoch"], state["step"]), state["reader"] if state["read_by"] == self._read_by else None)
        self.position, self.indices = None, []

    def close(self) -> None:
        """End the loader processes. The next iteration starts new ones and continues with the batch to come."""
        reader = self._reader_state()
        self._end_processes()
        self._open(self._next, reader)

    def _open(self, start: tuple[int, int], reader: dict[str, Any] | None) -> None:
        """Have the next iteration begin at `start` = (epoch, step); `reader` is torchdata's own state there."""
        self._next, self._resume_from = start, reader
        self._batches = None
        self._requests: deque[Request] = deque()  # asked for, and not yielded yet
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it
            self._loader: StatefulDataLoader[Any] = StatefulDataLoader(
                self._samples,
                batch_sampler=_Steps(self.partition, start, self._requests),
                collate_fn=_unchanged,  # `Samples` collates
                num_workers=self.num_workers,
                persistent_workers=self.num_workers > 0,
                pin_memory=self.pin_memory,
                snapshot_every_n_steps=int(self._samples.stateful),  # a dataset's own state, sent with each batch
                generator=torch.Generator(),  # otherwise each epoch draws a number from the rank's own random state
            )
        if reader is not None:
            self._loader.load_state_dict(reader)

    def _receive(self, batch: Any, epoch: int, step: int) -> Any:
        """Take note of a batch that is to be yielded."""
        if isinstance(batch, Failure):
            explained = DataError(batch.message)
            explained.from_users_code = True
            raise explained from batch.cause
        self.indices = self._requests.popleft().indices
        self.position = Position(epoch, step, len(self.indices), self.partition.size(step))
        self._next = _following(self.partition, epoch, step)
        return self.example(1) if batch is None and self.fills_empty else batch

    def _failed_processes(self, error: RuntimeError) -> DataError:
        """What is raised when loader processes failed; they are ended."""
        epoch, step = self._next
        self.close()
        return DataError(
            f"replica {self.partition.replica}: its {self.num_workers} loader processes failed at step {step} of epoch {epoch}: "
            f"{error}. Those that were killed often lacked memory: try a smaller num_workers"
        )

    def _reader_state(self) -> dict[str, Any] | None:
        """torchdata's own state at the batch to come; None where only the position matters, and before the first iteration."""
        return self._loader.state_dict() if self._samples.stateful and self._batches is not None else self._resume_from

    def _end_processes(self) -> None:
        # torchdata ends them when its iterator is collected, which an exception's traceback may put off for long.
        iterator = self._loader._iterator
        if self.num_workers and iterator is not None:
            iterator._shutdown_workers()


def held_out_batches(
    dataset: Dataset[Any], *, batch: int, replica: int, replicas: int, in_turn: bool = False, collate_fn: Collate | None = None
) -> Iterator[Any]:
    """A replica's part of a held-out set in batches of `batch` samples, the last one smaller. Collated as by `Loader`.

    The part is contiguous; or, `in_turn`, it is every `replicas`-th batch of the whole set, so that the batches do not depend on the
    number of replicas. All parts together have every sample once. Replicas may have different numbers of batches, also none.

    Raises:
        DataError: a sample raised, or samples do not fit into one batch.
    """
    samples = Samples(dataset, collate_fn, replica, seed=0)
    count = len(dataset)  # type: ignore[arg-type]
    if in_turn:
        first, end, stride = replica * batch, count, replicas * batch
    else:
        first, end, stride = replica * count // replicas, (replica + 1) * count // replicas, batch
    for start in range(first, end, stride):
        yield samples.read(list(range(start, min(start + batch, end))))


def most_batches(samples: int, *, batch: int, replicas: int, in_turn: bool = False) -> int:
    """How many `held_out_batches` the replica with the most of them has."""
    if in_turn:
        return math.ceil(samples / (replicas * batch))
    return max(math.ceil(((r + 1) * samples // replicas - r * samples // replicas) / batch) for r in range(replicas))


def padded(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """The batches, and None in the place of those that are missing to `count`."""
    return islice(chain(batches, repeat(None)), count)


class _Steps:
    """The batch sampler: a replica's requests from `next` = (epoch, step) to the end of that epoch."""

    def __init__(self, partition: Partition, start: tuple[int, int], requests: deque[Request]) -> None:
        self.partition, self.next, self.requests = partition, start, requests

    def __iter__(self) -> Iterator[Request]:
        epoch, start = self.next
        for step, indices in enumerate(self.partition.batches(epoch, start), start):
            request = Request(epoch, step, indices)
            self.next = _following(self.partition, epoch, step)
            self.requests.append(request)
            yield request

    def state_dict(self) -> dict[str, int]:
        """Nothing: the loader starts us at the right step. Without this pair torchdata would draw and drop all steps before it."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing, as `state_dict`."""


def _following(partition: Partition, epoch: int, step: int) -> tuple[int, int]:
    return (epoch, step + 1) if step + 1 < partition.steps_per_epoch else (epoch + 1, 0)


def _unchanged(batch: Any) -> Any:
    return batch
