"""`paceline export RUN model.safetensors`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
) -> None:
    """Write the weights of a run's newest checkpoint as one safetensors file."""
    from paceline.train.checkpoint_read import export

    export(run, out)
    typer.echo(f"{out}: load it with model.load_state_dict(safetensors.torch.load_file({str(out)!r}))")
