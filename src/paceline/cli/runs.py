"""`paceline runs`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.elastic.submit.scheduler import Submission

EXAMPLE = "paceline runs"
_MOST = 30
_MOST_BYTES = 2**26  # of a run's steps that are read for its goodput


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Follow the log of this run.")] = None,
) -> None:
    """List the runs that were submitted from here, the newest first: what runs where."""
    from rich.table import Table

    from paceline.cli.submit import follow
    from paceline.console import Console
    from paceline.elastic.submit.scheduler import find, submissions
    from paceline.elastic.submit.table import scheduler

    if name is not None:
        submission = find(name)
        where = scheduler(submission.engine)
        where.state(submission)  # one that cannot be asked at all is told at once
        follow(where, submission)
        return
    found = submissions()
    if not found:
        typer.echo("nothing was submitted from here; `paceline submit --help` says how")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "on", "id", "state", "hosts", "since", "goodput", "run"):
        table.add_column(title, no_wrap=title != "state", overflow="fold")
    for submission in found[:_MOST]:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(submission.since))
        words = (submission.name, submission.engine, submission.id, _state_of(submission), str(submission.hosts))
        table.add_row(*words, since, _goodput_of(submission), submission.run)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 400  # a line for each run, also in a pipe
    console.print(table)


def _state_of(submission: Submission) -> str:
    """State of a run in words; that of one which has ended is remembered."""
    from paceline.elastic.submit.scheduler import ended
    from paceline.elastic.submit.table import scheduler
    from paceline.errors import LaunchError

    if submission.phase:
        return submission.phase + (f", exit code {submission.code}" if submission.code else "")
    try:
        state = scheduler(submission.engine).state(submission)
    except LaunchError as error:
        return f"unknown: {str(error).splitlines()[0]}"
    if state.ended:
        return _state_of(ended(submission, state.phase, state.exit_code))
    return state.phase + (f" ({state.note})" if state.note else "")


def _goodput_of(submission: Submission) -> str:
    """Goodput of a run so far; empty where its directory cannot be read from here."""
    from paceline.errors import PacelineError

    try:
        # also of a URL, which is no path: nothing is fetched for a list
        if (Path(submission.run) / "steps" / "rank-0.jsonl").stat().st_size > _MOST_BYTES:
            return ""
        from paceline.run.record.goodput import goodput
        from paceline.run.record.run import Run
        from paceline.units import percent

        share = goodput(Run(Path(submission.run))).share
    except (OSError, PacelineError, LookupError, TypeError, ValueError):  # it is gone, or no record of ours
        return ""
    return str(percent(share)) if share else ""
