"""Partition of the samples of an epoch over the replicas.

The partition is a pure function of (spec, sizes, seed, epoch), so each rank computes its own part without
communication.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from paceline.corpus.order import Mixture
from paceline.errors import DataError, InvalidValue, PlanError
from paceline.job.spec import Spec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class PartitionSpec(Spec):
    """How samples are divided: `partition: stratified`, or `{kind: uniform, weights: [1, 0.5]}`.

    - `uniform`: each global batch is a slice of one shuffled order, so it is the same for any number of replicas.
    - `stratified`: like `uniform`, but every batch and every replica's part have the same class proportions as the
      whole set.
    - `hierarchical`: each host reads only its own part of the set, the same part in every epoch. With `host_files`,
      this part consists of the files on the host.
    """

    short: ClassVar[str | None] = "kind"
    kind: Literal["uniform", "hierarchical", "stratified"] = "uniform"
    # each replica's relative share of every step
    weights: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] | None = None
    host_files: bool = False
    shuffle: bool = True  # whether each epoch has a new order; otherwise the order of the data set is kept

    @model_validator(mode="after")
    def _stratified_is_shuffled(self) -> PartitionSpec:
        if self.kind == "stratified" and not self.shuffle:
            raise InvalidValue(
                "partition.stratified_shuffles",
                "stratified shuffles the classes in each epoch. Use shuffle: false only with uniform and hierarchical.",
            )
        return self

    @model_validator(mode="after")
    def _host_files_are_hierarchical(self) -> PartitionSpec:
        if self.host_files and self.kind != "hierarchical":
            raise InvalidValue(
                "partition.host_files",
                "host_files works only with kind: hierarchical; with {kind}, every host reads the whole set",
                kind=self.kind,
            )
        return self


class Partition:
    """The partition of a training set over replicas, and one replica's part of it.

    All replicas together read every sample once per epoch.

    Args:
        samples: number of samples in the whole training set, over all hosts.
        global_batch: number of samples of a step over all replicas. The last step of an epoch has the remaining
            samples, or is skipped with `drop_last`.
        hosts: the host (0, 1, …) of each replica; by default, all replicas are on one host.
        host_samples: number of samples on each host, only with `host_files`. Sample indices then count only the samples
            of the replica's own host.
        leaves_empty: whether the global batch may be smaller than the number of replicas; some replicas then have no
            sample.
        labels: the class of each sample, integers of shape (samples,); only with `stratified`.
        shards: a data set that defines the order of its samples, because it reads them from shards.

    Attributes:
        changes: shares that replace the weights, each with its first step; empty unless `moves` is True.

    Raises:
        DataError: the set is empty or smaller than a global batch, labels are missing or do not fit the set, or a host
            has no samples.
        PlanError: the global batch is smaller than the number of replicas (unless `leaves_empty`), or the number of
            weights is not the number of replicas.
    """

    def __init__(
        self,
        spec: PartitionSpec,
        *,
        samples: int,
        global_batch: int,
        seed: int,
        replica: int,
        replicas: int,
        hosts: Sequence[int] | None = None,
        host_samples: Sequence[int] | None = None,
        labels: NDArray[Any] | None = None,
        drop_last: bool = False,
        leaves_empty: bool = False,
        shards: ShardOrder | None = None,
    ) -> None:
        _check_sizes(samples, global_batch, 1 if leaves_empty else replicas)
        weights = _weights(spec, replicas)
        self.samples, self.global_batch, self.seed, self.shuffle = samples, global_batch, seed, spec.shuffle
        self.replica, self.replicas = replica, replicas
        self.changes = ShareChanges(replicas, global_batch)
        self.shards = shards
        self.held_samples = samples  # length of the dataset that this replica opens
        self.steps_per_epoch = samples // global_batch if drop_last else -(-samples // global_batch)
        self._deal: _Deal
        if spec.kind == "uniform":
            self._deal = _Uniform(self, weights) if shards is None else _Sharded(self, weights, shards)
        elif spec.kind == "stratified":
            self._deal = _Stratified(self, weights, _class_codes(labels, samples))
        else:
            owners = _owners(hosts, replicas)
            held = _host_samples(host_samples, samples, owners) if spec.host_files else None
            self._deal = _Hierarchical(self, weights, owners, held)
            self.held_samples = samples if held is None else int(held[owners[replica]])

    def size(self, step: int) -> int:
        """Return the number of samples of all replicas together in step `step` of an epoch (0-based)."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def shares(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the number of samples of each replica in step `step` of an epoch (0-based).

        The shares sum to `size(step)`. Without `changes`, they are the same in every epoch.
        """
        return tuple(self._deal.shares(epoch, step).tolist())

    @property
    def moves(self) -> bool:
        """True if any replica may read any sample, so that shares can change."""
        return isinstance(self._deal, _Uniform)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[list[int]]:
        """Yield this replica's sample indices for each step, starting at `start_step`.

        A list may be empty if the last batch has fewer samples than there are replicas.
        """
        return self._deal.batches(epoch, start_step)

    def drawn(self, epoch: int, step: int) -> list[int]:
        """Return how many samples of each source were drawn before a step.

        The numbers include earlier epochs. Without sources, the list is empty.
        """
        order = self._deal.order_of(epoch) if isinstance(self._deal, _Sharded) else None
        return order.counts(step) if isinstance(order, Mixture) else []

    def shards_from(self, epoch: int, step: int) -> list[int]:
        """Return the shards that this replica reads next, in the order of need.

        The list covers the steps from `step` on, some time ahead, but at most to the end of the epoch. Without shards,
        the list is empty.
        """
        if not isinstance(self._deal, _Sharded) or self.shards is None or step >= self.steps_per_epoch:
            return []
        last = self._deal.slots(epoch, self.steps_per_epoch - 1)
        return self._deal.order_of(epoch).shards_from(*self._deal.slots(epoch, step), self.shards.window, last)


class EpochOrder(Protocol):
    """The order of an epoch's samples; positions are `step * global_batch + slot`."""

    def rows(self, first: int, end: int) -> Ints:
        """Return the samples at the positions `first` to `end - 1` of one batch."""

    def shards_from(self, first: int, end: int, ahead: int, last: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the shards that these slots need, in this batch and in later batches.

        `last` is the range of positions in the epoch's last batch, which may be smaller.
        """


class ShardOrder(Protocol):
    """A data set that defines the order of its samples.

    Attributes:
        window: number of samples that are shuffled together.
        spans_epochs: whether the samples of an epoch depend on those of earlier epochs.
    """

    window: int
    spans_epochs: bool

    @property
    def order_settings(self) -> dict[str, Any]:
        """Settings that determine the order, as JSON values.

        `weights` is a list of pairs: a first step, and the weights from this step on.
        """

    def epoch_order(
        self, seed: int, epoch: int, batch: int, *, steps: int, shuffle: bool, part: tuple[int, int] | None = None
    ) -> EpochOrder:
        """Return the order of an epoch.

        Args:
            batch, steps: number of samples of a full batch, and of batches in an epoch.
            part: first and end of a range of samples; the order then numbers samples from the first. None for all.
        """


def even_shard(samples: int, replica: int, replicas: int) -> slice:
    """Return the range of samples that `even_shares` assigns to one replica."""
    ends = (0, *accumulate(even_shares(samples, replicas)))
    return slice(ends[replica], ends[replica + 1])


@lru_cache(256)  # streams call this for every batch
def even_shares(samples: int, replicas: int) -> tuple[int, ...]:
    """Divide a number of samples into nearly equal shares, one for each replica."""
    return tuple(np.diff(_cuts(_bounds(np.ones(replicas)), samples)).tolist())


class _Deal(Protocol):
    def shares(self, epoch: int, step: int) -> Ints: ...

    def batches(self, epoch: int, start_step: int) -> Iterator[list[int]]: ...


class _Uniform:
    """Uniform partition: every batch is a contiguous slice of one order of the samples.

    With global batch B, step s takes positions [s·B, (s+1)·B) and divides them over the replicas.
    """

    def __init__(self, partition: Partition, weights: Floats) -> None:
        self.partition = partition
        self.bounds = _bounds(weights)

    def shares(self, epoch: int, step: int) -> Ints:
        return np.diff(self.cuts(epoch, step))

    def cuts(self, epoch: int, step: int) -> Ints:
        """Return 0 and the end position of each replica's part of a step's batch."""
        part = self.partition
        size, changed = part.size(step), part.changes.at((epoch, step))
        if changed is not None:
            cuts = _cuts(_bounds(np.asarray(changed, np.float64)), size)
            # a smaller batch uses the shares only if every replica gets a sample
            if size == part.global_batch or np.diff(cuts).all():
                return cuts
        return _cuts(self.bounds, size)

    def order(self, epoch: int) -> NDArray[np.integer[Any]]:
        """Return all samples in the epoch's order, which is independent of replicas and weights."""
        return _order(self.partition, self.partition.samples, epoch)

    def batches(self, epoch: int, start_step: int) -> Iterator[list[int]]:
        part, order = self.partition, self.order(epoch)
        shares = None
        for step in range(start_step, part.steps_per_epoch):
            before, shares = shares, part.changes.at((epoch, step))
            # all full steps have the same cuts until shares change
            if step == start_step or shares is not before or part.size(step) != part.global_batch:
                begin, end = self.cuts(epoch, step)[part.replica : part.replica + 2].tolist()
            first = step * part.global_batch
            yield order[first + begin : first + end].tolist()


class _Sharded(_Uniform):
    """Uniform partition in the order of a data set that reads shards."""

    def __init__(self, partition: Partition, weights: Floats, shards: ShardOrder) -> None:
        super().__init__(partition, weights)
        self._shards = shards
        self._orders: dict[int, EpochOrder] = {}

    def order_of(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; the orders of two epochs are kept."""
        if epoch not in self._orders:
            part = self.partition
            kept = list(self._orders.items())[-1:]
            steps = part.steps_per_epoch
            own = self._shards.epoch_order(part.seed, epoch, part.global_batch, steps=steps, shuffle=part.shuffle)
            self._orders = dict([*kept, (epoch, own)])
        return self._orders[epoch]

    def slots(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the first and end position of this replica's part of a step's batch."""
        part = self.partition
        begin, end = self.cuts(epoch, step)[part.replica : part.replica + 2].tolist()
        return step * part.global_batch + begin, step * part.global_batch + end

    def batches(self, epoch: int, start_step: int) -> Iterator[list[int]]:
        order = self.order_of(epoch)
        for step in range(start_step, self.partition.steps_per_epoch):
            yield order.rows(*self.slots(epoch, step)).tolist()


class _Stratified(_Uniform):
    """Stratified partition: an order that mixes classes evenly, and batches divided class by class.

    To divide a batch, the replicas are split into halves, again and again, until each half has one replica. Each split
    divides every class in proportion and rounds down; the classes with the largest deficit from earlier batches are
    rounded up. Over any number of steps, a replica's number of samples in each class therefore differs from its exact
    share by at most two or three. A replica computes only the splits that lead to itself.
    """

    def __init__(self, partition: Partition, weights: Floats, codes: Ints) -> None:
        super().__init__(partition, weights)
        self.codes = codes
        self.class_sizes: Ints = np.bincount(codes)

    def order(self, epoch: int) -> NDArray[np.integer[Any]]:
        """Return all samples in an order that spreads each class evenly (systematic sampling).

        Each class is shuffled, and the i-th of its n samples is placed at (i + offset) / n of the epoch.
        """
        shuffled = super().order(epoch)
        by_class = shuffled[np.argsort(self.codes[shuffled], kind="stable")]
        offsets = _random(self.partition.seed, epoch, 1).random(len(self.class_sizes))
        sizes = self.class_sizes
        place = (_ranks_in_runs(sizes) + np.repeat(offsets, sizes)) / np.repeat(sizes, sizes)
        return by_class[np.argsort(place, kind="stable")]

    def batches(self, epoch: int, start_step: int) -> Iterator[list[int]]:
        part, order = self.partition, self.order(epoch)
        classes = len(self.class_sizes)
        # The class that is rounded up first is random. Otherwise the first replicas would always get more samples of
        # the first classes.
        codes = _random(part.seed, epoch, 2).permutation(classes)[self.codes]
        halvings = [(*halving, np.zeros(classes)) for halving in _halvings(part.replica, part.replicas)]
        for step in range(part.steps_per_epoch):  # from the first step on, because each step leaves a deficit
            batch = order[step * part.global_batch : step * part.global_batch + part.size(step)]
            cuts = self.cuts(epoch, step)
            kept, counts = np.argsort(codes[batch], kind="stable"), np.bincount(codes[batch], minlength=classes)
            for first, middle, owed in halvings:
                lower = _round_to_sum(counts, int(cuts[middle] - cuts[first]), owed)
                in_lower = _ranks_in_runs(counts) < np.repeat(lower, counts)
                kept, counts = (kept[in_lower], lower) if part.replica < middle else (kept[~in_lower], counts - lower)
            if step >= start_step:
                yield batch[np.sort(kept)].tolist()  # in the batch's order, so that microbatches mix the classes, too


class _Hierarchical:
    """Hierarchical partition: each host owns a range of the samples.

    A step takes samples from all hosts in proportion, and divides them over replicas by weight.
    """

    def __init__(self, partition: Partition, weights: Floats, owners: Ints, held: Ints | None) -> None:
        self.partition = partition
        hosts = int(owners.max()) + 1
        self.members = [np.flatnonzero(owners == host) for host in range(hosts)]
        self.bounds = [_bounds(weights[members]) for members in self.members]
        host_weights: Floats = np.bincount(owners, weights).astype(np.float64)
        self.sizes: Ints = np.diff(_cuts(_bounds(host_weights), partition.samples)) if held is None else held
        self.first_sample = np.zeros(hosts, np.int64) if held is not None else np.cumsum(self.sizes) - self.sizes
        self.host = int(owners[partition.replica])
        self.counts = _counts_per_host(self.sizes, partition.global_batch)

    def shares(self, epoch: int, step: int) -> Ints:
        shares = np.zeros(self.partition.replicas, np.int64)
        for members, bounds, count in zip(self.members, self.bounds, self.counts[step], strict=True):
            shares[members] = np.diff(_cuts(bounds, int(count)))
        return shares

    def batches(self, epoch: int, start_step: int) -> Iterator[list[int]]:
        part, host = self.partition, self.host
        order = self._rows_of(epoch, host)
        place = int(np.searchsorted(self.members[host], part.replica))
        first = int(self.counts[:start_step, host].sum())
        for count in self.counts[start_step : part.steps_per_epoch, host].tolist():
            cuts = _cuts(self.bounds[host], count)
            yield order(int(first + cuts[place]), int(first + cuts[place + 1])).tolist()
            first += count

    def _rows_of(self, epoch: int, host: int) -> Callable[[int, int], NDArray[np.integer[Any]]]:
        """Return a function that gives the host's samples between two positions of an epoch."""
        part, size, first = self.partition, int(self.sizes[host]), int(self.first_sample[host])
        if part.shards is None:
            order = _order(part, size, epoch, host) + first
            return lambda begin, end: order[begin:end]
        # the host's shares of batches vary in size, so the order treats all its samples as one batch
        rows = (first, first + size)
        own = part.shards.epoch_order(part.seed, epoch, size, steps=1, shuffle=part.shuffle, part=rows)
        return lambda begin, end: own.rows(begin, end) + first


def _check_sizes(samples: int, global_batch: int, replicas: int) -> None:
    if samples == 0:
        raise DataError(
            "data.empty",
            "the training set has 0 samples. Check the path, the filter and the limit in the job's `data`.",
        )
    if global_batch < replicas:
        raise PlanError(
            "plan.batch_smaller_than_replicas",
            "global_batch {global_batch} cannot be divided over {replicas} replicas, because each replica needs at "
            "least one sample per step. Use global_batch {replicas} or more, or dp={global_batch} or less",
            global_batch=global_batch,
            replicas=replicas,
        )
    if samples < global_batch:
        raise DataError(
            "data.smaller_than_batch",
            "the training set has {samples} samples, fewer than one global batch of {global_batch}. Set "
            "global_batch to {samples} or less, or provide more data.",
            samples=samples,
            global_batch=global_batch,
        )


def _weights(spec: PartitionSpec, replicas: int) -> Floats:
    weights = spec.weights if spec.weights is not None else (1.0,) * replicas
    if len(weights) != replicas:
        raise PlanError(
            "plan.weights_not_per_replica",
            "partition has {weights} weights for {replicas} replicas. Give {replicas} weights, one for each "
            "replica, or none for equal shares.",
            weights=len(weights),
            replicas=replicas,
        )
    return np.asarray(weights, np.float64)


def _class_codes(labels: NDArray[Any] | None, samples: int) -> Ints:
    """Map the class labels, which may be any integers, to 0, 1, …."""
    if labels is None:
        raise DataError(
            "data.no_labels",
            "partition: stratified needs the class of each sample, but this dataset has no `labels` (an integer "
            "array, one per sample). Give it that attribute, or choose partition: uniform.",
        )
    labels = np.asarray(labels)
    if labels.shape != (samples,) or labels.dtype.kind not in "iub":
        raise DataError(
            "data.labels_invalid",
            "partition: stratified needs `labels` of shape ({samples},) and an integer type, but the labels of the "
            "dataset have shape {shape} and type {dtype}",
            samples=samples,
            shape=labels.shape,
            dtype=labels.dtype,
        )
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _owners(hosts: Sequence[int] | None, replicas: int) -> Ints:
    """Check that hosts are numbered from 0 without gaps; return each replica's host."""
    owners = np.asarray([0] * replicas if hosts is None else hosts, np.int64)
    if len(owners) != replicas or set(owners.tolist()) != set(range(int(owners.max()) + 1)):
        raise PlanError(
            "plan.hosts_of_replicas",
            "partition: the hosts {owners!s} are not valid for {replicas} replicas. Give the host of each replica, "
            "numbered from 0 without gaps.",
            owners=owners.tolist(),
            replicas=replicas,
        )
    return owners


def _host_samples(host_samples: Sequence[int] | None, samples: int, owners: Ints) -> Ints:
    hosts = int(owners.max()) + 1
    held = [samples] if host_samples is None and hosts == 1 else list(host_samples or ())
    if len(held) != hosts or sum(held) != samples:
        raise DataError(
            "data.host_files_counts",
            "partition: host_files needs the number of samples on each of {hosts} hosts. These numbers must sum to "
            "{samples}, but they are {counts!s}.",
            hosts=hosts,
            samples=samples,
            counts=held,
        )
    if 0 in held:
        raise DataError(
            "data.host_without_files",
            "partition: host {host} has no training files. Add files on this host, or leave the host out of the run.",
            host=held.index(0),
        )
    return np.asarray(held, np.int64)


def _bounds(weights: Floats) -> Floats:
    """Return the cumulative shares, from 0 to 1, which are the boundaries of the parts."""
    bounds: Floats = np.concatenate(([0.0], np.cumsum(weights)))
    return bounds / float(bounds[-1])


def _cuts(bounds: Floats, count: int) -> Ints:
    """Return the boundaries that divide `count` items by share.

    Each part differs from its exact share by less than one item, and halves are rounded up.
    """
    return np.floor(bounds * count + 0.5).astype(np.int64)


def _random(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def _order(partition: Partition, count: int, epoch: int, host: int = 0) -> NDArray[np.integer[Any]]:
    # uint32 needs half the memory for a large set
    indices: NDArray[np.integer[Any]] = np.arange(count, dtype=np.uint32 if count <= 2**32 else np.int64)
    if partition.shuffle:
        _random(partition.seed, epoch, 0, host).shuffle(indices)
    return indices


def _ranks_in_runs(lengths: Ints) -> Ints:
    """Return each item's position within its run; `lengths` has the lengths of the runs.

    For the lengths [2, 3], the result is 0 1 0 1 2.
    """
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _halvings(replica: int, replicas: int) -> Iterator[tuple[int, int]]:
    """Yield the splits into halves that lead to this replica.

    Each split is a pair: the first replica of the lower half and the first replica of the upper half.
    """
    first, end = 0, replicas
    while end - first > 1:
        middle = (first + end) // 2
        yield first, middle
        first, end = (first, middle) if replica < middle else (middle, end)


def _round_to_sum(counts: Ints, total: int, owed: Floats) -> Ints:
    """Divide `total` items in proportion to `counts`, and round up for the largest deficits.

    Updates the deficits, `owed`.
    """
    whole, remainder = np.divmod(counts * total, max(int(counts.sum()), 1))
    owed += remainder / max(int(counts.sum()), 1)
    spare = total - int(whole.sum())
    if spare:
        most_owed = np.argsort(np.where(remainder > 0, -owed, np.inf), kind="stable")[:spare]
        whole[most_owed] += 1
        owed[most_owed] -= 1
    return whole


def _counts_per_host(sizes: Ints, global_batch: int) -> Ints:
    """Return the number of samples of each host in each step, shape (steps, hosts).

    Each row sums to the global batch, and each column sums to the size of a host. In every step, a host contributes its
    exact share, rounded down. The samples that remain are spread evenly over the epoch. For this purpose, the remaining
    samples of all hosts form one sequence, in which the i-th of a host's n remaining samples is ordered by (i + 1) / n
    (Jefferson's rule). Each step takes its missing samples from this sequence in order.
    """
    samples = int(sizes.sum())
    totals = np.full(-(-samples // global_batch), global_batch)
    totals[-1] = samples - global_batch * (len(totals) - 1)
    counts = totals[:, None] * sizes // samples
    left_over = sizes - counts.sum(axis=0)
    # at equal positions, the host with the most remaining samples comes first, so that other hosts fill the last batch
    by_size = np.argsort(-left_over, kind="stable")
    place = (_ranks_in_runs(left_over[by_size]) + 1) / np.repeat(left_over[by_size], left_over[by_size])
    sequence = np.repeat(by_size, left_over[by_size])[np.argsort(place, kind="stable")]
    step = np.repeat(np.arange(len(totals)), totals - counts.sum(axis=1))
    np.add.at(counts, (step, sequence), 1)
    return counts


Shares = tuple[int, ...]
Place = tuple[int, int]  # epoch and step, both 0-based


class ShareChanges:
    """Changes of the replicas' shares of full batches, in the order of their first positions.

    Args:
        replicas, global_batch: the number of shares and their sum.
    """

    def __init__(self, replicas: int, global_batch: int) -> None:
        self.replicas, self.global_batch = replicas, global_batch
        self._places: list[Place] = []
        self._shares: list[Shares] = []

    def at(self, place: Place) -> Shares | None:
        """Return the changed shares at a position; None if the partition's weights apply."""
        found = bisect_right(self._places, place) - 1
        return self._shares[found] if found >= 0 else None

    @property
    def newest(self) -> Shares | None:
        """Return the shares of the last change; None if the partition's weights apply."""
        return self._shares[-1] if self._shares else None

    def add(self, place: Place, shares: Sequence[int]) -> None:
        """Use these shares from position `place` on.

        Later changes are removed. Of the changes before that epoch, only the newest is kept.

        Raises:
            ValueError: the shares do not sum to the global batch, or a replica has no sample.
        """
        shares = tuple(shares)
        if not self.fits(shares) or min(shares) < 1:
            raise ValueError(f"{shares} are no shares of {self.global_batch} samples for {self.replicas} replicas")
        first = max(bisect_right(self._places, (place[0], 0)) - 1, 0)
        end = bisect_right(self._places, (place[0], place[1] - 1))
        self._places = [*self._places[first:end], place]
        self._shares = [*self._shares[first:end], shares]

    def fits(self, shares: Sequence[int]) -> bool:
        """Return True if each replica has a share and their sum is the global batch."""
        return len(shares) == self.replicas and sum(shares) == self.global_batch

    def state(self) -> list[Any]:
        """Return the changes that are still needed, as values that JSON can represent."""
        return [[*place, list(shares)] for place, shares in zip(self._places, self._shares, strict=True)]

    def load(self, state: Sequence[Any]) -> None:
        """Restore saved changes; ignore changes for another number of replicas or another global batch.

        Raises:
            ValueError: the values were not returned by `state`.
        """
        self._places, self._shares = [], []
        for epoch, step, shares in state:
            if not all(type(number) is int and number >= 0 for number in (epoch, step, *shares)):
                raise ValueError(f"{[epoch, step, shares]!r:.200} is no change of shares")
            if self.fits(shares):
                self.add((epoch, step), shares)
