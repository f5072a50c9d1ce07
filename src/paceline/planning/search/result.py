"""Result of a search: candidates, exclusions, and the gap to the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planning.adjustment import Adjustment, equal_ratio
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.prediction import Interval, Prediction
from paceline.planning.plan import Plan

_MOVING = {
    "fsdp": 1,
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "remat": "none",
    "offload": False,
    "sequence": False,
    "cut": "",
    "schedule": "1f1b",
}


@dataclass(frozen=True)
class Candidate:
    """A legal plan that fits, with its prediction.

    Attributes:
        plan: passes `check_plan` on the job and the cluster.
        layout: the plan as numbers.
        prediction: of one step.
        why: for the winner, the parts of its step; for the others, the parts that make them slower.
    """

    plan: Plan
    layout: Layout
    prediction: Prediction
    why: str = ""

    @property
    def interval(self) -> Interval:
        """Interval of its step time; by the cost model alone if it has none."""
        found = self.prediction.interval
        return found or Adjustment().interval(self.layout, self.prediction.step_time_s)


@dataclass(frozen=True)
class Excluded:
    """Plans that cannot run, grouped by reason.

    Attributes:
        what: in the words of a plan, such as `tp=16`, or `memory`.
        reason: why, and what would work.
        plans: number of such plans among those considered; 0 if they were not counted.
    """

    what: str
    reason: str
    plans: int = 0


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: the recommended plan (`preferred`), then the others, the fastest first. Each set of degrees appears with
            its best variant only.
        excluded: the reasons, the most plans first.
        considered: number of plans in the space: all combinations of degrees, microbatches and variants, legal or not.
        gap: relative time by which the best may miss the optimum, as predicted before measured runs correct it: 0 when
            all other plans were evaluated or bounded away, 1 if nothing is known of the untried ones.
        seconds: duration of the search.
        evaluated: number of plans predicted in full.
        pruned: number of plans that a lower bound, or dominance, excluded without a prediction.
    """

    best: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...] = ()
    considered: int = 0
    gap: float = 0.0
    seconds: float = 0.0
    evaluated: int = 0
    pruned: int = 0

    @property
    def fastest(self) -> Candidate:
        """The plan with the shortest predicted step; the baseline of what-if predictions."""
        return min(self.best, key=lambda candidate: candidate.prediction.step_time_s)


def equals(best: Sequence[Candidate]) -> list[Candidate]:
    """Plans that predictions cannot tell from the fastest one.

    By the interval of the ratio of two plans' times, which has 1 in it: most of an error is common to both, so it is
    narrower than that of a time.
    """
    fastest = min(candidate.prediction.step_time_s for candidate in best)
    return [c for c in best if c.prediction.step_time_s <= equal_ratio() * fastest]


def preferred(best: Sequence[Candidate]) -> Candidate:
    """Choose the simplest of the plans that predictions cannot tell from the fastest one.

    The fewest moving parts count first, then the fewest ranks, then the most free memory.
    """
    return min(equals(best), key=_complexity)


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    prediction = candidate.prediction
    parts = moving_parts(candidate.plan)
    return parts, candidate.plan.ranks, prediction.memory_bytes, prediction.step_time_s


def moving_parts(plan: Plan) -> int:
    """Number of kinds of division, rematerialisation and offloading that a plan uses."""
    return sum(getattr(plan, key) != default for key, default in _MOVING.items())
