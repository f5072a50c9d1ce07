"""`paceline scale RUN +1|-1`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "paceline scale runs/digits-20261123-101500 -1"
_WAIT_S = 15.0  # for the launcher to answer


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run that trains.")],
    by: Annotated[str, typer.Argument(metavar="+1|-1", help="One replica more or fewer; over hosts, one host.")],
) -> None:
    """Grow or shrink a run while it trains, after a step. The global batch stays.

    It gets back what has left it, up to the plan's replicas.
    """
    from paceline.elastic.scaling import ask
    from paceline.errors import RunError
    from paceline.printable import printable
    from paceline.storage.url import is_url

    if by not in ("+1", "-1"):
        raise typer.BadParameter(f"{by} is neither +1 nor -1: a run grows or shrinks by one at a time")
    if is_url(run):
        raise RunError(f"{run}: name the working directory of the run, which its first lines on screen tell.")
    holder = _holder(Path(run))
    answer = ask(Path(run), int(by), _WAIT_S)
    if answer is None:
        raise RunError(f"{run} is being trained by {holder}, which has not answered within {_WAIT_S:g} s")
    if answer.refused:
        raise RunError(answer.text)
    typer.echo(printable(answer.text))


def _holder(run: Path) -> str:
    """Process that trains a run of this user, in words.

    Raises:
        RunError: nobody does, it is another user's, or it is no run.
    """
    from paceline.elastic.run_lock import LOCK, Holder
    from paceline.errors import RunError
    from paceline.files import user_name

    try:
        owner = run.stat().st_uid
        content = (run / LOCK).read_bytes()[:4096] if (run / "job.yaml").is_file() else None
    except FileNotFoundError:
        content, owner = None, os.geteuid()
    except PermissionError:
        raise RunError(f"{run} belongs to another user, who alone may scale it") from None
    if owner != os.geteuid():
        raise RunError(f"{run} belongs to {user_name(owner)}, who alone may scale it")
    if content is None:
        raise RunError(f"{run} is not the directory of a run. `paceline scale` takes the one that `train` names first.")
    holder = Holder.parse(content)
    if holder is None or holder.is_gone:
        raise RunError(f"{run} is not being trained. Go on with it by --resume, and any --plan.")
    return str(holder)
