"""Failures on demand of the collective library; those of a device are in `csrc/faults.cpp`."""

from __future__ import annotations

import os
import time

from simulated.environment import LINK, TIMES_OUT


class Faults:
    """The failures that this process is to have.

    Attributes:
        stays_away_at: number of the collective or message that this rank does not come to, counted over all lanes of a
            group; 0 for none.
        factor, least_ms: of the time of each, on a slow link.
    """

    def __init__(self, stays_away_at: int = 0, factor: float = 1.0, least_ms: float = 0.0) -> None:
        self.stays_away_at, self.factor, self.least_ms = stays_away_at, factor, least_ms
        self._number = 0

    @classmethod
    def from_environment(cls) -> Faults:
        """The failures that PACELINE_SIMULATED_… names for this rank."""
        rank = os.environ.get("RANK", "0")
        who, _, at = os.environ.get(TIMES_OUT, "").partition(":")
        mine = who == rank and int(os.environ.get("PACELINE_ATTEMPT", 0)) == 0
        factor, least_ms, whose = (*os.environ.get(LINK, "").split(":"), "", "")[:3]
        if whose not in ("", rank):
            factor = least_ms = ""
        return cls(int(at) if at and mine else 0, float(factor or 1), float(least_ms or 0))

    def before(self, name: str) -> None:
        """Count a collective or message; raise at the one that is to fail."""
        self._number += 1
        if self._number == self.stays_away_at:
            raise TimeoutError(f"this rank was told not to come to its {name} (number {self._number})")

    def slow(self, took_s: float) -> None:
        time.sleep(max(0.0, took_s * (self.factor - 1), self.least_ms / 1000 - took_s))
