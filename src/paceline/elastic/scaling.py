"""Growing and shrinking of a run while it trains, for `paceline scale`.

Requests are files in the run's directory, where only its owner can write. The launcher takes one, and answers in a file
beside it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.elastic.possible import NEEDS
from paceline.errors import LaunchError
from paceline.files import read_text, write_whole

if TYPE_CHECKING:
    from paceline.elastic.independent import Independent
    from paceline.elastic.recovery import Recovery

_NAME, _LIMIT = "scale-", 4096
_LOOK_S = 0.1


class Request(msgspec.Struct, frozen=True):
    """One replica, or host, more or fewer: 1 or -1."""

    by: int


class Answer(msgspec.Struct, frozen=True):
    """Sentence for who asked."""

    text: str
    refused: bool


def ask(run: Path, by: int, wait_s: float) -> Answer | None:
    """Answer of a run's launcher to a request; None where none comes in time."""
    name = f"{_NAME}{secrets.token_hex(8)}"
    request, answer = run / f"{name}.request", run / f"{name}.answer"
    write_whole(request, msgspec.json.encode(Request(by)))
    until = time.monotonic() + wait_s
    try:
        while time.monotonic() < until:
            if answer.exists():
                return msgspec.json.decode(read_text(answer, _LIMIT), type=Answer)
            time.sleep(_LOOK_S)
    finally:
        for path in (request, answer):
            path.unlink(missing_ok=True)
    return None


def answer_requests(run: Path, recovery: Recovery | Independent | None) -> None:
    """Do what is asked for in a run's directory."""
    for path in run.glob(f"{_NAME}*.request"):
        try:
            request = msgspec.json.decode(read_text(path, _LIMIT), type=Request)
        except (OSError, ValueError):  # who asked has given up, or it is no request
            with suppress(OSError):
                path.unlink(missing_ok=True)
            continue
        try:
            answer = Answer(_done(request, recovery), refused=False)
        except LaunchError as error:
            answer = Answer(str(error), refused=True)
        with suppress(OSError):
            path.unlink()  # before the answer: who does not wait any more gets none
            write_whole(path.with_suffix(".answer"), msgspec.json.encode(answer))


def _done(request: Request, recovery: Recovery | Independent | None) -> str:
    if recovery is None:
        raise LaunchError(
            f"this run's plan does not recover in place (that needs {NEEDS}), so its ranks stay. End it (Ctrl-C "
            "saves), and go on with --resume and another --plan."
        )
    if request.by not in (1, -1):
        raise LaunchError(f"a run grows by 1 or shrinks by 1 at a time, not by {request.by}")
    if recovery.attempt.signals.first is not None:
        raise LaunchError("this run is about to end")
    return recovery.scaling.grow() if request.by > 0 else recovery.scaling.shrink()


class Scaling:
    """Replicas, or hosts, that leave a run after a step, and are taken in again."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery, self.attempt = recovery, recovery.attempt
        self.leaving: set[int] = set()  # ranks that take part until the end of a step
        self._host: int | None = None  # of theirs, which leaves with them

    def shrink(self) -> str:
        """Have the last replica, or the last host, leave after a step.

        Raises:
            LaunchError: none can.
        """
        membership = self.recovery.membership
        if self.leaving:
            raise about_to_leave(self.leaving)
        members = set(membership.newest.members)
        self._host = self._last_host(members)
        chosen = self.recovery.ranks_of(self._host) if self._host else membership.replica_of(max(members, default=0))
        hosts = self.attempt.remote.hosts if self.attempt.remote else None
        if self._host and hosts and hosts.there <= hosts.least:
            raise LaunchError(f"{hosts.there} hosts are there, and this run goes on with {hosts.least} at least")
        if not members - chosen:
            raise LaunchError(
                "one replica takes part, and a run cannot be smaller. Ctrl-C, or `paceline cancel`, saves and ends it."
            )
        if any(membership.replica_of(rank) - chosen for rank in chosen):
            raise LaunchError(
                "replicas of this plan lie on several hosts, so none can leave alone. End the run (Ctrl-C saves), and "
                "go on with --resume and a smaller --plan."
            )
        self.leaving = chosen
        membership.release(chosen)
        who = f"host number {self._host} with its {named(chosen)}" if self._host else named(chosen)
        return f"{who} leave{'s' * (self._host is not None or len(chosen) == 1)} after a step; the others go on"

    def grow(self) -> str:
        """Start a replica that was left out, or allow a host to come again.

        Raises:
            LaunchError: all replicas take part or are awaited, or a rank could not be started.
        """
        recovery, attempt = self.recovery, self.attempt
        membership, ranks = recovery.membership, attempt.ranks
        out = membership.left_out - self.leaving
        out = {rank for rank in out if ranks[rank].code is not None and not recovery.is_away(rank)}
        if out:
            chosen = membership.replica_of(min(out)) & out
            membership.take_back(chosen)
            try:
                recovery.start(sorted(chosen))
            except LaunchError:
                membership.left_out |= chosen
                raise
            recovery.tell("scaled", by=1, ranks=sorted(chosen), host=None)
            return f"{named(chosen)} start{'s' * (len(chosen) == 1)}, and join{'s' * (len(chosen) == 1)} after a step"
        returns = attempt.remote.hosts.returns if attempt.remote else None
        if attempt.remote and returns and returns.left_out:
            number = min(returns.left_out)
            chosen = recovery.ranks_of(number)
            membership.take_back(chosen)
            recovery.await_host(number, chosen)
            recovery.tell("scaled", by=1, ranks=sorted(chosen), host=number)
            there = "" if returns.revives else ": start the same command there"
            return f"host number {number} may come again{there}"
        if recovery.awaited:
            hosts = ", ".join(map(str, recovery.awaited))
            raise LaunchError(f"host number {hosts} may come at any time: start the same command there")
        raise all_take_part(attempt.setting.ranks, "ranks")

    def turn(self) -> None:
        """End the ranks that have left."""
        recovery, membership = self.recovery, self.recovery.membership
        if not self.leaving or self.leaving & {*membership.current.members, *membership.newest.members}:
            return
        left, self.leaving = sorted(self.leaving), set()
        recovery.forget(left)
        for rank in left:
            self.attempt.ranks[rank].kill()
        if self._host and self.attempt.remote:
            self.attempt.remote.release(self._host)
        recovery.tell("scaled", by=-1, ranks=left, host=self._host)

    def _last_host(self, members: set[int]) -> int | None:
        """Number of the last host with members; None where all are on this one."""
        return max((self.attempt.setting.places[rank].number for rank in members), default=0) or None


def about_to_leave(ranks: set[int]) -> LaunchError:
    """Error of a second request while ranks leave."""
    return LaunchError(f"{named(ranks)} are still leaving. Ask again in a moment.")


def all_take_part(number: int, what: str) -> LaunchError:
    """Error of a run that cannot grow."""
    return LaunchError(
        f"all {number} {what} of this run's plan take part, or are on their way. For more, end it (Ctrl-C saves), and "
        "go on with --resume and a larger --plan."
    )


def named(numbers: Collection[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"
