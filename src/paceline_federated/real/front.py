"""Functions of a server or an edge that clients call, and rounds that await answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.errors import DeadlineError, FederateError
from paceline.job.job import Job
from paceline.wire.key import RunKey
from paceline.wire.listener import Where
from paceline_federated.codec import UpdateCodec
from paceline_federated.layout import Layout
from paceline_federated.real.rounds import Gathers, Outcome, Rounds
from paceline_federated.real.terms import digest_of, job_values
from paceline_federated.rule import Task
from paceline_federated.secure.group import Plain
from paceline_federated.secure.round import SecureRound

if TYPE_CHECKING:
    from paceline_server.service import Caller, Service

_TICK_S = 0.05  # between looks at deadlines
_SILENT_S = 15.0  # after which a client counts as away; it asks every few seconds when it has nothing to do
_BETWEEN_S = 20.0  # for the next round of asynchronous training, while this one is measured and saved
_FAREWELL_S = 10.0  # for clients to hear of the end
_CALLERS = 64  # beyond the job's clients: those that are to be turned away with a reason


class Front:
    """Serves the clients of a federation.

    Args:
        rounds: what they are asked.
        silent_s: seconds after which an unheard client counts as away.

    Attributes:
        between_s: for which an answer between two rounds of asynchronous training waits for the next.
    """

    def __init__(self, job: Job, layout: Layout, rounds: Rounds, *, silent_s: float = _SILENT_S) -> None:
        self.rounds, self.members = rounds, rounds.members
        self._values, self._digest, self._layout = job_values(job), digest_of(job), layout
        self._silent_s = silent_s
        self.between_s = _BETWEEN_S
        self._changed = threading.Condition()
        self._end: str | None = None
        self._told: set[str] = set()

    def serve(self, where: Where, key: RunKey) -> Service:
        """Begin to serve; the caller closes it."""
        from paceline_server.service import Limits, Service

        bytes_most = 2**20 + 16 * self._layout.numel
        limits = Limits(
            message_bytes=2**22, attached_bytes=bytes_most, calls_at_once=2, callers=self.members.places + _CALLERS
        )
        return Service(where, key, self.functions(), limits=limits)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that clients call."""
        from paceline_server.marks import quick

        calls: dict[str, Callable[..., Any]] = {
            "job": self._job,
            "join": self._join,
            "work": self._work,
            "deliver": self._deliver,
        }

        def called(name: str) -> Callable[..., Any]:
            def call(caller: Caller, *arguments: Any) -> Any:
                return calls[name](caller, *arguments)

            return quick(call)

        return {name: called(name) for name in calls}

    def wait_for(self, clients: int, deadline_s: float, stopped: Callable[[], bool] = lambda: False) -> list[int]:
        """Wait until so many clients are there, or it is stopped; returns their numbers.

        Raises:
            DeadlineError: fewer came in time. Names how many.
        """
        until = time.monotonic() + deadline_s
        with self._changed:
            while len(there := self.there()) < clients and not stopped():
                if time.monotonic() >= until:
                    names = ", ".join(self.members[number].name for number in there[:20])
                    raise DeadlineError(
                        f"{len(there)} of {clients} clients are there after {deadline_s:g} s: {names or 'none'}. Start "
                        "more, wait longer (federate.deadline_s), or ask for fewer (federate.least)"
                    )
                self._changed.wait(_TICK_S)
            return there

    def there(self) -> list[int]:
        """Numbers of the clients that were heard lately."""
        now = time.monotonic()
        return sorted({*self.members.heard_since(now - self._silent_s), *self.rounds.training(now)})

    def round(
        self,
        task: Task,
        chosen: Collection[int],
        *,
        gathers: Gathers | None = None,
        secure: SecureRound | None = None,
        enough: int | None = None,
        coded: Tensor | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Make one round; returns when all have answered or are overdue, or when stopped."""
        with self._changed:
            now = time.monotonic()
            self.rounds.begin(task, chosen, now, gathers=gathers, secure=secure, enough=enough, coded=coded)
            self._changed.notify_all()
            while (outcome := self.rounds.advance(time.monotonic())) is None:
                if stopped():
                    return self.rounds.abandon()
                self._changed.wait(_TICK_S)
            return outcome

    def say_farewell(self, reason: str) -> None:
        """Tell clients of the end, and wait until all that are there have heard it."""
        until = time.monotonic() + _FAREWELL_S
        with self._changed:
            self._end = reason
            while {self.members[n].identity for n in self.there()} - self._told and time.monotonic() < until:
                self._changed.wait(_TICK_S)

    def _job(self, caller: Caller) -> Plain:
        return self._values

    def _join(self, caller: Caller, name: Any, number: Any, about: Any) -> Plain:
        try:
            return self._welcome(caller, name, number, about)
        except FederateError as error:
            return {"refused": str(error)}

    def _welcome(self, caller: Caller, name: Any, number: Any, about: Any) -> Plain:
        if not (isinstance(name, str) and isinstance(about, dict) and isinstance(about.get("samples"), int)):
            raise FederateError("to join, a client tells its name, the number that it wants or none, and its samples")
        if about.get("job") != self._digest or about.get("numel") != self._layout.numel:
            raise FederateError(
                f"client {name} has another job or model than the server; start it from the server's job"
            )
        with self._changed:
            wanted = number if isinstance(number, int) else None
            member = self.members.join(caller.identity, name, about["samples"], wanted, time.monotonic())
            self._changed.notify_all()
            counted = self.rounds.counted_round(member.number)
            return {"number": member.number, "clients": self.members.places, "counted": counted}

    def _work(self, caller: Caller) -> Plain:
        with self._changed:
            member = self.members.known(caller.identity)
            if member is None:
                return {"do": "join"}
            if self._end is not None:
                self._told.add(member.identity)
                self._changed.notify_all()
                return {"do": "end", "reason": self._end}
            return self.rounds.work(member.number, time.monotonic())

    def _deliver(self, caller: Caller, round: Any, kind: Any, content: Any) -> Plain:
        if not (isinstance(round, int) and isinstance(kind, str)):
            raise FederateError("an answer has a round and a kind")
        with self._changed:
            member = self.members.known(caller.identity)
            if member is None:
                return {"receipt": "late", "why": "the server was restarted, and does not know this client any more"}
            self._changed.wait_for(lambda: not self.rounds.between or self._end is not None, self.between_s)
            receipt = self.rounds.take(member.number, round, kind, content, time.monotonic())
            self._changed.notify_all()
            return receipt


def decoding(codec: UpdateCodec) -> Callable[[Any], Tensor] | None:
    """Reader of coded updates; None where they are not coded.

    The function raises FederateError for what is no coded update.
    """
    import torch

    def decode(content: Any) -> Tensor:
        fits = isinstance(content, Tensor) and content.dtype is torch.uint8 and content.shape == (codec.nbytes,)
        if not fits:
            raise FederateError(f"an update has {codec.nbytes:,} bytes in the code {codec.text}")
        decoded: Tensor = codec.decode(content)
        return decoded

    return None if codec.exact else decode
