"""Tokens of samples as text: documents, labels that count, padding, and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.job.loss_items import IGNORED
from paceline.units import count, percent

_MOST_TOKENS = 8192  # tokens of a sample that are turned into text
_NEARLY_ALL = 0.98  # share of the labels from which on a relation counts as found
_BINS = 12
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Adjacent tokens of a sample that belong together.

    Attributes:
        text: the tokens as text.
        document: number of the document in the sample, from 1.
        counted: True if the loss counts these tokens as labels.
    """

    text: str
    document: int
    counted: bool


@dataclass(frozen=True)
class Reading:
    """The tokens of one sample as text.

    Attributes:
        stretches: the text without padding, at most `_MOST_TOKENS` tokens.
        tokens, padding: numbers of positions with and without a token.
        documents: lengths of the documents in tokens; empty if the batch has no `position_ids`.
        counted: number of tokens whose label counts; None if tokens have no labels of their own.
        target: the labels as text if they are another sequence than the input; otherwise empty.
    """

    stretches: list[Stretch]
    tokens: int
    padding: int
    documents: list[int]
    counted: int | None
    target: str = ""

    @property
    def facts(self) -> list[str]:
        """Numbers of tokens, documents and labels in words."""
        found = [count(self.tokens, "token")]
        if self.padding:
            found.append(f"{self.padding:,} of padding")
        if self.documents:
            found.append(count(len(self.documents), "document"))
        if self.counted is not None and self.counted != self.tokens:
            found.append(f"{self.counted:,} labels count" if self.counted != 1 else "1 label counts")
        return found

    @property
    def text(self) -> str:
        """The text of all stretches."""
        return "".join(stretch.text for stretch in self.stretches)

    @property
    def is_masked(self) -> bool:
        """True if some labels do not count."""
        return any(not stretch.counted for stretch in self.stretches)


@dataclass
class TokenCounts:
    """Counts of the tokens of a set.

    Attributes:
        positions, padding: numbers of all positions, and of those without a token.
        labels: number of tokens that have a label of their own.
        counted: number of these labels that the loss counts.
        without_target: number of samples in which no label counts.
        lengths, documents: numbers of tokens of each sample, and of each document in it.
    """

    positions: int = 0
    padding: int = 0
    labels: int = 0
    counted: int = 0
    without_target: int = 0
    _lengths: list[Lengths] = field(default_factory=list)
    _documents: list[Lengths] = field(default_factory=list)
    _next: int = 0  # labels that equal the next token, among `_with_next` that have one
    _with_next: int = 0
    _same: int = 0

    @property
    def lengths(self) -> Lengths:
        """Number of tokens of each sample."""
        return np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)

    @property
    def documents(self) -> Lengths:
        """Number of tokens of each document; empty if the batches have no `position_ids`."""
        return np.concatenate(self._documents) if self._documents else np.zeros(0, np.int64)

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token."""
        return self.padding / self.positions if self.positions else 0.0

    @property
    def uncounted_share(self) -> float:
        """Share of the tokens whose label does not count."""
        return 1 - self.counted / self.labels if self.labels else 0.0

    @property
    def relation(self) -> str:
        """Description of the labels: the next token, the input itself, or neither."""
        if not self.counted:
            return ""
        if self._with_next and self._next >= _NEARLY_ALL * self._with_next:
            return "the next token (shifted already)"
        if self._same >= _NEARLY_ALL * self.counted:
            return "the input itself (the model has to shift it)"
        return "neither the input nor the next token, as for hidden tokens"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Pairs of name and text: lengths, padding and labels."""
        found = [("length", _spread(self.lengths))]
        if len(documents := self.documents):
            found.append(("documents", f"{len(documents):,}, of {_spread(documents)}"))
        found.append(("padding", f"{percent(self.padding_share)} of the positions" if self.padding else "none"))
        if self.labels:
            share = f"{percent(self.uncounted_share)} of the tokens do not count (-100)"
            share = share if self.counted < self.labels else "all of them count"
            found.append(("labels", f"{self.relation}; {share}" if self.relation else share))
        return found

    def add(self, columns: Mapping[str, Any], tokenizer: Any) -> None:
        """Include a batch; a batch without tokens changes nothing."""
        found = _tokens_of(columns, tokenizer)
        if found is None:
            return
        real = ~found.padding
        self.positions += real.numel()
        self.padding += int(found.padding.sum())
        self._lengths.append(real.sum(1).numpy())
        if found.starts is not None:
            self._documents += [_document_lengths(starts, own) for starts, own in zip(found.starts, real, strict=True)]
        if found.labels is None:
            return
        counted = found.labels != IGNORED
        self.labels += int(real.sum())
        self.counted += int(counted.sum())
        self.without_target += int((~counted.any(1)).sum())
        self._same += int((counted & (found.labels == found.ids)).sum())
        self._with_next += int(counted[:, :-1].sum())
        self._next += int((counted[:, :-1] & (found.labels[:, :-1] == found.ids[:, 1:])).sum())


def read_tokens(columns: Mapping[str, Any], row: int, tokenizer: Any) -> Reading | None:
    """Return the tokens of one sample as text; None if the batch has none."""
    found = _tokens_of({name: c[row : row + 1] for name, c in columns.items() if isinstance(c, Tensor)}, tokenizer)
    if found is None:
        return None
    ids, real = found.ids[0], ~found.padding[0]
    counted = torch.ones_like(real) if found.labels is None else found.labels[0] != IGNORED
    starts = torch.zeros_like(real) if found.starts is None else found.starts[0] & real
    documents = [] if found.starts is None else _document_lengths(starts, real).tolist()
    shown = counted if found.labels is None else _learned(ids, found.labels[0], starts)
    stretches = list(_stretches(ids, real, shown, starts, tokenizer))
    how_many = None if found.labels is None else int((counted & real).sum())
    target = ""
    if found.labels is None and (apart := _other_labels(columns, row)) is not None:
        target = _decoded(apart[apart != IGNORED][:_MOST_TOKENS].tolist(), tokenizer)
    return Reading(stretches, int(real.sum()), int((~real).sum()), documents, how_many, target)


def _learned(ids: Tensor, labels: Tensor, starts: Tensor) -> Tensor:
    """Return a mask of the tokens that are labels.

    If labels are not the next tokens, the mask shows the positions of the labels.
    """
    counted = labels != IGNORED
    follows = labels[:-1] == ids[1:]
    if not counted[:-1].any() or (follows & counted[:-1]).sum() < _NEARLY_ALL * counted[:-1].sum():
        return counted
    learned = torch.cat([counted[:1], counted[:-1]])
    # the first token of a document is never a label, so it is shown like the second one
    first = starts.clone()
    first[0] = True
    following = torch.cat([learned[1:], learned[-1:]])
    return torch.where(first, following, learned)


def _spread(lengths: Lengths) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    return f"{low:,} tokens each" if low == high else f"{low:,} to {high:,} tokens, median {np.median(lengths):,.0f}"


class Bin(NamedTuple):
    """Bar of a histogram: the number of lengths from `first` to `last`."""

    first: int
    last: int
    number: int

    @property
    def title(self) -> str:
        """The lengths in words."""
        return f"{self.first:,}–{self.last:,}" if self.first != self.last else f"{self.first:,}"


def histogram(lengths: Lengths) -> list[Bin]:
    """Count lengths in at most 12 ranges of equal width; empty if all are equal."""
    if not len(lengths) or lengths.min() == lengths.max():
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BINS)
    counts = np.bincount((lengths - low) // width)
    return [
        Bin(low + i * width, min(low + (i + 1) * width - 1, high), count) for i, count in enumerate(counts.tolist())
    ]


class _Tokens(NamedTuple):
    """Token ids of a batch and properties of each position, all of shape (samples, length).

    Attributes:
        ids: token ids.
        padding: True at positions that hold no token.
        labels: label of each token; None if the labels are of another shape.
        starts: True at the first token of each document; None if unknown.
    """

    ids: Tensor
    padding: Tensor
    labels: Tensor | None
    starts: Tensor | None


def _tokens_of(columns: Mapping[str, Any], tokenizer: Any) -> _Tokens | None:
    name = "input_ids" if "input_ids" in columns else next(iter(columns), "")
    ids = columns.get(name)
    if not _are_integers(ids) or ids.dim() != 2:
        return None
    given = columns.get("labels", columns.get("target"))
    labels = given if _are_integers(given) and given.shape == ids.shape else None
    positions = columns.get("position_ids")
    starts = positions == 0 if isinstance(positions, Tensor) and positions.shape == ids.shape else None
    return _Tokens(ids, _padding(columns, ids, labels, tokenizer), labels, starts)


def _are_integers(column: Any) -> TypeGuard[Tensor]:
    return isinstance(column, Tensor) and column.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)


def _other_labels(columns: Mapping[str, Any], row: int) -> Tensor | None:
    """Return the labels of a sample that are tokens of another sequence, as for translation."""
    labels = columns.get("labels")
    return labels[row] if _are_integers(labels) and labels.dim() == 2 else None


def _padding(columns: Mapping[str, Any], ids: Tensor, labels: Tensor | None, tokenizer: Any) -> Tensor:
    """Return a mask of the positions that hold no token."""
    mask = columns.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask == 0
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    fill = ids == pad if labels is None else (ids == pad) & (labels == IGNORED)
    # only positions after which the rest of the row is padding, too
    trailing: Tensor = fill.flip(1).int().cumprod(1).flip(1).bool()
    if pad == getattr(tokenizer, "end_token_id", None):
        # the first of these positions is the end token of the last document
        first = trailing & ~torch.nn.functional.pad(trailing, (1, 0))[:, :-1]
        trailing &= ~first
    return trailing


def _document_lengths(starts: Tensor, real: Tensor) -> Lengths:
    """Return the lengths of the documents of one row."""
    firsts = (starts & real).nonzero().flatten().tolist()
    return np.array([int(real[a:b].sum()) for a, b in pairwise([*firsts, len(real)])], np.int64)


def _stretches(ids: Tensor, real: Tensor, counted: Tensor, starts: Tensor, tokenizer: Any) -> Iterator[Stretch]:
    """Split one row at the bounds of its documents, padding and counted labels."""
    ids, real, counted, starts = (column[:_MOST_TOKENS] for column in (ids, real, counted, starts))
    document = starts.int().cumsum(0)
    role = torch.stack([real.int(), counted.int(), document])
    changes = (role[:, 1:] != role[:, :-1]).any(0).nonzero().flatten() + 1
    for first, end in pairwise([0, *changes.tolist(), len(ids)]):
        if first < end and real[first]:
            text = _decoded(ids[first:end].tolist(), tokenizer)
            yield Stretch(text, max(1, int(document[first])), bool(counted[first]))


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    if not hasattr(tokenizer, "decode"):
        return " ".join(map(str, ids)) + " " if ids else ""
    return str(tokenizer.decode(ids))
