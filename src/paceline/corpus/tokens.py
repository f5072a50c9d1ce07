"""Folders of tokens: documents that were converted to tokens once, for all later runs.

A folder has Arrow files with one column `tokens` (int32) and one row per document, their lengths in `lengths.npy`, and
a description in `tokens.json`.
"""

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
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from paceline.corpus.rows import Damaged
from paceline.corpus.shards import Corpus, Where
from paceline.corpus.tokenizer import Tokenizer, Tokens
from paceline.errors import DataError
from paceline.extensions import optional_package
from paceline.files import write_whole
from paceline.text import nearest

DESCRIPTION, LENGTHS = "tokens.json", "lengths.npy"
COLUMN = "tokens"
Lengths = NDArray[np.uint32]

_LAYOUT = 1
_UNFINISHED = "unfinished.jsonl"  # parts that were written since the last tokens.json
_PART_BYTES = (4 << 20, 64 << 20)  # smallest and largest part of a source file, before a split by rows
_PARTS = 16  # number of parts per source file within these limits, so that all processes have work
_BATCH_TOKENS = 1 << 20  # tokens of a record batch, which a process holds in memory
_NAME_BYTES = 200  # longest name of a part; file systems allow 255 bytes, with the additions of unfinished files
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1  # option of prctl


class Part(NamedTuple):
    """One file of a folder of tokens, which holds some rows of a source file.

    Attributes:
        name: name of the Arrow file.
        documents: number of documents, without the empty ones.
        tokens: number of tokens.
        empty: number of rows without text, which were left out.
        source: name of the source file below the folder of all source files.
        size: bytes of the source file.
        digest: hash of the source file; see `Shard`.
        first: first row of the source file.
        end: row after the last one.
    """

    name: str
    documents: int
    tokens: int
    empty: int
    source: str
    size: int
    digest: str
    first: int
    end: int


@dataclass(frozen=True)
class TokensAbout:
    """Description of a folder of tokens, the content of `tokens.json`.

    Attributes:
        tokenizer: path of the tokenizer that was used.
        tokenizer_sha256: see `Tokenizer`.
        vocab_size: see `Tokenizer`.
        end_token_id: token at the end of each document.
        pad_token_id: see `Tokenizer`.
        mask_token_id: see `Tokenizer`.
        column: column of the source that holds the text.
        parts: the files in the order of the source.
    """

    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_token_id: int
    pad_token_id: int
    mask_token_id: int | None
    column: str
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, column: str) -> Self:
        """Describe a folder that holds no tokens yet."""
        t = tokenizer
        ids = t.vocab_size, t.end_token_id, t.pad_token_id, t.mask_token_id
        return cls(str(t.path.absolute()), t.sha256, *ids, column)

    @classmethod
    def from_json(cls, content: bytes, place: object) -> Self:
        """Parse the content of `tokens.json`.

        Raises:
            DataError: the content is invalid; the error names `place`.
        """
        try:
            values = json.loads(content)
            if values.pop("layout") != _LAYOUT:
                raise ValueError("another version of paceline wrote this folder")
            values["parts"] = tuple(Part(**part) for part in values["parts"])
            return cls(
                **{name: value for name, value in values.items() if name not in ("documents", "tokens", "empty")}
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                "data.description_invalid", "{file} is invalid: {reason}", file=place, reason=error
            ) from error

    def as_json(self) -> str:
        """Return the content of `tokens.json`."""
        whole = {"documents": self.documents, "tokens": self.tokens, "empty": self.empty}
        parts = {"parts": [part._asdict() for part in self.parts]}
        return json.dumps({"layout": _LAYOUT, **asdict(self), **whole, **parts}, indent=1)

    @property
    def documents(self) -> int:
        """Number of documents in all files."""
        return sum(part.documents for part in self.parts)

    @property
    def tokens(self) -> int:
        """Number of tokens in all files."""
        return sum(part.tokens for part in self.parts)

    @property
    def empty(self) -> int:
        """Number of rows without text, which were left out."""
        return sum(part.empty for part in self.parts)

    def must_be_of(self, tokenizer: Tokenizer, place: object) -> None:
        """Verify that a tokenizer is the one that made the folder; errors name `place`.

        Raises:
            DataError: the tokenizers differ.
        """
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise DataError(
                "data.other_tokenizer",
                "{folder} was made with the tokenizer {made_with}, which differs from {tokenizer}. Use the same "
                "tokenizer, or write the tokens to a new folder.",
                folder=place,
                made_with=self.tokenizer,
                tokenizer=tokenizer.path.absolute(),
            )


def tokenize(
    corpus: Corpus,
    column: str,
    tokenizer: Tokenizer,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    wait: bool = False,
) -> TokensAbout:
    """Convert the documents of a corpus to tokens, and write them to a folder.

    Worker processes convert the source files in parts of about 64 MiB at most. Finished parts are kept if the process
    ends early. A later call converts only missing parts, and parts of source files that are new or have changed.

    Args:
        column: column with the text of a document.
        workers: number of processes; by default, the number of cores.
        progress: function that receives the number of rows and tokens so far, several times per second.
        wait: True to wait while another process writes to the folder, False to raise an error.

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
        write_whole(out / _UNFINISHED, _lines({"layout": _LAYOUT, **asdict(about)}, *(part._asdict() for part in done)))
        (out / DESCRIPTION).unlink(missing_ok=True)
        before = sum(part.end - part.first for part in done), sum(part.tokens for part in done)
        with (out / _UNFINISHED).open("a") as journal:
            for part in _converted(_Work(corpus, column, tokenizer, out), missing, workers, before, progress):
                finished[_of_source(part)] = part
                journal.write(_lines(part._asdict()))
                journal.flush()
        about = replace(about, parts=tuple(finished[part] for part in wanted))
        _finish(out, about)
        return about


def read_about(folder: Path) -> TokensAbout:
    """Read the description of a local folder of tokens.

    Raises:
        DataError: the folder is unfinished, or its description is invalid.
    """
    try:
        return TokensAbout.from_json((folder / DESCRIPTION).read_bytes(), folder / DESCRIPTION)
    except OSError as error:
        if (folder / _UNFINISHED).exists():
            raise DataError(
                "data.tokens_unfinished",
                "{folder} is unfinished. Run `paceline data tokenize` again with the same arguments.",
                folder=folder.absolute(),
            ) from error
        raise DataError(
            "data.unreadable",
            "{place}: {reason}. Expected: {expected}",
            place=(folder / DESCRIPTION).absolute(),
            reason=error.strerror or error,
            expected="a folder that `paceline data tokenize` wrote",
        ) from error


def is_folder_of_tokens(folder: Path) -> bool:
    """Return True if a folder holds finished or unfinished tokens."""
    return (folder / DESCRIPTION).exists() or (folder / _UNFINISHED).exists()


def write_documents(file: Path, documents: Iterator[Tokens]) -> tuple[int, int]:
    """Write documents to a new Arrow file, which appears only when it is complete.

    About a million tokens are held in memory, plus at most one document.

    Returns:
        Number of documents and of tokens.
    """
    pa = optional_package("pyarrow", "pyarrow")
    schema = pa.schema([(COLUMN, pa.list_(pa.int32()))])
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    written, tokens = 0, 0
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in _batches(documents):
                offsets = np.cumsum([0, *map(len, batch)], dtype=np.int32)
                values = pa.array(np.concatenate(batch), pa.int32())
                writer.write(pa.record_batch([pa.ListArray.from_arrays(pa.array(offsets), values)], schema=schema))
                written, tokens = written + len(batch), tokens + int(offsets[-1])
        unfinished.rename(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return written, tokens


def document_lengths(file: Path) -> Lengths:
    """Return the number of tokens of each document of an Arrow file."""
    pa = optional_package("pyarrow", "pyarrow")
    with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
        batches = [reader.get_batch(n).column(0) for n in range(reader.num_record_batches)]
        return np.concatenate(
            [np.zeros(0, np.uint32), *(np.diff(batch.offsets.to_numpy()).astype(np.uint32) for batch in batches)]
        )


def _batches(documents: Iterator[Tokens]) -> Iterator[list[Tokens]]:
    batch: list[Tokens] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document)
        if held >= _BATCH_TOKENS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


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
    elif (out / _UNFINISHED).exists():
        found = _journal(out / _UNFINISHED)
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
    (out / _UNFINISHED).unlink(missing_ok=True)


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

    def convert(self, part: Part, first_row: int, count: Callable[[int, int], None]) -> Part:
        """Write the file of a part; `first_row` is the part's first row in the corpus."""

        def documents() -> Iterator[Tokens]:
            for row in range(first_row, first_row + part.end - part.first):
                text = text_of(self.corpus.row(row), self.column, Where(self.corpus, row))
                found = self.tokenizer.encode(text)
                is_empty = len(found) == 1  # an end token alone is no document
                count(1, 0 if is_empty else len(found))
                if not is_empty:
                    yield found

        written, tokens = write_documents(self.out / part.name, documents())
        return part._replace(documents=written, tokens=tokens, empty=part.end - part.first - written)


def text_of(row: Mapping[str, Any], column: str, where: Where) -> str:
    """Return the text of a row; empty if the value is missing.

    Raises:
        DataError: the row has no such column, or the column holds no text.
    """
    if column not in row:
        raise DataError(
            "data.row_without_column",
            "{where}: this row has no column {name}. {hint}",
            where=where,
            name=column,
            hint=nearest(column, sorted(row)),
        )
    text = row[column]
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
