"""The command `paceline`: one file per command; what is heavy is imported inside the command."""

from __future__ import annotations

import sys

import typer

from paceline.cli import bench, check, doctor, export, links, plan, report, train
from paceline.errors import PacelineError
from paceline.printable import printable

app = typer.Typer(name="paceline", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("train")(train.command)
app.command("bench")(bench.command)
app.command("check")(check.command)
app.command("doctor")(doctor.command)
app.command("export")(export.command)
app.command("links")(links.command)
app.command("plan")(plan.command)
app.command("report")(report.command)


@app.callback()
def _about() -> None:
    """Train any PyTorch model on the machines you have, and know how fast it went and why."""


def main() -> None:
    """Run the command line; an error of paceline's own is shown as its text, with exit code 1."""
    try:
        app()
    except PacelineError as error:
        print(f"paceline: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
