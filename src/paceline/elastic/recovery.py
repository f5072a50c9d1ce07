"""Recovery of a running attempt after losses, and changes of its size.

Lost ranks are replaced, and `paceline scale` makes the run larger or smaller. `membership.py` makes the decisions. This
module applies them to processes, the status board and other hosts. `independent.py` does the same for ranks that share
no process group. A scaling request is a file in the run's directory, where only the owner of the run can write. The
launcher reads the request, and writes its answer to a second file in that directory.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from paceline.elastic.departures import Departures
from paceline.elastic.failure import RankEnd, killed, lost_device, shortened
from paceline.elastic.hosts.hosts import WAIT, RemoteRanks, hosts_wait_s
from paceline.elastic.hosts.link import AbsentLink, Link
from paceline.elastic.hosts.messages import Past
from paceline.elastic.membership import MOST_LOSSES, Membership, announce
from paceline.elastic.place import NEEDS
from paceline.elastic.ranks import Ranks
from paceline.elastic.stall import Stall
from paceline.errors import LaunchError
from paceline.files import read_text, write_whole
from paceline.units import count
from paceline.wire.status import Generation, RankStatus

LOSSES = "PACELINE_LOSSES_PER_HOUR"  # number of losses per hour after which a rank is left out
_NAME, _LIMIT = "scale-", 65536  # prefix of the names of request files, and largest size of a request in bytes
_LOOK_S = 0.1
_ENDED_WITHIN_S = 1.0  # longest wait for ranks that were killed because they leave


class Losses:
    """Base class for the loss handling of an attempt. Here, the loss of one rank ends the attempt.

    `Recovery` and `Independent` replace lost ranks. With `Recovery`, all other replicas continue together. With
    `Independent`, each worker and server continues by itself.

    Attributes:
        replaces: True if lost ranks are restarted.
    """

    replaces: ClassVar[bool] = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # errors of processes that the launcher killed because they hung, by the rank's number and process id
        self._why: dict[tuple[int, int], LaunchError] = {}
        # ranks to start when their host is back, indexed by the number of the host
        self._away: dict[int, list[int]] = {}

    @property
    def hurries(self) -> bool:
        """True while running ranks wait for ranks that are starting."""
        return False

    @property
    def too_few(self) -> str | None:
        """Error text if too few ranks or hosts remain to continue; otherwise None."""
        return None

    @property
    def counted(self) -> Sequence[int]:
        """Ranks whose failure makes the attempt fail."""
        return range(self.ranks.setting.ranks)

    def turn(self) -> bool:
        """Handle the events since the last call; return True once the run is done.

        A rank that raised an exception does not count as lost, because the other ranks would raise the same exception.
        """
        return False

    def heed(self) -> None:
        """Handle the notices of hosts. Here, a notice ends the run."""
        if self.ranks.remote and self.ranks.remote.hosts.notices:
            self.ranks.signals.first = self.ranks.signals.first or "SIGTERM"

    def shrink(self) -> str:
        """Make the run smaller: let one of its parts leave after a step.

        Raises:
            LaunchError: no part can leave.
        """
        raise LaunchError(
            "scale.not_elastic",
            "the plan of this run does not support recovery in place, which needs {needs}. The number of "
            "ranks therefore cannot change. End the run (Ctrl-C saves) and continue with --resume and "
            "another --plan.",
            needs=NEEDS,
        )

    def grow(self) -> str:
        """Make the run larger: start a part that was left out, or await its host.

        Raises:
            LaunchError: no part is left out, every left-out part is already expected, or a rank could not be started.
        """
        return self.shrink()

    def end(self, hung: Sequence[RankStatus], stall: Stall | None) -> bool:
        """Kill hung ranks if they can be replaced; return True if they were killed.

        Args:
            stall: the collective that a rank did not enter, if the positions of the ranks show it.
        """
        if not self.replaces:
            return False
        self.ranks.ask_for_stacks({status.rank for status in hung} - self.dying)
        for status in hung:
            self._kill_hung(status.rank, (), stall)
        return True

    @property
    def ending(self) -> bool:
        """True once a signal has requested the end of the run."""
        return self.ranks.signals.first is not None

    @property
    def dying(self) -> set[int]:
        """Ranks that the launcher has killed, but that have not ended yet. Their host may be slow to report the end."""
        return {number for number, pid in self._why if self.ranks[number].pid == pid}

    def _kill_hung(self, number: int, members: Sequence[int], stall: Stall | None = None) -> None:
        """Kill a rank that makes no progress. The first error about a process describes it best."""
        if number not in self.dying:
            why = self.ranks.kill_hung(number, members, stall)
            self._why[number, self.ranks[number].pid] = why

    def _cause(self, end: RankEnd, *, serves: bool = False) -> tuple[str, str]:
        """Return the code and text of the error that describes a rank's end."""
        number = end.status.rank
        if (why := self._why.pop((number, end.pid), None)) is not None:
            # the text after the semicolon applies only to runs that end
            return why.code, str(why).partition(";")[0]
        if end.record is not None and end.record.device:
            return "launch.device_failed", lost_device(end)
        if end.code is not None and end.code < 0:
            return "launch.rank_killed", killed(end, self.ranks.new_oom_kills(end), serves=serves)
        return "launch.rank_left", f"rank {number} failed"

    def _tell_host_lost(
        self, link: Link, numbers: list[int], why: str, *, again: bool, waits_s: float | None = None, **more: Any
    ) -> None:
        returns = self.ranks.remote.hosts.returns if self.ranks.remote else None
        told = {"host": link.name, "number": link.number, "ranks": numbers, "reason": why, "again": again}
        revived = again and returns is not None and returns.revives
        self.tell("host_lost", **told, waits_s=waits_s, revived=revived, **more)

    def tell(self, event: str, **details: Any) -> None:
        """Record an event. Ranks that share no process group have only generation 0."""
        self.ranks.tell(event, {**details, "generation": 0})

    def _must_not_be_awaited(self) -> None:
        """Raise LaunchError if an absent host may still join, which would make the run larger."""
        if hosts := ", ".join(str(number) for number, ranks in sorted(self._away.items()) if ranks):
            raise LaunchError(
                "scale.host_may_come",
                "host number {host} may still join, which makes the run larger. Start the same command on that host.",
                host=hosts,
            )


class Recovery(Losses):
    """Loss handling for ranks that train together, in the generations of one attempt.

    The first generation has all ranks, or the ranks that hosts have kept after the loss of a coordinator.
    """

    replaces = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.membership = Membership(ranks.setting.ranks, most_losses(), ranks.setting.replica_ranks)
        self._meets = True  # True while ranks are entering the newest generation
        self._announced = -1, -1
        self._handled: set[int] = set()  # ranks whose end was already handled
        self._nobody_since = math.inf
        self._leaving: set[int] = set()  # ranks that leave at the end of a step
        self._leaving_host: int | None = None  # the host that leaves with these ranks
        self._departures = Departures(ranks, self.membership)
        if ranks.adopts is None:
            self._begin_without_absent()
        else:
            self._go_on_in(ranks.adopts.generation)
        self._hold_if_too_few()
        self._announce()

    def _begin_without_absent(self) -> None:
        remote = self.ranks.remote
        if remote is None or not remote.spared:
            return
        self._await_spared(remote)
        self.membership.begin_without(set(self._handled))
        if self.membership.hopeless:
            raise LaunchError(
                "hosts.no_whole_replica",
                "this run cannot begin without {missing}: no replica of its plan is complete (each has {ranks} "
                "ranks). Start more hosts.",
                missing=[link.who for link in remote.spared],
                ranks=self.ranks.setting.replica_ranks,
            )

    def _go_on_in(self, generation: Generation) -> None:
        """Continue with the generation and the losses that the previous coordinator recorded."""
        remote, membership = self.ranks.remote, self.membership
        assert remote is not None
        past = remote.hosts.past
        membership.current = generation
        membership.remember(past.losses, time.monotonic())
        membership.release(set(past.released))
        membership.leave_out(set(past.left_out))
        self._handled.update(past.left_out)
        away = self._await_spared(remote)
        membership.leave_out(away, away)
        for link in remote.links:
            # the host has just come back; its ranks start once the host is ready
            if link.held is None and link.lost is None:
                there = self.ranks.on_host(link.number)
                self._away[link.number] = sorted(there - membership.left_out)
                self._handled |= there
                membership.leave_out(there)

    def _await_spared(self, remote: RemoteRanks) -> set[int]:
        """Expect absent hosts; return the ranks to start when these hosts connect."""
        away = set()
        for link in remote.spared:
            there = self.ranks.on_host(link.number)
            self._handled |= there
            self._away[link.number] = sorted(there - self.membership.left_out)
            if remote.expect(link.number, again=bool(self._away[link.number])):
                away.update(self._away[link.number])
        return away

    @property
    def hurries(self) -> bool:
        """True while ranks wait for other ranks that are entering a generation or are suspended."""
        return self._meets or bool(self.ranks.stopped_now)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part in the current generation."""
        return self.membership.current.members

    @property
    def counted(self) -> Sequence[int]:
        """Ranks that take part.

        If no replica can be whole again, or the run is ending and no rank takes part, these are all ranks.
        """
        nobody = not self.members and self.ending
        return range(self.ranks.setting.ranks) if self.membership.hopeless or nobody else self.members

    def turn(self) -> bool:
        codes = [self.ranks[number].code for number in self.members]
        if codes and all(code == 0 for code in codes):
            self.ranks.kill_all()  # this kills ranks that have not joined yet
            return True
        if not self.ending and 0 not in codes:
            self._note_losses()
            self._start_on_returned()
        self._end_stopped()
        self._note()
        self._end_left()
        self._end_departed()
        self._end_wait()
        return False

    def heed(self) -> None:
        self._departures.heed()

    def end(self, hung: Sequence[RankStatus], stall: Stall | None) -> bool:
        """See `Losses`.

        If every replica has a hung rank, or all ranks of the only replica hang, no rank is killed.
        """
        numbers = {status.rank for status in hung}
        one_replica = self.ranks.setting.replica_ranks == self.ranks.setting.ranks
        hit = {rank for number in numbers for rank in self.membership.replica_of(number)}
        return not set(self.members) <= (numbers if one_replica else hit) and super().end(hung, stall)

    def _end_wait(self) -> None:
        """Stop waiting for hosts that the run needs, when the wait is over.

        The wait is over after a signal, or when the time limit has passed.
        """
        now = time.monotonic()
        self._nobody_since = math.inf if self.members else min(self._nobody_since, now)
        waited = self.ending or now - self._nobody_since > hosts_wait_s()
        if waited and not self.members and self.membership.away:
            self.membership.away.clear()
            if self.ranks.remote:
                self.ranks.remote.spared.clear()

    def _hold_if_too_few(self) -> None:
        self.membership.held = self.ranks.remote is not None and self.ranks.remote.hosts.too_few

    @property
    def too_few(self) -> str | None:
        """Error text if too few hosts remain and no more may connect; otherwise None."""
        waits = self.membership.away or math.isinf(self._nobody_since)
        if not self.membership.held or waits or self.ending:
            return None
        assert self.ranks.remote is not None
        hosts = self.ranks.remote.hosts
        came = [link for link in hosts.links if not isinstance(link, AbsentLink)]
        lost = ", ".join(link.who for link in came if link.lost is not None)
        return (
            f"{count(hosts.there, 'host')} left, and this run goes on with {hosts.least} at least: {lost} did not come "
            f"back within {hosts_wait_s():g} s ({WAIT}), or was lost too often; the ranks were stopped. Go on with "
            f"--resume and {hosts.least} hosts, or a smaller least (--num-hosts {hosts.there}..{len(hosts.links) + 1})."
        )

    def _end_stopped(self) -> None:
        """Kill members that were suspended for too long.

        Without this, the other members would wait for the suspended members until the deadline.
        """
        late = self.ranks.stopped_too_long(self.members)
        for number in late if self.ending or len(self.ranks.stopped_now) < len(self.members) else ():
            self._kill_hung(number, self.members)

    def _note_losses(self) -> None:
        """Begin one generation without all ranks that have ended since the last turn."""
        ranks, remote, membership = self.ranks, self.ranks.remote, self.membership
        hosts = remote.spare() if remote else []
        ended = {rank.number for rank in ranks if rank.code is not None} - self._handled
        lost = {n for n in ended if n not in self.members or ranks.is_away(n) or ranks.was_lost(n)}
        if not lost and not hosts:
            return
        # ranks of lost hosts that have come back, but were not started yet
        coming = {number for link, _, _ in hosts for number in self._away.get(link.number, [])}
        self._hold_if_too_few()
        again = membership.lost_together(lost | coming, time.monotonic())
        # announced first, because the other ranks wait for the lost ranks until the announcement
        self._announce()
        for link, numbers, why in hosts:
            assert remote is not None
            self._handled.update(numbers)
            away = {*numbers, *self._away.get(link.number, [])}
            self._away[link.number] = sorted(away & again)
            comes = remote.expect(link.number, again=bool(away & again))
            membership.leave_out(away, away & again if comes else set())
            goes_on = self.members or not (comes or membership.hopeless)
            waits_s = None if goes_on else hosts_wait_s() if comes else 0.0
            self._tell_host_lost(link, numbers, why, again=comes, waits_s=waits_s)
        for number in sorted(lost - self._handled):
            if number in self._leaving | self.membership.departing:
                self._handled.add(number)
            else:
                self._replace(number, again=number in again)

    def _start_on_returned(self) -> None:
        for link in self.ranks.remote.returned() if self.ranks.remote else ():
            numbers = self._away.pop(link.number, [])
            self.membership.come_back(set(numbers))
            # the event also tells a later coordinator that the host is back
            self.tell("host_back", host=link.name, number=link.number, ranks=numbers)
            self._hold_if_too_few()
            self._start(numbers)

    def _start(self, numbers: Sequence[int]) -> None:
        """Start ranks whose processes have ended.

        Raises:
            LaunchError: a rank could not be started.
        """
        for number in numbers:
            self.ranks.start_again(number)
            self._handled.discard(number)

    def _replace(self, number: int, *, again: bool) -> None:
        """Restart a lost rank, or leave the rank out."""
        end = self.ranks.ends()[number]
        code, why = self._cause(end)
        if again:
            try:
                self.ranks.start_again(number)
            except LaunchError as error:
                again, why = False, f"{why}; {error}"
        if not again:
            self._handled.add(number)
            self.membership.leave_out({number})
        waiting = [n for n in self.membership.replica_of(number) if self.ranks[n].code is None and n != number]
        told = {"reason": why, "code": code, "stack": shortened(end.stack), "again": again, "waits": not self.members}
        self.tell("lost", rank=number, waiting=waiting, **told)

    def tell(self, event: str, **details: Any) -> None:
        """See `Losses`. The losses so far are recorded first, for a later coordinator."""
        membership = self.membership
        if self.ranks.remote:
            out = membership.left_out.difference(*self._away.values())
            losses = membership.losses_before(time.monotonic())
            self.ranks.remote.hosts.past = Past(losses, sorted(out), sorted(membership.released))
        self.ranks.tell(event, {**details, "generation": membership.current.number})

    def _note(self) -> None:
        membership, before = self.membership, self.membership.newest
        alive = [status for status in self.ranks.board.read() if self.ranks[status.rank].code is None]
        joining = {status.rank for status in alive if status.phase == "joining"}
        membership.note({status.rank: status.generation for status in alive}, joining)
        self._meets = any(status.generation != membership.newest.number for status in alive)
        self._announce()
        if joined := set(membership.newest.members) - set(before.members):
            self.ranks.tell("joins", {"ranks": sorted(joined), "generation": membership.newest.number})

    def _announce(self) -> None:
        current, newest = self.membership.current, self.membership.newest
        if (current.number, newest.number) == self._announced:
            return
        self._announced = current.number, newest.number
        announce(self.ranks.board, self.ranks.folder, current, newest)
        if self.ranks.remote:
            self.ranks.remote.announce(current, newest)

    def shrink(self) -> str:
        """See `Losses`. The part that leaves is the last host that has members, or the last replica."""
        ranks, membership = self.ranks, self.membership
        if self._leaving:
            raise about_to_leave(self._leaving)
        members = set(membership.newest.members)
        # number of the last host that has members; None if all members are on this host
        host = max((ranks.setting.places[rank].number for rank in members), default=0) or None
        chosen = ranks.on_host(host) if host else membership.replica_of(max(members, default=0))
        hosts = ranks.remote.hosts if ranks.remote else None
        if host and hosts and hosts.there <= hosts.least:
            raise LaunchError(
                "scale.fewest_hosts",
                "{there} hosts take part, and this run needs at least {least}",
                there=hosts.there,
                least=hosts.least,
            )
        if not members - chosen:
            raise cannot_shrink("replica")
        if any(membership.replica_of(rank) - chosen for rank in chosen):
            raise LaunchError(
                "scale.replicas_over_hosts",
                "replicas of this plan span several hosts, so a single host cannot leave. End the run (Ctrl-C "
                "saves) and continue with --resume and a smaller --plan.",
            )
        self._leaving, self._leaving_host = chosen, host
        membership.release(chosen)
        who = f"host number {host} with its {named(chosen)}" if host else named(chosen)
        return f"{who} leave{'s' * (host is not None or len(chosen) == 1)} after a step; the others go on"

    def grow(self) -> str:
        ranks, remote, membership = self.ranks, self.ranks.remote, self.membership
        out = membership.left_out - self._leaving
        out = {rank for rank in out if ranks[rank].code is not None and not ranks.is_away(rank)}
        if out:
            chosen = membership.replica_of(min(out)) & out
            membership.take_back(chosen)
            try:
                self._start(sorted(chosen))
            except LaunchError:
                membership.leave_out(chosen)
                raise
            self.tell("scaled", by=1, ranks=sorted(chosen), host=None)
            return f"{named(chosen)} start{'s' * (len(chosen) == 1)}, and join{'s' * (len(chosen) == 1)} after a step"
        if remote and (returns := remote.hosts.returns) and returns.left_out:
            number = min(returns.left_out)
            chosen = ranks.on_host(number)
            membership.take_back(chosen)
            self._away[number] = sorted(chosen)
            membership.leave_out(chosen)
            remote.expect(number, again=True)
            self.tell("scaled", by=1, ranks=sorted(chosen), host=number)
            there = "" if returns.revives else ": start the same command there"
            return f"host number {number} may come again{there}"
        self._must_not_be_awaited()
        raise all_take_part(ranks.setting.ranks, "ranks")

    def _end_left(self) -> None:
        membership = self.membership
        if not self._leaving or self._leaving & {*membership.current.members, *membership.newest.members}:
            return
        left, self._leaving = sorted(self._leaving), set()
        self._handled.update(left)
        for rank in left:
            self.ranks[rank].kill()
        self.ranks.wait_for_ends(left, _ENDED_WITHIN_S)  # a request to start them again may follow at once
        if self._leaving_host and (remote := self.ranks.remote):
            remote.release(self._leaving_host)
            if remote.hosts.returns is not None:
                why = "was released by `paceline scale`: with +1 it may come again."
                remote.hosts.returns.leave_out(self._leaving_host, why)
        self.tell("scaled", by=-1, ranks=left, host=self._leaving_host)

    def _end_departed(self) -> None:
        """Continue without hosts that have left after a notice.

        If this host has a notice, it leaves last.
        """
        departures, remote, membership = self._departures, self.ranks.remote, self.membership
        if remote is None:
            return
        left = departures.step()
        self._handled.update(*map(self.ranks.on_host, departures.released))
        for number in left:
            ranks = self.ranks.on_host(number)
            self._away[number] = sorted(ranks - membership.left_out)
            membership.leave_out(ranks, set(self._away[number]))
            remote.expect(number, again=True)
            self.tell("host_left", host=remote.link_to(number).name, number=number, ranks=sorted(ranks))
        if departures.hands_over:
            here = self.ranks.on_host(0)
            self.tell("host_left", host=remote.hosts.cluster.hosts[0].name, number=0, ranks=sorted(here))
            departures.hand_over()


def most_losses() -> int:
    """Return the number of losses per hour after which a rank is left out."""
    wanted = os.environ.get(LOSSES, str(MOST_LOSSES))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise LaunchError(
            "launch.losses_invalid",
            "{variable}={wanted} is not a valid number of losses after which a rank is left out. It must be at "
            "least 1.",
            variable=LOSSES,
            wanted=wanted,
        )
    return int(wanted)


class Request(msgspec.Struct, frozen=True):
    """Request to add (1) or remove (-1) one replica or host."""

    by: int


class Answer(msgspec.Struct, frozen=True):
    """Reply to a request: a message, or an error in JSON form."""

    text: str = ""
    error: dict[str, Any] = {}


def ask(run: Path, by: int, wait_s: float) -> str | None:
    """Send a request to a run's launcher. Return the answer, or None after a timeout.

    Raises:
        LaunchError: the launcher refused the request.
    """
    name = f"{_NAME}{secrets.token_hex(8)}"
    request, answer = run / f"{name}.request", run / f"{name}.answer"
    write_whole(request, msgspec.json.encode(Request(by)))
    until = time.monotonic() + wait_s
    try:
        while time.monotonic() < until:
            if answer.exists():
                found = msgspec.json.decode(read_text(answer, _LIMIT), type=Answer)
                if found.error:
                    raise LaunchError.of_json(found.error)
                return found.text
            time.sleep(_LOOK_S)
    finally:
        for path in (request, answer):
            path.unlink(missing_ok=True)
    return None


def answer_requests(run: Path, losses: Losses) -> None:
    """Carry out the requests in a run's directory."""
    for path in run.glob(f"{_NAME}*.request"):
        try:
            request = msgspec.json.decode(read_text(path, _LIMIT), type=Request)
        except (OSError, ValueError):  # the requester has given up and removed the file, or the file is not a request
            with suppress(OSError):
                path.unlink(missing_ok=True)
            continue
        try:
            answer = Answer(_done(request, losses))
        except LaunchError as error:
            answer = Answer(error=error.as_json())
        with suppress(OSError):
            path.unlink()  # removed before the answer is written, so that a requester that has given up gets no answer
            write_whole(path.with_suffix(".answer"), msgspec.json.encode(answer))


def _done(request: Request, losses: Losses) -> str:
    if request.by not in (1, -1):
        raise LaunchError("scale.by_one", "a run can grow or shrink only by 1 at a time, not by {by}", by=request.by)
    if losses.ending:
        raise LaunchError("scale.run_ending", "this run is about to end")
    return losses.grow() if request.by > 0 else losses.shrink()


def about_to_leave(ranks: set[int]) -> LaunchError:
    """Return the error of a request that arrives while ranks are still leaving."""
    return LaunchError("scale.still_leaving", "{ranks} are still leaving. Try again in a moment.", ranks=named(ranks))


def all_take_part(number: int, what: str) -> LaunchError:
    """Return the error of a run that cannot grow."""
    return LaunchError(
        "scale.all_take_part",
        "all {number} {what} of this run's plan take part or are about to join. To use more, end the run (Ctrl-C "
        "saves) and continue with --resume and a larger --plan.",
        number=number,
        what=what,
    )


def cannot_shrink(what: str) -> LaunchError:
    """Return the error of a run that cannot shrink, because only one part is left."""
    return LaunchError(
        "scale.cannot_shrink",
        "only one {what} takes part, so the run cannot become smaller. To save and end the run, use "
        "Ctrl-C or `paceline cancel`.",
        what=what,
    )


def named(numbers: Collection[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"
