"""`paceline plan job.yaml`, and `plan explain`, `plan cost`, `plan cluster` and `plan batch`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.command import Command, SetKeys, in_a_folder, load_job
from paceline.cli.plan_options import (
    AsJson,
    CalibrateOn,
    Carbon,
    ClusterName,
    FailureRate,
    JobPath,
    LossToReach,
    Measure,
    PageFile,
    Preemptions,
    Price,
    Pue,
    Samples,
    Setting,
    SpotPrice,
    StragglerSigma,
    Tokens,
    cluster_of,
    conditions_of,
    factors_of,
    goal_of,
    offers_of,
    setting,
)

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.job.job import Job
    from paceline.planning.explain.explain import Explanation
    from paceline.planning.explain.questions import BatchAdvice
    from paceline.planning.search.result import Candidate


_ON_PAGE = 30  # number of plans in the figures of a page
_LISTED = 10  # number of plans that the explanation of a plan uses


def plan(
    job: JobPath,
    changes: SetKeys = None,
    cluster: ClusterName = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of plans to list.")] = 10,
    measure: Measure = True,
    calibrate_on: CalibrateOn = None,
    out: PageFile = None,
    as_json: AsJson = False,
) -> None:
    """Predict the fastest plans for a job on a cluster, and list them.

    Nothing is trained, and the machines of the cluster need not exist.
    """
    asked, console = setting(job, changes, cluster, calibrate_on, measure=measure)
    from rich.text import Text

    from paceline.cli.plan_screen import show_plans

    found = _explained(asked, max(top, _ON_PAGE) if out else top, what_would_help=out is not None)
    show_plans(found, console, top=top)
    options = _options(job, changes, cluster, calibrate_on, measure=measure)
    _train_it(found, options, console)
    console.print(Text(f"explain it  paceline plan explain {options.all}"), soft_wrap=True)
    values = found.to_json()
    if out is None:  # predicted only for a page
        values = {key: value for key, value in values.items() if key not in _OF_HELP}
    else:
        values |= _page(found, asked, out)
    values["candidates"] = values["candidates"][:top]
    if as_json:
        typer.echo(json.dumps(values))


_OF_HELP = (
    "what_would_help",
    "faster_but",
    "partition_weights",
    "partition_weights_gain",
    "cut",
    "cut_gain",
    "what_if",
)


def explain(
    job: JobPath,
    changes: SetKeys = None,
    plan: Annotated[
        str | None, typer.Option(help='Plan to explain, e.g. "dp=2 tp=2".', show_default="the best plan")
    ] = None,
    cluster: ClusterName = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="TEXT",
            help='Predict a change too, e.g. "one more host", "twice the memory", bf16, remat=none; may be repeated.',
        ),
    ] = None,
    measure: Measure = True,
    calibrate_on: CalibrateOn = None,
    out: PageFile = None,
    as_json: AsJson = False,
) -> None:
    """Explain one plan: where its time and memory go, and what would help."""
    asked, console = setting(job, changes, cluster, calibrate_on, measure=measure)
    from paceline.cli.plan_screen import show_explanation
    from paceline.console import Console
    from paceline.planning.explain.advice import Case
    from paceline.planning.explain.questions import answers

    best = _explained(asked, _ON_PAGE if out else _LISTED, what_would_help=True)
    with Console(stderr=True).status("searching the best plan for every change"):
        best = replace(best, answers=answers(best, Case(*asked), what_if or []))
    one = best if plan is None else _explained_alone(asked, plan, best)
    show_explanation(one, best, console)
    _train_it(one, _options(job, changes, cluster, calibrate_on, measure=measure), console)
    if out is not None:
        _page(best, asked, out)
    if as_json:
        typer.echo(json.dumps(one.to_json() | {"best_plan": str(best.winner.plan)}))


def cost(
    job: JobPath,
    changes: SetKeys = None,
    plan: Annotated[str | None, typer.Option(help="Plan to train by.", show_default="the best plan")] = None,
    cluster: ClusterName = None,
    price: Price = None,
    tokens: Tokens = None,
    samples: Samples = None,
    loss: LossToReach = None,
    failures: FailureRate = None,
    spot_price: SpotPrice = None,
    preemptions: Preemptions = None,
    straggler_sigma: StragglerSigma = None,
    pue: Pue = None,
    carbon: Carbon = None,
    measure: Measure = True,
    calibrate_on: CalibrateOn = None,
    out: PageFile = None,
    as_json: AsJson = False,
) -> None:
    """Predict the time, cost, energy and failures of a whole training run."""
    asked, console = setting(job, changes, cluster, calibrate_on, measure=measure, price=price, failures=failures)
    from paceline.cli.plan_screen import show_costs
    from paceline.planning.explain.training_run import amount_of, training_run

    goal = goal_of(tokens, samples, loss)
    conditions = conditions_of(spot_price, preemptions, straggler_sigma, pue, carbon)
    best = _explained(asked, _ON_PAGE if out else _LISTED, what_would_help=out is not None)
    one = best if plan is None else _explained_alone(asked, plan, best)
    amount = amount_of(asked.job, one.winner.layout.trace, goal)
    one = replace(one, run=training_run(asked.job, asked.cluster, one.winner, amount, conditions))
    show_costs(one, console)
    if out is not None:
        _page(replace(best, run=one.run), asked, out)
    if as_json:
        values = one.to_json()
        typer.echo(json.dumps({key: values[key] for key in (*_OF_COST, "training", "failures", "notes")}))


_OF_COST = ("job", "global_batch", "cluster", "devices", "price_per_device_hour", "measured", "plan")


def _list_hardware(wanted: bool) -> None:
    if wanted:
        from paceline.cluster.named import HARDWARE
        from paceline.units import size

        for name in HARDWARE.names:
            typer.echo(f"{name:18}{size(HARDWARE[name].memory_bytes):>9}")
        raise typer.Exit


def cluster(
    job: JobPath,
    changes: SetKeys = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Offers to choose from, as YAML or CSV.", show_default="a list of example offers"
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help='Choose a number of these hosts instead, e.g. "16x8xH100-SXM, 2.5/h".'),
    ] = None,
    hardware: Annotated[
        bool,
        typer.Option(
            "--hardware",
            callback=_list_hardware,
            is_eager=True,
            help="List the catalogue's devices with their memory, and exit.",
        ),
    ] = False,
    price: Price = None,
    budget: Annotated[float | None, typer.Option(min=0, metavar="X", help="Largest cost of the training.")] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Longest time of the training, e.g. 30d.")
    ] = None,
    cheapest: Annotated[
        bool, typer.Option("--cheapest", help="Show the cheapest first instead of the fastest.")
    ] = False,
    tokens: Tokens = None,
    samples: Samples = None,
    loss: LossToReach = None,
    failures: FailureRate = None,
    preemptions: Preemptions = None,
    straggler_sigma: StragglerSigma = None,
    pue: Pue = None,
    carbon: Carbon = None,
    calibrate_on: CalibrateOn = None,
    out: PageFile = None,
    as_json: AsJson = False,
) -> None:
    """Choose among machine offers: the fastest, the cheapest, and those that no other offer beats."""
    what = load_job(str(job), changes)  # before heavy imports, so that a mistake is reported at once
    from paceline.cli.plan_screen import fitted, show_choice
    from paceline.console import Console
    from paceline.planning.explain.training_run import read_duration
    from paceline.planning.explain.which_cluster import which_cluster

    if catalogue is not None and (cluster is not None or price is not None):
        raise typer.BadParameter(
            "the offers name machines and prices", param_hint="--cluster" if cluster else "--price"
        )
    console = fitted(Console())
    named = cluster_of(cluster, price)[0] if cluster is not None else None
    factors = factors_of(calibrate_on, named, console)
    with Console(stderr=True).status("searching the best plan for every offer"):
        choice = which_cluster(
            what,
            offers_of(catalogue, named),
            goal_of(tokens, samples, loss),
            conditions_of(None, preemptions, straggler_sigma, pue, carbon),
            failures_per_host_day=failures,
            budget=budget,
            deadline_s=None if deadline is None else read_duration(deadline),
            calibration=factors,
        )
    show_choice(choice, console, cheapest=cheapest, bundled=named is None and catalogue is None)
    if out is not None:
        from paceline.report.plan_page import write_choice_page

        typer.echo(f"page      {write_choice_page(choice, _command_line(), out)}")
    if as_json:
        typer.echo(json.dumps(choice.to_json()))


def batch(
    job: JobPath,
    changes: SetKeys = None,
    cluster: ClusterName = None,
    measure: Measure = True,
    calibrate_on: CalibrateOn = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Write a job with that batch and learning rate; JOB stays as it is.",
            callback=in_a_folder,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest useful global batch, and a learning rate for it."""
    if out is not None and out.exists():
        raise typer.BadParameter(f"{out} exists already; name a new file", param_hint="--out")
    asked, console = setting(job, changes, cluster, calibrate_on, measure=measure)
    from paceline.cli.plan_screen import show_advice, show_case
    from paceline.console import Console
    from paceline.planning.explain.questions import advise

    with Console(stderr=True).status("searching the best plan for every batch"):
        advice = advise(*asked)
    show_case(asked.job, asked.cluster, console)
    show_advice(advice, console)
    if out is not None:
        _write_job(advice, asked.job, job, out, console)
    if as_json:
        typer.echo(json.dumps(advice.to_json()))


def _explained(asked: Setting, top: int, *, what_would_help: bool) -> Explanation:
    """Search for the best plans, and explain the first one."""
    from paceline.console import Console
    from paceline.planning.explain.explain import explain
    from paceline.planning.search.search import search

    job, where, calibration = asked
    with Console(stderr=True).status("searching"):
        found = search(job, where, top=top, calibration=calibration)
        return explain(job, where, found, calibration, what_would_help=what_would_help)


def _explained_alone(asked: Setting, text: str, best: Explanation) -> Explanation:
    """Explain a named plan, with the advice for the best plan.

    Raises:
        PlanError: the plan cannot run.
    """
    from paceline.errors import PlanError
    from paceline.planning.check.plan_errors import plan_errors
    from paceline.planning.explain.explain import explain
    from paceline.planning.search.result import SearchResult, why_it_loses

    job, where, calibration = asked
    if problems := plan_errors(job, text, cluster=where):
        raise PlanError("plan.refused", "{reasons}", reasons="\n".join(str(problem) for problem in problems))
    named = _candidate(asked, text)
    if named.plan == best.winner.plan:
        return best
    named = replace(named, why=why_it_loses(named, best.winner))
    one = explain(job, where, SearchResult(best=(named,)), calibration, what_would_help=False)
    return replace(one, changes=best.changes, trainings=best.trainings, answers=best.answers)


def _candidate(asked: Setting, text: str) -> Candidate:
    from paceline.planning.arguments import plan_of
    from paceline.planning.prediction import estimate, layout_of
    from paceline.planning.search.result import Candidate

    job, where, calibration = asked
    plan = plan_of(text, job)
    return Candidate(
        plan,
        layout_of(job, where, plan, calibration),
        estimate(job, text, cluster=where, calibration=calibration),
    )


def _page(found: Explanation, asked: Setting, file: Path) -> dict[str, Any]:
    """Write the page, and return those contents that are not in the explanation."""
    from paceline.console import Console
    from paceline.planning.explain.advice import scaling
    from paceline.planning.explain.questions import advise
    from paceline.report.plan_page import write_plan_page

    with Console(stderr=True).status("searching the best plan for other batches, and for more and fewer devices"):
        scaled = scaling(asked.job, asked.cluster, found.found, asked.calibration)
        advice = advise(*asked)
    typer.echo(f"page      {write_plan_page(found, scaled, advice, _command_line(), file)}")
    return {"scaling": [point.to_json() for point in scaled], "batch_advice": advice.to_json()}


def _write_job(advice: BatchAdvice, job: Job, source: Path, file: Path, console: Console) -> None:
    """Write the job with the advised values if any value differs, and print every change."""
    from rich.text import Text

    from paceline.errors import JobError
    from paceline.files import read_text, write_whole
    from paceline.run.record.run import differences
    from paceline.yaml_file import parse_value, to_yaml

    console.print()
    if advice.keeps:
        console.print(Text(f"  nothing is changed, so {file} was not written"))
        return
    advised = advice.job(job)
    try:
        values = advised.model_dump(mode="json", exclude_defaults=True)
        if file.parent.resolve() == source.parent.resolve():
            values = _as_written(values, parse_value(read_text(source)), source.parent.resolve())
        write_whole(file, to_yaml(values))
    except OSError as error:
        raise JobError(
            "file.unwritable", "{file} cannot be written: {reason}", file=file, reason=error.strerror or error
        ) from error
    for line in differences(job.model_dump(), advised.model_dump()):
        console.print(Text(f"  {line}"))
    line = f'wrote {file}; train it with: paceline train {shlex.quote(str(file))} --plan "{advice.useful.best.plan}"'
    console.print(Text(line), soft_wrap=True)


def _as_written(value: Any, written: Any, folder: Path) -> Any:
    """Return a job's values, with paths as they are written in the job's file."""
    if isinstance(value, dict):
        # in the short form `model: net.py:Net`, the text is the value of one of the keys below `model`
        keys = written if isinstance(written, dict) else dict.fromkeys(value, written)
        return {key: _as_written(entry, keys.get(key), folder) for key, entry in value.items()}
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_as_written(*pair, folder) for pair in zip(value, written, strict=True)]
    is_path = isinstance(value, str) and isinstance(written, str) and value == os.path.normpath(folder / written)
    return written if is_path else value


class _Options(NamedTuple):
    """Options of this command line that a proposed command must repeat."""

    job: str
    cluster: str
    prediction: str

    @property
    def all(self) -> str:
        """All options, for another `paceline plan` command."""
        return self.job + self.cluster + self.prediction


def _options(
    job: Path, changes: list[str] | None, cluster: str | None, calibrate_on: list[Path] | None, *, measure: bool
) -> _Options:
    def repeated(option: str, values: Iterable[object]) -> str:
        return "".join(f" {option} {shlex.quote(str(value))}" for value in values)

    return _Options(
        shlex.quote(str(job)) + repeated("--set", changes or ()),
        repeated("--cluster", [cluster] if cluster else ()),
        repeated("--calibrate-on", calibrate_on or ()) + ("" if measure else " --no-measure"),
    )


def _train_it(found: Explanation, options: _Options, console: Console) -> None:
    """Print the command that trains with the plan on its machines."""
    from rich.text import Text

    where = found.cluster
    console.print()
    # a model that is given only by dimensions can be planned but not trained
    if found.job.model.transformer is not None:
        return
    on = "" if where.only_planned else options.cluster
    launcher = "there, on every host: torchrun … --no-python " if where.only_planned and len(where.hosts) > 1 else ""
    line = f'train it    {launcher}paceline train {options.job}{on} --plan "{found.winner.plan}"'
    console.print(Text(line), soft_wrap=True)  # the command stays on one line, so that it can be copied


def _command_line() -> str:
    return shlex.join(["paceline", *sys.argv[1:]])


_LLAMA = 'examples/plan/llama_70b.yaml --cluster "16x8xH100-SXM, 400gbit, 2.5/h"'
COMMAND = Command(
    plan,
    "Plan",
    f"paceline plan {_LLAMA}",
    commands={
        "explain": Command(explain, example=f'paceline plan explain {_LLAMA} --what-if "one more host"'),
        "cost": Command(cost, example=f"paceline plan cost {_LLAMA} --tokens 1T --failures-per-host-day 0.004"),
        "cluster": Command(
            cluster, example="paceline plan cluster examples/plan/llama_70b.yaml --tokens 1T --deadline 30d --cheapest"
        ),
        "batch": Command(batch, example="paceline plan batch examples/gpt_text.yaml --out larger_batch.yaml"),
    },
)
