"""`paceline key [FILE]`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "paceline key"


def command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="New file, which only you can read.", show_default="~/.paceline/key"),
    ] = None,
) -> None:
    """Make the key of runs on several hosts.

    Every host needs a copy: at ~/.paceline/key it is found, elsewhere name it in PACELINE_KEY_FILE. Who has it belongs
    to the run.
    """
    from paceline.files import private_folder
    from paceline.wire.key import RunKey, default_key_file, write_key

    key = RunKey.make()
    if file is None:
        file = default_key_file()
        private_folder(file.parent)
    write_key(key, file)
    typer.echo(f"{file}: key {key.fingerprint}")
