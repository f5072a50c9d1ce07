"""The command `paceline`: one file per command. Heavy modules are imported inside the functions."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

import paceline
from paceline.cli import (
    cancel,
    check,
    dashboard,
    doctor,
    export,
    key,
    links,
    plan,
    report,
    runs,
    scale,
    submit,
    trace,
    train,
    watch,
    why,
)
from paceline.cli.command import Command, Commands, commands_of
from paceline.cli.plan_offers import PlanCommand
from paceline.elastic.failure import show, show_traceback
from paceline.errors import PacelineError
from paceline.torch_versions import untested

Commands.known = commands_of(
    {
        "train": Command(train.command, "Train", train.EXAMPLE, starts_ranks=True),
        "check": Command(check.command, "Train", check.EXAMPLE, starts_ranks=True),
        "export": Command(export.command, "Train", export.EXAMPLE),
        "watch": Command(watch.command, "Measure", watch.EXAMPLE),
        "dashboard": Command(dashboard.command, "Measure", dashboard.EXAMPLE),
        "report": Command(report.command, "Measure", report.EXAMPLE),
        "why": Command(why.command, "Measure", why.EXAMPLE),
        "trace": Command(trace.command, "Measure", trace.EXAMPLE),
        "links": Command(links.command, "Measure", links.EXAMPLE, starts_ranks=True),
        "plan": Command(plan.command, "Plan", plan.EXAMPLE, kind=PlanCommand),
        "submit": Command(submit.command, "Operate", submit.EXAMPLE),
        "runs": Command(runs.command, "Operate", runs.EXAMPLE),
        "cancel": Command(cancel.command, "Operate", cancel.EXAMPLE),
        # -1 is no option
        "scale": Command(scale.command, "Operate", scale.EXAMPLE, settings={"ignore_unknown_options": True}),
        "key": Command(key.command, "Operate", key.EXAMPLE),
        "doctor": Command(doctor.command, "Operate", doctor.EXAMPLE),
    }
)
app = typer.Typer(name="paceline", cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def commands() -> dict[str, Any]:
    """Return every command by name, as click runs it; loads the commands of other packages."""
    group = typer.main.get_command(app)
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}  # type: ignore[attr-defined]


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
        bool, typer.Option("--traceback", help="Also show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Train PyTorch models on your machines, and know how fast it went and why."""
    if context.invoked_subcommand == "doctor" or os.environ.get("RANK", "0") != "0":
        return  # doctor prints its own line, and under torchrun every rank would repeat this one
    if newer := untested():
        typer.echo(f"paceline: note: {newer}", err=True)


def main() -> None:
    """Run the command line. An error is printed with its cause first, and sets the exit code."""
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
