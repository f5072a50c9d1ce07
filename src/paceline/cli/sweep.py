"""`paceline sweep job.yaml`: many runs of one job, and their comparison."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli.command import EXIT_CODES, ClusterFile, JobFile, SetKeys, start_on, to_run_on

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.run.sweep.sweep import Sweep


def command(
    job: JobFile,
    grid: Annotated[
        list[str],
        typer.Option(
            "--grid",
            metavar="KEY=VALUES",
            help="A key of the job and its values, e.g. optimizer.lr=1e-4,1e-3; may be repeated. For --random also a "
            "range: uniform(0,1), loguniform(1e-5,1e-2) or int(1,8).",
        ),
    ],
    random: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Draw N random combinations of these values.", show_default="the whole grid"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random draws.")] = 0,
    repeat: Annotated[
        int,
        typer.Option(
            min=1,
            help="Runs of each combination, with different seeds; at least 3 are needed to name the best.",
        ),
    ] = 1,
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to compare the runs by.", show_default="the job's first metric, else its loss"),
    ] = None,
    mode: Annotated[
        Literal["min", "max"] | None,
        typer.Option(help="Whether a lower or a higher value is better.", show_default="as the metric says"),
    ] = None,
    changes: SetKeys = None,
    plan: Annotated[str, typer.Option(help="Plan, as for `paceline train`.")] = "auto",
    cluster: ClusterFile = None,
    on: Annotated[
        Literal["here", "ray"], typer.Option("--on", help="Where to start the runs: here, or by Ray Tune.")
    ] = "here",
    scheduler: Annotated[
        Literal["asha"] | None,
        typer.Option(help="With --on ray: stop bad runs early, at their evaluations.", show_default="none is stopped"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the sweep; an interrupted one, or one with more repeats, goes on there.",
            show_default="sweeps/JOB-TIME",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line: the content of sweep.json.")] = False,
) -> None:
    """Train a job with many combinations of values, and compare the runs.

    Every combination is checked before the first run. The result is a table, sweep.html and sweep.json.

    Exit code 1: no run finished.
    """
    if scheduler and on != "ray":
        raise typer.BadParameter("runs are stopped early by Ray Tune alone: add --on ray", param_hint="--scheduler")
    start_on(None, cluster)
    from paceline.elastic.forkserver import warm_up

    warm_up()  # the forkserver imports torch while this process imports the other modules and checks the jobs
    from paceline.run.sweep.sweep import Sweep, SweepRequest

    line = shlex.join(["paceline", *sys.argv[1:]])
    request = SweepRequest(
        job=job,
        grid=grid,
        set=changes or (),
        draws=random,
        seed=seed,
        repeat=repeat,
        metric=metric,
        mode=mode,
        plan=plan,
        command=line,
    )
    sweep = Sweep(request, to_run_on(cluster), out=out)
    if on == "ray":
        _on_ray(sweep, scheduler)
    else:
        sweep.run()
    _show(sweep)
    if as_json:
        typer.echo(json.dumps(sweep.content()))
    if sweep.stopped_by:
        go_on = line if out else f"{line} --out {shlex.quote(str(sweep.path))}"
        typer.echo(f"stopped  {sweep.stopped_by}; what is finished is kept. Go on: {go_on}")
        raise typer.Exit(EXIT_CODES.get(sweep.stopped_by, 1))
    if not any(run.is_over for run in sweep.runs):
        raise typer.Exit(1)


def _show(sweep: Sweep) -> None:
    """Show the table, the errors and the verdict, and write the page."""
    from paceline.console import Console
    from paceline.report.sweep_page import write_sweep_page

    page = write_sweep_page(sweep)
    Console().print(table(sweep))
    for run in (run for run in sweep.runs if run.state == "failed"):
        typer.echo(f"failed   {sweep.path / run.run}: {str(run.error).partition(chr(10))[0]}")
    typer.echo(sweep.verdict.text)
    typer.echo(f"page     {page}")
    typer.echo(f"runs     {sweep.path / 'runs'}")


def _on_ray(sweep: Sweep, scheduler: Literal["asha"] | None) -> None:
    from paceline.errors import LaunchError

    try:
        from paceline.run.sweep.on_ray import run_on_ray
    except ImportError as error:
        raise LaunchError(
            "sweep.no_ray", '--on ray needs Ray Tune ({error}). Install it: pip install "ray[tune]"', error=error
        ) from error
    run_on_ray(sweep, scheduler)


def table(sweep: Sweep) -> Table:
    """Build a table of the combinations with their results; the best ones are marked."""
    from rich.table import Table

    from paceline.run.sweep.space import short_names, shown
    from paceline.units import seconds

    keys, found = list(sweep.parameters[0]), sweep.verdict
    made = Table(box=None, pad_edge=False)
    for title in ("", "", *short_names(keys)):
        made.add_column(title, overflow="fold")
    for title in (sweep.metric, *(["loss"] if sweep.metric != "loss" else []), "time"):
        made.add_column(title, no_wrap=True)
    for title in ("state", "directory"):
        made.add_column(title, overflow="fold")
    for combination in sweep.combinations:
        is_best = combination.number in found.best
        mark = "best" if is_best and found.is_clear else "≈ best" if is_best else ""
        value = "" if combination.metric is None else f"{combination.metric:.4g}"
        if combination.spread:
            low, high = combination.spread
            value += f" ({low:.4g} to {high:.4g})"
        loss, time_s = combination.median("loss"), combination.median("time_s")
        made.add_row(
            mark,
            str(combination.number),
            *(shown(combination.parameters[key]) for key in keys),
            value,
            *([] if sweep.metric == "loss" else ["" if loss is None else f"{loss:.4g}"]),
            "" if time_s is None else str(seconds(time_s)),
            combination.state,
            combination.directory,
            style="green" if mark == "best" else None,
        )
    return made
