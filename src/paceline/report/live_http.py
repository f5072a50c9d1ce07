"""Requests to the live page: what a browser may ask, and who is refused."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

HEAD_BYTES = 2**13  # of a request
_HEAD_S = 5.0  # in which it has to be there
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
    """A request that is refused, with its status and the reason for a person."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason

    def answer(self) -> bytes:
        """The response."""
        more = {"Allow": "GET"} if self.status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        text = f"{self.reason}\n".encode()
        return (
            head(self.status, {"Content-Type": "text/plain; charset=utf-8", "Content-Length": len(text), **more}) + text
        )


async def read_request(reader: asyncio.StreamReader, token: str, cookie: str) -> str:
    """Read the head of a request and check it; returns its path.

    Args:
        token: what the address or the cookie has to hold; `cookie` is the cookie's name.

    Raises:
        RefusedError: it may not be answered.
    """
    try:
        text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
    except asyncio.LimitOverrunError:
        raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {HEAD_BYTES:,} bytes") from None
    except TimeoutError:
        raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, f"no whole request within {_HEAD_S:g} s") from None
    first, *lines = text.decode("latin-1").split("\r\n")[:-2]
    method, _, rest = first.partition(" ")
    target, _, version = rest.rpartition(" ")
    if not version.startswith("HTTP/1.") or not target.startswith("/"):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "this is no HTTP request")
    headers = _headers(lines)
    host = headers.get("host", "")
    # a name that an attacker's server resolves to this machine is not a name of this machine
    if host.rpartition(":")[0] not in _LOOPBACK_NAMES and host not in _LOOPBACK_NAMES:
        raise RefusedError(HTTPStatus.FORBIDDEN, "the host of the address has to be 127.0.0.1 or localhost")
    if headers.get("origin", f"http://{host}") != f"http://{host}":
        raise RefusedError(HTTPStatus.FORBIDDEN, "another page may not ask")
    if method != "GET":
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")
    try:
        address = urlsplit(target)
        given = parse_qs(address.query, max_num_fields=8).get("token", [])
    except ValueError:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "this is no address") from None
    if not any(_is(token, one) for one in [*given, *_cookies(headers.get("cookie", ""), cookie)]):
        raise RefusedError(
            HTTPStatus.FORBIDDEN, "open the address that `paceline dashboard` printed: its token is missing"
        )
    return address.path


def head(status: HTTPStatus, headers: Mapping[str, object]) -> bytes:
    """The head of a response, with the headers that all have."""
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{k}: {v}" for k, v in {**_ALWAYS, **headers}.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def _headers(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name.strip() != name or (name == "host" and name in found):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a header is not as HTTP has it")
        found[name] = value.strip()
    return found


def _cookies(header: str, name: str) -> list[str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for key, _, value in pairs if key == name]


def _is(token: str, given: str) -> bool:
    """True for the token; how long it takes does not tell how much is right."""
    return secrets.compare_digest(token.encode(), given.encode(errors="replace"))
