"""Global batches of a user's own sampler: drawn on rank 0, divided over the ranks.

Rank means data-parallel rank.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count, islice
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.data import sampler_state
from paceline.data.whole import BatchPart
from paceline.errors import DataError
from paceline.job.partition import even_shares
from paceline.own_random import OwnRandom

_AT_ONCE = 65536  # indices that are drawn and sent together where drawing early changes nothing
_FIRST_BYTES = 8192  # of a message, which most fit into


@dataclass
class _Epoch:
    """The epoch under way: a window of its batches, and where the drawing stands."""

    number: int
    state: list[Any]  # of the sampler at the start of the epoch
    next_state: list[Any] = field(default_factory=list)  # at its end, once it is known
    batches: dict[int, list[Any]] = field(default_factory=dict)  # the global batches by step; old ones are dropped
    digests: dict[int, int] = field(default_factory=lambda: {0: 0})  # of all batches before a step
    totals: dict[int, int] = field(default_factory=dict)  # samples of a step, where its indices do not tell
    drawn: int = 0
    ended: bool = False


class SamplerStream:
    """Global batches of a user's (batch) sampler, and this rank's part of each.

    It stands where a `Partition` does.

    Rank 0 draws and the other ranks are told, so all have the same batches. torch's own samplers are drawn far ahead;
    any other exactly as early as a DataLoader would, so that it may adapt to what training finds. Random numbers that a
    sampler takes from the process come from states of the stream's own, which start anew in each epoch.

    Args:
        sampler: yields the global batches as lists of indices; or the item of each step, where `single`.
        dataset: what the indices are of.
        batch_size: samples of a full batch, if that is known in advance.
        single: each step is one item of the dataset, which all ranks read.
        generator: the loader's, from which a DataLoader takes a number whenever it starts loader processes or begins an
            epoch.
        persistent: the loader's processes live on, so it takes one at the first epoch only.
    """

    def __init__(
        self,
        sampler: Any,
        dataset: Any,
        *,
        data_group: Group,
        world: Group,
        seed: int,
        batch_size: int | None,
        single: bool = False,
        generator: torch.Generator | None = None,
        persistent: bool = False,
    ) -> None:
        self.sampler, self.dataset, self.world, self.seed = sampler, dataset, world, seed
        self.replica, self.replicas = data_group.rank, data_group.size
        self.batch_size, self.single = batch_size, single
        self._generator, self._persistent = generator, persistent
        self._pure = sampler_state.is_pure(sampler)
        self._epoch: _Epoch | None = None
        self._iterator: Iterator[Any] | None = None
        self._random = OwnRandom(seed)
        self._begun = 0  # epochs that the sampler of this process has begun
        self._compared = world.size == 1  # whether the ranks' samplers were found to draw alike
        self._resume: dict[str, Any] | None = {"state": sampler_state.save(sampler, dataset), "digest": 0}

    @property
    def name(self) -> str:
        """The sampler, as an error names it."""
        return f"sampler {sampler_state.name_of(sampler_state.author_of(self.sampler))}"

    # What a Partition tells as well

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch.

        Raises:
            DataError: the sampler has no length.
        """
        try:
            return len(self.sampler)
        except TypeError:
            raise DataError(f"{self.name} has no length; give it a __len__, or count steps") from None

    def size(self, step: int) -> int:
        """Samples of all ranks together in that step of the epoch under way."""
        epoch = self._epoch
        if self.single:
            known = epoch.totals.get(step) if epoch is not None else None
        else:
            known = (
                len(epoch.batches[step]) if epoch is not None and step in epoch.batches else self._size_by_length(step)
            )
        if known is None:
            raise DataError(f"the size of batch {step} is known only when {self.name} has drawn it")
        return known

    def shares(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        """Samples of each data-parallel rank in that step of the epoch under way."""
        return even_shares(self.size(step), self.replicas)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[list[Any]]:
        """This rank's indices, step by step, of what `prepare` has drawn."""
        for step in count(start_step):
            if not self.has(step):
                return
            assert self._epoch is not None
            assert self._epoch.number == epoch
            yield self._part(self._epoch.batches[step])

    def first(self, samples: int) -> list[Any]:
        """`samples` indices for inspecting data: those of the first batch, repeated.

        All ranks ask together.
        """
        self.prepare(self._epoch.number if self._epoch is not None else 0, 1)
        assert self._epoch is not None
        known = next(iter(self._epoch.batches.values()), [])
        if not known:
            raise DataError(f"{self.name} draws nothing, so there is nothing to train on")
        return [known[i % len(known)] for i in range(samples)]

    # Drawing, which all ranks do together

    def begin(self, epoch: int, step: int, until: int) -> tuple[int, int]:
        """Draw up to step `until`; returns the epoch and step to begin at.

        That is the next epoch if the current one has ended.
        """
        self.prepare(epoch, max(until, step + 1), step)
        if step and not self.has(step):
            epoch, step = epoch + 1, 0
            self.prepare(epoch, until)
        return epoch, step

    def leave(self, step: int) -> None:
        """Set the sampler to its state after `step` batches of an epoch that was left.

        Batches drawn ahead would otherwise leave a generator in another state than a `DataLoader` does.
        """
        epoch = self._epoch
        if epoch is not None and self._pure and self._resume is None and self.world.rank == 0:
            sampler_state.load(self.sampler, self.dataset, epoch.state)
            self._random, self._iterator = OwnRandom(self.seed, epoch.number), None
            self._take(step)

    def prepare(self, epoch: int, until: int, known: int = 0) -> None:
        """Draw the batches before step `until` of the epoch, as far as they exist.

        Those before `known` were trained on.
        """
        with torch.inference_mode(False):  # ranks cannot send what that mode allocates
            self._prepare(epoch, until, known)

    def _prepare(self, epoch: int, until: int, known: int) -> None:
        if self._epoch is None or self._epoch.number != epoch or self._resume is not None:
            digest = self._open(epoch)
            self._draw_until(known)
            assert self._epoch is not None
            if digest is not None and self._epoch.digests.get(known) != digest:
                raise DataError(
                    f"{self.name} does not draw again what it drew before: its epoch {epoch} differs within the first "
                    f"{known} batches, so training cannot go on where it stopped. Give the sampler state_dict and "
                    "load_state_dict, or a generator of its own"
                )
        self._draw_until(until)

    def has(self, step: int) -> bool:
        """True if the epoch has that step; it must have been prepared."""
        return self._epoch is not None and step in self._epoch.batches

    def found(self, step: int, samples: int) -> None:
        """Record the number of samples of a step that was read, and forget earlier steps.

        Its index did not tell that number.
        """
        assert self._epoch is not None
        self._epoch.totals = {step: samples}
        for old in range(step - 1, -1, -1):
            if self._epoch.batches.pop(old, None) is None:
                break
            self._epoch.digests.pop(old, None)

    def _draw_until(self, until: int) -> None:
        assert self._epoch is not None
        while self._epoch.drawn < until and not self._epoch.ended:
            self._draw(until - self._epoch.drawn)

    # State

    def state_dict(self, epoch: int, step: int) -> dict[str, Any]:
        """State from which the sampler draws that position's batch again, the same on every rank."""
        if self._resume is not None:
            return self._resume
        assert self._epoch is not None
        if self._epoch.number != epoch:
            return {"state": self._epoch.next_state, "digest": 0}
        return {"state": self._epoch.state, "digest": self._epoch.digests[step]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw from the state that `state_dict` gave, when the next batch is asked for."""
        self._resume = state

    # On rank 0, and once on the others

    def _open(self, epoch: int) -> int | None:
        """Begin an epoch, or begin it again after a state was loaded.

        In the second case the digest of what was drawn of it before is returned.
        """
        resume, self._resume = self._resume, None
        drawing = self.world.rank == 0 or not self._compared
        problem: str | None = None
        state: list[Any] = []
        if drawing:
            try:
                self._replay(epoch)
                if resume is not None:
                    sampler_state.load(self.sampler, self.dataset, resume["state"])
                state = sampler_state.save(self.sampler, self.dataset)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to be told
                problem = self._problem(error)
        told = self._tell({"problem": problem, "state": state})
        if drawing and self.world.rank and problem is None:
            sampler_state.load(self.sampler, self.dataset, told["state"])
        self._epoch = _Epoch(epoch, told["state"])
        self._random = OwnRandom(self.seed, epoch)
        self._iterator = None
        self._begun = max(self._begun, epoch + 1)
        return resume["digest"] if resume is not None else None

    def _replay(self, epoch: int) -> None:
        """Draw the epochs before this one, if the sampler may have hidden state from them."""
        if self._pure or sampler_state.keeps_its_state(self.sampler):
            return
        for before in range(self._begun, epoch):
            with OwnRandom(self.seed, before):
                for _ in self._iterate(before):
                    pass

    def _draw(self, wanted: int) -> None:
        """Draw some batches and tell them to all ranks."""
        epoch, at_once = self._epoch, wanted
        assert epoch is not None
        if self._pure and not self.single:
            at_once = max(wanted, _AT_ONCE // max(self.batch_size or 1, 1))
        message: dict[str, Any] = {"problem": None}
        if self.world.rank == 0:
            try:
                batches, ended = self._take(at_once)
                message |= {"batches": batches, "ended": ended}
                if ended:
                    message["state"] = sampler_state.save(self.sampler, self.dataset)
            except Exception as error:  # noqa: BLE001 - as above
                message["problem"] = self._problem(error)
        told = self._tell(message)
        if not self._compared:
            self._compare(told["batches"], told["ended"])
        for step, batch in enumerate(told["batches"], epoch.drawn):
            epoch.batches[step] = [_decoded(index) for index in batch]
            epoch.digests[step + 1] = zlib.crc32(json.dumps(batch).encode(), epoch.digests[step])
        epoch.drawn += len(told["batches"])
        epoch.ended, epoch.next_state = told["ended"], told.get("state", [])

    def _compare(self, batches: list[Any], ended: bool) -> None:
        """Refuse a sampler that draws other batches on this rank than on rank 0.

        Rank 0's would be a part of the data only, or nobody's choice.

        Raises:
            DataError: the same, on all ranks.
        """
        problem = None
        if self.world.rank:
            try:
                if self._take(len(batches) + int(ended)) != (batches, ended):
                    problem = (
                        f"{self.name} draws other indices on rank {self.world.rank} than on rank 0, from the same "
                        "random state"
                    )
            except Exception as error:  # noqa: BLE001 - as above
                problem = self._problem(error)
        problems = [found for found in self.world.gather_json(problem) if found is not None]
        if problems:
            raise DataError(
                f"{problems[0]}. Give the DataLoader a sampler that draws the whole global batch as one process would, "
                "alike on every rank, from a generator with a seed; paceline deals its batches to the ranks"
            )
        self._compared = True
        if self.world.rank:
            self._iterator = None

    def _take(self, batches: int) -> tuple[list[Any], bool]:
        """The next batches in plain values, and whether the sampler has ended."""
        assert self._epoch is not None
        with self._random:
            if self._iterator is None:
                self._iterator = self._iterate(self._epoch.number)
            taken = [self._encoded_batch(batch) for batch in islice(self._iterator, batches)]
        return taken, len(taken) < batches

    def _iterate(self, epoch: int) -> Iterator[Any]:
        for sampler in sampler_state.samplers(self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if self._generator is not None and not (epoch and self._persistent):
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return iter(self.sampler)

    # Between ranks

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's message, on every rank.

        Raises:
            DataError: it tells of a problem.
        """
        told = _from_rank_0(self.world, message) if self.world.size > 1 else message
        if told["problem"] is not None:
            raise DataError(told["problem"])
        return told

    def _problem(self, error: Exception) -> str:
        if isinstance(error, DataError):
            return str(error)
        return f"{self.name} raised {type(error).__name__}: {error}. Iterate it alone to see why"

    def _part(self, batch: list[Any]) -> list[Any]:
        if self.single:
            return batch
        ends = (0, *accumulate(even_shares(len(batch), self.replicas)))
        return batch[ends[self.replica] : ends[self.replica + 1]]

    def _encoded_batch(self, batch: Any) -> list[Any]:
        if self.single:
            return [_encoded(batch)]
        if not isinstance(batch, Iterable):
            raise DataError(
                f"{self.name} yields a {type(batch).__name__}; a batch sampler yields a list of indices for each batch"
            )
        return [_encoded(index) for index in batch]

    def _size_by_length(self, step: int) -> int | None:
        """By the sampler's length, before the batch is drawn."""
        if self.batch_size is None or getattr(self.sampler, "drop_last", False):
            return self.batch_size
        try:
            samples = len(self.sampler.sampler)
        except TypeError:
            return self.batch_size
        return max(0, min(self.batch_size, samples - step * self.batch_size))


def _from_rank_0(world: Group, message: dict[str, Any]) -> dict[str, Any]:
    """A JSON value of rank 0, on all ranks; short ones take a single broadcast."""
    text = json.dumps(message).encode() if world.rank == 0 else b""
    first = torch.zeros(8 + _FIRST_BYTES, dtype=torch.uint8)
    head = len(text).to_bytes(8, "little") + text[:_FIRST_BYTES]
    first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    first = first.to(world.device)
    world.broadcast(first)
    received = bytes(first.cpu().numpy())
    length = int.from_bytes(received[:8], "little")
    if length <= _FIRST_BYTES:
        return dict(json.loads(received[8 : 8 + length]))
    rest = torch.zeros(length - _FIRST_BYTES, dtype=torch.uint8)
    if world.rank == 0:
        rest = torch.frombuffer(bytearray(text[_FIRST_BYTES:]), dtype=torch.uint8)
    rest = rest.to(world.device)
    world.broadcast(rest)
    return dict(json.loads(received[8:] + bytes(rest.cpu().numpy())))


def _encoded(index: Any) -> Any:
    """An index of a dataset as a JSON value.

    Raises:
        DataError: it is neither a number, nor a text, nor a list or tuple of these.
    """
    if isinstance(index, str) or index is None:
        return index
    if isinstance(index, tuple):
        return {"tuple": [_encoded(part) for part in index]}
    if isinstance(index, Tensor) and index.dim():
        index = index.tolist()
    if isinstance(index, list):
        return [_encoded(part) for part in index]
    try:
        return operator.index(index)
    except TypeError:
        if isinstance(index, float):
            return index
        raise DataError(
            f"a sampler yields {index!r} as an index; what ranks can be told are whole numbers, texts, and "
            "tuples of these"
        ) from None


def _decoded(index: Any) -> Any:
    if isinstance(index, dict):
        return tuple(_decoded(part) for part in index["tuple"])
    return [_decoded(part) for part in index] if isinstance(index, list) else index


class Flow:
    """The global batches of an iterable data set; stands where a `Partition` does.

    A batch's size is known when it was read.

    Args:
        length: batches of an epoch as the data set tells it, None where it does not.
        batch_size: samples of a full batch, None where they are not known.
        workers: loader processes, which take turns.
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
        self._digests: dict[int, int] = {}  # of each loader process's first batch
        self._ended: set[int] = set()
        self._chain = 0  # digest of all pieces that this process has read
        self._last: int | None = None  # digest of the piece before the one to come
        self._expected: int | None = None  # the same in a position that is found again
        self._known = 0  # pieces before this turn were trained on

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, as the data set tells.

        Raises:
            DataError: it does not.
        """
        if self.length is None:
            raise DataError(f"{self.name} is an IterableDataset without a length; give it a __len__, or count steps")
        return self.length

    def size(self, step: int) -> int:
        """Samples of all ranks in the last step read; of a full batch for others."""
        found = self._totals.get(step, self.batch_size)
        if found is None:
            raise DataError(f"the samples of batch {step} of {self.name} are known only when it was read")
        return found

    def shares(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        """Samples of each data-parallel rank in that step."""
        return even_shares(self.size(step), self.replicas)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[list[Any]]:
        """One request after the other, for as long as the stream flows."""
        return ([] for _ in count(start_step))

    @property
    def ended(self) -> bool:
        """True if the current epoch has no more batches."""
        return len(self._ended) == max(self.workers, 1)

    def begin(self, turn: int, *, again: bool) -> int:
        """The turn to begin with.

        Where what was read is read `again`, that is an earlier one, to see that it is the same.
        """
        if turn == 0:
            self._ended, self._digests, self._last = set(), {}, None
        if not turn or not (again or self._expected is not None):
            return turn
        self._expected = self._last if self._expected is None else self._expected
        self._known = turn
        each = max(self.workers, 1)
        return (turn - 1) // each * each  # the first request goes to the first loader process

    def state_dict(self, turn: int) -> dict[str, Any]:
        """State that `load_state_dict` needs besides the turn's number."""
        if turn == 0:
            return {"last": None, "ended": []}
        return {"last": self._last if self._expected is None else self._expected, "ended": sorted(self._ended)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken."""
        self._expected, self._ended = state["last"], set(state["ended"])

    def take(self, turn: int, piece: BatchPart) -> bool | None:
        """True if a piece has a batch; None at the end of the stream.

        All ranks compare their pieces here.

        Raises:
            DataError: ranks, or loader processes, read something else, or the same twice. On all ranks.
        """
        self._chain = zlib.crc32(f"{self._chain} {piece.digest} {piece.samples}".encode())
        self._compare_ranks(turn)
        if turn < self._known:
            self._check_known(turn, piece)
            return False
        self._last = piece.digest
        if not piece.samples:
            self._ended.add(piece.worker)
            return None if len(self._ended) == max(self.workers, 1) else False
        if turn < self.workers:
            if piece.varied and piece.digest in self._digests.values():
                raise DataError(
                    f"every loader process reads the whole of {self.name}: two of the {self.workers} began with the "
                    "same batch, and each sample would be trained several times. Divide the stream by "
                    "torch.utils.data.get_worker_info(), or set num_workers=1"
                )
            self._digests[turn] = piece.digest
        return True

    def found(self, step: int, samples: int) -> None:
        """Note the samples of a step."""
        self._totals = {step: samples}

    def _check_known(self, turn: int, piece: BatchPart) -> None:
        """Refuse a stream whose last piece before the saved position is another one now."""
        if turn + 1 < self._known:
            return
        expected, self._expected, self._last, self._known = self._expected, None, piece.digest, 0
        if piece.digest != expected:
            raise DataError(
                f"{self.name} does not give again what it gave before: batch {turn} differs, and training cannot go on "
                "there. Have iter() begin the same stream anew in each process, and draw random numbers from a "
                "generator with a seed"
            )

    def _compare_ranks(self, turn: int) -> None:
        if self.world.size == 1:
            return
        # an evaluation may read the stream, and ranks cannot sum what that mode allocates
        with torch.inference_mode(False):
            extremes = torch.tensor([self._chain, -self._chain], dtype=torch.int64, device=self.world.device)
            self.world.all_reduce(extremes, "max")
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise DataError(
                f"the ranks read different streams from {self.name}: batch {turn} is not the same on all of them. "
                "paceline deals the batches, so let every rank read the whole stream in one order: leave out any split "
                "by rank (split_dataset_by_node, split_by_node, RANK) and draw random numbers from a generator with a "
                "seed"
            )
