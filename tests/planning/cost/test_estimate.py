"""A whole plan's cost: its parts add up, and plans that are known to be better are predicted so."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade_search import candidate
from paceline.cluster.catalogue import CATALOGUE, Accelerator
from paceline.job.model import Dimensions
from paceline.planning.cost import constants, frameworks
from paceline.planning.cost.compute import LOW, peak_flops, product_s
from paceline.planning.cost.estimate import FailureCosts, failure_costs, predict_layout, timeline
from paceline.planning.cost.frameworks import MEGATRON_ORDER, Framework
from paceline.planning.cost.layout import PARTS, Layout, Machines
from paceline.planning.cost.stages import pipeline_s, simulate, work_of
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


@pytest.mark.parametrize("cp", [2, 8])
def test_ranks_of_cp_that_shard_the_state_are_one_group_with_those_of_dp(cp: int) -> None:
    """With all of eight ranks on cp, gradients were reduced in no time."""
    profile = replace(laid_out().framework, overlaps_gradients=False, overlaps_parameters=False)
    sharded = laid_out(zero_dp=True, shards_over_cp=True, framework=profile, order=MEGATRON_ORDER)
    alone, together = (predict_layout(replace(sharded, dp=8 // one, cp=one)).breakdown for one in (1, cp))
    assert together["dp"] == pytest.approx(alone["dp"])
    assert together["optimizer"] == pytest.approx(alone["optimizer"])
    divided = [predict_layout(laid_out(fsdp=4, cp=2, shards_over_cp=over)).breakdown for over in (False, True)]
    assert divided[1]["optimizer"] == pytest.approx(divided[0]["optimizer"] / 2)


@settings(max_examples=80)
@given(LAYOUTS)
def test_the_parts_add_up_to_the_step_and_none_is_negative(layout: Layout) -> None:
    found = predict_layout(layout)
    assert tuple(found.breakdown) == PARTS
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
    assert min(found.breakdown.values()) >= 0
    assert found.throughput == pytest.approx(layout.global_batch / found.step_time_s)
    assert found.mfu is not None
    assert 0 < found.mfu < 1


def test_computing_again_costs_a_forward_pass_and_saves_memory() -> None:
    plain, again = predict_layout(laid_out(samples=4.0)), predict_layout(laid_out(samples=4.0, remat="block"))
    assert 1.2 < again.step_time_s / plain.step_time_s < 1.4
    assert again.memory["activations"] < 0.3 * plain.memory["activations"]


def test_the_reference_of_a_loss_costs_a_forward_pass_under_every_plan() -> None:
    for degrees in ({}, {"fsdp": 8}, {"tp": 8}, {"pp": 4, "microbatches": 8}):
        plain, compared = (predict_layout(laid_out(reference=reference, **degrees)) for reference in (False, True))
        assert 1.2 * plain.step_time_s < compared.step_time_s < 1.6 * plain.step_time_s
        assert sum(compared.breakdown.values()) == pytest.approx(compared.step_time_s)


def test_tensor_parallelism_over_hosts_is_slower_than_inside_of_one() -> None:
    inside = predict_layout(laid_out(tp=8, dp=4, microbatches=4)).step_time_s
    across = predict_layout(laid_out(tp=32, microbatches=16)).step_time_s
    assert across > 1.5 * inside


def test_more_microbatches_shrink_the_bubble() -> None:
    shares = [
        (found := predict_layout(laid_out(pp=4, microbatches=count))).breakdown["bubble"] / found.step_time_s
        for count in (4, 16, 64)
    ]
    assert shares[0] > shares[1] > shares[2]


def test_gradients_that_travel_every_tenth_step_cost_a_tenth() -> None:
    slow = replace(MACHINES, between=replace(MACHINES.between, bandwidth=1e8))
    often, rarely = (
        predict_layout(laid_out(machines=slow, dp=16, sync_every=every)).breakdown["dp"] for every in (1, 10)
    )
    assert rarely < 0.2 * often


def test_on_cores_one_rank_with_two_threads_computes_as_fast_as_two_ranks() -> None:
    core = next(device for device in CATALOGUE.values() if device.kind == "cpu")
    trace = transformer(Dimensions(layers=2, hidden=256, heads=4, seq=64, vocab=512))
    machines = Machines(core, 1, 2, core.network)
    alone = predict_layout(Layout(trace, machines, samples=8, threads=2))
    two = predict_layout(Layout(trace, machines, dp=2, samples=4))
    assert alone.breakdown["compute"] == pytest.approx(two.breakdown["compute"], rel=0.05)


def test_copies_of_the_only_replica_are_counted_where_they_fit_and_refuse_no_plan() -> None:
    roomy = Machines(CATALOGUE["CPU"], 1, 2, CATALOGUE["CPU"].network)
    trace = transformer(Dimensions(layers=2, hidden=256, heads=4, seq=64, vocab=512))
    held = predict_layout(Layout(trace, roomy, fsdp=2)).memory
    assert held["copies"] == 4 * (held["parameters"] + held["optimizer"])
    for other in (Layout(trace, roomy, dp=2), Layout(trace, roomy, dp=2, fsdp=2), Layout(trace, roomy), laid_out(tp=8)):
        assert "copies" not in predict_layout(other).memory
    just = int(sum(held.values()) - held["copies"]) + 1
    tight = replace(roomy, device=replace(roomy.device, memory_bytes=just))
    found = predict_layout(Layout(trace, tight, fsdp=2))
    assert found.fits
    assert "copies" not in found.memory


DENSE = transformer(Dimensions(layers=8, hidden=2048, heads=16, seq=2048, vocab=51200, gated=True))
MIXTURE = transformer(
    Dimensions(layers=4, hidden=1024, heads=16, kv_heads=4, seq=1024, vocab=32000, experts=16, top_k=2)
)
DEVICES = ("A100-SXM-80", "H100-SXM", "B200", "V100-SXM-32", "MI300X", "TPU-v5p", "L40S")


def any_layout(name: str, framework: Framework, mixture: bool, **values: Any) -> Layout:
    device = CATALOGUE[name]
    layout = Layout(MIXTURE if mixture else DENSE, Machines(device, 16, 8, device.network), **values)
    if framework.folds:  # experts are on ranks of the other axes, or on one
        ranks = layout.ranks // layout.pp // layout.ep
        layout = replace(layout, ep=1, expert_ranks=min(layout.ep, ranks) if mixture else 0)
    half = len(layout.trace.blocks) // 2  # the same cut, whatever the device: another one may suit it less
    cut = (half, len(layout.trace.blocks) - half) if layout.pp == 2 else ()
    return framework.laid_out(replace(layout, cut=cut))


FRAMEWORKS = [profile for profile in vars(frameworks).values() if isinstance(profile, Framework)]
ANY_LAYOUTS = st.builds(
    any_layout,
    st.sampled_from(DEVICES),
    st.sampled_from(FRAMEWORKS),
    st.booleans(),
    dp=st.sampled_from([1, 2, 8]),
    fsdp=st.sampled_from([1, 8]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 4]),
    zero=st.sampled_from([1, 2, 3]),
    zero_dp=st.booleans(),
    sequence=st.booleans(),
    samples=st.sampled_from([1.0, 2.0, 8.0]),
    microbatches=st.sampled_from([1, 4, 32]),
    remat=st.sampled_from(["none", "selective", "block"]),
    remat_share=st.sampled_from([0.5, 1.0]),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    products=st.sampled_from(["", "fp8", "fp8-block", "mxfp8", "fp4"]),
    ulysses=st.booleans(),
    lora=st.sampled_from([0, 16]),
    offload=st.booleans(),
    offload_activations=st.booleans(),
    gather_bytes=st.sampled_from([0.0, 1.0]),
    regather_ranks=st.sampled_from([0, 8]),
    imbalance=st.sampled_from([1.0, 1.3]),
)
_BETTER = {
    "memory": lambda device: replace(device, memory_bandwidth=1.5 * device.memory_bandwidth),
    "arithmetic": lambda device: replace(
        device, peak_flops={precision: 1.5 * flops for precision, flops in device.peak_flops.items()}
    ),
    "links": lambda device: replace(device, inside=replace(device.inside, bandwidth=1.5 * device.inside.bandwidth)),
    "host link": lambda device: replace(
        device, host_link=replace(device.host_link, bandwidth=1.5 * device.host_link.bandwidth)
    ),
}


def with_device(layout: Layout, device: Accelerator) -> Layout:
    return replace(layout, machines=replace(layout.machines, device=device))


# Two things keep predictions from being monotone everywhere. Where fsdp and dp both hide, they do so behind the same
# computing; and a device whose power is far from enough for its products (MI300X) is a little faster at these with
# more other work between them.
COMPARED = ANY_LAYOUTS.filter(
    lambda layout: (layout.dp == 1 or layout.fsdp == 1) and layout.machines.device.name != "MI300X"
)


def compared_s(layout: Layout) -> float:
    """Seconds of a step; of a pipeline without what depends on which of two stages is the slower by a hair."""
    found = predict_layout(layout)
    state = sum(found.breakdown[part] for part in ("fsdp", "dp", "optimizer", "other"))
    return found.step_time_s - (state if layout.pp > 1 else 0.0)


@settings(max_examples=150, deadline=None)
@given(ANY_LAYOUTS)
def test_every_prediction_is_finite_and_positive(layout: Layout) -> None:
    found = predict_layout(layout)
    assert isfinite(found.step_time_s)
    assert found.step_time_s > 0
    assert min(found.breakdown.values()) >= 0
    assert min(found.memory.values()) >= 0
    assert found.mfu is not None
    assert found.mfu < (1 if not layout.products and not layout.lora else 4)


@pytest.mark.parametrize("what", list(_BETTER))
@settings(max_examples=80, deadline=None)
@given(layout=COMPARED)
def test_a_better_device_is_never_slower(what: str, layout: Layout) -> None:
    """A search among devices ("which cluster for my model?") would name the worse one."""
    better = with_device(layout, _BETTER[what](layout.machines.device))
    assert compared_s(better) <= compared_s(layout) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(COMPARED, st.floats(1.0, 10.0))
def test_a_faster_network_is_never_slower(layout: Layout, factor: float) -> None:
    between = replace(layout.machines.between, bandwidth=factor * layout.machines.between.bandwidth)
    better = replace(layout, machines=replace(layout.machines, between=between))
    assert compared_s(better) <= compared_s(layout) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(ANY_LAYOUTS)
def test_twice_the_microbatches_take_longer_but_not_twice_as_long(layout: Layout) -> None:
    """What is paid once a step is shared by more samples: without that no batch would be worth accumulating."""
    once, twice = (
        predict_layout(replace(layout, microbatches=count * layout.microbatches)).step_time_s for count in (2, 4)
    )
    assert once < twice <= 2 * once * (1 + 1e-9)


H100, B200 = CATALOGUE["H100-SXM"], CATALOGUE["B200"]


def reached(m: int, n: int, k: int) -> float:
    """TFLOP/s of a product on an A100."""
    return 2 * m * n * k / product_s(A100, "bf16", m, n, k) / 1e12


def test_small_products_reach_less() -> None:
    assert reached(256, 256, 256) < reached(1024, 1024, 1024) < reached(8192, 8192, 8192)


def test_widths_that_do_not_divide_cost_more() -> None:
    assert reached(4096, 4096, 4096) > reached(4096, 4104, 4096) > reached(4096, 4097, 4096)


def test_a_vector_is_bound_by_memory_not_by_arithmetic() -> None:
    moved = 2 * (8192 * 8192)
    assert product_s(A100, "bf16", 1, 8192, 8192) >= moved / A100.memory_bandwidth


@given(
    st.sampled_from([A100, H100, B200]),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from(["bf16", "fp32", "fp16", "tf32", *LOW]),
)
def test_nothing_is_faster_than_the_peak_or_than_memory(
    device: Accelerator, m: int, n: int, k: int, precision: str
) -> None:
    seconds = product_s(device, precision, float(m), float(n), float(k))
    assert seconds >= 2 * m * n * k / peak_flops(device, precision)
    assert seconds >= 2 * m * n / device.memory_bandwidth


@pytest.mark.parametrize(
    ("precision", "tflops"), [("bf16", 706), ("fp8", 1320), ("fp8-row", 1150)], ids=["bf16", "fp8", "fp8-row"]
)
def test_an_h100_reaches_in_each_precision_what_was_measured_of_its_large_products(
    precision: str, tflops: float
) -> None:
    """Measured ones are within the device's power; ours has the clock of a first product, at most a third more."""
    ours = 2 * 8192**3 / product_s(H100, precision, 8192.0, 8192.0, 8192.0) / 1e12
    assert tflops <= ours < 1.35 * tflops


def test_one_scale_for_a_tensor_is_faster_than_scales_of_blocks_and_of_rows() -> None:
    times = [product_s(H100, precision, 8192.0, 8192.0, 8192.0) for precision in ("fp8", "fp8-block", "fp8-row")]
    assert times == sorted(times)
    assert times[-1] < product_s(H100, "bf16", 8192.0, 8192.0, 8192.0)


def test_a_device_without_a_precision_computes_in_the_next_wider_one() -> None:
    assert peak_flops(A100, "fp8") == peak_flops(A100, "bf16")
    assert peak_flops(H100, "fp4") == peak_flops(H100, "fp8") < peak_flops(B200, "fp4")


def test_what_a_convolution_reads_once_is_not_moved_for_every_row() -> None:
    moved = product_s(A100, "bf16", 1e6, 64.0, 576.0)
    spared = product_s(A100, "bf16", 1e6, 64.0, 576.0, 1.0, 1e6 * 576 * 8 / 9)
    assert spared < 0.5 * moved


def test_a_long_sum_is_split_among_idle_multiprocessors() -> None:
    """A first convolution's gradient has 32 × 9 results, each a sum over all positions of all images."""
    moved = 2 * (32 + 9) * 2**22
    assert product_s(A100, "bf16", 32.0, 16.0, 2.0**22) < 8 * moved / A100.memory_bandwidth


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


USUAL = FailureCosts(between_s=3600.0, step_s=1.0, stall_s=2.0, write_s=20.0, restart_s=60.0)


def costs(**changes: float) -> FailureCosts:
    return replace(USUAL, **changes)  # type: ignore[arg-type]


def simulated(of: FailureCosts, interval_s: float, failures: int, seed: int) -> float:
    """Goodput of a run whose failures come at random, by events one after the other."""
    draw = random.Random(seed)
    wall_s = useful_s = 0.0
    next_failure = draw.expovariate(1 / of.between_s)
    failed = 0
    while failed < failures:
        # a restart, which a failure begins anew
        if next_failure < wall_s + of.restart_s:
            wall_s, next_failure = next_failure, next_failure + draw.expovariate(1 / of.between_s)
            failed += 1
            continue
        wall_s += of.restart_s
        # steps and checkpoints until the next failure; what is not yet written then is lost
        written_at = []
        while wall_s < next_failure:
            wall_s += interval_s + of.stall_s
            written_at.append(wall_s + of.write_s)
            wall_s += max(0.0, of.write_s - interval_s)
        useful_s += interval_s * sum(moment < next_failure for moment in written_at)
        wall_s, next_failure = next_failure, next_failure + draw.expovariate(1 / of.between_s)
        failed += 1
    return useful_s / wall_s


@pytest.mark.parametrize(
    ("of", "interval_s"),
    [
        (costs(), 120.0),
        (costs(), 1500.0),
        (costs(between_s=300.0, restart_s=100.0), 60.0),
        (costs(between_s=100.0, stall_s=30.0, write_s=0.0, restart_s=5.0), 70.0),
        (costs(write_s=100.0), 50.0),
    ],
    ids=["often", "rarely", "many failures", "blocking checkpoints", "written too slowly"],
)
def test_the_goodput_of_restarts_is_that_of_a_simulation(of: FailureCosts, interval_s: float) -> None:
    assert of.restarting(interval_s) == pytest.approx(simulated(of, interval_s, failures=8000, seed=1), rel=0.03)


def test_recovery_in_place_is_that_of_a_simulation() -> None:
    of = replace(costs(between_s=120.0, stall_s=0.0, write_s=0.0), in_place=True)
    draw, wall_s, useful_s = random.Random(2), 0.0, 0.0
    for _ in range(5000):
        lifetime_s = draw.expovariate(1 / of.between_s)
        useful_s += lifetime_s
        wall_s += lifetime_s + of.step_s + constants.RECOVERY_S
    assert of.goodput(600.0) == pytest.approx(useful_s / wall_s, rel=0.01)
    assert of.goodput(600.0) > of.restarting(of.best_interval_s)


COSTS = st.builds(
    costs,
    between_s=st.floats(30, 1e7),
    step_s=st.floats(1e-3, 100),
    stall_s=st.floats(0, 300),
    write_s=st.floats(0, 3000),
    restart_s=st.floats(0, 3000),
)


@given(of=COSTS, more=st.floats(1.01, 100))
def test_more_failures_mean_less_goodput_and_no_longer_interval(of: FailureCosts, more: float) -> None:
    worse = replace(of, between_s=of.between_s / more)
    assert worse.best_interval_s <= of.best_interval_s * (1 + 1e-9)
    best, then = of.goodput(of.best_interval_s), worse.goodput(worse.best_interval_s)
    assert 0 <= then <= best <= 1
    assert then < best or best == 0


@given(of=COSTS, other=st.floats(0.1, 10))
def test_no_other_interval_is_better_than_the_best(of: FailureCosts, other: float) -> None:
    best_s = of.best_interval_s
    assert of.restarting(max(best_s * other, of.write_s, of.step_s)) <= of.restarting(best_s) * (1 + 1e-9)


@pytest.mark.parametrize("stall_s", [0.1, 2.0, 30.0, 300.0])
def test_the_best_interval_is_that_of_the_literature(stall_s: float) -> None:
    """Young's first order for short checkpoints, Daly's higher order for all."""
    of = costs(stall_s=stall_s, write_s=0.0, step_s=0.01)
    ratio = stall_s / (2 * of.between_s)
    young = math.sqrt(2 * stall_s * of.between_s)
    daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
    assert of.best_interval_s == pytest.approx(daly, rel=1e-3)
    assert stall_s > 1 or of.best_interval_s == pytest.approx(young, rel=0.01)
    assert abs(of.best_every_steps * of.step_s - of.best_interval_s) <= of.step_s


@given(of=COSTS)
def test_the_best_number_of_steps_is_better_than_its_neighbours(of: FailureCosts) -> None:
    steps = of.best_every_steps
    best = of.restarting(steps * of.step_s)
    for other in {max(1, steps - 1), steps + 1, 2 * steps}:
        assert of.restarting(other * of.step_s) <= best * (1 + 1e-9)


def test_failures_that_come_faster_than_a_restart_leave_nothing() -> None:
    assert costs(between_s=0.01).restarting(600.0) == 0.0


@pytest.mark.parametrize(
    ("plan", "ranks_per_host", "in_place"),
    [
        ("dp=2 tp=8", [8, 8], True),
        ("dp=2 tp=4", [8, 0], False),
        ("dp=2 tp=6", [8, 4], False),
        ("dp=3 tp=4", [8, 4], True),
        ("fsdp=16", [8, 8], False),
        ("tp=8", [8, 0], False),
    ],
)
def test_a_plan_recovers_in_place_where_no_host_has_the_only_copy(
    plan: str, ranks_per_host: list[int], in_place: bool
) -> None:
    layout = candidate(plan, compute=1.0).layout
    assert failure_costs(layout, 1.0, 0.01, ranks_per_host).in_place is in_place


def test_costs_follow_the_state_the_hosts_and_the_rate() -> None:
    layout = candidate("fsdp=16", compute=1.0).layout
    one = failure_costs(layout, 1.0, 0.01, [8, 8])
    assert one.between_s == pytest.approx(86_400 / 0.02)
    assert one.write_s > one.stall_s > 0
    rarer = failure_costs(layout, 1.0, 0.005, [8, 8])
    assert rarer == replace(one, between_s=2 * one.between_s)
    larger = replace(layout, optimizer_bytes=2 * layout.optimizer_bytes + layout.parameter_bytes)
    twice_s = failure_costs(larger, 1.0, 0.01, [8, 8]).write_s - constants.CHECKPOINT_WRITE_S
    assert twice_s == pytest.approx(2 * (one.write_s - constants.CHECKPOINT_WRITE_S))
