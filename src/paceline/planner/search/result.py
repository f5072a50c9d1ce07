"""What a search for the best plan found: the candidates, what was excluded and why, and how far from the best the answer can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.cost.layout import Layout
from paceline.planner.cost.prediction import Prediction
from paceline.plans.plan import Plan

# Mean error of a predicted step time: over 868 published runs, nearly all on A100s, and over 53 plans measured on two cores.
ERROR = 0.05
# The same over 37 runs of other hardware and software (`mean_error_elsewhere` of benchmarks/published.py); of these only TensorFlow's
# derating was fitted, to 3 more rows.
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
    """A plan that may run and fits, with what it is predicted to cost.

    Attributes:
        plan: passes `Plan.check` on the job and the cluster.
        layout: the same as numbers.
        prediction: of one step.
        why: for the winner, what its step consists of; for the others, which part of theirs makes them slower.
    """

    plan: Plan
    layout: Layout
    prediction: Prediction
    why: str = ""


@dataclass(frozen=True)
class Excluded:
    """Plans that cannot run, taken together by their reason.

    Attributes:
        what: in the words of a plan, such as `tp=16`, or `memory`.
        reason: why, and what would work.
        plans: how many of those considered; 0 where they were not counted.
    """

    what: str
    reason: str
    plans: int = 0


@dataclass(frozen=True)
class Hint:
    """What would be faster and is not chosen, since it changes the result or is not the plan's to choose.

    Attributes:
        change: in the words of a plan or of a job, such as `sync=local:8`, `precision=bf16`.
        gain: the part of the step's time that it saves, as predicted: 0.25 is a quarter.
        but: what it changes.
        prediction: with it.
    """

    change: str
    gain: float
    but: str
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Found:
    """The answer of a search.

    Attributes:
        best: the fastest first; of each set of degrees only its best variant.
        excluded: the reasons, the most plans first.
        considered: plans in the space: all combinations of degrees, microbatches and variants, those that cannot run included.
        gap: by what part of its time the best may miss the optimum as the model predicts it: 0 when all else was evaluated or bounded away,
            1 where nothing is known of what was not looked at.
        seconds: that the search took.
        evaluated: plans predicted in full.
        pruned: plans that a lower bound of their time, or dominance, set aside without predicting them.
        weights: shares of the batch by speed (`job.partition.weights`, one per data-parallel rank of the best plan); None: equal shares.
        weights_gain: the part of the step's time that they save.
        cut: the blocks with which the stages after the first begin (`Plan.cut`); () where the even cut is as good.
        cut_gain: the part of the step's time that it saves.
        hints: what would be faster at a price that the user decides on.
    """

    best: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...] = ()
    considered: int = 0
    gap: float = 0.0
    seconds: float = 0.0
    evaluated: int = 0
    pruned: int = 0
    weights: tuple[float, ...] | None = None
    weights_gain: float = 0.0
    cut: tuple[str, ...] = ()
    cut_gain: float = 0.0
    hints: tuple[Hint, ...] = ()


def error_of(candidate: Candidate) -> float:
    """Mean error of such a prediction, as a share of its step time, by what predictions were held against."""
    device = candidate.layout.machines.device
    return ERROR if device.kind == "cpu" or device.name.startswith("A100") else ERROR_ELSEWHERE


def equals(best: Sequence[Candidate]) -> list[Candidate]:
    """Plans that predictions cannot tell from the fastest one: nearer to it than predictions err.

    Always by `ERROR`: what is not known of other hardware shifts all plans for it alike, more than one against another.
    """
    fastest = min(candidate.prediction.step_time_s for candidate in best)
    return [c for c in best if c.prediction.step_time_s * (1 - ERROR) <= fastest * (1 + ERROR)]


def preferred(best: Sequence[Candidate]) -> Candidate:
    """The simplest of the plans that predictions cannot tell from the fastest one.

    The fewest moving parts count first, then the most free memory.
    """
    return min(equals(best), key=lambda c: (moving_parts(c.plan), c.prediction.memory_bytes, c.prediction.step_time_s))


def moving_parts(plan: Plan) -> int:
    """How many kinds of division, rematerialisation and offloading a plan makes use of."""
    return sum(getattr(plan, key) != default for key, default in _MOVING.items())
