"""`paceline watch RUN…` and `paceline dashboard RUN…`: active runs in a terminal or browser."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import RunError
from paceline.files import scratch_folder, write_whole

if TYPE_CHECKING:
    from paceline.console import Console
    from paceline.report.live_run import LiveRun
    from paceline.run.record.run import Run


_LINE_EVERY_S = 5.0  # seconds, if the output is not a terminal


def watch(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Directories of runs.")],
    every: Annotated[
        float,
        typer.Option(
            "--every",
            metavar="S",
            min=0.05,
            help="Seconds between refreshes; longer if refreshing would take more than 0.5 % of a core.",
        ),
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Show the current state once, and exit.")] = False,
) -> None:
    """Watch runs in the terminal: progress, loss, where each rank's time goes, and events.

    The command only reads the files of the runs, so you can start and stop it at any time, on any machine that
    can read these files. It ends when the last run ends, or on Ctrl-C.
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
    except KeyboardInterrupt:  # the user may leave at any time
        return


def followed(runs: Sequence[str]) -> list[LiveRun]:
    """Open the runs in these directories, and read their current contents.

    Raises:
        RunError: a directory is not a run.
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
        raise RunError(
            "watch.url",
            "{url}: only directories can be watched. For the URL of a run, use `paceline report`.",
            url=where,
        )
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


def dashboard(
    where: Annotated[
        list[str],
        typer.Argument(metavar="RUN…", help="Directories of runs.", show_default=False),
    ],
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="127.0.0.1:PORT", help="Address to listen on.", show_default="a free port"),
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in a browser while they train.

    The page is served on this machine only. The address contains a token, so keep the address to yourself. Ctrl-C
    stops the server, and the runs continue.
    """
    import asyncio

    from paceline.report.live_server import LiveServer
    from paceline.run.process import stop_signals

    server = LiveServer(followed(where), port_of(listen))

    def ready() -> None:
        typer.echo(f"serving {', '.join(where)} at {server.url}")
        typer.echo("Keep the address to yourself. Ctrl-C ends the page; the runs go on.", err=True)
        if opens and not _opened(server.url, folder):
            typer.echo("This machine has no browser that opens a window. Open the address yourself.", err=True)

    async def until_stopped() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def end(_: str) -> None:
            loop.call_soon_threadsafe(stop.set)

        with stop_signals(end):
            await server.serve(stop, ready)

    with scratch_folder() as folder:
        asyncio.run(until_stopped())


def _opened(url: str, folder: Path) -> bool:
    """Open the page in a browser; return False if there is no browser.

    The browser opens a private file that redirects to the page, because other users can read tokens on command lines.
    """
    import webbrowser

    file = folder / "open.html"
    write_whole(file, f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    if isinstance(browser, webbrowser.GenericBrowser) and not isinstance(browser, webbrowser.BackgroundBrowser):
        return False  # a browser in this terminal would block the page that it requests
    return browser.open(file.as_uri())


def port_of(listen: str | None) -> int:
    """Return the port of a loopback address, or 0 (a free port) without an address.

    Raises:
        RunError: the address is not of the form 127.0.0.1:PORT.
    """
    if listen is None:
        return 0
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise RunError(
            "watch.address_invalid",
            "--listen {address}: give an address 127.0.0.1:PORT, or leave --listen out to use a free port.",
            address=listen,
        )
    if host not in ("127.0.0.1", "localhost"):
        raise RunError(
            "watch.address_not_local",
            "--listen {address}: the page is not encrypted, so it is served on 127.0.0.1 only. To see it on "
            "another machine, forward the port from there (ssh -L {port}:127.0.0.1:{port} THIS-HOST) and open the "
            "printed address.",
            address=listen,
            port=port,
        )
    return int(port)
