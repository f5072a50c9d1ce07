"""Suggestions of what may make a run faster, each with its gain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paceline import units
from paceline.errors import PacelineError
from paceline.planning.axes import DEGREES
from paceline.planning.check.rules import reasons_against
from paceline.planning.explain.advice import INEXACT, WORTH
from paceline.planning.knobs import knobs
from paceline.planning.plan import Plan
from paceline.report.diagnosis.measured import Measured
from paceline.report.diagnosis.predicted import Model, other_plans, predicted_or_why
from paceline.report.words import named

_LEAST_SHARE = 0.03  # of a step, for a part to be worth a suggestion
_MOST_PLANS = 4
_LEAST_INEXACT = 0.02  # gain that other losses are worth a line for


@dataclass(frozen=True)
class Suggestion:
    """One change that may help.

    Attributes:
        what: the change: a plan's text, or words.
        gain: relative gain of throughput; None if it is not predicted.
        known: whether the gain is predicted, or the most that there can be, by the run's own parts.
        plan: the plan with it, where it is one that can be tried.
        but: its cost, or what it changes.
    """

    what: str
    gain: float | None
    known: Literal["predicted", "at most", "not predicted"]
    plan: Plan | None = None
    but: str = ""

    @property
    def order(self) -> float:
        """Sort key, larger for what is told first."""
        return -1.0 if self.gain is None else self.gain

    def is_certain(self, doubt: float) -> bool:
        """True if the interval of the predicted gain excludes zero.

        Args:
            doubt: relative error that a predicted time may have.
        """
        return self.known == "predicted" and self.gain is not None and self.gain > doubt

    @property
    def gain_words(self) -> str:
        """The gain in words."""
        if self.gain is None:
            return self.known
        return f"{'at most ' if self.known == 'at most' else ''}+{units.percent(self.gain)}"

    def line(self) -> str:
        """The suggestion in one line."""
        return f"{self.gain_words}: {self.what}" + (f" ({self.but})" if self.but else "")


def from_parts(run: Measured) -> list[Suggestion]:
    """Suggestions whose greatest gain the run's own parts tell."""
    if run.served:
        return []
    job, found = run.run.job, []
    shares = {part: seconds / run.step_s for part, seconds in run.parts.items()}
    if shares["data"] >= _LEAST_SHARE:
        now = run.plan.num_workers or job.data.num_workers
        plan = replace(run.plan, num_workers=now + 1)
        found.append(replace(_at_most(f"num_workers={now + 1}", shares["data"]), plan=plan))
    if shares["checkpoint"] >= _LEAST_SHARE:
        what = "checkpoints half as often (checkpoint.every_steps or every_seconds of the job)"
        found.append(_at_most(what, shares["checkpoint"] / 2, "more steps are trained again after a failure"))
    if shares["imbalance"] >= _LEAST_SHARE and len(run.ranks) > 1:
        found.append(_balance(run, shares["imbalance"]))
    return found


def _balance(run: Measured, share: float) -> Suggestion:
    """Less waiting for slow ranks, by shares of the batch or otherwise."""
    waits = {rank: parts["imbalance"] for rank, parts in run.ranks.items()}
    slow = min(waits, key=lambda rank: waits[rank])
    if run.plan.balance == "off" and run.plan.dp > 1:
        return _at_most("balance=auto", share)
    what = f"less other load where rank {slow} runs, because the others wait for it most"
    return _at_most(what, share)


def _at_most(what: str, share: float, but: str = "") -> Suggestion:
    return Suggestion(what, share / (1 - share), "at most", but=but)


def from_predictions(model: Model) -> list[Suggestion]:
    """Other plans, batches and rules with their predicted gain, and settings to measure."""
    if model.why_not:
        plans = [replace(one, gain=None, known="not predicted") for one in _plans(model)]
        return [*plans, *_knobs(model)]
    return [*_plans(model), *_batch(model), *_inexact(model), *_knobs(model)]


def _plans(model: Model) -> list[Suggestion]:
    """Plans of the same training that are predicted to be faster."""
    try:
        others = other_plans(model)
    except PacelineError:  # nothing else can run: its own plan has been predicted
        return []
    found = [Suggestion(named(plan), _gain(model, parts), "predicted", plan) for plan, parts in others]
    return [one for one in found if (one.gain or 0.0) >= WORTH or model.why_not][:_MOST_PLANS]


def _batch(model: Model) -> list[Suggestion]:
    run = model.run
    twice = 2 * run.run.job.global_batch
    parts = predicted_or_why(model, run.plan, run.run.job.model_copy(update={"global_batch": twice}))
    if isinstance(parts, str):
        return []
    gain = 2 * run.step_s / sum(parts.values()) - 1
    but = "samples a second; another training: `paceline plan --batch-advice` says how far it learns as well"
    return [Suggestion(f"global_batch: {twice:,}", gain, "predicted", but=but)] if gain >= WORTH else []


def _inexact(model: Model) -> list[Suggestion]:
    """Other rules and codecs, which change the losses."""
    run, found = model.run, []
    if run.plan.dp < 2 or run.plan.inexact:
        return []
    for values, but in INEXACT:
        plan = replace(run.plan, **values)
        if reasons_against(plan, run.run.job, run.run.cluster):
            continue
        parts = predicted_or_why(model, plan)
        if not isinstance(parts, str) and (gain := _gain(model, parts)) >= _LEAST_INEXACT:
            found.append(Suggestion(str(plan), gain, "predicted", plan, but))
    return sorted(found, key=lambda one: -one.order)[:2]


def _knobs(model: Model) -> list[Suggestion]:
    """Settings of a plan that compute the same; the cost model does not know them."""
    run = model.run
    tried = [knob for knob in knobs(run.run.job, run.run.cluster, run.plan) if not (knob.untried or knob.hint)]
    # loader processes are suggested where the run waits for data (`from_parts`)
    told = {*DEGREES, "num_workers"}
    same = [knob for knob in tried if not knob.cost_s and not knob.whole and not set(knob.changes) & told]
    plans = {str(knob): knob.on(run.plan) for knob in same}
    return [Suggestion(what, None, "not predicted", plan) for what, plan in plans.items()]


def _gain(model: Model, parts: dict[str, float]) -> float:
    return model.run.step_s / sum(parts.values()) - 1
