"""The live page, served by the command `paceline dashboard`, and requests to it byte by byte."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import DEADLINE_S, started


@dataclass(frozen=True)
class Served:
    """A page under way: its process, its address, its port and its token."""

    process: subprocess.Popen[str]
    url: str
    port: int
    token: str

    def ask(self, target: str, *lines: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
        """Status and text of the whole answer to a request."""
        with self.asked(target, *lines, method=method, host=host) as connection:
            return _answer(b"".join(iter(lambda: connection.recv(2**16), b"")))

    def send(self, request: bytes) -> tuple[int, str]:
        """Status and text of the whole answer to any bytes."""
        with socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as connection:
            connection.sendall(request)
            return _answer(b"".join(iter(lambda: connection.recv(2**16), b"")))

    @contextmanager
    def asked(self, target: str, *lines: str, method: str = "GET", host: str | None = None) -> Iterator[socket.socket]:
        """A connection on which a request was sent."""
        head = [f"{method} {target} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", *lines, "", ""]
        with socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as connection:
            connection.sendall("\r\n".join(head).encode())
            yield connection

    @contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """Names and values of the events that the page is told of, as they come."""
        with self.asked(f"/events?token={self.token}") as connection, connection.makefile("r") as text:
            assert text.readline().split()[1] == "200"
            yield _events(text)


@contextmanager
def served(*runs: Path, folder: Path) -> Iterator[Served]:
    """`paceline dashboard RUN…` under way."""
    with started("paceline", "dashboard", *runs, folder=folder) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:(\d+)/\?token=(\S+))", said)
        assert found, said + process.communicate()[1]
        yield Served(process, found[1], int(found[2]), found[3])


def _answer(response: bytes) -> tuple[int, str]:
    text = response.decode()
    return int(text.split(" ", 2)[1]), text


def _events(lines: Any) -> Iterator[tuple[str, Any]]:
    for line in lines:
        if line.startswith("event: "):
            yield line[7:].strip(), json.loads(lines.readline().removeprefix("data: "))
