"""Pipeline schedules do all of their work in a possible order, as the formula says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE
from paceline.job.model import Dimensions
from paceline.planning.cost.estimate import timeline
from paceline.planning.cost.layout import Layout, Machines
from paceline.planning.cost.stages import pipeline_s, simulate, work_of
from paceline.planning.model.transformer import transformer

A100 = CATALOGUE["A100-SXM-80"]


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 14), schedule=st.sampled_from(["gpipe", "1f1b"]))
def test_every_rank_does_all_of_its_work_once(ranks: int, microbatches: int, schedule: str) -> None:
    orders = [work_of(rank, ranks, microbatches, schedule, 1) for rank in range(ranks)]
    spans = [span for span in simulate([1.0] * ranks, [2.0] * ranks, orders, 0.0) if span.what != "wait"]
    assert len({(span.stage, span.what, span.microbatch) for span in spans}) == len(spans) == 2 * ranks * microbatches


@given(ranks=st.integers(2, 4), groups=st.integers(1, 4), chunks=st.integers(2, 3))
def test_interleaved_schedules_come_to_their_end(ranks: int, groups: int, chunks: int) -> None:
    orders = [work_of(rank, ranks, groups * ranks, "interleaved", chunks) for rank in range(ranks)]
    spans = [
        span for span in simulate([1.0] * ranks * chunks, [2.0] * ranks * chunks, orders, 0.0) if span.what != "wait"
    ]
    assert len(spans) == 2 * ranks * chunks * groups * ranks


@given(ranks=st.integers(2, 6), microbatches=st.integers(6, 20))
def test_even_stages_take_what_the_formula_of_the_bubble_says(ranks: int, microbatches: int) -> None:
    """Narayanan et al. (2021): (microbatches + ranks − 1) times the time of one."""
    exact = (microbatches + ranks - 1) * 3.0
    assert pipeline_s([1.0] * ranks, [2.0] * ranks, microbatches, 0.0, ranks, "1f1b") == pytest.approx(exact)
    orders = [work_of(rank, ranks, microbatches, "1f1b", 1) for rank in range(ranks)]
    assert max(span.end_s for span in simulate([1.0] * ranks, [2.0] * ranks, orders, 0.0)) == pytest.approx(exact)


@settings(max_examples=60)
@given(times=st.lists(st.floats(0.8, 1.2), min_size=2, max_size=6), microbatches=st.integers(12, 24))
def test_uneven_stages_take_what_the_simulated_events_take(times: list[float], microbatches: int) -> None:
    """Exactly where the last stage is the slowest.

    A little more where an early one is, whose first passes fill a part of its bubble.
    """
    for uneven, most in ((times, 1.12), (sorted(times), 1.0)):
        backwards = [2 * time for time in uneven]
        formula = pipeline_s(uneven, backwards, microbatches, 0.0, len(uneven), "1f1b")
        orders = [work_of(rank, len(uneven), microbatches, "1f1b", 1) for rank in range(len(uneven))]
        events = max(span.end_s for span in simulate(uneven, backwards, orders, 0.0))
        assert events <= formula * (1 + 1e-9) <= most * events * (1 + 2e-9)


def test_the_timeline_has_every_stage_and_none_does_two_things_at_once() -> None:
    trace = transformer(Dimensions(layers=8, hidden=1024, heads=16, seq=1024, vocab=50304))
    layout = Layout(trace, Machines(A100, 1, 8, A100.network), pp=4, microbatches=8, precision="bf16")
    for each in (layout, replace(layout, schedule="interleaved", chunks=2), replace(layout, schedule="gpipe")):
        spans = timeline(each)
        assert {span.stage for span in spans} == {0, 1, 2, 3}
        for stage in range(4):
            own = sorted((span.start_s, span.end_s) for span in spans if span.stage == stage)
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(own))


def test_over_a_slow_link_microbatches_queue() -> None:
    """Four activations of 10 s each arrive one after the other, then four gradients."""
    orders = [work_of(rank, 2, 4, "gpipe", 1) for rank in range(2)]
    spans = simulate([1.0, 1.0], [1.0, 1.0], orders, 10.0)
    assert max(span.end_s for span in spans) == pytest.approx((1 + 4 * 10 + 1) + (1 + 4 * 10 + 1))


def test_the_bubble_of_dualpipe_is_that_of_its_paper() -> None:
    """4 ranks have PP = 8 stages, whose passes take 1 s forward and 2 s backward, half of these for weights."""
    forward, backward, weights, microbatches = 1.0, 2.0, 1.0, 16
    whole = pipeline_s([forward] * 8, [backward] * 8, microbatches, 0.0, 4, "dualpipe")
    bubble = (8 / 2 - 1) * ((forward + backward) + backward - 3 * weights)
    assert whole == pytest.approx(microbatches * 2 * (forward + backward) + bubble)


def test_more_stages_on_a_rank_fill_the_pipeline_sooner() -> None:
    """Narayanan et al. (2021, arXiv:2104.04473), section 2.2: the bubble shrinks by the number of stages."""
    ranks, microbatches = 4, 8
    bubbles = [
        pipeline_s([1.0 / v] * ranks * v, [2.0 / v] * ranks * v, microbatches, 0.0, ranks, "interleaved")
        - microbatches * 3.0
        for v in (2, 3, 6)
    ]
    assert bubbles == pytest.approx([(ranks - 1) * 3.0 / v for v in (2, 3, 6)])
