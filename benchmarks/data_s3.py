"""Reading from an object store: bytes that each rank fetches, and waiting; parts of `data.py`.

The store is moto's S3 in its own process, behind a proxy in another process. The proxy delays requests, makes some of
them fail, and counts the bytes that it sends.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import boto3

import data_corpora as corpora
from data_ours import data_of, loader_of
from data_serve import Task
from data_speed import SEED
from paceline.units import percent

FAILING, LATENCY_S, STEP_S = 0.05, 0.2, 0.05
STEPS, QUICK_STEPS, WINDOW = 1200, 160, 128
BUCKET = "corpora"
KEYS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
_COUNTS = "/__counts__"


def waiting_measured(folder: Path, quick: bool) -> dict[str, float]:
    """Return the share of its time that a training loop waits because its data is in a slow and failing store.

    A step takes STEP_S. The time of the same loop on local files is not counted as waiting. The first batch
    is not counted, but printed.
    """
    steps = QUICK_STEPS if quick else STEPS
    source = corpora.tokens(folder, 81_920, shards=512)
    with own_cache():
        local = looped(str(source), steps)
    with store(source, latency_s=LATENCY_S, failing=FAILING) as url, own_cache():
        remote = looped(url, steps)
        sent = counts()
    share = max(0.0, remote.waited_s - local.waited_s) / (remote.waited_s + steps * STEP_S)
    for name, loop in (("local files", local), ("S3", remote)):
        print(
            f"{name}: opened in {loop.opened_s:.1f} s, first batch after {loop.first_s:.1f} s, "
            f"then {1e3 * loop.waited_s / steps:.2f} ms per batch in {steps} steps of {1e3 * STEP_S:.0f} ms"
        )
    print(f"S3: {sent['failed']} of {sent['requests']} requests failed; {percent(share)} of the time was waiting")
    received = local.waited_s / (local.waited_s + steps * STEP_S)
    return {"waiting_share": share, "receiving_share": received, "opened_s": remote.opened_s}


class Loop(NamedTuple):
    """Seconds to open the data, to the first batch, and in the loader during the following steps."""

    opened_s: float
    first_s: float
    waited_s: float


def looped(source: str, steps: int) -> Loop:
    """Run a training loop without a model."""
    task = Task("tokens", source, "", 64, 1, seed=SEED, window=WINDOW)
    begin = time.perf_counter()
    loader = loader_of(task, data_of(task))
    opened = time.perf_counter()
    with closing(loader):
        batches = iter(loader)
        next(batches)
        first, waited_s = time.perf_counter(), 0.0
        for _ in range(steps):
            time.sleep(STEP_S)
            asked = time.perf_counter()
            next(batches)
            waited_s += time.perf_counter() - asked
    return Loop(opened - begin, first - opened, waited_s)


def bytes_measured(folder: Path, quick: bool) -> dict[str, float]:
    """Return a rank's fetched bytes in an epoch / its share of the corpus: the worst of 1 to 8 ranks.

    A rank's share is that of its samples. Each rank has a cache of its own, as if it were alone on its host.
    """
    rows = 40_960 if quick else 163_840
    # the first start reads only the ends of remote Parquet files
    source = corpora.tokens(folder, rows, shards=256)
    size = sum(path.stat().st_size for path in source.glob("*.parquet"))
    worst = 0.0
    with store(source) as url:
        for ranks in (1, 2, 3, 4, 5, 6, 7, 8):
            found = [fetched(Task("tokens", url, "", 64, 0, seed=SEED), rank, ranks, size) for rank in range(ranks)]
            over = max(share for _, share in found)
            opening = max(opened for opened, _ in found) / size
            print(
                f"  ranks: {ranks}, bytes fetched / share: {over:.3f}; to open, of the corpus: {opening:.4f}",
                flush=True,
            )
            worst = max(worst, over)
    return {"bytes_to_share": worst}


def fetched(task: Task, rank: int, ranks: int, size: int) -> tuple[int, float]:
    """Read a rank's epoch; return the bytes fetched to open the corpus, and those of the epoch / the rank's share."""
    with own_cache():
        before = counts()["bytes"]
        data = data_of(task)
        opened = counts()["bytes"]
        samples = 0
        with closing(loader_of(task, data, rank, ranks)) as loader:
            for batch in loader:
                samples += 0 if batch is None else len(batch[0])
        share = size * samples / len(data.train)  # type: ignore[arg-type]
        return opened - before, (counts()["bytes"] - opened) / share


@contextmanager
def own_cache() -> Iterator[None]:
    """Give this process an empty cache."""
    name = "XDG_CACHE_HOME"
    kept = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="paceline-cache-") as place:
        os.environ[name] = place
        try:
            yield
        finally:
            os.environ.pop(name)
            if kept is not None:
                os.environ[name] = kept


# The store


@contextmanager
def store(source: Path, *, latency_s: float = 0.0, failing: float = 0.0) -> Iterator[str]:
    """Put a folder's files into a store; yield its URL. The environment names the store to this process."""
    with ExitStack() as held:
        server = held.enter_context(process("moto"))
        upload(source, server)
        proxy = held.enter_context(process("proxy", str(server), str(latency_s), str(failing)))
        settings = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy}"}
        kept = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield f"s3://{BUCKET}/{source.name}"
        finally:
            for name, value in kept.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def upload(source: Path, port: int) -> None:
    """Upload a folder's files."""
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
    client: Any = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(source.iterdir()):
        if path.stat().st_size:
            client.upload_file(str(path), BUCKET, f"{source.name}/{path.name}")


def counts() -> dict[str, int]:
    """Return what the proxy has counted."""
    with urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"] + _COUNTS) as answer:
        found: dict[str, int] = json.load(answer)
    return found


@contextmanager
def process(*words: str) -> Iterator[int]:
    """Run this file as a server; yield its port."""
    running = subprocess.Popen(
        [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert running.stdout is not None
    try:
        yield int(running.stdout.readline())
    finally:
        running.kill()
        running.communicate()


def serve_moto() -> None:
    """Serve S3 until this process is killed."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


def serve_proxy(target: int, latency_s: float, failing: float) -> None:
    """Pass requests on until this process is killed."""
    dice, counted = random.Random(SEED), {"requests": 0, "failed": 0, "bytes": 0}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            if self.path == _COUNTS:
                self.send(200, {"Content-Type": "application/json"}, json.dumps(counted).encode())
                return
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            time.sleep(latency_s)
            counted["requests"] += 1
            if dice.random() < failing:
                counted["failed"] += 1
                self.send(503, {"Content-Type": "text/plain"}, b"SlowDown")
                return
            connection = http.client.HTTPConnection("127.0.0.1", target, timeout=60)
            with closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers))
                found = connection.getresponse()
                content = found.read()
            counted["bytes"] += len(content)
            kept = {name: value for name, value in found.getheaders() if name.lower() not in _HOP}
            self.send(found.status, kept, content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "content-length" not in map(str.lower, headers):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


_HOP = ("connection", "transfer-encoding", "date", "server")

if __name__ == "__main__":
    if sys.argv[1] == "moto":
        serve_moto()
    else:
        serve_proxy(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
