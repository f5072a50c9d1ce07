"""Pulse between the coordinator and the agents, who find each other silent.

A cut network ends no connection. The pulse has a connection and a thread of its own at either end, so that a host that
sends large files, or waits for its disk, is not taken for one that is gone. Both count rounds in which nothing came
instead of reading a clock: a process that was stopped for a while has no silence of others to complain of. Where not
even the other's kernel acknowledges what was sent, as it does for a busy process, a shorter silence is enough: several
beats were lost then.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from paceline.errors import LaunchError, PacelineError
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener

SILENCE = "PACELINE_SILENCE_S"  # of a host, until it is taken for lost
_SILENCE_S = 2.0
_ROUNDS = 8, 32  # within that time, fewest and most
_BEATS = 512  # of all hosts within it: more would keep the coordinator busy
_UNACKNOWLEDGED = 0.1  # of that time, where the other's kernel acknowledges nothing
_LOST_BEATS = 3  # before that counts: this machine may itself have been stopped for a while


class Beat(Struct, tag=True, frozen=True):
    """Sign of life of a host, by its number; the coordinator answers with its own."""

    host: int


Listen = Callable[[type[Struct], Callable[[Connection, Beat], None]], Listener]


class Pulses:
    """Pulses of the agents, at the coordinator. A host counts from its first beat on.

    Args:
        listen: opens a listener for messages of a type, which calls a function for each.
        on_silence: called from a thread, with the number of a host and the seconds, once for each silence.
        hosts: number of them, by which their beats are more or less frequent.
    """

    def __init__(self, listen: Listen, on_silence: Callable[[int, float], None], hosts: int = 2) -> None:
        self.limit_s, self._rounds = silence_limit_s(), rounds_of(hosts)
        self._on_silence = on_silence
        self._beaten: set[int] = set()  # since the last round
        self._silent_rounds: dict[int, int] = {}
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = listen(Beat, self._take)
        self._thread = threading.Thread(target=self._watch, name="paceline-pulses", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port for the beats of hosts."""
        assert isinstance(self._listener.address, tuple)
        return self._listener.address[1]

    def forget(self, host: int) -> None:
        """Expect no more of a host until it begins again."""
        with self._lock:
            self._beaten.discard(host)
            self._silent_rounds.pop(host, None)
            self._connections.pop(host, None)

    def close(self) -> None:
        """Stop listening and watching."""
        self._closing.set()
        self._thread.join()
        self._listener.close()

    def _take(self, connection: Connection, beat: Beat) -> None:
        with self._lock:
            self._beaten.add(beat.host)
            self._silent_rounds.setdefault(beat.host, 0)
            self._connections[beat.host] = connection
        connection.post(Beat(0))

    def _watch(self) -> None:
        round_s = self.limit_s / self._rounds
        while not self._closing.wait(round_s):
            with self._lock:
                for host, rounds in self._silent_rounds.items():
                    self._silent_rounds[host] = 0 if host in self._beaten else rounds + 1
                self._beaten.clear()
                silent = {host: rounds for host, rounds in self._silent_rounds.items() if rounds}
            for host, rounds in silent.items():
                if self._is_unreachable(host, rounds) or rounds >= self._rounds:
                    self.forget(host)
                    self._on_silence(host, rounds * round_s)

    def _is_unreachable(self, host: int, rounds: int) -> bool:
        """True if the host's kernel acknowledges nothing; sends it another beat.

        Args:
            rounds: in which nothing came from it.
        """
        if (connection := self._connections.get(host)) is None:
            return False
        with suppress(PacelineError):
            connection.post(Beat(0))
        return rounds >= _LOST_BEATS and _is_cut(connection, self.limit_s)


class Pulse:
    """Pulse of an agent, which hears the coordinator's.

    Args:
        where: address and port of the coordinator's `Pulses`.
        limit_s: of silence.
        on_silence: called from a thread with the seconds, once, when nothing has come for so long after something had.
        hosts: as of `Pulses`.
    """

    def __init__(
        self,
        where: tuple[str, int],
        key: RunKey | None,
        host: int,
        limit_s: float,
        on_silence: Callable[[float], None],
        hosts: int = 2,
    ) -> None:
        self.limit_s, self._round_s = limit_s, limit_s / rounds_of(hosts)
        self._where, self._key, self._beat, self._on_silence = where, key, Beat(host), on_silence
        self._closing = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Beat no more."""
        self._closing.set()
        if (connection := self._connection) is not None:
            connection.end()
        self._thread.join()

    def _run(self) -> None:
        heard, silent_s, round_s = False, 0.0, self._round_s
        while not self._closing.is_set() and silent_s < self.limit_s and not self._is_unreachable(silent_s):
            began, most_s = time.monotonic(), round_s if self._connection else self.limit_s
            self._send()
            self._closing.wait(max(0.0, round_s - (time.monotonic() - began)))
            answered = self._is_answered()
            took_s = time.monotonic() - began
            heard = heard or answered
            # if it took longer, this process was not there itself
            silent_s = 0.0 if answered or not heard else silent_s + max(round_s, min(took_s, most_s))
        if self._connection is not None:
            self._connection.close()
        if not self._closing.is_set():
            self._on_silence(silent_s)

    def _is_unreachable(self, silent_s: float) -> bool:
        if self._connection is None or silent_s < _LOST_BEATS * self._round_s:
            return False
        return _is_cut(self._connection, self.limit_s)

    def _send(self) -> None:
        """Send a beat."""
        with suppress(PacelineError):  # a connection that is lost is made anew in the next round
            if self._connection is None:
                # a handshake takes longer than a round on a busy machine
                self._connection = connect(self._where, self._key, Beat, deadline_s=self.limit_s)
            self._connection.post(self._beat)

    def _is_answered(self) -> bool:
        """True if the coordinator has sent anything since the last look.

        Waking for each answer would cost more.
        """
        if self._connection is None:
            return False
        answered = False
        try:
            while self._connection.take() is not None:
                answered = True
        except PacelineError:
            with suppress(OSError):
                self._connection.close()
            self._connection = None
        return answered


def _is_cut(connection: Connection, limit_s: float) -> bool:
    """True if the other's kernel acknowledges none of several beats."""
    return connection.is_unanswered(_UNACKNOWLEDGED * limit_s, _LOST_BEATS)


def rounds_of(hosts: int) -> int:
    """Beats of each of so many hosts within the limit of silence."""
    fewest, most = _ROUNDS
    return max(fewest, min(most, _BEATS // hosts))


def silence_limit_s() -> float:
    """Seconds of silence after which a host is taken for lost."""
    text = os.environ.get(SILENCE, "")
    try:
        limit_s = float(text) if text else _SILENCE_S
    except ValueError:
        limit_s = 0.0
    if not 0.2 <= limit_s <= 3600:
        raise LaunchError(f"{SILENCE}={text} is no number of seconds from 0.2 to 3600")
    return limit_s
