"""`paceline evaluate RUN --data test`"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import Checkpoint, RunPath
from paceline.text import printable

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
    harness: Annotated[
        str,
        typer.Option(metavar="TASKS", help="Evaluate tasks of lm-eval instead of a data set, e.g. hellaswag,arc_*."),
    ] = "",
    harness_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with YAML files of further tasks. They may run code.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --harness: largest number of documents per task.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a saved run on a data set with the metrics of its job.

    The whole model runs on one device, regardless of the run's plan.
    """
    from paceline.run.saved_model import evaluated

    if harness:
        _evaluate_tasks(run, [task for task in harness.split(",") if task], harness_path, checkpoint, limit, as_json)
        return
    with run_with_checkpoint(run, checkpoint) as record:
        metrics = evaluated(record, data, checkpoint)
    if as_json:
        typer.echo(json.dumps({"run": run, "data": data, "checkpoint": checkpoint, "metrics": metrics}))
        return
    width = max(map(len, metrics))
    for name, value in metrics.items():
        typer.echo(f"{name:<{width}}  {value:.6g}")


def _evaluate_tasks(
    run: str, tasks: list[str], folder: Path | None, checkpoint: str, limit: int | None, as_json: bool
) -> None:
    from paceline.run.harness import run_harness

    with run_with_checkpoint(run, checkpoint) as record:
        found = run_harness(record, tasks, checkpoint=checkpoint, folder=folder, limit=limit)
    if as_json:
        results = [one._asdict() for one in found]
        typer.echo(json.dumps({"run": run, "tasks": tasks, "checkpoint": checkpoint, "results": results}))
        return
    width = max((len(f"{one.task}  {one.metric}") for one in found), default=0)
    for one in found:
        error = "" if one.stderr is None else f" ± {one.stderr:.4g}"
        name = printable(f"{one.task}  {one.metric}")
        typer.echo(f"{name:<{width}}  {one.value:.6g}{error}")


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
