"""`paceline export RUN model.safetensors`, `paceline export RUN FOLDER --layout hf`"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.command import Checkpoint, RunPath


class ExportLayout(StrEnum):
    """Layouts that `paceline export` can write."""

    FILE = "file"
    HF = "hf"


class ExportWeights(StrEnum):
    """Weights that `paceline export` can write."""

    RAW = "raw"
    EMA = "ema"


def command(
    run: RunPath,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write, e.g. model.safetensors; a folder with --layout hf.")
    ],
    layout: Annotated[
        ExportLayout,
        typer.Option(help="One safetensors file (file), or a folder for from_pretrained of transformers (hf)."),
    ] = ExportLayout.FILE,
    checkpoint: Checkpoint = "newest",
    weights: Annotated[
        ExportWeights | None,
        typer.Option(help="Weights after the last update (raw), or their average (ema, the default if there is one)."),
    ] = None,
) -> None:
    """Write the weights of a run's checkpoint to a file or folder.

    The result is one safetensors file, or a folder in Hugging Face's layout.
    """
    from paceline.run.convert import export, export_hf
    from paceline.run.object_store import copy_of
    from paceline.storage.url import is_url

    with ExitStack() as held, warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        say = partial(typer.echo, err=True)
        path = held.enter_context(copy_of(run, say, checkpoint=checkpoint)) if is_url(run) else Path(run)
        (export if layout is ExportLayout.FILE else export_hf)(path, out, checkpoint, weights and weights.value)
    for warning in passed_over:
        typer.echo(f"note: {warning.message}", err=True)
    how = (
        "model.load_state_dict(safetensors.torch.load_file({!r}))"
        if layout is ExportLayout.FILE
        else "from_pretrained({!r})"
    )
    typer.echo(f"{out}: load it with {how.format(str(out))}")
