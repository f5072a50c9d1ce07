"""`paceline predict RUN --data new.parquet --out predictions.parquet`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.command import Checkpoint, RunPath
from paceline.cli.evaluate import run_with_checkpoint


def command(
    run: RunPath,
    data: Annotated[
        str,
        typer.Option(
            metavar="PATH|SET",
            help="File, folder or factory of the job's kind of data, targets not needed; or test, held_out, train.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="What to write: a .parquet, .npz or .npy file.")],
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="classes, probabilities or logits; may be repeated.",
            show_default="the usual output for the loss",
        ),
    ] = None,
    columns: Annotated[
        str, typer.Option(metavar="A,B", help="Columns of a Parquet file that are copied to the output.")
    ] = "",
    checkpoint: Checkpoint = "newest",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples at a time.", show_default="the job's global batch")
    ] = None,
) -> None:
    """Write predictions of a saved run for new data, in the order of the data.

    The whole model runs on one device, regardless of the run's plan. Only one batch of data is in memory at a time.
    """
    from paceline.run.predictions import predict
    from paceline.units import count

    chosen = [name.strip() for name in columns.split(",") if name.strip()]
    with run_with_checkpoint(run, checkpoint) as record:
        rows = predict(record, data, out, checkpoint=checkpoint, outputs=outputs or (), columns=chosen, batch=batch)
    typer.echo(f"{out}: {count(rows, 'prediction')}")
