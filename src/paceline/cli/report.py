"""`paceline report DIR`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: paceline report runs/mine"


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run, or of a benchmark.")],
) -> None:
    """Write report.html about a run or a benchmark.

    It is one file that opens in any browser, without a network.
    """
    from paceline.benchmark.result import Report
    from paceline.errors import RunError
    from paceline.report.bench_view import write_bench_page
    from paceline.report.run_view import write_run_page
    from paceline.training.record.run import Run

    if (directory / "report.json").is_file():
        page = write_bench_page(Report.load(directory / "report.json"), directory)
    elif (directory / "job.yaml").is_file():
        page = write_run_page(Run(directory))
    elif directory.is_dir():
        raise RunError(
            f"{directory} is neither the directory of a run (it has no job.yaml) nor of a benchmark (it has no "
            "report.json)"
        )
    else:
        raise RunError(
            f"{directory}: no such directory. Name one that `paceline train` or `paceline bench` has written, "
            "e.g. runs/digits-…"
        )
    typer.echo(page)
