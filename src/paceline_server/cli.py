"""`paceline serve IMPORT_PATH… --listen ADDRESS:PORT|PATH`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.command import Command


def command(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT…", help="Modules, objects and functions that clients may use: pkg.mod:name or file.py:name."
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="ADDRESS:PORT|PATH", help="Address to listen on, or the path of a new Unix socket."
        ),
    ],
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="File of the key of the run.",
            show_default="PACELINE_KEY_FILE, ~/.paceline/key",
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=2, help="Number of calls that may run at once.")] = 32,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="S", min=0.0, help="Seconds until the objects of a lost client are deleted."),
    ] = 30.0,
) -> None:
    """Serve modules, objects and functions to other processes.

    Clients can call only what this command names. Between hosts, both ends prove that they have the run's key. A Unix
    socket is private to this user. Ctrl-C or SIGTERM ends the service.
    """
    import threading

    from paceline.elastic.forkserver import keep_freed_memory
    from paceline.run.process import stop_signals
    from paceline.wire.key import default_key_file, name_of, own_key, read_key
    from paceline_server.client import place_of
    from paceline_server.modules.serve import serve

    place = place_of(listen)
    run_key = None
    if not isinstance(place, Path):
        run_key = read_key(key) if key else own_key() or read_key(default_key_file())
    stop = threading.Event()
    keep_freed_memory()
    with stop_signals(lambda _: stop.set()), serve(what, place, run_key, threads=threads, grace_s=grace) as serving:
        typer.echo(f"serving {', '.join(what)} at {name_of(serving.address)}")
        stop.wait()
    if serving.unauthenticated:
        typer.echo(f"connections closed because they did not prove the run's key: {serving.unauthenticated}")


COMMAND = Command(command, "Applications", "paceline serve ranking.py:Table --listen 10.0.0.2:7000 --key run.key")
