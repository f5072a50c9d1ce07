"""Agent of a host: it obeys the coordinator until that dismisses it."""

from __future__ import annotations

import select
import signal
import sys
import time
from typing import Any

from msgspec import Struct

from paceline.elastic.hosts.agent_attempt import AgentAttempt
from paceline.elastic.hosts.measure import Measuring
from paceline.elastic.hosts.meeting import Meeting
from paceline.elastic.hosts.messages import (
    Begin,
    Dismiss,
    Echo,
    Elsewhere,
    Interrupted,
    Listen,
    Look,
    Looked,
    Measure,
    Probe,
    Refused,
    Succession,
)
from paceline.elastic.hosts.same_files import digests
from paceline.elastic.signals import StopSignals
from paceline.errors import LaunchError, PacelineError
from paceline.wire.connection import Connection

_TICK_S, _MEETING_S = 0.2, 0.02  # from look to look; while ranks are on their way to a generation
_SAVE_S = 30.0  # for ranks to save and end when the coordinator is lost


class Coordinator:
    """Host 0 as an agent sees it.

    Attributes:
        name: of the host.
        run_name: of the run, as its engine names it.
        lost: why it can no longer be reached; None while it can.
        standby: where the others would come to this host in its place.
        succession: hosts of a run that goes on without it; None where none does.
        told_at: when it said so, by the monotonic clock.
        released: the run goes on without this host, as its user asked.
        attempt: the ranks here, once it is lost, where they may go on.
    """

    def __init__(self, connection: Connection, name: str, run_name: str, standby: Meeting | None = None) -> None:
        self.connection, self.name, self.run_name, self.standby = connection, name, run_name, standby
        self.lost: str | None = None
        self._silence = ""
        self.succession: Succession | None = None
        self.told_at = 0.0
        self.released = False
        self.attempt: AgentAttempt | None = None

    @property
    def who(self) -> str:
        """Name and number, for messages."""
        return f"host {self.name} (number 0)"

    @property
    def address(self) -> str:
        """Address at which this host reaches host 0."""
        return self.connection.peer.rpartition(":")[0]

    @property
    def silent(self) -> bool:
        """True where nothing came from it for too long. It may be there, behind a network that is cut."""
        return bool(self._silence)

    def fall_silent(self, silent_s: float) -> None:
        """Find host 0 lost, since nothing came from it for too long; for any thread."""
        self._silence = f"nothing has come from it for {silent_s:.2g} s"
        self.connection.end()

    def direct_others(self) -> None:
        """Tell hosts that take this one for host 0 where that is."""
        if self.standby is not None and self.succession is not None:
            first, names = self.succession.hosts[0], [host.name for host in self.succession.hosts]
            self.standby.direct(Elsewhere(self.run_name, first.address, first.port, names))

    def close(self) -> None:
        """Leave it, and end the ranks that it has here."""
        self.connection.close()
        if self.attempt is not None:
            self.attempt.end()
        if self.standby is not None:
            self.standby.close()

    def send(self, message: Struct) -> None:
        """Send a message; a coordinator that is lost takes none."""
        if self.lost is None:
            try:
                self.connection.send(message)
            except (OSError, PacelineError) as error:
                self.lost = self._silence or str(error)

    def next(self) -> Any:
        """The next message; None where there is none yet."""
        if self.lost is None:
            try:
                return self.connection.take()
            except (OSError, PacelineError) as error:
                self.lost = self._silence or str(error)
        return None


def run_agent(coordinator: Coordinator, who: str) -> int:
    """Obey until the coordinator dismisses this host. Returns the exit code of the command on host 0."""
    attempt, measuring = coordinator.attempt, Measuring()
    with StopSignals() as signals:
        told = False
        try:
            while True:
                _wait(coordinator, attempt)
                while (message := coordinator.next()) is not None:
                    match message:
                        case Dismiss():
                            coordinator.released = message.released
                            return message.code
                        case Refused():
                            raise LaunchError(f"{who} was refused by host 0: {message.reason}")
                        case Probe():
                            coordinator.send(Echo())
                        case Listen() | Measure():
                            coordinator.send(measuring.answer(message))
                        case Look():
                            coordinator.send(Looked(digests(message)))
                        case Succession():
                            coordinator.succession, coordinator.told_at = message, time.monotonic()
                        case Begin():
                            attempt = AgentAttempt(message, coordinator)
                        case _ if attempt is not None and attempt.obey(message):
                            attempt = None
                if signals.first and not told:
                    told = True
                    _say(f"{who}: {signals.first}, told to {coordinator.who}, which stops the run")
                    coordinator.send(Interrupted(signals.first))
                if coordinator.lost is not None or signals.kill:
                    return _alone(coordinator, who, signals, goes_on=_may_go_on(coordinator, attempt, signals))
                if attempt is not None:
                    attempt.turn()
                coordinator.direct_others()
        finally:
            measuring.close()
            coordinator.attempt = attempt if _may_go_on(coordinator, attempt, signals) else None
            if coordinator.attempt is not None:
                coordinator.attempt.keep()
            elif attempt is not None:
                attempt.stop(_SAVE_S if coordinator.lost is not None and _may_save(coordinator, attempt) else 0.0)
                attempt.close()


def _may_go_on(coordinator: Coordinator, attempt: AgentAttempt | None, signals: StopSignals) -> bool:
    """True if the ranks here may go on without the coordinator."""
    is_alone = coordinator.lost is not None and coordinator.succession is not None and signals.first is None
    return is_alone and attempt is not None and attempt.recovers_alone and attempt.copy is None


def _may_save(coordinator: Coordinator, attempt: AgentAttempt) -> bool:
    """True if the ranks here can save without the coordinator.

    Those that may wait for another coordinator cannot: they take no step without the ranks of host 0, which end with
    it. Neither can those behind a cut network. SIGTERM would only have them wait for the others.
    """
    waits = attempt.recovers_alone and coordinator.succession is not None
    return not waits and not coordinator.silent


def _wait(coordinator: Coordinator, attempt: AgentAttempt | None) -> None:
    """Wait for a message or the end of a rank, for a moment at most."""
    descriptors = [coordinator.connection.fileno(), *(attempt.descriptors() if attempt else [])]
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    tick_s = _MEETING_S if attempt and attempt.meets else _TICK_S
    poll.poll(0 if attempt and attempt.busy else tick_s * 1000)


def _alone(coordinator: Coordinator, who: str, signals: StopSignals, *, goes_on: bool) -> int:
    if coordinator.lost is None:
        _say(f"{who}: killing the ranks")
        return 130
    _say(f"{who}: {coordinator.who} is lost ({coordinator.lost}){'' if goes_on else '; the ranks here are stopped'}")
    return 1 if signals.first is None else 128 + signal.Signals[signals.first]


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
