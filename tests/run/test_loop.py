"""The loop resumes exactly, ends for the named reason, and evaluates and saves on time."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from paceline.errors import DataError, NonFiniteError
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.run.record.run import Run
from paceline.state.manifest import checkpoints
from paceline.state.writer import Checkpointer, Snapshot
from ranks import RankError, Ranks
from refusals import raises
from small_jobs import FEATURES, facts, new_run, points, small_job, train_as_rank, train_here

EXACT = {
    "model": {"factory": "small_jobs:with_dropout"},
    "data": points(held_out=0.25),
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "schedule": {"name": "cosine", "warmup_steps": 5, "decay_steps": 30},
    "clip_norm": 0.5,
    "metrics": ["accuracy"],
}


def train(path: Path, replicas: int, ranks: Ranks, **changes: Any) -> Run:
    """Train, or continue, on so many replicas."""
    job = small_job(**changes)
    if replicas == 1:
        return train_here(path, job)
    new_run(path, job, f"dp={replicas} balance=off")
    ranks(replicas, train_as_rank, path)
    return Run(path)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, ranks: Ranks, replicas: int) -> None:
    undisturbed = train(tmp_path / "undisturbed", replicas, ranks, **EXACT, stop={"steps": 30})
    train(tmp_path / "resumed", replicas, ranks, **EXACT, stop={"steps": 12})  # 7 steps an epoch, so within the second
    resumed = train(tmp_path / "resumed", replicas, ranks, **EXACT, stop={"steps": 30})

    assert [e["step"] for e in resumed.events() if e["event"] == "resume"] == [12]
    assert len(undisturbed.losses) == 30
    for rank in range(replicas):
        assert facts(resumed, rank) == facts(undisturbed, rank)
    assert resumed.metrics == undisturbed.metrics


def test_a_job_with_random_data_gives_the_same_losses_every_time_and_after_a_resume(tmp_path: Path) -> None:
    noisy = points(noise=0.5)
    first = train_here(tmp_path / "first", small_job(data=noisy))
    train_here(tmp_path / "again", small_job(data=noisy, stop={"steps": 12}))
    assert facts(train_here(tmp_path / "again", small_job(data=noisy))) == facts(first)


def test_loader_processes_of_a_plan_are_those_of_a_job_and_change_no_loss(tmp_path: Path) -> None:
    noisy = points(noise=0.5)  # drawn anew for each sample and epoch
    in_job = facts(train_here(tmp_path / "job", small_job(data=noisy | {"num_workers": 1})))
    assert facts(train_here(tmp_path / "plan", small_job(data=noisy), "num_workers=1")) == in_job
    assert facts(train_here(tmp_path / "none", small_job(data=noisy))) == in_job
    alone = facts(train_here(tmp_path / "alone", small_job()))
    assert facts(train_here(tmp_path / "ahead", small_job(), "num_workers=1")) == alone


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "pp=2"])
def test_data_that_draws_while_it_is_made_is_the_same_under_every_plan(tmp_path: Path, ranks: Ranks, plan: str) -> None:
    """It followed the model's initial weights, which a plan that divides the model draws at another time."""
    job = small_job(data={"kind": "dataset", "factory": "small_jobs:drawn_points", "held_out": 0}, stop={"steps": 5})
    alone = train_here(tmp_path / "alone", job)
    new_run(tmp_path / "divided", job, plan)
    ranks(2, train_as_rank, tmp_path / "divided")
    assert Run(tmp_path / "divided").losses == pytest.approx(alone.losses, rel=1e-5)


def test_a_run_goes_on_with_another_number_of_replicas_on_the_same_data(tmp_path: Path, ranks: Ranks) -> None:
    undisturbed = train(tmp_path / "undisturbed", 1, ranks, stop={"steps": 30})
    train(tmp_path / "resumed", 2, ranks, stop={"steps": 12})
    train(tmp_path / "resumed", 3, ranks, stop={"steps": 21})
    resumed = train(tmp_path / "resumed", 1, ranks, stop={"steps": 30})

    assert [e["replicas"] for e in resumed.events() if e["event"] in ("start", "resume")] == [2, 3, 1]
    assert resumed.losses == pytest.approx(undisturbed.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("stop", "named", "steps"),
    [
        ({"epochs": 2}, "epochs", 14),
        ({"steps": 4}, "steps", 4),
        ({"steps": 11, "epochs": 1}, "epochs", 7),
        ({"loss_below": 1e9}, "loss_below", 1),
        ({"plateau": {"less_than": 1e9, "over": 3}}, "plateau", 6),
        ({"metric_above": {"accuracy": 0.0}}, "metric_above", 7),
        ({"metric_above": {"accuracy": 1.5}, "epochs": 2}, "epochs", 14),
    ],
)
def test_the_stop_rule_that_comes_true_first_ends_the_run_and_is_named(
    tmp_path: Path, stop: dict[str, Any], named: str, steps: int
) -> None:
    run = train_here(tmp_path / "run", small_job(stop=stop, metrics=["accuracy"], data=points(held_out=0.25)))
    *_, end = run.events()
    assert end["event"] == "end"
    assert end["reason"].startswith(f"{named}: ")
    assert run.reason == end["reason"]
    assert not end["interrupted"]
    assert (end["step"], len(run.losses)) == (steps, steps)


def test_all_ranks_run_out_of_time_at_the_same_step(tmp_path: Path, ranks: Ranks) -> None:
    run = train(tmp_path / "run", 2, ranks, data=points(sleep_s=0.005), stop={"seconds": 0.3})
    assert run.reason == "seconds: 0.3 s are over"
    assert run.steps(0)[-1]["step"] == run.steps(1)[-1]["step"]
    assert run.training_time_s >= 0.3


@pytest.mark.parametrize("changed", [{"samples": 50}, {"seed": 12}], ids=["length", "samples"])
def test_a_run_is_not_resumed_with_a_data_set_that_has_changed(tmp_path: Path, changed: dict[str, int]) -> None:
    file, written = tmp_path / "own_data.py", itertools.count(1)

    def job(steps: int, samples: int = 70, seed: int = 11) -> Job:
        file.write_text(
            "import torch\nfrom torch.utils.data import TensorDataset\n\n\ndef data():\n"
            f"    draw = torch.Generator().manual_seed({seed})\n"
            f"    inputs = torch.randn({samples}, {FEATURES}, generator=draw)\n"
            f"    return TensorDataset(inputs, torch.arange({samples}) % 3)\n"
        )
        os.utime(
            file, (written_at := next(written), written_at)
        )  # else compiled code of the same second is taken for it
        sys.modules.pop("own_data", None)
        data = {"kind": "dataset", "factory": f"{file}:data", "held_out": 0.2}
        return small_job(data=data, stop={"steps": steps})

    train_here(tmp_path / "run", job(7))  # a whole epoch
    with raises(DataError, "data.changed"):
        train_here(tmp_path / "run", job(14, **changed))
    train_here(tmp_path / "run", job(14))


def test_a_signal_to_one_rank_ends_all_at_the_same_step_and_saves(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = train(tmp_path / "undisturbed", 2, ranks)
    # rank 1 reads one sample to look at it, then four a step and a step ahead: this is in the sixth
    monkeypatch.setenv("INTERRUPT", "1:26")
    run = train(tmp_path / "run", 2, ranks)
    *_, end = run.events()
    assert (end["reason"], end["interrupted"], end["step"]) == ("SIGTERM", True, 6)
    assert [len(run.steps(rank)) for rank in range(2)] == [6, 6]
    assert [step for step, _ in checkpoints(run.checkpoints)] == [6]

    monkeypatch.delenv("INTERRUPT")
    assert facts(train(tmp_path / "run", 2, ranks)) == facts(undisturbed)


@pytest.mark.parametrize(
    "stop",
    [{"steps": 5}, {"epochs": 1}, {"seconds": 1e-6}, {"loss_below": 1e9}, {"metric_above": {"accuracy": 0.0}}],
    ids=str,
)
def test_a_finished_run_is_not_trained_further_by_a_resume(tmp_path: Path, stop: dict[str, Any]) -> None:
    job = small_job(stop=stop, metrics=["accuracy"], data=points(held_out=0.25))
    first = train_here(tmp_path / "run", job)
    before, end = facts(first), first.events()[-1]
    again = train_here(tmp_path / "run", job)
    assert facts(again) == before
    assert (again.reason, again.events()[-1]["step"]) == (end["reason"], end["step"])


def test_a_finished_run_goes_on_when_its_stop_rule_is_extended(tmp_path: Path) -> None:
    train_here(tmp_path / "run", small_job(stop={"loss_below": 1e9}))
    run = train_here(tmp_path / "run", small_job(stop={"loss_below": 1e-9, "steps": 4}))
    assert (run.reason, len(run.losses)) == ("steps: 4 done", 4)


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [({"every_steps": 3}, [3, 6, 9, 12, 14]), ({"every_epochs": 1}, [7, 14]), ({"every_epochs": 5}, [14])],
)
def test_the_held_out_set_is_measured_when_asked_and_at_the_end(
    tmp_path: Path, cadence: dict[str, int], steps: list[int]
) -> None:
    run = train_here(tmp_path / "run", small_job(stop={"epochs": 2}, evaluate=cadence, data=points(held_out=0.25)))
    assert [e["step"] for e in run.events() if e["event"] == "evaluation"] == steps
    assert run.metrics.keys() == {"loss"}


@pytest.mark.parametrize(
    ("cadence", "kept"),
    [({"every_steps": 4, "keep": 2}, [8, 10]), ({"every_seconds": 1e-6, "keep": 3}, [8, 9, 10]), ({}, [10])],
)
def test_checkpoints_are_made_when_asked_and_at_the_end(
    tmp_path: Path, cadence: dict[str, Any], kept: list[int]
) -> None:
    run = train_here(tmp_path / "run", small_job(stop={"steps": 10}, checkpoint=cadence))
    assert [step for step, _ in checkpoints(run.checkpoints)] == kept


def test_an_evaluation_and_a_checkpoint_change_no_later_step(tmp_path: Path) -> None:
    rarely = train_here(tmp_path / "rarely", small_job(**EXACT, stop={"steps": 16}, evaluate={"every_epochs": 9}))
    often = train_here(
        tmp_path / "often",
        small_job(**EXACT, stop={"steps": 16}, evaluate={"every_steps": 2}, checkpoint={"every_steps": 3}),
    )
    assert facts(often) == facts(rarely)


def test_the_learning_rate_warms_up_and_follows_the_schedule(tmp_path: Path) -> None:
    job = small_job(
        schedule={"name": "linear", "warmup_steps": 4}, optimizer={"name": "sgd", "lr": 0.4}, stop={"steps": 12}
    )
    rates = [step["lr"] for step in train_here(tmp_path / "run", job).steps()]
    assert rates == pytest.approx([job.optimizer.lr * job.schedule.factor_at(step, 12) for step in range(12)], rel=1e-5)
    assert rates[:4] == sorted(rates[:4])
    assert rates[4:] == sorted(rates[4:], reverse=True)


# NaN and Inf

NAN = [5]
GLOBAL_BATCH = 8


def where_dealt(sample: int, epoch: int = 0, replicas: int = 2) -> tuple[int, int]:
    """The rank and the step (from 1, in the epoch) at which a sample is trained on."""
    for rank in range(replicas):
        dealt = Partition(
            PartitionSpec(), samples=70, global_batch=GLOBAL_BATCH, seed=0, replica=rank, replicas=replicas
        )
        for step, indices in enumerate(dealt.batches(epoch), 1):
            if sample in indices:
                return rank, step
    raise AssertionError(f"sample {sample} was not dealt")


def test_bad_data_stops_the_run_and_is_named_by_rank_sample_and_step(tmp_path: Path, ranks: Ranks) -> None:
    rank, step = where_dealt(NAN[0])
    problem = re.compile(rf"\bstep {step} is nan .*\brank {rank}\b.*samples \[5\]")
    with raises(RankError, "nonfinite.stopped", problem=problem):
        train(tmp_path / "run", 2, ranks, data=points(nan_at=NAN), checkpoint={"every_steps": 1})
    assert [s["step"] for s in Run(tmp_path / "run").steps()] == list(range(1, step))


def test_skip_leaves_the_step_out_and_goes_on(tmp_path: Path, ranks: Ranks) -> None:
    _, step = where_dealt(NAN[0])
    run = train(tmp_path / "run", 2, ranks, data=points(nan_at=NAN), nonfinite="skip", stop={"epochs": 1})
    assert [s["step"] for s in run.steps() if s["loss"] is None] == [step]
    assert len(run.losses) == 9
    assert [(e["step"], e["policy"]) for e in run.events() if e["event"] == "nonfinite"] == [(step, "skip")]


@pytest.mark.parametrize("replicas", [1, 2])
def test_rewind_goes_back_replays_and_leaves_the_batch_out(tmp_path: Path, ranks: Ranks, replicas: int) -> None:
    _, step = where_dealt(NAN[0])
    changes: dict[str, Any] = {
        "model": {"factory": "small_jobs:with_dropout"},
        "stop": {"steps": 9},
        "checkpoint": {"every_steps": 4},
    }
    run = train(tmp_path / "run", replicas, ranks, **changes, data=points(nan_at=NAN), nonfinite="rewind")
    saved = (step - 1) // 4 * 4
    assert [(e["from_step"], e["to_step"]) for e in run.events() if e["event"] == "rewind"] == [(step, saved)]
    lines = [
        line.split('"loss":')[1].split(",")[0]
        for line in (run.path / "steps" / "rank-0.jsonl").read_text().splitlines()
    ]
    first, replayed = lines[saved : step - 1], lines[step : step + step - 1 - saved]
    assert replayed == first, "a replayed step computes the same again"
    assert run.events()[-1]["step"] == 9
    assert run.reason == "steps: 9 done"
    assert [s["step"] for s in run.steps() if s["loss"] is None] == [step]


def test_rewind_survives_a_gradient_that_overflows_once(tmp_path: Path) -> None:
    model = {"factory": "small_jobs:OneInfiniteGradient", "args": {"at": 7}}
    run = train_here(tmp_path / "run", small_job(model=model, nonfinite="rewind", checkpoint={"every_steps": 3}))
    problem = next(e["problem"] for e in run.events() if e["event"] == "nonfinite")
    assert "the gradient of step 7 is" in problem
    assert "the data of the batch is finite" in problem
    assert [(e["from_step"], e["to_step"]) for e in run.events() if e["event"] == "rewind"] == [(7, 6)]
    assert run.reason == "steps: 20 done"


def test_a_run_whose_last_batch_is_left_out_ends_there(tmp_path: Path) -> None:
    _, step = where_dealt(NAN[0], replicas=1)
    run = train_here(tmp_path / "run", small_job(data=points(nan_at=NAN), nonfinite="rewind", stop={"steps": step}))
    assert run.reason == f"steps: {step} done"
    assert run.events()[-1]["step"] == step


def test_a_rewind_does_not_count_steps_twice_in_the_plateau(tmp_path: Path) -> None:
    _, step = where_dealt(NAN[0], replicas=1)
    assert step > 3, "otherwise nothing is replayed"
    over = 6  # 12 steps are needed, of which those after the rewind are replayed
    stop = {"plateau": {"less_than": 1e9, "over": over}}
    run = train_here(tmp_path / "run", small_job(data=points(nan_at=NAN, nan_epochs=1), nonfinite="rewind", stop=stop))
    assert run.events()[-1]["step"] == 2 * over + 1  # one was left out


def test_a_rejected_batch_stays_rejected_after_a_resume(tmp_path: Path) -> None:
    _, step = where_dealt(NAN[0], replicas=1)
    job = {"data": points(nan_at=NAN), "nonfinite": "rewind"}
    undisturbed = train_here(tmp_path / "undisturbed", small_job(**job, stop={"steps": 9}))
    train_here(tmp_path / "run", small_job(**job, stop={"steps": step}))
    resumed = train_here(tmp_path / "run", small_job(**job, stop={"steps": 9}))
    assert facts(resumed) == facts(undisturbed)


@pytest.mark.parametrize(
    ("policy", "code"), [("skip", "nonfinite.not_recovering"), ("rewind", "nonfinite.rewinds_exhausted")]
)
def test_a_run_that_does_not_recover_is_given_up(tmp_path: Path, policy: str, code: str) -> None:
    with raises(NonFiniteError, code):
        train_here(
            tmp_path / "run", small_job(data=points(nan_at=list(range(70))), nonfinite=policy, stop={"steps": 99})
        )


# Times


def test_the_parts_of_a_step_sum_to_it(tmp_path: Path, ranks: Ranks) -> None:
    run = train(tmp_path / "run", 2, ranks, checkpoint={"every_steps": 2})
    for step in (*run.steps(0), *run.steps(1)):
        parts = [step[f"{part}_s"] for part in ("data", "compute", "comm", "imbalance", "optimizer", "checkpoint")]
        assert min(parts) >= 0.0
        assert sum(parts) == pytest.approx(step["step_s"], rel=0.02, abs=1e-5)


def test_a_slow_rank_shows_as_compute_there_and_as_imbalance_elsewhere(tmp_path: Path, ranks: Ranks) -> None:
    run = train(tmp_path / "run", 2, ranks, model={"factory": "small_jobs:SlowOnRankZero"}, stop={"steps": 7})
    slow, fast = (
        {k: median(s[k] for s in run.steps(rank)[1:]) for k in ("compute_s", "imbalance_s")} for rank in range(2)
    )
    assert slow["compute_s"] > 0.15
    assert slow["imbalance_s"] < 0.05
    assert fast["imbalance_s"] > 0.15
    assert fast["compute_s"] < 0.15


def test_what_a_checkpoint_holds_up_is_booked_as_its_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpointer.save

    def slow_save(self: Checkpointer, step: int, snapshot: Snapshot, **options: bool) -> None:
        time.sleep(1)
        save(self, step, snapshot, **options)

    monkeypatch.setattr(Checkpointer, "save", slow_save)
    run = train_here(tmp_path / "run", small_job(stop={"steps": 5}, checkpoint={"every_steps": 2}))
    assert [step["checkpoint_s"] >= 1 for step in run.steps()] == [False, False, True, False, True]
    assert max(step["data_s"] for step in run.steps()) < 1
