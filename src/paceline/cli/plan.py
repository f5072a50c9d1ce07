"""`paceline plan job.yaml`"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.cli.command import not_at_a_url
from paceline.errors import ClusterError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.planning.calibrate import Calibration
    from paceline.planning.explain.advice import ScaledPlan
    from paceline.planning.explain.explain import Explanation
    from paceline.planning.explain.questions import BatchAdvice
    from paceline.planning.explain.training_run import Conditions, Goal
    from paceline.planning.explain.which_cluster import Offers
    from paceline.planning.machines import Adjustment, Basis


_ON_PAGE = 30  # plans in the pictures of a page


def command(
    job: JobPath,
    cluster: ClusterName = None,
    top: Top = 10,
    price: Price = None,
    failures: Failures = None,
    tokens: Tokens = None,
    samples: Samples = None,
    loss: LossToReach = None,
    spot_price: SpotPrice = None,
    preemptions: Preemptions = None,
    straggler_sigma: StragglerSigma = None,
    pue: Pue = None,
    carbon: Carbon = None,
    catalogue: CatalogueFile = None,
    budget: Budget = None,
    deadline: Deadline = None,
    cheapest: Cheapest = False,
    what_if: WhatIf = None,
    measure: MeasureFirst = True,
    calibrate_on: CalibrateOn = None,
    batch_advice: AdviseBatch = False,
    accept_batch: AcceptBatch = None,
    page: PageFile = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a job on a cluster by prediction, and explain it.

    The explanation has time, memory, cost, and what would help.

    Nothing is trained, and the cluster need not be there.
    """
    from paceline.job.job import Job

    # A mistake in the file is told before all else is imported.
    what = Job.load(job)
    from paceline.cli.plan_screen import fitted, show, show_advice, show_choice
    from paceline.console import Console
    from paceline.planning.explain.questions import advise
    from paceline.planning.explain.training_run import Conditions, read_duration
    from paceline.planning.explain.which_cluster import which_cluster

    console = fitted(Console())
    if accept_batch is not None and accept_batch.exists():
        raise typer.BadParameter(f"{accept_batch} is there already; name a new file", param_hint="--accept-batch")
    goal = _goal(tokens, samples, loss)
    conditions = Conditions(spot_price, preemptions, _sigma(straggler_sigma), pue, carbon)
    # the question is which cluster to take
    if catalogue is not None or budget is not None or deadline is not None or cheapest:
        asked: dict[str, object] = {"--price": price, "--cluster": cluster} if catalogue is not None else {}
        asked |= {"--what-if": what_if, "--accept-batch": accept_batch}
        _without("the choice of a cluster", asked)
        named = cluster_of(cluster, price, failures)[0] if cluster is not None and catalogue is None else None
        factors = factors_of(calibrate_on, named, console)
        offers = offers_of(catalogue, named)
        with Console(stderr=True).status("searching for the best plan on every offer"):
            choice = which_cluster(
                what,
                offers,
                goal,
                conditions,
                failures_per_host_day=failures,
                budget=budget,
                deadline_s=None if deadline is None else read_duration(deadline),
                calibration=factors,
            )
        show_choice(choice, console, cheapest=cheapest, bundled=named is None and catalogue in (None, BUNDLED))
        if page is not None:
            from paceline.report.plan_page import write_choice_page

            typer.echo(f"page      {write_choice_page(choice, _command_line(), page)}")
        if as_json:
            typer.echo(json.dumps(choice.to_json()))
        return
    where, here = cluster_of(cluster, price, failures)
    calibration: Basis | None = factors_of(calibrate_on, where, console)
    if here and measure and calibration is None:
        calibration = measure_machine(what, where, console)
    with Console(stderr=True).status("searching"):
        listed = top if page is None else max(top, _ON_PAGE)
        explanation = _explained(what, where, calibration, listed, goal, conditions, what_if or [])
    show(explanation, console, top=top)
    advice = None
    if batch_advice or accept_batch is not None:
        with Console(stderr=True).status("searching for the best plan for every batch"):
            advice = advise(what, where, calibration)
        show_advice(advice, console)
    if accept_batch is not None and advice is not None:
        _accept(advice, what, accept_batch, console)
    else:
        _next(explanation, job, cluster, console)
    scaling = _page(explanation, advice, calibration, page) if page is not None else ()
    if as_json:
        typer.echo(json.dumps(_everything(explanation, advice, scaling, top)))


def _without(mode: str, asked: Mapping[str, object]) -> None:
    """Refuse options that would have no effect."""
    if given := [option for option, value in asked.items() if value not in (None, [])]:
        raise typer.BadParameter(f"{mode} does not take it", param_hint=given[0])


def _goal(tokens: str | None, samples: str | None, loss: float | None) -> Goal:
    from paceline.planning.explain.training_run import Goal, read_amount

    return Goal(
        None if tokens is None else read_amount(tokens), None if samples is None else read_amount(samples), loss
    )


def _sigma(text: str | None) -> float:
    """A number, or that of a run's directory."""
    if text is None:
        return 0.0
    try:
        sigma = float(text)
    except ValueError:
        from paceline.run.record.run import Run
        from paceline.run.record.slow_ranks import step_time_sigma

        return step_time_sigma(Run(text))
    if not 0 <= sigma < math.inf:
        raise typer.BadParameter("a number of at least 0, such as 0.02", param_hint="--straggler-sigma")
    return sigma


def _explained(
    job: Job,
    cluster: Cluster,
    calibration: Basis | None,
    top: int,
    goal: Goal,
    conditions: Conditions,
    questions: Sequence[str],
) -> Explanation:
    """The best plan, with what was asked: the training to a goal, and answers."""
    from paceline.planning.explain.advice import Case
    from paceline.planning.explain.explain import explain
    from paceline.planning.explain.questions import answers
    from paceline.planning.explain.training_run import amount_of, training_run
    from paceline.planning.search.search import search

    told = explain(job, cluster, search(job, cluster, top=top, calibration=calibration), calibration)
    best, run = told.winner, None
    if any(value is not None for value in goal) or conditions.any:
        run = training_run(job, cluster, best, amount_of(job, best.layout.trace, goal), conditions)
    return replace(told, run=run, answers=answers(told, Case(job, cluster, calibration), questions))


def cluster_of(text: str | None, price: float | None, failures: float | None = None) -> tuple[Cluster, bool]:
    """The cluster, and True if it can be measured: this machine, or emulated on it."""
    from paceline.planning import arguments

    where = arguments.cluster_of(text)
    given = {"price_per_hour": price, "failures_per_host_day": failures}
    where = where.model_copy(update={key: value for key, value in given.items() if value is not None})
    return where, text is None or where.emulate is not None


def factors_of(paths: Sequence[Path] | None, cluster: Cluster | None, console: Console) -> Adjustment | None:
    """Factors of measured runs; None if none are named. What was read is told."""
    from rich.text import Text

    from paceline.console import Console
    from paceline.run.tuning.calibrate import calibrate_on

    if not paths:
        return None
    with Console(stderr=True).status("predicting the measured runs"):
        lines: list[str] = []
        found = calibrate_on(paths, cluster=cluster, say=lines.append)
    for line in lines:
        console.print(Text(line, style="dim"))
    return found


def measure_machine(job: Job, cluster: Cluster, console: Console) -> Calibration | None:
    """Measurements of the machine; None, with a printed reason, if it could not be measured."""
    from rich.text import Text

    from paceline.console import Console
    from paceline.errors import PacelineError
    from paceline.run.tuning.calibrate import calibrate

    def say(line: str) -> None:
        console.print(Text(line, style="dim"))

    try:
        with Console(stderr=True).status("measuring this machine"):
            return calibrate(job, cluster, say)
    except PacelineError as error:
        say(f"not measured: {str(error).splitlines()[0]}; the catalogue stands in, which may be several times off")
        return None


def _accept(advice: BatchAdvice, job: Job, file: Path, console: Console) -> None:
    """Write the job as advised, and say every value that is another."""
    from rich.text import Text

    from paceline.errors import JobError
    from paceline.files import write_whole
    from paceline.run.record.run import differences

    accepted = advice.job(job)
    try:
        write_whole(file, accepted.to_yaml())
    except OSError as error:
        raise JobError(f"{file} cannot be written: {error.strerror or error}") from error
    console.print()
    for line in differences(job.model_dump(), accepted.model_dump()) if not advice.keeps else ["nothing is changed"]:
        console.print(Text(f"  {line}"))
    console.print(
        Text(f'wrote {file}; train it with: paceline train {shlex.quote(str(file))} --plan "{advice.useful.best.plan}"')
    )


def _next(explanation: Explanation, job: Path, cluster: str | None, console: Console) -> None:
    """The command that uses the plan, on the machines that it is for."""
    from rich.text import Text

    if explanation.job.model.transformer is not None:
        return  # dimensions can be planned and not trained
    where = explanation.cluster
    on = f" --cluster {shlex.quote(cluster)}" if cluster and not where.only_planned else ""
    launcher = "there, on every host: torchrun … --no-python " if where.only_planned and len(where.hosts) > 1 else ""
    console.print(
        Text(f'train it  {launcher}paceline train {shlex.quote(str(job))}{on} --plan "{explanation.winner.plan}"')
    )


def _page(
    explanation: Explanation, advice: BatchAdvice | None, calibration: Basis | None, file: Path
) -> tuple[ScaledPlan, ...]:
    from paceline.console import Console
    from paceline.planning.explain.advice import scaling
    from paceline.report.plan_page import write_plan_page

    with Console(stderr=True).status("searching the best plan for more and fewer devices"):
        scaled = scaling(explanation.job, explanation.cluster, explanation.found, calibration)
    typer.echo(f"page      {write_plan_page(explanation, scaled, advice, _command_line(), file)}")
    return scaled


def _command_line() -> str:
    return shlex.join(["paceline", *sys.argv[1:]])


def _everything(
    explanation: Explanation, advice: BatchAdvice | None, scaling: tuple[ScaledPlan, ...], top: int
) -> dict[str, object]:
    values = explanation.to_json()
    values["candidates"] = values["candidates"][:top]
    if advice is not None:
        values["batch_advice"] = advice.to_json()
    if scaling:
        values["scaling"] = [point.to_json() for point in scaling]
    return values


_RUN, _WHICH, _OTHERS = "The whole training", "Which cluster", "Other systems"

JobPath = Annotated[
    Path, typer.Argument(metavar="JOB", help="YAML file that says what to train.", callback=not_at_a_url)
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help='Cluster file, or a name such as "64x8xH100-SXM, 400gbit".',
        show_default="this machine",
    ),
]
Top = Annotated[int, typer.Option(min=1, help="How many of the best plans to show.")]
Price = Annotated[float | None, typer.Option(min=0, help="Price of a device for an hour, in any currency.")]
Failures = Annotated[
    float | None,
    typer.Option(
        "--failures-per-host-day",
        min=0,
        metavar="X",
        help="Failures of a host in a day, e.g. 0.004: say what they cost, and how often to save.",
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="N", help="Tokens to train on, e.g. 15T: say time, cost, energy.", rich_help_panel=_RUN),
]
Samples = Annotated[str | None, typer.Option(metavar="N", help="Samples to train on, e.g. 300M.", rich_help_panel=_RUN)]
LossToReach = Annotated[
    float | None,
    typer.Option(metavar="X", help="Loss to reach, in nats per token, by scaling laws.", rich_help_panel=_RUN),
]
SpotPrice = Annotated[
    float | None,
    typer.Option(min=0, metavar="X", help="Price of a device for an hour as a spot machine.", rich_help_panel=_RUN),
]
Preemptions = Annotated[
    float | None,
    typer.Option(
        "--preemptions-per-host-day",
        min=0,
        metavar="X",
        help="How often a spot machine is taken away in a day.",
        rich_help_panel=_RUN,
    ),
]
StragglerSigma = Annotated[
    str | None,
    typer.Option(
        metavar="X|RUN",
        help="Standard deviation of a rank's step time, relative to it; or a run that has it.",
        rich_help_panel=_RUN,
    ),
]
Pue = Annotated[
    float | None,
    typer.Option(min=1, metavar="X", help="Power of the data centre over its machines'.", rich_help_panel=_RUN),
]
Carbon = Annotated[
    float | None,
    typer.Option(min=0, metavar="G/KWH", help="Grams of CO₂ for a kWh of electricity.", rich_help_panel=_RUN),
]
CatalogueFile = Annotated[
    str | None,
    typer.Option(
        metavar="[FILE]",
        help="Which of these offers (YAML or CSV) to take; without a file, of a list of examples.",
        rich_help_panel=_WHICH,
    ),
]
Budget = Annotated[
    float | None, typer.Option(min=0, metavar="X", help="The most that it may cost.", rich_help_panel=_WHICH)
]
Deadline = Annotated[
    str | None, typer.Option(metavar="TIME", help="The longest that it may take, e.g. 30d.", rich_help_panel=_WHICH)
]
Cheapest = Annotated[
    bool, typer.Option("--cheapest", help="Name the cheapest first, not the fastest.", rich_help_panel=_WHICH)
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="TEXT",
        help='Also with this changed: "one more host", "twice the memory", bf16, remat=none, …; may be repeated.',
    ),
]
MeasureFirst = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure",
        help="Measure this machine first, in seconds, once; or take the catalogue's figures.",
    ),
]
CalibrateOn = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibrate-on",
        metavar="PATH",
        help="Measured runs that correct the prediction: a table (CSV), a run directory, a log of Megatron-LM or "
        "torchtitan; may be repeated.",
    ),
]
AdviseBatch = Annotated[
    bool, typer.Option("--batch-advice", help="Say how large a global batch is useful, and its learning rate.")
]
AcceptBatch = Annotated[
    Path | None,
    typer.Option(
        metavar="OUT.yaml", help="Write a job with the useful batch and its learning rate; JOB stays as it is."
    ),
]
PageFile = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with pictures.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON that has everything.")]


# what `--catalogue` stands for without a file
BUNDLED = "examples"


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
