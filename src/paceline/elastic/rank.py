"""Main functions of a rank and of the forkserver.

A rank calls `pkg.mod:function`, either in a fork of the forkserver or in a new interpreter. A rank ends when its
launcher ends. If the function fails, the rank writes the error to a file, and the launcher shows the error that caused
the failure.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import logging
import multiprocessing
import os
import resource
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from paceline import device
from paceline.cluster.emulate import enter_host
from paceline.deferred_compiler import defer_compiler
from paceline.elastic.failure import ErrorRecord, state_of
from paceline.elastic.forkserver import DEFAULTS, FORKSERVER, Forkserver, receive, send, share
from paceline.errors import ClusterError, on_failure
from paceline.files import sockets_fit, write_whole
from paceline.job.spec import load_object
from paceline.rank_environment import RankEnvironment, own_rank
from paceline.wire.position import ASK, ASK_STOPPED, POSITION, own_position, report_waits_with

PR_SET_PDEATHSIG = 1  # option of prctl
_EXIT_S = 10  # time for the other threads of a launcher to end after its first thread


def main() -> None:
    """Run a forkserver or a rank in this new interpreter."""
    if sys.argv[1:2] == [FORKSERVER]:
        be_forkserver(sys.argv[2:])
        return
    environment = RankEnvironment.from_env()
    assert environment.launcher is not None
    held = [*environment.inherited_fds, *([] if environment.key_fd is None else [environment.key_fd])]
    for descriptor in held:
        # this rank keeps the descriptor, but programs that it starts do not inherit the descriptor
        os.set_inheritable(descriptor, False)
    run(sys.argv[1:], environment, environment.launcher, os.pidfd_open(environment.launcher))


def run(
    module_args: list[str],
    environment: RankEnvironment,
    parent: int,
    launcher: int,
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Call the function that the first argument names; exit the process if the function fails.

    The exit code is the code of a SystemExit, or 1 for any other exception.

    Args:
        parent: process id of the launcher, or of the forkserver, which ends together with the launcher.
        launcher: pidfd of the launcher.
        prepare: called once the rank has joined its emulated host and is pinned to its cores.
    """
    assert environment.error_file is not None
    record = environment.error_file
    watch = Launcher(launcher, environment.launcher, record.parent, environment.grace_s)
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})  # before a thread starts, so that all threads block it
    watch.end_with(parent)
    threading.Thread(target=_answer_with_position, args=(record,), name="positions", daemon=True).start()
    report_waits_with(partial(_write_position, record))
    stack = open(record.with_suffix(".stack"), "w")  # noqa: SIM115 - stays open: written to on a crash, and when the launcher asks
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR2, stack, all_threads=True)
    signal.signal(ASK_STOPPED, lambda *_: _answer_and_stop(record, stack))
    on_failure(lambda error: _record(error, record))
    try:
        enter_host(environment.host)  # called before torch or user code starts a thread
        _pin(environment)
        prepare()
        defer_compiler()
        # Temporary files of multiprocessing, such as files of loader processes, are in the launcher's folder, and are
        # always removed with it.
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


class Launcher:
    """Monitor of the launcher. When the launcher dies, the rank ends and removes the launcher's folder."""

    def __init__(self, process: int, pid: int | None, folder: Path, grace_s: int = 0) -> None:
        self.process, self.pid, self.folder, self.grace_s = process, pid, folder, grace_s

    def end_with(self, parent: int) -> None:
        """Let the kernel send SIGTERM to the rank when the launcher dies.

        If the rank does not end in time, SIGKILL ends the rank and its processes. If `grace_s` is 0, SIGKILL is sent
        immediately.
        """
        number = signal.SIGTERM if self.grace_s else signal.SIGKILL
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent died before this request to the kernel
            sys.exit(1)
        threading.Thread(target=self._kill_when_orphaned, name="launcher-watch", daemon=True).start()

    def clean_up(self) -> None:
        """Remove the temporary folder of a launcher that was killed."""
        # The kernel reports the end of the launcher's first thread. The threads of its store may end a moment later.
        dying = self.pid is not None and state_of(self.pid) == "Z"
        if select.select([self.process], [], [], _EXIT_S if dying else 0)[0]:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_when_orphaned(self) -> None:
        select.select([self.process], [], [])
        time.sleep(self.grace_s)
        self.clean_up()
        os.killpg(0, signal.SIGKILL)


def _answer_with_position(record: Path) -> None:
    """Write this rank's position whenever the launcher asks, even while the main thread waits."""
    while signal.sigwait({ASK}):
        _write_position(record)


def _answer_and_stop(record: Path, stack: IO[str]) -> None:
    """Write this rank's stack trace and position, and suspend this process again."""
    faulthandler.dump_traceback(stack)
    _write_position(record)
    os.kill(os.getpid(), signal.SIGSTOP)


def _write_position(record: Path, error: BaseException | None = None) -> None:
    # other threads may change the data during the reading; the launcher continues without an answer
    with suppress(Exception):
        position, path = own_position(error), record.with_suffix(POSITION)
        if position.entered or not path.exists():  # a rank that has left its groups keeps its last position
            write_whole(path, msgspec.json.encode(position))


def _record(error: BaseException, path: Path) -> None:
    """Write the error record for the launcher, with the time of the rank's first error."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    try:
        before = ErrorRecord.read(path)
        now = ErrorRecord.of(error, own_rank())
        (now if before is None else replace(now, time=before.time)).write(path)
        if now.secondary:
            _write_position(path, error)
    # the launcher and its folder are gone, or the disk is full, so that only this rank can show the error
    except OSError:
        traceback.print_exception(error)


def _pin(environment: RankEnvironment) -> None:
    """Pin this rank to its cores.

    In a new interpreter, torch is imported later, and chooses the size of its thread pools from these cores.
    """
    if not environment.cores:
        return
    try:
        os.sched_setaffinity(0, environment.cores)
    except OSError as error:
        wanted, allowed = (", ".join(map(str, sorted(cores))) for cores in (environment.cores, os.sched_getaffinity(0)))
        who = f"rank {environment.rank} cannot be pinned to cores {wanted}"
        raise ClusterError(
            "launch.cores_unavailable", "{who}: this process can use only the cores {cores}", who=who, cores=allowed
        ) from error


def _leave(error: BaseException, path: Path, launcher: Launcher, code: int) -> None:
    """Record the error and exit immediately, even if threads still wait for a peer."""
    _record(error, path)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # the reader of the output has ended
    launcher.clean_up()
    os._exit(code)


IMPORTS = ("paceline.run.loop", "paceline.elastic.run_on_ranks")  # modules that every rank needs


@dataclass(frozen=True)
class _Order:
    """Launcher's order to a forked process to become a rank.

    Attributes:
        folder: current working directory of the launcher. `limits` are the launcher's resource limits, and `cores` are
            its CPU cores.
        descriptors: stdout, stderr, the socket of torch's store if the rank serves the store, the run's key if there is
            one, and descriptors to keep open.
        forkserver: process id of the forkserver.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    serves: bool
    has_key: bool
    limits: dict[str, tuple[int, int]]
    cores: list[int]
    descriptors: list[int]
    forkserver: int


def be_forkserver(arguments: list[str]) -> None:
    """Import the modules that ranks need, and fork ranks on request.

    The arguments are `DESCRIPTOR LAUNCHER DIES_WITH_ITS_THREAD`.

    In the forkserver, the function returns when the launcher has ended.
    """
    # A scheduler sends SIGTERM to every process of a run. The launcher decides which ranks end, and this process ends
    # with the launcher.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, launcher, dies_with_thread = map(int, arguments)
    if dies_with_thread:  # the forkserver then also ends if the launcher dies during the imports
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        watch = os.pidfd_open(launcher)
    except ProcessLookupError:
        return
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    defer_compiler()
    _serve(channel, launcher, watch, lambda: imported(IMPORTS, needed=True))


def split_off() -> None:
    """Fork this process, and use the fork as the forkserver of this process.

    Forking is safe, because this process was itself forked from a forkserver and has started no threads.
    """
    call_the_process("paceline host process")
    share(Forkserver({**DEFAULTS, **os.environ}, _copy))


def _copy(ours: socket.socket, channel: socket.socket) -> _Child:
    """Fork a forkserver that takes orders from `channel`."""
    launcher = os.getpid()
    if (pid := os.fork()) == 0:
        ours.close()
        os.setsid()
        be_a_copy(channel, launcher)
    return _Child(pid)


def be_a_copy(channel: socket.socket, launcher: int) -> NoReturn:
    """Run a forkserver in this fork of the launcher."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watch = os.pidfd_open(launcher)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        call_the_process("paceline forkserver")
        _serve(channel, launcher, watch, _unfit)
    except BaseException:  # noqa: BLE001 - nothing of it is for the code that was forked
        traceback.print_exc()
    finally:
        os._exit(0)


class _Child:
    """Forked process with the interface of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.wait()
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def imported(modules: Sequence[str], *, needed: bool = False) -> str | None:
    """Import modules for ranks. Return the reason why no rank can be forked, or None.

    Import errors are ignored, because the ranks raise and show these errors. With `needed`, an import error is a reason
    not to fork, so that each rank runs in a new interpreter.
    """
    gc.disable()
    try:
        for name in modules:
            with nullcontext() if needed else suppress(Exception):
                importlib.import_module(name)
    except Exception:  # noqa: BLE001 - the ranks will meet it, and show it
        return traceback.format_exc()
    finally:
        gc.enable()
    gc.collect()
    # Ranks neither garbage-collect nor finalize the imported objects, because both would copy shared memory.
    gc.freeze()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    return _unfit()


def _unfit() -> str | None:
    """Return the reason why no rank can be forked from this process, or None."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"something that is imported has started {threads - 1} threads"
    if device.is_started():
        return "something that is imported has started an accelerator, which no fork survives"
    return None


def _serve(channel: socket.socket, launcher: int, watch: int, ready: Callable[[], str | None]) -> None:
    """Report to the launcher whether ranks can be forked, and fork ranks on request.

    In the forkserver, the function returns when the launcher has ended.
    """
    if os.getppid() == launcher:
        send(channel, {"unfit": ready()})
        order = _fork_on_order(channel, watch)
        if order is not None:
            _become(order, watch)


def _fork_on_order(channel: socket.socket, watch: int) -> _Order | None:
    """Follow orders until the launcher has ended, then return None. In a forked rank, return the rank's order."""
    forkserver = os.getpid()
    while True:
        ready, _, _ = select.select([channel.fileno(), watch], [], [])
        if watch in ready:
            return None
        try:
            message, descriptors = receive(channel)
        except ConnectionResetError:  # the launcher ended before it read an answer
            return None
        if message is None:
            return None
        do = message.pop("do")
        if do == "import":
            send(channel, {"unfit": imported(message["modules"])})
            continue
        if do == "wait":
            send(channel, _end_of(message["pid"]))
            continue
        try:
            pid = os.fork()
        except OSError as error:  # the limit on processes is reached, or too little memory is free
            answer: dict[str, Any] = {"error": str(error)}
        else:
            answer = {"pid": pid}
            if pid == 0:
                channel.close()
                return _Order(**message, descriptors=descriptors, forkserver=forkserver)
        for descriptor in descriptors:
            os.close(descriptor)
        send(channel, answer)


def _end_of(pid: int) -> dict[str, Any]:
    try:
        return {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
    except ChildProcessError:
        return {"error": f"process {pid} is no rank that was forked here, or its exit code was read before"}


def _become(order: _Order, watch: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # Ctrl-C in the terminal then reaches only the launcher, which forwards it once
    out, err, *others = order.descriptors
    for descriptor, standard in ((out, 1), (err, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    told = RankEnvironment.from_env(order.environment)
    # the descriptors have different numbers in this process
    environment = replace(
        told,
        store_fd=others.pop(0) if order.serves else None,
        key_fd=others.pop(0) if order.has_key else None,
        inherited_fds=(),
    )
    os.environ.clear()
    os.environ.update({name: value for name, value in order.environment.items() if name not in environment.names()})
    os.environ.update(environment.to_env())
    sys.argv[1:] = order.arguments
    call_the_process(f"paceline rank {environment.rank} of {environment.world_size}")
    for name, limit in order.limits.items():
        resource.setrlimit(getattr(resource, name), limit)
    os.sched_setaffinity(0, order.cores)
    run(
        order.arguments,
        environment,
        order.forkserver,
        watch,
        prepare=lambda: _settle(order.folder, environment.threads),
    )
    end()


def end(code: int = 0) -> NoReturn:
    """Exit like an interpreter, but without the teardown of modules, which would copy shared memory."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, and asks executors to end
    atexit._run_exitfuncs()  # multiprocessing does the same in its forks
    for file in gc.get_objects():  # this excludes objects that the forkserver has frozen
        if issubclass(type(file), io.IOBase):
            with suppress(OSError, ValueError):  # the file is closed or not writable, or its reader has ended
                file.flush()
    os._exit(code)


def call_the_process(title: str) -> None:
    """Set the title of this process in `ps` and `top`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # addresses of the arguments: fields 48 and 49 of the file
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _settle(folder: str, threads: int | None) -> None:
    """Set the import folder, threads and random state as in a new interpreter."""
    start = str(Path.cwd())
    os.chdir(folder)
    if start in sys.path[:1]:
        sys.path[0] = folder
    importlib.invalidate_caches()
    torch: Any = sys.modules["torch"]
    if threads is not None:
        torch.set_num_threads(threads)
        if threads > 1:
            _set_threads_of_numpy(threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # after a fork, Python's random module reseeds itself


def _set_threads_of_numpy(threads: int) -> None:
    """Set the number of threads of NumPy's OpenBLAS, which was loaded with a single thread."""
    files = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "openblas" in line.rpartition("/")[2]
    }
    names = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
    for library in map(ctypes.CDLL, files):
        for name in names:
            if hasattr(library, name):
                getattr(library, name)(threads)


if __name__ == "__main__":
    main()
