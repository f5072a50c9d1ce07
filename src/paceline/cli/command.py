"""Commands of `paceline`: the built-in ones, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.where import over_hosts
from paceline.errors import PacelineError
from paceline.extensions import ExtensionPoint

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
