"""Settings of the engine, beside the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.device import has_timed_events
from paceline.engine.guard import Policy
from paceline.job.stop import SpikeSpec
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info


@dataclass
class Settings:
    """Settings of the engine; the defaults are those of `setup`.

    Attributes:
        compare_every: updates between comparisons of the replicas' parameters and buffers.
        run_ahead: the loop needs the numbers of a step only after the next one is queued; see `runs_ahead`.
    """

    clip_norm: float | None = None
    nonfinite: Policy = "stop"
    batch_norm: str = "local"
    precision: str = "fp32"
    seed: int = 0
    buffers: str = "same"
    compare_every: int = 100
    run_ahead: bool = False
    spike: SpikeSpec = field(default_factory=SpikeSpec)

    def runs_ahead(self, plan: Plan, device: torch.device) -> bool:
        """True if the host queues a step before it reads the last one's numbers.

        Not where a step's numbers decide on its update (`nonfinite` other than stop, `spike`, fp16's loss scale, a
        replica's own step), where the host takes part in it (a pipeline's timer, offload), or where events do not tell
        the time.
        """
        policies = {self.nonfinite, self.spike.policy} & {"skip", "rewind"}
        numbers_decide = bool(policies) or (plan.precision or self.precision) == "fp16"
        host_takes_part = plan.pp > 1 or plan.offload or sync_info(plan.sync).local_steps
        return self.run_ahead and not numbers_decide and not host_takes_part and has_timed_events(device)
