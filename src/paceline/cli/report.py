"""`paceline report DIR`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: paceline report runs/mine"


def command(
    directory: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="Directory of a run or of a benchmark, or the URL of a run.")
    ],
) -> None:
    """Write report.html about a run or a benchmark.

    It is one file that opens in any browser, without a network. That of a URL is NAME.report.html in the current
    directory.
    """
    from paceline.storage.url import is_url

    typer.echo(_page_of_url(directory) if is_url(directory) else _page(Path(directory)))


def _page(directory: Path) -> Path:
    from paceline.benchmark.result import Report
    from paceline.errors import RunError
    from paceline.report.bench_view import write_bench_page
    from paceline.report.run_view import write_run_page
    from paceline.training.record.run import Run

    if (directory / "report.json").is_file() and _is_comparison(directory):
        from paceline.report.systems_view import write_kept_systems_page

        return write_kept_systems_page(directory)
    if (directory / "report.json").is_file():
        return write_bench_page(Report.load(directory / "report.json"), directory)
    if (directory / "job.yaml").is_file():
        return write_run_page(Run(directory))
    if directory.is_dir():
        raise RunError(
            f"{directory} is neither the directory of a run (it has no job.yaml) nor of a benchmark (it has no "
            "report.json)"
        )
    raise RunError(
        f"{directory}: no such directory. Name one that `paceline train` or `paceline bench` has written, "
        "e.g. runs/digits-…"
    )


def _is_comparison(directory: Path) -> bool:
    """True for the directory of `bench --systems`."""
    from paceline.benchmark.directory import PROTOCOL
    from paceline.files import read_text

    try:
        protocol = json.loads(read_text(directory / PROTOCOL))
    except (OSError, ValueError):
        return False
    return isinstance(protocol, dict) and "systems" in protocol


def _page_of_url(url: str) -> Path:
    from paceline.files import write_whole
    from paceline.training.remote.fetch import copy_of

    with copy_of(url, lambda line: typer.echo(line, err=True), checkpoint=False) as run:
        page = Path(f"{run.name}.report.html")
        write_whole(page, _page(run).read_bytes())
    return page
