"""Loader of one replica's shard of each global batch; it can resume at any step.

Batches are read directly, or through torchdata's `StatefulDataLoader` if there are loader processes, pinned memory or a
stateful data set.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline.corpus.host_files import FetchAhead
from paceline.data.loader_processes import Begin, Workers, failed, make_room_for_sockets
from paceline.data.samples import Collate, CountedBatch, LoaderFailure, RequestedSamples, Retry, SampleRequest
from paceline.data.sending import Sending
from paceline.data.stream import SamplerStream
from paceline.data.whole import BatchShard, Flow
from paceline.errors import DataError, LoaderProcessError, PlanError, StorageError
from paceline.job.batch import on_device, pinned
from paceline.job.partition import Partition, Place
from paceline.job.samples import digest_of, files_of, in_users_data
from paceline.own_random import kept_random

_CPU = torch.device("cpu")
_LOOKED_AHEAD_EVERY = 16  # steps between updates of the list of shards to fetch ahead


class Position(NamedTuple):
    """Epoch and step of a batch (both 0-based), and its number of samples.

    `local` is the number of samples on this replica; `total` is the number on all replicas. `counts` holds further
    numbers about this replica's batch by name, such as the number of `replaced` samples. A step that omits positions
    of the batch corrects `positions` and `padding`.
    """

    epoch: int
    step: int
    local: int
    total: int
    counts: dict[str, int] = {}  # noqa: RUF012 - without `positions`, nothing is corrected


class Loader:
    """Loader of one replica's batches; each iteration reads one epoch, or the rest of it.

    An iteration yields one batch for each step. If an iteration stops early, the next iteration continues the same
    epoch. With `begins_anew`, every iteration begins a new epoch, as in a `DataLoader`, and iterations may overlap.
    Only the first iteration after `load_state_dict` then begins within an epoch.

    `collate_fn` makes a batch from a list of samples; the default is torch's `default_collate`. If the dataset's
    `__getitems__` returns a tuple of tensors and there is no `collate_fn`, that tuple is the batch. If a step has no
    samples for this replica, the batch is None.

    If `num_workers` is positive, that number of loader processes read batches ahead of time. The processes end when an
    iteration stops early, on `close`, or when the loader is deleted. A sample's random numbers depend only on the
    seed, the epoch and the sample's index, with or without loader processes.

    Attributes:
        position: position of the last yielded batch; None before the first batch.
        indices: dataset indices of the samples in the last yielded batch.
        left_out: indices whose samples are None; `collate_fn` omitted them from the last yielded batch.
        retry_s: seconds for which reading a batch is retried if a store cannot be reached.
        retries: for each yielded batch that was read only in a later attempt: its epoch, its step and the attempts. The
            user of the loader may clear the list.

    Raises (while iterating): DataError: the length of the dataset has changed, reading a sample raised an error,
        samples cannot be collated, or the ranks read different data. LoaderProcessError: a loader process was
        killed, exited, or did not answer in time.
    """

    # kept by the class, because modules lose their globals while Python exits
    _python_exits = staticmethod(sys.is_finalizing)

    def __init__(
        self,
        dataset: Dataset[Any],
        partition: Partition | SamplerStream | Flow,
        *,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        workers: Workers | None = None,
        samples: RequestedSamples | None = None,
        rank: int | None = None,
        begins_anew: bool = False,
        retry_s: float = 0.0,
    ) -> None:
        # `workers` overrides `num_workers`; `samples` replaces the reader of the dataset; errors name `rank`; if a
        # store cannot be reached, reading a batch is retried for `retry_s` seconds
        self.begins_anew = begins_anew
        self._epochs = 0  # number of epochs begun; only used with `begins_anew`
        self._within = False  # whether the next iteration begins at a loaded position
        # reader of the overlapping iteration that yielded the last batch, if any
        self._overlapping: Loader | None = None
        self.partition, self.workers, self.pin_memory = partition, workers or Workers(num_workers), pin_memory
        self.num_workers = self.workers.count
        self.position: Position | None = None
        self.indices: list[Any] = []
        self.left_out: list[Any] = []
        # whether an empty share gets one sample of weight 0; for users' own loops, which compute the loss themselves
        self.fills_empty = False
        self.device = _CPU  # device of the batches; only users' own loops change it
        self._rank = partition.replica if rank is None else rank
        self._samples = samples or RequestedSamples(dataset, collate_fn, partition.replica, partition.seed)
        self._samples.retry_s = self.retry_s = retry_s
        self.retries: list[tuple[int, int, Retry]] = []
        # With loader processes, this process reads a copy of the dataset, so that the processes share no open file.
        self._looks = self._samples.apart() if self.num_workers else self._samples
        self._batches: Iterator[Any] | None = None  # torchdata's iterator of the running iteration
        # torchdata's iterator before the iteration begins, if loader processes were started early
        self._started: Iterator[Any] | None = None
        self._fetches = _fetch_ahead(dataset)
        self._read_by = [partition.replica, partition.replicas, self.num_workers]
        self._needs_samples = ""
        self._next: tuple[int, int]  # epoch and step of the next batch
        self._turn = 0  # number of requested shards of a `Flow`, including end markers
        self._fingerprint: list[int] | None = None  # None: not computed yet; empty: no fingerprint
        self._open((0, 0), None)

    def __len__(self) -> int:
        try:
            return self.partition.steps_per_epoch
        except DataError as error:
            raise TypeError(str(error)) from None  # `list` treats a TypeError from `len` as an unknown length

    def __bool__(self) -> bool:
        return True  # otherwise `bool` would call `len`, which can raise

    def __iter__(self) -> Iterator[Any]:
        return self._new_epoch() if self.begins_anew else self._remainder()

    def _new_epoch(self) -> Iterator[Any]:
        """Yield the batches of a new epoch; earlier iterations may still be running."""
        epoch, step = self._next if self._within else (self._epochs, 0)
        self._within, self._epochs = False, max(self._epochs, epoch + 1)
        reader = self if self._batches is None else self._beside()
        if isinstance(self.partition, SamplerStream) and epoch > self._next[0]:
            self.partition.leave(self._next[1] + self.workers.ahead)
        reader._next = epoch, step
        reader._turn = reader._turn if step else 0
        for batch in reader._remainder():
            self._overlapping = None if reader is self else reader
            self.position, self.indices, self.left_out = reader.position, reader.indices, reader.left_out
            yield batch

    def _beside(self) -> Loader:
        if not isinstance(self.partition, Partition):
            raise DataError(
                "data.two_iterators",
                "a second iteration of {name} began before the first had ended, and both would read the same "
                "stream. End the first iteration, or give the second one its own DataLoader: engine.deal(loader)",
                name=self.partition.name,
            )
        reader = copy.copy(self)
        reader._samples, reader.begins_anew = copy.copy(self._samples), False
        reader._open(self._next, None)
        return reader

    def _remainder(self) -> Iterator[Any]:
        if self._batches is not None:  # an earlier iteration stopped early, but its generator still exists
            self.close()
        epoch, start = self._begin(*self._next)
        batches: Any = self._start(epoch, start) if self._started is None else self._started
        self._started, self._batches = None, batches
        try:
            step = start
            while self._has(epoch, step):
                received = self._receive(self._ahead.popleft() if self._ahead else self._read(batches), epoch, step)
                if received is None:  # the stream of one loader process ended
                    continue
                step += 1
                if step % _LOOKED_AHEAD_EVERY == 0:
                    self._fetch_ahead(epoch, step)
                yield received[0] if self.device is _CPU else on_device(received[0], self.device)
                if self._batches is not batches:  # a state was loaded, or another iteration began
                    return
            self._next, self._turn = (epoch + 1, 0), 0
            self._fetch_ahead(epoch + 1, 0)
            self._resume_from, self._batches = self._reader_state(), None
            if not self.workers.persistent or self._sending.has_lost_memory:
                self.close()
        finally:
            if self._batches is batches and not self._python_exits() and self._end_processes.still_active():
                self.close()
        if self.begins_anew and start and step == start:  # the stream ended at its saved position: begin the next epoch
            yield from self

    def start(self) -> None:
        """Start the loader processes now, if any, instead of at the next iteration.

        Loader processes are forked. They share the memory of existing objects, such as a model, and the kernel copies
        each page that is written later. For streams, this method does nothing: their ranks must communicate first, so
        their loader processes start with the iteration.
        """
        if self.num_workers and isinstance(self.partition, Partition) and self._started is self._batches is None:
            self._started = self._start(*self._next)

    @property
    def can_look_ahead(self) -> bool:
        """True if `look_ahead` may be called; False for streams, data in memory and stateful datasets."""
        return isinstance(self.partition, Partition) and not (self._samples.stateful or self._samples.in_memory)

    def look_ahead(self, count: int, most_bytes: float = math.inf) -> StorageError | None:
        """Read up to `count` batches of this epoch before they are due.

        Call this method before an iteration, or between two of its batches. An error of the dataset is stored, and
        raised when its batch is due. No further batch is read once the read batches have `most_bytes`.

        Returns:
            The error if one of these batches cannot be read from its store; None otherwise.

        Raises:
            LoaderProcessError: a loader process failed.
        """
        assert self.can_look_ahead
        epoch, step = self._next
        over = step == 0 and self._batches is not None  # the iteration has yielded its last batch
        count = 0 if over else min(count, self.partition.steps_per_epoch - step)
        if count > 0 and self._batches is self._started is None:
            self._started = self._start(epoch, step)
        while len(self._ahead) < count and not any(isinstance(batch, Exception) for batch in self._ahead):
            if most_bytes < math.inf and sum(map(_bytes_of, self._ahead)) >= most_bytes:
                break
            try:
                self._ahead.append(self._read(self._started if self._batches is None else self._batches))
            except LoaderProcessError:
                raise
            except Exception as error:  # noqa: BLE001 - raised when the batch is due
                self._ahead.append(error)
        causes = (batch.cause if isinstance(batch, LoaderFailure) else batch for batch in self._ahead)
        return next((cause for cause in causes if isinstance(cause, StorageError)), None)

    @property
    def running(self) -> bool:
        """True while an iteration is in progress."""
        return (self._overlapping or self)._batches is not None

    def example(self, count: int) -> Any:
        """Return the first `count` samples as a model input, repeated if there are too few."""
        with kept_random():
            if isinstance(self.partition, Partition):
                return self._looks.read([i % self.partition.held_samples for i in range(count)])
            first = self.partition.first(count) if isinstance(self.partition, SamplerStream) else []
            return self._looks.example(count, first)

    def read(self, indices: list[int], position: Position) -> Any:
        """Read the given samples as a batch in this process; None if there are none.

        The given samples may be anywhere in the epoch. The position of the next iteration does not change.
        """
        self._looks.begin_epoch(position.epoch)
        batch = self._looks.read(indices) if indices else None
        self.position, self.indices, self.left_out = position, indices, self._looks.left_out
        return on_device(batch, self.device)

    def digests(self) -> dict[int, int]:
        """Read the last batch's samples again; return a digest for each dataset index."""
        assert self.position is not None
        epoch, indices = self.position.epoch, self.indices
        self._looks.begin_epoch(epoch)
        digests = [digest_of(self._looks.sample(index, epoch)) for index in indices]
        return dict(zip(in_users_data(self._looks.dataset, indices)[1], digests, strict=True))

    def fingerprint(self) -> list[int] | None:
        """Return the number of samples and the digests of three samples, to detect changed data.

        The samples are read once; later calls return the same list. If two reads of a sample differ, its digest is 0.
        For streams, and for datasets with `state_dict` or `set_epoch`, the list has only the number of samples. Returns
        None if the dataset has no length, if the length has changed, or if each host has its own files.
        """
        if self._fingerprint is None:
            self._fingerprint = self._read_fingerprint()
        found = self._fingerprint
        return found if found and found[0] == self._samples.length() else None

    def _read_fingerprint(self) -> list[int]:
        partition, dataset = self.partition, in_users_data(self._looks.dataset, [])[0]
        files = files_of(dataset)
        samples = self._samples.length()
        if samples is None or (isinstance(partition, Partition) and partition.held_samples != partition.samples):
            return []
        if files is not None:
            return [samples, *files.digest]
        found = [samples]
        if isinstance(partition, Flow) or self._looks.stateful or hasattr(dataset, "set_epoch"):
            return found
        for index in dict.fromkeys((0, samples // 2, samples - 1)):
            # an unreadable sample gets no digest here; the training step that reads it reports the error
            with suppress(DataError, TypeError, RuntimeError):
                digest, again = (digest_of(self._looks.sample(index, 0, seed=0)) for _ in range(2))
                found.append(digest if digest == again else 0)
        return found

    @property
    def dataset(self) -> Dataset[Any]:
        """The dataset that this process reads."""
        return self._looks.dataset

    @property
    def is_packed(self) -> bool:
        """True if the user's dataset has `packed = True`: its sequences hold several documents."""
        return bool(getattr(in_users_data(self.dataset, [])[0], "packed", False))

    @property
    def pads_at_end(self) -> bool:
        """True if padding comes last in causal sequences, with the label -100."""
        files = files_of(self.dataset)
        return not self._samples.has_own_collate and bool(getattr(files, "pads_at_end", False))

    @property
    def name(self) -> str:
        """Type name of the user's dataset, for errors."""
        return self._samples.name

    def random_inputs(self) -> tuple[str, bool]:
        """Return the name of the user's dataset, and whether `collate_fn` draws random numbers."""
        self._looks.read(list(range(min(2, len(self._looks.dataset)))), (0, 0))  # type: ignore[arg-type]
        return self._looks.name, self._looks.collate_draws

    def check_weight(self) -> None:
        """Refuse to weight the last batch by its number of samples if `collate_fn` omitted samples.

        Raises:
            DataError: `collate_fn` omitted samples, so the batch sizes of the other replicas are unknown.
        """
        if not self.left_out or self.partition.replicas == 1:
            return
        index = in_users_data(self._samples.dataset, self.left_out)[1][0]
        raise DataError(
            "data.sample_none",
            "sample {index} of {samples} is None, and collate_fn leaves it out. The ranks then have batches of "
            "unknown sizes, so their losses cannot be weighted. Remove such samples from the data set with "
            "torch.utils.data.Subset(dataset, indices). In your own loop you can instead give the number of "
            "samples: engine.backward(loss, items=len(x))",
            index=index,
            samples=self._samples.name,
        )

    def smallest_share(self) -> int:
        """Return the smallest replica's number of samples in the first batch; 1 if unknown."""
        return min(self._first_shares())

    def largest_share(self) -> int:
        """Return the largest replica's number of samples in the first batch; 1 if unknown."""
        return max(self._first_shares())

    def _first_shares(self) -> Sequence[int]:
        if isinstance(self.partition, SamplerStream):
            self.partition.first(1)  # draws the first batch
        try:
            return self.partition.shares(0)
        except DataError:
            return (1,)

    def fill_every_rank(self, what: str) -> None:
        """Require a sample for each replica in every batch; errors name `what`.

        `what` is the feature that needs the samples.

        Raises:
            PlanError: a batch has fewer samples than replicas.
        """
        self._needs_samples = what
        if isinstance(self.partition, Partition):
            self._check_filled(self.partition.steps_per_epoch - 1)

    def reshare(self, shares: Sequence[int]) -> Place:
        """Set each replica's share of full batches; return the first changed epoch and step.

        Every rank must call this method between the same two batches, with equal `shares`. Batches that loader
        processes have already requested keep their shares.
        """
        assert isinstance(self.partition, Partition)
        epoch, step = self._next[0], self._next[1] + self.workers.ahead + len(self._ahead)
        place = (epoch, step) if step < self.partition.steps_per_epoch else (epoch + 1, 0)
        self.partition.changes.add(place, shares)
        return place

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch as JSON values.

        All entries are equal on every rank, except `reader`. If the dataset has `state_dict` and `load_state_dict`,
        `reader` includes the dataset's state, which must also consist of JSON values.
        """
        reader = self._overlapping or self
        epoch, step = reader._next
        if self.begins_anew and not self._within and not step:
            epoch = self._epochs
        state = {"epoch": epoch, "step": step, "read_by": self._read_by, "reader": reader._reader_state()}
        state |= {"epochs": self._epochs} if self.begins_anew else {}
        if isinstance(self.partition, Partition):
            state["order"] = _order_of(self.partition)
            state |= {"shares": changes} if (changes := self.partition.changes.state()) else {}
        if isinstance(self.partition, SamplerStream):
            state["stream"] = self.partition.state_dict(epoch, step)
        if isinstance(self.partition, Flow):
            state["flow"] = {"turn": self._turn, "workers": self.num_workers, **self.partition.state_dict(self._turn)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`, and end a running iteration.

        The numbers of replicas and loader processes may differ from those at saving. If they differ, the dataset's own
        state is not restored, because the state belongs to one replica and its loader processes.

        Raises:
            DataError: the state was saved with another type of loader, sample order or batch size, or with a stream
                and another number of loader processes.
        """
        own = isinstance(self.partition, SamplerStream), isinstance(self.partition, Flow)
        if ("stream" in state, "flow" in state) != own:
            raise DataError(
                "data.position_of_other_loader",
                "the saved position belongs to a different kind of DataLoader (sampler or data set). Resume with "
                "the loader that it was saved with.",
            )
        if isinstance(self.partition, Partition):
            self._check_order(state)
            self.partition.changes.load(state.get("shares", ()))
        began = state["epoch"] or state["step"]
        if isinstance(self.partition, Flow) and began:
            self.partition.refuse_workers(state["flow"], self.num_workers)
        self._end_processes()
        self._open((state["epoch"], state["step"]), state["reader"] if state["read_by"] == self._read_by else None)
        if isinstance(self.partition, SamplerStream):
            self.partition.load_state_dict(state["stream"])
        if isinstance(self.partition, Flow):
            self._turn = state["flow"]["turn"]
            self.partition.load_state_dict(state["flow"])
        self.position, self.indices = None, []
        self._overlapping, self._within = None, True
        self._epochs = state.get("epochs", state["epoch"])

    def gather_states(self) -> None:
        """Exchange the states of a stream's parts before the position is saved.

        Every rank must call this.
        """
        if isinstance(self.partition, Flow):
            self.partition.gather_states()

    def close(self) -> None:
        """End the loader processes.

        The next iteration starts new processes and continues with the next batch.
        """
        reader = self._reader_state()
        self._end_processes()
        if self._fetches is not None:
            self._fetches.close()
        self._open(self._next, reader)

    def _open(self, start: tuple[int, int], reader: dict[str, Any] | None) -> None:
        """Make the next iteration begin at `start` = (epoch, step), with torchdata's state `reader`."""
        self._next, self._resume_from = start, reader
        self._batches = self._started = None
        self._ahead: deque[Any] = deque()  # batches, or errors, that `look_ahead` has read
        self._requests: deque[SampleRequest] = deque()  # requested, but not yet yielded
        self._steps = _RequestSampler(self.partition, start, self._requests)
        self._sending = Sending(self.workers)
        in_turn = not (self.num_workers or self.pin_memory or self._samples.stateful)
        self._loader = None if in_turn else self._torchdata_loader(reader)
        # runs at exit too: priority 20 comes before multiprocessing closes its queues (priority 10) and joins them
        self._end_processes = Finalize(self, _end_processes, (self._loader,), exitpriority=20)

    def _torchdata_loader(self, reader: dict[str, Any] | None) -> StatefulDataLoader[Any]:
        """Create torchdata's loader, and load its state `reader` unless this is None.

        If no feature of torchdata is needed, `_InTurn` reads the batches instead.
        """
        workers = self.workers
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls `set_vital`
            loader: StatefulDataLoader[Any] = StatefulDataLoader(
                self._samples,
                batch_sampler=self._steps,
                # `RequestedSamples` has already collated; torch can only pin batches that `Sending` has not packed
                collate_fn=Unpinned if self.pin_memory else self._sending if workers.count else _unchanged,
                num_workers=workers.count,
                prefetch_factor=workers.prefetch_factor,
                persistent_workers=workers.count > 0,
                timeout=workers.timeout_s,
                worker_init_fn=Begin(workers.init) if workers.count else None,
                multiprocessing_context=workers.context,
                pin_memory=self.pin_memory,
                # loader processes send the dataset's own state with each batch
                snapshot_every_n_steps=int(self._samples.stateful),
                # without a generator, each epoch would draw a number from the rank's own random state
                generator=torch.Generator(),
            )
        if reader is not None:
            loader.load_state_dict(reader)
        return loader

    def _check_order(self, state: dict[str, Any]) -> None:
        assert isinstance(self.partition, Partition)
        shards, saved = self.partition.shards, state.get("order")
        spans_epochs = shards is not None and shards.spans_epochs
        if saved is None or not (state["step"] or (spans_epochs and state["epoch"])):
            return
        steps = state["epoch"] * self.partition.steps_per_epoch + state["step"]
        saved, now = (_begun(order, steps) for order in (saved, _order_of(self.partition)))
        names = [name for name in {**now, **saved} if saved.get(name) != now.get(name)]
        if not names:
            return
        raise DataError(
            "data.position_differs",
            "the saved position is step {step} of an epoch that was divided differently: {differs}. With the "
            "new values, some samples would be used twice, and others not at all. Resume with the same values, or "
            "{instead}.",
            step=state["step"],
            differs="; ".join(f"{name} was {saved.get(name)} and is {now.get(name)}" for name in names),
            instead="begin a new run" if spans_epochs else "change them at the end of an epoch",
        )

    # Iteration

    def _begin(self, epoch: int, start: int) -> tuple[int, int]:
        """Return the epoch and step at which the iteration begins.

        The epoch of a loaded state may have ended. With a `SamplerStream`, the iteration then begins with the next
        epoch.
        """
        if isinstance(self.partition, SamplerStream):
            return self.partition.begin(epoch, start, start + self.workers.ahead + 1)
        if isinstance(self.partition, Flow):
            self._turn = self.partition.begin(self._turn, again=self.num_workers > 0)
        return epoch, start

    def _has(self, epoch: int, step: int) -> bool:
        """Return True if the epoch has that step; all ranks must call this together."""
        if isinstance(self.partition, Partition):
            return step < self.partition.steps_per_epoch
        if isinstance(self.partition, SamplerStream):
            self.partition.prepare(epoch, step + self.workers.ahead + 1)
            return self.partition.has(step)
        return not self.partition.ended

    def _start(self, epoch: int, start: int) -> Any:
        """Start torchdata's iterator; torch's SIGCHLD handler is only active during reads."""
        self._samples.begin_epoch(epoch)
        self._samples.check_length(self.partition.held_samples if isinstance(self.partition, Partition) else None)
        self._steps.next = epoch, self._turn if isinstance(self.partition, Flow) else start
        if self._loader is None:
            self._fetch_ahead(epoch, start)
            return _InTurn(iter(self._steps), self._samples)
        if self.num_workers:
            make_room_for_sockets()
        try:
            batches: Any = iter(self._loader)
        except RuntimeError as error:
            if self.num_workers:
                raise self._failed_processes(error) from error
            raise
        self._fetch_ahead(epoch, start)
        if self.num_workers and batches._worker_pids_set:
            # torch's SIGCHLD handler would interrupt the main thread anywhere, even while it waits for other ranks.
            # `_read` registers the processes only while it waits for a batch.
            _remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        return batches

    def _fetch_ahead(self, epoch: int, step: int) -> None:
        """Fetch the shards that this replica reads next, in the background."""
        if self._fetches is not None and isinstance(self.partition, Partition):
            files = files_of(self.dataset)
            wanted: list[int] = []
            held = 0
            for shard in self.partition.shards_from(epoch, step):
                held += files.bytes_of(shard)
                if wanted and held > files.ahead_bytes:
                    break
                wanted.append(shard)
            self._fetches.want(wanted)

    def _read(self, batches: Any) -> Any:
        if not self.num_workers:
            return _unwrapped(next(batches))
        if any(worker.exitcode is not None for worker in batches._workers):
            raise self._failed_processes(None)
        _set_worker_pids(id(batches), tuple(worker.pid for worker in batches._workers))
        try:
            batch = next(batches)
        except (RuntimeError, OSError, EOFError) as error:  # OSError and EOFError: a process died while it sent a batch
            raise self._failed_processes(error) from error
        finally:
            _remove_worker_pids(id(batches))
        return self._sending.received(_unwrapped(batch))

    def _receive(self, batch: Any, epoch: int, step: int) -> tuple[Any] | None:
        if isinstance(batch, Exception):
            raise batch
        if isinstance(batch, LoaderFailure):
            if isinstance(batch.cause, StorageError):
                raise batch.cause
            explained = DataError.of_problems(batch.problems)
            explained.from_users_code = not isinstance(batch.cause, DataError)
            raise explained from batch.cause
        self.left_out, counts = [], {}
        if isinstance(batch, CountedBatch):
            if batch.retry is not None:
                self.retries.append((epoch, step, batch.retry))
            batch, self.left_out, counts = batch.batch, batch.left_out, batch.counts
        read_whole = isinstance(batch, BatchShard)
        if isinstance(batch, BatchShard):
            if isinstance(self.partition, Flow):
                taken = self.partition.take(self._turn, batch)
                self._turn += 1
                if not taken:
                    self._requests.popleft()
                    return None
            self.partition.found(step, batch.samples)  # type: ignore[union-attr]
            batch = batch.filler if batch.batch is None and self.fills_empty else batch.batch
        elif isinstance(self.partition, SamplerStream):
            self.partition.found(step, self.partition.size(step))
        self.indices = self._requests.popleft().indices
        if self._needs_samples:
            self._check_filled(step, epoch)
        local = self.partition.shares(step, epoch)[self.partition.replica] if read_whole else len(self.indices)
        local, total = local - len(self.left_out), self.partition.size(step)
        # How many samples the other replicas omitted is unknown, see `check_weight`.
        self.position = Position(epoch, step, local, local if self.partition.replicas == 1 else total, counts)
        last = isinstance(self.partition, Partition) and step + 1 == self.partition.steps_per_epoch
        self._next = (epoch + 1, 0) if last else (epoch, step + 1)
        return (self.example(1) if batch is None and self.fills_empty else batch,)

    def _check_filled(self, step: int, epoch: int = 0) -> None:
        shares = self.partition.shares(step, epoch)
        if len(shares) > 1 and 0 in shares:
            last = isinstance(self.partition, Partition) and step + 1 == self.partition.steps_per_epoch
            raise PlanError(
                "plan.replica_without_samples",
                "{what} needs a sample on every replica, but {batch} of an epoch holds {samples} samples for "
                "{replicas} replicas. Set drop_last: true, or a global_batch that leaves a larger last batch.",
                what=self._needs_samples,
                batch="the last batch" if last else f"batch {step + 1}",
                samples=sum(shares),
                replicas=len(shares),
            )

    # Loader processes

    def _failed_processes(self, error: Exception | None) -> DataError:
        """End all loader processes, and return the error that explains why one failed."""
        epoch, step = self._next
        processes = () if self._loader is None else getattr(self._loader._iterator, "_workers", ())
        ended = [(process.pid, process.exitcode) for process in processes if process.exitcode is not None]
        self.close()
        return failed(f"rank {self._rank}, before step {step} of epoch {epoch}", self.workers, ended, error)

    def _reader_state(self) -> dict[str, Any] | None:
        """Return torchdata's state at the next batch, or the loaded state, or None."""
        if self._loader is None or not self._samples.stateful or self._batches is None:
            return self._resume_from
        state: dict[str, Any] = self._loader.state_dict()
        return state


def _fetch_ahead(dataset: Any) -> FetchAhead | None:
    files = files_of(dataset)
    return None if files is None or files.reads_in_place else FetchAhead(files.fetch)


def _end_processes(loader: StatefulDataLoader[Any] | None) -> None:
    """End the existing loader processes.

    torchdata ends its processes only when its iterator is garbage-collected. If a traceback still references the
    iterator, collection comes after the queues have been closed. The processes also ignore torchdata's first SIGTERM
    (see `Begin`).
    """
    if loader is not None and loader.num_workers and loader._iterator is not None:
        loader._iterator._shutdown_workers()
        for process in loader._iterator._workers:
            if process.is_alive():
                process.kill()
                process.join()


def changed_data(saved: list[int] | None, now: list[int] | None) -> str | None:
    """Describe how a data set has changed between two fingerprints.

    Returns None if the data set has not changed, or if a fingerprint is unknown.
    """
    if saved is None or now is None or saved == now:
        return None
    if saved[0] != now[0]:
        return f"it had {saved[0]} training samples and has {now[0]} now"
    return f"it still has {now[0]} training samples, but the first, middle or last one is not the same"


def _order_of(partition: Partition) -> dict[str, Any]:
    """Return the settings that determine the samples of a step, for any number of replicas."""
    found: dict[str, Any] = {
        "samples": partition.samples,
        "batch_size": partition.global_batch,
        "shuffle": partition.shuffle,
        "seed": partition.seed if partition.shuffle else 0,
    }
    if partition.shards is not None:
        found |= partition.shards.order_settings
    return found


def _begun(order: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings that determine the first `steps` steps: later weights may change."""
    weights = {"weights": [stage for stage in order["weights"] if stage[0] < steps]} if "weights" in order else {}
    return order | weights


class _InTurn:
    """Iterator that reads each requested batch in this process."""

    def __init__(self, requests: Iterator[SampleRequest], samples: RequestedSamples) -> None:
        self._requests, self._samples = requests, samples

    def __iter__(self) -> _InTurn:
        return self

    def __next__(self) -> Any:
        return self._samples.in_this_process(next(self._requests))


class _RequestSampler:
    """Batch sampler of one replica's requests, from `next` = (epoch, step) to the epoch's end."""

    def __init__(
        self, partition: Partition | SamplerStream | Flow, start: tuple[int, int], requests: deque[SampleRequest]
    ) -> None:
        self.partition, self.next, self.requests = partition, start, requests

    def __iter__(self) -> Iterator[SampleRequest]:
        epoch, start = self.next
        for step, indices in enumerate(self.partition.batches(epoch, start), start):
            request = SampleRequest(epoch, step, indices)
            self.requests.append(request)
            yield request

    def state_dict(self) -> dict[str, int]:
        """Return an empty state, because the loader starts the sampler at the right step.

        Without this method and `load_state_dict`, torchdata would draw and discard all earlier steps.
        """
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing, because the state is empty."""


def _bytes_of(batch: Any) -> int:
    batch = batch.batch if isinstance(batch, CountedBatch) else batch
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass
class Unpinned:
    """Wrapper that lets torch's `DataLoader` pin a batch with `pinned`.

    Without an accelerator, torch does not pin the batch, and the loader removes the wrapper.
    """

    batch: Any

    def pin_memory(self) -> Any:
        """Return the batch in pinned memory."""
        if isinstance(self.batch, (CountedBatch, BatchShard)):
            return replace(self.batch, batch=pinned(self.batch.batch))
        return self.batch if isinstance(self.batch, (Exception, LoaderFailure)) else pinned(self.batch)


def _unwrapped(batch: Any) -> Any:
    return batch.batch if isinstance(batch, Unpinned) else batch
