"""Ranks of this host, forked from a process that imports torch once.

A fork takes a fraction of the time of the imports, and shares their memory. The forkserver starts no threads and
initializes no accelerator, because neither survives a fork. If an import starts a thread or an accelerator, or if
`PACELINE_FORK=0` is set, every rank runs in a Python interpreter of its own. The forkserver and the ranks run
`rank.py`.
"""

from __future__ import annotations

import atexit
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
from paceline.elastic.failure import stack_beside, state_of
from paceline.errors import LaunchError
from paceline.rank_environment import KEY_FD, RankEnvironment

# glibc gives freed blocks back to the kernel and faults them in again at every step: 1,450 page faults and a fifth of
# the step of a small convolutional network. A rank keeps freed memory, except for blocks as large as a big layer's
# gradient. benchmarks/overhead.py measures the effect.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
DEFAULTS = {**ALLOCATOR, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # otherwise C++ stacks of lost peers bury the first error
OFF = "PACELINE_FORK"  # 0: every rank runs in an interpreter of its own
# libgomp reads these while it loads, and would keep all forks on the cores chosen for the forkserver.
_BEFORE_FORK = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# The imports do not read these, nor any variable of `RankEnvironment`.
AFTER_FORK = {
    *VISIBLE,
    DEVICE_VARIABLE,
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets these two when it is imported
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile sets these two
    "TRITON_CACHE_DIR",
}
# no other thread may run during a fork
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# kept per process, so that an environment that is changed and restored costs no new imports
_MOST_FORKSERVERS = 2
FORKSERVER = "--forkserver"  # first argument that makes `rank.py` a forkserver
_ANSWER_S = 60.0
_TICK_S = 0.2
_LENGTH = struct.Struct("!I")


@dataclass
class ForkedRank:
    """Forked rank. It remains a zombie until `wait`, so that its process id is not reused earlier."""

    pid: int
    forkserver: Forkserver

    def kill(self) -> None:
        """Send SIGKILL to this process only."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code, negative for a signal. It is that of SIGTERM if the forkserver was lost."""
        try:
            return int(self.forkserver.ask({"do": "wait", "pid": self.pid})["code"])
        except LaunchError:
            return -signal.SIGTERM


class ForkserverProcess(Protocol):
    """Protocol of a forkserver's process; `Popen` implements it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Forkserver:
    """Forkserver process. It ends at `end`, or when this process ends for any reason.

    Args:
        variables: environment of its ranks, without the variables of `RankEnvironment`.
        start: starts the process at the second of two sockets that belong together; None for a new interpreter.
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
        # Pending orders, oldest first; they are answered in this order.
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
        """Wait until ranks can be forked. Return the reason if each rank needs its own interpreter.

        Args:
            stopped: called at least five times a second; if true, the waiting ends.

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
        """Ask the forkserver to import modules before the next fork, without waiting."""
        with self._lock, suppress(OSError):  # the next fork reports a lost forkserver
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
        """Fork a rank. `variables` are its whole environment.

        Args:
            listener: the socket on which the rank serves torch's own store. The launcher then closes its own copy.

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
        """End the process, and send SIGTERM to its ranks."""
        self._socket.close()
        if self.owner == os.getpid():  # not in a fork of the launcher
            self._process.kill()
            self._process.wait()

    def _order(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        send(self._socket, order, descriptors)
        self._asked.append(order)

    def _take_late_answer(self) -> None:
        """Read an answer that no caller waits for.

        The answer belongs to an import, or to an order that has timed out.
        """
        if not self._asked:  # another thread has read it
            return
        answer = self._answer()
        self._unfit = answer.get("unfit") or self._unfit
        if "pid" in answer:  # a rank that was forked too late
            ForkedRank(answer["pid"], self).kill()
            self._order({"do": "wait", "pid": answer["pid"]})

    def _answer(self) -> dict[str, Any]:
        """Read the answer to the oldest order; after a time-out the order stays pending."""
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


_shared: list[Forkserver] = []  # of this process; the most recently used one is last
_sharing = threading.Lock()


def warm_up(*modules: str) -> None:
    """Start the shared forkserver process, unless it runs.

    It imports torch in the background.

    Args:
        modules: further modules to import, which all ranks need. They must not start threads.
    """
    if why_not() is None:
        forkserver_for({**DEFAULTS, **os.environ}).will_import(modules)


def forkserver_for(variables: Mapping[str, str]) -> Forkserver:
    """Return the shared forkserver for ranks with this environment.

    A new forkserver is started if the environment, or other inherited state, has changed since the start of the others.
    Only the most recently used of the others is kept.
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
    """Return the shared forkserver for ranks with this environment, if one runs."""
    wanted = made_for(variables)
    return next((forkserver for forkserver in _usable() if forkserver.made_for == wanted), None)


def _usable() -> list[Forkserver]:
    return [forkserver for forkserver in _shared if forkserver.owner == os.getpid() and not forkserver.lost]


def share(forkserver: Forkserver) -> None:
    """Fork later ranks of this process from this forkserver if the environment is the same."""
    atexit.register(forkserver.end)
    with _sharing:
        _shared.append(forkserver)


def wait_for_imports(deadline_s: float = _ANSWER_S) -> None:
    """Wait until the shared forkservers, if any, have imported everything and are idle."""
    for forkserver in _shared:
        if forkserver.owner == os.getpid():
            with suppress(LaunchError):  # the launch will report it
                forkserver.wait_until_ready(deadline_s)


def shared_pids() -> list[int]:
    """Process ids of the shared forkservers; the most recently used one is last."""
    return [forkserver.pid for forkserver in _shared]


def cpu_s() -> float:
    """CPU seconds of the shared forkservers and of their ranks that have ended."""
    import psutil

    total = 0.0
    for pid in shared_pids():
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def why_not(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason not to fork ranks with this environment, or None."""
    if environ.get(OFF) == "0":
        return f"{OFF}=0"
    return next((f"{name} is set" for name in _BEFORE_FORK if name in environ), None)


def made_for(variables: Mapping[str, str]) -> dict[str, Any]:
    """State that a fork inherits, and that all ranks of a forkserver share."""
    return {
        "environment": {name: value for name, value in _without_ranks(variables).items() if name not in AFTER_FORK},
        "user": (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "places": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "pid")]
        + [Path("/proc/self/cgroup").read_text()],
        "mask": [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")],
    }


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; the other end gets copies of the descriptors."""
    body = json.dumps(message).encode()
    socket.send_fds(channel, [_LENGTH.pack(len(body))], descriptors)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one message and its descriptors; None if the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 64, socket.MSG_CMSG_CLOEXEC)
    if not head:
        return None, descriptors
    (length,) = _LENGTH.unpack(head)
    body = bytearray()
    while len(body) < length and (more := channel.recv(length - len(body))):
        body += more
    return (json.loads(body) if len(body) == length else None), descriptors


def _open_or_null(descriptor: int) -> int:
    """Return the descriptor, or one of /dev/null if this process was started with it closed."""
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
    """Rank of this host. Its process leads a session and a process group of its own."""

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
        """Monotonic time of the newest information about the rank; here, the current time."""
        return time.monotonic_ns()

    @property
    def stopped(self) -> bool:
        """True if SIGSTOP or a debugger holds the process."""
        return self._is_in("Tt")

    @property
    def paging(self) -> bool:
        """True if its main thread waits for a disk, or for memory."""
        return self._is_in("D")

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, though `note_end` may not have been called."""
        return self.code is not None or bool(select.select([self.pidfd], [], [], 0)[0])

    def _is_in(self, states: str) -> bool:
        """True if the kernel reports the process in one of these states."""
        # after its end, the pid may belong to another process
        return self.code is None and state_of(self.pid) in tuple(states)

    def signal(self, number: int) -> None:
        """Signal the rank only, and not the processes that it started."""
        if self.code is None:
            with suppress(ProcessLookupError):  # its forkserver was lost, and the system has reaped it
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL to the rank and all processes that it started."""
        if self.code is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # a very new fork, which leads no group yet and has started nothing
            self.signal(signal.SIGKILL)

    def note_end(self) -> None:
        """Kill the rank's process group, wait for the exit code, and close the pidfd.

        Afterwards the system may reuse the ids of the group and of the descriptor.
        """
        if self.code is None:
            self.kill()
            self.code = self.process.wait()
            os.close(self.pidfd)

    def stack(self) -> str:
        """Stack traces that faulthandler wrote."""
        return stack_beside(self.record)


class Starter:
    """Starts ranks on this host.

    Args:
        module_args: the import path of the function that every rank calls, then its arguments.
        env: variables for the ranks, which override those of this process.
    """

    def __init__(self, module_args: list[str], env: Mapping[str, str]) -> None:
        self.module_args, self.env = module_args, env
        self.forkserver: Forkserver | None = None

    def prepare(self, deadline_s: float, stopped: Callable[[], bool]) -> None:
        """Wait for the forkserver, if ranks are forked from one.

        Args:
            stopped: called at least five times a second; if true, the waiting ends.

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
            listener: the socket on which the rank serves torch's own store.

        Raises:
            LaunchError: it could not be started.
        """
        # a descriptor number of this process means nothing there
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
            start_new_session=True,  # the terminal's Ctrl-C is for the launcher, which forwards it once
            pass_fds=[
                *environment.inherited_fds,
                *(fd for fd in (environment.store_fd, environment.key_fd) if fd is not None),
            ],
        )

    def _variables(self, environment: RankEnvironment | None) -> dict[str, str]:
        """Environment variables of a rank, or of the forkserver, besides those of this process."""
        return {
            **{name: os.environ.get(name, value) for name, value in DEFAULTS.items()},
            **(ON_CPU if environment and environment.host else {}),  # an emulated host has no accelerator
            **(environment.to_env() if environment else {}),
            **self.env,
        }
