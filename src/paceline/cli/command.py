"""Commands of `paceline`: the built-in ones, and those of other packages."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from typer.core import TyperGroup

from paceline.errors import PacelineError
from paceline.extensions import ExtensionPoint
from paceline.text import closest, nearest

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.elastic.ssh import NamedHost
    from paceline.job.job import Job


Panel = Literal["Train", "Runs", "Plan", "Measure", "Clusters", "Applications"]


@dataclass(frozen=True)
class Command:
    """A command, or a group of commands.

    Attributes:
        function: the function that typer calls; for a group, its help text.
        panel: heading in `paceline --help`; None for a subcommand.
        example: a command line, shown at the end of `--help`.
        starts_ranks: True if the command may be started on every host; host 0 then runs the command, and the
            other hosts run agents.
        settings: settings of click's context.
        commands: subcommands by name, such as `cost` in `paceline plan cost`.
    """

    function: Callable[..., Any] | str
    panel: Panel | None = None
    example: str = ""
    starts_ranks: bool = False
    settings: dict[str, Any] | None = None
    commands: Mapping[str, Command] = field(default_factory=dict)

    def built(self, name: str) -> Any:
        """Build the click command."""
        epilog = f"Example: {self.example}"
        below = {word: replace(command, panel=None).built(word) for word, command in self.commands.items()}
        if isinstance(self.function, str):
            return Group(
                name=name,
                commands=below,
                help=self.function,
                epilog=epilog,
                no_args_is_help=True,
                rich_help_panel=self.panel,
            )
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        function = over_hosts(self.function) if self.starts_ranks else self.function
        alone.command(name, epilog=epilog, context_settings=self.settings)(function)
        found: Any = typer.main.get_command(alone)
        if below:
            found = CommandWithOthers(
                name=name,
                commands=below,
                params=found.params,
                callback=found.callback,
                help=found.help,
                epilog=epilog,
                subcommand_metavar="",
            )
        found.rich_help_panel = self.panel
        return found


class Group(TyperGroup):
    """Group of commands; the error for an unknown command lists all of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the first argument; return its name, the command and its arguments."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            known = ", ".join(f"`{ctx.command_path} {name}`" for name in self.commands)
            ctx.fail(f"{args[0]!r} is not a command. The commands are {known}.")
        return super().resolve_command(ctx, args)


class CommandWithOthers(Group):
    """Command that also has subcommands: `paceline plan JOB` and `paceline plan cost JOB`."""

    allow_extra_args = False
    allow_interspersed_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of this command, not of a subcommand.

        If an argument is an option of a subcommand, the error names the subcommand.
        """
        if args and (meant := closest(args[0], self.commands)) and not Path(args[0]).exists():
            ctx.fail(f"{args[0]!r} is neither a file nor a command. Did you mean `{ctx.command_path} {meant}`?")
        own = {name for parameter in self.params for name in parameter.opts}
        for word in (word.partition("=")[0] for word in args if word.startswith("--")):
            owners = [
                f"`{ctx.command_path} {name}`"
                for name, command in self.commands.items()
                if any(word in parameter.opts for parameter in command.params)
            ]
            if owners and word not in own:
                ctx.fail(f"{word} is an option of {' and '.join(owners)}.")
        return super(TyperGroup, self).parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run this command, not a subcommand."""
        return super(TyperGroup, self).invoke(ctx)


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
        panels = [*get_args(Panel), None]
        return sorted(found, key=lambda name: (panels.index(found[name].panel), list(found).index(name)))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the named command or subcommand; return its name, the command and its arguments."""
        if args[0] not in self.known and not args[0].startswith("-"):
            ctx.fail(f"{args[0]!r} is not a command. {nearest(args[0], self.known.names)}")
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, CommandWithOthers) and rest and rest[0] in command.commands:
            return f"{name} {rest[0]}", command.commands[rest[0]], rest[1:]
        return name, command, rest


def commands_of(built_in: dict[str, Command]) -> ExtensionPoint[Command]:
    """Return the commands of the core and of installed packages (entry point `paceline.commands`)."""
    return ExtensionPoint("command", "paceline.commands", Command, built_in, PacelineError)


_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD
_COUNT = re.compile(r"\d+(\.\.\d+)?")  # N or MIN..MAX
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}
_URL_AS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # a `Path` keeps only one slash of `://`
JobFile = Annotated[str, typer.Argument(metavar="JOB", help="Job file (YAML) or its URL: what to train.")]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="Directory or URL of a run.")]
Checkpoint = Annotated[
    str,
    typer.Option(
        metavar="WHICH",
        help="Checkpoint of the run: newest, best (of the job's checkpoint.best), or the number of a step.",
    ),
]
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
        "--cluster",
        metavar="FILE",
        help="Cluster file (YAML): where to run, e.g. on emulated hosts.",
        show_default="this machine",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="LIST",
        help="Hosts to run on, reached by ssh, e.g. a,b:2 (2 devices of b), or a file that lists them.",
        show_default="this machine",
    ),
]


NumHosts = Annotated[
    str | None,
    typer.Option(
        "--num-hosts",
        metavar="N|MIN..MAX",
        help="Number of hosts that a launcher starts this command on: 4, or 2..8 to go on with 2 to 8.",
        show_default="as the launcher says",
    ),
]


def not_at_a_url(file: Path) -> Path:
    """Refuse a URL if only a local file is supported."""
    if _URL_AS_PATH.match(str(file)):
        raise typer.BadParameter("a job at a URL is read by train, check and bench alone; fetch it first")
    return file


def in_a_folder(file: Path | None) -> Path | None:
    """Refuse an output file whose folder does not exist, before any work starts."""
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}")
    return file


def load_job(named: str, changes: list[str] | None = None) -> Job:
    """Load a job with its overridden keys.

    If this run was taken over from a lost host, the recorded job is loaded, including its overrides.

    Raises:
        JobError: the job file or an override is invalid.
        StorageError: the URL does not exist or cannot be read.
    """
    from paceline.cluster.launch_engines import own_engine
    from paceline.job.job import Job

    if own_engine().hosts() is not None:  # with one host, the usual case, the import below is skipped
        from paceline.elastic.hosts.hosts import current_hosts

        hosts = current_hosts()
        if hosts and hosts.takeover and hosts.takeover.job_file:
            return Job.load(hosts.takeover.job_file)
    return Job.load(named, set=changes or ())


def start_on(hosts: str | None, cluster: str | None = None, spares: int = 0) -> None:
    """Run this command on the named hosts, if any, and exit with its exit code.

    With `spares`, the hosts are checked first, and this number of hosts is left out as spares. Healthy spares replace
    hosts that leave the run or are lost, except host 0.

    Without hosts, if a user without root rights names an emulated cluster, this process gets the required rights.

    Raises:
        LaunchError: a host cannot be reached, or this process is already an agent or a rank.
        ClusterError: the cluster file is invalid, or the kernel does not allow the emulation.
    """
    from paceline.cluster.launch_engines import is_rank, own_engine
    from paceline.errors import LaunchError

    if hosts is None:
        if spares:
            raise typer.BadParameter("name the hosts, including the spare ones, with --hosts", param_hint="--spares")
        if is_rank():
            return
        if cluster is not None and os.geteuid():
            _be_allowed_to_emulate(cluster)
        if note := own_engine().note():
            print(f"paceline: note: {note}", file=sys.stderr, flush=True)
        return
    if _COUNT.fullmatch(hosts):
        raise typer.BadParameter(f"it lists names of hosts; a number is --num-hosts {hosts}", param_hint="--hosts")
    place = own_engine().hosts()
    if is_rank() or place:
        engine = place.engine if place else "torchrun"
        raise LaunchError(
            "hosts.started_already",
            "{engine} has already started this command on every host. Leave out --hosts.",
            engine=engine,
        )
    from paceline.elastic.ssh import read_hosts, run_on_hosts

    chosen = read_hosts(hosts)
    left_out: list[NamedHost] = []
    if spares:
        from paceline.run.health import healthy_hosts

        chosen, left_out = healthy_hosts(chosen, spares)
        shown = [", ".join(map(str, named)) or "none" for named in (chosen, left_out)]
        print(f"paceline: training on {shown[0]}; spare: {shown[1]}", file=sys.stderr, flush=True)
    raise typer.Exit(run_on_hosts(chosen, ["-m", "paceline", *_without_hosts(sys.argv[1:])], left_out))


def _be_allowed_to_emulate(cluster: str) -> None:
    from paceline.cluster.network import become_root_of_own_namespace
    from paceline.planning.arguments import cluster_to_run_on

    if cluster_to_run_on(cluster).emulate is not None:
        become_root_of_own_namespace()


def _without_hosts(arguments: list[str]) -> list[str]:
    """Return the command line without the options that choose hosts."""
    kept, words = [], iter(arguments)
    for word in words:
        if word in ("--hosts", "--spares"):
            next(words, None)
        elif not word.startswith(("--hosts=", "--spares=")):
            kept.append(word)
    return kept


def over_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Let only host 0 run a command that is started on every host; add --num-hosts."""

    @wraps(command)
    def started(*args: Any, num_hosts: str | None = None, **kwargs: Any) -> None:
        from paceline.cluster.launch_engines import is_rank, own_engine
        from paceline.elastic.failure import sigterm_as_exit

        if num_hosts is not None:
            if not _COUNT.fullmatch(num_hosts):
                raise typer.BadParameter(f"{num_hosts!r} is neither a number nor a range", param_hint="--num-hosts")
            os.environ["PACELINE_HOSTS"] = num_hosts
        with nullcontext() if is_rank() else sigterm_as_exit():
            # With one host, the usual case, the import below is skipped. The command itself refuses --hosts.
            if own_engine().hosts() is None or kwargs.get("hosts") is not None:
                command(*args, **kwargs)
                return
            from paceline.elastic.hosts.over_hosts import over_hosts

            with over_hosts():
                command(*args, **kwargs)

    signature = inspect.signature(command, eval_str=True)
    if "hosts" not in signature.parameters:  # such a command cannot be started over ssh, and does not get --num-hosts
        return started
    after_hosts = [*signature.parameters].index("hosts") + 1
    parameters = [*signature.parameters.values()]
    parameters.insert(after_hosts, inspect.Parameter("num_hosts", _BY_NAME, default=None, annotation=NumHosts))
    started.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    started.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()} | {
        "num_hosts": NumHosts
    }
    return started


def to_run_on(text: str | None) -> Cluster | None:
    """Return the cluster in a file, or this run's hosts; None means this machine.

    Raises:
        ClusterError: the file cannot be read; or the text names hardware of the catalogue, which only supports
            planning; or the run already has several hosts.
    """
    from paceline.elastic.hosts.hosts import current_hosts
    from paceline.errors import ClusterError
    from paceline.planning.arguments import cluster_to_run_on

    hosts = current_hosts()
    if text is None:
        return hosts.cluster if hosts else None
    if hosts:
        raise ClusterError(
            "cluster.given_twice",
            "--cluster {text}: the command was started on {hosts} hosts, which are already the cluster. Leave out "
            "--cluster, or start the command on one host only.",
            text=text,
            hosts=len(hosts.cluster.hosts),
        )
    return cluster_to_run_on(text)
