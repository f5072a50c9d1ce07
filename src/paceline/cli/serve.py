"""`paceline serve RUN…` and `paceline serve IMPORT_PATH… --at ADDRESS:PORT|PATH`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import RunError

EXAMPLE = "Example: paceline serve runs/mine runs/other"


def command(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT…",
            help="Directories of runs; or what clients may use: pkg.mod:name or file.py:name.",
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="WHERE",
            help="ADDRESS:PORT, or the path of a Unix socket to make; of runs 127.0.0.1:PORT.",
            show_default="a free port, of runs",
        ),
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open the page of the runs in a browser.")] = False,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", metavar="FILE", help="Key of the run.", show_default="PACELINE_KEY_FILE, ~/.paceline/key"
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=2, help="Calls that may run at a time.")] = 32,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="S", min=0.0, help="Seconds that a client which is lost has to come back."),
    ] = 30.0,
) -> None:
    """Serve the live page of runs, or modules to other processes (`paceline.remote`), until Ctrl-C or SIGTERM.

    Of directories of runs it serves a page for a browser on this machine, which shows what `paceline watch` shows
    and more while they train. Its address holds a token.

    Of import paths it serves modules, objects and functions. Others can name what is listed here and nothing else.
    Between hosts both ends prove the run's key; a Unix socket is this user's alone.
    """
    from paceline.cli.serve_runs import are_runs, serve_runs

    if are_runs(what):
        if key is not None:
            raise RunError("--key is for modules; the page of a run has a token in its address instead.")
        serve_runs(what, at, opens=opens)
        return
    if at is None or opens:
        raise RunError(f"{what[0]} is an import path: give --at ADDRESS:PORT or a path. --open is for runs.")
    _serve_modules(what, at, key, threads, grace)


def _serve_modules(what: list[str], at: str, key: Path | None, threads: int, grace: float) -> None:
    import threading

    from paceline.channel.ends import name_of
    from paceline.channel.key import default_key_file, own_key, read_key
    from paceline.remote.modules.host import place_of
    from paceline.remote.modules.serve import serve
    from paceline.training.stop_signals import stop_signals

    place = place_of(at)
    run_key = None
    if not isinstance(place, Path):
        run_key = read_key(key) if key else own_key() or read_key(default_key_file())
    stop = threading.Event()
    with stop_signals(lambda _: stop.set()), serve(what, place, run_key, threads=threads, grace_s=grace) as serving:
        typer.echo(f"serving {', '.join(what)} at {name_of(serving.address)}")
        stop.wait()
    if serving.strangers:
        typer.echo(f"closed connections that did not show the run's key: {serving.strangers}")
