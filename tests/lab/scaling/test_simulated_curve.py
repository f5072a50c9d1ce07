"""Simulated scaling: what must hold of every curve, whatever the job and the cluster are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade_search import job
from paceline.cluster.cluster import Cluster, cluster_from
from paceline.errors import PlanError
from paceline.planning.explain.advice import with_devices
from paceline.planning.explain.training_run import straggler_slowdown
from paceline.planning.search.search import search
from paceline_lab.simulated.curve import (
    PAYS,
    Chances,
    SimulatedCurve,
    counts,
    excess_shares,
    limit_of,
    limits,
    per_device,
    sentences,
    simulated_curve,
)
from paceline_lab.simulated.measured_here import Jitter
from paceline_lab.simulated.simulation import simulate
from refusals import raises

CHANCES = Chances.published()


def curve(batch: int = 64, name: str = "2x8xH100-SXM", scaling: str = "strong", **of_chances: object) -> SimulatedCurve:
    chances = replace(CHANCES, draws=200, **of_chances)  # type: ignore[arg-type]
    samples = samples_per_device(batch, name) if scaling == "weak" else None
    return simulated_curve(job(global_batch=batch), cluster_from(name), chances, per_device=samples)


@cache
def samples_per_device(batch: int, name: str) -> float:
    """Samples of one device in the best plan of the whole cluster."""
    return per_device(curve(batch, name))


@given(
    batch=st.sampled_from([8, 48, 64, 1000]),
    name=st.sampled_from(["8xA100-SXM-80", "2x8xH100-SXM", "3x4xV100-SXM-32, 10gbit", "16x4xTPU-v5p"]),
    scaling=st.sampled_from(["strong", "weak"]),
    sigma=st.sampled_from([None, 0.0, 0.05]),
    failures=st.sampled_from([0.0, 0.004, 5.0]),
)
@settings(max_examples=5, deadline=None)
def test_figures_of_a_curve_agree_with_each_other(
    batch: int, name: str, scaling: str, sigma: float | None, failures: float
) -> None:
    jitter = None if sigma is None else Jitter(sigma)
    found = curve(batch, name, scaling, jitter=jitter, failures_per_host_day=failures)
    assert [point.devices for point in found.points] == counts(cluster_from(name))
    base = found.base
    assert base.speedup is not None
    assert (base.speedup.low, base.speedup.middle, base.speedup.high) == (1, 1, 1), "the base is exact"
    assert base.throughput is not None
    for point in found.fitting:
        assert point.step_time_s
        assert point.throughput
        assert point.speedup
        assert point.efficiency
        times = point.devices / base.devices
        for share, gain in zip(values(point.efficiency), values(point.speedup), strict=True):
            assert share == pytest.approx(gain / times)
        for interval in (point.step_time_s, point.throughput, point.speedup, point.efficiency, point.goodput):
            assert interval is None or 0 < interval.low <= interval.middle <= interval.high
        assert point.throughput.middle == pytest.approx(point.global_batch / point.step_time_s.middle)
        assert point.speedup.middle == pytest.approx(point.throughput.middle / base.throughput.middle)
        assert (point.goodput is None) == (failures == 0.0)
        assert point.goodput is None or point.goodput.high <= 1
        assert 0 < point.used <= point.devices
    assert all(isinstance(sentence, str) and sentence.endswith(".") for sentence in sentences(found))


def values(interval: object) -> tuple[float, float, float]:
    return interval.low, interval.middle, interval.high  # type: ignore[attr-defined]


@given(st.integers(1, 16), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_numbers_of_devices_double_and_end_with_the_whole_cluster(per_host: int, hosts: int) -> None:
    found = counts(cluster_from(f"{hosts}x{per_host}xH100-SXM"))
    assert found[0] == 1
    assert found[-1] == hosts * per_host
    assert found == sorted(set(found))
    assert all(later <= 2 * earlier for earlier, later in pairwise(found))
    assert all(n <= per_host or n % per_host == 0 for n in found), "beyond one host they are whole hosts"


@pytest.mark.parametrize("batch", [2, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (8, 64))])
def test_strong_scaling_searches_fewer_numbers_and_finds_the_same(batch: int) -> None:
    small = job(global_batch=batch)
    cluster = cluster_from("16x8xH100-SXM")
    found = simulated_curve(small, cluster, CHANCES)
    for point in found.fitting:
        on = with_devices(cluster, point.devices / cluster.devices)
        assert on is not None
        best = search(small, on, top=1).best[0]
        assert point.candidate is not None
        assert best.prediction.step_time_s == pytest.approx(point.candidate.prediction.step_time_s)
        assert point.hosts == len(on.hosts)


def test_in_weak_scaling_a_device_has_as_many_samples_as_in_the_best_plan_of_the_whole_cluster() -> None:
    weak = curve(batch=64, name="4x8xH100-SXM", scaling="weak")
    assert [point.global_batch for point in weak.points] == [2, 4, 8, 16, 32, 64]
    tiny = job(model={"transformer": {"layers": 1, "hidden": 64, "heads": 2, "seq": 64, "vocab": 100}}, global_batch=4)
    strong = simulated_curve(tiny, cluster_from("8xH100-SXM"), CHANCES)
    assert strong.last.used == 1
    assert per_device(strong) == 4, "what is not used does not count"


def test_speedups_start_where_the_job_fits_and_say_why_not_before() -> None:
    large = job(
        model={"transformer": {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 50000}}, global_batch=64
    )
    found = simulated_curve(large, cluster_from("8xH100-SXM"), CHANCES)
    first = found.points[0]
    assert first.devices == 1
    assert not first.fits
    assert "are missing" in first.why
    assert found.base.devices == 2
    assert "It fits from 2 devices on, which speedups are against." in sentences(found)[0]
    assert limit_of(found.base, found.base) == ""


def test_a_job_that_fits_nowhere_is_an_error_with_what_is_missing() -> None:
    huge = job(model={"transformer": {"layers": 128, "hidden": 25600, "heads": 160, "seq": 2048, "vocab": 51200}})
    with raises(PlanError, "bench.no_plan"):
        simulated_curve(huge, cluster_from("8xH100-SXM"), CHANCES)


def test_stragglers_take_from_the_speedup_what_the_formula_says() -> None:
    calm, rough = (curve(scaling="weak", jitter=Jitter(sigma)) for sigma in (0.0, 0.1))
    assert calm.last.used == rough.last.used
    assert calm.last.throughput is not None
    assert rough.last.throughput is not None
    ratio = calm.last.throughput.middle / rough.last.throughput.middle
    assert ratio == pytest.approx(straggler_slowdown(calm.last.used, 0.1), rel=0.01)


def test_checkpoints_that_cost_more_than_they_save_are_told_with_a_better_interval() -> None:
    large = job(
        model={"transformer": {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 50000}},
        checkpoint={"every_seconds": 60},
    )
    found = simulated_curve(large, cluster_from("8xH100-SXM"), CHANCES)
    base = found.base
    assert base.goodput is not None
    assert base.best_goodput is not None
    assert base.best_goodput > base.goodput.middle + 0.1
    assert f"checkpoint.every_steps: {base.best_every_steps}" in sentences(found)[-1]


def test_what_published_curves_lose_is_taken_off_unless_stragglers_stand_for_it() -> None:
    usual, drawn = curve(scaling="weak"), curve(scaling="weak", jitter=Jitter(0.0))
    planner = drawn.last.candidate
    assert planner is not None
    assert drawn.last.throughput is not None
    assert drawn.last.throughput.middle == pytest.approx(planner.prediction.throughput)
    assert usual.last.throughput is not None
    assert usual.last.throughput.middle < drawn.last.throughput.middle


def test_the_same_seed_gives_the_same_intervals_and_another_one_others() -> None:
    first, again, other = (curve(name="8xH100-SXM", seed=seed) for seed in (1, 1, 2))
    assert first.last == again.last
    assert first.last.speedup != other.last.speedup


def test_more_devices_than_are_of_use_are_said_to_be_unused() -> None:
    tiny = job(model={"transformer": {"layers": 1, "hidden": 64, "heads": 2, "seq": 64, "vocab": 100}}, global_batch=4)
    found = simulated_curve(tiny, cluster_from("16x8xH100-SXM"), CHANCES)
    assert found.last.used < found.last.devices
    assert "used: with more a step takes longer" in limit_of(found.last, found.base)
    told = " ".join(sentences(found))
    assert "It pays up to" in told
    assert [devices for devices, _ in limits(found)][-1].endswith("128")
    assert found.last.efficiency is not None
    assert found.last.efficiency.middle < PAYS


def test_parts_beyond_the_ideal_sum_to_what_a_step_is_longer() -> None:
    found = curve(scaling="weak", name="2x8xH100-SXM, 10gbit")
    base, last = found.base.candidate, found.last.candidate
    assert base is not None
    assert last is not None
    work = (found.last.global_batch / found.last.devices) / (found.base.global_batch / found.base.devices)
    longer = 1 - work * base.prediction.step_time_s / last.prediction.step_time_s
    assert sum(share for _, share in excess_shares(found.last, found.base)) == pytest.approx(longer)


def test_a_simulation_says_what_it_rests_on_and_is_never_called_measured() -> None:
    told = simulate(job(), cluster_from("2x8xH100-SXM"), "2x8xH100-SXM", CHANCES, weak=False)
    text = " ".join(told.rests_on)
    assert "published curves lose" in text
    assert "arXiv:2407.21783" in text
    assert "nothing was measured here" in text
    values = told.to_json()
    assert values["simulated"] is True
    assert [curve["scaling"] for curve in values["curves"]] == ["strong"]
    without = simulate(
        job(), cluster_from("8xH100-SXM"), "8xH100-SXM", replace(CHANCES, failures_per_host_day=0.0), weak=False
    )
    assert "failures: none, as asked for" in without.rests_on
    assert without.to_json()["curves"][0]["points"][-1]["goodput"] is None


def test_clusters_of_cores_are_simulated_too() -> None:
    cores: Cluster = cluster_from("2x4xCPU-AVX512, 10gbit")
    found = simulated_curve(job(precision="fp32"), cores, CHANCES)
    assert [point.devices for point in found.points] == [1, 2, 4, 8]
