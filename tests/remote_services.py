"""A service in a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forked import python
from paceline.wire.key import RunKey, read_key, write_key
from paceline_server.service import Caller, Service
from paceline_server.talk import LATER, at_once, quick
from paceline_server.values import sendable

DEADLINE_S = 30.0
LOOPBACK = ("127.0.0.1", 0)


@sendable
@dataclass
class Point:
    """A dataclass that both ends know."""

    x: float
    at: Tensor


@quick
def echo(caller: Caller, value: Any) -> Any:
    return value


def doubled(caller: Caller, value: Tensor) -> Tensor:
    return value.mul_(2)


def fail(caller: Caller, text: str) -> None:
    raise ValueError(text)


def unsendable(caller: Caller) -> object:
    return object()


def count(caller: Caller, until: int) -> Iterator[Tensor]:
    """Numbers, one by one; the last is not reached where `until` is negative."""
    number = 0
    while number != until:
        yield torch.tensor(number)
        number += 1


def end(caller: Caller) -> None:
    os._exit(1)


class State:
    def __init__(self) -> None:
        self.threads: list[str] = []
        self.left: list[str] = []
        self.open = threading.Event()
        self.changed = threading.Condition()

    def wait(self, caller: Caller) -> str:
        assert self.open.wait(DEADLINE_S)
        return "released"

    def taken(self, caller: Caller, values: Tensor) -> Tensor:
        """Twice the argument, in its memory, once `release` was called."""
        assert self.open.wait(DEADLINE_S)
        self.threads.append(threading.current_thread().name)
        return values.mul_(2)

    def taken_now(self, caller: Caller, values: Tensor) -> Any:
        """`taken`, where that waits for nobody."""
        return self.taken(caller, values) if self.open.is_set() else LATER

    @quick
    def release(self, caller: Caller) -> None:
        self.open.set()

    def leave(self, caller: Caller) -> None:
        with self.changed:
            self.left.append(caller.name)
            self.changed.notify_all()

    def who_left(self, caller: Caller, number: int) -> list[str]:
        """Names of those who have gone, once there are so many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.left) >= number, DEADLINE_S)
        return self.left

    def functions(self) -> dict[str, Callable[..., Any]]:
        alone = {f.__name__: f for f in (echo, doubled, fail, unsendable, count, end)}
        own = {f.__name__: f for f in (self.wait, self.release, self.who_left)}
        taken = at_once(lambda *args: self.taken(*args), self.taken_now)
        return {**alone, **own, "taken": taken, "threads": lambda caller: self.threads}


@contextmanager
def service(where: Any, key: RunKey | None, state: State | None = None, **settings: Any) -> Iterator[Service]:
    state = state or State()
    with Service(where, key, state.functions(), on_lost=state.leave, **settings) as serving:
        yield serving


@contextmanager
def service_process(folder: Path, key: RunKey | None) -> Iterator[tuple[tuple[str, int] | Path, subprocess.Popen[str]]]:
    """Address and process of a service: over TLS with a key, over a Unix socket without."""
    folder.chmod(0o700)
    if key is not None:
        write_key(key, folder / "key")
    process = python(f"import remote_services\nremote_services.serve({str(folder)!r})", stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield ("127.0.0.1", port) if key else folder / "socket", process
    finally:
        process.kill()
        process.communicate()


def serve(folder: str) -> None:
    """Serve until this process is killed; says the port."""
    file = Path(folder) / "key"
    key = read_key(file) if file.exists() else None
    with service(LOOPBACK if key else Path(folder) / "socket", key) as serving:
        print(serving.address[1] if isinstance(serving.address, tuple) else 0, flush=True)
        threading.Event().wait()


def ends(kind: str, folder: Path) -> tuple[Any, RunKey | None]:
    """Place and key of a service: "TLS", or "Unix socket"."""
    folder.chmod(0o700)
    return (LOOPBACK, RunKey.make()) if kind == "TLS" else (folder / "socket", None)
