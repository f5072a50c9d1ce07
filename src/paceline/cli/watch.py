"""`paceline watch RUN…`"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.console import Console
    from paceline.report.live_run import LiveRun
    from paceline.run.record.run import Run

EXAMPLE = "paceline watch runs/mine runs/other"
_LINE_EVERY_S = 5.0  # where the output is no terminal


def command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Directories of runs, while they train or after.")],
    every: Annotated[
        float,
        typer.Option(
            "--every",
            metavar="S",
            min=0.05,
            help="Seconds from look to look, or more so that it takes 0.5 % of a core at most.",
        ),
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and end.")] = False,
) -> None:
    """Watch runs while they train: progress, loss, where each rank's step goes, and what happens.

    It reads the runs' files and nothing else, so it may be started, stopped and started again at any time, on any
    machine that sees them. Several runs are shown beside each other. It ends with the last of them, or by Ctrl-C.
    """
    from paceline.cli.watch_screen import screen
    from paceline.console import Console

    watched = followed(runs)
    console = Console(highlight=False, markup=False)
    try:
        if once:
            console.print(screen(watched, console.height))
        elif console.is_terminal:
            _on_a_terminal(watched, console, every)
        else:
            _in_lines(watched, every)
    except KeyboardInterrupt:  # whoever watches may leave at any time
        return


def followed(runs: Sequence[str]) -> list[LiveRun]:
    """The runs of directories, with what is in them already read.

    Raises:
        RunError: one is no directory of a run.
    """
    from paceline.report.live_run import LiveRun

    found = [LiveRun(_run(where)) for where in runs]
    _look(found)
    return found


def _run(where: str) -> Run:
    from paceline.errors import RunError
    from paceline.run.record.run import Run
    from paceline.storage.url import is_url

    if is_url(where):
        raise RunError(f"{where}: only directories can be watched. `paceline report` takes the URL of a run.")
    return Run(where)


def _look(watched: list[LiveRun]) -> None:
    for one in watched:
        one.look()


def _on_a_terminal(watched: list[LiveRun], console: Console, every: float) -> None:
    from rich.live import Live

    from paceline.cli.watch_screen import screen
    from paceline.report.live_run import Pace

    pace = Pace(every)
    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        while True:
            live.update(screen(watched, console.height), refresh=True)
            if all(one.ended for one in watched):
                return
            time.sleep(pace.wait_s())
            _look(watched)


def _in_lines(watched: list[LiveRun], every: float) -> None:
    from paceline.cli.watch_screen import line
    from paceline.report.live_run import Pace

    pace = Pace(every)
    shown: dict[int, tuple[int, bool]] = {}
    printed_at = float("-inf")
    while True:
        ended = all(one.ended for one in watched)
        if ended or time.monotonic() - printed_at >= _LINE_EVERY_S:
            for number, one in enumerate(watched):
                now = one.recent.step, one.late()
                if shown.get(number) != now or ended:
                    shown[number] = now
                    typer.echo(line(one))
            printed_at = time.monotonic()
        if ended:
            return
        time.sleep(pace.wait_s())
        _look(watched)
