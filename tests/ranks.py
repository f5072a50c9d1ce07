"""Run a function of a test on several real ranks: processes that talk over gloo or shared memory, with a deadline.

The ranks are forked from a server that has torch imported, so that they start in milliseconds. A function is named by its file, so it may
stand in any test file, which is not a module that a fresh process could import.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from leaks import of_the_transport

_fork_server = multiprocessing.get_context("forkserver")
Backend = Literal["gloo", "shm", "tcp"]
_GRACE_S = 10.0  # for the other ranks to end after one has failed


class RankError(AssertionError):
    """A rank raised, died, or did not end in time. The text is the first one's traceback, or each late one's stack."""


class Ranks(Protocol):
    """The fixture `ranks`."""

    def __call__(
        self, size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0, backend: Backend = "gloo"
    ) -> list[Any]:
        """Call `function(*args)` on `size` ranks in an initialised group; returns their results in rank order (pickled)."""
        ...


def run_on_ranks(size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0, backend: Backend = "gloo") -> list[Any]:
    """Call `function(*args)` on `size` ranks, as `Ranks` says.

    The function must stand at the top level of its file. A rank finds RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in its environment.
    Over shared memory, a rank fails that keeps a mapping, descriptor or thread of the transport after the group has ended.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    environments = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return run_processes(environments, function, args, deadline_s, backend)


def run_processes(
    environments: Sequence[dict[str, str]],
    function: Callable[..., Any],
    args: Sequence[Any],
    deadline_s: float,
    backend: Backend | None = None,
    listener: socket.socket | None = None,
) -> list[Any]:
    """Call `function(*args)` in one process for each environment; returns results in order.

    Each environment adds to this process's own.

    Args:
        backend: of the process group that they then are in; None leaves joining one to the function.
        listener: the socket on which rank 0 serves the rendezvous, where the function joins.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        call = _Call(function.__code__.co_filename, function.__module__, function.__qualname__, pickle.dumps(tuple(args)))
        started = [
            _start(rank, _Start(call, environment, deadline_s, backend, None if rank else listener), Path(folder))
            for rank, environment in enumerate(environments)
        ]
        try:
            return _results(started, deadline_s)
        finally:
            for rank in started:
                rank.process.kill()
                rank.process.join()
                rank.process.close()
                rank.outcome.close()


@dataclass(frozen=True)
class _Call:
    """A function and its arguments, for a process that cannot import the module under its name."""

    file: str
    module: str
    function: str
    arguments: bytes

    def __call__(self) -> Any:
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        *packages, _ = self.module.split(".")
        for depth in range(len(packages)):
            package = ".".join(packages[: depth + 1])
            sys.modules.setdefault(package, ModuleType(package))
        sys.modules[self.module] = module  # pickle finds the file's classes here
        spec.loader.exec_module(module)
        return getattr(module, self.function)(*pickle.loads(self.arguments))


@dataclass(frozen=True)
class _Start:
    """What a rank is told."""

    call: _Call
    environment: dict[str, str]
    deadline_s: float
    backend: Backend | None
    listener: socket.socket | None


@dataclass(frozen=True)
class _Started:
    """A rank under way. `outcome` delivers (True, result) or (False, time, whether it only lost a peer, traceback)."""

    rank: int
    process: ForkServerProcess
    outcome: Connection
    stack: Path


def _start(rank: int, start: _Start, folder: Path) -> _Started:
    stack = folder / f"rank-{rank}.stack"
    receive, send = _fork_server.Pipe(duplex=False)
    start = replace(start, environment={**os.environ, **start.environment})
    process = _fork_server.Process(target=_run_rank, args=(start, os.getcwd(), stack, send), name=f"rank {rank}")
    process.start()
    send.close()
    return _Started(rank, process, receive, stack)


def _run_rank(start: _Start, folder: str, stack: Path, outcome: Connection) -> None:
    import torch
    import torch.distributed as dist

    import paceline.comm.shm
    import paceline.comm.tcp
    import paceline.comm.transport
    from paceline.cluster.emulate.hosts import enter_host
    from paceline.launch.failure import ErrorRecord
    from paceline.rank_environment import HostEntry

    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(folder)
    enter_host(HostEntry.from_env())
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if start.listener is not None:
        os.environ["PACELINE_STORE_FD"] = str(start.listener.detach())
    with open(stack, "w") as file:
        faulthandler.dump_traceback_later(start.deadline_s, file=file, exit=True)
        try:
            if start.backend == "tcp":  # between ranks of one host it would be shared memory
                paceline.comm.transport.host_identity = lambda: f"the host of rank {rank}"
            if start.backend:
                dist.init_process_group(start.backend, init_method=f"file://{stack.parent}/store", rank=rank, world_size=size)
            result = pickle.dumps((True, start.call()))
            if dist.is_initialized():
                dist.destroy_process_group()
            if found := of_the_transport():
                raise AssertionError(f"still there after the end of the process group: {found}")
        except BaseException as error:  # noqa: BLE001 - the test shows it
            result = pickle.dumps((False, time.time(), ErrorRecord.of(error, rank).secondary, traceback.format_exc()))
        outcome.send_bytes(result)
        faulthandler.cancel_dump_traceback_later()


def _results(started: Sequence[_Started], deadline_s: float) -> list[Any]:
    outcomes: dict[int, tuple[Any, ...]] = {}
    died: list[_Started] = []
    until = time.monotonic() + deadline_s + 1  # the ranks end themselves at the deadline, and leave their stacks
    pending = {rank.outcome: rank for rank in started}
    while pending and (left_s := until - time.monotonic()) > 0:
        for ready in wait(list(pending), timeout=left_s):
            rank = pending.pop(ready)  # type: ignore[call-overload]
            try:
                outcomes[rank.rank] = pickle.loads(rank.outcome.recv_bytes())
            except EOFError:
                died.append(rank)
            if died or not outcomes[rank.rank][0]:
                until = min(until, time.monotonic() + _GRACE_S)
    for rank in started:
        rank.process.join(max(0.0, until - time.monotonic()))
    failed = sorted((outcome[2], outcome[1], rank) for rank, outcome in outcomes.items() if not outcome[0])
    if failed and not (died and failed[0][0]):
        rank = failed[0][2]
        raise RankError(f"rank {rank} of {len(started)} failed first:\n{outcomes[rank][3]}")
    late = [r for r in started if r.rank not in outcomes]
    if late:
        raise RankError("\n".join(_why_missing(r, deadline_s) for r in late))
    stuck = [r.rank for r in started if r.process.exitcode != 0]
    if stuck:
        raise RankError(f"ranks {stuck} returned but did not end with exit code 0 in time: is a thread or a child of theirs still running?")
    return [outcomes[rank.rank][1] for rank in started]


def _why_missing(rank: _Started, deadline_s: float) -> str:
    rank.process.join(0)
    stack = rank.stack.read_text()
    if stack:
        return f"rank {rank.rank} was not done after {deadline_s:g} s:\n{stack}"
    return f"rank {rank.rank} ended without a result, exit code {rank.process.exitcode}"


def start_fork_server() -> None:
    """Start the process that ranks are forked from, with what they import already there."""
    from multiprocessing import forkserver

    imports = ["torch", "torch._dynamo", "numpy", "pytest", "hypothesis", "paceline.training.loop"]  # the first optimizer wants _dynamo
    _fork_server.set_forkserver_preload(imports)
    forkserver.ensure_running()
