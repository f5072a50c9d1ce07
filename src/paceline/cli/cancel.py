"""`paceline cancel NAME`"""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "paceline cancel digits-20261123-101500"


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a run, as `paceline runs` lists it.")],
) -> None:
    """End a run that was submitted.

    It saves a checkpoint as far as its scheduler gives it time.
    """
    from paceline.elastic.submit.scheduler import find
    from paceline.elastic.submit.table import scheduler

    submission = find(name)
    if submission.phase:
        typer.echo(f"{submission.name} has ended already: {submission.phase}")
        return
    scheduler(submission.engine).cancel(submission)
    typer.echo(
        f"{submission.name} was told to end; to go on from its checkpoint, submit it with --run {submission.run}"
    )
