"""A rank, the launcher or the disk fails in the middle of a run.

What was saved stays, no process is left, and the run goes on exactly.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from commands import (
    DEADLINE_S,
    Outcome,
    checkpoints,
    ended,
    ended_well,
    events,
    kill_rank,
    losses,
    losses_of,
    paceline,
    points,
    processes_of,
    training,
    wait_for,
    wait_for_step,
    write_job,
)

WHAT = Path(__file__).with_name("what_goes_wrong.py")
EXACT = "dp=2 balance=off"  # shares that follow a busy machine round in another way


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps of about 20 ms on two ranks, a checkpoint after every tenth.

    The state, of 8 MB, takes some steps to be written.
    """
    return write_job(
        tmp_path_factory.mktemp("job") / "job.yaml",
        model={"factory": f"{WHAT}:net", "args": {"width": 1000}},
        data=points(sleep_s=0.002),
        stop={"steps": 60},
        checkpoint={"every_steps": 10},
        deadline_s=60,
    )


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> dict[int, float]:
    """The losses of the job when nothing happens."""
    return losses_of(job, EXACT)


def resumed(job: Path, folder: Path, plan: str = EXACT) -> Outcome:
    outcome = paceline("train", job, "--plan", plan, "--run", "run", "--resume", folder=folder)
    assert outcome.code == 0, outcome.err
    return outcome


def test_after_a_killed_rank_and_with_a_damaged_checkpoint_the_run_goes_on_exactly(
    job: Path, undisturbed: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RECOVERY", "off")
    with training(job, tmp_path, EXACT) as (process, run):
        wait_for(lambda: (run / "checkpoints" / "step-00000020").exists(), process)
        kill_rank(1, process)
        killed = ended(process)
    assert killed.code == 1
    error = killed.fails_with("launch.rank_killed")
    assert error.startswith("rank 1 (host ")
    assert "SIGKILL" in error

    newest, before = checkpoints(run)[::-1][:2]
    shard = run / "checkpoints" / newest / "rank-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    resumed(job, tmp_path)
    [damaged] = events(run, "checkpoint_damaged")
    assert damaged["path"] == newest
    assert "rank-1.safetensors" in damaged["reason"]
    assert [event["step"] for event in events(run, "resume")] == [int(before.removeprefix("step-"))]
    assert losses(run) == undisturbed


def test_with_restarts_a_killed_rank_costs_no_step_and_no_hand(
    job: Path, undisturbed: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RECOVERY", "off")
    with training(job, tmp_path, EXACT, "--restarts", 1) as (process, run):
        wait_for_step(25, run, process)
        kill_rank(0, process)
        ended_well(process)
    [restart] = events(run, "restart")
    assert (restart["attempt"], restart["rank"], restart["code"]) == (1, 0, "launch.rank_killed")
    assert len(events(run, "resume")) == 1
    assert losses(run) == undisturbed


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_and_the_run_goes_on_with_another_number_of_them(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, EXACT) as (process, run):
        wait_for_step(25, run, process)
        ranks = processes_of(process)
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(ranks, timeout=DEADLINE_S)
    assert len(ranks) >= 2
    assert not left
    saved = int(checkpoints(run)[-1].removeprefix("step-"))
    assert saved >= 25, "the ranks save before they end"

    resumed(job, tmp_path, "dp=1")
    assert [(event["step"], event["plan"]) for event in events(run, "resume")] == [(saved, "dp=1")]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_a_sigterm_during_a_checkpoint_lets_it_be_finished_and_the_run_goes_on_exactly(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, EXACT) as (process, run):
        wait_for(
            lambda: (
                any(name.endswith(".partial") for name in checkpoints(run)) if (run / "checkpoints").is_dir() else False
            ),
            process,
        )
        process.terminate()
        stopped = ended(process)
    assert stopped.code == 143
    assert stopped.says(f"--run {run.relative_to(tmp_path)} --resume")
    assert "Traceback" not in stopped.err
    [end] = events(run, "end")
    assert (end["reason"], end["interrupted"]) == ("SIGTERM", True)
    assert [event["step"] for event in events(run, "checkpoint_saved")] == [10, end["step"]]
    assert checkpoints(run) == ["step-00000010", f"step-{end['step']:08d}"]

    resumed(job, tmp_path)
    assert losses(run) == undisturbed


def test_ctrl_c_saves_and_ends_the_run(job: Path, tmp_path: Path) -> None:
    with training(job, tmp_path, EXACT) as (process, run):
        wait_for_step(3, run, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130
    assert outcome.says(f"--run {run.relative_to(tmp_path)} --resume")
    assert [(event["reason"], event["interrupted"]) for event in events(run, "end")] == [("SIGINT", True)]
    assert checkpoints(run)[-1] == f"step-{max(losses(run)):08d}"


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "other"), [("tp=2", "fsdp=2"), ("fsdp=2", "dp=2")])
def test_ctrl_c_ends_a_divided_run_which_goes_on_under_another_plan(
    job: Path, undisturbed: dict[int, float], tmp_path: Path, plan: str, other: str
) -> None:
    with training(job, tmp_path, plan) as (process, run):
        wait_for_step(25, run, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130
    saved = int(checkpoints(run)[-1].removeprefix("step-"))
    assert saved == max(losses(run)) < 60
    resumed(job, tmp_path, other)
    assert [(event["step"], event["plan"]) for event in events(run, "resume")] == [(saved, other)]
    # The job's losses grow, and with them what sums in another order round differently.
    assert losses(run) == pytest.approx(undisturbed, rel=5e-3)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_ranks_at_once_that_cannot_save(tmp_path: Path) -> None:
    hanging = points(trouble="hang")
    job = write_job(tmp_path / "job.yaml", model=f"{WHAT}:net", data=hanging, deadline_s=60)
    with training(job, tmp_path, EXACT) as (process, run):
        wait_for_step(4, run, process)  # rank 1 hangs in the fifth
        ranks = processes_of(process)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: events(run, "stop"), process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
        _, left = psutil.wait_procs(ranks, timeout=DEADLINE_S)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    assert not events(run, "end"), "no rank could save"
    assert not left


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_full_or_read_only_disk_is_told_and_what_was_saved_goes_on_when_there_is_room(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    state = next((job.parent / "undisturbed" / "checkpoints").iterdir())
    state_bytes = sum(file.stat().st_size for file in state.iterdir())
    with mounted(disk, state_bytes * 3 // 2):
        options = ("train", job, "--plan", EXACT, "--run", "disk/run")
        full = paceline(*options, folder=tmp_path)
        assert full.code == 1
        failures = [(event["failures"], event["max_failures"]) for event in events(disk / "run", "checkpoint_failed")]
        assert failures == [(1, 3), (2, 3)], "training goes on"
        error = full.fails_with("checkpoint.failures_exhausted")
        assert "step-00000010" in error, "what was saved before"
        assert whole(checkpoints(disk / "run")) == ["step-00000010"]

        remount(disk, "ro")
        kept = {"run": "disk/run", "reason": "Read-only file system"}
        paceline(*options, "--resume", folder=tmp_path).fails_with("run.directory_unwritable", **kept)

        remount(disk, f"rw,size={state_bytes * 8}")
        again = paceline(*options, "--resume", folder=tmp_path)
        assert again.code == 0, again.err
        assert [event["step"] for event in events(disk / "run", "resume")] == [10]
        assert losses(disk / "run") == undisturbed


def whole(names: list[str]) -> list[str]:
    """The checkpoints in the folder, without one that the next start removes."""
    return [name for name in names if not name.startswith(".")]


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """A disk of so many bytes, in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
