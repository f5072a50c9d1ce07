"""`paceline key FILE`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: paceline key my-run.key"


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, which only you can read.")],
) -> None:
    """Make the key of a run on several hosts.

    Copy it to every host, and name it there in PACELINE_KEY_FILE. Who has it belongs to the run.
    """
    from paceline.channel.key import RunKey, write_key

    key = RunKey.make()
    write_key(key, file)
    typer.echo(f"{file}: key {key.fingerprint}")
