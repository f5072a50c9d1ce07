"""The options --cluster and --hosts of commands that start ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster

Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="LIST",
        help="Hosts to start this command on by ssh, e.g. a,b:2 (2 devices of b), or a file of them.",
        show_default="this machine",
    ),
]


def start_on(hosts: str | None) -> None:
    """End this command with its result on these hosts, if any are named.

    Raises:
        LaunchError: a host cannot be reached, or this process is a host's or a rank already.
    """
    from paceline.errors import LaunchError
    from paceline.launch_engine import is_rank, own_engine

    if hosts is None:
        if not is_rank() and (note := own_engine().note()):
            print(f"paceline: note: {note}", file=sys.stderr, flush=True)
        return
    place = own_engine().hosts()
    if is_rank() or place:
        engine = place.engine if place else "torchrun"
        raise LaunchError(f"{engine} has started this command on every host already: leave out --hosts.")
    from paceline.launch.ssh.starter import run_on_hosts

    raise typer.Exit(run_on_hosts(hosts, ["-m", "paceline", *_without_hosts(sys.argv[1:])]))


def _without_hosts(arguments: list[str]) -> list[str]:
    """The command line without its option --hosts."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--hosts":
            next(words, None)
        elif not word.startswith("--hosts="):
            kept.append(word)
    return kept


def to_run_on(text: str | None) -> Cluster | None:
    """The cluster of a file; None, this machine, where no file is named.

    Raises:
        ClusterError: the file cannot be read, or what is named is from the catalogue of hardware, where nothing can
            run.
    """
    from paceline.cluster.discover import to_run_on as checked
    from paceline.cluster.named import cluster_from

    return checked(cluster_from(text)) if text is not None else None
