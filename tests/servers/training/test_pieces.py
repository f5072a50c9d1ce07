"""Pieces that servers deal are the shares of a run that waits for all: every sample once, whoever takes which."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.corpus.order import Order
from paceline.job.partition import Partition, PartitionSpec
from paceline_server.training.pieces import Pieces, Rounds
from small_jobs import small_job

SAMPLES, BATCH, PIECES = 70, 8, 4


def whole() -> Partition:
    job = small_job(global_batch=BATCH)
    spec = PartitionSpec(kind="uniform")
    return Partition(spec, samples=SAMPLES, global_batch=BATCH, seed=job.seed, replica=0, replicas=1)


@given(order=st.permutations(range(2 * 9 * PIECES)))
def test_in_any_order_the_pieces_of_an_epoch_are_all_its_samples(order: list[int]) -> None:
    pieces = Pieces(small_job(global_batch=BATCH), whole(), PIECES)
    seen: dict[int, list[int]] = {0: [], 1: []}
    for number in order:
        samples, position = pieces.samples(*divmod(number, PIECES))
        assert position.local == len(samples)
        seen[position.epoch] += samples
    assert all(sorted(found) == list(range(SAMPLES)) for found in seen.values())


def test_the_pieces_of_a_batch_are_the_batch_of_one_process() -> None:
    pieces, batches = Pieces(small_job(global_batch=BATCH), whole(), PIECES), list(whole().batches(1, 0))
    for step, batch in enumerate(batches):
        together = [pieces.samples(len(batches) + step, piece)[0] for piece in range(PIECES)]
        assert np.concatenate(together).tolist() == batch


class Shards:
    """Files of 30, 25 and 15 samples."""

    window = 8

    def epoch_order(self, seed: int, epoch: int, batch: int, *, steps: int, shuffle: bool) -> Order:
        return Order(np.array([0, 30, 55, 70]), seed=seed, epoch=epoch, batch=batch, window=self.window)


def test_pieces_of_files_have_the_order_of_the_files() -> None:
    shards: Any = Shards()
    spec, job = PartitionSpec(), small_job(global_batch=BATCH)
    like = Partition(spec, samples=70, global_batch=BATCH, seed=job.seed, replica=0, replicas=1, shards=shards)
    pieces = Pieces(job, like, PIECES)
    for step, batch in enumerate(like.batches(0, 0)):
        together = [pieces.samples(step, piece)[0] for piece in range(PIECES)]
        assert np.concatenate(together).tolist() == batch


@given(period=st.integers(1, 9), begin=st.integers(0, 50), every=st.sets(st.integers(1, 30), min_size=1, max_size=3))
def test_rounds_cover_every_batch_once_and_end_at_each_boundary(period: int, begin: int, every: set[int]) -> None:
    rounds = Rounds(period, begin, lambda step: min((step // n + 1) * n for n in every))
    found = [rounds.batches(number) for number in range(40)]
    assert found[0].start == begin
    assert all(one.stop == other.start for one, other in pairwise(found))
    assert all(0 < len(one) <= period for one in found)
    for number, batches in enumerate(found):
        assert rounds.until(batches.stop) == number + 1
        assert rounds.whole(batches.start + 1) == batches.stop
        if period > 1:
            assert not any(batch % n == 0 for batch in batches[1:] for n in every), "it goes over a boundary"
