"""Serving host process: it obeys the coordinator until that dismisses it."""

from __future__ import annotations

import select
import signal
import socket
import sys
from typing import Any

from msgspec import Struct

from paceline.channel.connection import Connection
from paceline.errors import LaunchError, PacelineError
from paceline.launch.host.measure import Measuring
from paceline.launch.host.messages import (
    Begin,
    Dismiss,
    Echo,
    Interrupted,
    Listen,
    Look,
    Looked,
    Measure,
    Probe,
    Refused,
    Succession,
)
from paceline.launch.host.same_files import digests
from paceline.launch.host.served import ServedAttempt
from paceline.launch.signals import StopSignals

_TICK_S, _MEETING_S = 0.2, 0.02  # from look to look; while ranks are on their way to an epoch
_SAVE_S = 30.0  # for ranks to save and end when the coordinator is lost


class Coordinator:
    """Host 0 as a serving host sees it.

    Attributes:
        lost: why it can no longer be reached; None while it can.
        standby: bound where this host would listen in its place.
        succession: hosts of a run that goes on without it; None where none does.
    """

    def __init__(self, connection: Connection, who: str, standby: socket.socket | None = None) -> None:
        self.connection, self.who, self.standby = connection, who, standby
        self.lost: str | None = None
        self._silence = ""
        self.succession: Succession | None = None

    @property
    def address(self) -> str:
        """Address at which this host reaches host 0."""
        return self.connection.peer.rpartition(":")[0]

    @property
    def silent(self) -> bool:
        """True where nothing came from it for too long. It may be there, behind a network that is cut."""
        return bool(self._silence)

    def fall_silent(self, limit_s: float) -> None:
        """Find host 0 lost, since nothing came from it for too long; for any thread."""
        self._silence = f"nothing has come from it for {limit_s:g} s"
        self.connection.end()

    def close(self) -> None:
        """Leave it."""
        self.connection.close()
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


def serve(coordinator: Coordinator, who: str) -> int:
    """Obey until the coordinator dismisses this host. Returns the exit code of the command on host 0."""
    attempt: ServedAttempt | None = None
    measuring = Measuring()
    with StopSignals() as signals:
        told = False
        try:
            while True:
                _wait(coordinator, attempt)
                while (message := coordinator.next()) is not None:
                    match message:
                        case Dismiss():
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
                            coordinator.succession = message
                        case Begin():
                            attempt = ServedAttempt(message, coordinator)
                        case _ if attempt is not None and attempt.obey(message):
                            attempt = None
                if signals.first and not told:
                    told = True
                    _say(f"{who}: {signals.first}, told to {coordinator.who}, which stops the run")
                    coordinator.send(Interrupted(signals.first))
                if coordinator.lost is not None or signals.kill:
                    return _alone(coordinator, who, signals)
                if attempt is not None:
                    attempt.turn()
        finally:
            measuring.close()
            if attempt is not None:
                # Behind a cut network they are killed: no step is taken without the ranks of the other hosts, as every
                # member of an epoch has a part in each, and SIGTERM would only have them wait for these.
                attempt.stop(_SAVE_S if coordinator.lost is not None and not coordinator.silent else 0.0)
                attempt.close()


def _wait(coordinator: Coordinator, attempt: ServedAttempt | None) -> None:
    """Wait for a message or the end of a rank, for a moment at most."""
    descriptors = [coordinator.connection.fileno(), *(attempt.descriptors() if attempt else [])]
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    tick_s = _MEETING_S if attempt and attempt.meets else _TICK_S
    poll.poll(0 if attempt and attempt.busy else tick_s * 1000)


def _alone(coordinator: Coordinator, who: str, signals: StopSignals) -> int:
    if coordinator.lost is None:
        _say(f"{who}: killing the ranks")
        return 130
    _say(f"{who}: {coordinator.who} is lost ({coordinator.lost}); the ranks here are stopped")
    return 1 if signals.first is None else 128 + signal.Signals[signals.first]


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
