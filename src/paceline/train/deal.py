"""A user's `DataLoader`, dealt to the data-parallel ranks: the same global batches on any number of them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from paceline.comm import Group
from paceline.errors import DataError
from paceline.job.partition import Partition, PartitionSpec
from paceline.train.loader import Loader


def deal(loader: DataLoader[Any], readers: Group, world: Group, seed: int) -> Loader:
    """This rank's share of every batch of `loader`, whose `batch_size` is the global batch. Every rank calls it.

    Args:
        loader: a `DataLoader` as one process would use it.
        readers: the ranks that read different samples.
        world: all ranks.
        seed: of the order, where the loader shuffles without a generator of its own.

    Raises:
        DataError: the loader cannot be dealt, with what to write instead.
    """
    if not isinstance(loader, DataLoader):
        raise DataError(f"setup needs a torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "an IterableDataset has no length, so its samples cannot be dealt once each; give a dataset with __len__ and __getitem__"
        )
    if loader.batch_size is None:
        raise DataError("setup deals whole batches: give the DataLoader a batch_size (the global batch), not a batch_sampler")
    spec = PartitionSpec(shuffle=not isinstance(loader.sampler, SequentialSampler))
    partition = Partition(
        spec,
        samples=len(loader.dataset),  # type: ignore[arg-type]
        global_batch=loader.batch_size,
        seed=seed,
        replica=readers.rank,
        replicas=readers.size,
        hosts=readers.hosts,
        drop_last=loader.drop_last,
    )
    return Loader(
        loader.dataset,
        partition,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory or world.device.type == "cuda",
    )
