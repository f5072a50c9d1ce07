"""Data whose batches are known only when read: iterable data sets and whole-batch samples.

Every data-parallel rank reads the whole of it and keeps its part of each batch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from paceline.data.samples import Collate, RequestedSamples, SampleRequest
from paceline.errors import DataError
from paceline.job.partition import even_shares
from paceline.own_random import OwnRandom

_LOOKED_AT = 64  # numbers of a tensor that its digest is made of


@dataclass
class BatchPart:
    """A rank's part of a batch that was read whole.

    Attributes:
        batch: collated; None where the part is empty.
        samples: of the whole batch.
        digest: of what the whole batch holds.
        varied: whether the batch's samples differ from one another.
        worker: the loader process that read it, 0 in the rank itself.
        filler: where the part is empty, one of the batch's samples, collated.
    """

    batch: Any
    samples: int
    digest: int
    varied: bool
    worker: int
    filler: Any = None


class Items(RequestedSamples):
    """A data set of whole batches (`batch_size=None`); all ranks read each and take rows."""

    def __init__(
        self, dataset: Dataset[Any], collate_fn: Collate | None, replica: int, replicas: int, seed: int
    ) -> None:
        super().__init__(dataset, collate_fn, replica, seed)
        self.replicas = replicas
        self.read_many = None

    def _read(self, request: SampleRequest) -> Any:
        with OwnRandom(self.seed, request.epoch, request.step):  # alike on all ranks, which read the same
            item = self._read_one(request.indices[0])
            return self._piece(item, f"item {request.indices[0]} of {self.name}")

    def example(self, count: int, indices: list[Any]) -> Any:
        """The first row of the first item, so many times."""
        return self._repeated(self._read_one(indices[0]), count)

    def _repeated(self, item: Any, count: int) -> Any:
        samples = rows_of(item)
        if samples is None:
            raise DataError(
                f"an item of {self.name} has no rows that could be counted, and a plan that divides the "
                "model needs them"
            )
        return self._collated(cut(item, [0] * count), f"an item of {self.name}")

    def _piece(self, item: Any, where: str) -> BatchPart:
        samples = rows_of(item)
        if samples is None and self.replicas > 1:
            raise DataError(
                f"replica {self.replica}: {where} is a batch of type {type(item).__name__}: how many samples it holds "
                f"is not known, so it cannot be cut for {self.replicas} ranks. Have the data set return single samples "
                "and give the DataLoader a batch_size, or return tensors (in tuples, lists or dicts) with one row for "
                "each sample"
            )
        part = item
        if samples is not None and self.replicas > 1:
            ends = (0, *accumulate(even_shares(samples, self.replicas)))
            first, end = ends[self.replica : self.replica + 2]
            part = cut(item, slice(first, end)) if end > first else None
        return BatchPart(
            None if part is None else self._collated(part, where),
            1 if samples is None else samples,
            digest_of(item),
            True,
            _worker(),
        )

    def _collated(self, part: Any, where: str) -> Any:
        try:
            return self.collate(part)
        except Exception as error:
            raise DataError(
                f"replica {self.replica}: collate_fn raised {type(error).__name__} on {where}: {error}"
            ) from error


class Iterated(Items):
    """An `IterableDataset`: every rank reads the same stream, and of each batch keeps its part.

    Loader processes take turns, each with an iterator of its own, as in a DataLoader. A position is found again by
    reading up to it.

    Args:
        batch_size: samples of a batch; None where the stream yields whole batches.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Collate | None,
        replica: int,
        replicas: int,
        seed: int,
        *,
        batch_size: int | None,
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, collate_fn, replica, replicas, seed)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.stateful = False  # a position is read up to; a state of the data set's own would be taken twice
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)
        self._stream: tuple[int, OwnRandom, Iterator[Any]] | None = None
        self._read_so_far = 0

    def check_length(self, expected: int | None) -> None:
        """Nothing: a stream has no length."""

    def _read(self, request: SampleRequest) -> Any:
        """This process's next batch; None when the stream has ended."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self._stream is None or self._stream[0] != request.epoch or self._read_so_far > request.step // workers:
            own = OwnRandom(self.seed, request.epoch, worker)
            with own:
                self._stream = request.epoch, own, self._iterate()
            self._read_so_far = 0
        with self._stream[1]:
            while self._read_so_far < request.step // workers:
                self._take(self._stream[2])
            taken = self._take(self._stream[2])
        if taken is None:
            return BatchPart(None, 0, 0, False, worker)
        if self.batch_size is None:
            return self._piece(taken[0], f"an item of {self.name}")
        if self.has_own_collate:  # which may leave out samples that are None
            taken = [sample for sample in taken if sample is not None] or taken
        return self._share(taken, worker)

    def example(self, count: int, indices: list[Any]) -> Any:
        """The first sample of the stream, `count` times; the stream is begun anew afterwards."""
        with OwnRandom(self.seed, 0, 0):
            stream = self._iterate()
            if id(stream) == id(self.dataset):
                raise DataError(
                    f"{self.name} is its own iterator: a look at its first sample would lose it. Have "
                    "__iter__ make a new one"
                )
            first = next(stream, None)
        if first is None:
            raise DataError(f"{self.name} is empty: its stream ends before the first sample")
        if self.batch_size is None:
            return self._repeated(first, count)
        return self._collated([first] * count, f"a batch of {self.name}")

    def _share(self, samples: list[Any], worker: int) -> BatchPart:
        ends = (0, *accumulate(even_shares(len(samples), self.replicas)))
        part = samples[ends[self.replica] : ends[self.replica + 1]]
        digests = [digest_of(sample) for sample in samples]
        whole = zlib.crc32(repr(digests).encode())
        batch = self._collated(part or samples[:1], f"a batch of {self.name}")
        varied = len(set(digests)) > 1
        kept, filler = (batch, None) if part else (None, batch)
        return BatchPart(kept, len(samples), whole, varied, worker, filler)

    def _take(self, stream: Iterator[Any]) -> list[Any] | None:
        self._read_so_far += 1
        try:
            taken = list(islice(stream, self.batch_size or 1))
        except Exception as error:
            raise self._stream_error(error) from error
        short = self.drop_last and self.batch_size is not None and len(taken) < self.batch_size
        return None if short or not taken else taken

    def _iterate(self) -> Iterator[Any]:
        try:
            return iter(self.dataset)
        except Exception as error:
            raise self._stream_error(error) from error

    def _stream_error(self, error: Exception) -> DataError:
        explained = DataError(f"replica {self.replica}: iterating {self.name} raised {type(error).__name__}: {error}")
        explained.from_users_code = True
        return explained


def rows_of(batch: Any) -> int | None:
    """Samples of a batch of tensors (rows of dim 0), in tuples, lists and dicts; None where nobody knows."""
    lengths = set(_lengths(batch))
    return lengths.pop() if len(lengths) == 1 and None not in lengths else None


def cut(batch: Any, rows: slice | list[int]) -> Any:
    """A batch of some rows of another: of each tensor, list or array in it."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[rows] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: cut(value, rows) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if _is_column(batch):
            return batch[rows] if isinstance(rows, slice) else [batch[row] for row in rows]
        parts = [cut(value, rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def digest_of(value: Any) -> int:
    """A number that two different samples are unlikely to share.

    For a tensor it depends on its shape and some of its numbers.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().float().numpy() if value.dtype == torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return zlib.crc32(repr((value.shape, value.reshape(-1)[:_LOOKED_AT].tolist())).encode())
        flat = value.reshape(-1)
        looked_at = flat[:: max(1, -(-flat.size // _LOOKED_AT))]
        return zlib.crc32(looked_at.tobytes(), zlib.crc32(f"{value.shape} {value.dtype}".encode()))
    if isinstance(value, Mapping):
        return zlib.crc32(repr([(str(key), digest_of(inner)) for key, inner in value.items()]).encode())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([digest_of(inner) for inner in value]).encode())
    if isinstance(value, (str, bytes, int, float, bool, np.generic)) or value is None:
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "tobytes"):  # an image
        return zlib.crc32(value.tobytes())
    if hasattr(value, "__dict__") and vars(value):
        return digest_of(vars(value))
    return zlib.crc32(type(value).__qualname__.encode())


def _lengths(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim:
            yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths(value)
    elif isinstance(batch, (list, tuple)):
        if _is_column(batch):
            yield len(batch)
        else:
            for value in batch:
                yield from _lengths(value)
    elif not (isinstance(batch, (str, bytes, int, float, bool, np.generic)) or batch is None):
        yield None


def _is_column(values: Any) -> bool:
    """True if a list has one plain value for each sample, e.g. file names."""
    return (
        bool(values)
        and not hasattr(values, "_fields")
        and all(isinstance(value, (str, bytes, int, float)) for value in values)
    )


def _worker() -> int:
    info = get_worker_info()
    return info.id if info is not None else 0


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
    """The batches, followed by None until there are `count`."""
    return islice(chain(batches, repeat(None)), count)
