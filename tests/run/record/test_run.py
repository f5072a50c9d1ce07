"""The run directory: it survives a crash at any byte, and says what was trained, where, how fast and why it ended."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.discover import discover
from paceline.errors import JobError, RunError
from paceline.planning.plan import Plan
from paceline.run.record.run import JsonLines, Run, read_lines
from refusals import raises
from small_jobs import new_run, small_job


def write_steps(run: Run, records: list[dict[str, Any]], rank: int = 0) -> None:
    lines = JsonLines(run.path / "steps" / f"rank-{rank}.jsonl")
    for record in records:
        lines.write(json.dumps(record))
    lines.close()


def step(number: int, *, loss: float | None = 1.0, step_s: float = 0.1, samples: int = 8) -> dict[str, Any]:
    return {"step": number, "loss": loss, "step_s": step_s, "samples": samples}


def write_events(run: Run, *events: dict[str, Any]) -> None:
    lines = JsonLines(run.path / "events.jsonl")
    for event in events:
        lines.event(event.pop("event"), event)
    lines.close()


# Lines


@given(cut=st.integers(0, 200))
def test_a_crash_at_any_byte_loses_at_most_the_last_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "steps.jsonl"
    before = [{"step": i, "text": "ä" * i} for i in range(1, 8)]
    whole = "".join(json.dumps(line) + "\n" for line in before).encode()
    path.write_bytes(whole[: len(whole) - min(cut, len(whole))])
    ends = [len(json.dumps(line)) + 1 for line in before]
    kept = [line for i, line in enumerate(before) if sum(ends[: i + 1]) - 1 <= path.stat().st_size]

    assert list(read_lines(path)) == kept
    lines = JsonLines(path)
    lines.write('{"step": 99}')
    lines.close()
    assert list(read_lines(path)) == [*kept, {"step": 99}]


def test_bytes_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\xfe\n{"step": 2}\n')
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "absent.jsonl")) == []


def test_two_writers_of_one_file_lose_nothing(tmp_path: Path) -> None:
    first, second = JsonLines(tmp_path / "events.jsonl"), JsonLines(tmp_path / "events.jsonl")
    for i in range(50):
        (first, second)[i % 2].event("tick", {"number": i})
    first.close()
    second.close()
    assert [line["number"] for line in read_lines(tmp_path / "events.jsonl")] == list(range(50))


def test_a_full_disk_is_named_and_what_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines = JsonLines(tmp_path / "steps.jsonl")
    lines.write('{"step": 1}')
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with raises(RunError, "run.record_unwritable", reason="No space left on device"):
            lines.write('{"step": 2}')
    lines.close()
    assert [line["step"] for line in read_lines(tmp_path / "steps.jsonl")] == [1]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with raises(RunError, "file.unwritable", reason="No such file or directory"):
        JsonLines(tmp_path / "absent" / "steps.jsonl")


# The directory


def test_a_run_reads_back_what_was_to_be_trained_where_and_how(tmp_path: Path) -> None:
    job, plan = small_job(), Plan.parse("dp=2 precision=bf16")
    Run.create(tmp_path / "run", job, discover(), plan)
    run = Run(tmp_path / "run")
    assert (run.job, run.plan, run.cluster) == (job, plan, discover())
    assert {"torch", "python"} <= json.loads((run.path / "environment.json").read_text()).keys()
    assert (run.reason, run.metrics, run.losses, run.throughput, run.training_time_s) == (None, {}, [], 0.0, 0.0)


def test_a_directory_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with raises(RunError, "run.not_a_run"):
        Run(tmp_path)


def test_a_run_is_never_written_over_another(tmp_path: Path) -> None:
    new_run(tmp_path / "run", small_job())
    with raises(RunError, "run.directory_in_use"):
        Run.create(tmp_path / "run", small_job(), discover(), Plan())


def test_a_directory_with_files_of_no_run_is_refused_but_not_one_with_logs(tmp_path: Path) -> None:
    for name in (".gitkeep", "slurm-12.out", "train.log"):
        (tmp_path / name).touch()
    Run.must_be_new(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with raises(RunError, "run.directory_not_empty", path=tmp_path):
        Run.must_be_new(tmp_path)
    (tmp_path / "plan.txt").touch()  # a start that failed has left it
    Run.must_be_new(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", Path("/proc/run")):
        with raises(RunError, "run.directory_unwritable", run=place):
            Run.create(place, small_job(), discover(), Plan())


def test_a_run_that_was_only_begun_to_be_created_is_no_run_and_can_be_created(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    (run.path / "job.yaml").unlink()  # it is written last
    assert new_run(tmp_path / "run", small_job()).job == small_job()


# Continuing


def test_a_job_that_would_train_something_else_is_refused_with_every_difference(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    other = small_job(global_batch=16, optimizer={"name": "sgd", "lr": 0.2, "momentum": 0.9}, seed=7)
    different = re.compile(r"^global_batch\b.*\b8\b.*\b16\b.*optimizer\.lr\b.*0\.1\b.*0\.2\b.*seed\b.*\b0\b.*\b7$")
    with raises(JobError, "run.other_job", path=run.path, differences=different) as raised:
        run.continue_with(other, discover(), Plan())
    assert "momentum" not in raised.value.fields["differences"]
    assert Run(run.path).job == small_job(), "nothing was written"


def test_a_job_may_stop_measure_and_save_at_other_times_and_on_other_machines(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    assert run.job, run.cluster  # read once, before they change
    job = small_job(stop={"epochs": 9}, evaluate={"every_steps": 5}, checkpoint={"keep": 1}, deadline_s=9)
    elsewhere = discover().model_copy(update={"name": "elsewhere"})
    run.continue_with(job, elsewhere, Plan(dp=2))
    for read in (run, Run(run.path)):
        assert (read.job, read.cluster, read.plan) == (job, elsewhere, Plan(dp=2))


def test_the_newest_run_of_a_job_is_found_by_the_name_of_the_job(tmp_path: Path) -> None:
    assert Run.newest(tmp_path / "absent", "small") is None
    jobs = [("small", "small-2"), ("small", "small-1"), ("small-but-other", "small-but-other-1"), ("tiny", "tiny-1")]
    for minute, (name, directory) in enumerate(jobs):
        run = new_run(tmp_path / directory, small_job(name=name))
        os.utime(run.path / "environment.json", (60 * minute, 60 * minute))
    (tmp_path / "small-3").mkdir()
    newest = Run.newest(tmp_path, "small")
    assert newest is not None
    assert newest.path.name == "small-1"
    assert Run.newest(tmp_path, "absent") is None


def test_the_name_that_a_job_has_by_default_is_found_as_well(tmp_path: Path) -> None:
    run = new_run(tmp_path / "job-1", small_job(name="job"))
    assert "name" not in yaml.safe_load((run.path / "job.yaml").read_text())
    assert Run.newest(tmp_path, "job") is not None


# What it says


def test_a_step_that_was_trained_again_counts_once_as_it_was_the_last_time(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    write_steps(run, [step(1), step(2), step(3, loss=None), step(2, loss=0.5), step(4)])
    assert [s["step"] for s in run.steps()] == [1, 2, 3, 4]
    assert run.losses[:2] == [1.0, 0.5]
    assert math.isnan(run.losses[2])


def test_steps_that_an_earlier_attempt_alone_made_do_not_count(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    write_steps(run, [step(1), step(2), step(3, loss=0.1), step(1, loss=2.0), step(2, loss=1.5)])
    assert run.losses == [2.0, 1.5]


def test_ranks_have_records_of_their_own(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    write_steps(run, [step(1)], rank=1)
    assert (run.steps(0), run.steps(1)) == ([], [step(1)])


def test_throughput_is_the_batch_over_the_median_step_without_the_warm_up(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    slow, usual = [step(i, step_s=9.0) for i in range(1, 6)], [step(i, step_s=0.5) for i in range(6, 11)]
    write_steps(run, slow)
    assert run.throughput == 0.0
    write_steps(run, [*usual, step(11, step_s=7.0), step(12, step_s=0.0), step(13, samples=6, step_s=0.5)])
    assert run.throughput == 8 / 0.5


def test_the_reason_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job())
    write_events(run, {"event": "start"}, {"event": "end", "reason": "SIGTERM", "elapsed_s": 3.0})
    assert (Run(run.path).reason, run.training_time_s) == ("SIGTERM", 3.0)
    write_events(run, {"event": "resume"})
    assert Run(run.path).reason is None, "it runs again, or crashed"
    write_events(
        run, {"event": "evaluation", "metrics": {"loss": 1.0}}, {"event": "evaluation", "metrics": {"loss": 0.5}}
    )
    write_events(run, {"event": "end", "reason": "steps: 20 done", "elapsed_s": 8.0}, {"event": "checkpoint_saved"})
    assert (run.reason, run.training_time_s, run.metrics) == ("steps: 20 done", 8.0, {"loss": 0.5})
