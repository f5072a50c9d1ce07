"""A dataset read batch by batch: collated, informed of epochs, with errors that name samples."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info
from torchdata.stateful_dataloader.stateful import Stateful

from paceline.errors import DataError
from paceline.job.zoo.data.samples import Collated
from paceline.own_random import seed_from

Collate = Callable[[list[Any]], Any]


class SampleRequest(NamedTuple):
    """One step's samples, as the loader's sampler asks for them. Epoch and step are 0-based."""

    epoch: int
    step: int
    indices: list[Any]


class RequestedSamples(Dataset[Any]):
    """The user's dataset as `StatefulDataLoader` sees it: an item is a `SampleRequest`'s whole batch.

    This holds in loader processes as well.
    """

    def __init__(
        self, dataset: Dataset[Any], collate_fn: Collate | None, replica: int, seed: int, *, bulk: bool = False
    ) -> None:
        """Reader of a dataset's batches.

        `bulk`: `dataset[indices]` is a whole batch, which `collate_fn` gets (a sampler of batches and
        `batch_size=None`).
        """
        if collate_fn is None and isinstance(dataset, Collated):
            collate_fn = dataset.collate_fn
        self.dataset, self.replica, self.seed, self.bulk = dataset, replica, seed, bulk
        self.collate = collate_fn or default_collate
        self.has_own_collate = collate_fn not in (None, default_collate)
        self.read_many: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
        self.epoch: int | None = None
        self.stateful = isinstance(dataset, Stateful)
        if isinstance(dataset, Stateful):  # torchdata asks for a state wherever it finds these two
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def begin_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know."""
        if epoch != self.epoch:
            self.epoch = epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)

    def check_length(self, expected: int | None) -> None:
        """Refuse a dataset whose length has changed; None checks nothing."""
        if expected is None:
            return
        length = len(self.dataset)  # type: ignore[arg-type]
        if length != expected:
            raise DataError(
                f"replica {self.replica}: {self._name} has {length} samples at the start of epoch {self.epoch}, and "
                f"the run was set up for {expected}: a training set keeps its length while it is used"
            )

    def __getitems__(self, request: SampleRequest) -> Any:
        self.begin_epoch(request.epoch)
        if get_worker_info() is None:
            return self._read(request)
        seed_from(self.seed, request.epoch, request.step, self.replica)
        try:
            return self._read(request)
        except DataError as error:
            return LoaderFailure(str(error), _portable(error.__cause__ or error))

    def _read(self, request: SampleRequest) -> Any:
        return self.read(request.indices)

    def read(self, indices: list[int]) -> Any:
        """The collated batch of these samples, None where there are none."""
        if not indices:
            return None
        if self.bulk:
            samples = self._read_one(indices)
        elif self.read_many is None:
            samples = self._read_each(indices)
        else:
            try:
                samples = self.read_many(indices)
            except Exception as error:
                raise self._error(self._culprit(indices), error) from error
            if (
                not self.has_own_collate
                and isinstance(samples, tuple)
                and all(isinstance(part, Tensor) for part in samples)
            ):
                return samples
        try:
            return self.collate(samples)
        except Exception as error:
            raise DataError(
                f"replica {self.replica}: samples {_listed(indices)} of {self._name} do not make one batch: "
                f"{type(error).__name__}: {error}. Samples of a batch need the same structure, shapes and "
                "types, or a collate_fn"
            ) from error

    def example(self, count: int, indices: list[Any]) -> Any:
        """A batch of `count` samples for inspecting data, with these indices if it has any."""
        return self.read(indices)

    def _read_each(self, indices: list[Any]) -> list[Any]:
        samples: list[Any] = []
        try:
            for index in indices:  # without a call for each, which takes as long as many a dataset's own
                samples.append(self.dataset[index])
        except Exception as error:
            raise self._error([indices[len(samples)]], error) from error
        return samples

    def _read_one(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise self._error(index if self.bulk else [index], error) from error

    def _culprit(self, indices: list[int]) -> list[int]:
        """The first sample that raises when read alone; all of them where none does."""
        for index in indices:
            alone = False
            with suppress(Exception):
                self.dataset.__getitems__([index])  # type: ignore[attr-defined]
                alone = True
            if not alone:
                return [index]
        return indices

    def _error(self, indices: list[int], error: Exception) -> DataError:
        which = f"sample {indices[0]}" if len(indices) == 1 else f"the batch of samples {_listed(indices)}"
        explained = DataError(
            f"replica {self.replica}: {which} of {self._name} raised {type(error).__name__}: {error}. "
            f"Read it alone to see why (dataset[{indices[0]}]), then repair it or leave it out"
        )
        explained.from_users_code = True
        return explained

    @property
    def _name(self) -> str:
        """The dataset's type, or "Subset of its.Type" for a part of one."""
        dataset, name = self.dataset, ""
        while hasattr(dataset, "dataset"):
            name += f"{type(dataset).__qualname__} of "
            dataset = dataset.dataset
        return f"{name}{type(dataset).__module__}.{type(dataset).__qualname__}"


@dataclass(frozen=True)
class LoaderFailure:
    """Message of a loader process in place of a batch that it could not make."""

    message: str
    cause: BaseException


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as text, ready to be sent to the rank.

    One that cannot be pickled becomes a RuntimeError with the same text.
    """
    told = "".join(traceback.format_exception(error))
    portable: BaseException = RuntimeError(f"{type(error).__name__}: {error}")
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))
        portable = error
    portable.add_note(f"In a loader process:\n{told}")
    return portable


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
