"""A real S3 server in a process of its own, a slow link to it, and a front that fails now and then."""

from __future__ import annotations

import http.client
import http.server
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BUCKET = "bucket"
DEADLINE_S = 120.0
_SERVER = """
import signal, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
server.start()
import boto3
for bucket in sys.argv[2:]:
    boto3.client("s3", endpoint_url="http://{}:{}".format(*server.get_host_and_port())).create_bucket(Bucket=bucket)
print(server.get_host_and_port()[1], flush=True)
signal.pause()
"""


@dataclass
class S3:
    """A server whose objects live as long as its process; `environment` leads a program there."""

    folder: Path
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def start(self, *buckets: str, **settings: str) -> None:
        """Start it, on the port that it had; it has answered once when this returns."""
        own = {"AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "own", "AWS_DEFAULT_REGION": "us-east-1"}
        with (self.folder / "s3.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(self.port), *(buckets or (BUCKET,))],
                env={**os.environ, **own, **settings, "TMPDIR": str(self.folder)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "s3.log").read_text()
        self.port = int(answer)
        self.environment = {
            **own,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def stop(self) -> None:
        """Kill it, with all its objects."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(DEADLINE_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


class Link:
    """A port that leads to a server, over which no more than so many bytes a second go; it can be cut and mended."""

    def __init__(self, to: int, bytes_per_s: float = 1e9) -> None:
        self.to, self.bytes_per_s, self.port = to, bytes_per_s, 0
        self.carried = 0
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.mend()

    def mend(self) -> None:
        """Let connections through."""
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listening.getsockname()[1]
        self._start(self._accept, self._listening)

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for one in self._sockets:
            one.close()
        self._sockets.clear()
        self._threads.clear()

    def _start(self, what: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=what, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                one = listening.accept()[0]
                other = socket.create_connection(("127.0.0.1", self.to))
                with self._lock:
                    self._sockets |= {one, other}
                self._start(self._carry, one, other)
                self._start(self._carry, other, one)

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(16384):
                time.sleep(len(data) / self.bytes_per_s)
                other.sendall(data)
                self.carried += len(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)


@contextmanager
def linked(server: S3, bytes_per_s: float = 1e9) -> Iterator[Link]:
    """A link to a server that ends with the block."""
    link = Link(server.port, bytes_per_s)
    try:
        yield link
    finally:
        link.cut()


class Front:
    """A port that answers as a server does, later, and that refuses or drops a share of the requests.

    Attributes:
        failing: share of the requests that fail, 1 for an outage.
        requests: number of requests so far.
    """

    def __init__(self, to: int, failing: float, latency_s: float) -> None:
        self.to, self.failing, self.latency_s, self.requests = to, failing, latency_s, 0
        self._draw, self._lock = random.Random(1), threading.Lock()
        front = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                front._answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        """End all threads; clients must have closed their connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)

    def _answer(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        time.sleep(self.latency_s)
        with self._lock:
            self.requests += 1
            fails, drops = self._draw.random() < self.failing, self._draw.random() < 0.5
        if fails and drops:
            asked.close_connection = True
            return
        if fails:
            asked.send_error(503, "Slow down")
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.to, timeout=DEADLINE_S)
        connection.request(asked.command, asked.path, body, dict(asked.headers))
        answer = connection.getresponse()
        content = answer.read()
        asked.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                asked.send_header(name, value)
        length = answer.getheader("Content-Length") if asked.command == "HEAD" else str(len(content))
        asked.send_header("Content-Length", length or "0")
        asked.end_headers()
        asked.wfile.write(content)
        connection.close()


@contextmanager
def fronted(server: S3, failing: float, latency_s: float = 0.2) -> Iterator[Front]:
    """A front of a server that ends with the block."""
    front = Front(server.port, failing, latency_s)
    try:
        yield front
    finally:
        front.close()


def reached_over(link: Link | Front, server: S3) -> dict[str, str]:
    """The environment of a program that reaches a server over a link."""
    return server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}


@contextmanager
def serving(folder: Path) -> Iterator[S3]:
    """A server that ends with the block."""
    server = S3(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
