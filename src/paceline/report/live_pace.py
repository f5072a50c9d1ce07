"""Pace of looks at runs that train, so that looking takes hardly anything from them."""

from __future__ import annotations

import time

SHARE = 0.004  # of one core: `paceline watch` and the live page together are to take 1 % of a 10 ms step at most
_LONGEST_S = 5.0


class Pace:
    """Waits between looks: as asked, and longer where looks cost much.

    They cost `SHARE` of a core at most, counted by all CPU time of this process since the wait before. No wait is
    longer than 5 s.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s, self._spent_s = every_s, time.process_time()

    def wait_s(self) -> float:
        """Seconds until the next look."""
        before, self._spent_s = self._spent_s, time.process_time()
        return max(self.every_s, min((self._spent_s - before) / SHARE, _LONGEST_S))
