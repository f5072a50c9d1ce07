"""Division of a user's `DataLoader` over the data-parallel ranks.

The global batches do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline.comm import Group
from paceline.data.loader import Loader
from paceline.data.loader_processes import Workers
from paceline.data.samples import RequestedSamples
from paceline.data.stream import SamplerStream, name_of, samplers
from paceline.data.whole import Flow, Items, Iterated
from paceline.device import has_pinned_memory
from paceline.errors import DataError
from paceline.job.partition import Partition, PartitionSpec
from paceline.job.samples import files_of

_READ_BY_TORCH = (DataLoader, StatefulDataLoader)


def deal(loader: DataLoader[Any], data_group: Group, world: Group, seed: int, *, tells_epochs: bool = True) -> Loader:
    """Return a loader of this rank's share of every global batch; every rank calls it.

    With `shuffle=True` and no generator, the order depends only on `seed` and the epoch. Otherwise rank 0 draws the
    order from the loader's own sampler or batch sampler. For an `IterableDataset`, or with `batch_size=None`, each
    rank reads every batch and keeps its share.

    Args:
        loader: a `DataLoader` as in a script for one process.
        data_group: group of the data-parallel ranks, which read different samples.
        world: group of all ranks.
        seed: seed of the sample order if the loader shuffles without its own generator.
        tells_epochs: whether to call the dataset's `set_epoch` at the start of each epoch.

    Raises:
        DataError: the loader cannot be divided; the message says what to write instead.
    """
    check(loader, world)
    ahead = loader.prefetch_factor if loader.num_workers else None
    own = loader.persistent_workers, loader.timeout, loader.worker_init_fn, loader.multiprocessing_context
    workers = Workers(loader.num_workers, ahead, *own)
    partition = _partition(loader, data_group, world, seed)
    samples = _samples(loader, partition, data_group, seed)
    if not tells_epochs:
        samples.epoch = 0
    return Loader(
        loader.dataset,
        partition,
        pin_memory=loader.pin_memory or has_pinned_memory(world.device),
        workers=workers,
        samples=samples,
        rank=world.rank,
        begins_anew=True,
    )


def _partition(loader: DataLoader[Any], data_group: Group, world: Group, seed: int) -> Partition | SamplerStream | Flow:
    dataset: Any = loader.dataset
    ranks: dict[str, Any] = {"data_group": data_group, "world": world, "seed": seed}
    if isinstance(dataset, IterableDataset):
        length = len(loader) if hasattr(dataset, "__len__") else None
        name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        return Flow(name, **ranks, length=length, batch_size=loader.batch_size, workers=loader.num_workers)
    if _is_plain(loader):
        batch_size = loader.batch_size
        assert batch_size is not None
        return Partition(
            PartitionSpec(shuffle=isinstance(loader.sampler, RandomSampler)),
            samples=len(dataset),
            global_batch=batch_size if loader.drop_last else min(batch_size, len(dataset) or batch_size),
            seed=seed,
            replica=data_group.rank,
            replicas=data_group.size,
            hosts=data_group.hosts,
            drop_last=loader.drop_last,
            leaves_empty=True,
            shards=files_of(dataset),
        )
    single = loader.batch_sampler is None and not _is_bulk(loader)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    own = {"generator": loader.generator, "persistent": loader.persistent_workers}
    return SamplerStream(sampler, dataset, **ranks, batch_size=loader.batch_size, single=single, **own)


def _samples(
    loader: DataLoader[Any], partition: Partition | SamplerStream | Flow, data_group: Group, seed: int
) -> RequestedSamples:
    read = loader.dataset, loader.collate_fn, data_group.rank
    if isinstance(partition, Flow):
        return Iterated(*read, data_group.size, seed, batch_size=loader.batch_size, drop_last=loader.drop_last)
    if isinstance(partition, SamplerStream) and partition.single:
        return Items(*read, data_group.size, seed)
    return RequestedSamples(*read, seed, bulk=_is_bulk(loader))


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Return True if the loader reads in dataset order, or shuffles with plain `shuffle=True`."""
    sampler = loader.sampler
    by_size = loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
    if not by_size or getattr(sampler, "data_source", None) is not loader.dataset:
        return False
    if type(sampler) is RandomSampler:
        return sampler.generator is None and not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler


def _is_bulk(loader: DataLoader[Any]) -> bool:
    """Return True if the sampler yields a list of indices for each batch."""
    return loader.batch_size is None and loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)


def check(loader: DataLoader[Any], world: Group) -> None:
    """Refuse a loader whose batches would differ from those of a single process.

    Raises:
        DataError: the batches would differ; the message says what to write instead.
    """
    if not isinstance(loader, DataLoader):
        raise DataError(
            "data.not_a_loader", "setup needs a torch DataLoader, not a {class_name}", class_name=type(loader).__name__
        )
    kind = type(loader)
    for name in ("__iter__", "_get_iterator"):
        if getattr(kind, name) not in [getattr(known, name) for known in _READ_BY_TORCH]:
            raise DataError(
                "data.loader_overridden",
                "{module}.{class_name} defines its own {name}, but paceline does not call it when it divides the "
                "samples over the ranks. Move this code into the data set, the sampler or collate_fn, and give "
                "setup a torch DataLoader.",
                module=kind.__module__,
                class_name=kind.__qualname__,
                name=name,
            )
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        raise DataError(
            "data.data_pipe",
            "a DataPipe divides itself among ranks and loader processes. Give a Dataset or an IterableDataset instead.",
        )
    for sampler in samplers(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler):
        _check_not_distributed(sampler, loader, world)


def _check_not_distributed(sampler: Any, loader: DataLoader[Any], world: Group) -> None:
    """Refuse a sampler that draws only one rank's part of the samples."""
    parts = getattr(sampler, "num_replicas", 1)
    if parts == 1 and not (isinstance(sampler, DistributedSampler) and world.size > 1):
        return
    size = loader.batch_size
    instead = "shuffle=True" if getattr(sampler, "shuffle", True) else "shuffle=False"
    written = (
        f"DataLoader(dataset, batch_size={size * parts}, {instead})" if size else "a batch sampler of global batches"
    )
    raise DataError(
        "data.sampler_distributed",
        "{sampler} draws the samples of one rank out of {parts}. paceline divides the batches itself, so pass a "
        "loader as in a script for one process. Write {written}: batch_size counts the samples of all "
        "ranks together{size}",
        sampler=name_of(sampler),
        parts=parts,
        written=written,
        size=f" (here {parts} x {size})" if size else "",
    )
