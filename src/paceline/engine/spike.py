"""Spikes of the training loss, told from its noise by a robust threshold."""

from __future__ import annotations

import math
import statistics
from collections import deque

from paceline.job.spike import SpikeSpec

_SIGMA = 1.4826  # standard deviations per median absolute deviation, of normal noise
_LEAST = 0.01  # of the median: the spread of losses that hardly differ


class LossSpikes:
    """Tells losses that lie far beyond the median of the last ones.

    Far is many times their spread, the median absolute deviation, which neither a spike nor a slow fall of the loss
    widens much. Spikes are not counted among the last losses, and nothing is one before as many losses are known as the
    job's window has. Equal on all ranks, as the loss is.
    """

    def __init__(self, spec: SpikeSpec) -> None:
        self.spec = spec
        self._losses: deque[float] = deque(maxlen=spec.window)

    def problem(self, step: int, loss: float) -> str | None:
        """Sentence about a spike; None for another loss, which is then one of the last."""
        limit = self.limit
        if loss <= limit:
            self._losses.append(loss)
            return None
        return (
            f"the loss of step {step} is {loss:.6g}, a spike: the last {len(self._losses)} steps had a median of "
            f"{statistics.median(self._losses):.6g}, and {self.spec.threshold:g} times their spread beyond it is "
            f"{limit:.6g}"
        )

    @property
    def limit(self) -> float:
        """The largest loss that is no spike now."""
        if len(self._losses) < self.spec.window:
            return math.inf
        median = statistics.median(self._losses)
        spread = _SIGMA * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.spec.threshold * max(spread, _LEAST * abs(median))

    def state_dict(self) -> list[float]:
        """The last losses."""
        return list(self._losses)

    def load_state_dict(self, losses: list[float]) -> None:
        """Take over the last losses of an earlier run."""
        self._losses = deque(losses, maxlen=self.spec.window)
