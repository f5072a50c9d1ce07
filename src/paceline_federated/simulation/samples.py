"""Samples of simulated clients, kept in memory or read batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.samples import RequestedSamples
from paceline.errors import DataError
from paceline.job.batch import Batch
from paceline.job.zoo.data.samples import Selection, TensorSamples

Ints = NDArray[np.int64]
_KEPT_BYTES = 2**30  # of a training set that stays in memory as the model gets it


class Samples:
    """Batches of a training set as lists of tensors, samples on dim 0.

    Args:
        dtype: of floating-point parts; None leaves them as they are.

    Attributes:
        names: of the parts, where samples are mappings; else None.
        sample_bytes: of a sample's parts.
        whole: the parts of all samples, where they stay in memory; else None.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, dtype: torch.dtype | None) -> None:
        self._reader, self.dtype = RequestedSamples(dataset, None, 0, seed), dtype
        first = self._read(np.zeros(1, np.int64))
        self.names = tuple(first) if isinstance(first, Mapping) else None
        self.whole: list[Tensor] | None = None
        self.sample_bytes = max(1, sum(part.nbytes for part in self.parts(first)))
        samples = len(dataset)  # type: ignore[arg-type]
        if _never_changes(dataset) and self.sample_bytes * samples <= _KEPT_BYTES:
            self.whole = self.parts(self._read(np.arange(samples)))

    def at(self, indices: Ints) -> list[Tensor]:
        """The parts of a batch of samples."""
        if self.whole is None:
            return self.parts(self._read(indices))
        rows = torch.from_numpy(indices)
        return [part.index_select(0, rows) for part in self.whole]

    def batch(self, parts: Sequence[Tensor]) -> Batch:
        """A batch as models and losses take it."""
        return tuple(parts) if self.names is None else dict(zip(self.names, parts, strict=True))

    def parts(self, batch: Any) -> list[Tensor]:
        """The tensors of a batch.

        Raises:
            DataError: it has other parts.
        """
        held = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
        if not all(isinstance(part, Tensor) for part in held):
            raise DataError("samples of simulated clients are tensors, in a tuple or a dict; have collate make them so")
        return [part.to(self.dtype) if self.dtype and part.is_floating_point() else part for part in held]

    def _read(self, indices: Ints) -> Any:
        return self._reader.read(indices.tolist())


def _never_changes(dataset: Any) -> bool:
    """True if a sample is the same whenever it is read."""
    if isinstance(dataset, Selection):
        return _never_changes(dataset.dataset)
    return isinstance(dataset, TensorSamples)
