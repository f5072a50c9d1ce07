"""Asynchronous parameter server: servers own parameters and optimizer, and step on every push.

With a bound on the staleness after Ho et al., 2013 (SSP). The rule is a worker's side; `paceline_server/training` has
the workers' loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.sync.rows import numbers_of
from paceline.sync.rule import Reduction, Replica, SyncRule


class Served(SyncRule):
    """Hand this worker's gradient to `update` in the place of an optimizer step.

    A worker's ranks are alone in their group: no collective joins them with others.

    Attributes:
        update: pushes the gradients of the parameters; set by the workers' loop.
    """

    def __init__(self, **_: object) -> None:
        self.update: Callable[[], object] = _nobody

    def attach(self, replica: Replica) -> None:
        if replica.world.is_fake:  # a dry run has no servers
            self.update = lambda: None
        elif replica.dp.size > 1:
            raise PlanError(
                "under sync=server with a staleness, servers own the parameters and workers take pieces of the batches "
                "as they can, which only paceline train does: sync=server, whose replicas take every step together"
            )
        self.parameters = replica.trainable

    def step_optimizer(self, optimizer: Optimizer) -> None:
        self.update()

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        return Reduction(numbers_of(self.parameters), scalars)


class ServedDeltas(Served):
    """Train alone for a round of steps; the workers' loop pushes the change.

    `update` is the step of this worker's optimizer; servers take the outer one (DiLoCo: Douillard et al., 2023,
    arXiv:2311.08105) on each push. Between rounds a worker keeps its optimizer's state.

    Attributes:
        outer: state of the servers' optimizer at the last boundary, by the parameters' names; on the first worker.
    """

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.outer: dict[str, dict[str, Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {f"{key}/{name}": value for name, state in self.outer.items() for key, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outer = {}
        for full, value in state.items():
            key, _, name = full.partition("/")
            self.outer.setdefault(name, {})[key] = value


def _nobody() -> None:
    raise PlanError("sync=server with a staleness trains with servers, which only paceline train starts")
