"""What the faults of `faults.py` cost: gaps between steps, times until healed; how its files are read."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

REPLICAS, HANG_S, REST_S, SEED = 4, 60.0, 1.5, 17
HEAD = f"{'fault':24}  named after   gap (the worst)  steps lost  healed after  loss difference"


@dataclass
class Faults:
    """What came of the faults of one run."""

    gaps_s: list[float] = field(default_factory=list)
    healed_s: list[float] = field(default_factory=list)
    hangs: int = 0
    steps_lost: int = 0
    short_steps: int = 0
    inexact: int = 0
    named_s: list[float] = field(default_factory=list)
    loss_difference: float | None = None  # the largest of a step, as a part of its loss; None: not known
    left: int | None = None  # hosts that have left after a notice, less lost ranks and hosts; None: had no notice

    def note(self, kills: list[float], steps: list[float], healed: list[float], told: Sequence[float] = ()) -> None:
        """Take times after kills from those of committed steps, of returns, and of losses that the run told."""
        typical_s = statistics.median(b - a for a, b in itertools.pairwise(steps))
        for at in kills:
            back = next((time for time in healed if time > at), at + HANG_S)
            near = [b - a for a, b in itertools.pairwise(steps) if b > at and a < back + 1.0]
            self.gaps_s.append(max(near, default=HANG_S) - typical_s)
            self.healed_s.append(back - at)
            self.named_s += [time - at for time in told if time > at][:1]

    def row(self) -> str:
        """A line of the table whose head is `HEAD`."""
        difference = "" if self.loss_difference is None else f"{self.loss_difference:.1e}"
        named = f"{statistics.median(self.named_s):.2f} s" if self.named_s else "never"
        gap = f"{statistics.median(self.gaps_s):.2f} s ({max(self.gaps_s):.2f})"
        healed = f"{statistics.median(self.healed_s):.2f} s"
        return f"{named:>11}  {gap:>16}  {self.steps_lost:>10}  {healed:>12}  {difference:>15}"

    def figures(self, transport: str, kind: str = "kill") -> dict[str, float]:
        """The figures by name."""
        kind = kind.replace("-", "_")
        name = transport if kind == "kill" else f"{transport}_{kind}"
        return {
            f"{transport}_{kind}_gap_s": round(statistics.median(self.gaps_s), 3),
            f"{transport}_{kind}_gap_worst_s": round(max(self.gaps_s), 3),
            **({f"{name}_named_s": round(statistics.median(self.named_s), 3)} if self.named_s else {}),
            f"{name}_healed_s": round(statistics.median(self.healed_s), 3),
            f"{name}_steps_lost": self.steps_lost,
            f"{name}_short_steps": self.short_steps,
            f"{name}_inexact": self.inexact,
            f"{name}_hangs": self.hangs,
            **({f"{name}_left": self.left} if self.left is not None else {}),
        }


class Process(Protocol):
    """What may end before its time."""

    def poll(self) -> int | None: ...


def wait_for(is_there: Callable[[], bool], process: Process, limit_s: float = HANG_S) -> bool:
    """True once it is there; False after a while, or at the end of the process."""
    until = time.monotonic() + limit_s
    while not is_there():
        if time.monotonic() > until or process.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def read(file: Path) -> list[dict[str, Any]]:
    """Whole lines of a file of the record."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind."""
    return [event for event in read(run / "events.jsonl") if event["event"] == kind]
