"""Conversion of text to tokens and back with a Hugging Face tokenizer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

Tokens = NDArray[np.int32]

_MODEL = "tokenizer.json"
# later files override earlier ones, as in transformers
_NAMES = ("special_tokens_map.json", "tokenizer_config.json")
# end tokens to try if the tokenizer's folder names none
_WELL_KNOWN_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
_EXPECTED = "a tokenizer.json, or a folder that contains one"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the library `tokenizers`, with the ids that training needs.

    Create one with `load`. A tokenizer can be pickled and sent to other processes.

    Attributes:
        path: the file `tokenizer.json`.
        vocab_size: largest token id, including added tokens, plus 1.
        end_token_id: token at the end of each document.
        pad_token_id: token for unused positions; the end token if the tokenizer has no padding token.
        mask_token_id: token that replaces hidden tokens; None if the tokenizer has no mask token.
        sha256: hash of the tokenizer and of the ids above.
    """

    path: Path
    vocab_size: int
    end_token_id: int
    pad_token_id: int
    mask_token_id: int | None
    sha256: str
    _model: Any = field(repr=False, compare=False)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load a `tokenizer.json`, or a folder in Hugging Face's layout.

        The files `tokenizer_config.json` and `special_tokens_map.json` in the same folder name the special tokens. The
        end token is `eos_token`, or else `sep_token`. If neither file names one, a well-known token such as
        `<|endoftext|>` is used.

        Raises:
            DataError: the file is missing or not a tokenizer, it has no end token, or the package is not installed.
        """
        file = path / _MODEL if path.is_dir() else path
        content = _content(file, path)
        model = _model(file, content)
        # A file may enable truncation and padding for one model. Here, documents are cut and padded to the context.
        model.no_truncation()
        model.no_padding()
        named = special_tokens(file.parent)
        ids = model.get_vocab(with_added_tokens=True)
        end = _id(file, ids, named, "eos_token", "sep_token")
        if end is None:
            end = next((ids[token] for token in _WELL_KNOWN_ENDS if token in ids), None)
        if end is None:
            raise DataError(
                "data.no_end_token",
                '{file}: the tokenizer has no token for the end of a document. Add the key "eos_token" to {config}, '
                "with a token of the vocabulary.",
                file=file.absolute(),
                config=file.parent.absolute() / _NAMES[-1],
            )
        pad, mask = _id(file, ids, named, "pad_token"), _id(file, ids, named, "mask_token")
        if mask is None:
            mask = next((ids[token] for token in ("[MASK]", "<mask>") if token in ids), None)
        digest = hashlib.sha256(content + f"\n{end} {pad} {mask}".encode()).hexdigest()
        return cls(file, 1 + max(ids.values()), end, end if pad is None else pad, mask, digest, model)

    def encode(self, text: str, *, end: bool = True) -> Tokens:
        """Convert a document to tokens, int32, shape (tokens,); see `ids`."""
        return np.array(self.ids(text, end=end), dtype=np.int32)

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        """Convert a document to token ids, and append the end token if `end`.

        The tokenizer's own template, such as `[CLS] … [SEP]`, is not applied. Special tokens that are spelled out in
        the text become these tokens. An unpaired surrogate becomes U+FFFD.

        Raises:
            DataError: the tokenizer has no token for a part of the text, and no token for unknown text.
        """
        valid = text if text.isascii() else _without_surrogates(text)
        try:
            # This call computes no offsets into the text, and starts no threads for a single text.
            found: list[int] = self._model.encode_batch_fast([valid], add_special_tokens=False)[0].ids
        except Exception as error:  # the library raises plain exceptions
            raise DataError(
                "data.text_not_encoded",
                "{file}: the tokenizer cannot convert a text that starts with {start}: {error}. Add a token for "
                "unknown text to the tokenizer.",
                file=self.path.absolute(),
                start=repr(text[:40]),
                error=error,
            ) from error
        if end:
            found.append(self.end_token_id)
        return found

    def with_specials(self, text: str) -> list[int]:
        """Convert a text to token ids, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._model.encode_batch_fast([_without_surrogates(text)])[0].ids
        return ids

    def with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Convert a text to token ids, and return where each token begins and ends."""
        found = self._model.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def is_added(self, token: int) -> bool:
        """Return True for a token that ordinary text never contains, such as an end token."""
        return token in self._added

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset({*self._model.get_added_tokens_decoder(), self.end_token_id})

    def decode(self, tokens: Iterable[int]) -> str:
        """Convert tokens to text; special tokens stay visible."""
        text: str = self._model.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def token(self, number: int) -> str:
        """Return the text of a token id; empty if the vocabulary has no such id."""
        return self._model.id_to_token(number) or ""


def _content(file: Path, given: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            "data.tokenizer_unreadable",
            "{file}: {reason}. Expected: {expected}. To convert a folder that holds a tokenizer in another format, run "
            'AutoTokenizer.from_pretrained("{given}").save_pretrained("{given}").',
            file=file.absolute(),
            reason=error.strerror or error,
            expected=_EXPECTED,
            given=given,
        ) from error


def _model(file: Path, content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as Model
    except ImportError as error:
        raise DataError(
            "data.package_missing",
            "this data needs {package}, which cannot be imported ({error}). Run: pip install 'paceline[{extra}]'",
            package="tokenizers",
            extra="data",
            error=error,
        ) from error
    try:
        return Model.from_buffer(content)
    except Exception as error:  # the library raises plain exceptions
        raise DataError(
            "data.not_a_tokenizer",
            "{file}: this file is not a tokenizer: {error}. Expected: {expected}",
            file=file.absolute(),
            error=error,
            expected=_EXPECTED,
        ) from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the names of special tokens, such as `eos_token`, from the files of a folder."""
    found: dict[str, str] = {}
    for name in _NAMES:
        try:
            values = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise DataError(
                "data.tokenizer_config_invalid",
                "{file}: {error}. The file must be a JSON object that names the special tokens.",
                file=(folder / name).absolute(),
                error=error,
            ) from error
        for key, value in values.items() if isinstance(values, Mapping) else ():
            text = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _id(file: Path, ids: Mapping[str, int], named: Mapping[str, str], *keys: str) -> int | None:
    """Return the id of the token that the first known key names, or None."""
    for key in keys:
        if key not in named:
            continue
        if named[key] in ids:
            return ids[named[key]]
        raise DataError(
            "data.special_token_unknown",
            '{folder}: "{key}" is {token}, which is not in the vocabulary of {file}. Name a token of the vocabulary.',
            folder=file.parent.absolute(),
            key=key,
            token=named[key],
            file=file.name,
        )
    return None


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
