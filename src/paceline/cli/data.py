"""`paceline data show`"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.command import Command, JobFile, SetKeys, in_a_folder, load_job


def show(
    job: JobFile,
    changes: SetKeys = None,
    samples: Annotated[int, typer.Option("--samples", min=1, max=1000, help="Number of samples to show.")] = 4,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page",
            metavar="FILE.html",
            help="Also write a page, with a contact sheet if the inputs are images.",
            callback=in_a_folder,
        ),
    ] = None,
) -> None:
    """Show what the model gets from the data of a job.

    The first samples come in the order of training. Counts, lengths and statistics are of at most 2,048 samples of
    each set, which are spread evenly.
    """
    what = load_job(job, changes)  # before heavy imports, so that a mistake is reported at once
    from paceline.cli.data_screen import show_data
    from paceline.console import Console
    from paceline.run.data_view import view_data

    with Console(stderr=True).status("") as status:
        view = view_data(what, samples, say=status.update)
    show_data(view, Console(highlight=False))
    if page is not None:
        from paceline.report.data_page import write_data_page

        typer.echo(f"page  {write_data_page(view, shlex.join(['paceline', *sys.argv[1:]]), page)}")
    elif view.pictures:
        typer.echo("To see the images: --page FILE.html")


_SHOW = "paceline data show examples/digits.yaml --samples 8 --page digits.html"
COMMAND = Command("Look at the data of a job.", "Train", _SHOW, commands={"show": Command(show, example=_SHOW)})
