"""Recovery of an attempt while it runs: lost ranks are replaced.

`membership.py` decides; here its decisions meet processes, the status board and other hosts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from paceline.elastic.failure import hang, killed, shortened
from paceline.elastic.hosts.hosts import WAIT, hosts_wait_s
from paceline.elastic.hosts.link import AbsentLink
from paceline.elastic.hosts.messages import Past
from paceline.elastic.hosts.remote import RemoteRank, RemoteRanks
from paceline.elastic.membership import MOST_LOSSES, Membership, announce
from paceline.elastic.scaling import Scaling
from paceline.errors import LaunchError
from paceline.generation import Generation
from paceline.units import count
from paceline.wire.status import RankStatus

if TYPE_CHECKING:
    from paceline.elastic.attempt import Attempt

LOSSES = "PACELINE_LOSSES_PER_HOUR"  # of one rank, which is left out then
STOPPED_S = 5.0  # a rank that SIGSTOP holds for so long is taken for lost


class Recovery:
    """Generations of one attempt.

    Args:
        generation: that has begun already; None begins with all ranks.
    """

    def __init__(self, attempt: Attempt, generation: Generation | None = None) -> None:
        self.attempt = attempt
        self.membership = Membership(attempt.setting.ranks, most_losses(), attempt.setting.replica_ranks)
        self.meets = True  # some ranks are on their way to the newest generation
        self._announced = -1, -1
        self._handled: set[int] = set()  # ranks whose present process has ended, and that is noted
        self._away: dict[int, list[int]] = {}  # ranks to start when their host is back, by its number
        self._why: dict[int, str] = {}  # a rank that was killed here had been hung
        self._stopped = StoppedRanks(attempt)
        self._nobody_since = math.inf
        self.scaling = Scaling(self)
        if generation is None:
            self._begin_without_absent()
        else:
            self._go_on_in(generation)
        self._hold_if_too_few()
        self._announce()

    def _begin_without_absent(self) -> None:
        """Begin without the ranks of hosts that have not come yet."""
        remote = self.attempt.remote
        if remote is None or not remote.spared:
            return
        self._await_spared(remote)
        self.membership.begin_without(set(self._handled))
        if self.membership.hopeless:
            raise LaunchError(
                f"this run cannot begin without {', '.join(link.who for link in remote.spared)}: no replica of its "
                f"plan is whole, each has {self.attempt.setting.replica_ranks} ranks. Start more hosts."
            )

    def _go_on_in(self, generation: Generation) -> None:
        """Go on with what another coordinator has noted."""
        remote, membership = self.attempt.remote, self.membership
        assert remote is not None
        past = remote.hosts.past
        membership.current = generation
        membership.remember(past.losses, time.monotonic())
        membership.release(set(past.released))
        membership.left_out.update(past.left_out)
        self._handled.update(past.left_out)
        away = self._await_spared(remote)
        membership.left_out |= away
        membership.away |= away

    def _await_spared(self, remote: RemoteRanks) -> set[int]:
        """Await the hosts that are not there; returns ranks that are started when they come."""
        away = set()
        for link in remote.spared:
            ranks = self.ranks_of(link.number)
            self._handled |= ranks
            self._away[link.number] = sorted(ranks - self.membership.left_out)
            if remote.expect(link.number, again=bool(self._away[link.number])):
                away.update(self._away[link.number])
        return away

    def ranks_of(self, host: int) -> set[int]:
        """Ranks on a host, by number."""
        return {rank for rank, place in enumerate(self.attempt.setting.places) if place.number == host}

    @property
    def hurries(self) -> bool:
        """True while others wait for ranks on their way to a generation, or stopped."""
        return self.meets or bool(self._stopped.now)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part; those that join do when they have met the others."""
        return self.membership.current.members

    @property
    def counted(self) -> Sequence[int]:
        """Ranks whose failure is the attempt's.

        Those that take part, or all once no replica can be whole again, or the run is to end and nobody takes part.
        """
        nobody = not self.members and self.attempt.signals.first is not None
        return range(self.attempt.setting.ranks) if self.membership.hopeless or nobody else self.members

    def start_once_ready(self, number: int) -> None:
        """Start the ranks of a host once that is ready."""
        ranks = self.ranks_of(number)
        self._away[number] = sorted(ranks - self.membership.left_out)
        self._handled |= ranks
        self.membership.left_out |= ranks

    def turn(self) -> bool:
        """Act on what has happened since the last turn; True once all is done.

        A rank that raised is no loss: the others would raise the same.
        """
        attempt = self.attempt
        codes = [attempt.ranks[number].code for number in self.members]
        if codes and all(code == 0 for code in codes):
            attempt.end_others()
            return True
        if attempt.signals.first is None and 0 not in codes:
            self._note_losses()
            self._start_on_returned()
        self._end_stopped()
        self._note()
        self.scaling.turn()
        self._end_wait()
        return False

    def end(self, hung: Sequence[RankStatus]) -> bool:
        """Kill ranks that hang; True if killed.

        Not where some of every replica do, or all of the only one.
        """
        numbers = {status.rank for status in hung}
        one_replica = self.attempt.setting.replica_ranks == self.attempt.setting.ranks
        hit = {rank for number in numbers for rank in self.membership.replica_of(number)}
        if set(self.members) <= (numbers if one_replica else hit):
            return False
        self.attempt.ask_for_stacks(numbers)
        for number in numbers:
            self._why[number] = kill_hung(self.attempt, number)
        return True

    def _end_wait(self) -> None:
        """End a wait for hosts without which nobody goes on.

        After a signal, or when they have been waited for long enough.
        """
        now = time.monotonic()
        self._nobody_since = math.inf if self.members else min(self._nobody_since, now)
        waited = self.attempt.signals.first is not None or now - self._nobody_since > hosts_wait_s()
        if waited and not self.members and self.membership.away:
            self.membership.away.clear()
            if self.attempt.remote:
                self.attempt.remote.spared.clear()

    def _hold_if_too_few(self) -> None:
        """Let nobody go on while fewer hosts are there than the least."""
        hosts = self.attempt.remote.hosts if self.attempt.remote else None
        self.membership.held = hosts is not None and hosts.too_few

    @property
    def too_few(self) -> str | None:
        """Sentence that ends a run without enough hosts; None while some may come."""
        waits = self.membership.away or math.isinf(self._nobody_since)
        if not self.membership.held or waits or self.attempt.signals.first is not None:
            return None
        assert self.attempt.remote is not None
        hosts = self.attempt.remote.hosts
        came = [link for link in hosts.links if not isinstance(link, AbsentLink)]
        lost = ", ".join(link.who for link in came if link.lost is not None)
        return (
            f"{count(hosts.there, 'host')} left, and this run goes on with {hosts.least} at least: {lost} did not come "
            f"back within {hosts_wait_s():g} s ({WAIT}), or was lost too often; the ranks were stopped. Go on with "
            f"--resume and {hosts.least} hosts, or a smaller least (--hosts {hosts.there}..{len(hosts.links) + 1})."
        )

    def _end_stopped(self) -> None:
        """Kill members that SIGSTOP holds for too long: the others would wait until their deadline."""
        late, ending = self._stopped.too_long(self.members), self.attempt.signals.first is not None
        for number in late if ending or len(self._stopped.now) < len(self.members) else ():
            self._why[number] = kill_hung(self.attempt, number)

    def _may_be_spared(self, number: int) -> bool:
        """True if the run can go on without that rank."""
        rank = self.attempt.ranks[number]
        if number not in self.members or self.is_away(number):
            return True
        return rank.code is not None and rank.code < 0 and not rank.record.exists()

    def is_away(self, number: int) -> bool:
        """True for a rank whose host is lost."""
        rank = self.attempt.ranks[number]
        return isinstance(rank, RemoteRank) and rank.link.lost is not None

    def _note_losses(self) -> None:
        """Leave out ranks that have ended since the last turn, in one generation."""
        attempt = self.attempt
        hosts = attempt.remote.spare() if attempt.remote else []
        ended = {rank.number for rank in attempt.ranks if rank.code is not None} - self._handled
        lost = {number for number in ended if self._may_be_spared(number)}
        if not lost and not hosts:
            return
        coming = {number for link, _, _ in hosts for number in self._away.get(link.number, [])}  # not yet started
        self._hold_if_too_few()
        again = self.membership.lost_together(lost | coming, time.monotonic())
        # before anything else: the others wait in vain until they are told
        self._announce()
        for link, numbers, why in hosts:
            self._handled.update(numbers)
            away = {*numbers, *self._away.get(link.number, [])}
            self._away[link.number] = sorted(away & again)
            self.membership.left_out |= away  # until it is back
            assert attempt.remote is not None
            again_there = attempt.remote.expect(link.number, again=bool(away & again))
            self.membership.away |= away & again if again_there else set()
            goes_on = self.members or not (again_there or self.membership.hopeless)
            waits_s = None if goes_on else hosts_wait_s() if again_there else 0.0
            returns = attempt.remote.hosts.returns
            told = {"ranks": numbers, "reason": why, "again": again_there, "waits_s": waits_s}
            told["revived"] = again_there and returns is not None and returns.revives
            self.tell("host_lost", host=link.name, number=link.number, **told)
        for number in sorted(lost - self._handled):
            if number in self.scaling.leaving:
                self._handled.add(number)
            else:
                self._replace(number, again=number in again)

    def _start_on_returned(self) -> None:
        """Start the ranks of hosts that have come back."""
        for link in self.attempt.remote.returned() if self.attempt.remote else ():
            numbers = self._away.pop(link.number, [])
            self.membership.left_out.difference_update(numbers)
            self.membership.away.difference_update(numbers)
            # a later coordinator is told with the event
            self.tell("host_back", host=link.name, number=link.number, ranks=numbers)
            self._hold_if_too_few()
            self.start(numbers)

    def start(self, numbers: Sequence[int]) -> None:
        """Start ranks whose processes have ended.

        Raises:
            LaunchError: a rank could not be started.
        """
        for number in numbers:
            self.attempt.start_again(number)
            self._handled.discard(number)

    def forget(self, numbers: Sequence[int]) -> None:
        """Take the ends of ranks for no losses."""
        self._handled.update(numbers)

    @property
    def awaited(self) -> list[int]:
        """Numbers of hosts that may come, and have not."""
        return sorted(number for number, ranks in self._away.items() if ranks)

    def await_host(self, number: int, ranks: Set[int]) -> None:
        """Have the ranks of a host started when it comes."""
        assert self.attempt.remote is not None
        self._away[number] = sorted(ranks)
        self.membership.left_out |= ranks
        self.attempt.remote.expect(number, again=True)

    def _replace(self, number: int, *, again: bool) -> None:
        """Start a lost rank again, unless it is left out."""
        end = self.attempt.ends()[number]
        why = self._why.pop(number, None)
        if why is None:
            was_killed = end.code is not None and end.code < 0
            why = killed(end, self.attempt.new_oom_kills(end)) if was_killed else f"rank {number} failed"
        if again:
            try:
                self.attempt.start_again(number)
            except LaunchError as error:
                again, why = False, f"{why}; {error}"
        if not again:
            self._handled.add(number)
            self.membership.left_out.add(number)
        waiting = [n for n in self.membership.replica_of(number) if self.attempt.ranks[n].code is None and n != number]
        told = {"reason": why, "stack": shortened(end.stack), "again": again, "waits": not self.members}
        self.tell("lost", rank=number, waiting=waiting, **told)

    def tell(self, event: str, **details: Any) -> None:
        """Record an event, with the generation."""
        if self.attempt.remote:
            self.attempt.remote.hosts.past = self._past()
        if self.attempt.on_event:
            self.attempt.on_event(event, {**details, "generation": self.membership.current.number})

    def _past(self) -> Past:
        """Losses that a later coordinator has to know of."""
        membership = self.membership
        out = membership.left_out.difference(*self._away.values())
        return Past(membership.losses_before(time.monotonic()), sorted(out), sorted(membership.released))

    def _note(self) -> None:
        """Take in what the board shows."""
        membership, before = self.membership, self.membership.newest
        alive = [status for status in self.attempt.board.read() if self.attempt.ranks[status.rank].code is None]
        joining = {status.rank for status in alive if status.phase == "joining"}
        membership.note({status.rank: status.generation for status in alive}, joining)
        self.meets = any(status.generation != membership.newest.number for status in alive)
        self._announce()
        if (joined := set(membership.newest.members) - set(before.members)) and self.attempt.on_event:
            self.attempt.on_event("joins", {"ranks": sorted(joined), "generation": membership.newest.number})

    def _announce(self) -> None:
        """Tell the ranks of the generations that are new."""
        current, newest = self.membership.current, self.membership.newest
        if (current.number, newest.number) == self._announced:
            return
        self._announced = current.number, newest.number
        announce(self.attempt.board, self.attempt.folder, current, newest)
        if self.attempt.remote:
            self.attempt.remote.announce(current, newest)


class StoppedRanks:
    """Ranks that SIGSTOP holds.

    Attributes:
        now: ranks that were stopped at the last look.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.now: set[int] = set()
        self._ran_at: dict[int, float] = {}  # when each rank was last seen running

    def too_long(self, numbers: Sequence[int]) -> list[int]:
        """Return the ranks that have been stopped for too long; they count as lost."""
        now, limit_s = time.monotonic(), min(STOPPED_S, self.attempt.setting.deadline_s / 2)
        self.now = {number for number in numbers if self.attempt.ranks[number].stopped}
        self._ran_at = {n: self._ran_at.get(n, now) if n in self.now else now for n in numbers}
        return sorted(number for number in self.now if now - self._ran_at[number] > limit_s)


def kill_hung(attempt: Attempt, number: int) -> str:
    """Kill a rank that makes no progress, and return a sentence about it."""
    ends = attempt.ends()
    attempt.ranks[number].kill()
    # after the semicolon come the advice, which is for runs that end, and the stack
    return hang([ends[number]], ends, time.monotonic_ns()).text.partition(";")[0]


def most_losses() -> int:
    """Losses of one rank in an hour after which it is left out."""
    wanted = os.environ.get(LOSSES, str(MOST_LOSSES))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise LaunchError(f"{LOSSES}={wanted} is no number of losses after which a rank is left out: at least 1")
    return int(wanted)
