"""A run with `sync=server` always ends, even if workers and servers are stopped, killed or slow in any phase."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from commands import (
    Outcome,
    checkpoints,
    ended,
    events,
    in_a_process,
    losses,
    processes_of,
    rank_of,
    training,
    wait_for,
    wait_for_events,
    wait_for_step,
    write_job,
)
from paceline.wire.status import StatusBoard

STEPS, DEADLINE_S = 24, 8
PLAN = "dp=2 sync=server:staleness=2"  # ranks 0 and 1 work, 2 serves, and 3 is its backup
PHASES = ("start", "middle", "last", "end")

SLOW = """
import os
import time

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

HERE, RANK = Path(__file__).parent, os.environ.get("RANK")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        time.sleep(0.05 if self.training else 0.3)
        if (HERE / f"slow-{RANK}").exists():
            time.sleep(1)
        if (HERE / f"hangs-{RANK}").exists():
            (HERE / f"hangs-{RANK}").unlink()
            time.sleep(600)
        if self.training and (HERE / f"exits-{RANK}").exists():
            os._exit(0)
        return self.layer(x)


def points():
    if (HERE / f"late-{RANK}").exists():
        (HERE / f"late-{RANK}").unlink()
        time.sleep(11)  # longer than the deadline
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.sin(x[:, :4]))
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """24 steps of two pieces of 50 ms; an evaluation of a second after every 9 steps and at the end."""
    (tmp_path / "slow.py").write_text(SLOW)
    return write_job(
        tmp_path / "job.yaml",
        model={"factory": "slow.py:Net"},
        data={"kind": "dataset", "factory": "slow.py:points", "held_out": 0.25},
        loss="mse",
        optimizer={"name": "adamw", "lr": 0.003},
        global_batch=8,
        checkpoint={"every_steps": 8},
        stop={"steps": STEPS},
        deadline_s=DEADLINE_S,
    )


@contextmanager
def served(job: Path, folder: Path, plan: str = PLAN) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in progress. At the end its processes are gone, and the temporary folder is empty."""
    with training(job, folder, plan) as (process, run):
        yield process, run
    assert not list(folder.glob("paceline-scratch-*"))


def wait_for_phase(phase: str, rank: int, run: Path, process: subprocess.Popen[str]) -> psutil.Process:
    """Wait for a phase of the run, and return the process of a rank."""
    match phase:
        case "start":
            wait_for(lambda: any(rank_of(p) == rank for p in processes_of(process)), process)
        case "middle":
            wait_for_step(10, run, process)
        case "last":
            wait_for_step(STEPS - 2, run, process)
        case "end":
            wait_for_step(STEPS, run, process)
    [found] = [p for p in processes_of(process) if rank_of(p) == rank]
    return found


def must_be_whole(outcome: Outcome, run: Path) -> None:
    assert outcome.code == 0, outcome.err
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert checkpoints(run)[-1] == f"step-{STEPS:08d}"
    assert not events(run, "resume"), "nothing was read from the disk"


def cases(*quick: tuple[str, int, str]) -> list[object]:
    """Every fault of every rank in every phase; the cases that take long are marked slow."""
    every = [(fault, rank, phase) for fault in ("stop", "kill") for rank in range(4) for phase in PHASES]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("fault", "rank", "phase"), cases(("stop", 1, "middle"), ("kill", 0, "last")))
def test_a_worker_or_server_that_is_lost_costs_no_step(
    fault: str, rank: int, phase: str, job: Path, tmp_path: Path
) -> None:
    with served(job, tmp_path) as (process, run):
        victim = wait_for_phase(phase, rank, run, process)
        with suppress(psutil.NoSuchProcess):  # at the end it may just have ended
            victim.suspend() if fault == "stop" else victim.kill()
        outcome = ended(process)
    must_be_whole(outcome, run)


@pytest.mark.parametrize(("fault", "rank", "phase"), cases(("stop", 1, "middle")))
def test_sigterm_ends_a_run_whatever_a_worker_or_server_does(
    fault: str, rank: int, phase: str, job: Path, tmp_path: Path
) -> None:
    with served(job, tmp_path) as (process, run):
        victim = wait_for_phase(phase, rank, run, process)
        with suppress(psutil.NoSuchProcess):
            victim.suspend() if fault == "stop" else victim.kill()
        process.send_signal(signal.SIGTERM)
        outcome = ended(process)
    assert outcome.code in (0, 1, 128 + signal.SIGTERM)
    if rank == 1 and phase == "middle":
        assert int(checkpoints(run)[-1].removeprefix("step-")) > 9, "the first worker has saved behind its piece"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["slow", "hangs", "late"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_slow_or_hanging_worker_and_a_late_start_are_waited_for_or_replaced(
    how: str, rank: int, job: Path, tmp_path: Path
) -> None:
    (tmp_path / f"{how}-{rank}").touch()
    with served(job, tmp_path) as (process, run):
        outcome = ended(process)
    must_be_whole(outcome, run)
    assert len(events(run, "lost")) == (how == "hangs" and rank < 2)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_a_worker_of_two_ranks_of_which_one_is_stopped_is_replaced(rank: int, job: Path, tmp_path: Path) -> None:
    with served(job, tmp_path, "dp=2 tp=2 sync=server:staleness=2") as (process, run):
        wait_for_phase("middle", rank, run, process).suspend()
        outcome = ended(process)
    must_be_whole(outcome, run)


@pytest.mark.slow
def test_rounds_that_take_longer_than_the_deadline_are_waited_for(job: Path, tmp_path: Path) -> None:
    (tmp_path / "slow-0").touch()
    with served(job, tmp_path, "dp=2 sync=server:staleness=1,period=12") as (process, run):
        outcome = ended(process)
    must_be_whole(outcome, run)
    assert not events(run, "lost")


@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_before_it_has_saved_begins_anew(job: Path, tmp_path: Path) -> None:
    job.write_text(job.read_text().replace("every_steps: 8", "every_steps: 1000"))
    with training(job, tmp_path, PLAN) as (process, run):
        wait_for_step(5, run, process)
        started = processes_of(process)
        process.kill()
        _, alive = psutil.wait_procs(started, timeout=30)
        assert not alive
    again = in_a_process("train", job, "--run", run, "--resume", folder=tmp_path)
    assert again.code == 0, again.err
    assert [event["step"] for event in events(run, "start")] == [0, 0], "it starts from the beginning"
    assert not events(run, "resume")
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("rank", "plan"), [(0, PLAN), pytest.param(1, PLAN, marks=pytest.mark.slow), (0, "dp=2 sync=server")]
)
def test_a_worker_whose_code_calls_exit_is_named_and_ends_the_run(
    rank: int, plan: str, job: Path, tmp_path: Path
) -> None:
    (tmp_path / f"exits-{rank}").touch()
    with served(job, tmp_path, plan) as (process, run):
        outcome = ended(process)
    assert outcome.code == 1
    assert f"rank {rank} " in outcome.error.splitlines()[0]
    assert max(losses(run), default=0) < STEPS


@pytest.mark.slow
def test_a_server_that_is_lost_before_its_backup_is_there_costs_nothing(job: Path, tmp_path: Path) -> None:
    with served(job, tmp_path) as (process, run):
        backup, server = (wait_for_phase("start", rank, run, process) for rank in (3, 2))
        backup.suspend()
        wait_for(lambda: list(tmp_path.glob(f"paceline-scratch-*/server-{server.pid}")), process)
        [socket] = tmp_path.glob(f"paceline-scratch-*/server-{server.pid}")
        with closing(StatusBoard.at(socket.with_name("status"))) as board:
            wait_for(lambda: board.read()[2].phase == "done", process)  # it leads
        server.kill()
        wait_for_events(run, "lost", 1, process)
        backup.resume()
        outcome = ended(process)
    must_be_whole(outcome, run)
