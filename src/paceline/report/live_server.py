"""Web server of the live page. It listens on loopback and requires a token."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from paceline.errors import RunError
from paceline.report.charts import SERIES
from paceline.report.live_run import LiveRun, Pace
from paceline.report.live_state import Section, changes, curves_of, look_at, told_apart
from paceline.report.page import live_page

ADDRESS = "127.0.0.1"
EVERY_S, _ENDED_EVERY_S = 0.25, 2.0  # seconds between polls: while a run trains, and after all runs have ended
_DRAWN_EVERY_S = 1.0
RUN_COLOUR = "var(--run)"  # the page sets a different colour for each run
_ALIVE_S = 15.0  # interval of keep-alive messages, which detect disconnected browsers
CONNECTIONS = 32
_TAKEN_S = 1.0  # seconds for which data of a refused client is read
_BEHIND_BYTES = 2**20  # a client with more pending data is disconnected


class LiveServer:
    """Server that follows runs and sends their changes to every connected browser.

    One loop reads the runs for all clients. While no client is connected, nothing is read. A client that does not read
    its messages is disconnected, and gets the full state when it reconnects.

    Args:
        port: TCP port to listen on; 0 selects a free port.

    Attributes:
        url: address of the page, including the token. The address is known once `serve` has called `ready`.
        looks: number of polls so far.
    """

    def __init__(self, runs: Sequence[LiveRun], port: int = 0) -> None:
        self.runs, self.port, self.looks = list(runs), port, 0
        self._names = told_apart([run.run.path for run in self.runs])
        self._token = secrets.token_urlsafe(32)
        self._clients: set[asyncio.StreamWriter] = set()
        self._new: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shown: list[dict[str, Section]] = [{} for _ in self.runs]
        self._sent_at = 0.0
        self._curves: list[Section] = []
        self._compared: Section = None
        self._drawn_at = -math.inf

    @property
    def url(self) -> str:
        """Address of the page, including the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self._token}"

    @property
    def followers(self) -> int:
        """Number of connected clients."""
        return len(self._clients)

    async def serve(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Serve the page until `stop` is set. `ready` is called once the port is open.

        Raises:
            RunError: the server cannot listen on the port.
        """
        self._somebody = asyncio.Event()
        self._page, self._policy = live_page()
        try:
            server = await asyncio.start_server(self._connected, ADDRESS, self.port, limit=HEAD_BYTES)
        except OSError as error:
            raise RunError(
                "report.port_unusable",
                "the page cannot be served at {address}:{port}: {reason}. Choose another port.",
                address=ADDRESS,
                port=self.port,
                reason=error.strerror or error,
            ) from error
        self.port = server.sockets[0].getsockname()[1]
        following = asyncio.create_task(self._follow())
        stopping = asyncio.create_task(stop.wait())
        try:
            ready()
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.close()
            for writer in self._open:
                writer.transport.abort()
            following.cancel()
            stopping.cancel()
            ended = await asyncio.gather(following, stopping, *self._tasks, return_exceptions=True)
        if isinstance(ended[0], Exception):  # an error while following a run must not look like a normal end
            raise ended[0]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= 2 * CONNECTIONS:  # too many clients are connected to answer each of them
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):  # the client has disconnected
            pass
        finally:
            self._tasks.discard(task)
            self._open.discard(writer)
            self._clients.discard(writer)
            self._new.discard(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cookie = f"paceline-{self.port}"  # all ports of a host share cookies
        try:
            if len(self._open) > CONNECTIONS:
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"{CONNECTIONS} connections are already open")
            path = await read_request(reader, self._token, cookie)
            if path not in ("/", "/events"):
                raise RefusedError(HTTPStatus.NOT_FOUND, "the server has only the paths / and /events")
        except RefusedError as refused:
            await _refuse(reader, writer, refused.answer())
            return
        if path == "/events":
            await self._stream(reader, writer)
            return
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": len(self._page),
            "Content-Security-Policy": self._policy,
            "Set-Cookie": f"{cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/",
        }
        writer.write(head(HTTPStatus.OK, headers) + self._page)
        await writer.drain()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send all changes to a client until it disconnects."""
        writer.write(head(HTTPStatus.OK, {"Content-Type": "text/event-stream"}) + b"retry: 2000\n\n")
        if self._clients:
            self._clients.add(writer)
            self._send({writer}, "state", self._everything())
        else:
            self._new.add(writer)
            self._somebody.set()
        # a client sends nothing more; the end of its stream means that it has disconnected
        while await reader.read(HEAD_BYTES):
            pass

    async def _follow(self) -> None:
        """Poll the runs while clients are connected, and send the changes to the clients."""
        pace = Pace(EVERY_S)
        while True:
            if idle := not (self._clients or self._new):
                await self._somebody.wait()
            now = await asyncio.to_thread(self._look)
            changed = {
                number: sections
                for number, (before, after) in enumerate(zip(self._shown, now, strict=True))
                if (sections := changes(before, after))
            }
            self._shown = now
            if changed:
                compared = {"compared": self._compared} if any("curve" in one for one in changed.values()) else {}
                self._send(self._clients, "changes", {"runs": changed} | compared)
            elif time.monotonic() - self._sent_at > _ALIVE_S:
                self._write(self._clients, b":\n\n")
            if self._new:
                new, self._new = self._new, set()
                self._clients |= new
                self._send(new, "state", self._everything())
            if idle:  # the first poll after an idle time reads more than usual, so its cost is not representative
                pace = Pace(EVERY_S)
            pace.every_s = _ENDED_EVERY_S if all(run.ended for run in self.runs) else EVERY_S
            await self._pause(pace.wait_s())

    async def _pause(self, wait_s: float) -> None:
        """Wait until the next poll is due or a new client connects."""
        self._somebody.clear()
        await asyncio.sleep(EVERY_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._somebody.wait(), wait_s - EVERY_S)

    def _look(self) -> list[dict[str, Section]]:
        self.looks += 1
        found = [look_at(run, name) for run, name in zip(self.runs, self._names, strict=True)]
        if time.monotonic() - self._drawn_at >= _DRAWN_EVERY_S:
            self._draw()
        for sections, curve in zip(found, self._curves, strict=True):
            if "head" in sections:
                sections["curve"] = curve
        return found

    def _draw(self) -> None:
        """Redraw the curves. Drawing is slow, so it is not part of every poll."""
        self._drawn_at = time.monotonic()
        self._curves = [curves_of([("this run", RUN_COLOUR, run)]) for run in self.runs]
        colours = itertools.cycle(SERIES)
        several = list(zip(self._names, colours, self.runs, strict=False))
        self._compared = curves_of(several) if len(several) > 1 else None

    def _everything(self) -> dict[str, Any]:
        return {"now": time.time(), "runs": self._shown, "compared": self._compared}

    def _send(self, clients: set[asyncio.StreamWriter], event: str, values: dict[str, Any]) -> None:
        self._write(clients, b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(values)))

    def _write(self, clients: set[asyncio.StreamWriter], message: bytes) -> None:
        self._sent_at = time.monotonic()
        for writer in list(clients):
            writer.write(message)
            if writer.transport.get_write_buffer_size() > _BEHIND_BYTES:
                self._clients.discard(writer)
                writer.transport.abort()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes) -> None:
    """Send an answer, and read the client's remaining data for a while.

    If the connection were closed with unread data, the client might not get the answer.
    """
    writer.write(answer)
    writer.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(_TAKEN_S):
            while await reader.read(HEAD_BYTES):
                pass


HEAD_BYTES = 2**13  # largest head of a request
_HEAD_S = 5.0  # time in which the request must arrive
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_ALWAYS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Connection": "close",
}


class RefusedError(Exception):
    """Raised to refuse a request, with an HTTP status and a reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason

    def answer(self) -> bytes:
        """Return the HTTP response to the client."""
        more = {"Allow": "GET"} if self.status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        text = f"{self.reason}\n".encode()
        return (
            head(self.status, {"Content-Type": "text/plain; charset=utf-8", "Content-Length": len(text), **more}) + text
        )


async def read_request(reader: asyncio.StreamReader, token: str, cookie: str) -> str:
    """Read and check the head of a request, and return the requested path.

    Args:
        token: token that the request must contain in its address or in the cookie named `cookie`.

    Raises:
        RefusedError: the request is invalid or not authorized.
    """
    try:
        text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
    except asyncio.LimitOverrunError:
        raise RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request has more than {HEAD_BYTES:,} bytes"
        ) from None
    except TimeoutError:
        raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, f"no complete request within {_HEAD_S:g} s") from None
    first, *lines = text.decode("latin-1").split("\r\n")[:-2]
    method, _, rest = first.partition(" ")
    target, _, version = rest.rpartition(" ")
    if not version.startswith("HTTP/1.") or not target.startswith("/"):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the request is not valid HTTP")
    headers = _headers(lines)
    host = headers.get("host", "")
    # protects against DNS rebinding: another name may resolve to this machine
    if host.rpartition(":")[0] not in _LOOPBACK_NAMES and host not in _LOOPBACK_NAMES:
        raise RefusedError(HTTPStatus.FORBIDDEN, "the host of the address must be 127.0.0.1 or localhost")
    if headers.get("origin", f"http://{host}") != f"http://{host}":
        raise RefusedError(HTTPStatus.FORBIDDEN, "requests from other pages are not allowed")
    if method != "GET":
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET requests are supported")
    try:
        address = urlsplit(target)
        given = parse_qs(address.query, max_num_fields=8).get("token", [])
    except ValueError:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the address is not valid") from None
    if not any(_is(token, one) for one in [*given, *_cookies(headers.get("cookie", ""), cookie)]):
        raise RefusedError(
            HTTPStatus.FORBIDDEN, "the token is missing or wrong. Open the address that `paceline dashboard` printed."
        )
    return address.path


def head(status: HTTPStatus, headers: Mapping[str, object]) -> bytes:
    """Return the head of a response, including the headers that all responses have."""
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{k}: {v}" for k, v in {**_ALWAYS, **headers}.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name.strip() != name or (name == "host" and name in found):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the request has an invalid header")
        found[name] = value.strip()
    return found


def _cookies(header: str, name: str) -> list[str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for key, _, value in pairs if key == name]


def _is(token: str, given: str) -> bool:
    """Compare a value with the token in constant time."""
    return secrets.compare_digest(token.encode(), given.encode(errors="replace"))
