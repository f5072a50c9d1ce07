"""`paceline evaluate RUN --data test`"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import Checkpoint, RunPath

if TYPE_CHECKING:
    from paceline.run.record.run import Run


def command(
    run: RunPath,
    data: Annotated[
        str,
        typer.Option(
            metavar="SET|PATH",
            help="test, held_out or train of the job; or a file, folder or factory of the same kind of data.",
        ),
    ] = "test",
    checkpoint: Checkpoint = "newest",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a saved run on a data set with the metrics of its job.

    The whole model runs on one device, regardless of the run's plan.
    """
    from paceline.run.saved_model import evaluated

    with run_with_checkpoint(run, checkpoint) as record:
        metrics = evaluated(record, data, checkpoint)
    if as_json:
        typer.echo(json.dumps({"run": run, "data": data, "checkpoint": checkpoint, "metrics": metrics}))
        return
    width = max(map(len, metrics))
    for name, value in metrics.items():
        typer.echo(f"{name:<{width}}  {value:.6g}")


@contextmanager
def run_with_checkpoint(run: str, checkpoint: str) -> Iterator[Run]:
    """Open a run from a directory or a URL; print warnings as notes on stderr."""
    from paceline.run.object_store import copy_of
    from paceline.run.record.run import Run
    from paceline.storage.url import is_url

    say = partial(typer.echo, err=True)
    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        if is_url(run):
            with copy_of(run, say, checkpoint=checkpoint) as path:
                yield Run(path)
        else:
            yield Run(run)
    for text in dict.fromkeys(str(warning.message) for warning in passed_over if warning.category is UserWarning):
        say(f"note: {text}")
