"""A data set that draws from several sources with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from paceline.corpus.order import Mixture
from paceline.errors import DataError
from paceline.job.samples import DataSets, Selection
from paceline.job.zoo.records import RecordSamples, ShardedSamples

if TYPE_CHECKING:
    from paceline.job.data import Mixture as MixtureSpec
    from paceline.job.data import Records, Tokens


def build_mixture(spec: MixtureSpec, build: Callable[[Records | Tokens], DataSets]) -> DataSets:
    """Open all sources and combine them; `build` opens one source.

    The validation set holds the validation samples of all sources, and the test set holds all their test samples.
    """
    sets = {name: build(source) for name, source in spec.sources.items()}
    train = MixedSamples(spec, {name: built.train for name, built in sets.items()})
    held_out = [built.held_out for built in sets.values() if built.held_out is not None]
    test = [built.test for built in sets.values() if built.test is not None]
    return DataSets(train, _joined(held_out), test=_joined(test))


def _joined(sets: list[Any]) -> Dataset[Any] | None:
    if len(sets) < 2:
        return sets[0] if sets else None
    joined: Any = ConcatDataset(sets)
    # `Selection` reads one sample at a time, because a source may collate its own batches
    return Selection(joined, np.arange(len(joined)))


class MixedSamples(Dataset[Any]):
    """Samples of several sources in the proportions of their weights.

    The length of an epoch is the sum of the sizes of the sources, each multiplied by its `repeat`. Without weights,
    every sample is therefore drawn `repeat` times per epoch.

    Attributes:
        names: names of the sources.
        sizes: number of samples of each source.
        counts: numbers about the last batch for the run's record; see `ShardedSamples`.

    Raises:
        DataError: a source has its own collate function.
    """

    def __init__(self, spec: MixtureSpec, sources: dict[str, Any]) -> None:
        self.names, self.sources = list(sources), list(sources.values())
        for name, source in sources.items():
            if not isinstance(source, ShardedSamples):
                raise DataError(
                    "data.source_has_collate",
                    "data.sources.{name} has its own collate function. Set data.collate of the mixture instead.",
                    name=name,
                )
        _check_classes({name: source for name, source in sources.items() if isinstance(source, RecordSamples)})
        self.sizes = [len(source) for source in self.sources]
        drawn = [size * spec.repeat.get(name, 1) for name, size in zip(self.names, self.sizes, strict=True)]
        self._length = round(sum(drawn))
        weights = spec.weights or dict(zip(self.names, drawn, strict=True))
        self._schedule = [(0, self._in_order(weights)), *((s.step, self._in_order(s.weights)) for s in spec.schedule)]
        self._offsets = [0, *accumulate(self.sizes)]
        self._first_shards = [0, *accumulate(len(source.starts) - 1 for source in self.sources)]
        self.window = max(source.window for source in self.sources)
        self.ahead_bytes = min(source.ahead_bytes for source in self.sources)
        self.counts: dict[str, int] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        self.counts = {}
        return self._alone(index)

    def __getitems__(self, indices: list[int]) -> Any:
        self.counts = {}
        if any(isinstance(source, RecordSamples) and source.form.has_map for source in self.sources):
            return [self._alone(index) for index in indices]
        return self.sources[0].batch([self._raw(index)[1] for index in indices])

    def _alone(self, index: int) -> Any:
        source, sample = self._raw(index)
        return source.alone(sample)

    def _raw(self, index: int) -> tuple[ShardedSamples, Any]:
        nth = int(np.searchsorted(self._offsets, index, side="right")) - 1
        source = self.sources[nth]
        sample = source.raw(index - self._offsets[nth])
        for name, number in source.counts.items():
            self.counts[name] = self.counts.get(name, 0) + number
        return source, sample

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the sources, whose samples may depend on it."""
        for source in self.sources:
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    def epoch_order(
        self, seed: int, epoch: int, batch: int, *, steps: int, shuffle: bool, part: tuple[int, int] | None = None
    ) -> Mixture:
        """Return the order of the samples of an epoch.

        Raises:
            DataError: `part` is given; a mixture cannot be divided by hosts.
        """
        if part is not None:
            raise DataError(
                "data.mixture_hierarchical",
                "partition: hierarchical gives each host its own samples, but the sources of a mixture are drawn by "
                "weight. Use partition: uniform.",
            )
        return Mixture(
            [source.starts for source in self.sources],
            self._offsets[:-1],
            self._schedule,
            seed=seed,
            epoch=epoch,
            batch=batch,
            samples=min(len(self), steps * batch),
            steps=steps,
            windows=[source.window for source in self.sources],
            shuffle=shuffle,
        )

    def drawn(self, counts: Sequence[int]) -> dict[str, dict[str, float]]:
        """Convert the number of drawn samples of each source to samples and epochs, by name."""
        named = zip(self.names, self.sizes, counts, strict=True)
        return {name: {"samples": count, "epochs": round(count / size, 4)} for name, size, count in named}

    def fetch(self, shard: int) -> None:
        """Make a shard local.

        Shards are numbered across all sources, in the order of the sources.
        """
        source, own = self._of_source(shard)
        source.fetch(own)

    def bytes_of(self, shard: int) -> int:
        """Return the size of a shard before it is decompressed."""
        source, own = self._of_source(shard)
        size: int = source.bytes_of(own)
        return size

    def _of_source(self, shard: int) -> tuple[Any, int]:
        nth = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self.sources[nth], shard - self._first_shards[nth]

    @property
    def packed(self) -> bool:
        """True if the sequences of any source hold several documents."""
        return any(getattr(source, "packed", False) for source in self.sources)

    @property
    def reads_in_place(self) -> bool:
        """True if no shard of any source has to be fetched."""
        return all(source.reads_in_place for source in self.sources)

    @property
    def digest(self) -> list[int]:
        """Numbers that change with the files of a source."""
        return [number for source in self.sources for number in source.digest]

    def _in_order(self, weights: dict[str, float]) -> Sequence[float]:
        return [weights.get(name, 0.0) for name in self.names]


def _check_classes(sources: dict[str, RecordSamples]) -> None:
    """Refuse folders of images whose labels mean different classes."""
    known = {name: tuple(s.classes) for name, s in sources.items() if s.classes and not s.form.has_map}
    for name, classes in known.items():
        first = next(iter(known))
        if classes != known[first]:
            raise DataError(
                "data.classes_of_sources_differ",
                "data.sources: {first} has the classes {classes}, but {second} has {others}, so equal labels would "
                "mean different classes. Give each source a folder for every class, or set the labels with map.",
                first=first,
                second=name,
                classes=list(known[first]),
                others=list(classes),
            )
