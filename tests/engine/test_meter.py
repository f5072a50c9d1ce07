"""The stop-watch, on a clock that the test turns.

Every second of a step is in one part, and the one that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.meter import CHECKPOINT, COMM, COMPUTE, DATA, IMBALANCE, OPTIMIZER, PARTS, Meter, Timing

Turn = Callable[[float], None]


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Turn:
    """Lets the given seconds pass on the clock of the meter."""
    now = [100.0]
    monkeypatch.setattr("paceline.engine.meter.time.perf_counter", lambda: now[0])

    def pass_seconds(seconds: float) -> None:
        now[0] += seconds

    return pass_seconds


def marked(meter: Meter, turn: Turn, seconds: list[tuple[int, float]]) -> None:
    for part, passed in seconds:
        turn(passed)
        meter.mark(part)


def finished(meter: Meter, step: int) -> Timing:
    timing = meter.finish(step)
    assert timing is not None
    return timing


def test_every_second_between_two_marks_belongs_to_the_part_marked_second(turn: Turn) -> None:
    meter = Meter(torch.device("cpu"))
    marked(
        meter, turn, [(DATA, 1.0), (COMPUTE, 4.0), (COMM, 2.0), (OPTIMIZER, 0.5), (CHECKPOINT, 0.25), (OPTIMIZER, 0.5)]
    )
    timing = finished(meter, 1)
    assert dict(zip(PARTS, timing.parts_s, strict=True)) == {
        "data": 1.0,
        "compute": 4.0,
        "bubble": 0.0,
        "comm": 2.0,
        "imbalance": 0.0,
        "optimizer": 1.0,
        "checkpoint": 0.25,
    }
    assert timing.step_s == 8.25
    assert timing.busy_s == 6.25


def test_time_after_a_step_belongs_to_the_next(turn: Turn) -> None:
    meter = Meter(torch.device("cpu"))
    marked(meter, turn, [(COMPUTE, 4.0)])
    first = finished(meter, 1)
    marked(meter, turn, [(CHECKPOINT, 3.0), (DATA, 1.0), (COMPUTE, 4.0)])
    second = finished(meter, 2)
    assert (first.step, first.step_s) == (1, 4.0)
    assert (second.step, second.parts_s[CHECKPOINT], second.step_s) == (2, 3.0, 8.0)


def test_a_pause_belongs_to_no_step(turn: Turn) -> None:
    meter = Meter(torch.device("cpu"))
    turn(50.0)
    meter.restart()
    marked(meter, turn, [(COMPUTE, 4.0)])
    assert meter.busy_s() == 4.0
    assert finished(meter, 1).step_s == 4.0


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_waiting_for_the_slowest_rank_is_imbalance_and_no_more_than_was_waited(
    waited: float, slowest: float, own: float
) -> None:
    meter = Meter(torch.device("cpu"))
    meter.current.parts_s[COMM] = waited
    meter.split_wait(slowest, own)
    parts = meter.current.parts_s
    assert parts[IMBALANCE] == pytest.approx(min(max(slowest - own, 0.0), waited))
    assert parts[COMM] >= 0.0
    assert parts[COMM] + parts[IMBALANCE] == pytest.approx(waited)


def test_a_rank_is_busy_from_one_agreement_to_the_next(turn: Turn) -> None:
    meter = Meter(torch.device("cpu"))
    marked(meter, turn, [(COMPUTE, 4.0), (COMM, 9.0)])
    meter.split_wait(4.0, 4.0)
    marked(meter, turn, [(OPTIMIZER, 1.0)])
    finished(meter, 1)
    marked(meter, turn, [(DATA, 0.5), (COMPUTE, 4.0)])
    assert meter.busy_s() == 5.5
