"""A command: `paceline hello Ada`."""

import typer

from paceline.cli.command import Command


def hello(name: str) -> None:
    """Greet a person."""
    typer.echo(f"Hello, {name}.")


COMMAND = Command(hello, "Applications", example="paceline hello Ada")
