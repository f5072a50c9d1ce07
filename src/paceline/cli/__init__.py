"""The command `paceline`: one file per command; what is heavy is imported inside the command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import paceline
from paceline.cli import (
    bench,
    cancel,
    chaos,
    check,
    doctor,
    export,
    federate_real,
    key,
    links,
    plan,
    report,
    runs,
    scale,
    serve,
    submit,
    trace,
    train,
    watch,
    why,
)
from paceline.cli.plan_offers import PlanCommand
from paceline.cli.where import over_hosts
from paceline.errors import PacelineError
from paceline.launch.shown_failure import show, show_traceback
from paceline.torch_versions import untested

app = typer.Typer(name="paceline", no_args_is_help=True, pretty_exceptions_enable=False)
_modules = (
    train,
    bench,
    chaos,
    check,
    doctor,
    export,
    key,
    links,
    plan,
    report,
    submit,
    runs,
    scale,
    cancel,
    serve,
    watch,
    trace,
    why,
)
for _module in _modules:
    _command = over_hosts(_module.command) if _module in (train, bench, check, links) else _module.command
    _settings = {"ignore_unknown_options": True} if _module is scale else None  # -1 is none
    _class = PlanCommand if _module is plan else None
    _name = _module.__name__.rpartition(".")[2]
    app.command(_name, cls=_class, epilog=_module.EXAMPLE, context_settings=_settings)(_command)
app.add_typer(federate_real.app, name="federate")  # with its commands, and those of `federate`


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback(epilog="Example: paceline train examples/digits.yaml")
def _about(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version of paceline and exit."),
    ] = False,
    traceback: Annotated[  # read by `main`
        bool, typer.Option("--traceback", help="Show the traceback of an error, not only its cause; stands anywhere.")
    ] = False,
) -> None:
    """Train PyTorch models on your machines, and know how fast it went and why."""
    if context.invoked_subcommand == "doctor" or os.environ.get("RANK", "0") != "0":
        return  # doctor prints its own line, and under torchrun every rank would repeat this one
    if newer := untested():
        typer.echo(f"paceline: note: {newer}", err=True)


def main() -> None:
    """Run the command line. An error is shown as text with its cause first, and ends it with its exit code."""
    arguments = [word for word in sys.argv[1:] if word != "--traceback"]  # which may stand anywhere
    show_traceback(len(arguments) < len(sys.argv) - 1)
    try:
        app(args=arguments)
    except PacelineError as error:
        show(error)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - a fault of paceline, or of code that it called
        show(error)
        sys.exit(1)
