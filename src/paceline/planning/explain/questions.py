"""Questions in words, `one more host` or `remat=none`, answered by the best plan with that changed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from paceline.cluster.cluster import cluster_from
from paceline.errors import ClusterError, PacelineError, PlanError
from paceline.job.job import Precision
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.layout import Products
from paceline.planning.explain.advice import (
    Case,
    Change,
    batch,
    devices,
    hosts_added,
    layouts,
    links_between,
    links_inside,
    memory,
    what_if,
)
from paceline.planning.explain.explain import Explanation, Suggestion
from paceline.planning.machines import Adjustment
from paceline.planning.plan import DEGREES, Plan
from paceline.planning.predict import Layouts
from paceline.planning.search.result import Candidate
from paceline.text import closest
from paceline.units import digits, percent, seconds, size

_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}
_TIMES = {"twice": 2.0, "double": 2.0, "half": 0.5, "three times": 3.0, "four times": 4.0}
_HOSTS = re.compile(
    r"(?P<number>\d+|one|two|three|four|eight) (?:(?P<more>more|fewer|less) hosts?|hosts? (?P<after>more|fewer|less))"
)
_FACTOR = re.compile(
    r"(?P<times>twice|double|half|three times|four times|\d+(?:\.\d+)? ?(?:times|x|×)) (?:as (?:many|much) )?(?:the )?"
    r"(?P<what>memory|hosts|devices|gpus|links|links inside|links between|network|batch|global batch)"
)
_BATCH = re.compile(r"(?:global[ _])?batch ?=? ?(\d[\d_,]*)")
_SHAPE = re.compile(r"\d+ ?[x×*]")
_WHAT = ("memory", "devices", "hosts", "links", "links inside", "links between", "batch")
_EXAMPLES = (
    '"one more host", "twice the memory", "twice the links", "half the devices", batch=512, bf16, remat=none, the '
    "text of a plan, or the name of a cluster"
)


@dataclass(frozen=True)
class Answer:
    """Best plan with one thing changed, beside the best plan of today.

    Attributes:
        question: as it was asked.
        gain: relative gain of throughput; None if nothing can be predicted.
        candidate: the best plan then; None with the reason in `why`.
        cost: of the same amount of training; None without prices.
        now_cost: today's.
        cost_of: the amount of training.
    """

    question: str
    gain: float | None = None
    candidate: Candidate | None = None
    cost: float | None = None
    now_cost: float | None = None
    cost_of: str = ""
    why: str = ""

    @property
    def words(self) -> str:
        """The gain as text."""
        return Suggestion(self.gain, self.question).words

    @property
    def about(self) -> str:
        """Step, cost, memory and plan, or why there are none."""
        if self.candidate is None:
            return self.why
        prediction = self.candidate.prediction
        costs = ""
        if self.cost is not None and self.now_cost:
            change = self.cost / self.now_cost - 1
            sign = "+" if change >= 0 else "\N{MINUS SIGN}"
            costs = f", cost {digits(self.cost)} ({sign}{percent(abs(change))}) for {self.cost_of}"
        return (
            f"{seconds(prediction.step_time_s)} a step, {size(prediction.memory_bytes)}{costs}: {self.candidate.plan}"
        )

    def to_json(self) -> dict[str, Any]:
        """The answer as plain JSON values."""
        found = self.candidate
        return {
            "question": self.question,
            "gain": self.gain,
            "plan": str(found.plan) if found else None,
            "step_time_s": found.prediction.step_time_s if found else None,
            "interval_80_s": [found.interval.low_s, found.interval.high_s] if found else None,
            "throughput": found.prediction.throughput if found else None,
            "memory_bytes": found.prediction.memory_bytes if found else None,
            "cost": self.cost,
            "cost_of": self.cost_of,
            "why": self.why,
        }


def answers(explanation: Explanation, case: Case, questions: Iterable[str]) -> tuple[Answer, ...]:
    """Answers to questions on an explained case, in their order.

    Raises:
        PlanError: a question is not understood; with what can be asked.
    """
    known = tuple((candidate.plan, candidate.layout) for candidate in explanation.found.best)
    asked = [(question, read_question(question)) for question in questions]
    return tuple(_answer(explanation, case._replace(plans=known), question, change) for question, change in asked)


def read_question(text: str) -> Change:
    """The change that a question means.

    Raises:
        PlanError: it is none of those known, or the text of a plan with a wrong key.
    """
    words = " ".join(text.lower().split()).removeprefix("with ")
    if match := _HOSTS.fullmatch(words):
        number = _NUMBERS.get(match["number"]) or int(match["number"])
        return hosts_added(number if (match["more"] or match["after"]) == "more" else -number)
    if match := _FACTOR.fullmatch(words):
        return _scaled(match["what"], _times(match["times"]))
    if match := _BATCH.fullmatch(words):
        return batch(max(1, int(match[1].replace(",", "").replace("_", ""))))
    if words in (*get_args(Precision), *get_args(Products)):
        return _precision(words)
    if "=" in text:
        return _plan(text)
    return _cluster(text)


def _times(words: str) -> float:
    return _TIMES.get(words) or float(re.sub(r"[^\d.]", "", words))


def _scaled(what: str, times: float) -> Change:
    if what == "memory":
        return memory(times)
    if what in ("hosts", "devices", "gpus"):
        return devices(times)
    if what == "links inside":
        return links_inside(times)
    if what in ("network", "links between"):
        return links_between(times)
    if what == "links":
        return lambda case: links_inside(times)(links_between(times)(case))
    return lambda case: batch(max(1, round(times * case.job.global_batch)))(case)


def _precision(name: str) -> Change:
    """Change of the precision. Where a job cannot have it, products of the known plans are computed in it."""

    def change(case: Case) -> Case:
        if name in get_args(Precision):
            job = case.job.model_copy(update={"precision": name})
            return case._replace(job=job, plans=())
        device = case.plans[0][1].machines.device
        kind = name.removeprefix("mx").partition("-")[0]  # fp8 of mxfp8 and fp8-block
        if device.peak_flops.get(kind, 0.0) <= device.peak_flops.get("bf16", 0.0):
            raise PlanError(f"{device.name} computes no faster in {name}, or not at all")
        return layouts(lambda layout: replace(layout, products=name))(case)  # type: ignore[arg-type]

    return change


def _plan(text: str) -> Change:
    """Change to a plan with degrees, or of keys of the known plans."""
    given = Plan.parse(text)
    keys = {word.partition("=")[0] for word in text.split()}
    values = {key: getattr(given, key) for key in keys}

    def change(case: Case) -> Case:
        whole = bool(keys & set(DEGREES))
        plans = [given] if whole else list(dict.fromkeys(replace(plan, **values) for plan, _ in case.plans))
        reasons = {plan: reasons_against(plan, case.job, case.cluster) for plan in plans}
        legal = [plan for plan in plans if not reasons[plan]]
        if not legal:
            raise PlanError(next(iter(reasons.values()))[0])
        layout = case.plans[0][1]
        built = Layouts(case.job, layout.machines)
        return case._replace(plans=tuple((plan, built.of(plan, layout.threads)) for plan in legal))

    return change


def _cluster(text: str) -> Change:
    try:
        cluster = cluster_from(text)
    except ClusterError:
        if _SHAPE.match(text):
            raise
        known = (
            "one more host",
            "one host fewer",
            *(f"{times} the {what}" for times in ("twice", "half") for what in _WHAT),
        )
        meant = f' Did you mean "{near}"?' if (near := closest(text, known)) else ""
        raise PlanError(f'what if "{text}": this is not understood.{meant} Ask for {_EXAMPLES}') from None

    def change(case: Case) -> Case:
        price = case.cluster.price_per_hour if cluster.price_per_hour is None else cluster.price_per_hour
        # what was measured of this machine says nothing of another; factors of runs are kept for each
        basis = case.calibration if isinstance(case.calibration, Adjustment) else None
        return case._replace(cluster=cluster.model_copy(update={"price_per_hour": price}), calibration=basis, plans=())

    return change


def _answer(explanation: Explanation, case: Case, question: str, change: Change) -> Answer:
    best = explanation.found.fastest
    try:
        changed = change(case)
    except PacelineError as error:
        return Answer(question, why=f"not predicted: {str(error).splitlines()[0]}")
    outcome = what_if(changed, lambda same: same)
    then = outcome.best
    if then is None:
        return Answer(question, why=f"not predicted: {outcome.why}")
    if not then.prediction.fits:
        needs = f"needs {size(then.prediction.memory_bytes)} of a device with {size(explanation.capacity_bytes)}"
        return Answer(question, why=f"does not fit: {then.plan} {needs}")
    # the same amount of training, whatever the batch is
    steps = explanation.job.stop.steps
    whole = steps is not None and changed.job.global_batch != explanation.job.global_batch
    part = explanation.job.global_batch / changed.job.global_batch if whole else 1.0
    now, later = explanation.cost(best), replace(explanation, job=changed.job, cluster=changed.cluster).cost(then)
    return Answer(
        question,
        gain=then.prediction.throughput / best.prediction.throughput - 1,
        candidate=then,
        cost=later.value * part if later else None,
        now_cost=now.value if now else None,
        cost_of="as many samples" if whole else later.of if later else "",
    )
