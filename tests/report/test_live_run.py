"""A run that is followed while its files grow, and what its screen says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as PlainConsole

from handmade_live import NOW, begun_run, happens, step, trains
from handmade_search import cluster, job
from paceline.cli.watch_screen import line, screen
from paceline.console import Console
from paceline.planning.plan import Plan
from paceline.report.live_run import CURVE, RECENT, Curve, LiveRun
from paceline.run.record.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has begun, without a step."""
    return begun_run(tmp_path / "mine")


def shown(*runs: LiveRun, height: int = 40, now: float = NOW + 1) -> str:
    console = Console(width=120, height=height, color_system=None, record=True, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(screen(runs, height, now))
    return captured.get()


def test_only_what_was_added_is_read(run: Run) -> None:
    live = LiveRun(run)
    assert live.look()
    assert not live.look()
    assert live.state(NOW) == "starting"
    trains(run, *range(1, 101))
    assert live.look()
    assert [one["step"] for one in live.recent.steps] == list(range(101 - RECENT, 101))
    assert live.curve.values == [2.0 / number for number in range(1, 101)]
    assert "step 100/500" in live.recent.sentence()
    assert not live.look()


def test_a_run_is_running_late_ended_and_running_again_when_it_is_resumed(run: Run) -> None:
    trains(run, 1, 2, 3)
    live = LiveRun(run)
    live.look()
    newest = NOW + 0.03
    assert live.state(newest + 5) == "running"
    assert live.state(newest + 60) == "no step for 60 s: the run is waiting, was stopped, or crashed"
    happens(run, "end", reason="steps: 500 done", elapsed_s=3.0)
    live.look()
    assert live.ended
    assert live.state(newest + 60) == "ended: steps: 500 done"
    assert "left" not in live.recent.sentence()
    happens(run, "resume", step=3, total_steps=900)
    live.look()
    assert not live.ended
    assert "step 3/900" in live.recent.sentence()


def test_steps_without_an_epoch_or_shares_are_shown(run: Run) -> None:
    whole = step(1)
    (run.path / "steps").mkdir(exist_ok=True)
    few = {name: value for name, value in whole.items() if name not in ("epoch", "local_samples")}
    (run.path / "steps" / "rank-0.jsonl").write_text(json.dumps(few) + "\n")
    live = LiveRun(run)
    live.look()
    assert "epoch 1 · step 1" in shown(live)


def test_memory_is_shown_for_longer_than_the_steps_that_are_kept(run: Run) -> None:
    trains(run, 1, use={"memory_bytes": 3 * 2**20})
    trains(run, *range(2, RECENT + 10))
    live = LiveRun(run)
    live.look()
    assert live.ranks()[0].memory_bytes == 3 * 2**20


def test_a_resumed_run_is_shown_with_its_new_plan(run: Run) -> None:
    trains(run, 1, 2)
    live = LiveRun(run)
    live.look()
    assert "dp=2" in shown(live)
    (run.path / "plan.txt").write_text("dp=4\n")
    happens(run, "resume", step=2, total_steps=500)
    live.look()
    assert "dp=4" in shown(live)


def test_a_step_that_is_trained_again_stands_once_in_the_curve(run: Run) -> None:
    live = LiveRun(run)
    trains(run, 1, 2, 3, 2, 3, 4)
    live.look()
    assert live.curve.values == [2.0 / number for number in (1, 2, 3, 4)]


def test_a_rank_that_has_no_new_steps_is_behind(run: Run) -> None:
    trains(run, *range(1, 21))
    trains(run, *range(1, 6), rank=1, local_samples=16, imbalance_s=0.0, compute_s=0.01)
    live = LiveRun(run)
    live.look()
    first, second = live.ranks()
    assert (first.rank, first.step, first.behind, first.samples) == (0, 20, 0, 32)
    assert (second.rank, second.step, second.behind, second.samples) == (1, 5, 15, 16)
    assert first.parts["imbalance"] == pytest.approx(0.2)
    assert sum(first.parts.values()) == pytest.approx(1.0)
    assert "5 (−15)" in shown(live)


def test_while_the_first_rank_is_away_another_one_leads(run: Run) -> None:
    live = LiveRun(run)
    for rank in (0, 1):
        trains(run, *range(1, 21), rank=rank)
    live.look()
    for until in (30, 41):
        trains(run, *range(live.recent.step + 1, until), rank=1)
        live.look()
    assert live.recent.step == 40
    assert live.curve.values == [2.0 / number for number in range(1, 41)], "every step once"
    trains(run, *range(41, 61))
    trains(run, *range(41, 46), rank=1)
    for _ in range(2):
        live.look()
    assert live.recent.step == 60
    assert live.curve.values == [2.0 / number for number in range(1, 61)]


def test_of_what_other_ranks_wrote_the_newest_is_read_and_readings_wherever_they_stand(run: Run) -> None:
    others = range(1, 17)
    trains(run, 1)
    for rank in others:
        trains(run, 1, rank=rank)
    live = LiveRun(run)
    live.look()
    for rank in others:
        trains(run, 2, rank=rank, use={"memory_bytes": 2**20, "wire_bytes": 5})
        trains(run, *range(3, 12), rank=rank, compute_s=0.5)  # passed over
        trains(run, 12, rank=rank, use={"memory_bytes": 2**21, "wire_bytes": 4000, "network_sent_bytes": 8000})
        trains(run, *range(13, 151), rank=rank)
    trains(run, *range(2, 151))
    live.look()
    other = live.ranks()[1]
    assert (other.step, other.memory_bytes) == (150, 2**21)
    assert other.parts["compute"] == pytest.approx(0.8)
    assert other.sent is not None
    assert other.sent.per_step == 400
    assert (other.sent.per_s, other.sent.host_per_s) == pytest.approx((40_000, 80_000), rel=1e-3)


def test_what_is_sent_is_not_told_over_readings_that_were_passed_over(run: Run) -> None:
    trains(run, 1)
    trains(run, 1, rank=1, use={"wire_bytes": 100})
    live = LiveRun(run)
    live.look()
    trains(run, *range(2, 3000), rank=1)  # more than a look reads
    trains(run, 3000, rank=1, use={"wire_bytes": 100})
    live.look()
    assert live.ranks()[1].sent is None
    trains(run, *range(3001, 3011), rank=1, use={"wire_bytes": 100})
    live.look()
    assert live.ranks()[1].sent is not None


def test_of_many_ranks_the_slowest_are_shown_and_the_mean_of_all(run: Run) -> None:
    for rank in range(64):
        slow = rank == 37  # the others wait for it
        trains(run, 1, 2, rank=rank, imbalance_s=0.0 if slow else 0.002, compute_s=0.01 if slow else 0.008)
    live = LiveRun(run)
    live.look()
    text = shown(live, height=24)
    assert len(text.splitlines()) <= 24
    assert "all 64" in text
    assert any(row.split()[0] == "37" for row in text.splitlines() if row.split())


def test_what_others_wrote_is_shown_and_never_obeyed(run: Run) -> None:
    trains(run, 1, 2)
    with (run.path / "steps" / "rank-0.jsonl").open("a") as file:
        file.write('{"step": "three"}\nnot json\n{"step": 3, "loss": NaN}\n[]\n')
    happens(run, "restart", reason="\x1b[2J\x1b]0;owned\x07gone.", attempt=1)
    happens(run, "restart")  # without what belongs to it
    happens(run, "resume", total_steps="many")
    trains(run, 3, epoch="first")
    trains(run, 3, local_samples=[1])
    happens(run, "evaluation", step=1, metrics={"accuracy": "high"})
    live = LiveRun(run)
    live.look()
    assert live.recent.step == 2
    text = shown(live)
    assert "\x1b" not in text
    assert "gone. Starting again, attempt 2." in text


def test_pipes_and_links_are_not_opened(run: Run, tmp_path: Path) -> None:
    (run.path / "steps").mkdir(exist_ok=True)
    os.mkfifo(run.path / "steps" / "rank-0.jsonl")
    (tmp_path / "elsewhere.jsonl").write_text(json.dumps(step(1)) + "\n")
    (run.path / "steps" / "rank-1.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    live = LiveRun(run)
    live.look()
    assert not live.ranks()


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(run: Run) -> None:
    live = LiveRun(run)
    trains(run, 1)
    whole = json.dumps(step(2)) + "\n"
    file = run.path / "steps" / "rank-0.jsonl"
    with file.open("a") as half:
        half.write(whole[:20])
    live.look()
    assert live.recent.step == 1
    with file.open("a") as rest:
        rest.write(whole[20:])
    live.look()
    assert live.recent.step == 2


def test_several_runs_stand_beside_each_other(run: Run, tmp_path: Path) -> None:
    other = Run.create(tmp_path / "other", job(), cluster(), Plan())
    trains(run, 1, 2, 3)
    trains(other, 1, 2)
    follows = [LiveRun(run), LiveRun(other)]
    for one in follows:
        one.look()
    text = shown(*follows)
    assert "mine · dp=2" in text
    assert "other · dp=1" in text
    assert line(follows[1]).startswith("other: epoch 1 · step 2")


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=3 * CURVE))
def test_a_curve_keeps_the_whole_run_in_few_values(losses: list[float]) -> None:
    curve = Curve()
    for loss in losses:
        curve.add(loss)
    assert len(curve.values) < CURVE
    whole = losses[: len(losses) // curve.each * curve.each]
    means = [sum(whole[at : at + curve.each]) / curve.each for at in range(0, len(whole), curve.each)]
    assert curve.values == pytest.approx(means, abs=1e-9)


def test_the_screen_has_no_colour_where_the_terminal_has_none(run: Run) -> None:
    trains(run, 1, 2)
    live = LiveRun(run)
    live.look()
    console = PlainConsole(width=100, no_color=True, force_terminal=True)
    with console.capture() as captured:
        console.print(screen([live], 40, NOW))
    assert "██" in captured.get()
    assert "▓" in captured.get()
