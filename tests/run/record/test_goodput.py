"""Goodput: the wall-clock of a run divided into useful steps and what was lost, from its record alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.run.record.goodput import PARTS, Goodput, GoodputSoFar, goodput, goodput_of
from small_jobs import points, small_job, train_here

STEP_S, STALL_S, START_S, EVALUATION_S = 0.1, 0.04, 2.0, 0.3


@dataclass
class Story:
    """A run as it happened: its record, and the true seconds of each part."""

    time: float = 1e9
    step: int = 0
    furthest: int = 0
    saved: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    true_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def event(self, event: str, **details: Any) -> None:
        self.events.append({"event": event, "time": round(self.time, 3), **details})

    def passes(self, part: str, seconds: float) -> None:
        self.time += seconds
        self.true_s[part] += seconds

    def starts(self) -> None:
        self.event("launch")
        self.passes("start", START_S)
        self.event("start")

    def trains(self, steps: int, stall_s: float = 0.0) -> None:
        for _ in range(steps):
            self.step += 1
            self.passes("checkpoint", stall_s)
            self.passes("useful" if self.step > self.furthest else "replay", STEP_S)
            self.furthest = max(self.furthest, self.step)
            self.commits(stall_s + STEP_S, stall_s)

    def commits(self, step_s: float, stall_s: float = 0.0) -> None:
        line = {"step": self.step, "time": round(self.time, 3), "step_s": step_s, "checkpoint_s": stall_s}
        self.lines.append(line)

    def saves(self) -> None:
        self.saved = self.step
        self.trains(1, STALL_S)

    def evaluates(self) -> None:
        self.passes("evaluation", EVALUATION_S)
        self.event("evaluation", step=self.step, metrics={})

    def crashes(self) -> None:
        """All ranks are started again, from the checkpoint."""
        self.passes("restart", 1.5)
        self.event("restart", attempt=1, rank=0, reason="killed")
        self.passes("restart", 3.0)
        self.step = self.saved
        self.event("resume")

    def loses_a_rank(self) -> None:
        """The survivors repeat the step under way."""
        self.passes("recovery", 0.3)
        self.event("lost", rank=2, reason="killed", generation=1, again=True)
        self.passes("recovery", 0.1)
        self.event("generation", step=self.step, replicas=3)
        self.step += 1
        self.passes("useful" if self.step > self.furthest else "replay", STEP_S)
        self.furthest = max(self.furthest, self.step)
        self.commits(0.4 + STEP_S)  # the clock of the step went on

    def ends(self) -> None:
        self.passes("checkpoint", 0.2)
        self.event("end", reason="steps")

    def rests(self) -> None:
        self.time += 3600

    def told(self) -> Goodput:
        return goodput_of({0: self.lines}, self.events)


ACTS = {
    "trains": lambda story: story.trains(7),
    "saves": Story.saves,
    "evaluates": lambda story: (story.evaluates(), story.trains(1)),
    "crashes": lambda story: (story.crashes(), story.trains(3)),
    "loses a rank": Story.loses_a_rank,
    "pauses": lambda story: (story.ends(), story.rests(), story.starts(), story.trains(1)),
}


@example(acts=["loses a rank"] * 12, ended=False)
@given(acts=st.lists(st.sampled_from(sorted(ACTS)), max_size=12), ended=st.booleans())
def test_every_part_of_the_wall_clock_is_found_in_the_record(acts: list[str], ended: bool) -> None:
    story = Story()
    story.starts()
    story.trains(5)
    for act in acts:
        ACTS[act](story)
    if ended:
        story.ends()
    told = story.told()
    moments = len(story.lines) + len(story.events)
    assert told.parts_s == pytest.approx(story.true_s, abs=2e-3 * moments)
    assert sum(told.parts_s.values()) == pytest.approx(told.wall_s)
    assert told.wall_s == pytest.approx(sum(story.true_s.values()), abs=1e-2)
    assert all(before.end_s == pytest.approx(after.start_s) for before, after in itertools.pairwise(told.spans))
    assert 0 <= told.share <= 1


@given(
    acts=st.lists(st.sampled_from(sorted(ACTS)), max_size=12),
    looks=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.4)), max_size=20),
)
def test_a_run_that_is_followed_has_the_same_goodput_however_often_it_is_looked_at(
    acts: list[str], looks: list[tuple[float, float]]
) -> None:
    story = Story()
    story.starts()
    story.trains(6)
    for act in acts:
        ACTS[act](story)
    so_far, whole_s = GoodputSoFar(), story.time - 1e9
    lines, events, walls = list(story.lines), list(story.events), [0.0]
    for place, took_s in sorted(looks):
        at = 1e9 + place * whole_s  # events are read first, and steps a little later
        steps = [line for line in lines if line["time"] <= at + took_s]
        found = [event for event in events if event["time"] <= at]
        lines, events = lines[len(steps) :], events[len(found) :]
        so_far.add(steps, found, took_s=took_s, ended=False)
        walls.append(so_far.goodput().wall_s)
    so_far.add(lines, events, took_s=0.0, ended=True)
    assert so_far.goodput().parts_s == pytest.approx(story.told().parts_s, abs=1e-3)
    assert so_far.goodput().failures == story.told().failures
    assert walls == sorted(walls)


def test_a_run_that_nothing_disturbed_lost_its_start_alone() -> None:
    story = Story()
    story.starts()
    story.trains(98)
    told = story.told()
    assert told.share == pytest.approx(9.8 / 11.8, rel=1e-3)
    assert not told.disturbed
    assert told.sentence() == "83 % of 11.8 s; lost: start-up 2.00 s"


def test_a_crash_costs_the_restart_and_the_steps_done_again() -> None:
    story = Story()
    story.starts()
    story.trains(10)
    story.saves()
    story.trains(20)
    story.crashes()
    story.trains(30)
    told = story.told()
    assert told.disturbed
    assert told.parts_s["replay"] == pytest.approx(2.1, abs=0.01)
    assert told.sentence().endswith("lost: restarts 4.50 s, replayed steps 2.10 s, start-up 2.00 s")
    [failure] = told.failures
    assert failure.text == "restart"
    assert failure.at_s == pytest.approx(2 + 3.1 + 0.04 + 1.5, abs=0.01)
    assert told.over_time(20)[0][1] == 0, "it was starting then"
    assert sum(share for _, share in told.over_time(20)) / 20 == pytest.approx(told.share)


def test_the_first_step_after_a_failure_is_useful_as_far_as_it_is_usual() -> None:
    story = Story()
    story.starts()
    story.trains(10)
    story.crashes()
    story.step = 11
    story.passes("restart", 5.0)
    story.passes("useful", STEP_S)
    story.commits(5.0 + STEP_S)
    story.trains(5)
    assert story.told().parts_s["restart"] == pytest.approx(9.5, abs=0.01)


def test_steps_of_a_millisecond_are_not_lost_to_rounding() -> None:
    story = Story()
    story.event("start")
    for story.step in range(1, 2001):
        story.time += 0.00131
        story.commits(0.00131)
    assert story.told().share == pytest.approx(1, abs=0.02)


def test_steps_that_rank_0_was_away_for_are_those_of_another_rank() -> None:
    story = Story()
    story.starts()
    story.trains(20)
    ranks = {0: [line for line in story.lines if not 8 < line["step"] < 15], 1: story.lines}
    assert goodput_of(ranks, story.events) == story.told()


def test_a_rank_that_was_lost_and_healed_is_marked_where_it_happened() -> None:
    story = Story()
    story.starts()
    story.trains(4)
    story.loses_a_rank()
    story.trains(4)
    story.event("healed", rank=2)
    story.trains(4)
    lost, healed = story.told().failures
    assert (lost.text, healed.text) == ("rank 2 lost", "rank 2 healed")
    assert lost.at_s == pytest.approx(2.7, abs=0.01)
    assert healed.at_s == pytest.approx(3.3, abs=0.01)


def test_a_record_of_nothing_has_no_goodput() -> None:
    told = goodput_of({}, [])
    assert (told.wall_s, told.share, told.disturbed) == (0.0, 0.0, False)


@pytest.mark.parametrize("change", [{"time": -5e8}, {"step_s": 0.0, "checkpoint_s": 0.0}, {"step_s": 1e9}])
def test_a_clock_that_jumps_and_times_that_are_missing_leave_the_sum_whole(change: dict[str, float]) -> None:
    story = Story()
    story.starts()
    story.trains(20)
    story.lines[9] |= {
        name: value + (story.lines[9]["time"] if name == "time" else 0) for name, value in change.items()
    }
    told = story.told()
    assert sum(told.parts_s.values()) == pytest.approx(told.wall_s)
    assert min(told.parts_s.values()) >= 0


def test_a_real_run_and_its_resumption_are_divided_from_their_directory(tmp_path: Path) -> None:
    job = {"data": points(held_out=0.2), "evaluate": {"every_steps": 5}}
    path = train_here(tmp_path / "run", small_job(stop={"steps": 9}, **job)).path
    run = train_here(path, small_job(stop={"steps": 20}, **job))
    file = path / "steps" / "rank-0.jsonl"
    told = goodput(run)
    began, ended = (
        [e["time"] for e in run.events() if e["event"] in kinds] for kinds in (("start", "resume"), ("end",))
    )
    assert told.wall_s == pytest.approx(sum(ended) - sum(began), abs=0.01)
    assert sum(told.parts_s.values()) == pytest.approx(told.wall_s)
    assert told.parts_s["evaluation"] > 0
    assert told.parts_s["replay"] == told.parts_s["restart"] == 0

    file.write_bytes(file.read_bytes() + b'{"step": 21, "ti')
    assert goodput(run) == told, "a crash cut the last line"
    assert json.loads(file.read_text().splitlines()[-2])["step"] == 20
