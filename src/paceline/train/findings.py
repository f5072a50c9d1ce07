"""What a trial of a plan's knobs has found: written by its ranks, read by their launcher, kept for later starts. Does without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.plan.knobs import Tried, as_json
from paceline.train.run import write_whole

BEGINNING = "the plan to begin with"


@dataclass
class Findings:
    """What a trial has found so far; kept in a file, from which another one goes on.

    Attributes:
        default: the plan that it began with; `step_s` is the median of its steps, `run_s` the longest run with them.
        best: the fastest plan so far.
        tried: the first row is the default's.
        under_way: the knob that is being tried.
        gain: step time of the best plan over that of the default, by the measured ratios of what was kept.
        complete: whether every knob that can help was tried for as long as it takes.
    """

    default: str
    best: str
    tried: list[Tried] = field(default_factory=list)
    under_way: str | None = None
    step_s: float = 0.0
    steps_per_epoch: int = 0
    run_s: float | None = None
    budget_s: float = 0.0
    spent_s: float = 0.0
    gain: float = 1.0
    complete: bool = True

    @classmethod
    def read(cls, file: Path) -> Findings:
        """Read what `write` wrote."""
        values: dict[str, Any] = json.loads(file.read_text())
        return cls(**(values | {"tried": [Tried.from_json(row) for row in values["tried"]]}))

    def write(self, file: Path) -> None:
        """Write whole or not at all."""
        write_whole(file, json.dumps(self.__dict__ | {"tried": as_json(self.tried)}, indent=1))
