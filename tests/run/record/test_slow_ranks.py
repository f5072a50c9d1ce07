"""A rank that the others wait for is named, with how slow it is and since when."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from commands import events
from paceline.cluster.discover import discover
from paceline.comm.backend import joined
from paceline.errors import RunError
from paceline.planning.plan import Plan
from paceline.run.record import slow_ranks
from paceline.run.record.progress import event_sentence
from paceline.run.record.recorder import Remarks
from paceline.run.record.run import Run
from paceline.run.record.slow_ranks import SlowRanks, step_time_sigma
from ranks import Ranks
from refusals import raises
from simulated.environment import Simulated
from small_jobs import new_run, plain, small_job, train_as_rank

FAST = 0.02


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_ranks, "PATIENCE_S", 0.0)


def told(plan: str, steps: Sequence[Sequence[float]]) -> list[tuple[str, dict[str, Any]]]:
    """The events of recorded busy times, a row for each step."""
    watch = SlowRanks(Plan.parse(plan), (0,) * Plan.parse(plan).ranks)
    return [event for step, busy in enumerate(steps, 1) for event in watch.step(step, busy)]


def test_a_slow_rank_is_named_once_with_its_first_slow_step_and_once_when_it_is_over() -> None:
    even, slow = [FAST] * 4, [FAST, FAST, 2 * FAST, FAST]
    [(what, about), (over, after)] = told("dp=4", [even] * 40 + [slow] * 60 + [even] * 40)
    assert (what, over) == ("slow_rank", "slow_rank_over")
    assert {about[key] for key in ("rank", "ratio", "since_step")} == {2, 41}
    assert about["step"] <= 41 + slow_ranks.WINDOW // 2 + 1, "soon"
    assert (after["rank"], after["since_step"]) == (2, 41)
    assert 101 <= after["step"] <= 101 + slow_ranks.WINDOW // 2 + 1
    said = event_sentence({"event": what, **about})
    assert (
        said
        == "rank 2 has taken 2.0 times as long as the others since step 41: 40 ms of work per step, 20 ms on the others"
    )
    assert (
        event_sentence({"event": over, **after})
        == f"rank 2 is as fast as the others again at step {after['step']}; it had been slow since step 41"
    )


def test_ranks_that_are_slow_in_turn_or_a_little_or_only_at_first_are_not_named() -> None:
    in_turn = [[3 * FAST if rank == step % 4 else FAST for rank in range(4)] for step in range(100)]
    assert not told("dp=4", in_turn)
    assert not told("dp=4", [[FAST, FAST, 1.4 * FAST, FAST]] * 100)
    assert not told("dp=4", [[FAST, 9.0, FAST, FAST]] * slow_ranks.WARM_UP + [[FAST] * 4] * 100)
    assert not told("dp=2", [[0.0001, 0.0009]] * 100), "less than a timer's noise"


def test_a_stage_is_compared_with_the_same_stage_of_other_replicas_and_never_with_another_stage() -> None:
    by_stage = [FAST, 3 * FAST]  # dp=2 pp=2: ranks 0 and 2 are the first stage
    assert not told("dp=2 pp=2 microbatches=2", [by_stage * 2] * 100)
    assert not told("pp=2 microbatches=2", [by_stage] * 100)
    [(_, about)] = told("dp=2 pp=2 microbatches=2", [[FAST, 3 * FAST, 2 * FAST, 3 * FAST]] * 100)
    assert about["rank"] == 2


def test_a_rank_is_named_only_when_it_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_ranks, "PATIENCE_S", 2.0)
    even, slow = [FAST] * 2, [FAST, 2 * FAST]
    assert not told("dp=2", ([even] * 40 + [slow] * 40) * 5), "1.6 s at a time"
    [(_, about)] = told("dp=2", [even] * 40 + [slow] * 90)
    assert (about["rank"], about["since_step"]) == (1, 41)


def test_a_step_in_which_nothing_was_agreed_counts_for_nothing() -> None:
    assert not told("dp=2", [[]] * 100)


class SlowFromThere(nn.Module):
    """Takes 100 ms longer in the forward pass of rank 1 after the 12th step: more than a busy machine adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = plain(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if os.environ.get("RANK") == "1" and self.steps > 12:
            time.sleep(0.1)
        y: Tensor = self.layer(x)
        return y


def train_without_patience(run: Path) -> None:
    slow_ranks.PATIENCE_S = 0.0
    train_as_rank(run)


def test_a_rank_that_is_really_slow_is_told_in_the_record(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(model={"factory": f"{__file__}:SlowFromThere"}, stop={"steps": 42})
    run = new_run(tmp_path / "run", job, "dp=2").path
    ranks(2, train_without_patience, run)
    [slow] = [event for event in events(run, "slow_rank") if event["rank"] == 1]
    assert slow["ratio"] > 1.5
    assert 6 <= slow["since_step"] <= 25  # on a busy machine other steps are slow, too


def run_of(folder: Path, *ranks: list[float]) -> Run:
    """A run whose ranks computed for these seconds in each step."""
    run = Run.create(folder / "run", small_job(), discover(), Plan(dp=len(ranks)))
    for rank, times in enumerate(ranks):
        lines = [json.dumps({"step": step, "compute_s": time}) for step, time in enumerate(times, 1)]
        (run.path / "steps" / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_the_spread_of_the_steps_is_found_whatever_the_first_ones_took(tmp_path: Path) -> None:
    dice = random.Random(1)
    ranks = [[9.0] * 5 + [dice.gauss(mean, 0.05 * mean) for _ in range(2000)] for mean in (0.1, 0.3)]
    assert step_time_sigma(run_of(tmp_path, *ranks)) == pytest.approx(0.05, rel=0.05)


def test_a_rank_that_is_always_slow_is_no_spread(tmp_path: Path) -> None:
    assert step_time_sigma(run_of(tmp_path, [0.1] * 30, [0.2] * 30)) == pytest.approx(0, abs=1e-9)


def test_a_run_of_few_steps_says_that_it_is_too_short(tmp_path: Path) -> None:
    with raises(RunError, "run.too_few_steps"):
        step_time_sigma(run_of(tmp_path, [0.1] * 8))


def test_a_slow_accelerator_is_checked_for_wrong_results(simulated: Simulated) -> None:
    healthy, faulty = (simulated.ranks(2, events_of_a_slow_rank, fault=fault) for fault in ("", "wrong:1:1"))
    for on_ranks, is_wrong in ((healthy, False), (faulty, True)):
        [event] = on_ranks[0]
        assert on_ranks == [[event]] * 2, "every rank has the same event"
        assert (event["rank"], event["device"]["wrong_numbers"] > 0, event["lowers_clock"]) == (1, is_wrong, [])
        assert ("train without" in str(event_sentence({"event": "slow_rank", **event}))) == is_wrong


def events_of_a_slow_rank() -> list[dict[str, Any]]:
    slow_ranks.PATIENCE_S = 0.0
    with joined(deadline_s=60) as group:
        found: list[dict[str, Any]] = []
        engine: Any = SimpleNamespace(plan=Plan.parse("dp=2"), group=group)
        write: Any = lambda _, details: found.append(details)  # noqa: E731
        remarks = Remarks(engine, write)
        for step in range(1, slow_ranks.WARM_UP + slow_ranks.WINDOW + 1):
            info: Any = SimpleNamespace(result=SimpleNamespace(step=step), busy_s=[FAST, 2 * FAST])
            remarks.after_step(info)
        group.barrier()
    return found
