"""From runs to figures: speedups are of the same work, and claimed only where the intervals allow it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handmade_runs import result, runs_of, setting
from paceline.engine.meter import PARTS
from paceline.errors import RunError
from paceline_lab.scaling.result import RankUse
from paceline_lab.scaling.summary import FinishedRun, finished
from refusals import raises
from small_jobs import small_job, train_here

ONE, TWO, TWO_WEAK = setting(), setting(2), setting(2, "weak")
MS = st.lists(st.floats(0.1, 1000), min_size=3, max_size=6)


def test_a_speedup_is_the_median_over_the_rounds_and_its_efficiency_is_per_device() -> None:
    ones, twos = runs_of(ONE, 10, 10.2, 9.8), runs_of(TWO, 6, 6.0, 6.125)
    found = result(TWO, twos, ones)
    assert found.pairs == pytest.approx([10 / 6, 10.2 / 6, 9.8 / 6.125])
    assert found.speedup is not None
    assert found.efficiency is not None
    assert found.speedup.middle == pytest.approx(10 / 6)
    assert found.efficiency.middle == pytest.approx(5 / 6)
    assert found.is_speedup
    assert found.throughput.middle == pytest.approx(64 / 0.006)
    alone = result(ONE, ones, ones)
    assert (alone.speedup, alone.is_speedup, alone.pairs) == (None, False, [])


def test_weak_scaling_is_judged_by_the_time_per_sample() -> None:
    found = result(TWO_WEAK, runs_of(TWO_WEAK, 12.5, 12.5, 12.5), runs_of(ONE, 10, 10, 10))
    assert found.speedup is not None
    assert found.speedup.middle == pytest.approx(1.6)
    assert found.is_speedup


@given(ones=MS, twos=MS)
def test_no_speedup_is_claimed_where_the_intervals_of_the_times_overlap(ones: list[float], twos: list[float]) -> None:
    alone, found = (result(s, runs_of(s, *times), runs_of(ONE, *ones)) for s, times in ((ONE, ones), (TWO, twos)))
    assert not (found.is_speedup and alone.step_time_s.overlaps(found.step_time_s))


def test_two_repeats_claim_nothing() -> None:
    assert not result(TWO, runs_of(TWO, 5, 5), runs_of(ONE, 10, 10)).is_speedup


def test_rounds_in_which_one_of_the_two_is_missing_make_no_pair() -> None:
    found = result(TWO, runs_of(TWO, 5, 5, 5)[1:], runs_of(ONE, 10, 20, 30)[:2])
    assert found.pairs == pytest.approx([4.0])
    assert result(TWO, runs_of(TWO, 5), []).speedup is None


def test_a_job_with_a_target_is_compared_by_its_training_time() -> None:
    whole, two = setting(steps=None), setting(2, steps=None)
    ones = runs_of(whole, 10, 10, 10, training_time_s=8.0, reached=True)
    found = result(two, runs_of(two, 5, 5, 5, training_time_s=5.0, reached=True), ones)
    assert found.speedup is not None
    assert found.speedup.middle == pytest.approx(1.6)
    assert found.time_to_target_s is not None
    missed = result(two, [*runs_of(two, 5, 5, reached=True), *runs_of(two, 5, reached=False)], ones)
    assert missed.training_time_s is not None
    assert missed.time_to_target_s is None


def test_load_of_others_widens_the_intervals_towards_what_may_have_been_without_it() -> None:
    quiet = result(TWO, runs_of(TWO, 6, 6, 6), runs_of(ONE, 10, 10, 10), cores=2)
    busy = result(TWO, runs_of(TWO, 6, 6, 6, other_cores=0.5), runs_of(ONE, 10, 10, 10, other_cores=0.5), cores=2)
    assert quiet.is_speedup
    assert quiet.speedup is not None
    assert busy.speedup is not None
    assert busy.step_time_s.low == pytest.approx(0.003)
    assert (busy.speedup.low, busy.speedup.high) == pytest.approx((10 / 6, 20 / 6)), "one device had a core of its own"
    worse = result(TWO, runs_of(TWO, 6, 6, 6), runs_of(ONE, 10, 10, 10, other_cores=1.6), cores=2)
    assert not worse.is_speedup


def test_the_parts_of_all_repeats_sum_to_the_median_step() -> None:
    parts = [{"compute": 4.0, "comm": 2.0}, {"compute": 5.0, "comm": 3.0}, {"compute": 40.0, "comm": 1.0}]
    runs = [runs_of(TWO, sum(p.values()), parts_ms=p)[0] for p in parts]
    found = result(TWO, runs, runs_of(ONE, 10, 10, 10))
    assert len(found.ranks) == 2
    for rank in found.ranks:
        assert sum(rank.parts_s.values()) == pytest.approx(found.step_time_s.middle)


def test_a_run_is_read_from_its_directory_and_kept_as_a_line(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", small_job())
    found = finished(run, setting(), 0, "runs/one", 0.25)
    assert (found.steps, found.samples, found.reason, found.other_cores) == (20, 8, "steps: 20 done", 0.25)
    assert found.losses == run.losses
    assert found.final_loss == pytest.approx(sum(run.losses[-10:]) / 10)
    assert found.mfu is None, "the peak of a CPU is not known"
    assert sum(found.ranks[0].parts_s.values()) == pytest.approx(found.step_time_s)
    assert found.ranks[0].parts_s.keys() == set(PARTS)
    assert found.curve.samples[-1] == sum(step["samples"] for step in run.steps())
    assert msgspec.convert(json.loads(json.dumps(asdict(found))), FinishedRun) == found


def test_a_run_that_ends_within_the_warm_up_measures_nothing(tmp_path: Path) -> None:
    with raises(RunError, "bench.run_too_short", reason="steps: 4 done", steps=4, warm_up=5):
        finished(train_here(tmp_path / "run", small_job(stop={"steps": 4})), setting(), 0, "runs/one", None)


def test_what_is_read_a_few_times_a_run_is_given_per_step(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", small_job(stop={"steps": 12}))
    file = run.path / "steps" / "rank-0.jsonl"
    compressed = {"saved_bytes": 1500, "compression_error": 0.02}
    uses = {
        1: {"wire_bytes": 900, "energy_joules": 5.0, "memory_bytes": 100, "pss_bytes": 60, "peak_memory_bytes": 120},
        6: {"wire_bytes": 500, "energy_joules": 1.0, "memory_bytes": 150, "peak_memory_bytes": 160, "saved_bytes": 0},
        11: {"wire_bytes": 500, "energy_joules": 2.0, "memory_bytes": 150, "peak_memory_bytes": 200, **compressed},
    }
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [
        {k: v for k, v in line.items() if k != "use"} | ({"use": uses[line["step"]]} if line["step"] in uses else {})
        for line in lines
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = finished(run, setting(), 0, "runs/one", None)
    assert found.energy_joules == pytest.approx(0.3)
    assert found.ranks == [
        RankUse(
            found.ranks[0].parts_s,
            {"wire_bytes": 100.0, "memory_bytes": 160, "saved_bytes": 300.0, "compression_error": 0.02},
        )
    ]
