"""`paceline watch RUN…`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.console import Console
    from paceline.report.live_run import LiveRun

EXAMPLE = "Example: paceline watch runs/mine runs/other"
_LINE_EVERY_S = 5.0  # where the output is no terminal


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Directories of runs, while they train or after.")],
    every: Annotated[
        float, typer.Option("--every", metavar="S", min=0.05, help="Seconds from one look at the files to the next.")
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and end.")] = False,
) -> None:
    """Watch runs while they train: progress, loss, where each rank's step goes, and what happens.

    It reads the runs' files and nothing else, so it may be started, stopped and started again at any time, on any
    machine that sees them. Several runs are shown beside each other. It ends with the last of them, or by Ctrl-C.
    """
    from paceline.console import Console
    from paceline.report.live_run import LiveRun
    from paceline.training.record.run import Run

    watched = [LiveRun(Run(path)) for path in runs]
    for one in watched:
        one.look()
    console = Console(highlight=False, markup=False)
    if once:
        from paceline.cli.watch_screen import screen

        console.print(screen(watched, console.height))
    elif console.is_terminal:
        _on_a_terminal(watched, console, every)
    else:
        _in_lines(watched, every)


def _on_a_terminal(watched: list[LiveRun], console: Console, every: float) -> None:
    from rich.live import Live

    from paceline.cli.watch_screen import screen

    try:
        with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
            while True:
                live.update(screen(watched, console.height), refresh=True)
                if all(one.ended for one in watched):
                    return
                time.sleep(every)
                for one in watched:
                    one.look()
    except KeyboardInterrupt:
        return


def _in_lines(watched: list[LiveRun], every: float) -> None:
    from paceline.cli.watch_screen import line

    shown: dict[int, int] = {}
    printed_at = 0.0
    while True:
        ended = all(one.ended for one in watched)
        if ended or time.monotonic() - printed_at >= _LINE_EVERY_S:
            for number, one in enumerate(watched):
                if shown.get(number) != one.recent.step or ended:
                    shown[number] = one.recent.step
                    typer.echo(line(one))
            printed_at = time.monotonic()
        if ended:
            return
        time.sleep(every)
        for one in watched:
            one.look()
