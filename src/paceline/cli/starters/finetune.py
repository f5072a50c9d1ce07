"""Text as tokens of a Hugging Face tokenizer, for a causal language model."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Samples of `context` tokens, each with the tokens that follow.

    `path` is a text file (`.txt`, `.md`, `.rst`, `.py`), or a folder with such files.
    """

    def __init__(self, path: str, tokenizer: str, context: int) -> None:
        files = [Path(path)] if Path(path).is_file() else sorted(Path(path).rglob("*"))
        files = [file for file in files if file.suffix in (".txt", ".md", ".rst", ".py")]
        encode = Tokenizer.from_file(tokenizer).encode
        numbers = [number for file in files for number in encode(file.read_text(encoding="utf-8")).ids]
        samples = (len(numbers) - 1) // context
        if samples < 1:
            raise ValueError(f"{path} has {len(numbers)} tokens, fewer than one sample of {context} and the next token")
        self.tokens = torch.tensor(numbers[: samples * context + 1])
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        return self.tokens[start : start + self.context], self.tokens[start + 1 : start + self.context + 1]
