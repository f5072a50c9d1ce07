"""The command `paceline`. Heavy modules are imported inside the functions."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

import paceline
from paceline.cli import (
    check,
    data,
    doctor,
    evaluate,
    export,
    generate,
    init,
    links,
    operate,
    plan,
    predict,
    report,
    runs,
    sweep,
    trace,
    train,
    watch,
    why,
)
from paceline.cli.command import Command, Commands, commands_of
from paceline.elastic.failure import show, show_traceback
from paceline.errors import PacelineError
from paceline.torch_versions import untested

# `paceline --help` lists the commands of each heading in this order.
Commands.known = commands_of(
    {
        "init": Command(init.command, "Train", "paceline init images --data photos/"),
        "train": Command(
            train.command, "Train", 'paceline train examples/digits.yaml --plan "dp=2"', starts_ranks=True
        ),
        "sweep": Command(
            sweep.command,
            "Train",
            'paceline sweep examples/digits.yaml --plan "dp=2" --grid optimizer.lr=1e-3,1e-2 --repeat 3',
        ),
        "evaluate": Command(evaluate.command, "Train", "paceline evaluate runs/mine --data test"),
        "export": Command(export.command, "Train", "paceline export runs/mine model.safetensors"),
        "generate": Command(generate.command, "Train", 'paceline generate runs/mine "Once upon a time"'),
        "predict": Command(
            predict.command, "Train", "paceline predict runs/mine --data new.parquet --out predictions.parquet"
        ),
        "runs": Command(runs.runs, "Runs", "paceline runs"),
        "logs": Command(runs.logs, "Runs", "paceline logs digits-20261123-101500"),
        "watch": Command(watch.watch, "Runs", "paceline watch runs/mine runs/other"),
        "dashboard": Command(watch.dashboard, "Runs", "paceline dashboard runs/mine runs/other"),
        "report": Command(report.command, "Runs", "paceline report runs/mine"),
        "why": Command(why.command, "Runs", "paceline why runs/mine --try 2"),
        "trace": Command(trace.command, "Runs", "paceline trace runs/mine --steps 3"),
        "data": data.COMMAND,
        "plan": plan.COMMAND,
        "check": Command(
            check.command, "Plan", 'paceline check examples/gpt_text.yaml --plan "fsdp=2 tp=2"', starts_ranks=True
        ),
        "links": Command(
            links.command, "Measure", "paceline links --transports shm,gloo --sizes 1KiB,1MiB", starts_ranks=True
        ),
        "doctor": Command(doctor.command, "Measure", "paceline doctor --json"),
        "submit": Command(
            operate.submit,
            "Clusters",
            'paceline submit examples/digits.yaml --on slurm --num-hosts 4 --plan "dp=4" --dry-run',
        ),
        "cancel": Command(operate.cancel, "Clusters", "paceline cancel digits-20261123-101500"),
        # otherwise click would read -1 as an option
        "scale": Command(
            operate.scale,
            "Clusters",
            "paceline scale runs/digits-20261123-101500 -1",
            settings={"ignore_unknown_options": True},
        ),
        "key": Command(operate.key, "Clusters", "paceline key"),
    }
)
app = typer.Typer(name="paceline", cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def commands() -> dict[str, Any]:
    """Return every click command by name, including the commands of other packages."""
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
        bool,
        typer.Option("--traceback", help="Also show the traceback of an error; allowed anywhere in the command."),
    ] = False,
) -> None:
    """Train PyTorch models on your machines, and know how fast it went and why."""
    if context.invoked_subcommand == "doctor" or os.environ.get("RANK", "0") != "0":
        return  # doctor prints its own line, and under torchrun every rank would repeat this one
    if newer := untested():
        typer.echo(f"paceline: note: {newer}", err=True)


def main() -> None:
    """Run the command line. Print any error, and exit with its exit code."""
    arguments = [word for word in sys.argv[1:] if word != "--traceback"]  # the option may be at any position
    show_traceback(len(arguments) < len(sys.argv) - 1)
    try:
        app(args=arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except PacelineError as error:
        show(error)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - a fault of paceline, or of code that it called
        show(error)
        sys.exit(1)
