"""Steps on CPUs are predicted from what was measured: at the sizes that were measured, what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import LinkSpec
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.job.job import Job
from paceline.planning.calibrate import Calibration, CalibrationPoint, Collective, PassTiming
from paceline.planning.cost.estimate import inputs_of, predict_layout, step_parts, timeline
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.measured import here, measured_inputs
from paceline.planning.machines import adjusted
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.search import search as branch_and_bound
from paceline.planning.search.search import search

BLOCK = BlockTrace("layer", gemms=(Gemm(8, 64, 64, divided="n"),), matrices=4096, boundary=512, reductions=2)
TRACE = ModelTrace(
    (
        BlockTrace("embedding", "start", matrices=100, boundary=512),
        *(replace(BLOCK, name=f"blocks.{i}") for i in range(4)),
        BlockTrace("head", "head", gemms=(Gemm(8, 10, 64),), matrices=640, boundary=80),
    )
)
SEGMENTS = ("", *(f"blocks.{i}" for i in range(4)), "/end")


def timing(ranks: int, samples: int, *, remat: str = "none", precision: str = "fp32") -> PassTiming:
    """A tenth of a millisecond for each sample and block forward, two backward.

    A third more of the forward where computed again.
    """
    each = 1e-4 * samples
    again = each if remat == "block" else 0.0
    forward, backward = (each / 10, *[each] * 4, each / 2), (each / 10, *[2 * each + again] * 4, each)
    return PassTiming(
        ranks,
        3 - ranks,
        precision,
        remat,
        samples,
        forward,
        backward,
        10**6 * samples // (2 if remat == "block" else 1),
    )


def point(axis: Any, samples: int, microbatches: int, compute_s: float, **changes: float) -> CalibrationPoint:
    """A point whose parts other than computing are a millisecond each."""
    ranks = 1 if axis == "none" else 2
    parts = {"data_s": 1e-3, "bubble_s": 0.0, "comm_s": 1e-3, "optimizer_s": 1e-3, "peak_bytes": 4 * 10**8} | changes
    return CalibrationPoint(axis, ranks, "fp32", samples, microbatches, compute_s=compute_s, **parts)  # type: ignore[arg-type]


def whole(samples: int, ranks: int = 2) -> float:
    return timing(ranks, samples).seconds


def messages(transport: str, factor: float) -> list[Collective]:
    sizes, times = (1024, 2**20), (factor * 1e-5, factor * 1e-3)
    return [
        Collective(transport, name, 2, sizes, times, times)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "send_receive")
    ]


FOUND = Calibration(
    key="k",
    machine={},
    created=0.0,
    reference_s=1.0,
    cores=2,
    ranks=2,
    global_batch=32,
    parameters=TRACE.parameters,
    segments=SEGMENTS,
    timings=(
        *(timing(ranks, samples) for ranks in (1, 2) for samples in (4, 8, 16, 32)),
        *(timing(ranks, samples, remat="block") for ranks in (1, 2) for samples in (8, 16)),
    ),
    points=(
        point("none", 16, 1, whole(16, 1) + 1e-3, comm_s=0.0),
        point("none", 4, 4, 4 * (whole(4, 1) + 1e-3), comm_s=0.0),
        point("dp", 8, 1, whole(8) + 2e-3),
        point("dp", 2, 4, 4 * (whole(2) + 2e-3)),
        point("fsdp", 8, 1, whole(8) + 9e-3),
        point("fsdp", 2, 4, 4 * (whole(2) + 9e-3)),
        point("tp", 16, 1, 0.6 * whole(16) + 3e-3),
        point("tp", 4, 4, 4 * (0.6 * whole(4) + 3e-3)),
        point("pp", 8, 2, whole(8), bubble_s=0.6 * whole(8)),
        point("pp", 4, 4, 2 * whole(4), bubble_s=0.6 * whole(4)),
    ),
    collectives=(*messages("shm", 1), *messages("gloo", 5), *messages("tcp", 2)),
    optimizer_s={"plain": 8e-4, "fused": 3e-4},
    baseline_bytes=3 * 10**8,
)


def layout(found: Calibration | None = FOUND, rate: float | None = None, **changes: Any) -> Layout:
    """On the machine that was measured, or on two hosts with a link of so many bytes a second."""
    machines = replace(here(FOUND), calibration=found)
    if rate is not None:
        machines = replace(machines, hosts=2, per_host=1, between=LinkSpec("network", rate, 1e-4))
    return Layout(**{"trace": TRACE, "machines": machines, "samples": 16.0, **changes})


def step_s(**changes: Any) -> float:
    given = layout(**changes)
    parts = step_parts(given, inputs_of(given))
    assert all(seconds >= 0 for seconds in parts.values())
    return sum(parts.values())


@pytest.mark.parametrize("measured", FOUND.points, ids=lambda a: f"{a.axis}-{a.microbatches}")
def test_the_steps_that_were_measured_are_predicted_as_measured(measured: CalibrationPoint) -> None:
    degrees = {} if measured.axis == "none" else {measured.axis: 2}
    found = step_s(samples=float(measured.samples), microbatches=measured.microbatches, **degrees)
    assert found == pytest.approx(measured.step_s, rel=0.12 if measured.axis == "pp" else 0.03)


def test_two_ranks_have_half_of_the_samples_each() -> None:
    assert step_s(dp=2, samples=16.0) < step_s(samples=32.0)


def test_without_a_calibration_the_roofline_stands() -> None:
    assert measured_inputs(layout(None)) is None
    assert predict_layout(layout(None)).step_time_s > 0


def test_an_interval_rests_on_the_measurements_where_there_are_some() -> None:
    measured, catalogue = (adjusted(predict_layout(one), one).interval for one in (layout(), layout(None)))
    assert measured is not None
    assert catalogue is not None
    assert "this machine" in measured.rests_on
    assert measured.relative < catalogue.relative


def test_what_was_not_measured_is_not_hoped_to_be_fast() -> None:
    assert step_s(precision="bf16") == pytest.approx(step_s())
    assert step_s(cp=2) > 0.6 * step_s()
    without = replace(FOUND, points=tuple(a for a in FOUND.points if a.axis != "tp"))
    assert step_s(found=without, tp=2) > 0.6 * step_s()
    assert step_s(found=without, ep=2) > step_s(dp=2)


def test_computing_again_takes_time_and_less_memory() -> None:
    assert step_s(remat="block") - step_s() == pytest.approx(4 * 1e-4 * 16, rel=0.01)
    assert predict_layout(layout(remat="block")).memory_bytes < predict_layout(layout()).memory_bytes


def test_a_slower_transport_makes_the_step_longer() -> None:
    for degrees in ({"dp": 2}, {"fsdp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 4, "samples": 4.0}):
        assert step_s(**degrees, transport="gloo") > step_s(**degrees)


@given(st.floats(1e5, 1e9), st.floats(1.5, 10))
def test_a_slower_link_never_makes_the_step_shorter(rate: float, times: float) -> None:
    for degrees in ({"dp": 2}, {"fsdp": 2}, {"pp": 2, "microbatches": 4, "samples": 4.0}):
        assert step_s(**degrees, rate=rate / times) >= step_s(**degrees, rate=rate) * (1 - 1e-9)


def test_gradients_over_a_slow_link_take_as_long_as_the_link_does() -> None:
    slow = step_s(dp=2, rate=1e5)
    assert slow == pytest.approx(4 * TRACE.parameters / 1e5, rel=0.2)


def test_a_fused_update_saves_what_was_measured() -> None:
    assert step_s() - step_s(fused=True) == pytest.approx(5e-4)


def test_a_fused_update_saves_nothing_more_if_the_measured_steps_were_fused() -> None:
    found = replace(FOUND, optimizer_s={"fused": 3e-4})
    assert step_s(found=found, fused=True) == step_s()


def test_the_breakdown_sums_to_the_step_and_the_memory_to_its_whole() -> None:
    for degrees in ({}, {"dp": 2}, {"fsdp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 4, "samples": 4.0}):
        found = predict_layout(layout(**degrees))
        assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
        assert sum(found.memory.values()) == pytest.approx(found.memory_bytes, rel=1e-6)


@pytest.mark.parametrize("found", [FOUND, None], ids=["measured", "catalogue"])
def test_measured_or_not_the_parts_of_a_pipeline_are_put_together_alike(found: Calibration | None) -> None:
    for degrees in ({}, {"tp": 2}):
        given = layout(found, pp=2, microbatches=4, samples=4.0, **degrees)
        inputs, parts = inputs_of(given), step_parts(given, inputs_of(given))
        passes = sum(parts[name] for name in ("compute", "recompute", "launch", "tp", "pp", "bubble"))
        assert passes == pytest.approx(inputs.whole_s)
        assert parts["tp"] > 0 or not degrees
        assert max(span.end_s for span in timeline(given)) == pytest.approx(inputs.whole_s, rel=1e-9 if found else 0.2)


def test_the_best_plan_of_a_calibrated_machine_is_that_of_looking_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layers": 4, "hidden": 64, "heads": 4, "seq": 32, "vocab": 128}
    common = {
        "data": "synthetic",
        "loss": "cross_entropy",
        "optimizer": "adamw",
        "stop": {"steps": 10},
        "precision": "fp32",
    }
    job = Job.model_validate({"model": {"transformer": sizes}, "global_batch": 4, **common})
    here = Cluster(hosts=(Host(name="here", cores=4, memory_bytes=2**34),))
    found = replace(FOUND, cores=4, segments=("", *(f"layers.{i}" for i in range(4)), "/end"))
    every = search(job, here, calibration=found)
    monkeypatch.setattr(branch_and_bound, "_MOST_MEASURED", every.considered - 1)
    some = search(job, here, calibration=found)
    assert every.gap == some.gap == 0
    assert some.evaluated < every.evaluated
    assert some.best[0].prediction.step_time_s == every.best[0].prediction.step_time_s
    monkeypatch.setattr(branch_and_bound, "_MOST_MEASURED", 5)
    assert 0 <= search(job, here, calibration=found).gap < 1, "how far the best can be missed is known"
