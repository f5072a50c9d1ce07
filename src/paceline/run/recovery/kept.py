"""State that a process keeps between generations, and sends to ranks without it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.comm.links import GroupLinks
from paceline.device import is_accelerator, random_state, set_random_state
from paceline.elastic.membership import Start, StepBoundary, newest_of
from paceline.engine.engine import Outcome, RankEngine
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.samples import DataSets
from paceline.own_random import restore, states
from paceline.planning.model.recorder import has_max_norm
from paceline.planning.plan import Plan
from paceline.run.build import begin_engine, build_engine, built, seed_all
from paceline.split.whole_updates import takes_steps_together
from paceline.state.manifest import plain
from paceline.state.rank_state import RankState
from paceline.sync.local import LocalRule
from paceline.sync.rule import broadcast_tensors

Tell = Callable[[str, dict[str, Any]], None]


class Kept:
    """State that one rank keeps between two generations.

    `KeptModel` keeps a whole model, and `KeptPart` keeps a part of a divided model. `Mirror` also keeps a copy of
    another rank's part, for plans in which no other replica has this part.

    Attributes:
        undo: copy of the state that undoes an interrupted step.
        ready: True if this rank can complete the interrupted step without other ranks (see `StepBoundary.ready`).
        needs_all: True if the run cannot continue from kept states without the state of a lost rank.
    """

    undo: StepUndo
    ready = needs_all = False

    def prepare(self, job: Job, plan: Plan) -> None:
        """Prepare a new process before other ranks wait for it."""
        import paceline.engine.split_model  # noqa: F401 - loads FSDP2 and the pipelines

    def engine(self, job: Job, plan: Plan, data: DataSets, group: Group, *, begins: bool) -> RankEngine:
        """Build a generation's engine; all its ranks call this.

        If the run `begins`, the model has the job's initial weights.
        """
        raise NotImplementedError

    def start(self, group: Group, saved: int) -> Start | None:
        """Choose a start from kept copies, if any.

        `saved` is the step of the newest checkpoint, or -1.
        """
        return None

    def restore(self, engine: RankEngine, group: Group, start: Start) -> None:
        """Restore the engine's state at the start; all ranks call this."""
        raise NotImplementedError

    def begin(self, engine: RankEngine, group: Group, tell: Tell) -> None:
        """Begin a generation, after `restore`; `tell` writes an event."""

    def at_boundary(self, engine: RankEngine, boundary: Callable[[], StepBoundary]) -> None:
        """Remember the state at a step boundary, to undo the next step."""
        self.undo.remember(engine.step_count)

    def broken_off(self, engine: RankEngine) -> None:
        """Handle an interrupted step, before the generation's groups are closed."""

    def keep(self, engine: RankEngine) -> None:
        """Keep the engine's state at the newest step boundary."""
        self.undo.undo(engine.step_count)

    def end(self) -> None:
        """End the generation, and release what `begin` opened."""


class KeptModel(Kept):
    """Whole model and optimizer of a rank, kept in place."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        # outer state of the sync rule, if replicas take local steps
        self._outer: dict[str, Tensor] = {}

    def prepare(self, job: Job, plan: Plan) -> None:
        self.build(job, plan)

    def build(self, job: Job, plan: Plan) -> nn.Module:
        """Build the model, and keep it."""
        self._model = model = cast("nn.Module", built(job, plan))
        self.undo = StepUndo(model)
        return model

    def engine(self, job: Job, plan: Plan, data: DataSets, group: Group, *, begins: bool) -> RankEngine:
        if self._model is None and begins:
            engine = begin_engine(job, plan, data, group, lambda: self.build(job, plan))
        else:
            # compare with None: a module with `__len__` and length 0 is falsy
            model = self.build(job, plan) if self._model is None else self._model
            optimizer = None if begins else self.optimizer
            engine = build_engine(job, plan, model, data, group, optimizer, goes_on=not begins)
        self.optimizer = engine.optimizer
        return engine

    def restore(self, engine: RankEngine, group: Group, start: Start) -> None:
        """See `Kept.restore`.

        If replicas take local steps, they keep their own parameters, and copy the outer state from one rank.
        """
        source = start.holders_of_part(group.rank, group.size)[0]
        if isinstance(engine.rule, LocalRule):
            engine.rule.go_on(self._outer)
            broadcast_tensors(group, engine.rule.outer_state().values(), source)
        if start.behind:
            hand_over(engine, group, source, start.behind)

    def keep(self, engine: RankEngine) -> None:
        super().keep(engine)
        if isinstance(engine.rule, LocalRule):
            self._outer = engine.rule.outer_state()

    def begin(self, engine: RankEngine, group: Group, tell: Tell) -> None:
        self._outer = {}


@dataclass
class _Reduced:
    """Step that was interrupted after the reduction of its gradients.

    It has the gradients, and the state after the forward pass.
    """

    gradients: dict[str, Tensor]
    stage: Literal["summed", "mean"]
    state: RankState


class KeptPart(Kept):
    """Copied state of a rank that holds a part of the model.

    Each generation divides the model again, because FSDP2's units, meshes and pipeline schedules keep references to
    their groups. Models are built on the meta device, and only this rank's part is allocated.
    """

    def __init__(self) -> None:
        self.state: RankState | None = None
        self._reduced: _Reduced | None = None
        self._inseparable: dict[str, str] | None = None  # see `Split.inseparable`

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self._reduced is not None

    def engine(self, job: Job, plan: Plan, data: DataSets, group: Group, *, begins: bool) -> RankEngine:
        if begins:
            self.state = self._reduced = None
            engine = begin_engine(job, plan, data, group)
        else:
            inseparable = self._inseparable
            engine = build_engine(job, plan, built(job, plan), data, group, goes_on=True, inseparable=inseparable)
        assert engine.split is not None
        self._inseparable = engine.split.inseparable
        self.undo = StepUndo(engine.model)
        return engine

    def restore(self, engine: RankEngine, group: Group, start: Start) -> None:
        """See `Kept.restore`.

        A rank without state gets its part from a rank with the same part.
        """
        assert engine.split is not None
        if group.rank in start.ready:
            self._finish(engine, start.boundary)
        elif self.state is not None and group.rank not in start.behind:
            _put(self.state, engine)
        of_part = range(group.rank % start.replica_size, group.size, start.replica_size)
        if behind := [replica for replica, rank in enumerate(of_part) if rank in start.behind]:
            source = start.holders_of_part(group.rank, group.size)[0]
            hand_over(engine, engine.split.mesh.group("dp"), source, behind)
        if group.rank // start.replica_size in {rank // start.replica_size for rank in start.behind}:
            # seed the whole replica: ranks that compute the same samples use the same random numbers
            draw_anew(engine)
        self.state = self._reduced = None

    def broken_off(self, engine: RankEngine) -> None:
        # a step that needs the other ranks of the replica is taken again by all of them
        stage = engine.reduction.stage
        if stage != "own" and engine.reduction.arrived and not takes_steps_together(engine.optimizer):
            gradients = {name: p.grad.clone() for name, p in engine.named_parameters().items() if p.grad is not None}
            self._reduced = _Reduced(gradients, stage, RankState.of(engine).copied())

    def begin(self, engine: RankEngine, group: Group, tell: Tell) -> None:
        self.state = self._reduced = None

    def keep(self, engine: RankEngine) -> None:
        super().keep(engine)
        self.state = RankState.of(engine).copied()

    def _finish(self, engine: RankEngine, boundary: StepBoundary) -> None:
        assert self.state is not None
        assert self._reduced is not None
        assert boundary.outcome is not None
        outcome, reduced = Outcome(**boundary.outcome), self._reduced
        if not outcome.updated:  # a skipped update also restores the buffers before the forward pass
            buffers = {name: value for name, value in self.state.tensors.items() if name.startswith("buffer/")}
            reduced.state.tensors |= buffers
        _put(reduced.state, engine)
        for name, parameter in engine.named_parameters().items():
            parameter.grad = reduced.gradients.get(name)
        engine.finish(outcome, reduced.stage)


def _put(state: RankState, engine: RankEngine) -> None:
    """Restore a state from a generation with other replicas.

    The shares of the batch and the sync rule's state are reset.
    """
    state.values |= {"loader": engine.loader.state_dict(), "rule": {}}
    for name in [name for name in state.tensors if name.startswith("sync/")]:
        del state.tensors[name]
    state.restore(engine)


def common_start(group: Group, own: StepBoundary, replica_size: int) -> Start:
    """Choose the start of all ranks of the group.

    If a rank has completed a step that was interrupted on other ranks, the other ranks take over its result. So no step
    is taken twice. Measurements of links between hosts are reused from an earlier generation.
    """
    told = group.gather_json([asdict(own), group.links and asdict(group.links)])
    # all ranks must choose algorithms from the same measurements, but a new rank has none
    links = next((links for _, links in told if links), None)
    group.links = links and replace(msgspec.convert(links, GroupLinks), hosts=group.hosts)
    return newest_of([StepBoundary(**boundary) for boundary, _ in told], replica_size)


def hand_over(engine: RankEngine, group: Group, source: int, behind: Collection[int]) -> None:
    """Send the state of rank `source` to the ranks in `behind`; all ranks call this.

    The receivers then seed their own random numbers.
    """
    state = None
    if group.rank == source:
        state = RankState.of(engine)
        state.values = plain(state.values, "values")  # its error names a value that cannot be sent
    header = group.gather_json(None if state is None else state.header)[source]
    if state is None:
        state = RankState.empty(header)
    broadcast_tensors(group, state.tensors.values(), source)
    if group.rank in behind:
        state.restore(engine)
        draw_anew(engine)


def draw_anew(engine: RankEngine) -> None:
    """Seed random numbers from the seed, the data-parallel rank and the step."""
    seed_all(engine.settings.seed * 1_000_003 + 1 + engine.data_group.rank + 7919 * (engine.step_count + 1))


_NONE = -2  # stands for no step: `_NONE + 1` is not a step number either


class StepUndo:
    """Copy of the state that forward passes change, taken before each step.

    The state consists of buffers, random states, and untrained parameters that a step writes, such as those of a
    momentum encoder. The first step shows which parameters are written; later steps copy these as well.

    Attributes:
        written: untrained parameters that a step writes.
    """

    def __init__(self, model: nn.Module) -> None:
        # where buffers are stored: the forward pass may write a buffer in place, or replace it
        self._places = [(m._buffers, name) for m in model.modules() for name in m._buffers]
        # exclude embeddings with `max_norm`: a repeated step renormalizes the same rows again
        tables = {module.weight for module in model.modules() if has_max_norm(module)}
        self._parameters = {name: p for name, p in model.named_parameters() if p not in tables}
        self.written: dict[str, Tensor] = {}
        self._held: list[Tensor | None] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._step = _NONE
        self._versions: dict[str, int] = {}
        self._random: tuple[Any, Any, Any]
        self._device_random: Tensor | None = None

    def remember(self, step: int) -> None:
        """Copy the state after `step`, before the next batch is read."""
        if step == self._step + 1:
            changed = self._changed()
            self.written |= {name: p for name, p in changed.items() if not p.requires_grad}
        self._step, self._versions = step, {name: p._version for name, p in self._parameters.items()}
        self._held = [buffers[name] for buffers, name in self._places]
        tensors = [*(buffer for buffer in self._held if buffer is not None), *self.written.values()]
        if len(tensors) == len(self._copied) and all(map(operator.is_, tensors, self._copied)):
            if tensors:
                torch._foreach_copy_(self._copies, [tensor.detach() for tensor in tensors])
        else:
            self._copied, self._copies = tensors, [tensor.detach().clone() for tensor in tensors]
        self._random = states()
        device = next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))
        self._device_random = random_state(device) if is_accelerator(device) else None

    def undo(self, step: int) -> None:
        """Restore the state after `step`, if the next step was interrupted.

        Raises:
            JobError: the interrupted step changed a parameter of which no copy was kept.
        """
        if self._step != step:
            return
        self._step = _NONE
        if lost := self._changed().keys() - self.written.keys():
            raise _cannot_undo(min(lost), step + 1) from None
        for (buffers, name), buffer in zip(self._places, self._held, strict=True):
            buffers[name] = buffer
        with torch.no_grad():
            for tensor, copy in zip(self._copied, self._copies, strict=True):
                tensor.copy_(copy)
        restore(self._random)
        if self._device_random is not None:
            set_random_state(next(iter(self._parameters.values())).device, self._device_random)

    def _changed(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._parameters.items() if p._version != self._versions[name]}


def _cannot_undo(name: str, step: int) -> JobError:
    error = JobError(
        "recovery.step_not_repeatable",
        "a rank was lost in step {step}, and the others cannot repeat the step: the model's forward pass has already "
        "changed parameter {name!r}. The run continues from its newest checkpoint (--restarts 1, or --resume).",
        step=step,
        name=name,
    )
    error.may_pass = True
    return error
