"""Calls to one server, repeated until whichever of its processes is the primary answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paceline.errors import ChannelError, DeadlineError, ServerLost, ServerRefused
from paceline.wire.key import RunKey
from paceline_server.client import Client, Pending
from paceline_server.parameters.operations import SLOWEST_BYTES_PER_S, nbytes
from paceline_server.parameters.process import MOST_WAIT_S
from paceline_server.parameters.settings import ServerSettings
from paceline_server.parameters.views import Address, Views, as_address, as_text

_CONNECT_S = (0.1, 2.0)  # for each process, at first and at most
_PAUSE_S = 0.02


class NoMember(ServerRefused):
    """The server has given up this client: it joins again."""


class Line:
    """Calls to one server, which may be several processes. Any thread may call.

    Args:
        addresses: of its processes, the likely primary first.
        deadline_s: longest time of a call without an answer from any process of the server.
        patience_s: longest time that a call waits for other clients while the server answers; None: the deadline.
        views: asked where none of these is the primary.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        key: RunKey | None,
        name: str,
        identity: str,
        settings: ServerSettings,
        deadline_s: float,
        views: Views | None = None,
        patience_s: float | None = None,
    ) -> None:
        self.addresses = [as_text(address) for address in addresses]
        self._key, self.name, self._identity, self._settings = key, name, identity, settings
        self.deadline_s, self._views = deadline_s, views
        self.patience_s = deadline_s if patience_s is None else patience_s
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self._at, self._generation = "", -1
        self.connected(time.monotonic() + deadline_s)

    def ask(self, function: str, *args: Any, waits_s: float | None = None, more: Sequence[Any] = ()) -> Asked:
        """Begin a call.

        Args:
            waits_s: the function takes, behind `args`, the seconds that it may wait: these, before it is asked again.
            more: arguments behind these.
        """
        return Asked(self, function, args, waits_s, more)

    def connected(self, until: float) -> Client:
        """A connection to the primary, made where there is none. Raises ServerLost when the time is over."""
        with self._lock:
            problem: Exception | None = None
            attempt_s = _CONNECT_S[0]
            while self._client is None:
                if self._closed:
                    raise ServerLost(f"{self.name} has closed its connections")
                for text in list(self.addresses):
                    try:
                        if self._tried(text, attempt_s):
                            break
                    except (ChannelError, OSError) as error:
                        problem = error
                else:
                    if time.monotonic() > until:
                        raise ServerLost(
                            f"no process of the parameter server answers at {', '.join(self.addresses)}: "
                            f"{problem or 'none of them is the primary'}"
                        )
                    self._look_up()
                    attempt_s = min(2 * attempt_s, _CONNECT_S[1])
                    time.sleep(_PAUSE_S)
            return self._client

    def moved(self, client: Client, addresses: Sequence[str]) -> None:
        """Look for the primary anew, these addresses first, and last the one that was."""
        with self._lock:
            if self._client is client:
                self._client = None
                client.close()
                self.addresses.append(self.addresses.pop(self.addresses.index(self._at)))
            self._learn(addresses)

    def note(self, client: Client, generation: int) -> None:
        """Ask for the addresses of a generation that is new to this client."""
        if generation == self._generation:
            return
        with self._lock:
            self._generation = generation
        try:
            status, value = client.call("hello", self._settings.fingerprint, self._settings.digest)[:2]
        except ChannelError:
            return
        if status == "ok":
            with self._lock:
                self._learn(value)

    def close(self) -> None:
        """Hang up."""
        self._closed = True  # before the lock, which a thread holds that looks for the primary
        with self._lock:
            if self._client:
                self._client.close()
            self._client = None

    def _tried(self, text: str, attempt_s: float) -> bool:
        client = Client(
            as_address(text),
            self._key,
            name=self.name,
            identity=self._identity,
            deadline_s=attempt_s,
            reconnect=False,  # to another process, maybe
        )
        try:
            status, value, *generation = client.call("hello", self._settings.fingerprint, self._settings.digest)
            if status == "refused":
                raise ServerRefused(str(value))
            if status in ("ok", "elsewhere"):
                self._learn(value)
            if status == "ok":
                self._client, self._at = client, text
                self._generation = generation[0]
            return bool(status == "ok")
        finally:
            if self._client is not client:
                client.close()

    def _look_up(self) -> None:
        with suppress(ChannelError):
            if self._views and (view := self._views.read()):
                self._learn(view.addresses())

    def _learn(self, addresses: Sequence[str]) -> None:
        self.addresses = list(dict.fromkeys([*addresses, *self.addresses]))


class Asked:
    """A call under way, repeated as it is until a primary has answered it."""

    def __init__(
        self, line: Line, function: str, args: Sequence[Any], waits_s: float | None, more: Sequence[Any]
    ) -> None:
        self.line, self._function, self._args, self._waits_s, self._more = line, function, args, waits_s, more
        now = time.monotonic()
        self._until, self._waits_until = now + line.deadline_s, now + line.patience_s
        self._client: Client | None = None
        self._pending: Pending | None = None
        self._begin()

    def result(self) -> Any:
        """The answer.

        Raises:
            ServerRefused, NoMember: the server says why.
            DeadlineError: others have not come in time; the server names them.
            ServerLost: no process of the server answers.
        """
        while True:
            status, value, *generation = self._answer()
            match status:
                case "ok":
                    assert self._client is not None
                    self.line.note(self._client, generation[0])
                    return value
                case "refused":
                    raise (NoMember if _NO_MEMBER in value else ServerRefused)(value)
                case "waits" if time.monotonic() > self._waits_until:
                    raise DeadlineError(f"{self.line.name} waited {self.line.patience_s:g} s: {value}")
                case "waits":
                    self._until = time.monotonic() + self.line.deadline_s  # the server has answered
                    time.sleep(_PAUSE_S)
                case "elsewhere" | "lost":
                    assert self._client is not None
                    self.line.moved(self._client, value if status == "elsewhere" else [])
            self._begin()

    def _begin(self) -> None:
        """Send the call. A failure is looked at when the answer is asked for."""
        self._client = self.line.connected(self._until)
        now = time.monotonic()
        left_s = max(0.0, self._until - now)
        wait = [] if self._waits_s is None else [min(self._waits_s, max(0.0, self._waits_until - now))]
        try:
            self._pending = self._client.begin(
                self._function, *self._args, *wait, *self._more, deadline_s=min(self._attempt_s(), left_s + MOST_WAIT_S)
            )
        except ChannelError:
            self._pending = None

    def _answer(self) -> Any:
        """Answer of the server; "elsewhere" where there is none."""
        if self._pending is None:
            return "elsewhere", []
        try:
            return self._pending.result()
        except ChannelError as error:
            if isinstance(error, DeadlineError) and time.monotonic() > self._until:
                raise ServerLost(str(error)) from None
            return "elsewhere", []

    def _attempt_s(self) -> float:
        return 2 * MOST_WAIT_S + (self._waits_s or 0.0) + nbytes(self._args) / SLOWEST_BYTES_PER_S


_NO_MEMBER = "is no member of this server"
