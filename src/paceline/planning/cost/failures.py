"""Predicted goodput under failures: checkpoints, restarts, recovery in place, and the best interval.

Failures come at random (exponential), also during a restart. The model is that of Daly (2006, "A higher order estimate
of the optimum checkpoint interval"), after Young (1974), with checkpoints that are written beside the training: of such
a checkpoint training pays a short stall at once, and can go back to it only when all of it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planning.cost import constants
from paceline.planning.cost.layout import Layout

_DAY_S = 86_400.0
_ITERATIONS = 100  # of Newton's method, which takes about six
_LARGEST = 700.0  # that exp() can take


@dataclass(frozen=True)
class FailureCosts:
    """Costs of failures for one plan, in seconds.

    Attributes:
        between_s: mean time from a failure of any host in use to the next one.
        step_s: a step.
        stall_s: what a checkpoint adds to the steps.
        write_s: from the start of a checkpoint until a run can go back to it.
        restart_s: from a failure to the first step of the new attempt, the reading of the checkpoint included.
        in_place: True if after the loss of any host the other ones hold the whole state, so that replicas go on.
        copied_s: seconds of steps between two copies of the only replica in other hosts' memory; 0 without copies.
    """

    between_s: float
    step_s: float
    stall_s: float
    write_s: float
    restart_s: float
    in_place: bool = False
    copied_s: float = 0.0

    def goodput(self, interval_s: float) -> float:
        """Predicted goodput with a checkpoint after every so many seconds of steps.

        With recovery in place where the plan allows it, else with restarts.
        """
        return self.recovering(interval_s) if self.goes_on else self.restarting(interval_s)

    @property
    def goes_on(self) -> bool:
        """True if the loss of any host leaves the whole state in memory."""
        return self.in_place or self.copied_s > 0

    def restarting(self, interval_s: float) -> float:
        """Goodput where every failure is a restart from the newest whole checkpoint.

        Exact for this model: of a lifetime of mean `between_s` count the intervals whose checkpoint is written in it.
        """
        cycle_s = interval_s + self.stalled_s(interval_s)
        exponent = (self.restart_s + self.write_s + cycle_s) / self.between_s
        if exponent > _LARGEST:
            return 0.0
        lost = math.exp((self.restart_s + self.write_s) / self.between_s)
        return interval_s / (self.between_s * lost * math.expm1(cycle_s / self.between_s))

    def recovering(self, interval_s: float) -> float:
        """Goodput where ranks go on in place: a failure costs a step and the gap.

        With copies in memory it costs the wait for a host, and the steps since the newest copy. Checkpoints are written
        all the same, for the loss of more than memory covers.
        """
        saving = interval_s / (interval_s + self.stalled_s(interval_s))
        if not self.in_place:
            saving *= 1 - constants.STATE_SHARE
        return saving * self.between_s / (self.between_s + self.failure_s)

    @property
    def failure_s(self) -> float:
        """Seconds that one failure costs where ranks go on in place."""
        waits_s = 0.0 if self.in_place else constants.RESTART_S + self.copied_s / 2
        return self.step_s + constants.RECOVERY_S + waits_s

    @property
    def best_interval_s(self) -> float:
        """Seconds of steps between checkpoints that lose the least, by restarts.

        Not shorter than a step or than writing takes. The stationary point of `restarting`, by Newton's method from
        Young's first order; Daly's formula is a series of it.
        """
        stall = self.stall_s / self.between_s
        share = min(1.0, math.sqrt(2 * stall))  # of `between_s`
        for _ in range(_ITERATIONS):
            change = (share + math.expm1(-share - stall)) / -math.expm1(-share - stall) if share else 0.0
            share -= change
            if abs(change) <= 1e-12 * share:
                break
        return max(share * self.between_s, self.write_s, self.step_s)

    @property
    def best_every_steps(self) -> int:
        """`best_interval_s` as a number of steps, the better of its neighbours."""
        below = max(1, math.floor(self.best_interval_s / self.step_s))
        return max((below, below + 1), key=lambda steps: self.restarting(steps * self.step_s))

    def stalled_s(self, interval_s: float) -> float:
        """Stall of a checkpoint, and the wait of a next one that comes early."""
        return self.stall_s + max(0.0, self.write_s - interval_s)


def failure_costs(
    layout: Layout,
    step_s: float,
    failures_per_host_day: float,
    ranks_per_host: Sequence[int],
    *,
    copied: bool = False,
) -> FailureCosts:
    """Costs of failures for a plan, from its state and the assumptions in `constants`.

    Args:
        failures_per_host_day: failures of one host in a day, above 0.
        ranks_per_host: of every host; a failure of one without ranks costs nothing.
        copied: the plan keeps `copies` of ranks' states in other ranks' memory.
    """
    most, hosts = max(ranks_per_host), sum(ranks > 0 for ranks in ranks_per_host)
    state_bytes = layout.trace.parameters * (layout.parameter_bytes + layout.optimizer_bytes)
    written_bytes = state_bytes / layout.ranks  # by each rank
    held_bytes = state_bytes * layout.dp / layout.ranks  # by each rank
    rate = min(constants.CHECKPOINT_WRITE, constants.STORAGE / most)
    write_s = constants.CHECKPOINT_WRITE_S + written_bytes / rate
    copy_s = written_bytes / constants.CHECKPOINT_COPY
    # a copy is as seldom as its share of the time says; on another host only where none has more than half of the ranks
    apart_s = max(constants.COPY_TRAFFIC * copy_s / constants.STATE_SHARE, step_s)
    copied_s = apart_s if copied and 2 * most <= layout.ranks else 0.0
    return FailureCosts(
        between_s=_DAY_S / (failures_per_host_day * hosts),
        step_s=step_s,
        stall_s=constants.CHECKPOINT_STALL_S + constants.CHECKPOINT_SLOWS * write_s + max(copy_s - step_s, 0.0),
        write_s=write_s,
        restart_s=constants.RESTART_S + held_bytes * most / constants.STORAGE,
        in_place=not layout.zero_dp and (layout.dp - 1) * layout.stride["dp"] >= most,
        copied_s=copied_s,
    )
