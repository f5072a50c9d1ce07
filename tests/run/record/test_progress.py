"""What a person sees of a run: short enough for a line, right in its numbers, on a terminal and in a log."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline.run.record.progress as progress_module
from paceline.engine.engine import StepResult
from paceline.engine.meter import Timing
from paceline.run.record.progress import LiveProgress, NewLines, PlainProgress, RecentSteps
from paceline.run.record.run import JsonLines
from paceline.units import clock
from small_jobs import new_run, small_job

PARTS_S = {
    "data_s": 0.012,
    "compute_s": 0.07,
    "bubble_s": 0.0,
    "comm_s": 0.01,
    "imbalance_s": 0.004,
    "optimizer_s": 0.003,
    "checkpoint_s": 0.001,
}


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 2, "loss": 0.5, "samples": 512, "step_s": sum(PARTS_S.values()), **PARTS_S} | changes


class Watched:
    """A run whose files the test writes, and the progress that follows them on a console of the test's."""

    def __init__(self, path: Path, *, terminal: bool, width: int = 120) -> None:
        run = new_run(path / "run", small_job())
        self.steps, self.events = JsonLines(run.path / "steps" / "rank-0.jsonl"), JsonLines(run.path / "events.jsonl")
        self.screen = StringIO()
        self.console = Console(
            file=self.screen, force_terminal=terminal, width=width, color_system=None, legacy_windows=False
        )
        self.progress = LiveProgress(run.path, self.console)

    def write(self, *records: dict[str, Any]) -> None:
        for step in records:
            self.steps.write(json.dumps(step))

    def close(self) -> None:
        self.steps.close()
        self.events.close()

    @property
    def lines(self) -> list[str]:
        """What is on the screen, line by line, each redrawing on its own."""
        return [line.replace("\x1b[2K", "").strip() for line in self.screen.getvalue().replace("\r", "\n").split("\n")]


def test_the_sentence_says_how_far_how_well_how_fast_and_where_the_time_goes() -> None:
    recent = RecentSteps(total_steps=48_000)
    for step in range(12_000, 12_040):
        recent.add(record(step))
    expected = (
        "epoch 3 · step 12,039/48,000 · loss 0.5000 · 5,120 samples/s · 59:56 left · 70 % compute, 12 % data, 10 % comm"
    )
    assert recent.sentence() == expected
    assert len(expected) < 120


def test_a_run_without_a_known_end_has_no_time_left() -> None:
    recent = RecentSteps(total_steps=None)
    recent.add(record(7))
    assert recent.sentence().startswith("epoch 3 · step 7 · loss 0.5000 · 5,120 samples/s · 70 % compute")


@pytest.mark.parametrize(
    ("steps", "left"),
    [(1_500_000, " · 41:40:00 left · "), (2_592_000, " · 3 days left · "), (10_000_000_000, " samples/s · 70 % ")],
)
def test_time_left_is_counted_in_days_and_not_told_without_an_end_in_sight(steps: int, left: str) -> None:
    recent = RecentSteps(total_steps=steps)
    recent.add(record(0))
    assert left in recent.sentence()


def test_before_the_first_step_the_run_is_starting() -> None:
    assert RecentSteps(total_steps=5).sentence() == "starting"


def test_steps_without_times_or_a_finite_loss_are_no_obstacle() -> None:
    recent = RecentSteps(total_steps=10)
    recent.add(record(1, step_s=0.0, loss=None))
    assert recent.sentence() == "epoch 3 · step 1/10 · loss not finite"
    recent.add(record(2, loss=0.25))
    assert "loss 0.2500 · 5,120 samples/s · 0:01 left" in recent.sentence()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3_599, "59:59"), (3_600, "1:00:00"), (90_061, "25:01:01"), (-3, "0:00")],
)
def test_time_left_reads_like_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_terminal_shows_one_live_line_and_keeps_the_evaluations(tmp_path: Path) -> None:
    watched = Watched(tmp_path, terminal=True)
    with watched.progress as live:
        watched.events.event("start", {"step": 0, "total_steps": 20})
        live.tick()
        watched.write(*(record(step) for step in range(1, 11)))
        watched.events.event("evaluation", {"step": 9, "metrics": {"loss": 0.1021, "accuracy": 0.97222}})
        live.tick()
        watched.write(*(record(step) for step in range(11, 21)))
    watched.close()
    assert "step 9: validation loss 0.1021, accuracy 0.9722" in watched.lines
    assert any(
        line.endswith(
            "epoch 3 · step 10/20 · loss 0.5000 · 5,120 samples/s · 0:01 left · 70 % compute, 12 % data, 10 % comm"
        )
        for line in watched.lines
    )
    assert any("step 20/20" in line for line in watched.lines), "what came since the last tick is shown at the end"
    assert max(map(len, watched.lines)) <= 120
    assert watched.screen.getvalue().endswith("\x1b[1A\x1b[2K"), "the live line is gone in the end"


def test_a_narrow_terminal_cuts_the_line_at_its_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path, terminal=True, width=60)
    with watched.progress:
        watched.events.event("start", {"step": 0, "total_steps": 20})
        watched.write(record(10))
    watched.close()
    shown = [line for line in watched.lines if "step 10/20" in line]
    assert shown
    assert max(map(len, shown)) <= 60


def test_a_log_gets_a_line_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, terminal=False)
    with watched.progress as live:
        watched.events.event("start", {"step": 0, "total_steps": 20})
        watched.write(record(1))
        live.tick()
        assert watched.screen.getvalue() == "", "not yet"
        monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
        live.tick()
        monkeypatch.setattr(progress_module, "LINE_EVERY_S", 1e9)
    watched.close()
    assert watched.lines == [
        "epoch 3 · step 1/20 · loss 0.5000 · 5,120 samples/s · 0:02 left · 70 % compute, 12 % data, 10 % comm",
        "",
    ]
    assert "\x1b" not in watched.screen.getvalue()


def test_events_that_matter_are_told_word_by_word(tmp_path: Path) -> None:
    watched = Watched(tmp_path, terminal=False)
    samples = "rank 1's share of the batch contains NaN or Inf in samples [5]"
    problem = f"the loss of step 8 is nan ({samples}; [bold]a path[/bold])"
    with watched.progress as live:
        watched.events.event("resume", {"step": 12, "total_steps": 20})
        watched.events.event(
            "checkpoint_damaged", {"path": "step-00000012", "reason": "shard-0.safetensors is missing"}
        )
        watched.events.event("nonfinite", {"step": 8, "problem": problem, "policy": "rewind"})
        watched.events.event("rewind", {"from_step": 8, "to_step": 4})
        watched.events.event("checkpoint_saved", {"step": 4})
        live.tick()
    watched.close()
    text = " ".join(watched.lines)
    for part in ("resumed at step 12", "shard-0.safetensors is missing", problem, "went back from step 8 to step 4"):
        assert part in text
    assert "checkpoint_saved" not in text


def test_an_earlier_attempt_is_not_shown_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, terminal=False)
    watched.write(record(1), record(2))
    watched.events.event("start", {"step": 0, "total_steps": 20})
    watched.events.event("evaluation", {"step": 2, "metrics": {"loss": 1.0}})
    with watched.progress as live:
        live.tick()
        assert (live.recent.step, live.recent.total_steps) == (0, 20), "the end is known where another host goes on"
        watched.write(record(3))
        live.tick()
        assert live.recent.step == 3
    watched.close()
    assert "validation" not in watched.screen.getvalue()


def test_while_no_step_is_taken_no_line_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    watched = Watched(tmp_path, terminal=False)
    with watched.progress as live:
        watched.write(record(1))
        live.tick()
        live.tick()
    watched.close()
    assert watched.screen.getvalue().count("step 1") == 1


def test_lines_that_a_full_disk_did_not_take_are_told_once_by_their_rank(tmp_path: Path) -> None:
    watched = Watched(tmp_path, terminal=False)
    with watched.progress:
        watched.events.event("lines_lost", {"file": "steps/rank-0.jsonl", "lines": 2})
    watched.close()
    assert watched.screen.getvalue() == ""


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = NewLines(path)
    assert list(tail) == []
    path.write_text('{"step": 1}\n{"step"')
    assert [line["step"] for line in tail] == [1]
    with path.open("a") as file:
        file.write(': 2}\n{"cut\n{"step": 3}\n')
    assert [line["step"] for line in tail] == [2, 3]
    assert list(tail) == []


def test_under_another_launcher_rank_0_prints_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    plain = PlainProgress(total_steps=20)
    plain.step(StepResult(5, 0.5, 512, 1.0, None, {}, Timing(5, list(PARTS_S.values()))), epoch=2)
    plain.step(StepResult(6, float("nan"), 512, 1.0, "the loss is nan", {}, None), epoch=2)
    plain.event({"event": "evaluation", "step": 5, "metrics": {"loss": 1.0}})
    first, second, third = capsys.readouterr().err.splitlines()
    assert (
        first == "epoch 3 · step 5/20 · loss 0.5000 · 5,120 samples/s · 0:02 left · 70 % compute, 12 % data, 10 % comm"
    )
    assert second.startswith("epoch 3 · step 6/20 · loss 0.5000")
    assert third == "step 5: validation loss 1.0000"


def test_an_event_with_a_metric_that_is_no_number_is_told(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "evaluation", "step": 5, "metrics": {"loss": NaN}}\n')
    [event] = NewLines(path)
    assert progress_module.event_sentence(event) == "step 5: validation loss nan"
