"""The time of a pass is divided among the parts of the model in which it went."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.run.tuning import calibrate_ranks as module
from paceline.run.tuning.calibrate_ranks import END, SegmentTimer


class Clock:
    """Time that passes only where a module says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Slow(nn.Module):
    """Takes a while forward, and twice as long backward."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self._pass(self.seconds)
        y = x * self.weight
        y.register_hook(lambda g: self._pass(2 * self.seconds))
        z: Tensor = y + 1.0
        return z

    def _pass(self, seconds: float) -> None:
        self.clock.now += seconds


class Model(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.start = Slow(clock, 1.0)
        self.blocks = nn.ModuleList([Slow(clock, 5.0), Slow(clock, 3.0)])
        self.end = Slow(clock, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in reversed(self.blocks):  # called in another order than they are registered in
            x = block(x)
        y: Tensor = self.end(x)
        return y


def passed(timer: SegmentTimer, model: nn.Module) -> None:
    with timer.around():
        loss = model(torch.ones(2, 4)).sum()
        timer.turn()
        loss.backward()


def test_each_part_has_its_own_time_both_ways(clock: Clock) -> None:
    model = Model(clock)
    timer = SegmentTimer(model, ["blocks.0", "blocks.1"])
    for _ in range(3):
        passed(timer, model)
    assert timer.names == ("", "blocks.1", "blocks.0", END)
    forward, backward = timer.medians()
    assert forward == pytest.approx((1.0, 3.0, 5.0, 2.0))
    assert backward == pytest.approx((2.0, 6.0, 10.0, 4.0))
    assert timer.seconds == pytest.approx(33.0)


def test_a_model_without_blocks_is_one_segment() -> None:
    model = nn.Linear(4, 4)
    timer = SegmentTimer(model, [])
    passed(timer, model)
    assert timer.names == ("",)
    forward, backward = timer.medians()
    assert len(forward) == len(backward) == 1


def test_a_block_whose_input_needs_no_gradient_is_counted_with_what_comes_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    timer = SegmentTimer(model, ["0", "1"])
    passed(timer, model)
    _, backward = timer.medians()
    assert min(backward) >= 0
    assert sum(backward) > 0
