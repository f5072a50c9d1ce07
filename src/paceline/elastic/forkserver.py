"""Ranks of this host, which are forked from a process that has imported torch once.

A fork is much faster than importing torch again, and forked ranks share the memory of the imported modules. The
forkserver starts no threads and initializes no accelerator, because neither survives a fork. If an import starts a
thread or initializes an accelerator, or if `PACELINE_FORK=0` is set, every rank runs in its own Python interpreter. The
forkserver and the ranks run `rank.py`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.device import DEVICE_VARIABLE, ON_CPU, VISIBLE
from paceline.elastic.failure import handles, stack_beside, state_of
from paceline.errors import LaunchError
from paceline.rank_environment import KEY_FD, RankEnvironment

# By default, glibc returns freed blocks to the kernel, so that every step causes page faults when the memory is used
# again. In a small convolutional network, these were 1,450 page faults and a fifth of the step time. With these
# settings a rank keeps freed memory, except blocks as large as the gradient of a big layer. The third setting lets the
# kernel back the memory with huge pages of 2 MiB, so that first use causes fewer page faults. It has no effect before
# glibc 2.35, or if the kernel's transparent_hugepage setting is "never". benchmarks/overhead.py measures the effect.
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Apply the thresholds of `ALLOCATOR` to this process, if its C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for name, parameter in _MALLOPT.items():
            libc.mallopt(parameter, int(ALLOCATOR[name]))


# otherwise the C++ stack traces about lost peers hide the first error
DEFAULTS = {**ALLOCATOR, "TORCH_CPP_LOG_LEVEL": "ERROR"}
OFF = "PACELINE_FORK"  # with the value 0, every rank runs in its own interpreter
# libgomp reads these variables while it loads, and would restrict all forks to the cores of the forkserver.
_BEFORE_FORK = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# Imports read neither these variables nor the variables of `RankEnvironment`.
AFTER_FORK = {
    *VISIBLE,
    DEVICE_VARIABLE,
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets these two when it is imported
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile sets these two
    "TRITON_CACHE_DIR",
}
# these prevent further threads, because no other thread may run during a fork
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# number of forkservers kept per process, so that a change of the environment and back needs no new imports
_MOST_FORKSERVERS = 2
FORKSERVER = "--forkserver"  # first argument that makes `rank.py` a forkserver
_ANSWER_S = 60.0
_TICK_S = 0.2
_LENGTH = struct.Struct("!I")


@dataclass
class ForkedRank:
    """Process of a forked rank.

    After its end it remains a zombie until `wait` is called, so that its process id is not reused earlier.
    """

    pid: int
    forkserver: Forkserver

    def kill(self) -> None:
        """Send SIGKILL to this process, but not to processes that it started."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code, negative for a signal.

        If the forkserver was lost, the result is the negative number of SIGTERM.
        """
        try:
            return int(self.forkserver.ask({"do": "wait", "pid": self.pid})["code"])
        except LaunchError:
            return -signal.SIGTERM


class ForkserverProcess(Protocol):
    """Interface of a forkserver's process, which `Popen` implements."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Forkserver:
    """Forkserver process. It ends when `end` is called, or when this process ends for any reason.

    Args:
        variables: environment variables of the ranks to fork.
        start: function that starts the process, called with this end of a socket pair and the end for the new process.
            None starts a new interpreter.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        start: Callable[[socket.socket, socket.socket], ForkserverProcess] | None = None,
    ) -> None:
        self.made_for = made_for(variables)
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ANSWER_S)
        self._lock = threading.Lock()
        self._imported: set[str] = set()
        # pending orders, in the order in which they are answered
        self._asked: deque[Mapping[str, Any]] = deque([{"do": "import"}])
        self._unfit: str | None = None
        with theirs:
            self._process = start(self._socket, theirs) if start else _interpreter(variables, theirs)

    @property
    def pid(self) -> int:
        """Process id of the forkserver."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def wait_until_ready(self, deadline_s: float, stopped: Callable[[], object] = lambda: False) -> str | None:
        """Wait until the forkserver is idle. Return the reason why it cannot fork ranks, or None.

        Args:
            stopped: called at least five times a second. The wait ends when the result is true.

        Raises:
            LaunchError: the imports took longer than the deadline.
        """
        until = time.monotonic() + deadline_s
        while self._asked and not stopped():
            if time.monotonic() > until:
                raise LaunchError(
                    "launch.import_timeout",
                    "the forkserver did not import torch within {deadline_s:g} s",
                    deadline_s=deadline_s,
                )
            if select.select([self._socket], [], [], _TICK_S)[0]:
                with self._lock:
                    self._take_late_answer()
        return self._unfit

    def will_import(self, modules: Sequence[str]) -> None:
        """Ask the forkserver to import modules before the next fork. Do not wait for the imports."""
        with self._lock, suppress(OSError):  # the next fork raises the error of a lost forkserver
            if new := [name for name in modules if name not in self._imported]:
                self._imported.update(new)
                self._order({"do": "import", "modules": new})

    def fork(
        self,
        module_args: Sequence[str],
        variables: Mapping[str, str],
        environment: RankEnvironment,
        listener: socket.socket | None,
    ) -> ForkedRank:
        """Fork a rank whose complete environment is `variables`.

        Args:
            listener: socket on which the rank serves torch's own store, or None. The caller closes its own copy
                afterwards.

        Raises:
            LaunchError: the process could not be forked, or the forkserver is lost.
        """
        passed = [] if listener is None else [listener.fileno()]
        key = [] if environment.key_fd is None else [environment.key_fd]
        order = {
            "do": "fork",
            "arguments": list(module_args),
            "environment": dict(variables),
            "folder": os.getcwd(),
            "serves": bool(passed),
            "has_key": bool(key),
            "limits": {
                name: resource.getrlimit(getattr(resource, name))
                for name in dir(resource)
                if name.startswith("RLIMIT_")
            },
            "cores": sorted(os.sched_getaffinity(0)),
        }
        descriptors = [_open_or_null(1), _open_or_null(2), *passed, *key, *environment.inherited_fds]
        return ForkedRank(self.ask(order, descriptors)["pid"], self)

    def ask(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send an order, and return the answer.

        Raises:
            LaunchError: the forkserver could not carry out the order, or is lost.
        """
        with self._lock:
            try:
                while self._asked:
                    self._take_late_answer()
                self._order(order, descriptors)
                answer = self._answer()
            except OSError as error:
                raise LaunchError(
                    "launch.forkserver_lost",
                    "the forkserver (pid {pid}) is lost: {error}",
                    pid=self.pid,
                    error=error,
                ) from error
        if "error" in answer:
            raise LaunchError("launch.forkserver_refused", "{reason}", reason=answer["error"])
        return answer

    def end(self) -> None:
        """End the forkserver. Its ranks then receive SIGTERM."""
        self._socket.close()
        if self.owner == os.getpid():  # a fork of the launcher must not kill it
            self._process.kill()
            self._process.wait()

    def _order(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        send(self._socket, order, descriptors)
        self._asked.append(order)

    def _take_late_answer(self) -> None:
        """Read an answer that no caller waits for.

        It is the answer to an import, or to an order that has timed out.
        """
        if not self._asked:  # another thread has read the answer
            return
        answer = self._answer()
        self._unfit = answer.get("unfit") or self._unfit
        if "pid" in answer:  # this rank was forked after its caller had given up
            ForkedRank(answer["pid"], self).kill()
            self._order({"do": "wait", "pid": answer["pid"]})

    def _answer(self) -> dict[str, Any]:
        """Read the answer to the oldest pending order. After a timeout, the order remains pending."""
        gone = {"error": f"the process that ranks are forked from (pid {self.pid}) has ended", "unfit": "it has ended"}
        try:
            answer, _ = receive(self._socket)
        except ConnectionError:
            answer = None
        self._asked.popleft()
        return gone if answer is None else answer


def _interpreter(variables: Mapping[str, str], channel: socket.socket) -> subprocess.Popen[bytes]:
    own_thread = threading.current_thread() is threading.main_thread()
    numbers = [str(channel.fileno()), str(os.getpid()), str(int(own_thread))]
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.elastic.rank", FORKSERVER, *numbers],
        # lets torch look for a GPU without initializing CUDA
        env={**variables, **ONE_THREAD, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        stdout=_open_or_null(2),
        start_new_session=True,
        pass_fds=[channel.fileno()],
    )


_shared: list[Forkserver] = []  # forkservers of this process, ordered by their last use
_sharing = threading.Lock()


def warm_up(*modules: str) -> None:
    """Start the shared forkserver process, unless it runs already.

    The process imports torch in the background.

    Args:
        modules: further modules to import, which all ranks need. These modules must not start threads on import.
    """
    if why_not() is None:
        forkserver_for({**DEFAULTS, **os.environ}).will_import(modules)


def forkserver_for(variables: Mapping[str, str]) -> Forkserver:
    """Return the shared forkserver for ranks with this environment.

    If no running forkserver has the same environment and inherited state, a new forkserver is started. Only the most
    recently used of the other forkservers is kept.
    """
    with _sharing:
        found = shared_for(variables)
        if found is None:
            found = Forkserver(_without_ranks(variables))
            atexit.register(found.end)
        others = [forkserver for forkserver in _usable() if forkserver is not found][1 - _MOST_FORKSERVERS :]
        for forkserver in _shared:
            if forkserver is not found and forkserver not in others:
                forkserver.end()
        _shared[:] = [*others, found]
        return found


def shared_for(variables: Mapping[str, str]) -> Forkserver | None:
    """Return the running shared forkserver for ranks with this environment, or None."""
    wanted = made_for(variables)
    return next((forkserver for forkserver in _usable() if forkserver.made_for == wanted), None)


def _usable() -> list[Forkserver]:
    return [forkserver for forkserver in _shared if forkserver.owner == os.getpid() and not forkserver.lost]


def share(forkserver: Forkserver) -> None:
    """Use this forkserver for later ranks of this process with the same environment."""
    atexit.register(forkserver.end)
    with _sharing:
        _shared.append(forkserver)


def wait_for_imports(deadline_s: float = _ANSWER_S) -> None:
    """Wait until the shared forkservers, if any, have imported everything and are idle."""
    for forkserver in _shared:
        if forkserver.owner == os.getpid():
            with suppress(LaunchError):  # the launch will report the error
                forkserver.wait_until_ready(deadline_s)


def shared_pids() -> list[int]:
    """Return the process ids of the shared forkservers; the most recently used one is last."""
    return [forkserver.pid for forkserver in _shared]


def cpu_s() -> float:
    """Return the CPU seconds used by the shared forkservers and their ranks that have ended."""
    import psutil

    total = 0.0
    for pid in shared_pids():
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def why_not(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why ranks with this environment cannot be forked, or None."""
    if environ.get(OFF) == "0":
        return f"{OFF}=0"
    return next((f"{name} is set" for name in _BEFORE_FORK if name in environ), None)


def made_for(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the state that the ranks of a forkserver inherit from it."""
    return {
        "environment": {name: value for name, value in _without_ranks(variables).items() if name not in AFTER_FORK},
        "user": (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "places": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "pid")]
        + [Path("/proc/self/cgroup").read_text()],
        "mask": [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")],
    }


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message. The receiver gets copies of the descriptors."""
    body = json.dumps(message).encode()
    socket.send_fds(channel, [_LENGTH.pack(len(body))], descriptors)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one message and its descriptors. The message is None if the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 64, socket.MSG_CMSG_CLOEXEC)
    if not head:
        return None, descriptors
    (length,) = _LENGTH.unpack(head)
    body = bytearray()
    while len(body) < length and (more := channel.recv(length - len(body))):
        body += more
    return (json.loads(body) if len(body) == length else None), descriptors


def _open_or_null(descriptor: int) -> int:
    """Return the descriptor. If it is closed, return a descriptor of /dev/null instead."""
    try:
        os.fstat(descriptor)
    except OSError:
        return _null()
    return descriptor


@functools.cache
def _null() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _without_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in RankEnvironment.names()}


@dataclass
class StartedRank:
    """Rank on this host. Its process leads its own session and process group."""

    number: int
    process: subprocess.Popen[bytes] | ForkedRank
    pidfd: int
    record: Path
    alive_at: float = field(default_factory=time.time)
    code: int | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def known_ns(self) -> int:
        """Monotonic time of the newest information about the rank. On this host, it is the current time."""
        return time.monotonic_ns()

    @property
    def stopped(self) -> bool:
        """True if SIGSTOP or a debugger has suspended the process."""
        return self._is_in("Tt")

    @property
    def paging(self) -> bool:
        """True if the main thread waits for a disk or for memory."""
        return self._is_in("D")

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, even if `note_end` was not called yet."""
        return self.code is not None or bool(select.select([self.pidfd], [], [], 0)[0])

    def _is_in(self, states: str) -> bool:
        """True if the kernel reports the process in one of these states."""
        # after the end of the process, the pid may belong to another process
        return self.code is None and state_of(self.pid) in tuple(states)

    def signal(self, number: int) -> None:
        """Send a signal to the rank, but not to processes that it started."""
        if self.code is None:
            with suppress(ProcessLookupError):  # the forkserver was lost, and the system has reaped the rank
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL to the rank and all processes that it started."""
        if self.code is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # the rank was just forked: it leads no group yet and has started no processes
            self.signal(signal.SIGKILL)

    def note_end(self) -> None:
        """Kill the rank's process group, wait for the exit code, and close the pidfd.

        After this call, the system may reuse the process id and the number of the descriptor.
        """
        if self.code is None:
            self.kill()
            self.code = self.process.wait()
            os.close(self.pidfd)

    @property
    def has_stack(self) -> bool:
        """True if faulthandler has written all stack traces that were requested."""
        return bool(self.stack()) and not handles(self.pid, signal.SIGUSR2)

    def stack(self) -> str:
        """Return the stack traces that faulthandler has written."""
        return stack_beside(self.record)


class Starter:
    """Starter of ranks on this host.

    Args:
        module_args: import path of the function that every rank calls, followed by the function's arguments.
        env: environment variables for the ranks. They override variables of this process.
    """

    def __init__(self, module_args: list[str], env: Mapping[str, str]) -> None:
        self.module_args, self.env = module_args, env
        self.forkserver: Forkserver | None = None

    def prepare(self, deadline_s: float, stopped: Callable[[], bool]) -> None:
        """Wait until the forkserver is ready, if ranks are forked from one.

        Args:
            stopped: called at least five times a second. The wait ends when the result is true.

        Raises:
            LaunchError: the imports took longer than the deadline.
        """
        variables = {**os.environ, **self._variables(None)}
        if why_not(variables):
            return
        forkserver = forkserver_for(variables)
        if forkserver.wait_until_ready(deadline_s, stopped) is None:
            self.forkserver = forkserver

    def start(self, environment: RankEnvironment, listener: socket.socket | None) -> StartedRank:
        """Start a rank.

        Args:
            listener: socket on which the rank serves torch's own store, or None.

        Raises:
            LaunchError: the rank could not be started.
        """
        # a descriptor number of this process has no meaning in the rank
        inherited = {name: value for name, value in os.environ.items() if name != KEY_FD}
        variables = {**inherited, **self._variables(environment)}
        process: subprocess.Popen[bytes] | ForkedRank | None = None
        try:
            if self.forkserver is None:
                process = self._interpreter(variables, environment)
            else:
                process = self.forkserver.fork(self.module_args, variables, environment, listener)
            pidfd = os.pidfd_open(process.pid)
        except (OSError, LaunchError) as error:
            if process:
                process.kill()
                process.wait()
            raise LaunchError(
                "launch.rank_not_started",
                "rank {rank} of {world_size} could not be started: {error}",
                rank=environment.rank,
                world_size=environment.world_size,
                error=error,
            ) from error
        assert environment.error_file is not None
        return StartedRank(environment.rank, process, pidfd, environment.error_file)

    def _interpreter(self, variables: dict[str, str], environment: RankEnvironment) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.elastic.rank", *self.module_args],
            env=variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal then reaches only the launcher, which forwards it once
            pass_fds=[
                *environment.inherited_fds,
                *(fd for fd in (environment.store_fd, environment.key_fd) if fd is not None),
            ],
        )

    def _variables(self, environment: RankEnvironment | None) -> dict[str, str]:
        """Environment variables for a rank or the forkserver, in addition to this process's own."""
        return {
            **{name: os.environ.get(name, value) for name, value in DEFAULTS.items()},
            **(ON_CPU if environment and environment.host else {}),  # an emulated host has no accelerator
            **(environment.to_env() if environment else {}),
            **self.env,
        }
