"""Choice of a cluster: the fastest and the cheapest of several offers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, ValidationError, field_validator

from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.named import read_name
from paceline.errors import ClusterError, InvalidValue, PacelineError, PlanError
from paceline.job.job import Job
from paceline.job.spec import Spec
from paceline.planning.explain.training_run import (
    JOBS_OWN,
    NO_CONDITIONS,
    Amount,
    Conditions,
    Goal,
    Purchase,
    TrainingRun,
    amount_of,
    energy_notes,
    training_run,
)
from paceline.planning.machines import equal_ratio
from paceline.planning.model.model_info import trace
from paceline.planning.search.result import Candidate, figures
from paceline.planning.search.search import search
from paceline.units import count, money, span
from paceline.yaml_file import FileKind, explain, read_yaml

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


T = TypeVar("T")
# number of plans that each search returns; the preferred one is used
_TOP = 5


@dataclass(frozen=True)
class Option:
    """Best plan on a given number of hosts of one offer, for one payment option."""

    offer: Offer
    hosts: int
    candidate: Candidate
    run: TrainingRun
    bought: Purchase

    @property
    def cost(self) -> float:
        """Cost of the whole training; 0 without a price."""
        return self.bought.cost or 0.0

    @property
    def words(self) -> str:
        """Description of the machines, such as `8 hosts of Nebius H100 (64 devices), spot`."""
        spot = ", spot" if self.bought.what == "spot" else ""
        return f"{count(self.hosts, 'host')} of {self.offer.title} ({count(self.run.devices, 'device')}){spot}"

    def to_json(self) -> dict[str, Any]:
        """Return the choice of cluster as a JSON-serializable dictionary."""
        return figures(self.candidate) | {
            "offer": self.offer.title,
            "hosts": self.hosts,
            "devices": self.run.devices,
            "what": self.bought.what,
            "goodput": self.bought.goodput,
            "time_s": self.bought.wall_s,
            "cost": self.cost,
            "energy_kwh": self.bought.energy_kwh,
            "carbon_kg": self.bought.carbon_kg,
        }


@dataclass(frozen=True)
class ClusterChoice:
    """Result of `which_cluster`: all options, and those within budget and deadline.

    Attributes:
        options: options that can run the job, for every offer and number of hosts.
        refused: offers and numbers of hosts on which no plan can run, each with the reason.
    """

    job: Job
    amount: Amount
    offers: Offers
    options: tuple[Option, ...]
    refused: tuple[tuple[str, str], ...]
    budget: float | None = None
    deadline_s: float | None = None

    @property
    def within(self) -> list[Option]:
        """Options within the budget and the deadline."""
        return [
            option
            for option in self.options
            if (self.budget is None or option.cost <= self.budget)
            and (self.deadline_s is None or option.bought.wall_s <= self.deadline_s)
        ]

    @property
    def fastest(self) -> Option | None:
        """Fastest option within budget and deadline; None if there is none."""
        return min(self.within, key=lambda option: (option.bought.wall_s, option.cost), default=None)

    @property
    def cheapest(self) -> Option | None:
        """Cheapest option within budget and deadline; None if there is none.

        Among equally cheap options, it is the fastest.
        """
        return min(self.within, key=lambda option: (option.cost, option.bought.wall_s), default=None)

    @property
    def as_cheap(self) -> Option | None:
        """Fastest option whose predicted cost cannot be distinguished from the lowest cost.

        It is None if this option is the cheapest or the fastest option itself.
        """
        if (least := self.cheapest) is None:
            return None
        alike = [option for option in self.within if option.cost <= equal_ratio() * least.cost]
        found = min(alike, key=lambda option: (option.bought.wall_s, option.cost))
        return None if found in (least, self.fastest) else found

    @property
    def error(self) -> float:
        """Half the width of the widest 80 % interval, relative to the predicted time."""
        return max(option.run.error for option in self.options)

    @property
    def front(self) -> list[Option]:
        """Options that are Pareto-optimal in time and cost, the cheapest first."""
        return pareto(self.options, lambda option: (option.cost, option.bought.wall_s))

    @property
    def notes(self) -> list[str]:
        """Sentences that state the basis of the predictions."""
        devices = [one.candidate.layout.machines.device for one in self.front]
        of_runs = [note for one in self.front for note in one.run.notes if not note.startswith(("energy", "carbon"))]
        energy = energy_notes({device.name: device.power_w for device in devices}, self.front[0].run.conditions)
        return list(dict.fromkeys((*self.amount.notes, *of_runs, *energy)))

    @property
    def nothing(self) -> str:
        """Sentence to print if no option is within budget and deadline."""
        least = min(self.options, key=lambda option: option.cost)
        first = min(self.options, key=lambda option: option.bought.wall_s)
        return (
            f"no offer on the list meets the limits: the cheapest takes {money(least.cost)} and "
            f"{span(least.bought.wall_s)} ({least.words}), "
            f"the fastest {money(first.cost)} and {span(first.bought.wall_s)} ({first.words})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a JSON-serializable dictionary."""
        return {
            "job": self.job.name,
            "amount": self.amount.words,
            "steps": self.amount.steps,
            "budget": self.budget,
            "deadline_s": self.deadline_s,
            "fastest": self.fastest.to_json() if self.fastest else None,
            "cheapest": self.cheapest.to_json() if self.cheapest else None,
            "as_cheap": self.as_cheap.to_json() if self.as_cheap else None,
            "front": [option.to_json() for option in self.front],
            "options": [option.to_json() for option in self.options],
            "refused": [{"machines": machines, "reason": reason} for machines, reason in self.refused],
            "notes": self.notes,
        }


def which_cluster(
    job: Job,
    offers: Offers,
    goal: Goal = JOBS_OWN,
    conditions: Conditions = NO_CONDITIONS,
    *,
    failures_per_host_day: float | None = None,
    budget: float | None = None,
    deadline_s: float | None = None,
    calibration: Basis | None = None,
) -> ClusterChoice:
    """Find the best plan for each offer, at each of several numbers of hosts.

    Args:
        calibration: factors of measured runs, by which predictions are multiplied.

    Raises:
        JobError: the model cannot be built.
        PlanError: no offer can run the job, or neither the goal nor the job sets the amount of training.
    """
    amount = amount_of(job, trace(job, job.precision), goal)
    options: list[Option] = []
    refused: list[tuple[str, str]] = []
    for offer in offers.offers:
        of_offer, reasons = [], []
        for hosts in host_counts(offer.hosts):
            try:
                of_offer += list(_options(job, offer, hosts, amount, conditions, failures_per_host_day, calibration))
            except PacelineError as error:
                reasons.append((hosts, str(error).splitlines()[0]))
        options += of_offer
        refused += _told(offer, reasons)
    if not options:
        reasons_text = "\n".join(f"{machines}: {reason}" for machines, reason in refused)
        raise PlanError(
            "offers.none_can_run", "no offer on the list can run {job}:\n{reasons}", job=job.name, reasons=reasons_text
        )
    return ClusterChoice(job, amount, offers, tuple(options), tuple(refused), budget, deadline_s)


def host_counts(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most` itself."""
    return sorted({*(2**i for i in range(most.bit_length())), most})


def pareto(options: Sequence[T], place: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the options that are Pareto-optimal in two figures, sorted by the first figure."""
    front: list[T] = []
    for option in sorted(options, key=place):
        if not front or place(option)[1] < place(front[-1])[1]:
            front.append(option)
    return front


def _options(
    job: Job,
    offer: Offer,
    hosts: int,
    amount: Amount,
    conditions: Conditions,
    failures: float | None,
    calibration: Basis | None,
) -> Iterator[Option]:
    cluster = offer.of_hosts(hosts, failures)
    candidate = search(job, cluster, top=_TOP, calibration=calibration).best[0]
    taken = conditions.preemptions_per_host_day
    rate = offer.preemptions_per_host_day if offer.preemptions_per_host_day is not None else taken
    spot = offer.spot if offer.spot is not None and rate is not None else None
    run = training_run(
        job, cluster, candidate, amount, replace(conditions, spot_price=spot, preemptions_per_host_day=rate)
    )
    for bought in run.purchases:
        yield Option(offer, hosts, candidate, run, bought)


def _told(offer: Offer, reasons: list[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    for reason in dict.fromkeys(reason for _, reason in reasons):
        numbers = [hosts for hosts, why in reasons if why == reason]
        hosts = f"{numbers[0]:,} to {numbers[-1]:,} hosts" if len(numbers) > 1 else count(numbers[0], "host")
        yield f"{hosts} of {offer.title}", reason


# the default list of offers, with example prices
EXAMPLES = Path(__file__).with_name("offers.yaml")


class Offer(Spec):
    """Kind of host that a provider offers.

    `cluster` is the name of one host, such as `8xH100-SXM, 400gbit`. `price` and `spot` are prices of one device per
    hour. `hosts` is the largest available number of hosts.
    """

    cluster: str
    price: float = Field(ge=0)
    hosts: int = Field(1, ge=1)
    name: str = ""
    spot: float | None = Field(None, ge=0)
    preemptions_per_host_day: float | None = Field(None, ge=0)
    failures_per_host_day: float | None = Field(None, ge=0)

    @field_validator("cluster")
    @classmethod
    def _one_host(cls, text: str) -> str:
        try:
            named = read_name(text)
        except ClusterError as error:
            raise InvalidValue.of_error(error) from None
        if named.hosts > 1:
            raise InvalidValue(
                "offers.several_hosts",
                '"{text}" describes {hosts} hosts. Describe a single host, and put the largest number of hosts '
                "into `hosts`.",
                text=text,
                hosts=named.hosts,
            )
        if named.price_per_hour is not None:
            raise InvalidValue("offers.with_price", '"{text}" contains a price. Put the price into `price`.', text=text)
        return text

    @property
    def title(self) -> str:
        """Name of the offer, or else the shape of its host, such as `8xH100-SXM`."""
        return self.name or read_name(self.cluster).shape

    def of_hosts(self, hosts: int, failures_per_host_day: float | None = None) -> Cluster:
        """Return a cluster of `hosts` hosts of this offer.

        Args:
            failures_per_host_day: failure rate that is used if the offer states none.
        """
        named, (_, *words) = read_name(self.cluster), self.cluster.split(",")
        text = ",".join((f"{hosts}x{named.per_host}x{named.device.name}", *words))
        rate = self.failures_per_host_day if self.failures_per_host_day is not None else failures_per_host_day
        return cluster_from(text).model_copy(update={"price_per_hour": self.price, "failures_per_host_day": rate})


class Offers(Spec):
    """List of offers, with the date and the currency of the prices."""

    offers: tuple[Offer, ...] = Field(min_length=1)
    as_of: str = ""
    currency: str = ""


def read_offers(file: Path) -> Offers:
    """Read offers from a YAML or CSV file.

    A YAML file has the list `offers`. A CSV file has a column for each key.

    Raises:
        ClusterError: the file cannot be read, or a key or value is invalid; the error states the line.
    """
    if file.suffix.lower() == ".csv":
        return _from_csv(file)
    example = '`offers: [{cluster: "8xH100-SXM, 400gbit", price: 2.5, hosts: 16}]`'
    values, positions = read_yaml(file, FileKind("list of offers", "offers", example, ClusterError))
    try:
        return Offers.model_validate(values)
    except ValidationError as error:
        problems = explain(error.errors(include_url=False), Offers, positions, name="list of offers")
        raise ClusterError.of_problems(problems) from None


def _from_csv(file: Path) -> Offers:
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = list(csv.DictReader(text, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ClusterError("offers.not_csv", "{file} cannot be read as CSV: {error}", file=file, error=error) from None
    offers = []
    for line, row in enumerate(rows, 2):
        if None in row:
            raise ClusterError(
                "offers.too_many_values",
                "{file}, line {line}: the line has more values than columns. Put quotes around a name with a "
                'comma: "8xH100, 400gbit"',
                file=file,
                line=line,
            )
        values: dict[str, Any] = {key: value for key, value in row.items() if value not in (None, "")}
        try:
            offers.append(Offer.model_validate(values))
        except ValidationError as error:
            problems = explain(error.errors(include_url=False), Offer, name="offer")
            raise ClusterError.of_problems([problem.at(f"{file}, line {line}") for problem in problems]) from None
    if not offers:
        raise ClusterError(
            "offers.empty",
            "{file} contains no offer. Write cluster,price,hosts on the first line, and one line for each offer.",
            file=file,
        )
    return Offers(offers=tuple(offers))
