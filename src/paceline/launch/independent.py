"""Ranks that go on when others are lost, as no group joins them.

These are workers and servers of `sync=server`. A rank that was killed is started again; servers end once all workers
have. Workers but the first leave and come back as `paceline scale` asks.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.engine.status import RankStatus
from paceline.errors import LaunchError
from paceline.launch.failure import hang, killed, shortened
from paceline.launch.membership import noted
from paceline.launch.recovery import most_losses
from paceline.launch.scaling import about_to_leave, all_take_part

if TYPE_CHECKING:
    from paceline.launch.attempt import Attempt


LEAVE = signal.SIGUSR1  # has a worker end after its piece


class Independent:
    """Losses of one attempt's ranks.

    A worker but the first that was lost too often is left out, and the others take its pieces. Without the first, or a
    server, the attempt ends.

    Args:
        workers: how many of the first ranks end by themselves; the others serve them.
    """

    too_few: str | None = None

    def __init__(self, attempt: Attempt, workers: int) -> None:
        self.attempt, self.workers = attempt, workers
        self._most = most_losses()
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._out: set[int] = set()  # workers that are not started again
        self._leaving: set[int] = set()
        self._why: dict[int, str] = {}
        self.hurries = True

    @property
    def counted(self) -> Sequence[int]:
        """Ranks whose failure is the attempt's: all, but for those that are left out."""
        return [number for number in range(self.attempt.setting.ranks) if number not in self._out]

    def turn(self) -> bool:
        """Start lost ranks again; True once all workers have ended."""
        attempt = self.attempt
        self._note_left()
        if all(attempt.ranks[number].code == 0 for number in set(range(self.workers)) - self._out):
            attempt.end_others()
            return True
        if attempt.signals.first is None:
            for rank in attempt.ranks:
                lost = rank.code is not None and rank.code < 0 and not rank.record.exists()
                if lost and rank.number in self.counted:
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

    @property
    def scaling(self) -> Independent:
        """Methods `shrink` and `grow` for `paceline scale`."""
        return self

    def shrink(self) -> str:
        """Have the last worker leave after its piece.

        Raises:
            LaunchError: none can.
        """
        if self._leaving:
            raise about_to_leave(self._leaving)
        workers = [number for number in range(1, self.workers) if self.attempt.ranks[number].code is None]
        if not workers:
            raise LaunchError(
                "one worker takes part, and a run cannot be smaller. Ctrl-C, or `paceline cancel`, saves and ends it."
            )
        number = workers[-1]
        if self.attempt.board.read()[number].phase == "starting":
            raise LaunchError(f"rank {number} is still starting. Ask again in a moment.")
        self._leaving.add(number)
        self.attempt.ranks[number].signal(LEAVE)
        return f"rank {number} leaves after its piece; the others go on"

    def grow(self) -> str:
        """Start a worker again that has left, or was left out.

        Raises:
            LaunchError: all take part.
        """
        out = [number for number in range(1, self.workers) if self.attempt.ranks[number].code is not None]
        if not out:
            raise all_take_part(self.workers, "workers")
        number = out[0]
        self._out.discard(number)
        self._leaving.discard(number)
        self._losses.pop(number, None)
        self.attempt.start_again(number)
        self._tell_scaled(1, number)
        return f"rank {number} starts, and takes pieces as soon as it has"

    def _note_left(self) -> None:
        """Tell of workers that have left as they were asked to.

        Some may have been killed before their piece was done.
        """
        for number in sorted(self._leaving):
            rank = self.attempt.ranks[number]
            if rank.code is None:
                continue
            self._leaving.discard(number)
            if rank.code == 0 or (rank.code < 0 and not rank.record.exists()):
                self._out.add(number)
                self._tell_scaled(-1, number)

    def _tell_scaled(self, by: int, number: int) -> None:
        if self.attempt.on_event:
            self.attempt.on_event("scaled", {"by": by, "ranks": [number], "host": None, "epoch": 0})

    def _replace(self, number: int) -> None:
        """Start a lost rank again, unless it was lost too often."""
        end = self.attempt.ends()[number]
        why = self._why.pop(number, None) or killed(end, self.attempt.new_oom_kills(end), serves=number >= self.workers)
        again = noted(self._losses[number], time.monotonic()) <= self._most
        if again:
            try:
                self.attempt.start_again(number)
            except LaunchError as error:
                again, why = False, f"{why}; {error}"
        spared = 0 < number < self.workers
        if not again and spared:
            self._out.add(number)
        if self.attempt.on_event:
            told = {"rank": number, "waiting": [], "reason": why, "stack": shortened(end.stack), "again": again}
            ends = not again and not spared
            self.attempt.on_event("lost", {**told, "ends": ends, "waits": False, "alone": True, "epoch": 0})
