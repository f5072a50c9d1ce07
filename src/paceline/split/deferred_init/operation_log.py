"""Operation log of a model's construction, replayed with as little memory as possible."""

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
    """A tensor in the log: a view of storage number `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class StorageSpec:
    """A storage in the log: size in bytes and device."""

    nbytes: int
    device: torch.device

    def allocate(self) -> torch.UntypedStorage:
        """Uninitialised memory for the storage."""
        return torch.UntypedStorage(self.nbytes, device=self.device)


@dataclass(frozen=True)
class RestoreRNG:
    """Restore a generator's state as the construction did.

    `to` is a state, or the index of the draw after which it was reached.
    """

    generator: torch.Generator
    to: int | Tensor


@dataclass(frozen=True)
class LoggedOperation:
    """One logged operation, with a `View` in place of every logged tensor.

    Attributes:
        reads: the storages that its result depends on.
        writes: the views that it changes, including covered ones.
        covers: the storages that it overwrites completely without reading them.
        made: the returned tensors with new storages, by their positions among the results.
        draws: the generator that it draws from, or None.
        draw_index: 1-based position of this draw in its generator's stream.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: tuple[View, ...]
    covers: frozenset[int]
    made: tuple[tuple[int, View], ...]
    draws: torch.Generator | None = None
    draw_index: int = 0

    @property
    def changes(self) -> frozenset[int]:
        """Storages whose values differ after this step."""
        return frozenset([view.storage for view in self.writes] + [view.storage for _, view in self.made])

    @property
    def touches(self) -> frozenset[int]:
        """Storages that must be in memory for this step."""
        return self.reads | self.changes


Action = Literal["run", "draw", "skip"]


@dataclass
class OperationLog:
    """Logged steps of a construction in order, with the generators' states at its start."""

    steps: list[LoggedOperation | RestoreRNG] = field(default_factory=list)
    storages: list[StorageSpec] = field(default_factory=list)
    starts: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)

    def replay(self, wanted: Mapping[str, View], take: Take) -> None:
        """Run the construction again and call `take` for each of `wanted` when it is finished.

        Other tensors are not computed, but all random numbers are drawn, so the generators end as after a plain
        construction. Memory holds only tensors that are begun and not finished: for most models one.
        """
        memory = _Memory(self.storages)
        actions = self._actions({view.storage for view in wanted.values()})
        finished = self._finished(actions, wanted)
        draws = _Draws(self)
        for index, (step, action) in enumerate(zip(self.steps, actions, strict=True)):
            if isinstance(step, RestoreRNG):
                draws.restore(step)
                continue
            if action == "run":
                memory.run(step)
            elif action == "draw":
                memory.draw(step)
            draws.note(step)
            for storage, names in finished[index]:
                for name in names:
                    take(name, memory.tensor(wanted[name]))
                memory.free(storage)

    def value(self, view: View) -> Tensor | None:
        """Value of a tensor after the log, or None if it is random."""
        memory = _Memory(self.storages)
        needed = [
            step
            for step, action in zip(self.steps, self._actions({view.storage}, draw=False), strict=True)
            if action == "run"
        ]
        for step in needed:
            if not isinstance(step, LoggedOperation) or step.draws is not None:
                return None
            memory.run(step)
        return memory.tensor(view)

    def _actions(self, live: set[int], *, draw: bool = True) -> list[Action]:
        """Action for each step if the storages `live` are needed at the end, computed backwards.

        A step without use is skipped, unless it draws: then only its random numbers are drawn. If their number may
        depend on the tensors that it reads, it runs with its inputs.
        """
        actions: list[Action] = []
        for step in reversed(self.steps):
            if isinstance(step, RestoreRNG):
                actions.append("run" if draw else "skip")
                continue
            drawn = draw and step.draws is not None
            if step.changes & live or (drawn and step.reads):
                actions.append("run")
                live = (live - step.covers - {view.storage for _, view in step.made}) | step.reads
                live |= {view.storage for view in step.writes} - step.covers
            else:
                actions.append("draw" if drawn else "skip")
        return actions[::-1]

    def _finished(self, actions: list[Action], wanted: Mapping[str, View]) -> dict[int, list[tuple[int, list[str]]]]:
        """Storages that no later step touches, by step index, each with its wanted names."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, view in wanted.items():
            names[view.storage].append(name)
        last = {
            s: i
            for i, (step, action) in enumerate(zip(self.steps, actions, strict=True))
            if action == "run"
            for s in _touched(step)
        }
        finished: dict[int, list[tuple[int, list[str]]]] = defaultdict(list)
        for storage, index in last.items():
            finished[index].append((storage, names[storage]))
        return finished


class _Memory:
    """Storages in memory at one point of the replay."""

    def __init__(self, storages: list[StorageSpec]) -> None:
        self._storages = storages
        self._held: dict[int, torch.UntypedStorage] = {}

    def run(self, step: LoggedOperation) -> None:
        for storage in step.changes - {view.storage for _, view in step.made}:
            # not allocated before, since this step covers all of it
            if storage not in self._held:
                self._held[storage] = self._storages[storage].allocate()
        given = tree_map(lambda x: self.tensor(x) if isinstance(x, View) else x, (step.args, step.kwargs))
        results = tree_leaves(step.call(*given[0], **given[1]))
        theirs = {x.untyped_storage()._cdata for x in tree_leaves(given) if isinstance(x, Tensor)}
        for place, view in step.made:
            self._held[view.storage] = self._as_recorded(results[place], view, theirs)

    def draw(self, step: LoggedOperation) -> None:
        """Draw a step's random numbers into scratch memory."""

        def scratch(x: Any) -> Any:
            if not isinstance(x, View):
                return x
            return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=self._storages[x.storage].device)

        args, kwargs = tree_map(scratch, (step.args, step.kwargs))
        step.call(*args, **kwargs)

    def tensor(self, view: View) -> Tensor:
        storage = self._held[view.storage]
        return torch.empty(0, dtype=view.dtype, device=storage.device).set_(
            storage, view.offset, view.shape, view.stride
        )

    def free(self, storage: int) -> None:
        del self._held[storage]

    def _as_recorded(self, result: Tensor, view: View, theirs: Iterable[int]) -> torch.UntypedStorage:
        """Storage of a result, laid out as in the log, shared with no input.

        A real operation may return another layout than one on shapes.
        """
        storage = result.untyped_storage()
        same = (tuple(result.shape), result.stride(), result.storage_offset(), result.dtype) == (
            view.shape,
            view.stride,
            view.offset,
            view.dtype,
        )
        if same and storage._cdata not in theirs:
            return storage
        self._held[view.storage] = self._storages[view.storage].allocate()
        self.tensor(view).copy_(result)
        return self._held[view.storage]


class _Draws:
    """Generators during a replay: set to their first states, and to later ones by `RestoreRNG`."""

    def __init__(self, log: OperationLog) -> None:
        returned_to = [
            (step.generator, step.to) for step in log.steps if isinstance(step, RestoreRNG) and isinstance(step.to, int)
        ]
        self._saved: dict[tuple[torch.Generator, int], Tensor | None] = dict.fromkeys(returned_to)
        for generator, state in log.starts:
            generator.set_state(state)
            self._save(generator, 0)

    def note(self, step: LoggedOperation) -> None:
        """Save the generator's state after a step if the construction returns to it."""
        if step.draws is not None:
            self._save(step.draws, step.draw_index)

    def restore(self, step: RestoreRNG) -> None:
        state = self._saved[step.generator, step.to] if isinstance(step.to, int) else step.to
        assert state is not None
        step.generator.set_state(state)

    def _save(self, generator: torch.Generator, number: int) -> None:
        if (generator, number) in self._saved and self._saved[generator, number] is None:
            self._saved[generator, number] = generator.get_state()


def _touched(step: LoggedOperation | RestoreRNG) -> frozenset[int]:
    return step.touches if isinstance(step, LoggedOperation) else frozenset()
