"""`paceline export RUN model.safetensors`, `paceline export RUN FOLDER --layout hf|dcp`"""

from __future__ import annotations

import warnings
from collections.abc import Callable
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
    DCP = "dcp"


class ExportWeights(StrEnum):
    """Weights that `paceline export` can write."""

    RAW = "raw"
    EMA = "ema"


def command(
    run: RunPath,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="File to write, e.g. model.safetensors; with --layout hf or dcp, a folder."),
    ],
    layout: Annotated[
        ExportLayout,
        typer.Option(
            help="One safetensors file (file), a folder for from_pretrained of transformers (hf), or a checkpoint of "
            "torch.distributed.checkpoint (dcp)."
        ),
    ] = ExportLayout.FILE,
    checkpoint: Checkpoint = "newest",
    weights: Annotated[
        ExportWeights | None,
        typer.Option(help="Weights after the last update (raw), or their average (ema, the default if there is one)."),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapters, as a folder of peft.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapters into the model.")] = False,
) -> None:
    """Write the weights of a run's checkpoint to a file or folder.

    The result is one safetensors file, a folder in Hugging Face's layout, or a checkpoint that FSDP2 scripts load.
    """
    from paceline.run.adapters import check_kind, export_adapter, export_merged
    from paceline.run.convert import export, export_dcp, export_hf
    from paceline.run.object_store import copy_of
    from paceline.storage.url import is_url

    with ExitStack() as held, warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        say = partial(typer.echo, err=True)
        path = held.enter_context(copy_of(run, say, checkpoint=checkpoint)) if is_url(run) else Path(run)
        check_kind(path, "adapter" if adapter else "merge" if merge else None, dcp=layout is ExportLayout.DCP)
        writers: dict[ExportLayout, Callable[..., None]] = {
            ExportLayout.FILE: export,
            ExportLayout.HF: export_hf,
            ExportLayout.DCP: export_dcp,
        }
        write = writers[layout]
        if adapter:
            write = export_adapter
        elif merge:
            write = partial(export_merged, hf=layout is ExportLayout.HF)
        write(path, out, checkpoint, weights and weights.value)
    for warning in passed_over:
        if not issubclass(warning.category, (DeprecationWarning, FutureWarning)):  # those of libraries
            typer.echo(f"note: {warning.message}", err=True)
    how = {
        ExportLayout.FILE: "model.load_state_dict(safetensors.torch.load_file({!r}))",
        ExportLayout.HF: "from_pretrained({!r})",
        ExportLayout.DCP: "torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id={!r})",
    }[layout]
    if adapter:
        how = "peft.PeftModel.from_pretrained(base, {!r})"
    typer.echo(f"{out}: load it with {how.format(str(out))}")
