"""Ranks that go on when others are lost, as no group joins them.

These are workers and servers of `sync=server`. A rank that was killed is started again; servers
end once all workers have.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.engine.status import RankStatus
from paceline.errors import LaunchError
from paceline.launch.failure import hang, killed, shortened
from paceline.launch.membership import noted
from paceline.launch.recovery import most_losses

if TYPE_CHECKING:
    from paceline.launch.attempt import Attempt


class Independent:
    """Losses of one attempt's ranks.

    Args:
        workers: how many of the first ranks end by themselves; the others serve them.
    """

    too_few: str | None = None

    def __init__(self, attempt: Attempt, workers: int) -> None:
        self.attempt, self.workers = attempt, workers
        self._most = most_losses()
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._given_up: set[int] = set()
        self._why: dict[int, str] = {}
        self.hurries = True

    @property
    def counted(self) -> Sequence[int]:
        """Ranks whose failure is the attempt's: all, but for those that were started again."""
        return range(self.attempt.setting.ranks)

    def turn(self) -> bool:
        """Start lost ranks again; True once all workers have ended."""
        attempt = self.attempt
        if all(attempt.ranks[number].code == 0 for number in range(self.workers)):
            attempt.end_others()
            return True
        if attempt.signals.first is None:
            for rank in attempt.ranks:
                lost = rank.code is not None and rank.code < 0 and not rank.record.exists()
                if lost and rank.number not in self._given_up:
                    self._replace(rank.number)
        self.hurries = any(status.phase == "starting" for status in attempt.board.read())
        return False

    def end(self, hung: Sequence[RankStatus]) -> bool:
        """Kill ranks that hang, for others to start in their place."""
        ends = self.attempt.ends()
        self.attempt.ask_for_stacks({status.rank for status in hung})
        for status in hung:
            self._why[status.rank] = hang([ends[status.rank]], ends, time.monotonic_ns()).text.partition(";")[0]
            self.attempt.ranks[status.rank].kill()
        return True

    def _replace(self, number: int) -> None:
        """Start a lost rank again, unless it was lost too often."""
        end = self.attempt.ends()[number]
        why = self._why.pop(number, None) or killed(end)
        again = noted(self._losses[number], time.monotonic()) <= self._most
        if again:
            try:
                self.attempt.start_again(number)
            except LaunchError as error:
                again, why = False, f"{why}; {error}"
        if not again:
            self._given_up.add(number)
        if self.attempt.on_event:
            told = {"rank": number, "waiting": [], "reason": why, "stack": shortened(end.stack)}
            self.attempt.on_event("lost", {**told, "again": again, "waits": False, "alone": True, "epoch": 0})
