"""`paceline data show`, `paceline data tokenize`"""

from __future__ import annotations

import shlex
import sys
import time
from enum import StrEnum
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

    The first samples are shown in the order of training. Counts, lengths and statistics cover at most 2,048 samples of
    each set, spread evenly.
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


_CACHE_BYTES = 100 << 30  # largest size of cached copies of the source
_LINE_EVERY_S = 10.0  # between lines of progress if the output is not a terminal


class SourceFormat(StrEnum):
    """Formats of files with text."""

    JSONL = "jsonl"
    TEXT = "text"
    LINES = "lines"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    TAR = "tar"
    MDS = "mds"


def tokenize(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File, folder, pattern or URL of the text. Quote a pattern.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Local folder to create or update.")],
    tokenizer: Annotated[
        Path,
        typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json, or a folder that contains one."),
    ],
    column: Annotated[str, typer.Option(help="Column of the source that holds the text.")] = "text",
    format: Annotated[
        SourceFormat | None, typer.Option(help="Format of the source.", show_default="by the suffix of its files")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of processes.", show_default="the number of cores")
    ] = None,
) -> None:
    """Convert text to tokens once, for all later runs.

    Use the folder as `path` of a job's `data` with `kind: tokens`. If the command ends early or the source changes, run
    the same command again: only missing parts are converted.
    """
    from paceline.console import Console
    from paceline.corpus.conversion import tokenize as convert
    from paceline.corpus.host_files import HostFiles, user_cache
    from paceline.corpus.shards import Corpus
    from paceline.corpus.tokenizer import Tokenizer
    from paceline.errors import DataError
    from paceline.storage.url import is_url
    from paceline.units import clock, count, large

    if is_url(out):
        raise DataError(
            "data.tokens_at_url",
            "{url} is a URL, but tokens are written to a local folder. Write them to a local folder, and copy the "
            "folder to {url}.",
            url=out,
        )
    console = Console(stderr=True)
    model = Tokenizer.load(tokenizer)
    with console.status("reading the index of the source"):
        cache = HostFiles(user_cache("shards"), _CACHE_BYTES)
        corpus = Corpus.open([source], format=format and format.value, cache=cache, columns=[column])
    started = time.monotonic()
    with Bar(console, len(corpus)) as bar:
        about = convert(corpus, column, model, Path(out), workers=workers, progress=bar.update)
    documents = f"{count(about.documents, 'document')}, {large(about.tokens)} tokens"
    took = clock(time.monotonic() - started)
    typer.echo(f"{out}: {documents} with ids from 0 to {about.vocab_size - 1:,}, in {took}")
    if about.empty:
        typer.echo(f"{count(about.empty, 'row')} without text {'was' if about.empty == 1 else 'were'} left out")


class Bar:
    """Progress of a conversion: a bar in a terminal, otherwise one line every 10 s."""

    def __init__(self, console: object, rows: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.rows = rows
        self._started = self._printed_at = time.monotonic()
        self._live = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f} % {task.description}", markup=False),
            TimeRemainingColumn(),
            console=console,  # type: ignore[arg-type]  # rich is imported late
            auto_refresh=False,
            transient=True,
        )
        self._task = self._live.add_task("", total=rows)
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> Bar:
        if self._live.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live.console.is_terminal:
            self._live.stop()

    def update(self, rows: int, tokens: int) -> None:
        """Show the number of rows and tokens so far."""
        from paceline.units import large

        now = time.monotonic()
        # the speed excludes tokens that an earlier call converted
        before, since = self._first = self._first or (tokens, now)
        speed = f", {large((tokens - before) / (now - since))} tokens/s" if now > since else ""
        text = f"{large(tokens)} tokens{speed}"
        if self._live.console.is_terminal:
            self._live.update(self._task, completed=rows, description=text, refresh=True)
        elif now - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = now
            typer.echo(f"{rows:,} of {self.rows:,} rows, {text}", err=True)


_SHOW = "paceline data show examples/digits.yaml --samples 8 --page digits.html"
_TOKENIZE = "paceline data tokenize texts/ tokens/ --tokenizer tokenizer.json"
COMMAND = Command(
    "Look at the data of a job, and prepare data.",
    "Train",
    _SHOW,
    commands={"show": Command(show, example=_SHOW), "tokenize": Command(tokenize, example=_TOKENIZE)},
)
