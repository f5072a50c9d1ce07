"""Global batches of a user's own sampler: drawn on rank 0, divided over data-parallel ranks."""

from __future__ import annotations

import base64
import json
import operator
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.comm import Group
from paceline.errors import DataError
from paceline.job.partition import even_shard, even_shares
from paceline.own_random import OwnRandom

_AT_ONCE = 65536  # number of indices that rank 0 draws and sends at once from torch's own samplers
_FIRST_BYTES = 8192  # size of the first broadcast, sufficient for most messages


@dataclass
class _Epoch:
    """State of the current epoch: its drawn batches and the drawing position."""

    number: int
    state: list[Any]  # sampler state at the start of the epoch
    next_state: list[Any] = field(default_factory=list)  # sampler state at its end, once known
    # by step: the global batches that are drawn but not yet trained on
    batches: dict[int, list[Any]] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=lambda: {0: 0})  # by step: digest of all batches before the step
    # by step: number of samples, if the indices do not determine the number
    totals: dict[int, int] = field(default_factory=dict)
    drawn: int = 0
    ended: bool = False


class SamplerStream:
    """Global batches of a user's (batch) sampler, and this rank's shard of each.

    A `SamplerStream` has the interface of a `Partition`.

    Rank 0 draws the batches and sends them to the other ranks. From torch's own samplers, rank 0 draws many batches
    ahead. From other samplers, which may adapt to the training, rank 0 draws only as far ahead as a DataLoader.
    While a sampler draws, the stream's own random states replace those of the process, and each epoch seeds them again.

    Args:
        sampler: iterable of global batches, each a list of indices; with `single`, iterable of single indices.
        dataset: the dataset that the indices refer to.
        batch_size: number of samples in a full batch; None if unknown in advance.
        single: whether each step reads one dataset item, on all ranks.
        generator: the loader's generator, from which a DataLoader draws one number at the start of an epoch.
        persistent: whether loader processes persist; a DataLoader then draws the number only in the first epoch.
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
        self._pure = is_pure(sampler)
        self._epoch: _Epoch | None = None
        self._iterator: Iterator[Any] | None = None
        self._random = OwnRandom(seed)
        self._begun = 0  # number of epochs that the sampler in this process has begun
        self._compared = world.size == 1  # whether the ranks have verified that their samplers draw the same indices
        self._resume: dict[str, Any] | None = {"state": saved_states(sampler, dataset), "digest": 0}

    @property
    def name(self) -> str:
        """Name of the sampler in errors."""
        return f"sampler {name_of(author_of(self.sampler))}"

    # Interface of a Partition

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches per epoch.

        Raises:
            DataError: the sampler has no length.
        """
        try:
            return len(self.sampler)
        except TypeError:
            raise DataError(
                "data.sampler_without_length",
                "{name} has no length. Define __len__, or count steps instead of epochs.",
                name=self.name,
            ) from None

    def size(self, step: int) -> int:
        """Return the number of samples in that step of the current epoch, over all ranks."""
        epoch, known = self._epoch, None
        if self.single:
            known = epoch.totals.get(step) if epoch is not None else None
        elif epoch is not None and step in epoch.batches:
            known = len(epoch.batches[step])
        else:
            known = self._size_by_length(step)
        if known is None:
            raise DataError(
                "data.batch_size_unknown",
                "the size of batch {step} is unknown until {name} has drawn the batch",
                step=step,
                name=self.name,
            )
        return known

    def shares(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        """Return each data-parallel rank's number of samples in that step of the current epoch."""
        return even_shares(self.size(step), self.replicas)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[list[Any]]:
        """Yield this rank's indices, step by step, from the batches that `prepare` has drawn."""
        for step in count(start_step):
            if not self.has(step):
                return
            assert self._epoch is not None
            assert self._epoch.number == epoch
            yield self._shard(self._epoch.batches[step])

    def first(self, samples: int) -> list[Any]:
        """Return `samples` indices from the first batch, repeated as often as needed."""
        self.prepare(self._epoch.number if self._epoch is not None else 0, 1)
        assert self._epoch is not None
        known = next(iter(self._epoch.batches.values()), [])
        if not known:
            raise DataError(
                "data.sampler_empty", "{name} draws no samples, so there is nothing to train on", name=self.name
            )
        return [known[i % len(known)] for i in range(samples)]

    # Drawing, by all ranks together

    def begin(self, epoch: int, step: int, until: int) -> tuple[int, int]:
        """Draw the batches before step `until`; return the epoch and step to begin with.

        If `epoch` has no batch at `step`, the next epoch begins.
        """
        self.prepare(epoch, max(until, step + 1), step)
        if step and not self.has(step):
            epoch, step = epoch + 1, 0
            self.prepare(epoch, until)
        return epoch, step

    def leave(self, step: int) -> None:
        """Set the sampler to its state after `step` batches of an interrupted epoch.

        This undoes the draws ahead of `step`, so the generator's state is the same as with a `DataLoader`.
        """
        epoch = self._epoch
        if epoch is not None and self._pure and self._resume is None and self.world.rank == 0:
            load_states(self.sampler, self.dataset, epoch.state)
            self._random, self._iterator = OwnRandom(self.seed, epoch.number), None
            self._take(step)

    def prepare(self, epoch: int, until: int, known: int = 0) -> None:
        """Draw the epoch's batches before step `until`, or up to the epoch's end.

        Batches before step `known` have already been trained on, so their digest must equal the saved digest.
        """
        now = self._epoch
        if now is not None and now.number == epoch and self._resume is None and (now.drawn >= until or now.ended):
            return
        with torch.inference_mode(False):  # ranks cannot send tensors that are allocated in inference mode
            self._prepare(epoch, until, known)

    def _prepare(self, epoch: int, until: int, known: int) -> None:
        if self._epoch is None or self._epoch.number != epoch or self._resume is not None:
            digest = self._open(epoch)
            self._draw_until(known)
            assert self._epoch is not None
            if digest is not None and self._epoch.digests.get(known) != digest:
                raise DataError(
                    "data.sampler_not_repeatable",
                    "{name} draws different samples the second time: its epoch {epoch} differs within the first "
                    "{batches} batches, so training cannot continue at the saved position. Give the sampler "
                    "state_dict and load_state_dict, or its own generator.",
                    name=self.name,
                    epoch=epoch,
                    batches=known,
                )
        self._draw_until(until)

    def has(self, step: int) -> bool:
        """Return True if the epoch has that step; call `prepare` for the step first."""
        return self._epoch is not None and step in self._epoch.batches

    def found(self, step: int, samples: int) -> None:
        """Record how many samples a step's batch had, and forget earlier steps."""
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
        """Return the state from which a position's batch can be drawn again.

        The state is equal on every rank.
        """
        if self._resume is not None:
            return self._resume
        assert self._epoch is not None
        if self._epoch.number != epoch:
            return {"state": self._epoch.next_state, "digest": 0}
        return {"state": self._epoch.state, "digest": self._epoch.digests[step]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` when the next batch is requested."""
        self._resume = state

    # Drawing: always on rank 0, and once on the other ranks to compare the samplers

    def _open(self, epoch: int) -> int | None:
        """Begin an epoch, or continue from a loaded state and return its digest."""
        resume, self._resume = self._resume, None
        drawing = self.world.rank == 0 or not self._compared
        problem: str | None = None
        state: list[Any] = []
        if drawing:
            try:
                self._replay(epoch)
                if resume is not None:
                    load_states(self.sampler, self.dataset, resume["state"])
                state = saved_states(self.sampler, self.dataset)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for a message, whatever the error
                problem = self._problem(error)
        told = self._tell({"problem": problem, "state": state})
        if drawing and self.world.rank and problem is None:
            load_states(self.sampler, self.dataset, told["state"])
        self._epoch = _Epoch(epoch, told["state"])
        self._random = OwnRandom(self.seed, epoch)
        self._iterator = None
        self._begun = max(self._begun, epoch + 1)
        return resume["digest"] if resume is not None else None

    def _replay(self, epoch: int) -> None:
        """Draw all earlier epochs again, if the sampler may have state that cannot be saved."""
        if self._pure or keeps_its_state(self.sampler):
            return
        for before in range(self._begun, epoch):
            with OwnRandom(self.seed, before):
                for _ in self._iterate(before):
                    pass

    def _draw(self, wanted: int) -> None:
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
                    message["state"] = saved_states(self.sampler, self.dataset)
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
                "data.samplers_differ",
                "{problem}. Give the DataLoader a sampler that draws whole global batches, as in one process. With a "
                "seeded generator, the sampler draws the same indices on every rank. paceline divides the batches "
                "over the ranks.",
                problem=problems[0],
            )
        self._compared = True
        if self.world.rank:
            self._iterator = None

    def _take(self, batches: int) -> tuple[list[Any], bool]:
        assert self._epoch is not None
        with self._random:
            if self._iterator is None:
                self._iterator = self._iterate(self._epoch.number)
            taken = [self._encoded_batch(batch) for batch in islice(self._iterator, batches)]
        return taken, len(taken) < batches

    def _iterate(self, epoch: int) -> Iterator[Any]:
        for sampler in samplers(self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if self._generator is not None and not (epoch and self._persistent):
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return iter(self.sampler)

    # Communication between ranks

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's message on every rank; raise a DataError if it reports a problem."""
        told = _from_rank_0(self.world, message) if self.world.size > 1 else message
        if told["problem"] is not None:
            raise DataError("data.sampler_failed", "{problem}", problem=told["problem"])
        return told

    def _problem(self, error: Exception) -> str:
        if isinstance(error, DataError):
            return str(error)
        return f"{self.name} raised {type(error).__name__}: {error}. Iterate it alone to see why"

    def _shard(self, batch: list[Any]) -> list[Any]:
        return batch if self.single else batch[even_shard(len(batch), self.replica, self.replicas)]

    def _encoded_batch(self, batch: Any) -> list[Any]:
        if self.single:
            return [_encoded(batch)]
        if not isinstance(batch, Iterable):
            raise DataError(
                "data.batch_sampler_invalid",
                "{name} yields a {class_name}. A batch sampler must yield a list of indices for each batch.",
                name=self.name,
                class_name=type(batch).__name__,
            )
        return [_encoded(index) for index in batch]

    def _size_by_length(self, step: int) -> int | None:
        """Compute the batch size from the sampler's length, before the batch is drawn."""
        if self.batch_size is None or getattr(self.sampler, "drop_last", False):
            return self.batch_size
        try:
            samples = len(self.sampler.sampler)
        except TypeError:
            return self.batch_size
        return max(0, min(self.batch_size, samples - step * self.batch_size))


def _from_rank_0(world: Group, message: dict[str, Any]) -> dict[str, Any]:
    """Broadcast a JSON value from rank 0; a short value needs only one broadcast."""
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
            "data.index_unsupported",
            "a sampler yields the index {index!r}. Only integers, strings and tuples of them can be sent to ranks.",
            index=index,
        ) from None


def _decoded(index: Any) -> Any:
    if isinstance(index, dict):
        return tuple(_decoded(part) for part in index["tuple"])
    return [_decoded(part) for part in index] if isinstance(index, list) else index


_PURE = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)
# types that are not searched for generators
_WITHOUT = (Dataset, nn.Module, Tensor, np.ndarray, str, bytes, int, float, type, ModuleType)


class _Generator(NamedTuple):
    """Functions that save and load one generator type's state as JSON values."""

    name: str
    saved: Callable[[Any], Any]
    load: Callable[[Any, Any], object]


_GENERATORS: dict[type, _Generator] = {
    torch.Generator: _Generator(
        "torch.Generator",
        lambda g: base64.b64encode(bytes(g.get_state().tolist())).decode(),
        lambda g, state: g.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)),
    ),
    np.random.Generator: _Generator(
        "numpy.random.Generator",
        lambda g: _plain(g.bit_generator.state),
        lambda g, state: setattr(g.bit_generator, "state", _arrays(state)),
    ),
    np.random.RandomState: _Generator(
        "numpy.random.RandomState",
        lambda g: _plain(g.get_state(legacy=False)),
        lambda g, state: g.set_state(_arrays(state)),
    ),
    random.Random: _Generator(
        "random.Random",
        lambda g: g.getstate(),
        lambda g, state: g.setstate((state[0], tuple(state[1]), state[2])),
    ),
}
_DEPTH, _LONGEST = 6, 64  # the search for generators stops at this depth, and skips longer containers


def saved_states(root: object, dataset: object) -> list[Any]:
    """Return the states of a sampler and of all generators in it, as JSON values.

    The search skips `dataset`.

    Raises:
        DataError: the sampler's own `state_dict` has values that JSON cannot represent.
    """
    return [_saved(part) for part in _parts(root, dataset)]


def load_states(root: object, dataset: object, states: list[Any]) -> None:
    """Restore `states`, which `saved_states` returned.

    Raises:
        DataError: the sampler has other generators or stateful parts than the saved sampler.
    """
    parts = list(_parts(root, dataset))
    now, then = [_kind(part) for part in parts], [state["kind"] for state in states]
    if now != then:
        holds, held = (", ".join(map(str, kinds)) or "no generator" for kinds in (now, then))
        raise DataError(
            "data.sampler_differs",
            "{sampler} is not the sampler of the saved position: it has {here}, and the saved sampler had {saved}. "
            "Resume with the loader that the run was started with.",
            sampler=name_of(root),
            here=holds,
            saved=held,
        )
    for part, state in zip(parts, states, strict=True):
        if generator := _generator(part):
            generator.load(part, state["state"])
        else:
            part.load_state_dict(state["state"])


def is_pure(root: object) -> bool:
    """Return True if the sampler consists only of torch's samplers and plain sequences."""
    return all(type(part) in _PURE for part in samplers(root))


def keeps_its_state(root: object) -> bool:
    """Return True if every sampler that may have state can save it with `state_dict`."""
    return all(type(part) in _PURE or _has_state(part) for part in samplers(root))


def samplers(root: object) -> Iterator[object]:
    """Yield a sampler, and then the samplers from which it draws."""
    while root is not None:
        yield root
        inner = getattr(root, "sampler", None)
        root = inner if inner is not None else getattr(root, "batch_sampler", None)


def author_of(root: object) -> object:
    """Return the sampler that determines the order: the user's own sampler, or the innermost."""
    chain = list(samplers(root))
    return next((sampler for sampler in chain if type(sampler) not in _PURE), chain[-1])


def name_of(root: object) -> str:
    """Return a sampler's type name for errors."""
    return f"{type(root).__module__}.{type(root).__qualname__}".removeprefix("builtins.")


def _parts(root: object, dataset: object) -> Iterator[Any]:
    """Yield all parts of a sampler that have state, in a fixed order."""
    seen = {id(dataset)}

    def walk(value: Any, depth: int) -> Iterator[Any]:
        if depth > _DEPTH or id(value) in seen or isinstance(value, _WITHOUT):
            return
        seen.add(id(value))
        if _kind(value) is not None:
            yield value
        if isinstance(value, tuple(_GENERATORS)):
            return
        for inner in _inside(value):
            yield from walk(inner, depth + 1)

    return walk(root, 0)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value if len(value) <= _LONGEST else ()
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONGEST else ()
    return list(vars(value).values()) if hasattr(value, "__dict__") else ()


def _generator(value: object) -> _Generator | None:
    return next((generator for kind, generator in _GENERATORS.items() if isinstance(value, kind)), None)


def _kind(value: object) -> str | None:
    if generator := _generator(value):
        return generator.name
    return f"{name_of(value)}.state_dict" if hasattr(value, "__iter__") and _has_state(value) else None


def _has_state(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _saved(part: Any) -> dict[str, Any]:
    if generator := _generator(part):
        return {"kind": generator.name, "state": generator.saved(part)}
    state = part.state_dict()
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise DataError(
            "data.sampler_state_invalid",
            "the state_dict of sampler {sampler} contains more than plain values (numbers, text, lists): {error}",
            sampler=name_of(part),
            error=error,
        ) from error
    return {"kind": _kind(part), "state": state}


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "values": state.tolist()}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        if set(state) == {"dtype", "values"}:
            return np.array(state["values"], dtype=state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state
