"""Workers take pieces of the batches from servers: the run ends where its job says, whoever is slow or dies."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import pytest

from commands import (
    ended,
    events,
    kill_rank,
    losses,
    paceline,
    processes_of,
    rank_of,
    training,
    wait_for,
    wait_for_events,
    wait_for_step,
    write_job,
)
from paceline.report.run_page import view_of
from paceline.run.record.run import Run

WHAT = Path(__file__).parents[2] / "faults" / "what_goes_wrong.py"
STEPS = 60


def job_in(folder: Path, **changes: object) -> Path:
    """60 steps of two pieces of 8 samples, 6 steps in an epoch, with an evaluation after each epoch."""
    args = {"samples": 112, "sleep_s": changes.pop("sleep_s", 0.0)}
    data = {"kind": "dataset", "factory": f"{WHAT}:Points", "held_out": 0.15, "args": args}
    values = {
        "model": {"factory": f"{WHAT}:net", "args": {"width": 16}},
        "data": data,
        "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.5},
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": 20},
        "deadline_s": 60,
    }
    return write_job(folder / "job.yaml", **values | changes)


def newest(run: Path) -> float:
    found = losses(run)
    return statistics.mean(found[step] for step in sorted(found)[-20:])


@pytest.mark.parametrize("sync", ["server:staleness=inf,backup=off", "server:staleness=1,servers=2,backup=off"])
def test_an_asynchronous_run_records_evaluates_and_saves_as_any_run(sync: str, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    found = paceline("train", job, "--plan", f"dp=2 sync={sync}", "--run", "served", folder=tmp_path)
    assert found.code == 0, found.err
    run = tmp_path / "served"
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert [event["step"] for event in events(run, "evaluation")] == list(range(6, STEPS + 1, 6))
    assert events(run, "end")[-1]["reason"] == f"steps: {STEPS} done"
    told = events(run, "served")[-1]["workers"]
    assert sum(worker["pushes"] for worker in told.values()) == 2 * STEPS, "every piece once"
    view = view_of(Run(run))
    assert not [gap for gap in view["record"].gaps if "missing" in gap]
    assert view["cards"][0].note.startswith("on 2 workers")
    assert "the parameters; 2 workers push" in "".join(view["sync"]["sentences"])
    lines = Run(run).steps()
    apart_s = [b["time"] - a["time"] for a, b in itertools.pairwise(lines)]
    # times are written in milliseconds
    assert all(seconds > line["step_s"] - 0.002 for seconds, line in zip(apart_s, lines[1:], strict=True))
    assert sum(seconds > 0 for seconds in apart_s) > STEPS / 2, "each batch has an end of its own"
    alone = paceline("train", job, "--plan", "dp=2", "--run", "together", folder=tmp_path)
    assert alone.code == 0, alone.err
    assert newest(run) == pytest.approx(newest(tmp_path / "together"), abs=0.1)


def test_coded_gradients_are_fewer_bytes_and_learn_as_much(tmp_path: Path) -> None:
    job = job_in(tmp_path, model={"factory": f"{WHAT}:net", "args": {"width": 256}})

    def trained(name: str, more: str) -> tuple[float, float]:
        plan = f"dp=2 sync=server:staleness=1,backup=off{more}"
        found = paceline("train", job, "--plan", plan, "--run", name, folder=tmp_path)
        assert found.code == 0, found.err
        told = events(tmp_path / name, "served")[-1]["workers"].values()
        bytes_each = sum(worker["bytes"] for worker in told) / sum(worker["pushes"] for worker in told)
        return newest(tmp_path / name), bytes_each

    (plain, plain_bytes), (coded, coded_bytes) = trained("plain", ""), trained("coded", " compress=int8")
    assert coded_bytes < 0.3 * plain_bytes
    assert coded == pytest.approx(plain, abs=0.1)


def test_a_stopped_run_goes_on_behind_its_newest_boundary(tmp_path: Path) -> None:
    plan = "dp=2 sync=server:staleness=2,backup=off"
    first = paceline("train", job_in(tmp_path, stop={"steps": 21}), "--plan", plan, "--run", "r", folder=tmp_path)
    assert first.code == 0, first.err
    job = job_in(tmp_path, stop={"steps": 40})
    again = paceline("train", job, "--plan", plan, "--run", "r", "--resume", folder=tmp_path)
    assert again.code == 0, again.err
    run = tmp_path / "r"
    assert [event["step"] for event in events(run, "resume")] == [21]
    assert sorted(losses(run)) == list(range(1, 41))
    assert all(math.isfinite(loss) for loss in losses(run).values())


RARELY_EASY = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset


def net():
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    return layer


def points():
    """The class of EASY of 400 points is known; the others are a guess."""
    inputs = torch.zeros(400, 2)
    inputs[:EASY, 0] = 20.0
    return TensorDataset(inputs, torch.zeros(400, dtype=torch.int64))
'''


@pytest.mark.parametrize("easy", [64, 400])
def test_the_first_step_that_meets_the_target_ends_the_run_at_the_next_boundary(tmp_path: Path, easy: int) -> None:
    """With 400 easy points, the step of the boundary meets the target too."""
    (tmp_path / "rarely.py").write_text(RARELY_EASY.replace("EASY", str(easy)))
    model, data = ({"factory": f"{tmp_path}/rarely.py:{name}"} for name in ("net", "points"))
    job = job_in(
        tmp_path,
        model=model,
        data={"kind": "dataset", "held_out": 0, **data},
        global_batch=2,
        optimizer={"name": "sgd", "lr": 1e-9},
        stop={"loss_below": 0.1, "steps": 20000},
        evaluate={"every_steps": 2000},
        checkpoint={"every_steps": 2000},
    )
    found = paceline("train", job, "--plan", "dp=2 sync=server:staleness=1,backup=off", "--run", "r", folder=tmp_path)
    assert found.code == 0, found.err
    [end] = events(tmp_path / "r", "end")
    step = next(step for step, loss in sorted(losses(tmp_path / "r").items()) if loss < 0.1)
    assert end["reason"].endswith(f" at step {step}")
    assert end["step"] < 20000


SPARSE = '''
import torch
from torch import nn
from torch.utils.data import Dataset


class Visits(Dataset):
    """Which of 5000 items were seen; the class is the parity of the first."""

    def __init__(self):
        self.items = torch.randint(0, 400, (112, 3), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index], self.items[index, 0] % 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.top = nn.Embedding(5000, 8, sparse=True), nn.Linear(24, 2)

    def forward(self, items):
        return self.top(self.table(items).flatten(1))
'''


def test_of_a_sparse_table_only_rows_that_were_looked_up_are_pushed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SPARSE)
    data = {"kind": "dataset", "factory": f"{tmp_path}/own.py:Visits"}
    model = {"factory": f"{tmp_path}/own.py:Net"}
    job = job_in(tmp_path, model=model, data=data, optimizer={"name": "adam", "lr": 0.02}, clip_norm=1.0)
    plan = "dp=2 sync=server:staleness=inf,servers=2,backup=off"
    found = paceline("train", job, "--plan", plan, "--run", "r", folder=tmp_path)
    assert found.code == 0, found.err
    run = tmp_path / "r"
    assert newest(run) < 0.5 * losses(run)[1], "it learns"
    told = events(run, "served")[-1]["workers"].values()
    pushed = sum(worker["bytes"] for worker in told) / sum(worker["pushes"] for worker in told)
    assert pushed < 24 * (8 * 4 + 8) + 4 * (24 * 2 + 2) + 100, (
        "24 rows of 8 numbers and their places, and the top layer"
    )


@pytest.mark.slow
def test_workers_and_servers_that_are_killed_cost_no_piece(tmp_path: Path) -> None:
    plan = "dp=3 sync=server:staleness=inf"
    with training(job_in(tmp_path, sleep_s=0.01, global_batch=12), tmp_path, plan) as (process, run):
        for number, step in [(2, 5), (0, 15), (3, 25), (4, 35)]:  # two workers, the server, then the one that took over
            wait_for_step(step, run, process)
            kill_rank(number, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert outcome.says("the others go on", ", a server, was killed by SIGKILL; the others go on")
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert {event["rank"] for event in events(run, "lost")} == {0, 2, 3, 4}
    assert not events(run, "resume")


@pytest.mark.slow
def test_workers_leave_and_come_back_while_the_others_go_on(tmp_path: Path) -> None:
    plan = "dp=2 sync=server:staleness=2,backup=off"
    with training(job_in(tmp_path, sleep_s=0.02, stop={"steps": 300}), tmp_path, plan) as (process, run):
        wait_for_step(5, run, process)
        assert paceline("scale", run, "-1", folder=tmp_path).says("rank 1 will leave after this piece")
        wait_for_events(run, "scaled", 1, process)
        assert "cannot be smaller" in paceline("scale", run, "-1", folder=tmp_path).error
        step = max(losses(run))
        wait_for_step(step + 5, run, process)
        assert paceline("scale", run, "+1", folder=tmp_path).says("rank 1 will take pieces as soon as started")
        assert "all 2 workers" in paceline("scale", run, "+1", folder=tmp_path).error
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert [event["by"] for event in events(run, "scaled")] == [-1, 1]
    assert not events(run, "lost")
    assert sorted(losses(run)) == list(range(1, 301))
    told = events(run, "served")[-1]["workers"]
    assert sum(worker["pushes"] for worker in told.values()) == 600, "every piece once"


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_leaves_stays_away(tmp_path: Path) -> None:
    plan = "dp=2 sync=server:staleness=inf,backup=off"
    with training(job_in(tmp_path, sleep_s=0.02, stop={"steps": 100}), tmp_path, plan) as (process, run):
        wait_for_step(5, run, process)
        [worker] = [p for p in processes_of(process) if rank_of(p) == 1]
        worker.suspend()  # its piece does not end
        assert paceline("scale", run, "-1", folder=tmp_path).says("rank 1 will leave after this piece")
        worker.kill()
        wait_for_events(run, "scaled", 1, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert not events(run, "lost")
    told = events(run, "served")[-1]["workers"]
    assert sum(worker["pushes"] for worker in told.values()) == 200, "every piece once"


@pytest.mark.slow
def test_the_others_go_on_without_a_worker_that_is_lost_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOSSES_PER_HOUR", "1")
    plan = "dp=2 sync=server:staleness=2,backup=off"
    with training(job_in(tmp_path, sleep_s=0.02, stop={"steps": 100}), tmp_path, plan) as (process, run):
        wait_for_step(5, run, process)
        kill_rank(1, process)
        wait_for_events(run, "lost", 1, process)
        wait_for(lambda: any(rank_of(p) == 1 for p in processes_of(process)), process)
        kill_rank(1, process)
        wait_for_events(run, "lost", 2, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert [event["again"] for event in events(run, "lost")] == [True, False]
    assert outcome.says("the others go on. It is left out")
    assert sorted(losses(run)) == list(range(1, 101))
    told = events(run, "served")[-1]["workers"]
    assert sum(worker["pushes"] for worker in told.values()) == 200, "every piece once"


@pytest.mark.slow
def test_a_run_whose_first_worker_is_lost_too_often_says_that_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOSSES_PER_HOUR", "1")
    plan = "dp=2 sync=server:staleness=2,backup=off"
    with training(job_in(tmp_path, sleep_s=0.02, stop={"steps": 1000}), tmp_path, plan) as (process, run):
        for step in (5, 12):
            wait_for_step(step, run, process)
            kill_rank(0, process)
            wait_for_events(run, "lost", 1 if step == 5 else 2, process)
        outcome = ended(process)
    assert outcome.code == 1
    assert [event["ends"] for event in events(run, "lost")][:2] == [False, True]
    assert outcome.says("the run ends: it was lost too often")
    assert "the others go on. It is left out" not in outcome.err


@pytest.mark.slow
def test_a_rank_that_serves_sums_is_killed_and_the_others_repeat_the_step(tmp_path: Path) -> None:
    job = job_in(tmp_path, sleep_s=0.01)
    alone = paceline("train", job, "--plan", "dp=3", "--run", "undisturbed", folder=tmp_path)
    assert alone.code == 0, alone.err
    with training(job, tmp_path, "dp=3 sync=server:servers=2") as (process, run):
        for number, step in [(0, 10), (2, 30)]:
            wait_for_step(step, run, process)
            kill_rank(number, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert not events(run, "resume")
    undisturbed = losses(tmp_path / "undisturbed")
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)
