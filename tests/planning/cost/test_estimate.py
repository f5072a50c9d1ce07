"""A whole plan's cost: its parts add up, and plans that are known to be better are predicted so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE
from paceline.job.model import Dimensions
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.layout import PARTS, Layout, Machines
from paceline.planning.model.transformer import transformer

A100 = CATALOGUE["A100-SXM-80"]
TRACE = transformer(Dimensions(layers=24, hidden=4096, heads=32, seq=2048, vocab=51200))
MACHINES = Machines(A100, 8, 8, A100.network)


def laid_out(**changed: Any) -> Layout:
    return replace(
        Layout(TRACE, MACHINES, precision="bf16", parameter_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=12.0),
        **changed,
    )


LAYOUTS = st.builds(
    laid_out,
    dp=st.sampled_from([1, 2]),
    fsdp=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.sampled_from([1, 2, 3]),
    samples=st.sampled_from([1.0, 2.0, 8.0]),
    microbatches=st.sampled_from([1, 4, 32]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble", "dualpipe"]),
    remat=st.sampled_from(["none", "selective", "block"]),
    sequence=st.booleans(),
)


@settings(max_examples=80)
@given(LAYOUTS)
def test_the_parts_add_up_to_the_step_and_none_is_negative(layout: Layout) -> None:
    found = estimate(layout)
    assert tuple(found.breakdown) == PARTS
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
    assert min(found.breakdown.values()) >= 0
    assert found.throughput == pytest.approx(layout.global_batch / found.step_time_s)
    assert found.mfu is not None
    assert 0 < found.mfu < 1


def test_computing_again_costs_a_forward_pass_and_saves_memory() -> None:
    plain, again = estimate(laid_out(samples=4.0)), estimate(laid_out(samples=4.0, remat="block"))
    assert 1.2 < again.step_time_s / plain.step_time_s < 1.4
    assert again.memory["activations"] < 0.3 * plain.memory["activations"]


def test_tensor_parallelism_over_hosts_is_slower_than_inside_of_one() -> None:
    inside = estimate(laid_out(tp=8, dp=4, microbatches=4)).step_time_s
    across = estimate(laid_out(tp=32, microbatches=16)).step_time_s
    assert across > 1.5 * inside


def test_more_microbatches_shrink_the_bubble() -> None:
    shares = [
        (found := estimate(laid_out(pp=4, microbatches=count))).breakdown["bubble"] / found.step_time_s
        for count in (4, 16, 64)
    ]
    assert shares[0] > shares[1] > shares[2]


def test_gradients_that_travel_every_tenth_step_cost_a_tenth() -> None:
    slow = replace(MACHINES, between=replace(MACHINES.between, bandwidth=1e8))
    often, rarely = (estimate(laid_out(machines=slow, dp=16, sync_every=every)).breakdown["dp"] for every in (1, 10))
    assert rarely < 0.2 * often


def test_on_cores_one_rank_with_two_threads_computes_as_fast_as_two_ranks() -> None:
    core = next(device for device in CATALOGUE.values() if device.kind == "cpu")
    trace = transformer(Dimensions(layers=2, hidden=256, heads=4, seq=64, vocab=512))
    machines = Machines(core, 1, 2, core.network)
    alone = estimate(Layout(trace, machines, samples=8, threads=2))
    two = estimate(Layout(trace, machines, dp=2, samples=4))
    assert alone.breakdown["compute"] == pytest.approx(two.breakdown["compute"], rel=0.05)


def test_copies_of_the_only_replica_are_counted_where_they_fit_and_refuse_no_plan() -> None:
    roomy = Machines(CATALOGUE["CPU"], 1, 2, CATALOGUE["CPU"].network)
    trace = transformer(Dimensions(layers=2, hidden=256, heads=4, seq=64, vocab=512))
    held = estimate(Layout(trace, roomy, fsdp=2)).memory
    assert held["copies"] == 4 * (held["parameters"] + held["optimizer"])
    for other in (Layout(trace, roomy, dp=2), Layout(trace, roomy, dp=2, fsdp=2), Layout(trace, roomy), laid_out(tp=8)):
        assert "copies" not in estimate(other).memory
    just = int(sum(held.values()) - held["copies"]) + 1
    tight = replace(roomy, device=replace(roomy.device, memory_bytes=just))
    found = estimate(Layout(trace, tight, fsdp=2))
    assert found.fits
    assert "copies" not in found.memory
