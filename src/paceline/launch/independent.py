"""Ranks that go on when others are lost, as no group joins all of them.

These are workers and servers of `sync=server`. A worker is one rank, or several that hold the model together; where one
of these is lost, all are started again. Servers end once all workers have. Workers but the first leave and come back as
`paceline scale` asks.
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
from paceline.launch.scaling import about_to_leave, all_take_part, named

if TYPE_CHECKING:
    from paceline.launch.attempt import Attempt
    from paceline.launch.host.remote import RemoteRank
    from paceline.launch.started import StartedRank


LEAVE = signal.SIGUSR1  # has the first rank of a worker end it after its piece
_ENDED_WITHIN_S = 5.0  # the other ranks of a lost worker, by SIGKILL


class Independent:
    """Losses of one attempt's ranks.

    A worker but the first that was lost too often is left out, and the others take its pieces. Without the first, or a
    server, the attempt ends.

    Args:
        workers: how many end by themselves; the others serve them.
        size: ranks of a worker.
    """

    too_few: str | None = None

    def __init__(self, attempt: Attempt, workers: int, size: int) -> None:
        self.attempt, self.workers, self.size = attempt, workers, size
        self._most = most_losses()
        # by the first rank of a worker, or a server's only one
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._out: set[int] = set()  # workers that are not started again
        self._leaving: set[int] = set()
        self._why: dict[int, str] = {}
        self.hurries = True

    @property
    def counted(self) -> Sequence[int]:
        """Ranks whose failure is the attempt's: all, but for those that are left out."""
        return [number for number in range(self.attempt.setting.ranks) if self._first_of(number) not in self._out]

    def turn(self) -> bool:
        """Start lost ranks again; True once all workers have ended."""
        attempt = self.attempt
        self._note_left()
        if all(rank.code == 0 for first in set(self._firsts) - self._out for rank in self._ranks_of(first)):
            attempt.end_others()
            return True
        if attempt.signals.first is None:
            for first in {self._first_of(number) for number in self.counted}:
                if lost := [number for number in self._numbers_of(first) if self._is_lost(number)]:
                    self._replace(lost[0])
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
            raise about_to_leave({number for first in self._leaving for number in self._numbers_of(first)})
        workers = [first for first in self._firsts[1:] if all(rank.code is None for rank in self._ranks_of(first))]
        if not workers:
            raise LaunchError(
                "one worker takes part, and a run cannot be smaller. Ctrl-C, or `paceline cancel`, saves and ends it."
            )
        first, board = workers[-1], self.attempt.board.read()
        if any(board[rank.number].phase == "starting" for rank in self._ranks_of(first)):
            raise LaunchError(f"{named(self._numbers_of(first))}: still starting. Ask again in a moment.")
        self._leaving.add(first)
        self.attempt.ranks[first].signal(LEAVE)
        return f"{named(self._numbers_of(first))} will leave after this piece; the others go on"

    def grow(self) -> str:
        """Start a worker again that has left, or was left out.

        Raises:
            LaunchError: all take part.
        """
        out = [first for first in self._firsts[1:] if all(rank.code is not None for rank in self._ranks_of(first))]
        if not out:
            raise all_take_part(self.workers, "workers")
        first = out[0]
        self._out.discard(first)
        self._leaving.discard(first)
        self._losses.pop(first, None)
        for rank in self._ranks_of(first):
            self.attempt.start_again(rank.number)
        self._tell_scaled(1, first)
        return f"{named(self._numbers_of(first))} will take pieces as soon as started"

    def _note_left(self) -> None:
        """Tell of workers that have left as they were asked to.

        Some may have been killed before their piece was done.
        """
        for first in sorted(self._leaving):
            ranks = self._ranks_of(first)
            if any(self._is_lost(rank.number) for rank in ranks):
                self._kill_rest(first)
            if any(rank.code is None for rank in ranks):
                continue
            self._leaving.discard(first)
            if all(rank.code == 0 or self._is_lost(rank.number) for rank in ranks):
                self._out.add(first)
                self._tell_scaled(-1, first)

    def _tell_scaled(self, by: int, first: int) -> None:
        if self.attempt.on_event:
            told = {"by": by, "ranks": self._numbers_of(first), "host": None, "epoch": 0}
            self.attempt.on_event("scaled", told)

    def _replace(self, number: int) -> None:
        """Start a lost rank again with its worker's others, unless it was lost too often."""
        first, end = self._first_of(number), self.attempt.ends()[number]
        why = self._why.pop(number, None) or killed(
            end, self.attempt.new_oom_kills(end), serves=not self._works(number)
        )
        self._kill_rest(first)
        again = noted(self._losses[first], time.monotonic()) <= self._most
        if again:
            try:
                for rank in self._ranks_of(first):
                    self.attempt.start_again(rank.number)
            except LaunchError as error:
                again, why = False, f"{why}; {error}"
        spared = first > 0 and self._works(number)
        if not again and spared:
            self._out.add(first)
        if self.attempt.on_event:
            waiting = [rank for rank in self._numbers_of(first) if rank != number]
            told = {"rank": number, "waiting": waiting, "reason": why, "stack": shortened(end.stack), "again": again}
            ends = not again and not spared
            self.attempt.on_event("lost", {**told, "ends": ends, "waits": False, "alone": True, "epoch": 0})

    def _kill_rest(self, first: int) -> None:
        """End the other ranks of a worker, before they tell of the loss."""
        for rank in self._ranks_of(first):
            if rank.code is None:
                rank.kill()
        self.attempt.wait_for_ends(self._numbers_of(first), _ENDED_WITHIN_S)
        for rank in self._ranks_of(first):
            rank.record.unlink(missing_ok=True)

    def _is_lost(self, number: int) -> bool:
        rank = self.attempt.ranks[number]
        return rank.code is not None and rank.code < 0 and not rank.record.exists()

    @property
    def _firsts(self) -> range:
        """The first rank of each worker."""
        return range(0, self.workers * self.size, self.size)

    def _works(self, number: int) -> bool:
        return number < self.workers * self.size

    def _first_of(self, number: int) -> int:
        """First rank of a rank's worker; a server is alone."""
        return number - number % self.size if self._works(number) else number

    def _numbers_of(self, first: int) -> list[int]:
        return list(range(first, first + (self.size if self._works(first) else 1)))

    def _ranks_of(self, first: int) -> list[StartedRank | RemoteRank]:
        return [self.attempt.ranks[number] for number in self._numbers_of(first)]
