"""Lines of text as samples of classify.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

BASE = Path(__file__).parent / "small" / "base"
PAD, TOKENS = 1, 64  # the model reads the last token that is not padding


def sample(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tokens of a line, padded to one length, and its class."""
    ids = tokenizer().encode(row["text"]).ids[:TOKENS]
    return {"input_ids": torch.tensor(ids + [PAD] * (TOKENS - len(ids))), "labels": torch.tensor(row["label"])}


@cache
def tokenizer() -> Tokenizer:
    """Read the tokenizer once per process."""
    return Tokenizer.from_file(str(BASE / "tokenizer.json"))
