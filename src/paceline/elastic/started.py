"""Ranks of this host: started, signalled and ended. Does without torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.device import ON_CPU
from paceline.elastic.failure import is_stopped, state_of
from paceline.elastic.forkserver import DEFAULTS, ForkedRank, Forkserver, forkserver_for, why_not
from paceline.errors import LaunchError
from paceline.rank_environment import KEY_FD, RankEnvironment


@dataclass
class StartedRank:
    """A rank of this host. Its process leads a session and process group of its own."""

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
        """Time of what is known of it: now, by the monotonic clock."""
        return time.monotonic_ns()

    @property
    def stopped(self) -> bool:
        """True if SIGSTOP or a debugger holds the process."""
        return self.code is None and is_stopped(self.pid)  # after its end, the pid may belong to another process

    @property
    def paging(self) -> bool:
        """True if its main thread waits for a disk, or for memory."""
        return self.code is None and state_of(self.pid) == "D"

    def signal(self, number: int) -> None:
        """To the rank alone, not to what it started."""
        if self.code is None:
            with suppress(ProcessLookupError):  # its forkserver was lost, and the system has reaped it
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """SIGKILL, to the rank and all it started."""
        if self.code is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # a fork that is so new that it leads no group, and has started nothing
            self.signal(signal.SIGKILL)

    def note_end(self) -> None:
        """Kill the rank's process group, wait for the exit code, and close the pidfd.

        Afterwards the system may reuse the numbers of the group and of the descriptor.
        """
        if self.code is None:
            self.kill()
            self.code = self.process.wait()
            os.close(self.pidfd)

    def stack(self) -> str:
        """Stack traces that faulthandler wrote."""
        path = self.record.with_suffix(".stack")
        return path.read_text(errors="replace") if path.exists() else ""


class Starter:
    """Starts ranks on this host.

    Args:
        module_args: the import path of the function that every rank calls, then its arguments.
        env: variables for the ranks, over those of this process.
    """

    def __init__(self, module_args: list[str], env: Mapping[str, str]) -> None:
        self.module_args, self.env = module_args, env
        self.forkserver: Forkserver | None = None

    def prepare(self, deadline_s: float, stopped: Callable[[], bool]) -> None:
        """Wait for the forkserver that ranks are forked from, if there is to be one.

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
            listener: the socket on which it serves torch's own store.

        Raises:
            LaunchError: it could not be started.
        """
        # the number of a descriptor of this process means nothing there
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
                f"rank {environment.rank} of {environment.world_size} could not be started: {error}"
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
