"""`paceline dashboard RUN…`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import RunError
from paceline.files import scratch_folder, write_whole

EXAMPLE = "paceline dashboard runs/mine runs/other"


def command(
    where: Annotated[
        list[str],
        typer.Argument(metavar="RUN…", help="Directories of runs, or their URLs.", show_default=False),
    ],
    at: Annotated[
        str | None, typer.Option("--at", metavar="127.0.0.1:PORT", help="Address.", show_default="a free port")
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a live page of runs to a browser on this machine.

    The page shows what `paceline watch` shows, and more, while the runs train. The address has a token, so keep it to
    yourself. Ctrl-C or SIGTERM ends the page, and the runs go on.
    """
    import asyncio

    from paceline.cli.watch import followed
    from paceline.report.live_server import LiveServer
    from paceline.run.stop_signals import stop_signals

    server = LiveServer(followed(where), port_of(at))

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
    """Open a browser at the page; return False if there is none.

    The browser gets a private file that leads to the page, because other users can read command lines and their tokens.
    """
    import webbrowser

    file = folder / "open.html"
    write_whole(file, f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    if isinstance(browser, webbrowser.GenericBrowser) and not isinstance(browser, webbrowser.BackgroundBrowser):
        return False  # a browser in this terminal would hold up the page that it asks for
    return browser.open(file.as_uri())


def port_of(at: str | None) -> int:
    """Return the port of an address on loopback; 0 (a free port) without an address.

    Raises:
        RunError: the address is not of the form 127.0.0.1:PORT.
    """
    if at is None:
        return 0
    host, colon, port = at.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise RunError(f"--at {at}: give an address 127.0.0.1:PORT, or leave --at out to use a free port.")
    if host not in ("127.0.0.1", "localhost"):
        raise RunError(
            f"--at {at}: the page is not encrypted, so it is only served on 127.0.0.1. To see it on another machine, "
            f"forward the port from there (ssh -L {port}:127.0.0.1:{port} THIS-HOST) and open the printed address."
        )
    return int(port)
