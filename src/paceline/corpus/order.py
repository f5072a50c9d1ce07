"""Order of the samples of an epoch, shuffled in windows of shards.

A position in the epoch is `step * batch + slot`. A rank owns a range of slots of each batch. The order is
therefore the same for any number of ranks, and each rank reads few shards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

WINDOW = 4096  # samples of a lane that are shuffled together
_MOST_LANES = 120  # divisible by common numbers of ranks (2, 3, 4, 5, 6, 8, 10, 12), so that few ranks share a lane
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

    def shards_from(self, first: int, end: int, ahead: int) -> list[int]:
        """Return the shards that these slots need next, in the order of need.

        Args:
            first, end: range of positions in the first batch that is read.
            ahead: number of samples to look ahead in each lane, beyond the current window. Without shuffling, number
                of positions after `end`.
        """
        if not self.shuffle:
            return self._shards_between(first, min(end + ahead, self.samples))
        stretches = [(lane, index // self.window) for lane, _, _, index in self._stretches(first, end)]
        found: dict[int, None] = {}
        for more in range(1 + -(-ahead // self.window)):
            for lane, window in stretches:
                begin, stop = self._bounds(lane, window + more)
                found.update(dict.fromkeys(self._shards_between(begin, stop)))
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
        self.windows = windows
        self._first_shards = [0, *accumulate(len(starts) - 1 for starts in sources)]
        self.samples, self._first = samples, epoch * samples
        begins = [step // steps * samples + step % steps * batch for step, _ in schedule]
        self._schedule = [(first, _fractions(weights)) for first, (_, weights) in zip(begins, schedule, strict=True)]
        # batch size of each source's own order: its share of a batch at the start of the schedule
        self._batches = [max(1, round(batch * w / sum(schedule[0][1]))) for w in schedule[0][1]]
        self._orders: OrderedDict[tuple[int, int], Order] = OrderedDict()

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

    def shards_from(self, first: int, end: int, ahead: int) -> list[int]:
        """Return the shards that these slots need from this batch on; see `Order.shards_from`.

        Shards are numbered across all sources, in the order of the sources.
        """
        step, slot = divmod(first, self.batch)
        low, high = slot / self.batch, (slot + end - first) / self.batch
        found: list[int] = []
        for source, (begin, stop) in enumerate(zip(self.counts(step), self.counts(step + 1), strict=True)):
            epoch, at = divmod(begin, int(self.sources[source][-1]))
            order = self._order(source, epoch)
            own, length = at // order.batch * order.batch, min(order.batch, max(stop - begin, 1))
            bounds = own + int(low * length), min(own + -int(-high * length // 1), order.samples)
            found += [self._first_shards[source] + shard for shard in order.shards_from(*bounds, ahead)]
        return found

    def _of_source(self, source: int, begin: int, stop: int) -> Ints:
        """Return samples `begin` to `stop - 1` of a source that repeats itself, sorted by their slots."""
        size = int(self.sources[source][-1])
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
        key = source, epoch
        if key not in self._orders:
            self._orders[key] = Order(
                self.sources[source],
                seed=self.seed + source,
                epoch=epoch,
                batch=min(self._batches[source], int(self.sources[source][-1])),
                window=self.windows[source],
                shuffle=self.shuffle,
            )
            if len(self._orders) > 2 * len(self.sources):
                self._orders.popitem(last=False)
        return self._orders[key]


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
