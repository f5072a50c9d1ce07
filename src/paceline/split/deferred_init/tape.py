"""What a model's construction did to its tensors, as a list of steps that can be run again with no more in memory than is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Take = Callable[[str, Tensor], object]


@dataclass(frozen=True)
class View:
    """A tensor on the tape: a window on storage number `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Space:
    """A storage on the tape."""

    nbytes: int
    device: torch.device

    def allocate(self) -> torch.UntypedStorage:
        """Memory for it, whatever lies there."""
        return torch.UntypedStorage(self.nbytes, device=self.device)


@dataclass(frozen=True)
class Seek:
    """Set a generator's state, because the construction did: to an absolute one, or back to that after so many draws."""

    generator: torch.Generator
    to: int | Tensor


@dataclass(frozen=True)
class Step:
    """One operation, with a `View` in place of every tensor on the tape.

    Attributes:
        reads: the storages whose values it depends on.
        writes: the views that it changes, those that it covers among them.
        covers: the storages that it overwrites from end to end without reading them: what they held before is of no use.
        made: the tensors with storages of their own that it returns, by their places among all that it returns.
        draws: the generator whose random numbers it takes.
        number: the how manieth of the generator's it is, from 1.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: tuple[View, ...]
    covers: frozenset[int]
    made: tuple[tuple[int, View], ...]
    draws: torch.Generator | None = None
    number: int = 0

    @property
    def changes(self) -> frozenset[int]:
        """The storages that hold something else after it."""
        return frozenset([view.storage for view in self.writes] + [view.storage for _, view in self.made])

    @property
    def touches(self) -> frozenset[int]:
        """All storages that it needs memory for."""
        return self.reads | self.changes


Fate = Literal["run", "draw", "skip"]


@dataclass
class Tape:
    """The steps of a construction in their order, and the states in which the generators were when it began."""

    steps: list[Step | Seek] = field(default_factory=list)
    spaces: list[Space] = field(default_factory=list)
    starts: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)

    def play(self, wanted: Mapping[str, View], take: Take) -> None:
        """Run the construction again and hand out each of `wanted` when it is finished, once.

        What is not wanted is not computed, except that all random numbers are drawn, so the generators end as they would have.
        In memory are the tensors that are begun and not finished: for most models one.
        """
        memory = _Memory(self.spaces)
        fates = self._fates({view.storage for view in wanted.values()})
        finished = self._finished(fates, wanted)
        draws = _Draws(self)
        for index, (step, fate) in enumerate(zip(self.steps, fates, strict=True)):
            if isinstance(step, Seek):
                draws.seek(step)
                continue
            if fate == "run":
                memory.run(step)
            elif fate == "draw":
                memory.draw(step)
            draws.note(step)
            for storage, names in finished[index]:
                for name in names:
                    take(name, memory.tensor(wanted[name]))
                memory.free(storage)

    def value(self, view: View) -> Tensor | None:
        """What a tensor holds at the end of the tape so far, or None where that depends on random numbers."""
        memory = _Memory(self.spaces)
        needed = [step for step, fate in zip(self.steps, self._fates({view.storage}, draw=False), strict=True) if fate == "run"]
        for step in needed:
            if not isinstance(step, Step) or step.draws is not None:
                return None
            memory.run(step)
        return memory.tensor(view)

    def _fates(self, live: set[int], *, draw: bool = True) -> list[Fate]:
        """What becomes of each step if the storages `live` are needed at the end: backwards, from the use to the making.

        A step that nothing needs is skipped, unless it draws: then only its random numbers are drawn. Where their count may depend on
        what it reads, it runs with all it reads.
        """
        fates: list[Fate] = []
        for step in reversed(self.steps):
            if isinstance(step, Seek):
                fates.append("run" if draw else "skip")
                continue
            drawn = draw and step.draws is not None
            if step.changes & live or (drawn and step.reads):
                fates.append("run")
                live = (live - step.covers - {view.storage for _, view in step.made}) | step.reads
                live |= {view.storage for view in step.writes} - step.covers
            else:
                fates.append("draw" if drawn else "skip")
        return fates[::-1]

    def _finished(self, fates: list[Fate], wanted: Mapping[str, View]) -> dict[int, list[tuple[int, list[str]]]]:
        """By the number of a step: the storages that no later one touches, each with the names of what is wanted of it."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, view in wanted.items():
            names[view.storage].append(name)
        last = {s: i for i, (step, fate) in enumerate(zip(self.steps, fates, strict=True)) if fate == "run" for s in _touched(step)}
        finished: dict[int, list[tuple[int, list[str]]]] = defaultdict(list)
        for storage, index in last.items():
            finished[index].append((storage, names[storage]))
        return finished


class _Memory:
    """The storages that hold something at one point of the tape."""

    def __init__(self, spaces: list[Space]) -> None:
        self._spaces = spaces
        self._held: dict[int, torch.UntypedStorage] = {}

    def run(self, step: Step) -> None:
        for storage in step.changes - {view.storage for _, view in step.made}:
            if storage not in self._held:  # its making was of no use, for this step covers all of it
                self._held[storage] = self._spaces[storage].allocate()
        given = tree_map(lambda x: self.tensor(x) if isinstance(x, View) else x, (step.args, step.kwargs))
        results = tree_leaves(step.call(*given[0], **given[1]))
        theirs = {x.untyped_storage()._cdata for x in tree_leaves(given) if isinstance(x, Tensor)}
        for place, view in step.made:
            self._held[view.storage] = self._as_recorded(results[place], view, theirs)

    def draw(self, step: Step) -> None:
        """Draw a step's random numbers into memory that is dropped."""

        def scratch(x: Any) -> Any:
            if not isinstance(x, View):
                return x
            return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=self._spaces[x.storage].device)

        args, kwargs = tree_map(scratch, (step.args, step.kwargs))
        step.call(*args, **kwargs)

    def tensor(self, view: View) -> Tensor:
        storage = self._held[view.storage]
        return torch.empty(0, dtype=view.dtype, device=storage.device).set_(storage, view.offset, view.shape, view.stride)

    def free(self, storage: int) -> None:
        del self._held[storage]

    def _as_recorded(self, result: Tensor, view: View, theirs: Iterable[int]) -> torch.UntypedStorage:
        """The storage of a result, laid out as on the tape and nobody else's; a real operation may return otherwise than one on shapes."""
        storage = result.untyped_storage()
        same = (tuple(result.shape), result.stride(), result.storage_offset(), result.dtype) == (
            view.shape,
            view.stride,
            view.offset,
            view.dtype,
        )
        if same and storage._cdata not in theirs:
            return storage
        self._held[view.storage] = self._spaces[view.storage].allocate()
        self.tensor(view).copy_(result)
        return self._held[view.storage]


class _Draws:
    """The generators while a tape is played: set to where they began, and back to states passed since where the construction did so."""

    def __init__(self, tape: Tape) -> None:
        returned_to = [(step.generator, step.to) for step in tape.steps if isinstance(step, Seek) and isinstance(step.to, int)]
        self._saved: dict[tuple[torch.Generator, int], Tensor | None] = dict.fromkeys(returned_to)
        for generator, state in tape.starts:
            generator.set_state(state)
            self._save(generator, 0)

    def note(self, step: Step) -> None:
        """Called after every step; a state that the construction returns to is saved."""
        if step.draws is not None:
            self._save(step.draws, step.number)

    def seek(self, seek: Seek) -> None:
        state = self._saved[seek.generator, seek.to] if isinstance(seek.to, int) else seek.to
        assert state is not None
        seek.generator.set_state(state)

    def _save(self, generator: torch.Generator, number: int) -> None:
        if (generator, number) in self._saved and self._saved[generator, number] is None:
            self._saved[generator, number] = generator.get_state()


def _touched(step: Step | Seek) -> frozenset[int]:
    return step.touches if isinstance(step, Step) else frozenset()
