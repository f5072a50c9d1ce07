"""Questions about a plan: the effect of a change, and the largest useful batch size.

The answer to a question, such as `one more host` or `remat=none`, is the best plan after this change.

Advice on the global batch is never applied automatically. The speed of a batch can be predicted, but its effect on
learning cannot. The batch beyond which samples are wasted depends on the noise of the gradients (McCandlish et al.,
2018, arXiv:1812.06162). The advice is therefore an upper bound, and states what is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from paceline.cluster.cluster import Cluster, cluster_from
from paceline.errors import ClusterError, PacelineError, PlanError
from paceline.job.job import Job, Precision
from paceline.planning.arguments import plan_of
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.layout import Products
from paceline.planning.explain.advice import (
    Advice,
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
from paceline.planning.explain.explain import Explanation
from paceline.planning.machines import Adjustment
from paceline.planning.plan import DEGREES, Plan
from paceline.planning.prediction import Layouts
from paceline.planning.search.result import Candidate, figures
from paceline.text import closest
from paceline.units import digits, percent, seconds, size

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}
_TIMES = {"twice": 2.0, "double": 2.0, "half": 0.5, "three times": 3.0, "four times": 4.0}
_HOSTS = re.compile(
    r"(?P<number>\d+|one|two|three|four|eight) (?:(?P<more>more|fewer|less) hosts?|hosts? (?P<after>more|fewer|less))"
)
# quantities that a question may multiply by a factor
_SCALED: dict[str, Callable[[float], Change]] = {
    "memory": memory,
    "devices": devices,
    "hosts": devices,
    "links": lambda times: lambda case: links_inside(times)(links_between(times)(case)),
    "links inside": links_inside,
    "links between": links_between,
    "batch": lambda times: lambda case: batch(max(1, round(times * case.job.global_batch)))(case),
}
_SYNONYMS = {"gpus": "devices", "network": "links between", "global batch": "batch"}
_FACTOR = re.compile(
    r"(?P<times>twice|double|half|three times|four times|\d+(?:\.\d+)? ?(?:times|x|×)) (?:as (?:many|much) )?(?:the )?"
    rf"(?P<what>{'|'.join((*_SCALED, *_SYNONYMS))})"
)
_BATCH = re.compile(r"(?:global[ _])?batch ?=? ?(\d[\d_,]*)")
_SHAPE = re.compile(r"\d+ ?[x×*]")
_EXAMPLES = (
    '"one more host", "twice the memory", "twice the links", "half the devices", batch=512, bf16, remat=none, the '
    "text of a plan, or the name of a cluster"
)


@dataclass(frozen=True)
class Answer:
    """Best plan after one change, compared with the current best plan.

    Attributes:
        question: text of the question.
        gain: relative gain in throughput; None if no plan can be predicted.
        candidate: best plan after the change; None if there is none, and `why` then has the reason.
        cost: cost of the same amount of training after the change; None without prices.
        now_cost: cost of the same amount of training with the current plan.
        cost_of: the amount of training as text.
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
        """The gain as text, as in `Advice.words`."""
        return Advice(self.question, gain=self.gain).words

    @property
    def about(self) -> str:
        """Step time, memory, cost and plan as text, or the reason without a plan."""
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
        """Return the answer as a dictionary for JSON."""
        told = {"question": self.question, "gain": self.gain, "why": self.why}
        return told | {"cost": self.cost, "cost_of": self.cost_of} | figures(self.candidate)


def answers(explanation: Explanation, case: Case, questions: Iterable[str]) -> tuple[Answer, ...]:
    """Answer what-if questions about an explained plan, in order.

    Raises:
        PlanError: a question is not valid; the error lists the valid questions.
    """
    known = tuple((candidate.plan, candidate.layout) for candidate in explanation.found.best)
    asked = [(question, read_question(question)) for question in questions]
    return tuple(_answer(explanation, case._replace(plans=known), question, change) for question, change in asked)


def read_question(text: str) -> Change:
    """Parse a what-if question into a change.

    Raises:
        PlanError: the question is not valid, or it is plan text with an invalid key or value.
    """
    words = " ".join(text.lower().split()).removeprefix("with ")
    if match := _HOSTS.fullmatch(words):
        number = _NUMBERS.get(match["number"]) or int(match["number"])
        return hosts_added(number if (match["more"] or match["after"]) == "more" else -number)
    if match := _FACTOR.fullmatch(words):
        times = _TIMES.get(match["times"]) or float(re.sub(r"[^\d.]", "", match["times"]))
        return _SCALED[_SYNONYMS.get(match["what"], match["what"])](times)
    if match := _BATCH.fullmatch(words):
        return batch(max(1, int(match[1].replace(",", "").replace("_", ""))))
    if words == "fp8":
        # without a compiler, the casts cost more than the products save
        return _plan("precision=fp8 compile=on")
    if words in (*get_args(Precision), *get_args(Products)):
        return _precision(words)
    if "=" in text:
        return _plan(text)
    return _cluster(text)


def _precision(name: str) -> Change:
    """Return a change that sets the precision.

    If no job can have this precision, as with fp4, the change applies only to matrix products of the known plans.
    """

    def change(case: Case) -> Case:
        if name in get_args(Precision):
            job = case.job.model_copy(update={"precision": name})
            return case._replace(job=job, plans=())
        device = case.plans[0][1].machines.device
        kind = name.removeprefix("mx").partition("-")[0]  # fp8 from mxfp8 and fp8-block
        if device.peak_flops.get(kind, 0.0) <= device.peak_flops.get("bf16", 0.0):
            raise PlanError(
                "explain.not_faster",
                "{device} is not faster in {precision}, or does not support it",
                device=device.name,
                precision=name,
            )
        return layouts(lambda layout: replace(layout, products=name))(case)  # type: ignore[arg-type]

    return change


def _plan(text: str) -> Change:
    """Return a change to a plan given as text.

    Text with degrees replaces the plans. Other text changes only these keys of the known plans.
    """
    given = Plan.parse(text)
    keys = {word.partition("=")[0] for word in text.split()}
    values = {key: getattr(given, key) for key in keys}

    def change(case: Case) -> Case:
        whole = bool(keys & set(DEGREES))
        plans = (
            [plan_of(text, case.job)]
            if whole
            else list(dict.fromkeys(replace(plan, **values) for plan, _ in case.plans))
        )
        reasons = {plan: reasons_against(plan, case.job, case.cluster) for plan in plans}
        legal = [plan for plan in plans if not reasons[plan]]
        if not legal:
            raise PlanError.of_problems(next(iter(reasons.values()))[:1])
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
            *(f"{times} the {what}" for times in ("twice", "half") for what in _SCALED),
        )
        meant = f' Did you mean "{near}"?' if (near := closest(text, known)) else ""
        raise PlanError(
            "explain.question_unknown",
            '--what-if "{text}" is not valid.{meant} Valid questions are {examples}',
            text=text,
            meant=meant,
            examples=_EXAMPLES,
        ) from None

    def change(case: Case) -> Case:
        price = case.cluster.price_per_hour if cluster.price_per_hour is None else cluster.price_per_hour
        # measurements of this machine do not apply to another; factors of measured runs exist for each kind of device
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
    # the same amount of training, independent of the batch
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


# fraction of the best throughput that the useful batch reaches; larger batches gain almost nothing
USEFUL = 0.95
# minimum throughput ratio of a doubling; after two smaller gains, no larger batch is tried
_LEAST_GAIN = 1.01
_MOST_DOUBLINGS = 10
_WITH_SQUARE_ROOT = ("adam", "adamw", "lamb", "adamax", "nadam", "radam")  # names in lower case
_LEAST_WARM_UP = 10  # steps
# minimum number of steps per epoch; a batch that leaves fewer steps is never useful
_FEWEST_STEPS = 20


@dataclass(frozen=True)
class BatchPoint:
    """A global batch, and the best plan with this batch."""

    global_batch: int
    best: Candidate

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.best.prediction.throughput


@dataclass(frozen=True)
class BatchAdvice:
    """Advice on the global batch.

    Attributes:
        points: tried batches in ascending order, including the batch of the job.
        now: the batch of the job.
        useful: the smallest batch with at least 95 % of the best throughput.
        rule: rule by which the learning rate scales with the batch: `linear` or `square root`.
        lr: learning rate for the useful batch.
        stopped: reason why no larger batch was tried.
        cautions: sentences on facts that the prediction cannot know.
    """

    points: tuple[BatchPoint, ...]
    now: BatchPoint
    useful: BatchPoint
    rule: str
    lr: float
    stopped: str
    cautions: tuple[str, ...]

    @property
    def factor(self) -> float:
        """Ratio of the useful batch to the batch of the job."""
        return self.useful.global_batch / self.now.global_batch

    @property
    def gain(self) -> float:
        """Relative gain in throughput of the useful batch over the batch of the job."""
        return self.useful.throughput / self.now.throughput - 1

    @property
    def keeps(self) -> bool:
        """True if the batch of the job is already the useful batch."""
        return self.useful.global_batch == self.now.global_batch

    @property
    def line(self) -> str:
        """The advice as one sentence."""
        now, useful = f"{self.now.global_batch:,}", f"{self.useful.global_batch:,}"
        if self.keeps:
            return f"the global batch of {now} is already large enough: a larger batch is less than 5 % faster"
        if self.factor < 1:
            return (
                f"a global batch of {useful} is within 5 % as fast as the job's {now}; it makes more steps of as many "
                "samples, from which a model seldom learns less"
            )
        return (
            f"a global batch of {useful} instead of {now}: +{percent(self.gain)} samples a second, with learning rate "
            f"{self.lr:.4g} ({self.rule} scaling)"
        )

    def job(self, job: Job) -> Job:
        """Return a copy of the job with the useful batch and its learning rate.

        Numbers of steps are divided by `factor`, so the total number of samples stays the same.
        """

        def steps(number: int | None) -> int | None:
            return number and max(1, math.ceil(number / self.factor))

        warm_up = max(steps(job.schedule.warmup_steps) or 0, min(job.schedule.warmup_steps, _LEAST_WARM_UP))
        # warm-up keeps the first steps from diverging (Goyal et al., 2017)
        if self.rule == "linear" and self.factor > 1:
            warm_up = max(warm_up, _LEAST_WARM_UP)
        decay = steps(job.schedule.decay_steps)
        stop = job.stop.model_copy(update={"steps": steps(job.stop.steps)})
        schedule = job.schedule.model_copy(
            update={
                "warmup_steps": warm_up,
                "decay_steps": decay and max(decay, warm_up + 1),
                "milestones": tuple(steps(step) or 1 for step in job.schedule.milestones),
            }
        )
        return job.model_copy(
            update={
                "global_batch": self.useful.global_batch,
                "optimizer": job.optimizer.model_copy(update={"lr": self.lr}),
                "schedule": schedule,
                "stop": stop,
                "evaluate": job.evaluate.model_copy(update={"every_steps": steps(job.evaluate.every_steps)}),
                "checkpoint": job.checkpoint.model_copy(update={"every_steps": steps(job.checkpoint.every_steps)}),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return the advice as plain JSON values."""
        return {
            "now": self.now.global_batch,
            "useful": self.useful.global_batch,
            "gain": self.gain,
            "lr": self.lr,
            "rule": self.rule,
            "stopped": self.stopped,
            "cautions": list(self.cautions),
            "batches": [figures(point.best) | {"global_batch": point.global_batch} for point in self.points],
        }


def advise(job: Job, cluster: Cluster, calibration: Basis | None = None) -> BatchAdvice:
    """Find the largest useful global batch.

    The batch of the job is doubled and halved repeatedly. Each batch is tried with its best plan. Doubling stops when
    it hardly increases the throughput.

    Raises:
        PlanError: no plan can run the batch of the job.
    """
    case = Case(job, cluster, calibration)
    now, samples = _point(case, job.global_batch), _samples(job)
    larger, stopped = _larger(case, now, samples)
    best = max(point.throughput for point in (now, *larger))
    smaller = _smaller(case, now, enough=USEFUL * best)
    points = (*smaller, now, *larger)
    useful = next(point for point in points if point.throughput >= USEFUL * best)
    factor = useful.global_batch / now.global_batch
    rule = "square root" if job.optimizer.name.lower() in _WITH_SQUARE_ROOT else "linear"
    lr = job.optimizer.lr * (math.sqrt(factor) if rule == "square root" else factor)
    unknown = (
        ()
        if samples
        else ("how many samples the data has is not known here; a batch beyond a small part of them is too large",)
    )
    return BatchAdvice(points, now, useful, rule, float(f"{lr:.4g}"), stopped, (*unknown, *_cautions(job, factor)))


def _samples(job: Job) -> int | None:
    """Return the number of training samples, or None if the data is not available."""
    if job.model.transformer is not None:
        return job.data.limit
    # the data is on another machine, or a stream without a length
    with suppress(PacelineError, ImportError, TypeError):
        data: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
        return len(data)
    return job.data.limit


def _point(case: Case, global_batch: int) -> BatchPoint:
    """Return the best plan for a global batch.

    Raises PlanError if no plan can run the batch.
    """
    best, error = what_if(case, batch(global_batch))
    if error is not None:
        raise error
    assert best is not None
    return BatchPoint(global_batch, best)


def _larger(case: Case, now: BatchPoint, samples: int | None) -> tuple[list[BatchPoint], str]:
    """Return repeated doublings of the batch, and the reason why no larger batch was tried.

    The search ends after two doublings in a row that gain almost nothing.
    """
    found, idle, best = [now], 0, now.throughput
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        larger = case.job.global_batch * 2**doubling
        if samples is not None and larger * _FEWEST_STEPS > samples:
            return found[1:], f"an epoch of {samples:,} samples would have fewer than {_FEWEST_STEPS} steps"
        try:
            point = _point(case, larger)
        except PlanError as error:
            return found[1:], f"no plan can run {larger:,}: {str(error).splitlines()[0]}"
        found.append(point)
        idle = 0 if point.throughput > _LEAST_GAIN * best else idle + 1
        best = max(best, point.throughput)
        if idle == 2:
            return found[1:], "two more doublings are hardly faster"
    return found[1:], f"{2**_MOST_DOUBLINGS:,} times the job's batch is the largest batch that is considered"


def _smaller(case: Case, now: BatchPoint, enough: float) -> list[BatchPoint]:
    """Return repeated halvings of the batch, in ascending order.

    The first batch whose throughput is below `enough` is included as well.
    """
    found: list[BatchPoint] = []
    smaller = case.job.global_batch
    while (found[-1] if found else now).throughput >= enough and smaller % 2 == 0:
        smaller //= 2
        try:
            found.append(_point(case, smaller))
        # there are too few samples for the devices
        except PlanError:
            break
    return found[::-1]


def _cautions(job: Job, factor: float) -> list[str]:
    cautions = [
        "how large a batch still learns as much from each sample (the critical batch size) depends on the noise of the "
        "gradients and cannot be known from shapes (McCandlish et al., 2018, arXiv:1812.06162): compare the losses "
        "after equal samples first"
    ]
    if factor == 1:
        return cautions
    if job.schedule.by_class or job.optimizer.groups:
        cautions = [*cautions, "arguments of a scheduler class, and rates of parameter groups, are not changed here"]
    if job.optimizer.name.lower() not in _WITH_SQUARE_ROOT:
        return [
            "linear scaling of the learning rate holds for SGD with warm-up and up to some batch only, 8,192 images "
            "for ResNet-50 (Goyal et al., 2017, arXiv:1706.02677)",
            *cautions,
        ]
    optimizer = job.optimizer
    given: dict[str, Any] = optimizer.args
    betas, eps = given.get("betas", optimizer.betas), given.get("eps", optimizer.eps)
    beta = 1 - factor * (1 - betas[1])
    moved = (
        f", and beta2 from {betas[1]:g} to {beta:.4g}"
        if 0 < beta < 1
        else ", and the betas with it, which has no room here"
    )
    return [
        "square-root scaling of the learning rate is for Adam and its like where noise rules the gradients (Malladi et "
        "al., 2022, arXiv:2205.10287), whose rule also moves eps to "
        f"{eps / math.sqrt(factor):.2g}{moved}: not changed here",
        *cautions,
    ]
