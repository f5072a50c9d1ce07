"""Conversion of text to folders of tokens, in processes that may be killed."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.corpus.rows import Damaged
from paceline.corpus.shards import Corpus, Where, value_of
from paceline.corpus.tokenizer import Tokenizer, Tokens
from paceline.corpus.tokens import (
    DESCRIPTION,
    LAYOUT,
    LENGTHS,
    UNFINISHED,
    Part,
    TokensAbout,
    Trained,
    document_lengths,
    read_about,
    write_documents,
)
from paceline.errors import DataError
from paceline.files import write_whole

_PART_BYTES = (4 << 20, 64 << 20)  # smallest and largest part of a source file, before a split by rows
_PARTS = 16  # number of parts per source file within these limits, so that all processes have work
_NAME_BYTES = 200  # longest name of a part; file systems allow 255 bytes, with the additions of unfinished files
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1  # option of prctl


def tokenize(
    corpus: Corpus,
    column: str,
    tokenizer: Tokenizer,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    wait: bool = False,
    turns: Callable[[Mapping[str, Any], Where], tuple[Tokens, Trained]] | None = None,
    skips_bad_rows: bool = False,
) -> TokensAbout:
    """Convert the documents of a corpus to tokens, and write them to a folder.

    Worker processes convert the source files in parts of about 64 MiB at most. Finished parts are kept if the process
    ends early. A later call converts only missing parts, and parts of source files that are new or have changed.

    Args:
        column: column with the text of a document.
        workers: number of processes; by default, the number of cores.
        progress: function that receives the number of rows and tokens so far, several times per second.
        wait: True to wait while another process writes to the folder, False to raise an error.
        turns: function that converts a whole row instead of the column. It returns the tokens, and which of them count
            in the loss. Rows without tokens that count are left out, like empty rows.
        skips_bad_rows: True to leave out rows that are damaged or that `turns` refuses, like empty rows.

    Raises:
        DataError: the folder cannot be written, holds other files, belongs to another tokenizer or column, or another
            process writes to it; a row has no such column or other values than text in it, all rows are empty, a file
            is damaged, or a worker was killed.
    """
    with _writable(out), _alone(out, wait=wait):
        about = TokensAbout.of(tokenizer, column)
        finished = {_of_source(part): part for part in _finished(out, about, tokenizer)}
        wanted = _parts(corpus)
        missing = {part: first for part, first in wanted.items() if part not in finished}
        if (out / DESCRIPTION).exists() and (out / LENGTHS).exists() and len(wanted) == len(finished) and not missing:
            return replace(about, parts=tuple(finished[part] for part in wanted))
        done = [finished[part] for part in wanted if part in finished]
        write_whole(out / UNFINISHED, _lines({"layout": LAYOUT, **asdict(about)}, *(part._asdict() for part in done)))
        (out / DESCRIPTION).unlink(missing_ok=True)
        before = sum(part.end - part.first for part in done), sum(part.tokens for part in done)
        with (out / UNFINISHED).open("a") as journal:
            work = _Work(corpus, column, tokenizer, out, turns, skips_bad_rows)
            for part in _converted(work, missing, workers, before, progress):
                finished[_of_source(part)] = part
                journal.write(_lines(part._asdict()))
                journal.flush()
        about = replace(about, parts=tuple(finished[part] for part in wanted))
        if turns is not None and not about.documents:
            raise DataError(
                "data.no_answers",
                "none of the {rows} conversations has text of the assistant, so no token counts in the loss. "
                'Give messages the role "assistant", or set data.train_on: all.',
                rows=about.empty,
            )
        _finish(out, about)
        return about


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    """Create a folder, and explain errors of writing to it. Errors of reading the source are no OSErrors."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(
            "data.tokens_not_written",
            "{folder} cannot hold the tokens: {reason}. Choose another folder, or repair this one and try again: "
            "finished parts are kept.",
            folder=out.absolute(),
            reason=os.strerror(error.errno) if error.errno else error,
        ) from error


@contextmanager
def _alone(out: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder, and remove unfinished files of killed processes."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                "data.tokens_in_use",
                "another process writes to {folder}. Wait until it has finished, or choose another folder.",
                folder=out.absolute(),
            ) from None
        for file in out.glob(".*.arrow.*"):
            file.unlink(missing_ok=True)
        yield


def _finished(out: Path, about: TokensAbout, tokenizer: Tokenizer) -> list[Part]:
    """Return the parts that earlier calls have written."""
    if (out / DESCRIPTION).exists():
        found = read_about(out)
    elif (out / UNFINISHED).exists():
        found = _journal(out / UNFINISHED)
    elif others := sorted(file.name for file in out.iterdir() if not file.name.startswith(".")):
        raise DataError(
            "data.folder_of_others",
            "{folder} holds other files, such as {file}. Write the tokens to a new folder.",
            folder=out.absolute(),
            file=others[0],
        )
    else:
        return []
    if not found.parts:  # for example, after a first start with a wrong column
        return []
    found.must_be_of(tokenizer, out.absolute())
    if found.column != about.column:
        raise DataError(
            "data.other_column",
            "{folder} was made from the column {made_from}, not {column}. Write the tokens to a new folder.",
            folder=out.absolute(),
            made_from=found.column,
            column=about.column,
        )
    return [part for part in found.parts if (out / part.name).exists()]


def _journal(file: Path) -> TokensAbout:
    lines = []
    for line in file.read_text().splitlines():
        with suppress(ValueError):  # a crash may have cut the last line
            lines.append(json.loads(line))
    about, *parts = lines or [{}]
    return TokensAbout.from_json(json.dumps(about | {"parts": parts}).encode(), file)


def _lines(*values: Mapping[str, Any]) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


def _finish(out: Path, about: TokensAbout) -> None:
    """Write the lengths of all documents and the description, and delete files of earlier sources."""
    if not about.documents:
        raise DataError(
            "data.no_text",
            'all {rows} rows of column "{column}" are empty. Name the column of the text with --column.',
            rows=about.empty,
            column=about.column,
        )
    kept = {part.name for part in about.parts}
    for file in out.glob("*.arrow"):
        if file.name not in kept:
            file.unlink()
    unfinished = out / f".{LENGTHS}"
    lengths = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint32, shape=(about.documents,))
    at = 0
    for part in about.parts:
        lengths[at : at + part.documents] = document_lengths(out / part.name)
        at += part.documents
    lengths.flush()
    del lengths
    unfinished.rename(out / LENGTHS)
    write_whole(out / DESCRIPTION, about.as_json(), durable=True)
    (out / UNFINISHED).unlink(missing_ok=True)


def _parts(corpus: Corpus) -> dict[Part, int]:
    """Divide the source files into parts.

    The division depends only on the files.

    Returns:
        The number in the corpus of each part's first row.
    """
    names = [shard.name for shard in corpus.shards]
    # commonpath would change the // of a URL
    folder = os.path.commonprefix(names).rpartition("/")[0] + "/"  # noqa: RUF071
    found: dict[Part, int] = {}
    for shard, start in zip(corpus.shards, corpus.starts.tolist(), strict=False):
        below = shard.name.removeprefix(folder)
        name = _flat(below)
        part_bytes = min(max(shard.size // _PARTS, _PART_BYTES[0]), _PART_BYTES[1])
        count = max(1, min(shard.rows, -(-shard.size // part_bytes)))
        bounds = [shard.rows * nth // count for nth in range(count + 1)]
        for nth in range(count if shard.rows else 0):
            part = Part(
                f"{name}-{nth:05d}.arrow", 0, 0, 0, below, shard.size, shard.digest, bounds[nth], bounds[nth + 1]
            )
            found[part] = start + part.first
    return found


def _flat(path: str) -> str:
    """Return a file name for a path; different paths have different names."""
    name = path.replace("~", "~~").replace("+", "~-").replace("/", "+")
    if len(os.fsencode(name)) > _NAME_BYTES:
        return hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()
    return name


def _of_source(part: Part) -> Part:
    """Return a part without its results, to compare it with unconverted parts."""
    return part._replace(documents=0, tokens=0, empty=0)


@dataclass(frozen=True)
class _Work:
    """Arguments that worker processes inherit by fork, without a copy of the index."""

    corpus: Corpus
    column: str
    tokenizer: Tokenizer
    out: Path
    turns: Callable[[Mapping[str, Any], Where], tuple[Tokens, Trained]] | None
    skips_bad_rows: bool

    def convert(self, part: Part, first_row: int, count: Callable[[int, int], None]) -> Part:
        """Write the file of a part; `first_row` is the part's first row in the corpus."""

        def documents() -> Iterator[tuple[Tokens, Trained | None]]:
            for row in range(first_row, first_row + part.end - part.first):
                try:
                    found, trained = self._tokens(row)
                except (Damaged, DataError):
                    if not self.skips_bad_rows:
                        raise
                    count(1, 0)
                    continue
                # an end token alone is no document
                is_empty = len(found) == 1 if trained is None else not trained[1:].any()
                count(1, 0 if is_empty else len(found))
                if not is_empty:
                    yield found, trained

        written, tokens = write_documents(self.out / part.name, documents(), marked=self.turns is not None)
        return part._replace(documents=written, tokens=tokens, empty=part.end - part.first - written)

    def _tokens(self, row: int) -> tuple[Tokens, Trained | None]:
        where = Where(self.corpus, row)
        if self.turns is not None:
            return self.turns(self.corpus.row(row), where)
        return self.tokenizer.encode(text_of(self.corpus.row(row), self.column, where)), None


def text_of(row: Mapping[str, Any], column: str, where: Where) -> str:
    """Return the text of a row; empty if the value is missing.

    Raises:
        DataError: the row has no such column, or the column holds no text.
    """
    text = value_of(row, column, where)
    if text is not None and not isinstance(text, str):
        raise DataError(
            "data.column_without_text",
            "{where}: column {name} holds a value of type {kind} instead of text. Name another column with {option}.",
            where=where,
            name=column,
            kind=type(text).__name__,
            option="data.column, or --column",
        )
    return text or ""


def _converted(
    work: _Work,
    parts: Mapping[Part, int],
    workers: int | None,
    before: tuple[int, int],
    progress: Callable[[int, int], None],
) -> Iterator[Part]:
    """Convert parts in worker processes, and yield each part when it is complete."""
    if not parts:
        return
    context = multiprocessing.get_context("fork")
    counts = context.Array("q", 2)
    processes = min(workers or os.cpu_count() or 1, len(parts))
    pool = ProcessPoolExecutor(processes, context, _begin, (work, counts, os.getpid()))
    try:
        waiting = {pool.submit(_convert, part, first) for part, first in parts.items()}
        while waiting:
            done, waiting = futures.wait(waiting, _POLL_S, futures.FIRST_COMPLETED)
            now: Any = counts.get_obj()
            progress(before[0] + now[0], before[1] + now[1])
            yield from (each.result() for each in done)
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.terminate()  # finishing a part would take long; the next start deletes the unfinished file
        if isinstance(error, BrokenProcessPool):
            raise DataError(
                "data.tokenize_killed",
                "a process that converts text was killed. If the memory was full, use fewer processes (--workers). "
                "Run the command again: finished parts are kept.",
            ) from error
        if isinstance(error, Damaged):
            raise DataError(
                "data.source_damaged",
                "{shard}: {reason}. Repair or remove the file.",
                shard=error.shard if error.row is None else f"{error.shard}, row {error.row}",
                reason=error.reason,
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_work: _Work
_counts: Any


def _begin(work: _Work, counts: Any, parent: int) -> None:
    global _work, _counts
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process as well; the parent ends it
    _work = replace(work, corpus=work.corpus.apart())
    _counts = counts


def _convert(part: Part, first_row: int) -> Part:
    def count(rows: int, tokens: int) -> None:
        with _counts.get_lock():
            _counts.get_obj()[0] += rows
            _counts.get_obj()[1] += tokens

    return _work.convert(part, first_row, count)
