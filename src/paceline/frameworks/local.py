"""Local SGD and DiLoCo in a plain loop, without DDP.

Replicas step alone, and agree on parameters now and then:

steps = LocalSteps(model, "diloco:30")
...
optimizer.step()
steps.stepped()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.comm.backend import group_of
from paceline.errors import PlanError
from paceline.planning.plan import Plan
from paceline.planning.sync_info import CompressSpec, SyncSpec
from paceline.sync import Replica, attach, build_rule
from paceline.sync.batchnorm import has_batch_norm
from paceline.sync.local import LocalRule

_RULES = ("local", "diloco")  # they need nothing of a loop but its steps


class LocalSteps:
    """Local steps of a model's replicas, which are the ranks of the default process group.

    Every rank makes one, before its optimizer has stepped; all begin with rank 0's parameters.

    Args:
        model: the plain model, not wrapped by DDP.
        sync: the rule as in a plan: `local:8`, `diloco:30`.
        codec: of what DiLoCo sends; None sends it as it is.
        device: where the model is.

    Raises:
        PlanError: no such rule or codec, or the model has batch-norm statistics, which these rules do not share.
    """

    def __init__(
        self, model: nn.Module, sync: str, codec: str | None = None, device: torch.device | None = None
    ) -> None:
        check_sync(sync, codec)
        if sync == "allreduce":
            raise PlanError(f"sync={sync} agrees on gradients: wrap the model by DistributedDataParallel instead")
        if has_batch_norm(model):
            raise PlanError(
                f"sync={sync}: the model has batch norm, whose statistics would stay those of each rank. Use group "
                "norm, or paceline.setup, which averages them where a model is evaluated"
            )
        group = group_of(None, device or torch.device("cpu"))
        plan = Plan(dp=group.size, sync=sync, compress=codec or "none")
        rule = build_rule(plan)
        assert isinstance(rule, LocalRule)
        self.rule, self.step = rule, 0
        self._none = torch.zeros(0, device=group.device)
        attach(self.rule, Replica(model, group, inner=type(group)(device=group.device), world=group), plan)

    def stepped(self) -> None:
        """Let the rule act after an optimizer step; every rank calls it after each."""
        self.step += 1
        self.rule.after_backward(self.step, self._none)
        self.rule.after_step(self.step)

    @contextmanager
    def in_agreement(self) -> Iterator[None]:
        """Context in which all ranks have the parameters that they agree on; all enter it."""
        with self.rule.in_agreement():
            yield

    def end(self) -> None:
        """Leave every rank with the agreed parameters, and let go of the model.

        Every rank calls it.
        """
        with self.rule.in_agreement():
            agreed = [parameter.detach().clone() for parameter in self.rule.parameters]
        with torch.no_grad():
            for parameter, value in zip(self.rule.parameters, agreed, strict=True):
                parameter.copy_(value)
        self.rule.detach()

    def state_dict(self) -> dict[str, Any]:
        """Steps so far and the outer optimizer's state, the same on all ranks."""
        self.rule.wait()
        return {"step": self.step, "outer": {key: value.clone() for key, value in self.rule.outer_state().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; the model has the parameters that were agreed on then."""
        self.step = state["step"]
        self.rule.go_on(state["outer"])


def check_sync(sync: str, codec: str | None) -> None:
    """Check a rule and a codec before anything is started.

    Raises:
        PlanError: one of them is unknown, or they do not work here or together.
    """
    spec = SyncSpec.parse(sync)
    if codec in ("none", "auto"):
        raise PlanError(f'codec="{codec}" is no codec: name one, or leave it out')
    if codec is not None:
        CompressSpec.parse(codec)
    if sync == "allreduce":
        return
    if spec.name not in _RULES:
        raise PlanError(
            f"sync={sync} needs paceline's own engine: use paceline.setup or paceline.train, or here allreduce, "
            "local:8 or diloco:30"
        )
    if codec is not None and not spec.info.compresses:
        raise PlanError(
            f"sync={sync} sends parameters, which no codec takes: leave codec={codec} out, or use diloco:30"
        )
