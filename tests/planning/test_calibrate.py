"""A calibration is kept as it was measured, and one that does not hold any more is not used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.host import Host
from paceline.job.job import Job
from paceline.planning.calibrate import (
    Calibration,
    CalibrationPoint,
    Collective,
    PassTiming,
    cache_file,
    interpolated,
    keep,
    kept,
    key_of,
    machine_of,
    reference_time_s,
    why_stale,
)

HOST = Host(name="here", cores=2, memory_bytes=2**30, cpu="A CPU")
FOUND = Calibration(
    key="digits-0",
    machine=machine_of(HOST),
    created=1e9,
    reference_s=1e-3,
    cores=2,
    ranks=2,
    global_batch=64,
    parameters=1000,
    segments=("", "blocks.0", "/end"),
    timings=(PassTiming(2, 1, "fp32", "none", 32, (0.1, 0.2, 0.3), (0.2, 0.4, 0.6), 5000),),
    points=(CalibrationPoint("dp", 2, "fp32", 16, 1, 0.001, 0.5, 0.0, 0.01, 0.02, 10**8),),
    collectives=(Collective("shm", "all_reduce", 2, (1024, 2**20), (1e-5, 2e-4), (1e-5, 2e-4)),),
    optimizer_s={"plain": 0.01, "fused": 0.002},
    baseline_bytes=3 * 10**8,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def job(**changes: object) -> Job:
    values = {
        "name": "digits",
        "model": "mlp",
        "data": {"kind": "synthetic", "samples": 64, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch": 32,
        "stop": {"steps": 1},
    }
    return Job.model_validate(values | changes)


def test_what_was_measured_is_read_back_as_it_was() -> None:
    assert Calibration.from_json(FOUND.to_json()) == FOUND


def test_what_is_kept_is_found_again() -> None:
    assert "kept in" in keep(FOUND)
    assert kept(FOUND.key, HOST, reference_s=1e-3) == (
        None,
        f"the calibration in {cache_file(FOUND.key)} is stale: {_age(FOUND)}",
    )
    fresh = replace(FOUND, created=4e9)
    keep(fresh)
    assert kept(FOUND.key, HOST, reference_s=1.1e-3) == (fresh, None)


def _age(found: Calibration) -> str:
    return str(why_stale(found, HOST, reference_s=1e-3))


@pytest.mark.parametrize(
    ("changes", "reference_s", "words"),
    [
        ({"machine": machine_of(HOST) | {"torch": "1.0"}}, 1e-3, "torch 1.0"),
        ({"machine": machine_of(HOST) | {"cpu": "Another"}}, 1e-3, "cpu Another"),
        ({"created": 1e9 - 40 * 86400}, 1e-3, "40 days old"),
        ({}, 1.5e-3, "50 % slower"),
        ({}, 0.5e-3, "100 % faster"),
    ],
)
def test_a_stale_calibration_says_why(changes: dict[str, object], reference_s: float, words: str) -> None:
    reason = why_stale(replace(FOUND, **changes), HOST, reference_s=reference_s, now=1e9)  # type: ignore[arg-type]
    assert reason is not None
    assert words in reason


def test_one_that_holds_is_not_stale() -> None:
    assert why_stale(FOUND, HOST, reference_s=1.1e-3, now=1e9 + 86400) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 0}', '{"format": 2, "timings": 3}'])
def test_a_corrupt_file_is_said_to_be_one(text: str) -> None:
    cache_file("digits-1").parent.mkdir(parents=True)
    cache_file("digits-1").write_text(text)
    found, why = kept("digits-1", HOST, reference_s=1e-3)
    assert found is None
    assert why is not None
    assert "cannot be read" in why


def test_the_key_is_of_the_work_and_not_of_how_long_it_goes_on() -> None:
    assert key_of(job(), HOST) == key_of(job(stop={"steps": 99}, optimizer={"name": "sgd", "lr": 0.5}), HOST)
    assert key_of(job(), HOST) != key_of(job(global_batch=16), HOST)
    assert key_of(job(), HOST) != key_of(job(), HOST.model_copy(update={"cores": 4}))


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "not saved" in keep(FOUND)


def test_the_nearest_number_of_ranks_stands_for_those_not_measured() -> None:
    alone = PassTiming(1, 2, "fp32", "none", 32, (0.1,), (0.1,))
    found = replace(FOUND, timings=(*FOUND.timings, alone))
    assert found.timings_of(1, "fp32") == [alone]
    assert found.timings_of(4, "fp32") == list(FOUND.timings)
    assert found.timings_of(1, "bf16") == []


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=5), st.floats(0, 100))
def test_a_time_between_sizes_lies_between_their_times(times: list[float], size: float) -> None:
    sizes, ascending = [2**i for i in range(len(times))], sorted(times)
    value = interpolated(sizes, ascending, size)
    assert value >= 0.5 * ascending[0] * (1 - 1e-9)
    if sizes[0] <= size <= sizes[-1]:
        assert ascending[0] * (1 - 1e-9) <= value <= ascending[-1] * (1 + 1e-9)


def test_the_reference_time_of_a_machine_is_a_time() -> None:
    assert 0 < reference_time_s() < 1
