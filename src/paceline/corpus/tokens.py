"""Folders of tokens: documents that were converted to tokens once, for all later runs.

A folder has Arrow files with a column `tokens` (int32) and one row per document, their lengths in `lengths.npy`, and a
description in `tokens.json`. Conversations have a second column `trained`, which is 1 for the tokens that a model
learns to write, and otherwise 0. `conversion.py` creates such folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from paceline.corpus.tokenizer import Tokenizer, Tokens
from paceline.errors import DataError
from paceline.extensions import optional_package

DESCRIPTION, LENGTHS = "tokens.json", "lengths.npy"
UNFINISHED = "unfinished.jsonl"  # parts that were written since the last tokens.json
COLUMN, TRAINED = "tokens", "trained"
LAYOUT = 1
Lengths = NDArray[np.uint32]
Trained = NDArray[np.bool_]

_BATCH_TOKENS = 1 << 20  # tokens of a record batch, which a process holds in memory


class Part(NamedTuple):
    """One file of a folder of tokens, which holds some rows of a source file.

    Attributes:
        name: name of the Arrow file.
        documents: number of documents, without the empty ones.
        tokens: number of tokens.
        empty: number of rows that were left out, because they have no text or cannot be read.
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
            if values.pop("layout") != LAYOUT:
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
        return json.dumps({"layout": LAYOUT, **asdict(self), **whole, **parts}, indent=1)

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


def read_about(folder: Path) -> TokensAbout:
    """Read the description of a local folder of tokens.

    Raises:
        DataError: the folder is unfinished, or its description is invalid.
    """
    try:
        return TokensAbout.from_json((folder / DESCRIPTION).read_bytes(), folder / DESCRIPTION)
    except OSError as error:
        if (folder / UNFINISHED).exists():
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
    return (folder / DESCRIPTION).exists() or (folder / UNFINISHED).exists()


def write_documents(
    file: Path, documents: Iterator[tuple[Tokens, Trained | None]], *, marked: bool = False
) -> tuple[int, int]:
    """Write documents to a new Arrow file, which appears only when it is complete.

    About a million tokens are held in memory, plus at most one document.

    Args:
        documents: tokens of each document, and which of them are trained; None without `marked`.
        marked: True to write the column `trained`.

    Returns:
        Number of documents and of tokens.
    """
    pa = optional_package("pyarrow", "pyarrow")
    columns = [(COLUMN, pa.list_(pa.int32())), (TRAINED, pa.list_(pa.uint8()))]
    schema = pa.schema(columns if marked else columns[:1])
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    written, tokens = 0, 0
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in _batches(documents):
                offsets = pa.array(np.cumsum([0, *(len(found) for found, _ in batch)], dtype=np.int32))
                arrays = [pa.array(np.concatenate([found for found, _ in batch]), pa.int32())]
                if marked:
                    arrays.append(pa.array(np.concatenate([own for _, own in batch if own is not None]).view(np.uint8)))
                lists = [pa.ListArray.from_arrays(offsets, values) for values in arrays]
                writer.write(pa.record_batch(lists, schema=schema))
                written, tokens = written + len(batch), tokens + len(arrays[0])
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


def _batches(documents: Iterator[tuple[Tokens, Trained | None]]) -> Iterator[list[tuple[Tokens, Trained | None]]]:
    batch: list[tuple[Tokens, Trained | None]] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document[0])
        if held >= _BATCH_TOKENS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
