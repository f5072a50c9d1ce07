"""Ranks that continue when other ranks are lost, because they share no process group.

These are the workers and servers of `sync=server`. A worker is one rank, or several ranks that hold the model together.
If one rank of a worker is lost, all its ranks are started again. Servers end once all workers have ended. All workers
except the first can leave and come back, either when `paceline scale` requests it or together with their hosts. Each
generation tells the servers which workers take part.
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

# signal to the first rank of a worker, which then ends the worker after its current piece of work
LEAVE = signal.SIGUSR1
# time for the ranks of a lost worker to end after SIGKILL, and for the other workers to end after the first worker
_ENDED_WITHIN_S = 5.0


def losses_of(ranks: Ranks) -> Losses:
    """Choose how an attempt with these ranks handles losses."""
    if ranks.setting.workers is not None:
        return Independent(ranks)
    return Recovery(ranks) if ranks.setting.recovers or ranks.adopts else Losses(ranks)


class Independent(Losses):
    """Loss handling for workers and servers, which share no process group.

    If a worker other than the first is lost too often, it is left out, and the other workers take over its pieces of
    work. A process of a server is left out in the same way if the server has another process. The attempt ends if the
    first worker, or every process of a server, cannot be started again. The run is done when the first worker has
    ended. After a signal to end the run, no rank is started again.

    Attributes:
        workers: number of workers. The ranks of workers have the lowest numbers; all other ranks are servers.
        size: number of ranks per worker.
        copies: number of processes per server.

    Raises:
        LaunchError: the first worker, or all processes of a server, are on a host that has not connected yet.
    """

    replaces = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        setting = ranks.setting
        self.workers, self.size, self.copies = setting.workers or 0, setting.replica_ranks, setting.server_copies
        self._most = most_losses()
        # losses of each worker or server process, indexed by its first rank
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._out: set[int] = set()  # first ranks of absent workers and of absent server processes
        self._generation = Generation(-1, ())
        self._leaving: set[int] = set()
        self._done_at = math.inf  # time at which the first worker was found to have ended
        self._begin_without_absent()

    @property
    def hurries(self) -> bool:
        """True while a rank is starting."""
        return any(status.phase == "starting" for status in self.ranks.board.read())

    @property
    def too_few(self) -> str | None:
        """Error text that ends the run if a worker ended too early; otherwise None."""
        board, ranks = self.ranks.board.read(), self.ranks
        workers = [n for n in range(self.workers * self.size) if self._first_of(n) not in self._out]
        early = [n for n in workers if ranks[n].code == 0 and board[n].phase != "done"]
        return f"{ended_early(self.ranks.ends()[early[0]])} The ranks were stopped." if early else None

    @property
    def counted(self) -> Sequence[int]:
        """Ranks whose failure makes the attempt fail.

        These are all ranks that are not left out. Once the first worker has ended, these are only the ranks of that
        worker.
        """
        if self._first_has_ended:
            return self._numbers_of(0)
        return [number for number in range(self.ranks.setting.ranks) if self._first_of(number) not in self._out]

    def turn(self) -> bool:
        """Start lost ranks again; return True once the run is done."""
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
        """Let the last worker leave after its current piece of work.

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
                "{workers} cannot leave before the start is complete. Try again in a moment.",
                workers=named(self._numbers_of(first)),
            )
        self._leaving.add(first)
        self.ranks[first].signal(LEAVE)
        return f"{named(self._numbers_of(first))} will leave after this piece; the others go on"

    def grow(self) -> str:
        """Restart a worker that has left or was left out.

        Raises:
            LaunchError: all workers take part already, or their hosts may still come back.
        """
        ended = [first for first in self._firsts[1:] if all(rank.code is not None for rank in self._ranks_of(first))]
        # a worker with a lost host cannot be started
        out = [first for first in ended if not any(map(self.ranks.is_away, self._numbers_of(first)))]
        if not out:
            if ended:
                self._must_not_be_awaited()
                raise LaunchError(
                    "scale.left_out",
                    "the host of {workers} was lost too often and is left out. To use this host again, end the run "
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
                # True if a worker that has also lost another host needs this host
                needed=any(there & set(firsts) for firsts in self._away.values()),
            )
            self._tell_host_lost(link, numbers, why, again=again, alone=True)
        for link in remote.returned():
            firsts = [first for first in self._away.pop(link.number, []) if not self._waits_for_another(first)]
            self._out.difference_update(firsts)
            numbers = [number for first in firsts for number in self._numbers_of(first)]
            self.tell("host_back", host=link.name, number=link.number, ranks=numbers)
            for first in firsts:
                with suppress(LaunchError):  # the next turn starts the worker again, or leaves it out
                    self._start(first)

    def _is_done(self) -> bool:
        """True once all workers have ended.

        The result is also true if the first worker has ended, and the other workers had enough time to end.
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
        """Kill ranks that SIGSTOP has suspended for too long.

        There are two exceptions, which apply until the run is ending. If all ranks are suspended, none is killed,
        because a user has suspended the whole run. A server's process is killed only if another process of that server
        runs.
        """
        alive = [number for number in self.counted if self.ranks[number].code is None]
        late, ending = self.ranks.stopped_too_long(alive), self.ending
        held = {number for number in self.ranks.stopped_now if not self._works(number)}
        for number in late if ending or len(self.ranks.stopped_now) < len(alive) else ():
            if ending or self._works(number) or self._serves_without(held):
                self._kill_hung(number, ())

    def _can_go(self, numbers: Sequence[int]) -> bool:
        """True if the run can continue without these ranks.

        A run needs the first worker, and at least one process of each server.
        """
        firsts = {self._first_of(number) for number in numbers}
        return 0 not in firsts and self._serves_without(firsts)

    def _serves_without(self, gone: Set[int]) -> bool:
        """True if each server has a running process outside `gone`."""
        begin, gone = self.workers * self.size, self._out | gone
        servers = (range(part, part + self.copies) for part in range(begin, self.ranks.setting.ranks, self.copies))
        return not any(gone.issuperset(server) for server in servers)

    def _await(self, host: int, firsts: Sequence[int], *, needed: bool = False) -> bool:
        """Register workers and servers to start when their lost host comes back.

        The result is True if the host may come back.
        """
        assert self.ranks.remote is not None
        comes = self.ranks.remote.expect(host, again=bool(firsts) or needed)
        self._away[host] = list(firsts) if comes else []
        return comes

    def _waits_for_another(self, first: int) -> bool:
        """True if another host of this worker is lost as well.

        The worker is then started when the other host comes back.
        """
        remote, places = self.ranks.remote, self.ranks.setting.places
        lost = {link.number for link in remote.links if link.lost is not None} if remote else set()
        others = sorted(lost & {places[number].number for number in self._numbers_of(first)})
        if others:
            self._away.setdefault(others[0], []).append(first)
        return bool(others)

    def _announce(self) -> None:
        """Announce to the servers the workers that take part, if these have changed."""
        members = tuple(number for number in range(self.ranks.setting.ranks) if self._first_of(number) not in self._out)
        if members == self._generation.members:
            return
        self._generation = Generation(self._generation.number + 1, members)
        announce(self.ranks.board, self.ranks.folder, self._generation, self._generation)
        if self.ranks.remote:
            self.ranks.remote.announce(self._generation, self._generation)

    def _note_left(self) -> None:
        """Record the workers that have left after a request.

        Some of these workers may have been killed before they completed their piece of work.
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
        """Restart all ranks of the worker that has lost a rank.

        The worker is left out if it was lost too often, or if the run is ending.
        """
        first, end, ending = self._first_of(number), self.ranks.ends()[number], self.ending
        spared = self._can_go(self._numbers_of(first))
        if ending and not spared:
            return  # the rank is not replaced, and the attempt ends
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
        if end.code != -signal.SIGTERM or not ending:  # otherwise SIGTERM ended the rank during its start, as intended
            self.tell("lost", ends=not again and not spared, ending=ending, waits=False, alone=True, **told)

    def _start(self, first: int) -> None:
        """Restart all ranks of a worker, or one process of a server.

        Raises:
            LaunchError: a rank could not be started. All ranks of the worker were then killed.
        """
        try:
            for number in self._numbers_of(first):
                self.ranks.start_again(number)
        except LaunchError:
            self._kill_rest(first)
            raise

    def _kill_rest(self, first: int) -> None:
        """Kill the remaining ranks of a worker, and remove their error reports about the loss."""
        for rank in self._ranks_of(first):
            if rank.code is None:
                rank.kill()
        self.ranks.wait_for_ends(self._numbers_of(first), _ENDED_WITHIN_S)
        for rank in self._ranks_of(first):
            rank.record.unlink(missing_ok=True)

    def _is_lost(self, number: int) -> bool:
        # a rank that is away is lost together with its host
        return self.ranks.was_lost(number) and not self.ranks.is_away(number)

    @property
    def _firsts(self) -> range:
        return range(0, self.workers * self.size, self.size)

    def _works(self, number: int) -> bool:
        return number < self.workers * self.size

    def _first_of(self, number: int) -> int:
        """Return the first rank of a rank's worker. For a process of a server, return the rank itself."""
        return number - number % self.size if self._works(number) else number

    def _numbers_of(self, first: int) -> list[int]:
        return list(range(first, first + (self.size if self._works(first) else 1)))

    def _ranks_of(self, first: int) -> list[Rank]:
        return [self.ranks[number] for number in self._numbers_of(first)]
