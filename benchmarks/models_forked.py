"""Ranks forked from a process with torch and transformers in it.

So hundreds of small launches take seconds each.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

from paceline.cluster.cluster import Cluster
from paceline.errors import LaunchError
from paceline.job.job import Job
from paceline.launch.failure import ErrorRecord
from paceline.launch.place import on_this_machine
from paceline.plans.plan import Plan

_GRACE_S = 2.0  # for the other ranks to say what they saw, after one has failed
_fork = multiprocessing.get_context("forkserver")


class RankFailure(LaunchError):
    """A rank failed or was not done in time; `record` is what it left, None where it left nothing."""

    def __init__(self, text: str, record: ErrorRecord | None) -> None:
        super().__init__(text)
        self.record = record


def start_server(imports: Sequence[str]) -> None:
    """Start the process that ranks are forked from, with these modules in it; it finds them where this process does."""
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    _fork.set_forkserver_preload(list(imports))
    forkserver.ensure_running()


def fork_to_look(module_args: list[str], job: Job, cluster: Cluster, plan: Plan) -> None:
    """As `launch_to_look`, by forks of the server instead of new interpreters, on this machine.

    Raises:
        RankFailure: a rank raised, hung or was killed.
    """
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        records = [Path(folder) / f"rank-{rank}.error" for rank in range(plan.ranks)]
        started: list[ForkServerProcess] = []
        with on_this_machine(plan.ranks)[0].listen(None, 64) as listener:
            port = listener.getsockname()[1]
            places = on_this_machine(plan.ranks)
            for rank, record in enumerate(records):
                own = places[rank].environment(rank, plan.ranks, places[0], port).to_env()
                arguments = (module_args, own, record, job.deadline_s, list(sys.path), None if rank else listener)
                started.append(_fork.Process(target=_run, args=arguments))
                started[-1].start()
        try:
            _wait(started, job.deadline_s + 5)
            _raise_failure(started, records)
        finally:
            for process in started:
                process.kill()
                process.join()
                process.close()


def _wait(started: list[ForkServerProcess], deadline_s: float) -> None:
    until, pending = time.monotonic() + deadline_s, {process.sentinel: process for process in started}
    while pending and (left_s := until - time.monotonic()) > 0:
        for sentinel in wait(list(pending), timeout=left_s):
            process = pending.pop(cast(int, sentinel))
            process.join()
            if process.exitcode:
                until = min(until, time.monotonic() + _GRACE_S)


def _raise_failure(started: list[ForkServerProcess], records: list[Path]) -> None:
    if all(process.exitcode == 0 for process in started):
        return
    found = [record for path in records if (record := ErrorRecord.read(path)) is not None]
    if found:
        first = min(found, key=lambda record: (record.secondary, record.time))
        raise RankFailure(first.message, first)
    codes = [process.exitcode for process in started]
    stacks = "\n".join(stack.read_text() for path in records if (stack := path.with_suffix(".stack")).exists())
    raise RankFailure(f"ranks ended with {codes} (None: not done in time) and left no error\n{stacks}", None)


def _run(
    module_args: list[str],
    environment: dict[str, str],
    record: Path,
    deadline_s: float,
    path: list[str],
    listener: socket.socket | None,
) -> None:
    import torch

    from paceline.job.read.imports import load_object

    os.environ.update(environment)
    if listener is not None:
        os.environ["PACELINE_STORE_FD"] = str(listener.detach())
    sys.path[:] = path
    torch.set_num_threads(1)
    stack = open(record.with_suffix(".stack"), "w")  # noqa: SIM115 - as long as the process lives
    os.dup2(stack.fileno(), 1)
    os.dup2(stack.fileno(), 2)
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(deadline_s, file=stack, exit=True)
    try:
        load_object(module_args[0])(module_args[1:])
    except BaseException as error:  # noqa: BLE001 - whatever it was, it is an outcome
        ErrorRecord.of(error, int(environment["RANK"])).write(record)
        os._exit(1)
