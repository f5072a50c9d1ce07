"""Iterable data sets of jobs, with each kind of help for reading them in parts; and a model that counts samples."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

FEATURES, SAMPLES = 6, 60
SEEN = "ITERABLE_SEEN"  # environment variable with a folder for the numbers of the samples that were trained on


def sample(number: int) -> tuple[Tensor, int]:
    time.sleep(Plain.sleep_s)
    x = torch.full((FEATURES,), number / SAMPLES)
    return torch.cat([x[1:], torch.tensor([float(number)])]), number % 3


def seen(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Collate, and note which samples this rank trains on."""
    numbers = [int(x[-1]) for x, _ in samples]
    if folder := os.environ.get(SEEN):
        with open(Path(folder) / f"{os.getpid()}", "a") as file:
            file.write(" ".join(map(str, numbers)) + "\n")
    return torch.stack([torch.cat([x[:-1], x[:1]]) for x, _ in samples]), torch.tensor([y for _, y in samples])


class Plain(IterableDataset[Any]):
    """Without any help for reading it in parts."""

    sleep_s = 0.0

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (sample(i) for i in range(self.samples))


class ByWorkers(Plain):
    """Divides itself over loader processes, as torch's documentation does."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info is not None else (0, 1)
        return (sample(i) for i in range(first, self.samples, stride))


class Sharded(Plain):
    """With `shard(index, count)`."""

    def __init__(self, samples: int = SAMPLES, numbers: list[int] | None = None) -> None:
        super().__init__(samples)
        self.numbers = list(range(samples)) if numbers is None else numbers

    def shard(self, index: int, count: int) -> Sharded:
        return type(self)(self.samples, self.numbers[index::count])

    def __iter__(self) -> Iterator[Any]:
        return (sample(i) for i in self.numbers)


class Files(Plain):
    """With files of unequal lengths, and `shard` as in Hugging Face's `datasets`."""

    num_shards = 5

    def __init__(self, samples: int = SAMPLES, files: list[list[int]] | None = None) -> None:
        super().__init__(samples)
        ends = [0, 5, 25, 30, 48, samples]
        self.files = [list(range(a, b)) for a, b in pairwise(ends)] if files is None else files

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Files:
        assert contiguous
        return type(self)(self.samples, self.files[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        return (sample(i) for file in self.files for i in file)


class OneFile(Files):
    """With `shard`, but a single file."""

    num_shards = 1


class Resumable(Sharded):
    """With a state, and a count of the samples that were read in this process."""

    reads = 0

    def __init__(self, samples: int = SAMPLES, numbers: list[int] | None = None) -> None:
        super().__init__(samples, numbers)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        begun, self.at = self.at, 0
        for place in range(begun, len(self.numbers)):
            self.at = place + 1
            Resumable.reads += 1
            yield sample(self.numbers[place])
        self.at = 0


class WholeResumable(Resumable):
    """With a state, but undivided."""

    shard = None  # type: ignore[assignment]


class EqualParts(Plain):
    """Its parts are the whole."""

    def shard(self, index: int, count: int) -> EqualParts:
        return self


class OwnIterator(Plain):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return sample(0)


class LargeState(Resumable):
    def state_dict(self) -> Any:
        return {"buffer": torch.zeros(3)}


class Raises(Plain):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("shard 3 is away")


class Once(Plain):
    """Its samples come only once in a process."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self.epoch else super().__iter__()


KINDS: dict[str, type[Plain]] = {
    "plain": Plain,
    "workers": ByWorkers,
    "sharded": Sharded,
    "files": Files,
    "resumable": Resumable,
    "whole resumable": WholeResumable,
}
OTHERS: dict[str, Any] = {
    "one file": OneFile,
    "equal parts": EqualParts,
    "own iterator": OwnIterator,
    "large state": LargeState,
    "raises": Raises,
    "once": Once,
    "points": lambda: TensorDataset(torch.zeros(3, FEATURES), torch.zeros(3)),
}


def of(kind: str, sleep_s: float = 0.0, **args: Any) -> Plain:
    """The data set of a job; reading a sample takes `sleep_s`."""
    Plain.sleep_s = sleep_s
    return (KINDS | OTHERS)[kind](**args)  # type: ignore[no-any-return]


class Tally(nn.Module):
    """Its weight number i moves only when sample i is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x[:, -1].long()]


def mean_output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def net() -> nn.Module:
    return nn.Linear(FEATURES, 3)


class BadOnce(nn.Module):
    """Its output is NaN in the batch with sample 20, once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bad = net(), True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.training and self.bad and bool((x[:, 0] == torch.tensor(20 / SAMPLES)).any()):
            self.bad = False
            return y * float("nan")
        return y
