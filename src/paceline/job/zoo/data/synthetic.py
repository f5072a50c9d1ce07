"""Invented samples for benchmarks: any shape, any number, no reading and little memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import DataError
from paceline.job.data import DataSets, Synthetic
from paceline.job.zoo.data.samples import Batch, Labels, held_out_samples

_BANK_BYTES = 64 << 20


def build_synthetic(spec: Synthetic, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    """Normally distributed inputs with random classes, or random tokens if the spec has `vocab`.

    The target of a token is the next one.
    """
    shape = spec.shape or input_shape
    if not shape:
        raise DataError(
            "the model names no input shape; give data.shape, e.g. [3, 32, 32], or [128] for tokens with vocab"
        )
    if spec.vocab and len(shape) != 1:
        raise DataError(f"synthetic tokens have the shape [sequence length]; data.shape is {list(shape)}")
    samples = min(spec.samples, spec.limit or spec.samples)
    kept = held_out_samples(samples, spec.held_out)
    inputs, target = _bank(spec, shape, samples, seed)
    train = Invented(inputs, target, 0, samples - kept)
    return DataSets(train, Invented(inputs, target, samples - kept, kept) if kept else None, synthetic=True)


class Invented(Dataset[Batch]):
    """Generated samples `first` to `first + samples` of an endless sequence that repeats a bank.

    A batch is an indexed copy.
    """

    def __init__(self, inputs: Tensor, target: Tensor, first: int, samples: int) -> None:
        self.inputs = inputs
        self.target = target
        self.first = first
        self.samples = samples

    @property
    def labels(self) -> Labels | None:
        """The class of each sample, or None for tokens."""
        if self.target.dim() != 1:
            return None
        return self.target.numpy()[(self.first + np.arange(self.samples)) % len(self.target)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        inputs, target = self.__getitems__([index])
        return inputs[0], target[0]

    def __getitems__(self, indices: list[int]) -> Batch:
        if not all(0 <= i < self.samples for i in indices):
            raise IndexError(f"synthetic sample out of range in {indices}: there are {self.samples}")
        rows = torch.tensor(indices).add_(self.first).remainder_(len(self.target))
        return self.inputs.index_select(0, rows), self.target.index_select(0, rows)


def _bank(spec: Synthetic, shape: tuple[int, ...], samples: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    bytes_each = 4 * int(np.prod(shape)) if spec.vocab is None else 16 * shape[0]
    size = max(1, min(samples, _BANK_BYTES // bytes_each))
    if spec.vocab is None:
        return torch.randn(size, *shape, generator=draw), torch.randint(spec.classes, (size,), generator=draw)
    tokens = torch.randint(spec.vocab, (size, shape[0] + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]
