"""`paceline runs` and `paceline logs NAME`: runs of this folder, and runs submitted from this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.command import EXIT_CODES
from paceline.errors import RunError

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from paceline.elastic.submit.scheduler import Scheduler, Submission
    from paceline.run.record.brief import RunBrief

RUNS = Path("runs")  # in the current folder
_MOST = 30  # maximum number of rows, unless all are requested
_ASKED_AT_ONCE = 8  # number of submissions whose state is requested at the same time
_LINE_EVERY_S, _LOOK_EVERY_S = 5.0, 0.5


class Row(NamedTuple):
    """A run in the table."""

    name: str
    state: str
    brief: RunBrief | None
    since: float
    where: str


def runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Folder of runs.", show_default="runs, and submitted runs")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=f"List every run instead of the newest {_MOST}.")] = False,
) -> None:
    """List local and submitted runs with their state, newest step, loss and age.

    A run counts as failed if it has not ended and the process that trained it is gone.
    """
    if folder is not None and not folder.is_dir():
        advice = f"; `paceline logs {folder}` shows the log of a run" if len(folder.parts) == 1 else ""
        raise typer.BadParameter(f"{folder} is not a folder{advice}", param_hint="DIR")
    rows = sorted(_rows(folder), key=lambda row: -row.since)
    if not rows:
        where = RUNS if folder is None else folder
        submitted = ", and nothing was submitted from here" if folder is None else ""
        typer.echo(f"no runs in {where}/{submitted}; `paceline train JOB` makes one")
        return
    _show(rows if every else rows[:_MOST])
    if not every and (more := len(rows) - _MOST) > 0:
        typer.echo(f"and {more} older; --all lists them")


def _rows(folder: Path | None) -> list[Row]:
    from paceline.run.record.brief import brief_of, run_directories

    local = {path.absolute(): brief_of(path) for path in run_directories(RUNS if folder is None else folder)}
    rows = _submitted(local) if folder is None else []
    return rows + [
        Row(path.name, brief.sentence, brief, brief.began, f"{brief.path.parent}/") for path, brief in local.items()
    ]


def _submitted(local: dict[Path, RunBrief]) -> list[Row]:
    """Return the rows of submitted runs, and remove their directories from `local`."""
    from concurrent.futures import ThreadPoolExecutor

    from paceline.elastic.submit.scheduler import submissions
    from paceline.errors import LaunchError
    from paceline.run.record.brief import brief_of

    try:
        known = submissions()
    except LaunchError as error:  # an inaccessible home folder must not hide local runs
        typer.echo(f"paceline: note: {error}", err=True)
        return []
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        states = list(pool.map(_state_of, known))
    rows = []
    for submission, state in zip(known, states, strict=True):
        path = Path(submission.run)
        brief = local.pop(path.absolute(), None) or (brief_of(path) if (path / "job.yaml").is_file() else None)
        if brief is not None and brief.reason and state == "done":
            state = brief.sentence
        hosts = f"{submission.hosts} host{'s' * (submission.hosts > 1)}"
        where = f"{submission.engine} {submission.id}, {hosts}, {submission.run}"
        rows.append(Row(submission.name, state, brief, submission.since, where))
    return rows


def _show(rows: Sequence[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    from paceline.console import Console
    from paceline.text import printable

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 400  # one line for each run, even in a pipe
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "state", "step", "loss", "age", "where"):
        justify: JustifyMethod = "right" if title in ("step", "loss", "age") else "left"
        table.add_column(title, justify=justify, no_wrap=title not in ("state", "where"), overflow="fold", min_width=4)
    for row in rows:
        step, loss = (row.brief.step, row.brief.loss) if row.brief else (None, None)
        table.add_row(
            printable(row.name),
            Text(printable(row.state), style=_STYLES.get(row.state.partition(":")[0].partition(",")[0], "")),
            "" if step is None else f"{step:,}",
            "" if loss is None else f"{loss:.4g}",
            _age(time.time() - row.since),
            printable(row.where),
        )
    console.print(table)


_STYLES = {"training": "green", "running": "green", "failed": "red", "unreadable": "red", "interrupted": "yellow"}
_UNITS_S = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def _age(seconds: float) -> str:
    """Format an age like kubectl: `45s`, `12m`, `5h`, `3d`."""
    return next((f"{int(seconds // size)}{unit}" for unit, size in _UNITS_S if seconds >= size), "0s")


def _state_of(submission: Submission) -> str:
    """Return the state of a submitted run as text; record its end, if any."""
    from paceline.elastic.submit import scheduler_named
    from paceline.elastic.submit.scheduler import ended
    from paceline.errors import LaunchError

    if submission.phase:
        return submission.phase + (f", exit code {submission.code}" if submission.code else "")
    try:
        state = scheduler_named(submission.engine).state(submission)
    except LaunchError as error:
        return f"unknown: {str(error).splitlines()[0]}"
    if state.ended:
        with suppress(OSError):  # recording the end is optional
            ended(submission, state.phase, state.exit_code)
        return state.phase + (f", exit code {state.exit_code}" if state.exit_code else "")
    return state.phase + (f" ({state.note})" if state.note else "")


def logs(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a run as `paceline runs` lists it, or its directory.")
    ],
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", help="Follow the log until the run ends, or show what there is and stop."),
    ] = True,
) -> None:
    """Show the log of a run, and follow it until the run ends.

    Ctrl-C stops following the log, and the run continues. The command returns the run's exit code.
    """
    from paceline.elastic.submit import scheduler_named
    from paceline.elastic.submit.scheduler import submissions

    path = next((path for path in (Path(name), RUNS / name) if (path / "job.yaml").is_file()), None)
    submission = next((one for one in submissions() if name in (one.name, one.id)), None)
    if submission is None:
        if path is None:
            raise _unknown(name)
        _local(path, follow=follow)
        return
    if follow:
        from paceline.elastic.submit.scheduler import find

        submission = find(name)  # raises an error if the name matches several runs
        where = scheduler_named(submission.engine)
        where.state(submission)  # a scheduler that cannot be reached fails at once
        follow_submitted(where, submission)
    elif (Path(submission.run) / "job.yaml").is_file():
        _local(Path(submission.run), follow=False)
    else:
        raise RunError(
            "run.log_elsewhere",
            "{run} cannot be read from this machine. Leave out --no-follow to see the log through {scheduler}.",
            run=submission.run,
            scheduler=submission.engine,
        )


def _unknown(name: str) -> RunError:
    from paceline.elastic.submit.scheduler import submissions
    from paceline.run.record.brief import run_directories
    from paceline.text import nearest

    known = [*(path.name for path in run_directories(RUNS)), *(one.name for one in submissions())]
    hint = nearest(name, known) if known else f"There are no runs in {RUNS}/, and nothing was submitted from here."
    return RunError("run.unknown_name", 'no run is named "{name}". {hint}', name=name[:80], hint=hint)


def follow_submitted(where: Scheduler, submission: Submission) -> None:
    """Show the log of a submitted run; exit with the run's exit code."""
    from paceline.elastic.submit.scheduler import ended

    try:
        state = where.follow(submission)
    except KeyboardInterrupt:
        print(
            f"\nno longer followed; the run goes on\nfollow again  paceline logs {submission.name}\n"
            f"end it        paceline cancel {submission.name}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if state.ended:
        ended(submission, state.phase, state.exit_code)
    note = f" ({state.note})" if state.note else ""
    print(f"{submission.name} is {state.phase}{note}, exit code {state.exit_code}, run {submission.run}")
    if state.exit_code:
        raise typer.Exit(state.exit_code)


def _local(path: Path, *, follow: bool) -> None:
    """Print the events and newest steps of a run, until it ends."""
    from paceline.run.record.brief import ENDED, brief_of
    from paceline.run.record.progress import NewLines, RecentSteps
    from paceline.text import printable

    events, steps = NewLines(path / "events.jsonl"), NewLines(path / "steps" / "rank-0.jsonl")
    steps.skip(_TAIL_BYTES)
    recent, printed, printed_at = RecentSteps(None), 0, float("-inf")
    while True:
        brief = brief_of(path)  # read before the files, so that the last lines are not missed
        for event in events:
            if sentence := _sentence(event, recent):
                typer.echo(printable(sentence))
        for line in steps:
            if isinstance(line, dict) and "step" in line:
                recent.add(line)
        done = brief.state in ENDED or not follow
        due = done or time.monotonic() - printed_at >= _LINE_EVERY_S
        if recent.step != printed and due and brief.state != "ended":
            printed, printed_at = recent.step, time.monotonic()
            typer.echo(printable(_progress(recent)))
        if done:
            break
        time.sleep(_LOOK_EVERY_S)
    if brief.state == "failed":
        typer.echo(f"failed: it has not ended, and the process that trained it is gone; newest step {brief.step or 0}")
    elif brief.state == "unreadable":
        typer.echo(printable(f"{path} cannot be read: {brief.reason}"))
    if brief.state in ("failed", "interrupted"):
        typer.echo(printable(f"continue     paceline train {path}/job.yaml --run {path} --resume"))
    if code := {"failed": 1, "unreadable": 1, "interrupted": EXIT_CODES.get(brief.reason, 1)}.get(brief.state, 0):
        raise typer.Exit(code)


_TAIL_BYTES = 2**16  # bytes read of the earlier steps


def _progress(recent: Any) -> str:
    try:
        return str(recent.sentence())
    except (KeyError, TypeError, ValueError):  # steps of another version, or edited by hand
        return f"step {recent.step}"


def _sentence(event: Any, recent: Any) -> str | None:
    """Return an event's text with its time; None for events that are not shown."""
    from paceline.run.record.progress import event_sentence

    try:
        recent.told(event)
        match event["event"]:
            case "start":
                said: str | None = f"training begins, plan {event['plan']}"
            case "checkpoint_saved":
                said = f"step {event['step']}: checkpoint saved"
            case "end":
                said = f"ended at step {event['step']}: {event['reason']}"
            case _:
                said = event_sentence(event)
        return said and f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event['time']))}  {said}"
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # of another version, or edited by hand
        return None
