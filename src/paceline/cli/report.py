"""`paceline report DIR`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="Directory of a run or of a benchmark, or the URL of a run.")
    ],
) -> None:
    """Write a page about a run or a benchmark: report.html in its directory.

    The page is one file that opens in any browser without a network. For a URL, the page is NAME.report.html in the
    current directory.
    """
    from paceline.storage.url import is_url

    typer.echo(_page_of_url(directory) if is_url(directory) else _page(Path(directory)))


def _page(directory: Path) -> Path:
    from paceline.errors import RunError
    from paceline.report import PAGES
    from paceline.report.run_page import write_run_page
    from paceline.run.record.run import Run

    if (directory / "job.yaml").is_file():
        return write_run_page(Run(directory))
    if not directory.is_dir():
        raise RunError(
            "report.no_directory",
            "{directory} does not exist. Name a directory of `paceline train` or `paceline bench`, "
            "for example runs/digits-…",
            directory=directory,
        )
    for page in PAGES.all().values():
        if page.recognizes(directory):
            return page.write(directory)
    raise RunError(
        "report.unknown_directory",
        "{directory} is neither a run directory (it has no job.yaml) nor a benchmark's directory (it has no "
        "report.json)",
        directory=directory,
    )


def _page_of_url(url: str) -> Path:
    from paceline.files import write_whole
    from paceline.run.object_store import copy_of

    with copy_of(url, lambda line: typer.echo(line, err=True), checkpoint=None) as run:
        page = Path(f"{run.name}.report.html")
        write_whole(page, _page(run).read_bytes())
    return page
