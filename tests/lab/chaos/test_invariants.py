"""Invariants of disturbed runs, by what their processes witnessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline_lab.chaos.invariants import Reference, check
from paceline_lab.chaos.play import Played
from paceline_lab.chaos.schedule import Schedule

SAMPLES = {step: [2 * step, 2 * step + 1] for step in range(1, 9)}


def broken(folder: Path, *processes: list[dict[str, Any]]) -> tuple[str, ...]:
    """What is wrong with the samples of a run whose own record is empty, for its disk was full."""
    (folder / "witness").mkdir()
    for number, lines in enumerate(processes):
        (folder / "witness" / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    played = Played(Schedule(1, "dp=2", 8, 0, ()), folder / "run", folder / "witness")
    found = check(played, Reference(folder / "reference", {1: 1.0}, SAMPLES, {}, ""))
    return next(invariant.broken for invariant in found if invariant.name == "every sample once an epoch")


def steps(place: int, numbers: range, begin: float) -> list[dict[str, Any]]:
    """Lines of a process that reads one sample of each step."""
    return [{"step": n, "time": begin + n, "samples": [SAMPLES[n][place]]} for n in numbers]


def test_steps_that_are_trained_again_count_once_though_the_record_lost_its_lines(tmp_path: Path) -> None:
    first = [[{"from": 0, "time": 100.0}, *steps(0, range(1, 7), 100.0)], steps(1, range(1, 7), 100.0)]
    again = [[{"from": 3, "time": 200.0}, *steps(0, range(4, 9), 200.0)], steps(1, range(4, 9), 200.0)]
    assert broken(tmp_path, *first, *again) == ()


def test_a_sample_that_comes_twice_is_named_with_its_step(tmp_path: Path) -> None:
    twice = steps(1, range(1, 9), 100.0)
    twice[5]["samples"] = [SAMPLES[6][0]]
    found = broken(tmp_path, [{"from": 0, "time": 100.0}, *steps(0, range(1, 9), 100.0)], twice)
    assert found == (f"step 6 had the samples [{SAMPLES[6][0]}], which are not its own or came twice",)


def test_a_sample_that_is_left_out_is_named_with_its_step(tmp_path: Path) -> None:
    without = [line for line in steps(1, range(1, 9), 100.0) if line["step"] != 6]
    found = broken(tmp_path, [{"from": 0, "time": 100.0}, *steps(0, range(1, 9), 100.0)], without)
    assert found == (f"step 6 was without the samples [{SAMPLES[6][1]}]",)
