"""Time, cost, energy and carbon of a whole training under a plan, including interruptions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.explain.explain import costs_of, interval_s
from paceline.planning.model.graph import ModelTrace
from paceline.planning.search.result import Candidate
from paceline.units import count, kilograms, kilowatt_hours, large, money, percent, span

# Ratio of a host's power during training to the rated power of its devices. A host with eight H100s of 700 W drew at
# most 8.4 kW during training (Latif et al., 2025, arXiv:2412.08602, abstract).
HOST_OVERHEAD = 8.4 / (8 * 0.7)
# Number of failures per host and day that is used instead of zero. Then only checkpoints cost time.
_NEVER = 1e-9
_LEAST_GOODPUT = 0.01
_AMOUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d+)?) ?([kmbt]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(min|h|d|w)(?:ours?|ays?|eeks?)?", re.IGNORECASE)
_DURATIONS = {"min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def read_amount(text: str) -> float:
    """Parse a number such as `15T`, `300B`, `1.5e12` or `20,000`.

    Raises:
        PlanError: the text is not a number, or the number is not above 0.
    """
    match = _AMOUNT.fullmatch(text.strip())
    value = float(match[1].replace(",", "").replace("_", "")) * _FACTORS[match[2].lower()] if match else 0.0
    if not 0 < value < math.inf:
        raise PlanError(
            "cost.amount_invalid", '"{text}" is not an amount such as 15T, 300B, 20M, 1.5e12 or 20,000', text=text
        )
    return value


def read_duration(text: str) -> float:
    """Parse a duration such as `30d`, `12h` or `2 weeks` into seconds.

    Raises:
        PlanError: the text is not a duration, or the duration is not above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    value = float(match[1]) * _DURATIONS[match[2].lower()] if match else 0.0
    if not value:
        raise PlanError("cost.duration_invalid", '"{text}" is not a duration such as 30d, 12h, 90min or 2w', text=text)
    return value


class Goal(NamedTuple):
    """Goal of a training: a number of tokens, a number of samples, or a loss.

    Without a goal, the job's own number of steps is the goal.
    """

    tokens: float | None = None
    samples: float | None = None
    loss: float | None = None


JOBS_OWN = Goal()


@dataclass(frozen=True)
class Amount:
    """Amount of training, as a number of steps of the job.

    Attributes:
        steps: number of optimizer steps.
        words: the amount as text.
        notes: sentences that state the basis of the amount.
    """

    steps: int
    words: str
    notes: tuple[str, ...] = ()


def amount_of(job: Job, trace: ModelTrace, goal: Goal) -> Amount:
    """Convert a goal to a number of steps.

    Raises:
        PlanError: more than one goal is given, the loss cannot be reached or predicted, tokens are given for samples
            that are not sequences, or neither a goal nor the job sets a number of steps.
    """
    if sum(value is not None for value in goal) > 1:
        raise PlanError(
            "cost.amounts_conflict",
            "give only one of --tokens, --samples and --loss, because each of them sets the amount of training",
        )
    of_step = job.global_batch * trace.tokens
    if goal.samples is not None:
        return Amount(math.ceil(goal.samples / job.global_batch), f"{large(goal.samples)} samples")
    if goal.tokens is None and goal.loss is None:
        if job.stop.steps is None:
            raise PlanError(
                "cost.amount_missing", "the job's stop rule sets no number of steps: add --tokens, --samples or --loss"
            )
        return Amount(job.stop.steps, f"the job's {count(job.stop.steps, 'step')}")
    if trace.tokens == 1:
        raise PlanError("cost.not_tokens", "samples of {job} are not sequences of tokens: use --samples", job=job.name)
    if goal.tokens is not None:
        return Amount(math.ceil(goal.tokens / of_step), f"{large(goal.tokens)} tokens")
    assert goal.loss is not None
    return _to_loss(job, trace, goal.loss, of_step)


def _to_loss(job: Job, trace: ModelTrace, loss: float, of_step: int) -> Amount:
    if any(block.experts for block in trace.blocks):
        raise PlanError(
            "cost.no_law_for_experts",
            "the scaling laws were fitted to dense models, but this model is a mixture of experts: use --tokens",
        )
    parameters = trace.parameters
    tokens = BESIROGLU.tokens(parameters, loss)
    notes = [
        f"by the scaling law of {BESIROGLU.name} ({BESIROGLU.source}): nats per token on the data and tokenizer of "
        f"{LAWS[1].name}, not on yours; no model gets below {BESIROGLU.floor:g}, and one of this size not below "
        f"{BESIROGLU.floor_of(parameters):.3f}"
    ]
    for law in LAWS[1:]:
        try:
            notes.append(f"by {law.name} ({law.source}) it would be {large(law.tokens(parameters, loss))} tokens")
        except PlanError as error:
            notes.append(str(error))
    if far := extrapolated(parameters, tokens):
        notes.append(far)
    return Amount(math.ceil(tokens / of_step), f"a loss of {loss:g}: {large(tokens)} tokens", tuple(notes))


@dataclass(frozen=True)
class Conditions:
    """Conditions of a training that do not depend on the plan.

    Attributes:
        spot_price: price of a preemptible device per hour; None if it is unknown.
        preemptions_per_host_day: number of preemptions of one host per day.
        straggler_sigma: standard deviation of a rank's step time, relative to the mean step time.
        pue: power usage effectiveness, the ratio of the data centre's power to the machines' power; None counts only
            the machines.
        carbon_g_per_kwh: carbon dioxide of the electricity, in grams per kWh; None if it is unknown.
    """

    spot_price: float | None = None
    preemptions_per_host_day: float | None = None
    straggler_sigma: float = 0.0
    pue: float | None = None
    carbon_g_per_kwh: float | None = None

    @property
    def any(self) -> bool:
        """True if any condition is given."""
        return self != Conditions()


NO_CONDITIONS = Conditions()


@dataclass(frozen=True)
class Purchase:
    """Cost of the training under one payment option.

    Attributes:
        what: `on demand` or `spot`.
        goodput: useful step time divided by wall-clock time.
        wall_s: wall-clock time in seconds.
        cost: cost in the currency of the prices; None without a price.
        energy_kwh: energy of the machines and the data centre, in kWh; None if the power of a device is unknown.
        carbon_kg: carbon dioxide of this energy, in kg; None if the energy or the carbon intensity is unknown.
        about: text that states the basis of the goodput.
    """

    what: str
    goodput: float
    wall_s: float
    cost: float | None
    energy_kwh: float | None
    carbon_kg: float | None
    about: str = ""


@dataclass(frozen=True)
class TrainingRun:
    """Time, cost, energy and carbon of a whole training under one plan.

    Attributes:
        devices: number of devices in use.
        steps_s: total time of all steps in seconds, without interruptions and stragglers.
        slowdown: factor by which the slowest rank prolongs each step.
        purchases: results for on-demand machines, then for spot machines if their price is known.
        error: half the width of the step time's 80 % interval, relative to the step time.
        rests_on: text that states the basis of the interval.
        conditions: conditions under which the training runs.
        notes: sentences that state assumptions and unknown facts.
    """

    amount: Amount
    devices: int
    steps_s: float
    slowdown: float
    purchases: tuple[Purchase, ...]
    error: float
    conditions: Conditions = NO_CONDITIONS
    notes: tuple[str, ...] = ()
    rests_on: str = ""

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Table of the results. Each row has a name, a value, and the basis of the value."""
        rows = [("steps", f"{span(self.steps_s)}", f"{self.amount.steps:,} of them, without interruptions")]
        if self.slowdown > 1:
            lost = f"+{percent(self.slowdown - 1)}"
            rows.append(("stragglers", lost, f"each step waits for the slowest of {count(self.devices, 'rank')}"))
        for bought in self.purchases:
            named = f", {bought.what}" if len(self.purchases) > 1 else ""
            rows.append(
                (f"time{named}", f"{span(bought.wall_s)}", f"goodput {percent(bought.goodput, 1)}: {bought.about}")
            )
            if bought.cost is not None:
                hours = f"{self.devices * bought.wall_s / 3600:,.0f} device-hours"
                rows.append((f"cost{named}", money(bought.cost), hours))
            if bought.energy_kwh is not None:
                rows.append(
                    (f"energy{named}", str(kilowatt_hours(bought.energy_kwh)), "all devices and hosts at full load")
                )
            if bought.carbon_kg is not None:
                rows.append((f"carbon{named}", str(kilograms(bought.carbon_kg)), "CO₂ of the electricity alone"))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the training as a dictionary for JSON."""
        return asdict(replace(self, amount=replace(self.amount, notes=()))) | {
            "notes": [*self.amount.notes, *self.notes]
        }


def training_run(
    job: Job, cluster: Cluster, candidate: Candidate, amount: Amount, conditions: Conditions = NO_CONDITIONS
) -> TrainingRun:
    """Predict a whole training with a candidate on a cluster.

    Hosts fail at the cluster's failure rate. On spot machines, preemptions are added.
    """
    ranks, device = candidate.plan.ranks, candidate.layout.machines.device
    slowdown = straggler_slowdown(ranks, conditions.straggler_sigma)
    failures = cluster.failures_per_host_day or 0.0
    offers = [("on demand", failures, cluster.price_per_hour)]
    if conditions.spot_price is not None:
        offers.append(("spot", failures + (conditions.preemptions_per_host_day or 0.0), conditions.spot_price))
    steps_s = amount.steps * candidate.prediction.step_time_s
    watts = None if device.power_w is None else ranks * device.power_w * HOST_OVERHEAD * (conditions.pue or 1.0)
    purchases = []
    for what, rate, price in offers:
        costs = costs_of(job, cluster, candidate, rate or _NEVER, slowdown)
        goodput = costs.goodput(interval_s(job, costs)) / slowdown
        if goodput < _LEAST_GOODPUT:
            raise PlanError(
                "cost.no_time_left",
                "{what}: with {rate:g} interruptions per day on each host, no time is left for training",
                what=what,
                rate=rate,
            )
        wall_s = steps_s / goodput
        energy = None if watts is None else watts / 1000 * wall_s / 3600
        grams = conditions.carbon_g_per_kwh
        purchases.append(
            Purchase(
                what,
                goodput,
                wall_s,
                cost=None if price is None else price * ranks * wall_s / 3600,
                energy_kwh=energy,
                carbon_kg=None if energy is None or grams is None else energy * grams / 1000,
                about=_about(rate, slowdown),
            )
        )
    notes = (*_notes(conditions, failures), *energy_notes({device.name: device.power_w}, conditions))
    known = candidate.interval
    return TrainingRun(
        amount, ranks, steps_s, slowdown, tuple(purchases), known.relative, conditions, notes, known.rests_on
    )


def straggler_slowdown(ranks: int, sigma: float) -> float:
    """Return the expected step time of the slowest of `ranks` ranks, relative to the mean.

    Step times are assumed to be normally distributed and independent. The expected maximum of N such values is Φ⁻¹((N −
    0.375) / (N + 0.25)) standard deviations above the mean (Blom, 1958).
    """
    if ranks == 1 or not sigma:
        return 1.0
    return 1.0 + sigma * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _about(rate: float, slowdown: float) -> str:
    parts = ["checkpoints", *(["failures"] if rate else []), *(["stragglers"] if slowdown > 1 else [])]
    return f"{', '.join(parts)} counted in"


def _notes(conditions: Conditions, failures: float) -> tuple[str, ...]:
    told = []
    if not failures:
        told.append(
            "failures are not counted: --failures-per-host-day (docs/how-to/estimate_cost.md has a published rate)"
        )
    if conditions.spot_price is not None:
        rate = conditions.preemptions_per_host_day
        told.append(
            "the estimate assumes that spot machines are never preempted: --preemptions-per-host-day"
            if rate is None
            else f"a spot machine is preempted {rate:g} times per day and replaced at once"
        )
    return tuple(told)


def energy_notes(power_w: Mapping[str, float | None], conditions: Conditions) -> tuple[str, ...]:
    """Return sentences that state how the energy is computed."""
    told = [
        f"energy is unknown: the catalogue does not state the power of {name}"
        for name, watts in power_w.items()
        if not watts
    ]
    powers = ", ".join(f"{watts:g} W for each {name}" for name, watts in power_w.items() if watts)
    if not powers:
        return tuple(told)
    centre = f"PUE {conditions.pue:g}" if conditions.pue else "without cooling and losses of the data centre: --pue 1.2"
    told.append(
        f"energy: {powers} at full load, times {HOST_OVERHEAD:.2g} for hosts (one of eight H100s as measured, "
        f"arXiv:2412.08602), {centre}"
    )
    if conditions.carbon_g_per_kwh is None:
        told.append("carbon depends on the country and the year: --carbon g/kWh")
    return tuple(told)


# ranges of parameters and tokens in the runs to which both laws were fitted
_FITTED_PARAMETERS, _FITTED_TOKENS = (70e6, 16e9), (5e9, 500e9)


@dataclass(frozen=True)
class ScalingLaw:
    """Published scaling law for the loss of language models.

    Attributes:
        name: author and year.
        source: publication that contains the constants.
        floor: the irreducible loss E.
        a, alpha: coefficient and exponent of the term for parameters.
        b, beta: coefficient and exponent of the term for tokens.
    """

    name: str
    source: str
    floor: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss after training on `tokens` tokens, in nats per token."""
        return float(self.floor_of(parameters) + self.b / tokens**self.beta)

    def floor_of(self, parameters: float) -> float:
        """Return the loss of a model after infinitely many tokens."""
        return float(self.floor + self.a / parameters**self.alpha)

    def tokens(self, parameters: float, loss: float) -> float:
        """Return the number of tokens after which a model reaches a loss.

        Raises:
            PlanError: no model, or no model with this number of parameters, can reach the loss.
        """
        if loss <= self.floor:
            raise PlanError(
                "cost.loss_below_floor",
                "no model reaches a loss of {loss:g} nats per token: according to {law} ({source}), the lowest "
                "possible loss on their data is {floor:g}. Choose a higher loss, or use --tokens.",
                loss=loss,
                law=self.name,
                source=self.source,
                floor=self.floor,
            )
        if loss <= (least := self.floor_of(parameters)):
            enough = (self.a / (loss - self.floor)) ** (1 / self.alpha)
            raise PlanError(
                "cost.loss_below_models_floor",
                "according to {law} ({source}), a model of {parameters} parameters does not reach a loss of "
                "{loss:g} nats per token with any number of tokens: its lowest loss is {least:.3f}. This loss "
                "needs more than {needed} parameters.",
                parameters=large(parameters),
                loss=loss,
                least=least,
                law=self.name,
                source=self.source,
                needed=large(enough),
            )
        return float((self.b / (loss - least)) ** (1 / self.beta))


# The body of the paper prints rounded exponents (section 3.3, approach 3).
HOFFMANN = ScalingLaw("Hoffmann et al. (2022)", "arXiv:2203.15556", 1.69, 406.4, 410.7, 0.34, 0.28)
# A second fit of the same runs: the first fit had stopped early, and its rounding shifts predictions.
BESIROGLU = ScalingLaw("Besiroglu et al. (2024)", "arXiv:2404.10102", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)
LAWS = (BESIROGLU, HOFFMANN)


def extrapolated(parameters: float, tokens: float) -> str:
    """Return a sentence that warns about extrapolation beyond the fitted runs; "" if there is none."""
    outside = [
        f"{large(value)} {what}"
        for value, what, (least, most) in (
            (parameters, "parameters", _FITTED_PARAMETERS),
            (tokens, "tokens", _FITTED_TOKENS),
        )
        if not least <= value <= most
    ]
    return f"{' and '.join(outside)} lie outside the runs that the law was fitted to" if outside else ""
