"""Data sets whose samples `paceline data show` has to show: packed, padded, translated, broken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

HERE = Path(__file__)
WORDS = ("<pad>", "</s>", "the", "cat", "sat", "\x1b[31mred", "<script>alert(1)</script>")


class Words:
    """Tokenizer of seven words, two of which are hostile."""

    pad_token_id, end_token_id = 0, 1

    def decode(self, ids: Iterable[int]) -> str:
        """The words, separated by spaces."""
        return " ".join(WORDS[i] for i in ids)


class Packed(Dataset[Any]):
    """Two documents of four and three tokens, and padding of two."""

    tokenizer = Words()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {
            "input_ids": torch.tensor([2, 3, 4, 1, 5, 6, 1, 0, 0]),
            "position_ids": torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 0]),
            "labels": torch.tensor([3, 4, 1, -100, 6, 1, -100, -100, -100]),
        }


class Answers(Packed):
    """Two documents, of which only the last tokens are learned."""

    def __getitem__(self, index: int) -> Any:
        labels = torch.tensor([-100, 4, 1, -100, -100, 1, -100, -100, -100])
        return {**super().__getitem__(index), "labels": labels}


class Translation(Packed):
    """Labels that belong to another sequence than the input."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": torch.tensor([2, 3, 1]), "labels": torch.tensor([4, 1, -100, -100])}


class Uneven(Packed):
    """One to four tokens and a class, which `pad` collates."""

    def __getitem__(self, index: int) -> Any:
        return torch.arange(2, 3 + index % 4), index % 2


def pad(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Pad the samples to the longest of them."""
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([y for _, y in samples])}


class Broken(Dataset[Any]):
    """Eight samples, one of which holds NaN."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, float("nan") if index == 3 else 1.0]), torch.tensor(0.5)


class Many(Broken):
    """10,000 random samples of 30 classes."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), index % 30


class Numbers(IterableDataset[Any]):
    """A stream of 40 samples, which can be divided."""

    def __init__(self, first: int = 0, stride: int = 1) -> None:
        self.first, self.stride = first, stride

    def shard(self, num_shards: int, index: int) -> Numbers:
        """Every `num_shards`-th sample."""
        return Numbers(index, num_shards)

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.first, 40, self.stride):
            yield torch.tensor([number / 40, 1.0]), number % 2


class Raises(Broken):
    """A sample that cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no such file")
        return super().__getitem__(index)


def own(name: str, **keys: Any) -> dict[str, Any]:
    """The `data` of a job that reads one of these data sets."""
    return {"kind": "dataset", "factory": f"{HERE}:{name}", **keys}


def photos(folder: Path, name: str = "cat") -> Path:
    """A folder of two classes of images: those of the second are red."""
    for number, label in enumerate((name, "dog")):
        (folder / label).mkdir(parents=True)
        for shade in range(6):
            Image.new("RGB", (12, 10), (200 * number, 20 * shade, 40)).save(folder / label / f"{shade}.png")
    return folder
