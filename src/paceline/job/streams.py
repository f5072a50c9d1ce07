"""The `IterableDataset` of a job, divided into a fixed number of parts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, Protocol, runtime_checkable

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from paceline.errors import DataError
from paceline.job.samples import Collated, DataSets, apart, digest_of
from paceline.own_random import OwnRandom

# number of parts of a data set with `shard`; divisible by common numbers of ranks
PARTS = 60
_MOST_PARTS = 240  # largest number of parts if the data set states its number of files
_LOOKED_AT = 3  # samples at the start of two parts that are compared to find equal parts

Division = Literal["shard", "worker_info", "none"]
# why a stream has only one part: it cannot be divided, it states a single file, or the job sets data.parts to 1
OnePart = Literal["indivisible", "file", "setting"]


@runtime_checkable
class KeepsState(Protocol):
    """A data set whose position can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the position after the last sample that was read."""

    def load_state_dict(self, state: Any) -> None:
        """Make the next iterator continue after a saved position."""


class Stream(IterableDataset[Any]):
    """A user's `IterableDataset`, and how it is divided into parts.

    Part i of n is `dataset.shard(num_shards=n, index=i)`, or the samples that the data set yields if `get_worker_info`
    describes worker i of n. The number of parts does not change when a run continues on other ranks. If the data set
    supports neither, every rank reads the whole stream.

    Args:
        parts: number of parts. With None, a data set with `shard` has one part per file that it states (at most 240),
            or `PARTS` parts if it states no number of files.
        limit: largest number of samples of an epoch; each part yields an equal share, its first samples.
        seed: seed of the random numbers while the first samples are inspected.

    Attributes:
        division: how the data set is divided; `none` if every rank reads the whole stream.
        parts: number of parts; None if each reading process has one part, as in torch's `DataLoader`.
        one_part: the reason why there is only one part; None if there are several.
        keeps_state: whether the data set has `state_dict` and `load_state_dict`.
        example: the first sample.
        states: newest known state of each part: epoch, number of samples read, and the state of its data set. States
            stay in memory when other ranks take over the part.

    Raises:
        DataError: the data set cannot be iterated, is empty or cannot be divided, its parts begin with the same
            samples, or its state cannot be saved as JSON.
    """

    def __init__(self, dataset: Any, *, parts: int | None, limit: int | None, seed: int) -> None:
        self.dataset, self.limit, self.seed = dataset, limit, seed
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self.states: dict[int, tuple[int, int, Any]] = {}
        self.name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        self.keeps_state = isinstance(dataset, KeepsState)
        self.division: Division = "none"
        self.parts: int | None = 1
        self.one_part: OnePart | None = "indivisible"
        self._refuse_own_iterator()
        first = self._look(1, 0, "none")
        if not first:
            raise DataError(
                "data.stream_without_samples",
                "{name} is empty: its iterator yields no samples. Check the files that it reads.",
                name=self.name,
            )
        self.example = first[0]
        self._divide(parts)
        if self.keeps_state:
            self._check_state()

    @property
    def classes(self) -> Any:
        """Names of the classes, if the data set has them."""
        return getattr(self.dataset, "classes", None)

    @property
    def length(self) -> int | None:
        """Stated number of samples, at most `limit`; None if the data set has no length."""
        try:
            samples = len(self.dataset)
        except (TypeError, NotImplementedError):
            return None
        return samples if self.limit is None else min(samples, self.limit)

    def part(self, index: int, parts: int, epoch: int) -> Part:
        """Return part `index` of `parts`, with its own copy of the data set."""
        division = self.division if parts > 1 else "none"
        own = apart(self.dataset)
        if hasattr(own, "set_epoch"):
            own.set_epoch(epoch)
        if division == "shard":
            own = _shard(own, index, parts)
            if hasattr(own, "set_epoch"):
                own.set_epoch(epoch)
        limit = None if self.limit is None else (index + 1) * self.limit // parts - index * self.limit // parts
        return Part(own, index, parts, division, limit)

    def first(self, samples: int | None) -> Dataset[Any]:
        """Read the first samples of the stream into memory; all samples if `samples` is None."""
        kept = Kept(self._look(samples, 0, "none"))
        return kept if self.collate_fn is None else Collated(kept, self.collate_fn)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.part(0, 1, 0))

    def _divide(self, parts: int | None) -> None:
        """Determine how the data set is divided, and compare the first samples of two parts."""
        files = next((n for n in ("num_shards", "n_shards") if isinstance(getattr(self.dataset, n, None), int)), None)
        stated = None if files is None else int(getattr(self.dataset, files))
        if callable(getattr(self.dataset, "shard", None)):
            self.division = "shard"
            self.parts = parts or (min(stated, _MOST_PARTS) if stated is not None else PARTS)
        elif self._asks_for_worker_info():
            self.division, self.parts = "worker_info", parts
        elif parts is not None and parts > 1:
            raise DataError(
                "data.stream_indivisible",
                "data.parts is {parts}, but {name} cannot be divided: it has no method shard(num_shards, index), and "
                "its iterator does not use torch.utils.data.get_worker_info(). Add one of them, or remove data.parts.",
                parts=parts,
                name=self.name,
            )
        if self.division == "none":
            return
        if self.parts == 1:
            self.division, self.one_part = "none", "file" if parts is None else "setting"
        else:
            self.one_part = None
            self._refuse_equal_parts()

    def _asks_for_worker_info(self) -> bool:
        asked: set[str] = set()
        part = self.part(0, 1, 0)
        with OwnRandom(self.seed), _worker_info(_Noted(asked, part.dataset)):
            next(iter(part.dataset), None)
        return {"id", "num_workers"} <= asked

    def _refuse_equal_parts(self) -> None:
        parts = self.parts or 2
        one, other = ([digest_of(s) for s in self._look(_LOOKED_AT, i, self.division, parts)] for i in (0, 1))
        if one and one == other and len(set(one)) == _LOOKED_AT:
            raise DataError(
                "data.parts_equal",
                "the first two of {parts} parts of {name} begin with the same samples, so the run would train on each "
                "sample several times. {how} must return different samples for each index.",
                parts=parts,
                name=self.name,
                how="shard(num_shards, index)"
                if self.division == "shard"
                else "An iterator that uses get_worker_info()",
            )

    def _look(self, samples: int | None, index: int, division: Division, parts: int = 1) -> list[Any]:
        self_division, self.division = self.division, division
        try:
            with OwnRandom(self.seed, index):
                return list(islice(self.part(index, parts, 0), samples))
        except Exception as error:
            raise iteration_error(self.name, error) from error
        finally:
            self.division = self_division

    def _refuse_own_iterator(self) -> None:
        try:
            own = iter(self.dataset) is self.dataset
        except Exception as error:
            raise iteration_error(self.name, error) from error
        if own:
            raise DataError(
                "data.own_iterator",
                "{name} is its own iterator, so reading its first sample would consume it. Change __iter__ so that "
                "it returns a new iterator.",
                name=self.name,
            )

    def _check_state(self) -> None:
        part = self.part(0, 1, 0)
        with OwnRandom(self.seed):
            next(iter(part), None)
        try:
            json.dumps(part.state())
        except (TypeError, ValueError) as error:
            raise DataError(
                "data.stream_state_invalid",
                "the state_dict of {name} cannot be saved as JSON: {error}. Let it return only numbers, text, lists "
                "and dicts.",
                name=self.name,
                error=error,
            ) from error


class Part:
    """One part of a stream, with its own copy of the data set.

    If the data set divides itself by `get_worker_info`, that function describes this part while the copy is iterated.
    """

    def __init__(self, dataset: Any, index: int, parts: int, division: Division, limit: int | None) -> None:
        self.dataset, self.limit = dataset, limit
        self._info: Any = None
        if division == "worker_info":
            self._info = torch_worker.WorkerInfo(id=index, num_workers=parts, seed=index, dataset=dataset)

    def __iter__(self) -> Iterator[Any]:
        return self.after(0)

    def after(self, read: int) -> Iterator[Any]:
        """Iterate a data set whose loaded state follows `read` samples; 0 without a state."""
        # Without this, the worker info of a loader process would make the data set divide the part again.
        with _worker_info(self._info):
            samples = iter(self.dataset)
        left = None if self.limit is None else self.limit - read
        while left is None or left > 0:
            with _worker_info(self._info):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            left = None if left is None else left - 1
            yield sample

    def state(self) -> Any:
        """Return the data set's state as JSON values."""
        return self.dataset.state_dict()


class Kept(Dataset[Any]):
    """Samples of a stream, in memory."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def kept_whole(dataset: Any, limit: int | None = None) -> Dataset[Any]:
    """Read at most `limit` samples of an `IterableDataset` into memory.

    Other data sets are returned unchanged.

    Raises:
        DataError: iterating the data set raised an exception.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset  # type: ignore[no-any-return]
    try:
        return Kept(list(islice(dataset, limit)))
    except Exception as error:
        raise iteration_error(type(dataset).__qualname__, error) from error


def with_few(data: DataSets, samples: int) -> DataSets:
    """Replace a training stream with its first samples, for checks that read samples by index."""
    return data._replace(train=data.train.first(samples)) if isinstance(data.train, Stream) else data


def iteration_error(name: str, error: Exception) -> DataError:
    """Return the error for an exception that a stream raised."""
    explained = DataError(
        "data.stream_raised",
        "iterating {name} raised {kind}: {error}",
        name=name,
        kind=type(error).__name__,
        error=error,
    )
    explained.from_users_code = True
    return explained


def _shard(dataset: Any, index: int, parts: int) -> Any:
    """Call `shard` with the keywords of Hugging Face's `datasets`, or with (index, count) if it lacks them."""
    try:
        names = set(inspect.signature(dataset.shard).parameters)
    except (TypeError, ValueError):
        names = set()
    if {"num_shards", "index"} <= names:
        return dataset.shard(num_shards=parts, index=index)
    return dataset.shard(index, parts)


@contextmanager
def _worker_info(info: Any) -> Iterator[None]:
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before


class _Noted:
    """Worker info that records which attributes a data set reads."""

    seed = 0

    def __init__(self, asked: set[str], dataset: Any) -> None:
        self._asked, self.dataset = asked, dataset

    @property
    def id(self) -> int:
        self._asked.add("id")
        return 0

    @property
    def num_workers(self) -> int:
        self._asked.add("num_workers")
        return 2
