"""`paceline export RUN model.safetensors`"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The safetensors file to write, e.g. model.safetensors.")],
) -> None:
    """Write the weights of a run's newest checkpoint as one safetensors file."""
    from paceline.train.checkpoint_read import export

    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        export(run, out)
    for warning in passed_over:
        typer.echo(f"note: {warning.message}", err=True)
    typer.echo(f"{out}: load it with model.load_state_dict(safetensors.torch.load_file({str(out)!r}))")
