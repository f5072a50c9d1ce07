"""Commands of `paceline`: the built-in ones, and those of other packages."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.errors import PacelineError
from paceline.extensions import ExtensionPoint

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job


PANELS = ("Train", "Measure", "Plan", "Operate", "Federate")


@dataclass(frozen=True)
class Command:
    """A command or a group of commands.

    Attributes:
        function: the function that typer calls, or the typer application of a group.
        panel: heading in `paceline --help`.
        example: a command line, shown at the end of `--help`.
        starts_ranks: True if the command may be started on every host; host 0 then runs it, and the others serve.
        kind: class of the command, if it is not typer's own.
        settings: settings of click's context.
    """

    function: Callable[..., Any] | typer.Typer
    panel: Literal["Train", "Measure", "Plan", "Operate", "Federate"]
    example: str = ""
    starts_ranks: bool = False
    kind: type[TyperCommand] | None = None
    settings: dict[str, Any] | None = None

    def built(self, name: str) -> Any:
        """Return the command as click runs it."""
        if isinstance(self.function, typer.Typer):
            found = typer.main.get_command(self.function)
            found.name = name
        else:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            function = over_hosts(self.function) if self.starts_ranks else self.function
            epilog = f"Example: {self.example}"
            alone.command(name, cls=self.kind, epilog=epilog, context_settings=self.settings)(function)
            found = typer.main.get_command(alone)
        found.rich_help_panel = self.panel  # type: ignore[attr-defined]
        return found


class Commands(TyperGroup):
    """Group of all commands. Commands of other packages are loaded when they are called or listed.

    Attributes:
        known: descriptions of the commands; set once, before the group is created.
    """

    known: ExtensionPoint[Command]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with this name, or None."""
        if cmd_name not in self.commands and cmd_name in self.known:
            self.commands[cmd_name] = self.known[cmd_name].built(cmd_name)
        return self.commands.get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, sorted by heading; report packages that cannot be loaded."""
        found, errors = self.known.loadable()
        for error in errors:
            typer.echo(f"paceline: note: {error}", err=True)
        for name, command in found.items():
            if name not in self.commands:
                self.commands[name] = command.built(name)
        return sorted(found, key=lambda name: (PANELS.index(found[name].panel), list(found).index(name)))


def commands_of(built_in: dict[str, Command]) -> ExtensionPoint[Command]:
    """Return the commands of the core and of installed packages (entry point `paceline.commands`)."""
    return ExtensionPoint("command", "paceline.commands", Command, built_in, PacelineError)


P = ParamSpec("P")
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
_URL_AS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # a path has no two slashes in a row
JobFile = Annotated[str, typer.Argument(metavar="JOB", help="YAML file that says what to train, or its URL.")]
SetKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job, e.g. optimizer.lr=3e-4 or 'stop={epochs: 2}'; may be repeated.",
    ),
]
ClusterFile = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="FILE", help="YAML file that says where, e.g. emulated hosts.", show_default="this machine"
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="LIST",
        help="Hosts to start this command on by ssh, e.g. a,b:2 (2 devices of b), or a file; 2..8: from 2 on.",
        show_default="this machine",
    ),
]


def not_at_a_url(file: Path) -> Path:
    """Refuse a URL where only a file is read."""
    if _URL_AS_PATH.match(str(file)):
        raise typer.BadParameter("a job at a URL is read by train, check and bench alone; fetch it first")
    return file


def load_job(named: str, changes: list[str] | None = None) -> Job:
    """Load a job with its overridden keys.

    A run that is taken over from a lost host keeps the job that it recorded, overrides included.

    Raises:
        JobError: the file, or an override, is wrong.
        StorageError: there is nothing at the URL, or it cannot be read.
    """
    from paceline.cluster.launch_engines import own_engine
    from paceline.job.job import Job

    if own_engine().hosts() is not None:  # most often there is one host, and then nothing more is imported
        from paceline.elastic.hosts.hosts import current_hosts

        hosts = current_hosts()
        if hosts and hosts.takeover and hosts.takeover.job_file:
            return Job.load(hosts.takeover.job_file)
    return Job.load(named, set=changes or ())


def start_on(hosts: str | None, cluster: str | None = None) -> None:
    """End this command with its result on these hosts, if any are named.

    Else, where a user who is not root names a cluster that is emulated, have this process be allowed to do that.

    Raises:
        LaunchError: a host cannot be reached, or this process is a host's or a rank already.
        ClusterError: the cluster's file is wrong, or the kernel does not allow it.
    """
    from paceline.cluster.launch_engines import is_rank, own_engine
    from paceline.errors import LaunchError

    if hosts is None:
        if is_rank():
            return
        if cluster is not None and os.geteuid():
            _be_allowed_to_emulate(cluster)
        if note := own_engine().note():
            print(f"paceline: note: {note}", file=sys.stderr, flush=True)
        return
    place = own_engine().hosts()
    if is_rank() or place:
        engine = place.engine if place else "torchrun"
        raise LaunchError(f"{engine} has started this command on every host already: leave out --hosts.")
    from paceline.elastic.ssh import run_on_hosts

    raise typer.Exit(run_on_hosts(hosts, ["-m", "paceline", *_without_hosts(sys.argv[1:])]))


def _be_allowed_to_emulate(cluster: str) -> None:
    from paceline.cluster.cluster import cluster_from
    from paceline.cluster.network import become_root_of_own_namespace

    if cluster_from(cluster).emulate is not None:
        become_root_of_own_namespace()


def _without_hosts(arguments: list[str]) -> list[str]:
    """The command line without its option --hosts."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--hosts":
            next(words, None)
        elif not word.startswith("--hosts="):
            kept.append(word)
    return kept


def over_hosts(command: Callable[P, None]) -> Callable[P, None]:
    """Command that is started once per host, and runs on host 0."""

    @wraps(command)
    def started(*args: P.args, **kwargs: P.kwargs) -> None:
        from paceline.cluster.launch_engines import is_rank, own_engine
        from paceline.elastic.failure import sigterm_as_exit

        if re.fullmatch(r"\d+\.\.\d+", str(kwargs.get("hosts"))):  # started on each by something else
            os.environ["PACELINE_HOSTS"] = str(kwargs["hosts"])
            kwargs["hosts"] = None
        with nullcontext() if is_rank() else sigterm_as_exit():
            # Most often there is one host, and then nothing more is imported; --hosts is refused by the command.
            if own_engine().hosts() is None or kwargs.get("hosts") is not None:
                command(*args, **kwargs)
                return
            from paceline.elastic.hosts.over_hosts import over_hosts

            with over_hosts():
                command(*args, **kwargs)

    return started


def to_run_on(text: str | None) -> Cluster | None:
    """The cluster of a file, else this run's hosts; None is this machine.

    Raises:
        ClusterError: the file cannot be read, or what is named is from the catalogue of hardware, where nothing can
            run; or there are several hosts already.
    """
    from paceline.cluster.cluster import cluster_from
    from paceline.cluster.discover import to_run_on as checked
    from paceline.elastic.hosts.hosts import current_hosts
    from paceline.errors import ClusterError

    hosts = current_hosts()
    if text is None:
        return hosts.cluster if hosts else None
    if hosts:
        raise ClusterError(
            f"--cluster {text}: the command was started on {len(hosts.cluster.hosts)} hosts, which are the cluster. "
            "Leave the option out, or start the command once."
        )
    return checked(cluster_from(text))
