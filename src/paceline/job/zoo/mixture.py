"""A data set that draws from several sources with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from paceline.corpus.order import Mixture
from paceline.errors import DataError
from paceline.job.samples import DataSets, FileSamples, Selection
from paceline.job.zoo.records import RecordSamples, ShardedSamples
from paceline.job.zoo.tokens import Sequences

if TYPE_CHECKING:
    from paceline.corpus.shards import Corpus
    from paceline.job.data import Chat, Records, Tokens
    from paceline.job.data import Mixture as MixtureSpec


def build_mixture(spec: MixtureSpec, build: Callable[[Records | Tokens | Chat], DataSets]) -> DataSets:
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


class MixedSamples(FileSamples):
    """Samples of several sources in the proportions of their weights.

    The length of an epoch is the sum of the sizes of the sources, each multiplied by its `repeat`. Without weights,
    every sample is therefore drawn `repeat` times per epoch.

    Attributes:
        names: names of the sources.
        sizes: number of samples of each source.

    Raises:
        DataError: the samples of two sources cannot be in one batch, or mean different things.
    """

    spans_epochs = True

    def __init__(self, spec: MixtureSpec, sources: dict[str, Any]) -> None:
        self.names, self.sources = list(sources), list(sources.values())
        records = {name: source for name, source in sources.items() if isinstance(source, RecordSamples)}
        tokens = {name: source for name, source in sources.items() if isinstance(source, Sequences)}
        _check_classes(records)
        _check_sequences(tokens)
        if spec.collate is None:
            _check_forms(sources)
        # whether the samples of all sources form a batch in the same way
        self._alike = not records or not (tokens or any(source.draws for source in records.values()))
        self.draws = any(source.draws for source in self.sources)
        self.sizes = [len(source) for source in self.sources]
        drawn = [size * spec.repeat.get(name, 1) for name, size in zip(self.names, self.sizes, strict=True)]
        self._length = round(sum(drawn))
        weights = spec.weights or dict(zip(self.names, drawn, strict=True))
        self._schedule = [(0, self._in_order(weights)), *((s.step, self._in_order(s.weights)) for s in spec.schedule)]
        self._offsets = [0, *accumulate(self.sizes)]
        self._first_shards = [0, *accumulate(len(source.starts) - 1 for source in self.sources)]
        self.window = max(source.window for source in self.sources)
        self.ahead_bytes = min(source.ahead_bytes for source in self.sources)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        [(source, sample)] = self._raw([index])
        return source.alone(sample)

    def __getitems__(self, indices: list[int]) -> Any:
        raw = self._raw(indices)
        if self._alike:
            return self.sources[0].batch([sample for _, sample in raw])
        return [source.alone(sample) for source, sample in raw]

    def _raw(self, indices: list[int]) -> list[tuple[ShardedSamples, Any]]:
        """Read samples, each with its source. Numbers beyond the last sample begin again."""
        indices = [index % self._offsets[-1] for index in indices]
        sources = np.searchsorted(self._offsets, indices, side="right") - 1
        found: dict[int, tuple[ShardedSamples, Any]] = {}
        for nth, source in enumerate(self.sources):
            source.counts = {}
            places = np.flatnonzero(sources == nth).tolist()
            samples = source.raw([indices[place] - self._offsets[nth] for place in places])
            found |= {place: (source, sample) for place, sample in zip(places, samples, strict=True)}
        return [found[place] for place in range(len(indices))]

    @property
    def counts(self) -> dict[str, int]:
        """Numbers about the last batch for the run's record; see `ShardedSamples`."""
        total: Counter[str] = Counter()
        for source in self.sources:
            total.update(source.counts)
        return dict(total)

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

    @property
    def order_settings(self) -> dict[str, Any]:
        """Settings that determine the order of the samples; see `ShardOrder` in `job/partition.py`."""
        return {
            "sources": self.names,
            "shards": [source.order_settings for source in self.sources],
            "weights": [[first, [w / sum(weights) for w in weights]] for first, weights in self._schedule],
        }

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
    def pads_at_end(self) -> bool:
        """True if the samples of all sources are causal sequences with padding at the end."""
        return all(getattr(source, "pads_at_end", False) for source in self.sources)

    @property
    def packed(self) -> bool:
        """True if the sequences of any source hold several documents."""
        return any(getattr(source, "packed", False) for source in self.sources)

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, if all sources know them."""
        known = [getattr(source, "classes", None) for source in self.sources]
        return known[0] if all(names == known[0] for names in known) else None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, to show samples as text; None if no source names it."""
        return next((found for source in self.sources if (found := getattr(source, "tokenizer", None))), None)

    @property
    def corpora(self) -> list[Corpus]:
        """The files of each source."""
        return [source.corpus for source in self.sources]

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


def _check_forms(sources: dict[str, Any]) -> None:
    """Refuse sources whose samples cannot be in one batch, by their first samples."""
    forms = {name: _form(source[0]) for name, source in sources.items()}
    for name, form in forms.items():
        first = next(iter(forms))
        if form != forms[first]:
            raise DataError(
                "data.samples_of_sources_differ",
                "data.sources: a sample of {first} is {sample}, but a sample of {second} is {other}. All samples of a "
                "batch need the same names, types and shapes. Change columns, inputs, target, shape or map of a "
                "source, or set data.collate.",
                first=first,
                second=name,
                sample=forms[first],
                other=form,
            )


def _form(value: Any) -> str:
    """Describe the structure, types and shapes of a sample."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_form(inner)}" for name, inner in sorted(value.items())) + "}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_form, value))})"
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return f"{str(value.dtype).removeprefix('torch.')} {' x '.join(map(str, value.shape))}".rstrip()
    # `default_collate` makes these types of Python's numbers
    return {bool: "bool", int: "int64", float: "float64"}.get(type(value), type(value).__name__)


def _check_sequences(sources: dict[str, Sequences]) -> None:
    """Refuse sources of tokens whose samples would mean different things to the model."""
    forms = {name: source.form for name, source in sources.items()}
    for name, form in forms.items():
        first = next(iter(forms))
        for key, value in form.meaning.items():
            if value != forms[first].meaning[key]:
                raise DataError(
                    "data.tokens_of_sources_differ",
                    "data.sources: {first} has the {key} {value}, but {second} has {other}. The samples of a batch "
                    "must have the same {key}.",
                    first=first,
                    second=name,
                    key=key,
                    value=forms[first].meaning[key],
                    other=value,
                )
