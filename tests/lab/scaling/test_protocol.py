"""The order of the runs, and the directory that a benchmark can be resumed in and that no other one can."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline_lab
from commands import write_job
from handmade_runs import runs_of, setting
from paceline.errors import JobError, LaunchError, PlanError, RunError
from paceline_lab.scaling.protocol import rounds
from paceline_lab.scaling.summary import BenchmarkDirectory
from refusals import raises

ONE, TWO = setting(), setting(2)
PROTOCOL = {"plan": "dp=2", "job": {"global_batch": 16, "optimizer": {"lr": 0.1}}}


@given(settings=st.integers(1, 6), repeat=st.integers(1, 12))
def test_every_round_has_each_setting_once_and_each_takes_its_turn_to_be_first(settings: int, repeat: int) -> None:
    order = list(rounds([setting(n) for n in range(1, settings + 1)], repeat))
    assert Counter((round_, s.devices) for round_, s in order) == {
        (r, n): 1 for r in range(repeat) for n in range(1, settings + 1)
    }
    first = Counter(s.devices for i, (_, s) in enumerate(order) if i % settings == 0)
    assert max(first.values()) - min(first[n] for n in range(1, settings + 1)) <= 1


def test_what_was_measured_is_there_again_also_after_a_crash_cut_the_last_line(tmp_path: Path) -> None:
    begun = BenchmarkDirectory(tmp_path / "b")
    begun.begin(PROTOCOL)
    [first, second], [other] = runs_of(ONE, 10, 11), runs_of(TWO, 6)
    for run in (second, other, first):
        begun.add(run)
    (begun.path / "measured.jsonl").open("a").write('{"setting": "2-dev')

    again = BenchmarkDirectory(tmp_path / "b")
    again.begin(PROTOCOL)
    assert again.finished([ONE, TWO]) == {ONE.key: [first, second], TWO.key: [other]}


def test_a_run_that_never_finished_is_made_anew(tmp_path: Path) -> None:
    directory = BenchmarkDirectory(tmp_path / "b")
    directory.begin(PROTOCOL)
    path = directory.new_run(TWO, 2)
    assert path == tmp_path / "b" / "runs" / "2-devices-r3"
    path.mkdir()
    (path / "job.yaml").touch()
    assert not directory.new_run(TWO, 2).exists()


def test_a_directory_of_another_benchmark_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    BenchmarkDirectory(tmp_path / "b").begin(PROTOCOL)
    with raises(
        RunError, "bench.other_benchmark", differences="job.optimizer.lr was 0.1, is 0.2; plan was dp=2, is dp=4"
    ):
        BenchmarkDirectory(tmp_path / "b").begin(
            {"plan": "dp=4", "job": {"global_batch": 16, "optimizer": {"lr": 0.2}}}
        )


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with raises(RunError, "bench.not_a_benchmark"):
        BenchmarkDirectory(tmp_path)
    with raises(RunError, "bench.not_a_benchmark"):
        BenchmarkDirectory(tmp_path / "thesis.tex")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "protocol.json").write_text("{")
    with raises(RunError, "bench.unreadable"):
        BenchmarkDirectory(tmp_path / "b")
    for other in ("{}", '{"plan": 2}', '{"plan": "dp=2", "tried": 3, "reason": ""}', "[]"):
        (tmp_path / "b" / "protocol.json").write_text(other)
        with raises(RunError, "bench.protocol_invalid"):
            paceline_lab.bench(write_job(tmp_path / "job.yaml"), out=tmp_path / "b")


def test_bench_is_a_verb_that_tells_what_is_wrong_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path / "job.yaml")
    with raises(JobError, "file.absent"):
        paceline_lab.bench(tmp_path / "absent.yaml")
    with raises(RunError, "bench.repeat_invalid", repeat=0):
        paceline_lab.bench(job, repeat=0)
    with raises(RunError, "bench.too_few_steps", least=6, steps=5, warm_up=5):
        paceline_lab.bench(job, steps=5)
    with raises(PlanError, "plan.too_few_samples", data_ranks=17, global_batch=16, has="17 replicas"):
        paceline_lab.bench(job, devices=[17])
    monkeypatch.setenv("RANK", "0")
    with raises(LaunchError, "bench.under_torchrun"):
        paceline_lab.bench(job)
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.yaml"]
