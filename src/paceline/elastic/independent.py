"""Ranks that continue when others are lost, because no group joins all of them.

These are workers and servers of `sync=server`. A worker is one rank, or several that hold the model together; if one
of these is lost, all are started again. Servers end once all workers have ended. All workers except the first can leave
and come back, on request of `paceline scale` or together with their hosts. Generations list for the servers the workers
that take part.
"""

from __future__ import annotations

import math
import signal
import time
from collections import defaultdict
from collections.abc import Sequence, Set
from contextlib import suppress

from paceline.elastic.failure import ended_early, shortened
from paceline.elastic.membership import announce, noted
from paceline.elastic.ranks import Rank, Ranks
from paceline.elastic.recovery import Losses, Recovery, about_to_leave, all_take_part, cannot_shrink, most_losses, named
from paceline.errors import LaunchError
from paceline.wire.status import Generation

LEAVE = signal.SIGUSR1  # makes the first rank of a worker end the worker after its piece
# time for the other ranks of a lost worker to end after SIGKILL, and for other workers to end after the first worker
_ENDED_WITHIN_S = 5.0


def losses_of(ranks: Ranks) -> Losses:
    """Choose the loss handling of an attempt with these ranks."""
    if ranks.setting.workers is not None:
        return Independent(ranks)
    return Recovery(ranks) if ranks.setting.recovers or ranks.adopts else Losses(ranks)


class Independent(Losses):
    """Loss handling for workers and servers that no group joins.

    A worker other than the first is left out if it was lost too often, and the others take its pieces. A process of a
    server is left out likewise if the server has another process. The attempt ends without the first worker, or without
    all processes of a server. The run is done when the first worker has ended. After a signal to end the run, no rank
    is started again.

    Attributes:
        workers: number of workers. Their ranks come first and end by themselves; the other ranks serve them.
        size: number of ranks of a worker.
        copies: number of processes of a server.

    Raises:
        LaunchError: a host that the run needs to begin has not connected yet.
    """

    replaces = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        setting = ranks.setting
        self.workers, self.size, self.copies = setting.workers or 0, setting.replica_ranks, setting.server_copies
        self._most = most_losses()
        # by the first rank of a worker, or the only rank of a server
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._out: set[int] = set()  # absent workers and servers, by their first rank
        self._generation = Generation(-1, ())
        self._leaving: set[int] = set()
        self._done_at = math.inf  # time at which the end of the first worker was noticed
        self._begin_without_absent()

    @property
    def hurries(self) -> bool:
        """True while a rank starts."""
        return any(status.phase == "starting" for status in self.ranks.board.read())

    @property
    def too_few(self) -> str | None:
        """Error text that ends the run; None unless a worker ended too early."""
        board, ranks = self.ranks.board.read(), self.ranks
        workers = [n for n in range(self.workers * self.size) if self._first_of(n) not in self._out]
        early = [n for n in workers if ranks[n].code == 0 and board[n].phase != "done"]
        return f"{ended_early(self.ranks.ends()[early[0]])} The ranks were stopped." if early else None

    @property
    def counted(self) -> Sequence[int]:
        """Ranks whose failure counts as the attempt's failure.

        These are all ranks that are not left out. Once the first worker has ended, only its ranks count.
        """
        if self._first_has_ended:
            return self._numbers_of(0)
        return [number for number in range(self.ranks.setting.ranks) if self._first_of(number) not in self._out]

    def turn(self) -> bool:
        """Start lost ranks again; True once the run is done."""
        self._note_hosts()
        self._note_left()
        self._announce()
        if self._is_done():
            self.ranks.kill_all()
            return True
        self._end_stopped()
        for first in {self._first_of(number) for number in self.counted}:
            if lost := [number for number in self._numbers_of(first) if self._is_lost(number)]:
                self._replace(lost[0])
        return False

    def shrink(self) -> str:
        """Let the last worker leave after its piece.

        Raises:
            LaunchError: no worker can leave.
        """
        if self._leaving:
            raise about_to_leave({number for first in self._leaving for number in self._numbers_of(first)})
        workers = [first for first in self._firsts[1:] if all(rank.code is None for rank in self._ranks_of(first))]
        if not workers:
            raise cannot_shrink("worker")
        first, board = workers[-1], self.ranks.board.read()
        if any(board[rank.number].phase == "starting" for rank in self._ranks_of(first)):
            raise LaunchError(
                "scale.still_starting",
                "{workers}: still starting. Try again in a moment.",
                workers=named(self._numbers_of(first)),
            )
        self._leaving.add(first)
        self.ranks[first].signal(LEAVE)
        return f"{named(self._numbers_of(first))} will leave after this piece; the others go on"

    def grow(self) -> str:
        """Start a worker again that has left, or was left out.

        Raises:
            LaunchError: all workers take part, or are awaited.
        """
        ended = [first for first in self._firsts[1:] if all(rank.code is not None for rank in self._ranks_of(first))]
        # a host of this absent worker is lost
        out = [first for first in ended if not any(map(self.ranks.is_away, self._numbers_of(first)))]
        if not out:
            if ended:
                self._must_not_be_awaited()
                raise LaunchError(
                    "scale.left_out",
                    "the host of {workers} was lost too often and is left out. To use it again, end the run "
                    "(Ctrl-C saves) and continue with --resume.",
                    workers=named(ended),
                )
            raise all_take_part(self.workers, "workers")
        first = out[0]
        self._out.discard(first)
        self._leaving.discard(first)
        self._losses.pop(first, None)
        try:
            self._start(first)
        except LaunchError:
            self._out.add(first)
            raise
        self.tell("scaled", by=1, ranks=self._numbers_of(first), host=None)
        return f"{named(self._numbers_of(first))} will take pieces as soon as started"

    def _begin_without_absent(self) -> None:
        remote = self.ranks.remote
        for link in remote.spared if remote else ():
            places = enumerate(self.ranks.setting.places)
            numbers = [number for number, place in places if place.number == link.number]
            if not self._can_go(numbers):
                raise LaunchError(
                    "hosts.first_worker_missing",
                    "this run cannot begin without {missing}, which has the first worker or all processes of a "
                    "server. Start more hosts.",
                    missing=link.who,
                )
            firsts = {self._first_of(number) for number in numbers}
            self._out |= firsts
            self._await(link.number, sorted(firsts))

    def _note_hosts(self) -> None:
        """Continue without lost hosts, and start the ranks of hosts that are back."""
        remote = self.ranks.remote
        if remote is None or self.ending:
            return
        for link, numbers, why in remote.spare(self._can_go):
            there, now = {self._first_of(number) for number in numbers}, time.monotonic()
            lost = sorted(there - self._out)
            for first in lost:
                self._kill_rest(first)
            self._out.update(lost)
            again = self._await(
                link.number,
                [n for n in lost if noted(self._losses[n], now) <= self._most],
                # workers that have already lost another host
                needed=any(there & set(firsts) for firsts in self._away.values()),
            )
            self._tell_host_lost(link, numbers, why, again=again, alone=True)
        for link in remote.returned():
            firsts = [first for first in self._away.pop(link.number, []) if not self._waits_for_another(first)]
            self._out.difference_update(firsts)
            numbers = [number for first in firsts for number in self._numbers_of(first)]
            self.tell("host_back", host=link.name, number=link.number, ranks=numbers)
            for first in firsts:
                with suppress(LaunchError):  # the next turn starts it again, or leaves it out
                    self._start(first)

    def _is_done(self) -> bool:
        """True once all workers have ended.

        Also true if the first worker has ended, and the others had enough time to end.
        """
        if all(rank.code == 0 for first in set(self._firsts) - self._out for rank in self._ranks_of(first)):
            return True
        now = time.monotonic()
        self._done_at = min(self._done_at, now) if self._first_has_ended else math.inf
        return now - self._done_at > _ENDED_WITHIN_S

    @property
    def _first_has_ended(self) -> bool:
        return all(rank.code == 0 for rank in self._ranks_of(0))

    def _end_stopped(self) -> None:
        """Kill the ranks that have been stopped by SIGSTOP for too long.

        There are two exceptions, which apply until the run ends. If all ranks are stopped, none is killed: the whole
        run was suspended. A server's process is killed only if another process of that server runs.
        """
        alive = [number for number in self.counted if self.ranks[number].code is None]
        late, ending = self.ranks.stopped_too_long(alive), self.ending
        held = {number for number in self.ranks.stopped_now if not self._works(number)}
        for number in late if ending or len(self.ranks.stopped_now) < len(alive) else ():
            if ending or self._works(number) or self._serves_without(held):
                self._why[number] = self.ranks.kill_hung(number)

    def _can_go(self, numbers: Sequence[int]) -> bool:
        """True if the run can continue without these ranks.

        It needs the first worker, and a process of each server.
        """
        firsts = {self._first_of(number) for number in numbers}
        return 0 not in firsts and self._serves_without(firsts)

    def _serves_without(self, gone: Set[int]) -> bool:
        """True if each server has a process that is not in `gone`."""
        begin, gone = self.workers * self.size, self._out | gone
        servers = (range(part, part + self.copies) for part in range(begin, self.ranks.setting.ranks, self.copies))
        return not any(gone.issuperset(server) for server in servers)

    def _await(self, host: int, firsts: Sequence[int], *, needed: bool = False) -> bool:
        """Start these workers and servers when their lost host is back.

        Return False if the host may not come back.
        """
        assert self.ranks.remote is not None
        comes = self.ranks.remote.expect(host, again=bool(firsts) or needed)
        self._away[host] = list(firsts) if comes else []
        return comes

    def _waits_for_another(self, first: int) -> bool:
        """True for a worker that has lost another host, too.

        The worker is started when that host is back.
        """
        remote, places = self.ranks.remote, self.ranks.setting.places
        lost = {link.number for link in remote.links if link.lost is not None} if remote else set()
        others = sorted(lost & {places[number].number for number in self._numbers_of(first)})
        if others:
            self._away.setdefault(others[0], []).append(first)
        return bool(others)

    def _announce(self) -> None:
        """Announce the workers that take part to the servers, if they have changed."""
        members = tuple(number for number in range(self.ranks.setting.ranks) if self._first_of(number) not in self._out)
        if members == self._generation.members:
            return
        self._generation = Generation(self._generation.number + 1, members)
        announce(self.ranks.board, self.ranks.folder, self._generation, self._generation)
        if self.ranks.remote:
            self.ranks.remote.announce(self._generation, self._generation)

    def _note_left(self) -> None:
        """Record the workers that have left on request.

        Some of them may have been killed before they completed their piece.
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
                self.tell("scaled", by=-1, ranks=self._numbers_of(first), host=None)

    def _replace(self, number: int) -> None:
        """Start a lost rank again, with the other ranks of its worker.

        The rank is left out if it was lost too often, or if the run is ending.
        """
        first, end, ending = self._first_of(number), self.ranks.ends()[number], self.ending
        spared = self._can_go(self._numbers_of(first))
        if ending and not spared:
            return  # the rank stays lost, and the attempt ends
        code, why = self._cause(end, serves=not self._works(number))
        self._kill_rest(first)
        again = noted(self._losses[first], time.monotonic()) <= self._most and not ending
        if again:
            try:
                self._start(first)
            except LaunchError as error:
                again, why = False, f"{why}; {error}"
        if not again and spared:
            self._out.add(first)
        waiting = [rank for rank in self._numbers_of(first) if rank != number]
        told = {"rank": number, "waiting": waiting, "reason": why, "code": code, "again": again}
        told["stack"] = shortened(end.stack)
        if end.code != -signal.SIGTERM or not ending:  # else it was starting, and SIGTERM ended it as intended
            self.tell("lost", ends=not again and not spared, ending=ending, waits=False, alone=True, **told)

    def _start(self, first: int) -> None:
        """Start all ranks of a worker, or a server, again.

        Raises:
            LaunchError: a rank could not be started. All ranks of the worker have been ended.
        """
        try:
            for number in self._numbers_of(first):
                self.ranks.start_again(number)
        except LaunchError:
            self._kill_rest(first)
            raise

    def _kill_rest(self, first: int) -> None:
        """End the other ranks of a worker before they report the loss."""
        for rank in self._ranks_of(first):
            if rank.code is None:
                rank.kill()
        self.ranks.wait_for_ends(self._numbers_of(first), _ENDED_WITHIN_S)
        for rank in self._ranks_of(first):
            rank.record.unlink(missing_ok=True)

    def _is_lost(self, number: int) -> bool:
        return self.ranks.was_killed(number) and not self.ranks.is_away(number)  # then its host is lost

    @property
    def _firsts(self) -> range:
        return range(0, self.workers * self.size, self.size)

    def _works(self, number: int) -> bool:
        return number < self.workers * self.size

    def _first_of(self, number: int) -> int:
        """First rank of a rank's worker; a server has one rank."""
        return number - number % self.size if self._works(number) else number

    def _numbers_of(self, first: int) -> list[int]:
        return list(range(first, first + (self.size if self._works(first) else 1)))

    def _ranks_of(self, first: int) -> list[Rank]:
        return [self.ranks[number] for number in self._numbers_of(first)]
