"""`paceline watch`: what a person sees of a run that trains, that has ended, and that is not there."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from pathlib import Path

from commands import (
    DEADLINE_S,
    ended,
    kill_rank,
    paceline,
    started,
    training,
    wait_for_events,
    wait_for_step,
    write_job,
    write_long_job,
)


def test_a_run_is_followed_to_its_end_through_the_loss_of_a_rank(tmp_path: Path) -> None:
    healed = tmp_path / "healed"
    with training(write_long_job(tmp_path, until=healed), tmp_path, "dp=2") as (process, run):
        wait_for_step(5, run, process)
        with started("paceline", "watch", run, "--every", "0.1", folder=tmp_path) as watching:
            kill_rank(1, process)
            wait_for_events(run, "lost", 1, process)
            now = paceline("watch", run, "--once", folder=tmp_path, columns=160)
            assert now.code == 0
            assert now.says("run · dp=2", "rank 1", "where it goes")
            wait_for_events(run, "healed", 1, process)
            healed.touch()
            assert ended(process).code == 0
            seen = ended(watching)
    assert seen.code == 0
    assert "run: epoch " in seen.out
    assert seen.out.splitlines()[-1].endswith("ended: steps: 600 done")
    after = paceline("watch", run, "--once", folder=tmp_path, columns=160)
    assert after.says("ended: steps: 600 done", "step 600", "is back at step")


def test_on_a_terminal_the_screen_follows_and_ctrl_c_leaves_it(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 100_000})
    with training(job, tmp_path, "dp=1") as (process, run):
        wait_for_step(20, run, process)
        ours, theirs = pty.openpty()
        try:
            environment = {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
            with started("paceline", "watch", run, folder=tmp_path, screen=theirs, environment=environment) as watching:
                until, seen = time.monotonic() + DEADLINE_S, ""
                while seen.count("where it goes") < 2 and time.monotonic() < until:
                    if select.select([ours], [], [], 0.1)[0]:
                        seen += os.read(ours, 2**16).decode(errors="replace")
                watching.send_signal(signal.SIGINT)
                assert watching.wait(DEADLINE_S) == 0
        finally:
            os.close(ours)
            os.close(theirs)
    assert seen.count("where it goes") >= 2
    assert "running" in seen


def test_in_lines_too_ctrl_c_leaves_it_and_a_run_that_was_killed_is_said_to_wait(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 100_000})
    with training(job, tmp_path, "dp=1") as (process, run):
        wait_for_step(20, run, process)
    with started("paceline", "watch", run, "--every", "0.1", folder=tmp_path) as watching:
        assert watching.stdout is not None
        lines: list[str] = []
        while not lines or "no step for" not in lines[-1]:
            lines.append(watching.stdout.readline())
            assert lines[-1], "it ended"
        watching.send_signal(signal.SIGINT)
        seen = ended(watching)
    assert seen.code == 0
    assert "Traceback" not in seen.err


def test_what_is_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    assert "is not a run directory" in paceline("watch", tmp_path, folder=tmp_path).error
    assert "only directories can be watched" in paceline("watch", "s3://bucket/mine", folder=tmp_path).error


def test_the_newest_loss_is_seen_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 100})
    assert paceline("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path).code == 0
    shown = paceline("watch", "run", "--once", folder=tmp_path, columns=80)
    assert shown.code == 0
    [curve] = [line for line in shown.out.splitlines() if line.startswith("loss ")]
    assert re.match(r"loss  \S+ → [\d.e-]+ ", curve)
    assert len(curve) <= 80
