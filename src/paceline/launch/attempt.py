"""One attempt of a launch: its ranks are started, watched, and ended together. Does without torch.

It has a socket for its rendezvous, a status board and a private folder of its own, of which nothing is left at the end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from paceline.device import ON_CPU
from paceline.engine.status import RankStatus, StatusBoard
from paceline.errors import LaunchError
from paceline.files import scratch_folder
from paceline.launch.failure import HOST, ErrorRecord, LaunchFailure, RankEnd, hang, is_stopped, oom_kills, root_cause
from paceline.launch.place import RankPlace
from paceline.launch.seed import DEFAULTS, ForkedRank, Seed, seed_for, why_not
from paceline.launch.signals import StopSignals
from paceline.rank_environment import RankEnvironment

_TICK_S = 0.2
_TERMINATE_S = 3.0  # from SIGTERM to SIGKILL
_OWN_ERROR_S = 5.0  # beyond the deadline: the error of the transport itself, which knows more, comes first
_ANSWER_S = 1.0  # for a hung rank to write its stack


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Ranks that one attempt is to start, as `launch` was asked.

    `number` counts the attempts from 0.
    """

    module_args: list[str]
    places: Sequence[RankPlace]
    threads: int
    pin_cores: list[list[int]] | None
    deadline_s: float
    start_deadline_s: float
    collect_s: float
    port: int | None
    saves: bool
    env: Mapping[str, str]
    inherited: tuple[int, ...]
    number: int = 0

    @property
    def ranks(self) -> int:
        return len(self.places)


@dataclass
class _Rank:
    """A started rank. Its process leads a session and process group of its own."""

    number: int
    process: subprocess.Popen[bytes] | ForkedRank
    pidfd: int
    record: Path
    alive_at: float = field(default_factory=time.time)
    code: int | None = None

    def signal(self, number: int) -> None:
        """To the rank alone, not to what it started."""
        if self.code is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """SIGKILL, to the rank and all it started."""
        if self.code is not None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # a fork that is so new that it leads no group, and has started nothing
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def note_end(self) -> None:
        """Take the exit code, once the rank's process group was ended.

        The group's number is the rank's own only until then.
        """
        self.kill()
        self.code = self.process.wait()

    def stack(self) -> str:
        """Stack traces that faulthandler wrote."""
        path = self.record.with_suffix(".stack")
        return path.read_text(errors="replace") if path.exists() else ""


class Attempt:
    """One start of all ranks. As a context: everything that it made is gone at the end, however it ends."""

    def __init__(
        self,
        setting: Setting,
        signals: StopSignals,
        on_tick: Callable[[], None] | None,
        on_event: Callable[[str, dict[str, Any]], None] | None,
    ) -> None:
        self.setting = setting
        self.signals = signals
        self.on_tick = on_tick
        self.on_event = on_event
        self.ranks: list[_Rank] = []
        self.poll = select.poll()
        self.seed: Seed | None = None
        self._told = False
        self._made = ExitStack()

    def __enter__(self) -> Self:
        self._oom_kills = oom_kills()
        self.seed = self._seed()
        with self._made:  # undone here if a start fails half-way
            folder = self._made.enter_context(scratch_folder())
            self.board = StatusBoard.create(folder / "status", self.setting.ranks, self.setting.number)
            self._made.callback(self.board.close)
            self._made.callback(self._close_ranks)
            with self.setting.places[0].listen(self.setting.port, backlog=max(128, 2 * self.setting.ranks)) as listener:
                for number in range(self.setting.ranks):
                    self._start(number, folder, listener, self.seed)
            self._made = self._made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def watch(self) -> LaunchFailure | None:
        """Wait until all ranks have ended, or all were stopped since one failed or hangs.

        None when all ended with exit code 0.

        Raises:
            SystemExit: 130, when a second SIGINT came and all were killed.
        """
        while any(rank.code is None for rank in self.ranks):
            self._note_ends(_TICK_S)
            self._obey_signals()
            if self.seed and self.seed.lost:
                self._stop_all()
                return LaunchFailure(
                    (
                        f"the process that the ranks were forked from (pid {self.seed.pid}) was killed, and they "
                        "were stopped."
                    ),
                    0,
                )
            if any(rank.code or (rank.code is None and rank.record.exists()) for rank in self.ranks):
                self._note_ends_for(self.setting.collect_s)
                return self._failed()
            if hung := self._hung():
                return self._hang(hung)
            if self.on_tick:
                self.on_tick()
        return None

    def _start(self, number: int, folder: Path, listener: socket.socket, seed: Seed | None) -> None:
        record = folder / f"rank-{number}.error"
        environment = self._environment(number, record, listener)
        variables = {**os.environ, **self._variables(environment)}
        process: subprocess.Popen[bytes] | ForkedRank | None = None
        try:
            if seed is None:
                process = self._interpreter(variables, environment)
            else:
                process = seed.fork(self.setting.module_args, variables, environment, listener if number == 0 else None)
            pidfd = os.pidfd_open(process.pid)
        except (OSError, LaunchError) as error:
            if process:
                process.kill()
                process.wait()
            raise LaunchError(f"rank {number} of {self.setting.ranks} could not be started: {error}") from error
        self.ranks.append(_Rank(number, process, pidfd, record))
        self.poll.register(pidfd, select.POLLIN)

    def _interpreter(self, variables: dict[str, str], environment: RankEnvironment) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.launch.rank", *self.setting.module_args],
            env=variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the launcher, which forwards it once
            pass_fds=[*environment.inherited_fds, *([] if environment.store_fd is None else [environment.store_fd])],
        )

    def _seed(self) -> Seed | None:
        """Seed process to fork the ranks from; None where each is a new interpreter."""
        variables = {**os.environ, **self._variables(None)}
        if why_not(variables):
            return None
        seed = seed_for(variables)

        def stopped() -> bool:
            if self.on_tick:
                self.on_tick()
            return self.signals.first is not None

        unfit = seed.wait_until_ready(self.setting.start_deadline_s, stopped)
        if self.signals.first:
            self._obey_signals()
            raise LaunchError(f"{self.signals.first} stopped the run before rank 0 was ready to train.")
        return None if unfit else seed

    def _environment(self, number: int, record: Path, listener: socket.socket) -> RankEnvironment:
        setting, port = self.setting, listener.getsockname()[1]
        place = setting.places[number].environment(number, setting.ranks, setting.places[0], port)
        return replace(
            place,
            attempt=setting.number,
            threads=setting.threads,
            cores=tuple(setting.pin_cores[number]) if setting.pin_cores else (),
            status_file=record.with_name("status"),
            error_file=record,
            launcher=os.getpid(),
            store_fd=listener.fileno() if number == 0 else None,
            inherited_fds=setting.inherited,
        )

    def _variables(self, environment: RankEnvironment | None) -> dict[str, str]:
        """Environment variables of a rank, or of the seed, besides those of this process."""
        return {
            **{name: os.environ.get(name, value) for name, value in DEFAULTS.items()},
            **(ON_CPU if environment and environment.host else {}),  # an emulated host has no accelerator
            **(environment.to_env() if environment else {}),
            **self.setting.env,
        }

    def _note_ends(self, wait_s: float) -> None:
        """Wait for any rank to end, `wait_s` at most, and take the exit codes."""
        by_fd = {rank.pidfd: rank for rank in self.ranks}
        ended = {fd for fd, _ in self.poll.poll(wait_s * 1000)}
        for fd in ended:
            self.poll.unregister(fd)
            by_fd[fd].note_end()
        now = time.time()
        for rank in self.ranks:
            if rank.code is None:
                rank.alive_at = now

    def _note_ends_for(self, wait_s: float, *, unless_killing: bool = False) -> None:
        until = time.monotonic() + wait_s
        while any(rank.code is None for rank in self.ranks) and (left_s := until - time.monotonic()) > 0:
            if unless_killing and self.signals.kill:
                return
            self._note_ends(min(left_s, _TICK_S))

    def _obey_signals(self) -> None:
        if self.signals.kill:
            print("paceline: killing the ranks", file=sys.stderr)
            self._kill_all()
            raise SystemExit(130)
        if self.signals.first and not self._told:
            self._told = True
            what = "save a checkpoint and end" if self.setting.saves else "end"
            kills = "A second Ctrl-C" if self.signals.first == "SIGINT" else "Ctrl-C"
            print(f"paceline: {self.signals.first}: the ranks {what}. {kills} kills them at once.", file=sys.stderr)
            if self.on_event:
                self.on_event("stop", {"signal": self.signals.first})
            for rank, status in zip(self.ranks, self.board.read() if self.ranks else (), strict=True):
                # While it starts, Python's own SIGINT would raise KeyboardInterrupt anywhere; when it is done, it ends
                # by itself.
                if status.phase != "done":
                    rank.signal(signal.SIGTERM if status.phase == "starting" else signal.Signals[self.signals.first])

    def _failed(self) -> LaunchFailure:
        """The failure to report, once all other ranks are stopped."""
        before = self._ends()
        self._stop_all()
        after = self._ends()
        ends = [
            late if late.record or early.code is not None else early for early, late in zip(before, after, strict=True)
        ]
        kills = oom_kills()
        failure = root_cause(ends, None if kills is None or self._oom_kills is None else kills - self._oom_kills)
        if self.signals.first and self.ranks[failure.rank].code == -signal.SIGTERM:
            return LaunchFailure(
                f"{self.signals.first} stopped the run before rank {failure.rank} was ready to train.", failure.rank
            )
        return failure

    def _hung(self) -> list[RankStatus]:
        """Ranks that did nothing for too long; all, if they only wait for another."""
        now_ns = time.monotonic_ns()
        alive = [status for status in self.board.read() if self.ranks[status.rank].code is None]
        limits = {"starting": self.setting.start_deadline_s}
        late = [status for status in alive if status.idle_s(now_ns) > limits.get(status.phase, self.setting.deadline_s)]
        if len(late) == len(alive) and all(status.phase == "sync" for status in late):
            return (
                late if all(status.idle_s(now_ns) > self.setting.deadline_s + _OWN_ERROR_S for status in late) else []
            )
        return [status for status in late if status.phase != "sync"]

    def _hang(self, hung: Sequence[RankStatus]) -> LaunchFailure:
        numbers = {status.rank for status in hung}
        asked = [rank for rank in self.ranks if rank.number in numbers and not is_stopped(rank.process.pid)]
        for rank in asked:
            rank.signal(signal.SIGUSR2)
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and not all(rank.stack() for rank in asked):
            time.sleep(0.02)
        now_ns = time.monotonic_ns()
        ends = self._ends()
        for rank in self.ranks:
            if rank.number in numbers:
                rank.kill()
        self._stop_all()
        return hang([end for end in ends if end.status.rank in numbers], ends, now_ns)

    def _ends(self) -> list[RankEnd]:
        """End or present state of every rank."""
        return [
            RankEnd(
                status=status,
                pid=rank.process.pid,
                code=rank.code,
                alive_at=rank.alive_at,
                record=ErrorRecord.read(rank.record),
                stack=rank.stack(),
                stopped=rank.code is None and is_stopped(rank.process.pid),
                host=place.host.name if place.host else HOST,
            )
            for rank, place, status in zip(self.ranks, self.setting.places, self.board.read(), strict=True)
        ]

    def _stop_all(self) -> None:
        for rank in self.ranks:
            rank.signal(signal.SIGTERM)
        self._note_ends_for(_TERMINATE_S, unless_killing=True)
        self._kill_all()

    def _kill_all(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self._note_ends_for(10)  # SIGKILL takes effect at once, but for a rank inside a failing disk or driver

    def _close_ranks(self) -> None:
        self._kill_all()
        for rank in self.ranks:
            os.close(rank.pidfd)
