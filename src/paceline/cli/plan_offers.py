"""`paceline plan --catalogue`: the answer to "which cluster for my model and budget?"."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperCommand

from paceline.errors import ClusterError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.planning.explain.training_run import Conditions, Goal
    from paceline.planning.explain.which_cluster import ClusterChoice, Offers, Option
    from paceline.planning.machines import Adjustment

# what `--catalogue` stands for without a file
BUNDLED = "examples"
_REFUSED = 8  # lines


class PlanCommand(TyperCommand):
    """The command `paceline plan`, whose `--catalogue` may stand without a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Arguments with the bundled list where `--catalogue` has no value."""
        return super().parse_args(ctx, with_bundled(args))


def with_bundled(args: Sequence[str]) -> list[str]:
    """Arguments in which `--catalogue` always has a value."""
    whole: list[str] = []
    for argument, after in zip(args, [*args[1:], "--"], strict=True):
        whole.append(argument)
        if argument == "--catalogue" and after.startswith("-"):
            whole.append(BUNDLED)
    return whole


class Limits(NamedTuple):
    """Limits of the choice, and which of its ends is named first."""

    budget: float | None
    deadline: str | None
    cheapest: bool
    failures: float | None


def choose(
    job: Job,
    catalogue: str | None,
    cluster: Cluster | None,
    goal: Goal,
    conditions: Conditions,
    limits: Limits,
    console: Console,
    *,
    as_json: bool,
    page: Path | None,
    factors: Adjustment | None = None,
) -> None:
    """Search the best plan on every offer, and show which to take."""
    from paceline.console import Console
    from paceline.planning.explain.training_run import read_duration
    from paceline.planning.explain.which_cluster import which_cluster

    offers = offers_of(catalogue, cluster)
    with Console(stderr=True).status("searching the best plan on every offer"):
        choice = which_cluster(
            job,
            offers,
            goal,
            conditions,
            failures_per_host_day=limits.failures,
            budget=limits.budget,
            deadline_s=None if limits.deadline is None else read_duration(limits.deadline),
            calibration=factors,
        )
    show_choice(choice, console, cheapest=limits.cheapest, bundled=cluster is None and catalogue in (None, BUNDLED))
    if page is not None:
        from paceline.report.plan_page import write_choice_page

        command = shlex.join(["paceline", *sys.argv[1:]])
        typer.echo(f"page      {write_choice_page(choice, command, page)}")
    if as_json:
        typer.echo(json.dumps(choice.to_json()))


def offers_of(catalogue: str | None, cluster: Cluster | None) -> Offers:
    """Offers of a file, the bundled ones, or the hosts of a named cluster."""
    from paceline.planning.explain.which_cluster import EXAMPLES, Offer, Offers, read_offers

    if catalogue is not None and catalogue != BUNDLED:
        return read_offers(Path(catalogue))
    if cluster is None:
        return read_offers(EXAMPLES)
    if cluster.catalogue is None or cluster.price_per_hour is None:
        raise ClusterError(
            f"{cluster.name} has no price, or is not from the catalogue of hardware: name it as in "
            '--cluster "16x8xH100-SXM, 2.5/h", or list offers with --catalogue FILE'
        )
    from paceline.cluster.named import read_name

    named = read_name(cluster.catalogue)
    host = f"{named.per_host}x{named.device.name}, {named.rate_gbps:g}gbit/host"
    offer = Offer(cluster=host, price=cluster.price_per_hour, hosts=named.hosts, name=named.device.name)
    return Offers(offers=(offer,))


def show_choice(choice: ClusterChoice, console: Console, *, cheapest: bool, bundled: bool) -> None:
    """The fastest and the cheapest machines, those that nothing beats, and what cannot run it."""
    from rich.text import Text

    from paceline.cli.plan_screen import QUIET, print_inset, table_of, titled
    from paceline.units import money, percent, span

    limits = [f"within {money(choice.budget)}"] if choice.budget is not None else []
    limits += [f"in {span(choice.deadline_s)}"] if choice.deadline_s is not None else []
    about = f"{choice.amount.words} {' and '.join(limits)}".strip()
    console.print(Text.assemble(("paceline plan", "bold"), f"  which cluster for {choice.job.name}: {about}"))
    console.print(Text(_prices(choice.offers, bundled=bundled), style=QUIET))
    console.print()
    for what, option in _named(choice, cheapest=cheapest):
        print_inset(console, Text.assemble((f"{what}: ", QUIET), (_sentence(option), "bold cyan")))
        print_inset(console, Text(f"  {option.candidate.plan}"))
    if not choice.within:
        print_inset(console, Text(choice.nothing, style="bold yellow"))
    error = percent(choice.error, 0)
    titled(console, "time against cost", f"machines that no others beat in both; predicted, ± {error} (80 %)")
    table = table_of("", "time", "cost", "MFU", "goodput", "machines, and the best plan on them")
    inside = choice.within
    for option in choice.front:
        mfu = option.candidate.prediction.mfu
        machines = Text(option.words)
        machines.append(f"\n{option.candidate.plan}", style=QUIET)
        table.add_row(
            "" if option in inside else "beyond",
            str(span(option.bought.wall_s)),
            money(option.cost),
            "" if mfu is None else str(percent(mfu)),
            str(percent(option.bought.goodput, 1)),
            machines,
            style="" if option in inside else QUIET,
        )
    print_inset(console, table)
    _show_refused(choice, console)
    titled(console, "what it rests on")
    for note in choice.notes:
        print_inset(console, Text(note, style=QUIET))


def _show_refused(choice: ClusterChoice, console: Console) -> None:
    from rich.text import Text

    from paceline.cli.plan_screen import QUIET, print_inset, table_of, titled

    if not choice.refused:
        return
    titled(console, "where nothing runs")
    table = table_of("machines", "reason", heads=False)
    table.columns[0].justify = "left"
    for machines, reason in choice.refused[:_REFUSED]:
        table.add_row(machines, Text(reason, style=QUIET))
    print_inset(console, table)
    if (more := len(choice.refused) - _REFUSED) > 0:
        print_inset(console, Text(f"and {more} more", style=QUIET))


def _named(choice: ClusterChoice, *, cheapest: bool) -> list[tuple[str, Option]]:
    """Options that are told first, with what each is."""
    fastest, least, alike = choice.fastest, choice.cheapest, choice.as_cheap
    if fastest is None or least is None:
        return []
    if fastest == least:
        return [("the fastest and the cheapest", fastest)]
    named = [("the cheapest", least), *([("about as cheap, and faster", alike)] if alike else [])]
    return [*named, ("the fastest", fastest)] if cheapest else [("the fastest", fastest), *named]


def _sentence(option: Option) -> str:
    from paceline.units import money, span

    return f"{option.words}: {span(option.bought.wall_s)}, {money(option.cost)}"


def _prices(offers: Offers, *, bundled: bool) -> str:
    about = ", ".join(filter(None, (offers.currency, f"of {offers.as_of}" if offers.as_of else "")))
    prices = f"prices in {about}" if about else "prices as listed"
    if not bundled:
        return prices
    from paceline.planning.explain.which_cluster import EXAMPLES

    return f"{prices}: examples, not offers to you; copy {EXAMPLES} and put in your own, then --catalogue FILE"


def wanted(catalogue: str | None, budget: float | None, deadline: str | None, *, cheapest: bool) -> bool:
    """True if the question is which cluster to take."""
    return catalogue is not None or budget is not None or deadline is not None or cheapest
