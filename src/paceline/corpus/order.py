"""Order of the samples of an epoch, shuffled in windows of shards.

A position in the epoch is `step * batch + slot`. A rank owns a range of slots of each batch. The order is
therefore the same for any number of ranks, and each rank reads few shards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil, floor
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

WINDOW = 4096  # samples of a lane that are shuffled together
_MOST_LANES = 120  # divisible by common numbers of ranks (2, 3, 4, 5, 6, 8, 10, 12), so that few ranks share a lane
_KEPT_ORDERS = 4  # epochs of a source of which a mixture keeps the order
_BLOCK = 1024  # samples of a large shard that stay together until their window is shuffled


class Order:
    """The order of all samples in one epoch, computed on demand.

    The shards are shuffled, and so are the blocks within each large shard. The resulting sequence is cut into lanes:
    contiguous runs, one for each slot of a batch (or for a few neighbouring slots of a large batch). Within a lane, the
    samples of each window are shuffled. Slot j of every batch takes the next sample of its lane. A rank therefore reads
    only the shards of its own lanes, and any position can be computed without the positions before it. The remaining
    samples, which form a smaller last batch, come from the end of the sequence.

    Args:
        starts: first sample number of each shard, and the number of all samples, shape (shards + 1,).
        batch: number of samples of a full batch.
        window: number of samples of a lane that are shuffled together.
        shuffle: if False, position p is sample p.
    """

    def __init__(
        self, starts: Ints, *, seed: int, epoch: int, batch: int, window: int = WINDOW, shuffle: bool = True
    ) -> None:
        self.starts, self.batch, self.window, self.shuffle = starts, batch, window, shuffle
        self._key = (seed, epoch)
        self.samples = int(starts[-1])
        self._steps = self.samples // batch  # full batches
        lanes = min(batch, _MOST_LANES)
        self._width = batch // lanes  # fewest slots of a lane in a batch
        # First slot of each lane. An extra last lane holds the samples that remain after the full batches.
        self._slots = np.arange(lanes + 1) * batch // lanes
        self._lanes = np.append(self._slots * self._steps, self.samples)
        counts = np.diff(starts)
        self._shards: Ints = self._random(0).permutation(len(counts)) if shuffle else np.arange(len(counts))
        self._ends = np.cumsum(counts[self._shards])
        self._windows: OrderedDict[tuple[int, int], Ints] = OrderedDict()

    def rows(self, first: int, end: int) -> Ints:
        """Return the sample numbers at the positions `first` to `end - 1` of one batch."""
        if not self.shuffle:
            return np.arange(first, end)
        found = np.empty(end - first, np.int64)
        for lane, at, count, index in self._stretches(first, end):
            filled = 0
            while filled < count:
                window, offset = divmod(index + filled, self.window)
                taken = self._window(lane, window)[offset : offset + count - filled]
                found[at + filled : at + filled + len(taken)] = taken
                filled += len(taken)
        return found

    def shards_from(self, first: int, end: int, ahead: int, last: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the shards that these slots need next, in the order of need.

        Args:
            first, end: range of positions in the first batch that is read.
            ahead: number of samples to look ahead in each lane. Without shuffling, number of positions after `end`.
            last: range of positions in the smaller last batch. Its shards are included if the look-ahead passes the
                last full batch.
        """
        if not self.shuffle:
            return self._shards_between(first, min(end + ahead, self.samples))
        windows = [
            (number - index // self.window, lane, number)
            for lane, _, count, index in self._stretches(first, end)
            for number in range(index // self.window, (index + count - 1 + ahead) // self.window + 1)
        ]
        found: dict[int, None] = {}
        for _, lane, number in sorted(windows):
            found.update(dict.fromkeys(self._shards_between(*self._bounds(lane, number))))
        full = self._steps * self.batch
        if last[0] >= full and first < full and first // self.batch + ahead // self._width >= self._steps:
            found.update(dict.fromkeys(shards_of(self.rows(*last), self.starts)))
        return list(found)

    def _stretches(self, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (lane, offset from `first`, number of samples, first index in the lane)."""
        step, slot = divmod(first, self.batch)
        if step >= self._steps:
            yield len(self._slots) - 1, 0, end - first, first - self._steps * self.batch
            return
        last = slot + end - first
        if last <= slot:
            return
        first_lane, last_lane = (np.searchsorted(self._slots, (slot, last - 1), side="right") - 1).tolist()
        for lane in range(first_lane, last_lane + 1):
            lane_first, lane_end = int(self._slots[lane]), int(self._slots[lane + 1])
            begin, stop = max(slot, lane_first), min(last, lane_end)
            yield lane, begin - slot, stop - begin, step * (lane_end - lane_first) + begin - lane_first

    def _bounds(self, lane: int, window: int) -> tuple[int, int]:
        """Return the part of the sequence that a window covers; empty after the lane's end."""
        begin, stop = int(self._lanes[lane]), int(self._lanes[lane + 1])
        return min(begin + window * self.window, stop), min(begin + (window + 1) * self.window, stop)

    def _window(self, lane: int, window: int) -> Ints:
        kept = self._windows.get((lane, window))
        if kept is None:
            kept = self._sequence(*self._bounds(lane, window))
            self._random(1, lane, window).shuffle(kept)
            self._windows[lane, window] = kept
            # a batch covers one or two windows of each lane
            if len(self._windows) > 2 * len(self._slots):
                self._windows.popitem(last=False)
        self._windows.move_to_end((lane, window))
        return kept

    def _sequence(self, begin: int, end: int) -> Ints:
        """Return the samples `begin` to `end - 1` of the sequence of shuffled shards and blocks."""
        low, high = self._places(begin, end)
        shards = self._shards[low:high]
        firsts, ends = self.starts[shards], self.starts[shards + 1]
        counts = ends - firsts
        before = self._ends[low:high] - counts  # position in the sequence at which the shard begins
        begins, stops = np.maximum(begin - before, 0), np.minimum(end - before, counts)
        lengths = stops - begins
        found = np.repeat(firsts + begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        filled = np.concatenate(([0], np.cumsum(lengths)))
        for nth in np.flatnonzero(counts > _BLOCK).tolist():
            part = self._blocks(int(shards[nth]), int(begins[nth]), int(stops[nth]))
            found[filled[nth] : filled[nth + 1]] = part + firsts[nth]
        return found

    def _blocks(self, shard: int, begin: int, end: int) -> Ints:
        """Return the samples `begin` to `end - 1` of a shard whose blocks are shuffled."""
        firsts, before = _shuffled_blocks(*self._key, shard, int(self.starts[shard + 1] - self.starts[shard]))
        low, high = np.searchsorted(before, (begin, end - 1), side="right") - 1
        parts = [np.arange(firsts[nth], firsts[nth] + before[nth + 1] - before[nth]) for nth in range(low, high + 1)]
        return np.concatenate(parts)[begin - before[low] : end - before[low]]

    def _places(self, begin: int, end: int) -> tuple[int, int]:
        low = int(np.searchsorted(self._ends, begin, side="right"))
        return low, int(np.searchsorted(self._ends, end - 1, side="right")) + 1 if end > begin else low

    def _shards_between(self, begin: int, end: int) -> list[int]:
        low, high = self._places(begin, end)
        return [int(shard) for shard in self._shards[low:high]]

    def _random(self, *key: int) -> np.random.Generator:
        return _random(*self._key, *key)


def shards_of(samples: Ints, starts: Ints) -> list[int]:
    """Return the sorted numbers of the shards that hold these samples."""
    shards: list[int] = np.unique(np.searchsorted(starts, samples, side="right") - 1).tolist()
    return shards


@lru_cache(maxsize=2 * _MOST_LANES)
def _shuffled_blocks(seed: int, epoch: int, shard: int, count: int) -> tuple[Ints, Ints]:
    """Return the first samples of a shard's shuffled blocks, and the blocks' positions.

    The last position is the number of samples.
    """
    blocks = -(-count // _BLOCK)
    shuffled = _random(seed, epoch, 2, shard).permutation(blocks)
    sizes = np.where(shuffled == blocks - 1, count - (blocks - 1) * _BLOCK, _BLOCK)
    return shuffled * _BLOCK, np.concatenate(([0], np.cumsum(sizes)))


def _random(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


class Mixture:
    """The order of one epoch of several sources with weights.

    The weights may change at given steps. The number of samples that each source has contributed before a step is
    computed directly from the weights, so a run can resume at any step. Within a batch, the sources are interleaved
    evenly. When a source ends, its next epoch begins.

    Args:
        sources: for each source, the `starts` of its shards as in `Order`.
        offsets: for each source, the number that `rows` adds to its sample numbers.
        schedule: (first step of the run, weight of each source), in the order of steps; the first step is 0.
        batch: number of samples of a full batch, over all sources.
        samples, steps: number of samples and of steps of an epoch.
        windows: for each source, the `window` of its `Order`.
        shuffle: if False, the samples of each source keep their order.
    """

    def __init__(
        self,
        sources: Sequence[Ints],
        offsets: Sequence[int],
        schedule: Sequence[tuple[int, Sequence[float]]],
        *,
        seed: int,
        epoch: int,
        batch: int,
        samples: int,
        steps: int,
        windows: Sequence[int],
        shuffle: bool = True,
    ) -> None:
        self.sources, self.offsets, self.batch, self.seed, self.shuffle = sources, offsets, batch, seed, shuffle
        self.windows, self.sizes = windows, [int(starts[-1]) for starts in sources]
        self._first_shards = [0, *accumulate(len(starts) - 1 for starts in sources)]
        self.samples, self._first = samples, epoch * samples
        begins = [step // steps * samples + step % steps * batch for step, _ in schedule]
        self._schedule = [(first, _fractions(weights)) for first, (_, weights) in zip(begins, schedule, strict=True)]
        self._shares = [[batch * weight / sum(weights) for weight in weights] for _, weights in schedule]
        # batch size of each source's own order: its first share of a batch that is not 0
        self._batches = [max(1, round(next(filter(None, of), 0))) for of in zip(*self._shares, strict=True)]
        self._orders: list[dict[int, Order]] = [{} for _ in sources]  # by source and epoch
        self._exact: dict[tuple[int, int], list[int]] = {}  # shards of the positions of single batches

    def counts(self, step: int) -> list[int]:
        """Return each source's number of samples before a step of this epoch.

        The numbers include earlier epochs.
        """
        until = self._first + min(step * self.batch, self.samples)
        counts = [0] * len(self.sources)
        ends = [first for first, _ in self._schedule[1:]]
        for (first, fractions), end in zip(self._schedule, [*ends, until], strict=True):
            length = min(end, until) - first
            if length > 0:
                counts = [a + b for a, b in zip(counts, _shared(length, fractions), strict=True)]
        return counts

    def rows(self, first: int, end: int) -> Ints:
        """Return the sample numbers at the positions `first` to `end - 1` of one batch."""
        step, slot = divmod(first, self.batch)
        before, after = self.counts(step), self.counts(step + 1)
        found: list[Ints] = []
        places: list[NDArray[np.float64]] = []
        for source, (begin, stop) in enumerate(zip(before, after, strict=True)):
            if stop > begin:
                found.append(self._of_source(source, begin, stop))
                places.append((np.arange(stop - begin) + 0.5) / (stop - begin))
        # mixed evenly, so that every rank gets each source in proportion
        mixed = np.concatenate(found)[np.argsort(np.concatenate(places), kind="stable")]
        return mixed[slot : slot + end - first]

    def shards_from(self, first: int, end: int, ahead: int, last: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the shards that these slots need from this batch on; see `Order.shards_from`.

        Shards are numbered across all sources, in the order of the sources. The look-ahead covers `ahead` steps (fewer
        for large batches), but at most the rest of the epoch.
        """
        step, slot = divmod(first, self.batch)
        end_step = -(-self.samples // self.batch)
        steps = range(step, min(step + 1 + ahead * min(self.batch, _MOST_LANES) // self.batch, end_step))
        found: list[tuple[float, int]] = []  # place in the look-ahead, and shard
        uneven = {end_step - 1: last} if end_step - 1 in steps and self.samples % self.batch else {}
        for source, size in enumerate(self.sizes):
            slots = self._slots(source, steps, slot, slot + end - first)
            begin, stop = self.counts(step)[source], self.counts(steps.stop)[source]
            at, wraps, own = begin, 0, self._first_shards[source]
            while at < stop and wraps < 3:
                until = min(stop, (at // size + 1) * size)
                shards = self._shards_between(source, at, until, slots)
                places = np.linspace(at - begin, until - begin, len(shards), endpoint=False) / (stop - begin)
                found += [(place, own + shard) for place, shard in zip(places.tolist(), shards, strict=True)]
                if until < stop:  # this step has the end of the source and its beginning
                    wrapped = bisect_left(steps, until, key=lambda later: self.counts(later + 1)[source])
                    place = steps[wrapped] * self.batch + slot
                    uneven.setdefault(steps[wrapped], (place, place + end - first))
                at, wraps = until, wraps + 1
            if at < stop:  # a small source, which is read several times
                found += [(1.0, shard) for shard in range(own, self._first_shards[source + 1])]
        for later, positions in uneven.items():
            if positions not in self._exact:  # `rows` costs milliseconds, and the look-ahead moves by a few steps
                self._exact[positions] = list(self._shards_of(self.rows(*positions)))
            found += [((later - step) / len(steps), shard) for shard in self._exact[positions]]
        return list(dict.fromkeys(shard for _, shard in sorted(found)))

    def _slots(self, source: int, steps: range, low: int, high: int) -> tuple[int, int]:
        """Return the slots of a source's own order that reach these slots of a batch."""
        first = self._first + steps.start * self.batch
        began = bisect_right(self._schedule, first, key=itemgetter(0)) - 1
        ended = bisect_left(self._schedule, self._first + steps.stop * self.batch, key=itemgetter(0))
        shares = [of_stage for of_stage in self._shares[began:ended] if of_stage[source]]
        size = self._own_batch(source)
        # with other weights than the order was made for, the slots of a rank vary from step to step
        differs = max((abs(of_stage[source] - size) for of_stage in shares), default=0.0)
        is_whole = all(abs(share - round(share)) < 1e-6 for of_stage in shares for share in of_stage)
        # places of sources are rounded to slots of the batch; shares with fractions vary by up to two samples
        margin = 0.5 + len(self.sources) * size / self.batch / 2 + differs + (0 if is_whole else 2)
        return max(0, floor(low / self.batch * size - margin)), min(size, ceil(high / self.batch * size + margin))

    def _shards_between(self, source: int, begin: int, stop: int, slots: tuple[int, int]) -> list[int]:
        """Return a source's own shards of its samples `begin` to `stop - 1`, in one epoch."""
        epoch, at = divmod(begin, self.sizes[source])
        order, until = self._order(source, epoch), at + stop - begin
        if not self.shuffle:
            return order.shards_from(at, until, 0)
        low, high = slots
        first, last, full = (place // order.batch * order.batch for place in (at, until - 1, order.samples))
        ahead = (last - first) // order.batch * -(-order.batch // min(order.batch, _MOST_LANES))
        bounds = [(place + low, max(place + low, min(place + high, order.samples))) for place in (first, full)]
        return order.shards_from(*bounds[0], ahead, bounds[1])

    def _shards_of(self, rows: Ints) -> Iterator[int]:
        """Yield the shards of samples as `rows` numbers them."""
        sources = np.searchsorted(self.offsets, rows, side="right") - 1
        for source in np.unique(sources).tolist():
            own = shards_of(rows[sources == source] - self.offsets[source], self.sources[source])
            yield from (self._first_shards[source] + shard for shard in own)

    def _of_source(self, source: int, begin: int, stop: int) -> Ints:
        """Return samples `begin` to `stop - 1` of a source that repeats itself, sorted by their slots."""
        size = self.sizes[source]
        found, slots = [], []
        while begin < stop:
            epoch, at = divmod(begin, size)
            order = self._order(source, epoch)
            until = min(stop - begin, size - at, order.batch - at % order.batch)
            found.append(order.rows(at, at + until))
            slots.append(np.arange(at, at + until) % order.batch)
            begin += until
        in_slots = np.argsort(np.concatenate(slots), kind="stable")
        return np.concatenate(found)[in_slots] + self.offsets[source]

    def _order(self, source: int, epoch: int) -> Order:
        """Return a source's own order of one of its epochs."""
        kept = self._orders[source]
        if epoch not in kept:
            kept[epoch] = Order(
                self.sources[source],
                seed=self.seed + source,
                epoch=epoch,
                batch=self._own_batch(source),
                window=self.windows[source],
                shuffle=self.shuffle,
            )
            if len(kept) > _KEPT_ORDERS:
                del kept[next(iter(kept))]
        return kept[epoch]

    def _own_batch(self, source: int) -> int:
        return min(self._batches[source], self.sizes[source])


_ONE = 1 << 40


def _fractions(weights: Sequence[float]) -> list[int]:
    """Return each source's share of what earlier sources leave, in units of 2**-40."""
    left = [sum(weights[nth:]) for nth in range(len(weights))]
    return [_ONE if w == rest else round(w / rest * _ONE) if rest else 0 for w, rest in zip(weights, left, strict=True)]


def _shared(count: int, fractions: Sequence[int]) -> list[int]:
    """Divide the first `count` positions among sources; a count never decreases as `count` grows."""
    counts = []
    for fraction in fractions:
        taken = (count * fraction + _ONE // 2) // _ONE
        counts.append(taken)
        count -= taken
    return counts
