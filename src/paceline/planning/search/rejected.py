"""Reasons, for users, why plans win, lose, or cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.errors import PlanError
from paceline.planning.axes import DEGREES
from paceline.planning.cost.layout import Layout
from paceline.planning.plan import Plan
from paceline.planning.search.capacity import smallest_that_works
from paceline.planning.search.result import Candidate, Excluded
from paceline.planning.search.space import Space
from paceline.units import count, percent, size

_MOST_REASONS = 12
# of a step: less is not worth a word
_SMALL = 0.005
_WORDS = {
    "compute": "computing",
    "recompute": "computing again",
    "launch": "starting kernels",
    "tp": "tensor-parallel sums",
    "cp": "keys and values between ranks of cp",
    "ep": "tokens to experts and back",
    "fsdp": "gathering parameters",
    "pp": "activations between stages",
    "bubble": "bubble",
    "dp": "sums of gradients",
    "optimizer": "optimizer",
    "other": "the remainder",
}


@dataclass
class RejectionCounts:
    """Rejection counts of a search: by memory, and by the checks of a plan."""

    # bytes of a device
    capacity: float = 0.0
    out_of_memory: int = 0
    refused: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)

    @property
    def plans(self) -> int:
        """Number of all excluded plans."""
        return self.out_of_memory + sum(count for _, count in self.refused.values())

    def refuse(self, keys: tuple[str, ...], reason: str, plans: int = 1) -> None:
        """Count plans that a check refused."""
        text, count = self.refused.get(keys, (reason, 0))
        if count + plans:
            self.refused[keys] = text, count + plans

    def excluded(self, space: Space) -> tuple[Excluded, ...]:
        """Exclusions, most plans first. Before them come values of degrees that were never combined with others."""
        values = [Excluded(_values(refused.key, refused.values), refused.reason) for refused in space.refused]
        if (batch := _uneven_batch(space)) is not None:
            values.append(batch)
        found = [Excluded(" ".join(keys[:3]), text, count) for keys, (text, count) in self.refused.items()]
        if self.out_of_memory:
            plans, room = f"{self.out_of_memory:,} plans", size(self.capacity)
            reason = f"does not fit: {plans} need more on a device that has {room} to give"
            found.append(Excluded("memory", reason, self.out_of_memory))
        return (*values, *sorted(found, key=lambda one: -one.plans))[:_MOST_REASONS]


def why_it_wins(winner: Candidate) -> str:
    """Parts of the winner's step, the largest first."""
    step = winner.prediction.step_time_s
    parts = sorted(winner.prediction.breakdown.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{percent(seconds / step, 0)} {_WORDS.get(part, part)}"
        for part, seconds in parts
        if seconds >= 2 * _SMALL * step
    )


def why_it_loses(other: Candidate, winner: Candidate, measured: float = 1.0) -> str:
    """Parts in which a plan takes longer than the winner, with causes. They are fractions of the winner's step.

    Args:
        measured: how many times longer it takes beside that, by measured runs that are like one of the two.
    """
    told = [f"+{percent(measured - 1, 0)} by measured runs that are like it"] if measured - 1 >= _SMALL else []
    step = winner.prediction.step_time_s
    more = {
        part: (s - winner.prediction.breakdown.get(part, 0.0)) / step for part, s in other.prediction.breakdown.items()
    }
    worst = sorted(((gain, part) for part, gain in more.items() if gain >= _SMALL), reverse=True)[:2]
    told += [f"+{percent(gain, 0)} {_WORDS.get(part, part)}{_cause(part, other, winner)}" for gain, part in worst]
    return "; ".join(told) or "as fast, as far as the model can tell"


def _cause(part: str, other: Candidate, winner: Candidate) -> str:
    plan, layout = other.plan, other.layout
    if part == "bubble":
        return f": {plan.microbatches} microbatches over {plan.pp} stages"
    if part == "recompute":
        return f": remat={plan.remat}"
    if part in ("compute", "launch", "optimizer") and plan.ranks < winner.plan.ranks:
        return f": {plan.ranks:,} of {winner.plan.ranks:,} ranks"
    if part == "compute":
        return _shapes(plan, layout.samples, winner.plan, winner.layout.samples)
    if part in DEGREES:
        network = layout.link(part).name == layout.machines.between.name and layout.machines.hosts > 1
        return f": {part}={getattr(plan, part)}" + (" over the network between hosts" if network else "")
    return ""


def _shapes(plan: Plan, samples: float, winner: Plan, best_samples: float) -> str:
    """Cause of slower matrix products."""
    if plan.tp > winner.tp:
        return f": tp={plan.tp} makes matrices narrower, or divides only a part of them"
    if samples < best_samples:
        return f": microbatches of {count(round(samples), 'sample')} instead of {best_samples:g}"
    return ": stages are less even" if plan.pp > 1 else ""


def nothing_fits(space: Space, rejections: RejectionCounts, layout: Layout) -> PlanError:
    """The error of a search that found nothing."""
    job, cluster = space.job, space.cluster
    if not len(space.rows["tp"]):
        return PlanError(_no_rows(space))
    if missing := smallest_that_works(layout, job.global_batch):
        return PlanError(f"{job.name} fits on {cluster.name} under no plan. {missing}")
    refused = [f"{one.what}: {one.reason}" for one in rejections.excluded(space)]
    return PlanError("\n".join([f"{job.name} cannot be trained on {cluster.name} under any plan.", *refused]))


def _uneven_batch(space: Space) -> Excluded | None:
    """Exclusion of numbers of data-parallel ranks that do not divide the batch.

    All ranks would wait for the fullest.
    """
    batch, most = space.job.global_batch, min(space.devices, space.job.global_batch)
    even = [n for n in range(1, most + 1) if batch % n == 0]
    if space.job.partition.weights is not None or len(even) == most:
        return None
    shown = ", ".join(map(str, even[:12])) + (", …" if len(even) > 12 else "")
    reason = (
        f"a global batch of {batch:,} deals evenly to {shown} data-parallel ranks; with others all wait for those "
        "with one sample more"
    )
    return Excluded("dp × fsdp × ep", reason)


def _no_rows(space: Space) -> str:
    batch, weights = space.job.global_batch, space.job.partition.weights
    if weights is not None:
        return (
            f"the job's partition has {len(weights)} weights, one for each data-parallel rank, and "
            f"{space.cluster.name} has "
            f"{space.devices} devices: give at most {space.devices} weights, or none for equal shares."
        )
    return f"no plan divides a global batch of {batch} over {space.devices} devices of {space.cluster.name}."


def _values(key: str, values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:6])) + (", …" if len(values) > 6 else "")
    return f"{key}={shown}"
