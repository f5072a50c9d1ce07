"""State that a process keeps between two generations of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.elastic.membership import Start, StepBoundary
from paceline.engine.engine import Engine, Outcome
from paceline.job.job import Job
from paceline.job.samples import DataSets
from paceline.planning.plan import Plan
from paceline.run.build import begin_engine, build_engine, built
from paceline.run.recovery.handover import draw_anew, hand_over
from paceline.run.recovery.undo import StepUndo
from paceline.state.rank_state import RankState
from paceline.sync.local import LocalRule
from paceline.sync.rule import broadcast_tensors


class Kept(ABC):
    """State of one rank between two generations. `KeptModel` is that of a whole model, `KeptPart` of a divided one.

    Attributes:
        undo: takes a step back that was broken off.
        ready: whether the next step can be taken without other ranks (see `StepBoundary.ready`).
    """

    undo: StepUndo
    ready = False

    @abstractmethod
    def engine(self, job: Job, plan: Plan, data: DataSets, group: Group, *, begins: bool) -> Engine:
        """Make a generation's engine, on all its ranks; `begins`: with the job's weights."""

    @abstractmethod
    def restore(self, engine: Engine, group: Group, start: Start) -> None:
        """Give the engine the state that the ranks go on from. All ranks of the group call this."""

    @abstractmethod
    def broken_off(self, engine: Engine) -> None:
        """Note that a step was broken off, before anything of its groups is closed."""

    def keep(self, engine: Engine) -> None:
        """Keep the engine's state at the newest step boundary."""
        self.undo.undo(engine.step_count)

    @abstractmethod
    def forget(self) -> None:
        """Let go of what is kept, as an engine has the state."""


class KeptModel(Kept):
    """Model and optimizer of a rank that holds all of the model. They stay as they are."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        # outer state of replicas that take steps of their own
        self._outer: dict[str, Tensor] = {}

    def build(self, job: Job, plan: Plan) -> nn.Module:
        """Build the model now: of a rank that nobody waits for yet."""
        self._model = model = cast("nn.Module", built(job, plan))
        self.undo = StepUndo(model)
        return model

    def engine(self, job: Job, plan: Plan, data: DataSets, group: Group, *, begins: bool) -> Engine:
        """See `Kept.engine`."""
        if self._model is None and begins:
            engine = begin_engine(job, plan, data, group, lambda: self.build(job, plan))
        else:
            # a module may be false: one with a length is, while that is 0
            model = self.build(job, plan) if self._model is None else self._model
            optimizer = None if begins else self.optimizer
            engine = build_engine(job, plan, model, data, group, optimizer, goes_on=not begins)
        self.optimizer = engine.optimizer
        return engine

    def restore(self, engine: Engine, group: Group, start: Start) -> None:
        """See `Kept.restore`. Replicas under a local rule keep their own parameters, and have one outer state."""
        source = start.holders_of_part(group.rank, group.size)[0]
        if isinstance(engine.rule, LocalRule):
            engine.rule.go_on(self._outer)
            broadcast_tensors(group, engine.rule.outer_state().values(), source)
        if start.behind:
            hand_over(engine, group, source, start.behind)

    def keep(self, engine: Engine) -> None:
        """See `Kept.keep`."""
        super().keep(engine)
        if isinstance(engine.rule, LocalRule):
            self._outer = engine.rule.outer_state()

    def broken_off(self, engine: Engine) -> None:
        """See `Kept.broken_off`."""

    def forget(self) -> None:
        """See `Kept.forget`."""
        self._outer = {}


@dataclass
class _Agreed:
    """Step that was broken off when its gradients were known.

    They, and the state after its forward pass.
    """

    gradients: dict[str, Tensor]
    stage: Literal["summed", "mean"]
    state: RankState


class KeptPart(Kept):
    """State of a rank that holds a part of the model. It is copied, and the model divided anew in each generation.

    What divides a model (FSDP2's units, meshes, the schedules of pipelines) holds on to the groups that it was made
    for. Models are built without memory, and only the part of this rank gets some.
    """

    def __init__(self) -> None:
        self.state: RankState | None = None
        self._agreed: _Agreed | None = None

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """See `Kept`."""
        return self._agreed is not None

    def engine(self, job: Job, plan: Plan, data: DataSets, group: Group, *, begins: bool) -> Engine:
        """See `Kept.engine`."""
        if begins:
            self.forget()
            engine = begin_engine(job, plan, data, group)
        else:
            engine = build_engine(job, plan, built(job, plan), data, group, goes_on=True)
        self.undo = StepUndo(engine.model)
        return engine

    def restore(self, engine: Engine, group: Group, start: Start) -> None:
        """See `Kept.restore`. Each part comes from a rank that has the same one."""
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
            # ranks that compute the same samples draw the same random numbers
            draw_anew(engine)
        self.forget()

    def broken_off(self, engine: Engine) -> None:
        """See `Kept.broken_off`."""
        if engine.reduction.stage != "own":
            gradients = {name: p.grad.clone() for name, p in engine.named_parameters().items() if p.grad is not None}
            self._agreed = _Agreed(gradients, engine.reduction.stage, RankState.of(engine).copied())

    def forget(self) -> None:
        """See `Kept.forget`."""
        self.state = self._agreed = None

    def keep(self, engine: Engine) -> None:
        """See `Kept.keep`."""
        super().keep(engine)
        self.state = RankState.of(engine).copied()

    def _finish(self, engine: Engine, boundary: StepBoundary) -> None:
        """Take the step that was broken off, as other ranks have."""
        assert self.state is not None
        assert self._agreed is not None
        assert boundary.outcome is not None
        outcome, agreed = Outcome(**boundary.outcome), self._agreed
        if not outcome.updated:  # then buffers are those before the forward pass
            buffers = {name: value for name, value in self.state.tensors.items() if name.startswith("buffer/")}
            agreed.state.tensors |= buffers
        _put(agreed.state, engine)
        for name, parameter in engine.named_parameters().items():
            parameter.grad = agreed.gradients.get(name)
        engine.finish(outcome, agreed.stage)


def _put(state: RankState, engine: Engine) -> None:
    """Restore the state of an engine that had other replicas.

    Shares of the batch and the rule's state begin anew.
    """
    state.values |= {"loader": engine.loader.state_dict(), "rule": {}}
    for name in [name for name in state.tensors if name.startswith("sync/")]:
        del state.tensors[name]
    state.restore(engine)
