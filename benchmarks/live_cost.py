"""Cost of looking at a run that trains: `paceline watch` in a terminal, and the live page with a browser's stream.

    python benchmarks/live_cost.py [--seconds 20] [--json]

A process writes what ranks with steps of 10 ms write: a line for each step and rank, as the recorder writes them,
with a reading of the machine in each second. `paceline watch` (in a pseudo-terminal) and `paceline dashboard` (with one
client that takes its events) follow it, in processes of their own. Counted is the CPU time that each takes, after
its first look, so that what else the machine does bears little on it.

Figures, of 2 ranks, and with `_64_ranks` behind their names of 64:
- `watch_share_of_10ms_step`, `serve_share_of_10ms_step`: CPU seconds per second of one core. A rank whose core is
  taken for that time is so much slower, and all others wait for it: the most that looking can cost a step.
- `both_share_of_10ms_step`: their sum.
- `idle_share`: that of `paceline dashboard` while nobody looks.
- `updates_per_s`: how often the page hears of changes.

What ranks pay to write their record is in `benchmarks/overhead.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from measure import environment_line, parser_of
from paceline.cluster.discover import discover
from paceline.engine.meter import PARTS
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run

STEP_S, GREETING_S = 0.01, 8.0  # the other: in which the first look is over
JOB: dict[str, Any] = {
    "name": "watched",
    "model": {"zoo": "mlp", "args": {"hidden": 8}},
    "data": {"kind": "synthetic", "samples": 4096, "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "global_batch": 64,
    "stop": {"steps": 1_000_000},
}
_USE = {
    "cpu_cores": 0.98,
    "memory_bytes": 243_314_688,
    "peak_memory_bytes": 243_314_688,
    "weights_bytes": 203_612,
    "gradients_bytes": 203_612,
    "optimizer_bytes": 0,
    "communication_bytes": 0,
    "network_sent_bytes": 20_381_204,
    "network_received_bytes": 20_381_204,
    "reduced_bytes": 20_380_800,
    "wire_bytes": 20_360_800,
    "saved_bytes": 0,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)  # a run's directory and its ranks
    given = parser.parse_args()
    if given.write:
        write_steps(Path(given.write[0]), int(given.write[1]))
        return
    found = {ranks: measured(ranks, given.seconds) for ranks in (2, 64)}
    print("ranks     watch     serve      both  page without reader  updates/s   shares of one core")
    for ranks, figures in found.items():
        watch, serve, both, idle = (f"{100 * share:>6.2f} %" for share in list(figures.values())[:4])
        print(f"{ranks:>5}  {watch}  {serve}  {both}  {idle:>19}  {figures['updates_per_s']:>9.2f}")
    print(environment_line())
    if given.json:
        print(json.dumps(found[2] | {f"{name}_64_ranks": figure for name, figure in found[64].items()}))


def measured(ranks: int, seconds: float) -> dict[str, float]:
    """Shares of one core, by figure."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Run.create(Path(folder, "run"), Job(**JOB), discover(), Plan(dp=ranks))
        stack.enter_context(started([sys.executable, __file__, "--write", str(run.path), str(ranks)]))
        watching = stack.enter_context(on_a_terminal(["watch", str(run.path)]))
        serving = stack.enter_context(started(paceline("serve", str(run.path)), stdout=subprocess.PIPE))
        assert serving.stdout is not None
        [(port, token)] = re.findall(rb"127\.0\.0\.1:(\d+)/\?token=(\S+)", serving.stdout.readline())
        time.sleep(GREETING_S)
        idle = cpu_shares(serving, seconds=seconds / 4)[0]
        heard = stack.enter_context(looking(int(port), token.decode()))
        time.sleep(GREETING_S)
        before = heard[0]
        watch, serve = cpu_shares(watching, serving, seconds=seconds)
    return {
        "watch_share_of_10ms_step": watch,
        "serve_share_of_10ms_step": serve,
        "both_share_of_10ms_step": watch + serve,
        "idle_share": idle,
        "updates_per_s": (heard[0] - before) / seconds,
    }


def cpu_shares(*processes: subprocess.Popen[bytes], seconds: float) -> list[float]:
    """CPU seconds of each per second of a stretch."""
    before, began = [_cpu_s(process) for process in processes], time.monotonic()
    time.sleep(seconds)
    assert all(process.poll() is None for process in processes), "one has ended"
    passed_s = time.monotonic() - began
    return [(_cpu_s(process) - spent) / passed_s for process, spent in zip(processes, before, strict=True)]


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def paceline(*arguments: str) -> list[str]:
    """The command line of paceline."""
    return [sys.executable, "-u", "-m", "paceline", *arguments]


@contextmanager
def started(command: list[str], **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process under way, killed at the end."""
    with subprocess.Popen(command, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def on_a_terminal(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command of paceline in a terminal of 120 columns and 40 lines, whose screen is read by a process."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with (
        started(paceline(*arguments), stdin=theirs, stdout=theirs, env=environment) as process,
        started(["cat"], stdin=ours, stdout=subprocess.DEVNULL),
    ):
        os.close(theirs)
        os.close(ours)
        yield process


@contextmanager
def looking(port: int, token: str) -> Iterator[list[int]]:
    """A client that takes the page's events, and counts those about changes."""
    heard = [0]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"GET /events?token={token} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())

        def take() -> None:
            with connection.makefile("rb") as lines:
                for line in lines:
                    heard[0] += line.startswith(b"event: changes")

        taking = threading.Thread(target=take)
        taking.start()
        try:
            yield heard
        finally:
            connection.shutdown(socket.SHUT_RDWR)
            taking.join()


def write_steps(run: Path, ranks: int) -> None:
    """Write steps of 10 ms for all ranks, until this process is ended."""
    with open(run / "events.jsonl", "w") as events:
        start = {"step": 0, "ranks": ranks, "total_steps": 1_000_000, "transport": "shm"}
        events.write(json.dumps({"event": "start", "time": time.time(), **start}) + "\n")
    files = [open(run / "steps" / f"rank-{rank}.jsonl", "ab", buffering=0) for rank in range(ranks)]  # noqa: SIM115
    shares = dict(zip(PARTS, (0.05, 0.7, 0.0, 0.1, 0.08, 0.07, 0.0), strict=True))
    times = ",".join(f'"{part}_s":{share * STEP_S:.6f}' for part, share in shares.items())
    due = time.monotonic()
    step = 0
    while True:
        step += 1
        due += STEP_S
        use = "," + json.dumps({"use": _USE})[1:-1] if step % 100 == 0 else ""
        line = (
            f'{{"step":{step},"epoch":{step // 64},"time":{time.time():.3f},"loss":{2.3 / (1 + step / 500)!r},'
            f'"samples":64,"local_samples":{64 // ranks},"lr":0.1,"grad_norm":1.4627081155776978,'
            f'"step_s":{STEP_S:.6f},{times}{use}}}\n'
        ).encode()
        for file in files:
            file.write(line)
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
