"""Batches of a validation set: each replica's part, every sample once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any

from torch.utils.data import Dataset

from paceline.data.samples import RequestedSamples


def held_out_batches(
    dataset: Dataset[Any], *, batch: int, replica: int, replicas: int, in_turn: bool = False
) -> Iterator[Any]:
    """A replica's part of a validation set in batches of `batch` samples.

    The last one may be smaller. Collated as by `Loader`.

    The part is contiguous; or, `in_turn`, it is every `replicas`-th batch of the whole set, so that the batches do not
    depend on the number of replicas. All parts together have every sample once. Replicas may have different numbers of
    batches, even none. A sample's random numbers follow from its index, so every evaluation measures the same samples.

    Raises:
        DataError: a sample raised, or samples do not fit into one batch.
    """
    samples = RequestedSamples(dataset, None, replica, seed=0)
    count = len(dataset)  # type: ignore[arg-type]
    if in_turn:
        first, end, stride = replica * batch, count, replicas * batch
    else:
        first, end, stride = replica * count // replicas, (replica + 1) * count // replicas, batch
    for start in range(first, end, stride):
        yield samples.read(list(range(start, min(start + batch, end))), (0, start // batch))


def most_batches(samples: int, *, batch: int, replicas: int, in_turn: bool = False) -> int:
    """Number of `held_out_batches` of the replica with the most."""
    if in_turn:
        return math.ceil(samples / (replicas * batch))
    return max(math.ceil(((r + 1) * samples // replicas - r * samples // replicas) / batch) for r in range(replicas))


def padded(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """The batches, and None in the place of those that are missing to `count`."""
    return islice(chain(batches, repeat(None)), count)
