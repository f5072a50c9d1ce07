"""One rank of a run killed half-way, and the pause until its training goes on."""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import psutil

from paceline_lab.systems.compared import TakenRun

RANK = 1  # that is killed
LEAST_S = 8.0  # of steps, so that there is a middle to kill in
MOST_STEPS = 2000


@dataclass
class Kill:
    """SIGKILL for a rank, once, at a time.

    Attributes:
        after_s: from the command on.
        time: at which it was killed, in Unix seconds; None before.
    """

    after_s: float
    time: float | None = None
    _looked: float = field(default=0.0, repr=False)

    @classmethod
    def within(cls, runs: Iterable[TakenRun]) -> tuple[Kill, int]:
        """The middle of a run of so many steps, by the times of earlier runs."""
        runs = list(runs)
        step_s = statistics.median(run.step_s for run in runs)
        steps = min(MOST_STEPS, max(len(runs[0].losses), round(LEAST_S / step_s)))
        return cls(max(run.first_step_s for run in runs) + step_s * steps / 2), steps

    def due(self, began: float, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        """Kill the rank if its time has come."""
        now = time.time()
        if self.time is not None or now < began + self.after_s or now < self._looked + 0.3:
            return
        self._looked = now
        for process in processes():
            with suppress(psutil.Error, IndexError, ValueError):
                if _is_rank(process):
                    process.send_signal(signal.SIGKILL)
                    self.time = time.time()
                    return

    def pause_s(self, ended_s: list[float]) -> float:
        """The longest time between two steps around the kill, beyond a usual step."""
        assert self.time is not None
        gaps = [after - before for before, after in pairwise(ended_s)]
        around = [
            gap for gap, (before, after) in zip(gaps, pairwise(ended_s), strict=True) if after > self.time > before - 60
        ]
        return max(around, default=0.0) - statistics.median(gaps)


def _is_rank(process: psutil.Process) -> bool:
    """True for the process of the rank, by what its launcher gave it."""
    variables = process.environ()
    if process.cmdline()[0].startswith(f"paceline rank {RANK} of"):
        return True
    if variables.get("TORCHELASTIC_RUN_ID"):  # torchft's ranks are groups of one
        return int(variables.get("REPLICA_GROUP_ID", variables.get("RANK", "-1"))) == RANK
    if "TF_CONFIG" in variables:
        task = json.loads(variables["TF_CONFIG"])["task"]
        return bool(task["type"] == "worker" and task["index"] == RANK)
    return variables.get("HOROVOD_RANK") == str(RANK)
