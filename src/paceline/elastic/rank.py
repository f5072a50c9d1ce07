"""One rank: a call of `pkg.mod:function` in a fork of the forkserver or an interpreter.

It never outlives its launcher, and leaves an error as a record for the launcher, which shows the one that matters.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.cluster.emulate import enter_host
from paceline.deferred_compiler import defer_compiler
from paceline.elastic.failure import ErrorRecord, state_of
from paceline.errors import ClusterError, on_failure
from paceline.files import sockets_fit
from paceline.job.spec import load_object
from paceline.rank_environment import RankEnvironment, own_rank

PR_SET_PDEATHSIG = 1  # of prctl
_EXIT_S = 10  # for the other threads of a launcher whose first one has ended


def main() -> None:
    """Be the rank that the environment names, in an interpreter that the launcher has started."""
    environment = RankEnvironment.from_env()
    assert environment.launcher is not None
    held = [*environment.inherited_fds, *([] if environment.key_fd is None else [environment.key_fd])]
    for descriptor in held:
        os.set_inheritable(descriptor, False)  # held by this rank, and not by a program that it starts
    run(sys.argv[1:], environment, environment.launcher, os.pidfd_open(environment.launcher))


def run(
    module_args: list[str],
    environment: RankEnvironment,
    parent: int,
    launcher: int,
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Run the function that the first argument names, and exit.

    0 when it returns, its own code on SystemExit, 1 on any other exception.

    Args:
        parent: process id of the launcher, or of the forkserver that ends when the launcher does.
        launcher: a descriptor of the launcher's process.
        prepare: called first of what may fail, once the rank is in its host and on its cores.
    """
    assert environment.error_file is not None
    record = environment.error_file
    watch = _Launcher(launcher, environment.launcher, record.parent, environment.grace_s)
    watch.end_with(parent)
    stack = open(record.with_suffix(".stack"), "w")  # noqa: SIM115 - stays open: written to on a crash, and when the launcher asks
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR2, stack, all_threads=True)
    on_failure(lambda error: _record(error, record))
    try:
        enter_host(environment.host)  # before torch, or anything of the user's, starts a thread
        _pin(environment)
        prepare()
        defer_compiler()
        # What multiprocessing makes, as for loader processes, goes with the launcher's folder, however this rank ends.
        if sockets_fit(str(record.parent)):
            multiprocessing.current_process()._config["tempdir"] = str(record.parent)  # type: ignore[attr-defined]
        target, *arguments = module_args
        load_object(target)(arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            _leave(error, record, watch, error.code if isinstance(error.code, int) else 1)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the launcher shows it
        _leave(error, record, watch, 1)
    watch.clean_up()


class _Launcher:
    """Death of the launcher: ends the rank, and removes the folder that was left behind."""

    def __init__(self, process: int, pid: int | None, folder: Path, grace_s: int = 0) -> None:
        self.process, self.pid, self.folder, self.grace_s = process, pid, folder, grace_s

    def end_with(self, parent: int) -> None:
        """Have the kernel send SIGTERM when the launcher dies, so that the rank saves.

        It gets SIGKILL, with all it started, if it does not; at once where it has no time to save.
        """
        number = signal.SIGTERM if self.grace_s else signal.SIGKILL
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before it could have been noticed
            sys.exit(1)
        threading.Thread(target=self._kill_when_orphaned, name="launcher-watch", daemon=True).start()

    def clean_up(self) -> None:
        """Remove the launcher's temporary folder, where it was killed and cannot."""
        # The kernel tells of the end of its first thread; those of its store may end a moment later.
        dying = self.pid is not None and state_of(self.pid) == "Z"
        if select.select([self.process], [], [], _EXIT_S if dying else 0)[0]:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_when_orphaned(self) -> None:
        select.select([self.process], [], [])
        time.sleep(self.grace_s)
        self.clean_up()
        os.killpg(0, signal.SIGKILL)


def _record(error: BaseException, path: Path) -> None:
    """Leave the error for the launcher, with the time at which it was seen first."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    try:
        before = ErrorRecord.read(path)
        now = ErrorRecord.of(error, own_rank())
        (now if before is None else replace(now, time=before.time)).write(path)
    except OSError:  # the launcher and its folder are gone, or the disk is full: then nobody else shows it
        traceback.print_exception(error)


def _pin(environment: RankEnvironment) -> None:
    """Keep this rank on its cores. A new interpreter's torch, imported later, sizes its thread pools by them."""
    if not environment.cores:
        return
    try:
        os.sched_setaffinity(0, environment.cores)
    except OSError as error:
        wanted, allowed = (", ".join(map(str, sorted(cores))) for cores in (environment.cores, os.sched_getaffinity(0)))
        who = f"rank {environment.rank} cannot be pinned to cores {wanted}"
        raise ClusterError(f"{who}: this process may use cores {allowed}") from error


def _leave(error: BaseException, path: Path, launcher: _Launcher, code: int) -> None:
    """Record the error and end at once, whatever threads still wait for a peer."""
    _record(error, path)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # whoever read it has gone
    launcher.clean_up()
    os._exit(code)


if __name__ == "__main__":
    main()
