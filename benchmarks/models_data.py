"""Small random data sets for `benchmarks/models.py`, in the forms that people give to models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

SAMPLES, VOCAB, CLASSES, TOKENS, FEATURES = 24, 48, 10, 16, 12
IGNORED = -100
Sample = tuple[Tensor, ...] | dict[str, Tensor]


def samples(kind: str, **options: Any) -> Dataset[Sample]:
    """A data set of one kind (a key of `KINDS`)."""
    draw = torch.Generator().manual_seed(5)
    return Samples(KINDS[kind](draw, **options))


class Samples(Dataset[Sample]):
    """Rows of equally long tensors: each sample a tuple, or a mapping where the tensors have names."""

    def __init__(self, columns: tuple[Tensor, ...] | dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        if isinstance(self.columns, dict):
            return {name: column[index] for name, column in self.columns.items()}
        return tuple(column[index] for column in self.columns)


def _tokens(draw: torch.Generator, length: int = TOKENS, low: int = 5) -> Tensor:
    return torch.randint(low, VOCAB, (SAMPLES, length), generator=draw)


def _classes(draw: torch.Generator, classes: int = CLASSES) -> Tensor:
    return torch.randint(classes, (SAMPLES,), generator=draw)


def _next_token(draw: torch.Generator, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    whole = _tokens(draw, tokens + 1)
    return whole[:, :-1], whole[:, 1:]


def _masked_token(draw: torch.Generator, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    whole = _tokens(draw, tokens)
    hidden = torch.rand(whole.shape, generator=draw) < 0.3
    hidden[:, 0] = True
    return whole.masked_fill(hidden, 4), whole.masked_fill(~hidden, IGNORED)


def _padded(draw: torch.Generator, tokens: int = TOKENS, left: bool = False) -> dict[str, Tensor]:
    """As tokenizers and collators of transformers make them.

    Padding that the mask leaves out and whose labels are ignored.
    """
    whole, lengths = _tokens(draw, tokens), torch.randint(tokens // 2, tokens + 1, (SAMPLES, 1), generator=draw)
    real = torch.arange(tokens) < lengths
    real = real.flip(1) if left else real
    return {"input_ids": whole * real, "attention_mask": real.long(), "labels": whole.masked_fill(~real, IGNORED)}


def _pairs(draw: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(draw), "labels": _tokens(draw, TOKENS // 2)}


def _source_and_target(draw: torch.Generator) -> tuple[Tensor, ...]:
    whole = _tokens(draw, TOKENS + 1)
    return _tokens(draw), whole[:, :-1], whole[:, 1:]


def _images(draw: torch.Generator, size: int = 16, channels: int = 3, classes: int = CLASSES) -> tuple[Tensor, ...]:
    return torch.randn(SAMPLES, channels, size, size, generator=draw), _classes(draw, classes)


def _named_images(draw: torch.Generator, size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(SAMPLES, 3, size, size, generator=draw), "labels": _classes(draw)}


def _restored_images(draw: torch.Generator, size: int = 16) -> tuple[Tensor, ...]:
    images = torch.randn(SAMPLES, 3, size, size, generator=draw)
    return images, images


def _vectors(draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(SAMPLES, FEATURES, generator=draw), _classes(draw)


def _two_vectors(draw: torch.Generator) -> tuple[Tensor, ...]:
    return *(torch.randn(SAMPLES, FEATURES, generator=draw) for _ in range(2)), _classes(draw)


def _table(draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(SAMPLES, FEATURES, generator=draw), _tokens(draw, 4, 0), _classes(draw)


def _labelled_text(draw: torch.Generator, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    return _tokens(draw, tokens), _classes(draw)


def _series(draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(SAMPLES, TOKENS, FEATURES, generator=draw), _classes(draw)


def _sound(draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(SAMPLES, 1600, generator=draw), _classes(draw)


def _spectrogram(draw: torch.Generator, bins: int = 16, frames: int = 32) -> tuple[Tensor, ...]:
    return torch.randn(SAMPLES, frames, bins, generator=draw), _classes(draw)


def _spoken(draw: torch.Generator, bins: int = 16, frames: int = 32) -> dict[str, Tensor]:
    return {"input_features": torch.randn(SAMPLES, bins, frames, generator=draw), "labels": _tokens(draw, TOKENS // 2)}


def _captioned(draw: torch.Generator, size: int = 16) -> dict[str, Tensor]:
    images = torch.randn(SAMPLES, 3, size, size, generator=draw)
    return {"input_ids": _tokens(draw), "pixel_values": images, "labels": torch.zeros(SAMPLES, dtype=torch.long)}


KINDS: dict[str, Callable[..., tuple[Tensor, ...] | dict[str, Tensor]]] = {
    "next_token": _next_token,
    "masked_token": _masked_token,
    "padded": _padded,
    "pairs": _pairs,
    "source_and_target": _source_and_target,
    "images": _images,
    "named_images": _named_images,
    "restored_images": _restored_images,
    "vectors": _vectors,
    "two_vectors": _two_vectors,
    "table": _table,
    "labelled_text": _labelled_text,
    "series": _series,
    "sound": _sound,
    "spectrogram": _spectrogram,
    "spoken": _spoken,
    "captioned": _captioned,
}
