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
from servers.training.test_split import job_in as text_job_in
from servers.training.test_split import trained

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


def pushes(run: Path) -> int:
    return sum(int(worker["pushes"]) for worker in events(run, "served")[-1]["workers"].values())


def pushed_bytes(run: Path) -> float:
    """Bytes of a push, on average."""
    return sum(int(worker["bytes"]) for worker in events(run, "served")[-1]["workers"].values()) / pushes(run)


def newest(run: Path) -> float:
    found = losses(run)
    return statistics.mean(found[step] for step in sorted(found)[-20:])


@pytest.mark.parametrize("sync", ["server:staleness=inf,backup=off", "server:staleness=1,servers=2,backup=off"])
def test_an_asynchronous_run_records_evaluates_and_saves_as_any_run(sync: str, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert sorted(trained(job, f"dp=2 sync={sync}", "served")) == list(range(1, STEPS + 1))
    run = tmp_path / "served"
    assert [event["step"] for event in events(run, "evaluation")] == list(range(6, STEPS + 1, 6))
    assert events(run, "end")[-1]["reason"] == f"steps: {STEPS} done"
    assert pushes(run) == 2 * STEPS, "every piece once"
    view = view_of(Run(run))
    assert not [gap for gap in view["record"].gaps if "missing" in gap]
    assert view["cards"][0].note.startswith("on 2 workers")
    assert "the parameters; 2 workers push" in "".join(view["sync"]["sentences"])
    lines = Run(run).steps()
    apart_s = [b["time"] - a["time"] for a, b in itertools.pairwise(lines)]
    # times are written in milliseconds
    assert all(seconds > line["step_s"] - 0.002 for seconds, line in zip(apart_s, lines[1:], strict=True))
    assert sum(seconds > 0 for seconds in apart_s) > STEPS / 2, "each batch has an end of its own"
    trained(job, "dp=2", "together")
    assert newest(run) == pytest.approx(newest(tmp_path / "together"), abs=0.1)


def test_coded_gradients_are_fewer_bytes_and_learn_as_much(tmp_path: Path) -> None:
    job = job_in(tmp_path, model={"factory": f"{WHAT}:net", "args": {"width": 256}})

    def learned(name: str, more: str) -> tuple[float, float]:
        trained(job, f"dp=2 sync=server:staleness=1,backup=off{more}", name)
        return newest(tmp_path / name), pushed_bytes(tmp_path / name)

    (plain, plain_bytes), (coded, coded_bytes) = learned("plain", ""), learned("coded", " compress=int8")
    assert coded_bytes < 0.3 * plain_bytes
    assert coded == pytest.approx(plain, abs=0.1)


def test_a_stopped_run_goes_on_behind_its_newest_boundary(tmp_path: Path) -> None:
    plan = "dp=2 sync=server:staleness=2,backup=off"
    trained(job_in(tmp_path, stop={"steps": 21}), plan, "r")
    found = trained(job_in(tmp_path, stop={"steps": 40}), plan, "r", "--resume")
    assert [event["step"] for event in events(tmp_path / "r", "resume")] == [21]
    assert sorted(found) == list(range(1, 41))
    assert all(math.isfinite(loss) for loss in found.values())


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
    found = trained(job, "dp=2 sync=server:staleness=1,backup=off", "r")
    [end] = events(tmp_path / "r", "end")
    step = next(step for step, loss in sorted(found.items()) if loss < 0.1)
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
    trained(job, "dp=2 sync=server:staleness=inf,servers=2,backup=off", "r")
    run = tmp_path / "r"
    assert newest(run) < 0.5 * losses(run)[1], "it learns"
    assert pushed_bytes(run) < 24 * (8 * 4 + 8) + 4 * (24 * 2 + 2) + 100, (
        "24 rows of 8 numbers and their places, and the top layer"
    )


@pytest.mark.parametrize("more", ["momentum=0,lr=1,staleness=inf", "staleness=1,servers=2 compress=int8"])
def test_several_workers_learn_by_rounds_and_every_piece_counts_once(more: str, tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job.yaml",
        model={"zoo": "mlp", "args": {"hidden": 32}},
        data="digits",
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch=64,
        stop={"steps": STEPS},
        evaluate={"every_steps": 6},
        checkpoint={"every_steps": 20},
    )
    run = tmp_path / "r"
    assert sorted(trained(job, f"dp=2 sync=server:period=4,backup=off,{more}", "r")) == list(range(1, STEPS + 1))
    boundaries = sorted({*range(0, STEPS + 1, 6), *range(0, STEPS + 1, 20)})
    rounds = sum(-(-(after - before) // 4) for before, after in itertools.pairwise(boundaries))
    assert pushes(run) == 2 * rounds
    assert newest(run) < 0.5 * losses(run)[1], "it learns"
    [sentence] = events(run, "sync")[0]["said"]
    assert "workers push how far they came in 4 steps" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "divided", "killed"),
    [
        # two workers, the server, then the one that took over
        ("dp=3 sync=server:staleness=inf", False, [2, 0, 3, 4]),
        ("dp=3 sync=server:staleness=inf,period=4", False, [2, 0, 3]),
        # one rank of the first worker, one of the other's, the server, and the first worker's first
        ("dp=2 tp=2 sync=server:staleness=inf", True, [1, 2, 4, 0]),
    ],
)
def test_ranks_that_are_killed_cost_no_piece(plan: str, divided: bool, killed: list[int], tmp_path: Path) -> None:
    steps = 400 if divided else 150
    ours = {"sleep_s": 0.01, "global_batch": 12, "stop": {"steps": steps}}
    job = text_job_in(tmp_path, steps=steps) if divided else job_in(tmp_path, **ours)
    with training(job, tmp_path, plan) as (process, run):
        for before, number in enumerate(killed):
            wait_for_step(max([5, *(step + 8 for step in losses(run))]), run, process)
            kill_rank(number, process)
            wait_for_events(run, "lost", before + 1, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert outcome.says("the others go on", ", a server, was killed by SIGKILL; the others go on")
    assert [event["rank"] for event in events(run, "lost")] == killed
    assert sorted(losses(run)) == list(range(1, steps + 1))
    assert not events(run, "resume")
    assert not events(run, "restart")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "who", "ranks"), [("dp=2", "rank 1", [1]), ("dp=2 fsdp=2", "ranks 2, 3", [2, 3])])
def test_workers_leave_and_come_back_while_the_others_go_on(
    plan: str, who: str, ranks: list[int], tmp_path: Path
) -> None:
    steps, ours = 300, {"sleep_s": 0.02, "stop": {"steps": 300}}
    job = job_in(tmp_path, **ours) if len(ranks) == 1 else text_job_in(tmp_path, steps=steps)
    with training(job, tmp_path, f"{plan} sync=server:staleness=2,backup=off") as (process, run):
        wait_for_step(5, run, process)
        assert paceline("scale", run, "-1", folder=tmp_path).says(f"{who} will leave after this piece")
        wait_for_events(run, "scaled", 1, process)
        assert "cannot become smaller" in paceline("scale", run, "-1", folder=tmp_path).error
        wait_for_step(max(losses(run)) + 5, run, process)
        assert paceline("scale", run, "+1", folder=tmp_path).says(f"{who} will take pieces as soon as started")
        assert "all 2 workers" in paceline("scale", run, "+1", folder=tmp_path).error
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert [(event["by"], event["ranks"]) for event in events(run, "scaled")] == [(-1, ranks), (1, ranks)]
    assert not events(run, "lost")
    assert sorted(losses(run)) == list(range(1, steps + 1))
    assert pushes(run) == 2 * steps, "every piece once"


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
    assert pushes(run) == 200, "every piece once"


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
    assert pushes(run) == 200, "every piece once"


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
    undisturbed = trained(job, "dp=3", "undisturbed")
    with training(job, tmp_path, "dp=3 sync=server:servers=2") as (process, run):
        for number, step in [(0, 10), (2, 30)]:
            wait_for_step(step, run, process)
            kill_rank(number, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert not events(run, "resume")
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)
