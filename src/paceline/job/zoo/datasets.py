"""The data sets that a job can name, which `DataSpec.build` builds with this module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from paceline.errors import DataError, JobError
from paceline.job.samples import Batch, Collated, DataSets, Labels, Selection, TensorSamples, apart, shares, split
from paceline.job.spec import load_object
from paceline.job.streams import Stream, kept_whole
from paceline.job.zoo.arrays import build_arrays, build_text
from paceline.job.zoo.images import build_cifar10, build_digits, build_images
from paceline.own_random import OwnRandom

if TYPE_CHECKING:
    from paceline.job.data import Custom, DataSpec, Streamed, Synthetic


def build_data(spec: DataSpec, *, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    """Build the training and validation sets of a job.

    The data sets depend only on the spec, the model's input shape and the seed, so they are the same for every plan.

    Raises:
        DataError: the data is missing, unreadable or invalid; see `DataSpec.build`.
        JobError: `collate` or `collate_held_out` cannot be imported.
    """
    built = _build(spec, input_shape, seed)
    held_out = ("collate_held_out", spec.collate_held_out) if spec.collate_held_out else ("collate", spec.collate)
    return built._replace(
        train=_collated(built.train, "collate", spec.collate),
        held_out=_collated(built.held_out, *held_out),
        test=_collated(built.test, *held_out),
    )


def _collated(dataset: Any, key: str, path: str | None) -> Any:
    if dataset is None or path is None:
        return dataset
    found = load_object(path)
    if not callable(found):
        raise JobError(
            "data.not_a_collate",
            "data.{key}: {path} is a {class_name}. Name a function that turns a list of samples into a batch.",
            key=key,
            path=path,
            class_name=type(found).__name__,
        )
    if isinstance(dataset, Stream):
        dataset.collate_fn = found
        return dataset
    return Collated(dataset, found)


def _build(spec: DataSpec, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    match spec.kind:
        case "digits":
            return build_digits(spec, input_shape, seed)
        case "cifar10":
            return build_cifar10(spec, input_shape, seed)
        case "images":
            return build_images(spec, input_shape, seed)
        case "text":
            return build_text(spec, seed)
        case "arrays":
            return build_arrays(spec, seed)
        case "records":
            from paceline.job.zoo.records import build_records

            return build_records(spec, input_shape, seed)
        case "tokens":
            from paceline.job.zoo.tokens import build_tokens

            return build_tokens(spec, seed)
        case "chat":
            from paceline.job.zoo.chat import build_chat

            return build_chat(spec, seed)
        case "preferences":
            from paceline.job.zoo.chat import build_preferences

            return build_preferences(spec, seed)
        case "mixture":
            from paceline.job.zoo.mixture import build_mixture

            return build_mixture(spec, lambda source: build_data(source, input_shape=input_shape, seed=seed))
        case "synthetic":
            return build_synthetic(spec, input_shape, seed)
        case "dataset":
            return _build_custom(spec, seed)
        case "iterable":
            return _build_stream(spec, seed)


def _build_custom(spec: Custom, seed: int) -> DataSets:
    # a factory's random numbers depend only on the seed; earlier draws of this process differ between plans
    with OwnRandom(seed):
        samples = _call(spec, spec.factory)
        held_out = None if spec.held_out_factory is None else _call(spec, spec.held_out_factory)
        test = _call(spec, spec.test) if isinstance(spec.test, str) else None
    return split(samples, spec, seed, held_out=held_out, test=test)


def _build_stream(spec: Streamed, seed: int) -> DataSets:
    with OwnRandom(seed):
        dataset = _made(spec, spec.factory)
        if not isinstance(dataset, IterableDataset):
            raise DataError(
                "data.not_iterable",
                "data {factory} returned a {kind}, not an IterableDataset. Use kind: dataset for a map-style data set.",
                factory=spec.factory,
                kind=type(dataset).__name__,
            )
        train = Stream(dataset, parts=spec.parts, limit=spec.limit, seed=seed)
        held_out, test = (
            Selection.first(_kept(spec, factory), spec.limit) if isinstance(factory, str) else None
            for factory in (spec.held_out_factory, spec.test)
        )
    _check_sample(train.example, spec.factory, train.name, any_sample=spec.collate is not None)
    return DataSets(train, held_out, test=test)


def _kept(spec: Streamed, factory: str) -> Dataset[Any]:
    dataset = kept_whole(_made(spec, factory), spec.limit)
    _check_map_style(dataset, factory, any_sample=spec.collate is not None)
    return dataset


def _call(spec: Custom, factory: str) -> Dataset[Any]:
    dataset = _made(spec, factory)
    _check_map_style(dataset, factory, any_sample=spec.collate is not None)
    return dataset  # type: ignore[no-any-return]  # checked by what it can do, not by its class


def _made(spec: Custom | Streamed, factory: str) -> Any:
    make = load_object(factory)
    try:
        return make(**spec.args)
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in spec.args.items())
        raise DataError(
            "data.factory_raised",
            "data {factory}({given}) raised {kind}: {error}",
            factory=factory,
            given=given,
            kind=type(error).__name__,
            error=error,
        ) from error


def _check_map_style(dataset: Any, factory: str, *, any_sample: bool) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise DataError(
            "data.iterable_factory",
            "data {factory} is an IterableDataset ({kind}). Write it as data: {{kind: iterable, factory: {factory}}}.",
            factory=factory,
            kind=kind,
        )
    lacking = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if lacking:
        raise DataError(
            "data.not_a_dataset",
            "data {factory} returned a {kind} without {missing}. Return a torch.utils.data.Dataset that has both.",
            factory=factory,
            kind=kind,
            missing=" and ".join(lacking),
        )
    if len(dataset) == 0:
        raise DataError(
            "data.dataset_empty", "data {factory} returned an empty {kind} of length 0", factory=factory, kind=kind
        )
    try:
        sample = apart(dataset)[0]
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(
            "data.first_sample_raised",
            "data {factory}: reading the first sample ({kind}[0]) raised {what}",
            factory=factory,
            kind=kind,
            what=what,
        ) from error
    _check_sample(sample, factory, kind, any_sample=any_sample)


def _check_sample(sample: Any, factory: str, name: str, *, any_sample: bool) -> None:
    if not any_sample and not isinstance(sample, dict) and not (isinstance(sample, tuple) and len(sample) >= 2):
        found = f"a tuple of {len(sample)}" if isinstance(sample, tuple) else f"a {type(sample).__name__}"
        raise DataError(
            "data.sample_form",
            "data {factory}: a sample must be a tuple (input, …, target) or a dict, but the first sample of {kind} is "
            "{found}. You can also name a `collate` function.",
            factory=factory,
            kind=name,
            found=found,
        )


_BANK_BYTES = 64 << 20


def build_synthetic(spec: Synthetic, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
    """Build normally distributed inputs with random classes, or random tokens if the spec has `vocab`.

    The target of a token is the next token.
    """
    shape = spec.shape or input_shape
    if not shape:
        raise DataError(
            "data.shape_unknown",
            "the model does not define an input shape. Give data.shape, e.g. [3, 32, 32], or [128] for tokens with "
            "vocab.",
        )
    if spec.vocab and len(shape) != 1:
        raise DataError(
            "data.shape_of_tokens",
            "synthetic tokens need a data.shape of the form [sequence length], but data.shape is {shape!s}",
            shape=list(shape),
        )
    samples = min(spec.samples, spec.limit or spec.samples)
    kept, tested = shares(samples, spec)
    inputs, target = _bank(spec, shape, samples, seed)
    train, held_out, test = (
        Invented(inputs, target, first, number) if number else None
        for first, number in (
            (0, samples - kept - tested),
            (samples - kept, kept),
            (samples - kept - tested, tested),
        )
    )
    assert train is not None
    return DataSets(train, held_out, synthetic=True, test=test)


class Invented(TensorSamples):
    """Generated samples `first` to `first + samples - 1` of an endless sequence that repeats stored samples."""

    def __init__(self, inputs: Tensor, target: Tensor, first: int, samples: int) -> None:
        super().__init__(inputs, target)
        self.first, self.samples = first, samples

    @property
    def labels(self) -> Labels | None:
        """Class of each sample; None for tokens."""
        if self.target.dim() != 1:
            return None
        return self.target.numpy()[(self.first + np.arange(self.samples)) % len(self.target)]

    def __len__(self) -> int:
        return self.samples

    def __getitems__(self, indices: list[int]) -> Batch:
        if indices and not 0 <= min(indices) <= max(indices) < self.samples:
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
