"""One rank, as the launcher starts it: `python -m paceline.launch.rank pkg.mod:function ARGUMENT…` calls `function([ARGUMENT, …])`.

It never outlives its launcher, and leaves an error as a record for the launcher, which shows the one that matters.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

from paceline.cluster.emulate.hosts import enter_host
from paceline.errors import ClusterError, on_failure
from paceline.job.read.imports import load_object
from paceline.launch.failure import ErrorRecord
from paceline.rank_environment import RankEnvironment, own_rank

_PR_SET_PDEATHSIG = 1
_ORPHAN_GRACE_S = 30  # for the last checkpoint of a rank whose launcher was killed


def main() -> None:
    """Run the function that the first argument names; exit 0 when it returns, its own code on SystemExit, 1 on any other exception."""
    environment = RankEnvironment.from_env()
    assert environment.launcher is not None
    assert environment.error_file is not None
    _end_with_launcher(environment.launcher)
    for descriptor in environment.inherited_fds:
        os.set_inheritable(descriptor, False)  # held by this rank, and not by a program that it starts
    record = environment.error_file
    stack = open(record.with_suffix(".stack"), "w")  # noqa: SIM115 - stays open: written to on a crash, and when the launcher asks
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR2, stack, all_threads=True)
    on_failure(lambda error: _record(error, record))
    try:
        enter_host(environment.host)  # before torch, or anything of the user's, starts a thread
        _pin(environment)
        target, *arguments = sys.argv[1:]
        load_object(target)(arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            _leave(error, record, error.code if isinstance(error.code, int) else 1)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the launcher shows it
        _leave(error, record, 1)
    _clean_up_for_the_launcher()


def _end_with_launcher(launcher: int) -> None:
    """Get SIGTERM when the launcher dies, so that the rank saves and ends; and SIGKILL, with all it started, if it does not."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before it could have been noticed
        sys.exit(1)
    threading.Thread(target=_kill_when_orphaned, args=(os.pidfd_open(launcher),), name="launcher-watch", daemon=True).start()


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


def _clean_up_for_the_launcher() -> None:
    """Remove the launcher's temporary folder, where it was killed and cannot."""
    environment = RankEnvironment.from_env()
    if os.getppid() != environment.launcher and environment.error_file is not None:
        shutil.rmtree(environment.error_file.parent, ignore_errors=True)


def _kill_when_orphaned(launcher_fd: int) -> None:
    select.select([launcher_fd], [], [])
    time.sleep(_ORPHAN_GRACE_S)
    _clean_up_for_the_launcher()
    os.killpg(0, signal.SIGKILL)


def _pin(environment: RankEnvironment) -> None:
    """Keep this rank on its cores. Must precede the import of torch, which sizes its thread pools by them."""
    if not environment.cores:
        return
    try:
        os.sched_setaffinity(0, environment.cores)
    except OSError as error:
        wanted, allowed = (", ".join(map(str, sorted(cores))) for cores in (environment.cores, os.sched_getaffinity(0)))
        who = f"rank {environment.rank} cannot be pinned to cores {wanted}"
        raise ClusterError(f"{who}: this process may use cores {allowed}") from error


def _leave(error: BaseException, path: Path, code: int) -> None:
    """Record the error and end at once: a thread that still waits for a peer must not keep a failed rank alive."""
    _record(error, path)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # whoever read it has gone
    _clean_up_for_the_launcher()
    os._exit(code)


if __name__ == "__main__":
    main()
