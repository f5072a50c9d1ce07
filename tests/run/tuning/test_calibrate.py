"""A job is calibrated once on a machine; what cannot be calibrated from here is refused in words."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Device, Host
from paceline.errors import ClusterError
from paceline.job.job import Job
from paceline.job.optimizer import OptimizerSpec
from paceline.planning.calibrate import CalibrationPoint, Measurements, PassTiming, cache_file
from paceline.planning.prediction import estimate
from paceline.run.tuning import calibrate as module
from paceline.run.tuning.calibrate import calibrate
from refusals import raises

JOB = Job.model_validate(
    {
        "name": "small",
        "model": {"zoo": "mlp", "args": {"hidden": 16}},
        "data": {"kind": "synthetic", "samples": 64, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch": 16,
        "stop": {"steps": 1},
        "deadline_s": 120,
    }
)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of the ranks, which are not started."""
    asked: list[dict[str, Any]] = []

    def measured(job: Job, host: Host, ranks: int, precisions: Any, axes: Any) -> Measurements:
        asked.append({"precisions": tuple(precisions), "axes": tuple(axes)})
        timings = tuple(PassTiming(1, 1, p, "none", 16, (0.1,), (0.1,)) for p in precisions)
        points = tuple(CalibrationPoint(a, 1, "fp32", 16, 1, 0, 0.2, 0, 0, 0.1) for a in axes)
        return Measurements(parameters=1, segments=("",), timings=timings, points=points)

    monkeypatch.setattr(module, "_measure", measured)
    monkeypatch.setattr(module, "reference_time_s", lambda: 1e-3)
    monkeypatch.setattr("psutil.cpu_percent", lambda _: 0.0)
    return asked


def test_a_job_is_measured_once(measurements: list[dict[str, Any]]) -> None:
    said: list[str] = []
    first = calibrate(JOB, None, said.append, axes=("none",))
    assert calibrate(JOB, None, said.append, axes=("none",)) == first
    assert len(measurements) == 1
    assert "kept in" in said[1]
    assert "as measured before" in said[2]


def test_one_that_lacks_a_precision_is_measured_with_all_that_it_had(measurements: list[dict[str, Any]]) -> None:
    calibrate(JOB, axes=("none",))
    assert calibrate(JOB, axes=("none",), precisions=("bf16",)).precisions == ("fp32", "bf16")
    calibrate(JOB, axes=("none",))
    assert [asked["precisions"] for asked in measurements] == [("fp32",), ("fp32", "bf16")]


@pytest.mark.parametrize(("age_days", "why"), [(100, "100 days old"), (None, "cannot be read")])
def test_a_stale_or_corrupt_one_is_said_and_measured_anew(
    measurements: list[dict[str, Any]], age_days: int | None, why: str
) -> None:
    first = calibrate(JOB, axes=("none",))
    old = "{" if age_days is None else replace(first, created=time.time() - age_days * 86400).to_json()
    cache_file(first.key).write_text(old)
    said: list[str] = []
    calibrate(JOB, None, said.append, axes=("none",))
    assert why in said[0]
    assert len(measurements) == 2


def test_what_was_measured_beside_other_work_is_used_and_not_kept(
    measurements: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_percent", lambda _: 80.0)
    said: list[str] = []
    found = calibrate(JOB, None, said.append, axes=("none",))
    assert "other processes used 80 %" in said[-1]
    assert not cache_file(found.key).exists()


def test_gpus_and_machines_elsewhere_are_refused() -> None:
    gpu = Device(index=0, name="GPU", memory_bytes=2**30)
    with raises(ClusterError, "calibrate.gpus"):
        calibrate(JOB, Cluster(hosts=(Host(name="a", cores=2, memory_bytes=2**30, gpus=(gpu,)),)))
    elsewhere = tuple(Host(name=name, cores=2, memory_bytes=2**30) for name in "ab")
    with raises(ClusterError, "calibrate.several_hosts"):
        calibrate(JOB, Cluster(name="the cluster", hosts=elsewhere))
    with raises(ClusterError, "calibrate.other_cpu"):
        calibrate(
            JOB, Cluster(name="that one", hosts=(Host(name="a", cores=2, memory_bytes=2**30, cpu="None of ours"),))
        )


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "updates"), [("sgd", {"plain", "fused"}), ("adamw", {"fused"})])
def test_ranks_measure_what_a_prediction_needs(optimizer: str, updates: set[str]) -> None:
    found = calibrate(JOB.model_copy(update={"optimizer": OptimizerSpec(name=optimizer)}), axes=("none", "dp"))
    assert found.optimizer_s.keys() == updates
    assert found.segments[0] == ""
    assert found.parameters == 784 * 16 + 16 + 16 * 10 + 10
    assert {timing.samples for timing in found.timings} == {2, 4, 8, 16}
    assert all(timing.seconds > 0 for timing in found.timings)
    assert found.baseline_bytes > 5 * 10**7
    prediction = estimate(JOB, "dp=1", cluster=discover(), calibration=found)
    assert prediction.step_time_s > 0
    assert prediction.memory_bytes >= found.baseline_bytes
    if found.ranks > 1:
        assert {point.axis for point in found.points} == {"none", "dp"}
        assert {one.transport for one in found.collectives} == {"shm", "gloo"}
