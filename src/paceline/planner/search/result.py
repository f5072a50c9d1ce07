"""Result of a search: candidates, exclusions, and the gap to the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.cost.layout import Layout
from paceline.planner.cost.prediction import Prediction
from paceline.plans.plan import Plan

# Mean error of a predicted step time: over 868 published runs, nearly all on A100s, and over 53 plans measured on two
# cores.
ERROR = 0.05
# Mean error over 37 runs of other hardware and software (`mean_error_elsewhere` of benchmarks/published.py); of these
# only TensorFlow's derating was fitted, to 3 more rows.
ERROR_ELSEWHERE = 0.28
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
        best: the fastest first; of each set of degrees only its best variant.
        excluded: the reasons, the most plans first.
        considered: number of plans in the space: all combinations of degrees, microbatches and variants, legal or not.
        gap: relative time by which the best may miss the predicted optimum: 0 when all other plans were evaluated or
            bounded away, 1 if nothing is known of the untried ones.
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


def error_of(candidate: Candidate) -> float:
    """Mean relative error of such a prediction, by the measurements for its hardware."""
    device = candidate.layout.machines.device
    return ERROR if device.is_core or device.name.startswith("A100") else ERROR_ELSEWHERE


def equals(best: Sequence[Candidate]) -> list[Candidate]:
    """Plans that predictions cannot tell from the fastest one, given their error.

    Always by `ERROR`: errors on other hardware shift all plans alike, more than one against another.
    """
    fastest = min(candidate.prediction.step_time_s for candidate in best)
    return [c for c in best if c.prediction.step_time_s * (1 - ERROR) <= fastest * (1 + ERROR)]


def preferred(best: Sequence[Candidate]) -> Candidate:
    """The simplest of the plans that predictions cannot tell from the fastest one.

    The fewest moving parts count first, then the most free memory.
    """
    return min(equals(best), key=lambda c: (moving_parts(c.plan), c.prediction.memory_bytes, c.prediction.step_time_s))


def moving_parts(plan: Plan) -> int:
    """Number of kinds of division, rematerialisation and offloading that a plan uses."""
    return sum(getattr(plan, key) != default for key, default in _MOVING.items())
