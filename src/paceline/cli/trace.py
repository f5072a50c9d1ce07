"""`paceline trace RUN`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import RunPath, in_a_folder

if TYPE_CHECKING:
    from paceline.report.timeline import StepRange

_MOST_OPERATIONS = 50  # steps


def command(
    run: RunPath,
    steps: Annotated[
        str, typer.Option(metavar="N|A-B", help="Steps to show: the newest N, or those from A to B.")
    ] = "3",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of the timeline.", show_default="trace.json in the run", callback=in_a_folder
        ),
    ] = None,
    operations: Annotated[
        bool,
        typer.Option(
            "--operations", help="Train these steps again here with torch's profiler, and write operations.json."
        ),
    ] = False,
) -> None:
    """Write a timeline of all ranks for Perfetto, and name the critical path.

    Open the file at ui.perfetto.dev or in chrome://tracing. The file does not leave your machine.
    """
    wanted = _range(steps)
    if operations:
        _operations(run, wanted, out)
        return
    from paceline.report.critical_path import critical_path
    from paceline.report.page import not_by_paceline
    from paceline.report.timeline import timeline_of
    from paceline.report.traces import write_trace
    from paceline.run.record.run import Run
    from paceline.text import printable

    read = Run(run)
    with not_by_paceline(read.path, "run"):
        path = critical_path(timeline_of(read, wanted))
        about = {"run": run, "job": read.job.name, "plan": str(read.plan), "cluster": read.cluster.describe()}
    where = out or (Path("trace.json") if read.url else read.path / "trace.json")
    write_trace(path, where, about)
    for line in (*path.sentences, *path.timeline.gaps):
        typer.echo(printable(line))
    typer.echo(f"trace {where}")


def _operations(where: str, wanted: StepRange, out: Path | None) -> None:
    from paceline.errors import RunError
    from paceline.report.advice import measured
    from paceline.report.traces import operations_in_words, write_operations
    from paceline.run.record.run import Run
    from paceline.run.tuning.calibrate import operations_of
    from paceline.text import printable

    run = Run(where)
    count = wanted.newest or wanted.last - wanted.first + 1
    if count > _MOST_OPERATIONS:
        raise RunError(
            "trace.too_many_steps",
            "{steps:,} steps have too many operations for a single trace. Use at most {most} steps.",
            steps=count,
            most=_MOST_OPERATIONS,
        )
    recorded_s = measured(run).step_s
    traces = [found.trace() for found in operations_of(run.job, run.cluster, run.plan, count)]
    about = {"run": where, "job": run.job.name, "plan": str(run.plan), "cluster": run.cluster.describe()}
    file = out or (Path() if run.url else run.path) / "operations.json"
    write_operations(traces, file, about)
    for line in operations_in_words(traces, recorded_s):
        typer.echo(printable(line))
    typer.echo(f"trace {file}")


def _range(text: str) -> StepRange:
    from paceline.report.timeline import StepRange

    try:
        return StepRange.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--steps") from None
