"""`paceline plan job.yaml`"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli import plan_options as options
from paceline.cli.plan_offers import Limits, choose, wanted

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.planning.calibrate import Calibration
    from paceline.planning.explain.batch_advice import BatchAdvice
    from paceline.planning.explain.explain import Explanation
    from paceline.planning.explain.training_run import Conditions, Goal
    from paceline.planning.explain.what_if import ScaledPlan
    from paceline.planning.machines import Adjustment, Basis

EXAMPLE = 'paceline plan examples/plan/llama_70b.yaml --cluster "16x8xH100-SXM, 400gbit"'
_ON_PAGE = 30  # plans in the pictures of a page


def command(
    job: options.JobPath,
    cluster: options.ClusterName = None,
    top: options.Top = 10,
    price: options.Price = None,
    failures: options.Failures = None,
    tokens: options.Tokens = None,
    samples: options.Samples = None,
    loss: options.LossToReach = None,
    spot_price: options.SpotPrice = None,
    preemptions: options.Preemptions = None,
    straggler_sigma: options.StragglerSigma = None,
    pue: options.Pue = None,
    carbon: options.Carbon = None,
    catalogue: options.CatalogueFile = None,
    budget: options.Budget = None,
    deadline: options.Deadline = None,
    cheapest: options.Cheapest = False,
    what_if: options.WhatIf = None,
    measure: options.MeasureFirst = True,
    calibrate_on: options.CalibrateOn = None,
    batch_advice: options.BatchAdvice = False,
    accept_batch: options.AcceptBatch = None,
    page: options.PageFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest plan for a job on a cluster by prediction, and explain it.

    The explanation has time, memory, cost, and what would help.

    Nothing is trained, and the cluster need not be there.
    """
    from paceline.job.job import Job

    # A mistake in the file is told before all else is imported.
    what = Job.load(job)
    from paceline.cli.plan_screen import fitted, show, show_advice
    from paceline.console import Console
    from paceline.planning.explain.training_run import Conditions

    console = fitted(Console())
    if accept_batch is not None and accept_batch.exists():
        raise typer.BadParameter(f"{accept_batch} is there already; name a new file", param_hint="--accept-batch")
    goal = _goal(tokens, samples, loss)
    conditions = Conditions(spot_price, preemptions, _sigma(straggler_sigma), pue, carbon)
    if wanted(catalogue, budget, deadline, cheapest=cheapest):
        asked: dict[str, object] = {"--price": price, "--cluster": cluster} if catalogue is not None else {}
        asked |= {"--what-if": what_if, "--accept-batch": accept_batch}
        _without("the choice of a cluster", asked)
        limits = Limits(budget, deadline, cheapest=cheapest, failures=failures)
        named = cluster_of(cluster, price, failures)[0] if cluster is not None and catalogue is None else None
        factors = factors_of(calibrate_on, named, console)
        choose(what, catalogue, named, goal, conditions, limits, console, as_json=as_json, page=page, factors=factors)
        return
    where, here = cluster_of(cluster, price, failures)
    calibration: Basis | None = factors_of(calibrate_on, where, console)
    if here and measure and calibration is None:
        calibration = _measured(what, where, console)
    with Console(stderr=True).status("searching"):
        explanation = _explained(what, where, calibration, top if page is None else max(top, _ON_PAGE))
        explanation = _asked(explanation, calibration, goal, conditions, what_if or [])
    show(explanation, console, top=top)
    advice = None
    if batch_advice or accept_batch is not None:
        advice = _advice(what, where, calibration)
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
        from paceline.run.record.stragglers import step_time_sigma

        return step_time_sigma(Run(text))
    if not 0 <= sigma < math.inf:
        raise typer.BadParameter("a number of at least 0, such as 0.02", param_hint="--straggler-sigma")
    return sigma


def _explained(job: Job, cluster: Cluster, calibration: Basis | None, top: int) -> Explanation:
    from paceline.planning.explain.explain import explain
    from paceline.planning.search.search import search

    return explain(job, cluster, search(job, cluster, top=top, calibration=calibration), calibration)


def _asked(
    explanation: Explanation,
    calibration: Basis | None,
    goal: Goal,
    conditions: Conditions,
    questions: Sequence[str],
) -> Explanation:
    """The explanation with what was asked: the training to a goal, and answers."""
    from paceline.planning.explain.questions import answers
    from paceline.planning.explain.training_run import amount_of, training_run
    from paceline.planning.explain.what_if import Case

    job, cluster, best = explanation.job, explanation.cluster, explanation.winner
    run = None
    if any(value is not None for value in goal) or conditions.any:
        run = training_run(job, cluster, best, amount_of(job, best.layout.trace, goal), conditions)
    told = answers(explanation, Case(job, cluster, calibration), questions)
    return replace(explanation, run=run, answers=told)


def cluster_of(text: str | None, price: float | None, failures: float | None = None) -> tuple[Cluster, bool]:
    """The cluster, and True if it can be measured: this machine, or emulated on it."""
    from paceline.cluster.cluster import cluster_from
    from paceline.cluster.discover import discover

    where = cluster_from(text) if text is not None else discover()
    given = {"price_per_hour": price, "failures_per_host_day": failures}
    where = where.model_copy(update={key: value for key, value in given.items() if value is not None})
    return where, text is None or where.emulate is not None


def factors_of(paths: Sequence[Path] | None, cluster: Cluster | None, console: Console) -> Adjustment | None:
    """Factors of measured runs; None if none are named. What was read is told."""
    from rich.text import Text

    from paceline.console import Console
    from paceline.run.tuning.calibrate_on import calibrate_on

    if not paths:
        return None
    with Console(stderr=True).status("predicting the measured runs"):
        lines: list[str] = []
        found = calibrate_on(paths, cluster, lines.append)
    for line in lines:
        console.print(Text(line, style="dim"))
    return found


def _measured(job: Job, cluster: Cluster, console: Console) -> Calibration | None:
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


def _advice(job: Job, cluster: Cluster, calibration: Basis | None) -> BatchAdvice:
    from paceline.console import Console
    from paceline.planning.explain.batch_advice import advise

    with Console(stderr=True).status("searching the best plan for every batch"):
        return advise(job, cluster, calibration)


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
        Text(f'wrote {file}; train it with: paceline train {shlex.quote(str(file))} --plan "{advice.useful.plan}"')
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
    from paceline.planning.explain.what_if import scaling
    from paceline.report.plan_page import write_plan_page

    with Console(stderr=True).status("searching the best plan for more and fewer devices"):
        scaled = scaling(explanation.job, explanation.cluster, explanation.found, calibration)
    command = shlex.join(["paceline", *sys.argv[1:]])
    typer.echo(f"page      {write_plan_page(explanation, scaled, advice, command, file)}")
    return scaled


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
