"""A batch of a job without values, which the model gets in a trace.

Data is read only if the job does not describe a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.job.batch import Batch
from paceline.job.data import Cifar10, Digits, Images, Synthetic, Text
from paceline.job.job import Job


def batch_of(job: Job, samples: int, device: str = "meta") -> Batch:
    """`samples` empty samples, as the job's data set would return them.

    Raises:
        DataError, JobError: a sample has to be read, and cannot be.
    """
    sample = _collated_sample(job) if job.data.collate is not None else _sample(job)
    if isinstance(sample, Mapping):
        return {name: _batched(part, samples, device) for name, part in sample.items()}
    return tuple(_batched(part, samples, device) for part in sample)


def with_values(batch: Batch) -> Batch:
    """Copy of a batch with values: zeros for integers, ones for masks. Other numbers are small."""

    def real(part: Tensor, name: str = "") -> Tensor:
        if part.is_floating_point():
            return torch.rand(part.shape, dtype=part.dtype)
        return torch.full(part.shape, int("mask" in name), dtype=part.dtype)

    if isinstance(batch, Mapping):
        return {name: real(part, name) for name, part in batch.items()}
    return tuple(map(real, batch))


def tokens_of(batch: Batch) -> int:
    """Length of the batch's sequences; 1 if the model reads none."""
    first = (
        next((part for name, part in batch.items() if name == "input_ids"), None)
        if isinstance(batch, Mapping)
        else batch[0]
    )
    return first.shape[1] if first is not None and first.dim() == 2 and not first.is_floating_point() else 1


def _sample(job: Job) -> Any:
    data, wanted = job.data, job.model.input_shape()
    whole = torch.int64
    if isinstance(data, Text):
        return _made((data.context,), whole), _made((data.context,), whole)
    if isinstance(data, Synthetic) and data.vocab and data.shape:
        return _made(data.shape, whole), _made(data.shape, whole)
    shape = wanted if isinstance(data, Cifar10) else getattr(data, "shape", None) or wanted
    if isinstance(data, Digits):
        shape = shape or (1, 8, 8)
    if isinstance(data, Cifar10):
        shape = shape or (3, 32, 32)
    if shape and isinstance(data, (Digits, Cifar10, Images, Synthetic)):
        return _made(shape, torch.float32), _made((), whole)
    return job.data.build(input_shape=wanted, seed=job.seed).train[0]


def _collated_sample(job: Job) -> Any:
    """One sample as the job's own function collates it, without the batch dimension."""
    data: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
    try:
        batch = data.collate_fn(data.__getitems__([0]))
        return {k: v[0] for k, v in batch.items()} if isinstance(batch, Mapping) else tuple(part[0] for part in batch)
    except Exception as error:
        raise DataError(
            f"data.collate: {job.data.collate} raised {type(error).__name__} on the first sample: {error}"
        ) from error


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _batched(part: Any, samples: int, device: str) -> Tensor:
    part = part if isinstance(part, Tensor) else torch.as_tensor(part)
    return torch.empty((samples, *part.shape), dtype=part.dtype, device=device)
