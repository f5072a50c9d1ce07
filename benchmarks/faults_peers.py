"""The kills of `faults.py` on torchft and on Horovod Elastic: four replicas of its model, one killed again and again.

A replica of `faults_torchft.py` or `faults_horovod.py` writes a line for every step that it committed. torchft's are
started again here at once, as torchrun would; Horovod's launcher starts its own again.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from faults_found import REPLICAS, REST_S, SEED, Faults, read, wait_for

Start = Callable[..., subprocess.Popen[bytes]]
Peer = Callable[[Path, str, ExitStack], tuple[subprocess.Popen[bytes], Callable[[int], None]]]
PATIENCE_S = 300.0  # beside other work an import alone may take a minute
# What its launcher takes for hosts: each is blamed, and left out for a while, on its own. All are this machine.
HOSTS = ["127.0.0.1", "127.1", "127.0.1", "2130706433"]


def measured_on(peer: Peer, folder: Path, python: str, faults: int) -> Faults:
    """What kills of a peer's replicas cost."""
    folder.mkdir()
    found = Faults()
    kills: list[float] = []
    random.seed(SEED)
    with ExitStack() as held:
        process, kill = peer(folder, python, held)
        # whoever comes first trains alone
        if not wait_for(lambda: len(taken_by_all(folder)) > 5, process, PATIENCE_S):
            raise RuntimeError(f"{REPLICAS} replicas do not train together: {(folder / 'log').read_text()[-2000:]}")
        for _ in range(faults):
            time.sleep(REST_S)
            number = random.randrange(REPLICAS)
            kills.append(time.time())
            kill(number)
            if not wait_for(partial(has_come_back, folder, number, kills[-1]), process, PATIENCE_S):
                found.hangs += 1
                break
        time.sleep(REST_S)
    steps, whole = committed(folder), min(taken_by_all(folder))  # the start is no fault
    steps = {step: line for step, line in steps.items() if step >= whole}
    back = [returned(folder, number) for number in range(REPLICAS)]
    found.note(kills, sorted(line["time"] for line in steps.values()), sorted(itertools.chain(*back)))
    found.steps_lost = max(steps) - whole + 1 - len(steps)
    found.short_steps = sum(line["replicas"] < REPLICAS for line in steps.values())
    return found


def torchft(folder: Path, python: str, held: ExitStack) -> tuple[subprocess.Popen[bytes], Callable[[int], None]]:
    """torchft's lighthouse and replicas, and what kills one and starts it again."""
    start = held.enter_context(processes(folder, python, "faults_torchft.py"))
    lighthouse = start("lighthouse", folder)
    if not wait_for((folder / "lighthouse").exists, lighthouse):
        raise RuntimeError(f"torchft's lighthouse does not start: {(folder / 'log').read_text()[-2000:]}")
    address = (folder / "lighthouse").read_text()
    replicas = [start("replica", folder, number, address) for number in range(REPLICAS)]

    def kill(number: int) -> None:
        replicas[number].kill()
        replicas[number].wait()
        replicas[number] = start("replica", folder, number, address)

    return lighthouse, kill


def horovod(folder: Path, python: str, held: ExitStack) -> tuple[subprocess.Popen[bytes], Callable[[int], None]]:
    """Horovod's elastic launcher with a replica on each of four hosts, and what kills one."""
    found = folder / "hosts.sh"
    found.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in HOSTS))
    found.chmod(0o700)
    start = held.enter_context(processes(folder, python, "-m", "horovod.runner.launch"))
    elastic = ["--gloo", "-np", REPLICAS, "--min-np", 1, "--host-discovery-script", found]
    elastic += ["--blacklist-cooldown-range", 1, 2]  # seconds that a host which failed is left out, the least
    script = Path(__file__).with_name("faults_horovod.py")
    launcher = start(*elastic, python, script, folder, *HOSTS)

    def kill(number: int) -> None:
        os.kill(read(folder / f"replica-{number}.jsonl")[-1]["pid"], signal.SIGKILL)

    return launcher, kill


@contextmanager
def processes(folder: Path, python: str, *program: str) -> Iterator[Start]:
    """What starts a program with arguments; no process, nor one that it has started, is left at the end.

    Python's resource tracker, which removes what killed processes leave in /dev/shm, ends by itself.
    """
    started: list[subprocess.Popen[bytes]] = []
    here = [str(Path(__file__).with_name(word)) if word.endswith(".py") else word for word in program]

    def start(*arguments: object) -> subprocess.Popen[bytes]:
        with open(folder / "log", "ab") as log:
            started.append(subprocess.Popen([python, *here, *map(str, arguments)], stdout=log, stderr=log))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    if not any("resource_tracker" in word for word in child.cmdline()):
                        child.kill()
            process.kill()
            process.wait()


def committed(folder: Path) -> dict[int, dict[str, Any]]:
    """First line of every step that replicas committed."""
    lines = sorted((line for file in folder.glob("*.jsonl") for line in read(file)), key=lambda line: -line["time"])
    return {line["step"]: line for line in lines}


def taken_by_all(folder: Path) -> list[int]:
    """Steps in which all replicas took part."""
    return [step for step, line in committed(folder).items() if line["replicas"] == REPLICAS]


def returned(folder: Path, number: int) -> list[float]:
    """Times of the first steps that each process of a replica committed."""
    first: dict[int, float] = {}
    for line in read(folder / f"replica-{number}.jsonl"):
        first.setdefault(line["pid"], line["time"])
    return list(first.values())[1:]


def has_come_back(folder: Path, number: int, after: float) -> bool:
    """True once a replica has committed a step since then."""
    return any(time > after for time in returned(folder, number))


PEERS: dict[str, Peer] = {"torchft": torchft, "horovod": horovod}
