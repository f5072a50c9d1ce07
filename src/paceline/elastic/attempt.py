"""One attempt of a launch: its ranks are started, watched, and ended together. Does without torch.

It has a rendezvous, a status board and a private folder of its own, of which nothing is left at the end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from paceline.elastic.failure import HOST, ErrorRecord, LaunchFailure, RankEnd, hang, oom_kills, root_cause
from paceline.elastic.hosts.hosts import current_hosts
from paceline.elastic.hosts.messages import Begin
from paceline.elastic.hosts.remote import RemoteRank, RemoteRanks, RunFolder
from paceline.elastic.independent import Independent
from paceline.elastic.place import RankPlace, on_one_host, rendezvous
from paceline.elastic.recovery import Recovery, StoppedRanks
from paceline.elastic.scaling import answer_requests
from paceline.elastic.signals import StopSignals, stopped_before
from paceline.elastic.started import StartedRank, Starter
from paceline.elastic.watchdog import LOOK_S, Watchdog
from paceline.files import scratch_folder
from paceline.rank_environment import RankEnvironment
from paceline.wire.status import RankStatus, StatusBoard

_TICK_S, _MEETING_S = 0.2, 0.02  # from look to look; while others wait for ranks
_TERMINATE_S = 3.0  # from SIGTERM to SIGKILL
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
    folder: RunFolder | None = None
    recovers: bool = False
    follows_steps: bool = False
    replica_ranks: int = 1
    workers: int | None = None
    server_copies: int = 1
    number: int = 0

    @property
    def ranks(self) -> int:
        return len(self.places)

    def begin(self, places: list[str]) -> Begin:
        """Message that begins the attempt on another host; `places` names each rank's host."""
        spares_hosts = self.recovers or self.workers is not None
        limits = self.start_deadline_s, self.recovers, spares_hosts, self.replica_ranks
        return Begin(self.number, list(self.module_args), dict(self.env), *limits, places, port=self.port or 0)


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
        self.ranks: list[StartedRank | RemoteRank] = []
        self.poll = select.poll()
        self.starter = Starter(setting.module_args, setting.env)
        self.remote: RemoteRanks | None = None
        self.recovery: Recovery | Independent | None = None
        self.watchdog = Watchdog(
            setting.deadline_s, setting.start_deadline_s, follows_steps=setting.recovers and setting.follows_steps
        )
        self._told = False
        self._starts: Counter[int] = Counter()  # of ranks, again
        self._oom_told: dict[str, int] = {}  # by host
        self._killing = False
        self._stopped = StoppedRanks(self)
        self._made = ExitStack()

    def __enter__(self) -> Self:
        self._oom_kills = oom_kills()
        with self._made:  # undone here if a start fails half-way
            folder = self.folder = self._made.enter_context(scratch_folder())
            self.board = StatusBoard.create(folder / "status", self.setting.ranks, self.setting.number)
            self._made.callback(self.board.close)
            self._begin_on_others(folder)
            self.recovery = self._recovery()
            self._made.callback(self._close_ranks)
            self._prepare()
            self._rendezvous = self._made.enter_context(rendezvous(self.setting.places, folder, self.setting.port))
            with self._listener() as listener:
                for number in range(self.setting.ranks):
                    self.ranks.append(self._start(number, listener))
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
            self._note_ends(_MEETING_S if self.recovery and self.recovery.hurries else _TICK_S)
            if self.on_tick:  # before anything is decided: it ends an attempt whose run was taken over
                self.on_tick()
            self._obey_signals()
            alone = self.remote.cut_off() if self.remote else None
            if reason := alone or (self.recovery.too_few if self.recovery else None):
                self._stop_all()
                return LaunchFailure(reason, 0, final=True)
            if self.setting.saves and self.setting.folder:
                answer_requests(self.setting.folder.path, self.recovery)
            if self.recovery and self.recovery.turn():
                return None
            if (forkserver := self.starter.forkserver) and forkserver.lost:
                self._stop_all()
                return LaunchFailure(
                    f"the forkserver of the ranks (pid {forkserver.pid}) was killed, and they were stopped.",
                    0,
                )
            if any(rank.code or (rank.code is None and rank.record.exists()) for rank in self._counted()):
                self._note_ends_for(self.setting.collect_s)
                return self._failed()
            if self.recovery is None and self.signals.first and (held := self._held()):
                return self._hang(held)
            if (hung := self._hung()) and not (self.recovery and self.recovery.end(hung)):
                return self._hang(hung)
        return None

    def _recovery(self) -> Recovery | Independent | None:
        """Recovery from lost ranks; None stops all."""
        setting = self.setting
        if setting.workers is not None:
            return Independent(self, setting.workers, setting.replica_ranks, setting.server_copies)
        return Recovery(self) if setting.recovers else None

    def _listener(self) -> AbstractContextManager[socket.socket | None]:
        """A socket for torch's own store, if a port was asked for."""
        setting = self.setting
        if setting.port is None or not on_one_host(setting.places):
            return nullcontext()
        return setting.places[0].listen(setting.port, backlog=max(128, 2 * setting.ranks))

    def start_again(self, number: int) -> None:
        """Start a rank whose process has ended."""
        self._starts[number] += 1
        before = self.ranks[number]
        for suffix in (".error", ".stack"):
            before.record.with_suffix(suffix).unlink(missing_ok=True)
        self.board.put(number, 0, "starting", 0, time.monotonic_ns(), generation=-1)
        self.ranks[number] = self._start(number, None)

    def wait_for_ends(self, numbers: Collection[int], wait_s: float) -> None:
        """Wait a moment for ranks that were killed."""
        until = time.monotonic() + wait_s
        while any(self.ranks[number].code is None for number in numbers) and time.monotonic() < until:
            self._note_ends(_MEETING_S)

    def end_others(self) -> None:
        """End the ranks that were yet to join when the run was done."""
        self._kill_all()

    def _counted(self) -> Sequence[StartedRank | RemoteRank]:
        """Ranks whose failure is the attempt's."""
        return self.ranks if self.recovery is None else [self.ranks[number] for number in self.recovery.counted]

    def _start(self, number: int, listener: socket.socket | None) -> StartedRank | RemoteRank:
        record = self.folder / f"rank-{number}.error"
        environment = self._environment(number, record, listener)
        if self.remote and (host := self.setting.places[number].number):
            return self.remote.start(host, environment, record)
        rank = self.starter.start(environment, listener if number == 0 else None)
        self.poll.register(rank.pidfd, select.POLLIN)
        return rank

    def _begin_on_others(self, scratch: Path) -> None:
        """Have the other hosts that get ranks prepare for them."""
        setting, hosts = self.setting, current_hosts()
        numbers = {place.number for place in setting.places} - {0}
        if hosts and numbers:
            ranks = hosts.remote(
                numbers, self.board, scratch, setting.folder or RunFolder(scratch), self.signals, self.poll
            )
            self.remote = self._made.enter_context(ranks)
            self.remote.begin(setting.begin([hosts.cluster.hosts[place.number].name for place in setting.places]))

    def _prepare(self) -> None:
        """Wait until ranks can be started here."""

        def stopped() -> bool:
            if self.on_tick:
                self.on_tick()
            return self.signals.first is not None

        self.starter.prepare(self.setting.start_deadline_s, stopped)
        if self.signals.first:
            self._obey_signals()
            raise stopped_before("rank 0 was ready to train", self.signals.first)

    def _environment(self, number: int, record: Path, listener: socket.socket | None) -> RankEnvironment:
        setting, port = self.setting, 0 if listener is None else listener.getsockname()[1]
        place = setting.places[number].environment(number, setting.ranks, setting.places[0], port)
        return replace(
            place,
            attempt=setting.number,
            starts=self._starts[number],
            threads=setting.threads,
            cores=tuple(setting.pin_cores[number]) if setting.pin_cores else (),
            status_file=record.with_name("status"),
            error_file=record,
            launcher=os.getpid(),
            store=self._rendezvous.store,
            key_fd=self._rendezvous.key_fd,
            store_fd=listener.fileno() if listener and number == 0 else None,
            inherited_fds=setting.inherited,
            # the ranks of other hosts go on without it: SIGTERM would have it ask them to stop
            grace_s=0 if self.remote and self.remote.spares_this_host else place.grace_s,
        )

    def _note_ends(self, wait_s: float) -> None:
        """Wait for any rank to end, `wait_s` at most, and take the exit codes."""
        here = [rank for rank in self.ranks if isinstance(rank, StartedRank) and rank.code is None]
        by_fd = {rank.pidfd: rank for rank in here}
        if self.remote and self.remote.busy:
            wait_s = min(wait_s, _MEETING_S)
        ready = {fd for fd, _ in self.poll.poll(wait_s * 1000)}
        for fd in ready & by_fd.keys():
            self.poll.unregister(fd)
            by_fd[fd].note_end()
        now = time.time()
        for rank in here:
            if rank.code is None:
                rank.alive_at = now
        if self.remote:
            self.remote.turn()
            if self._killing:
                self.remote.give_up_silent()

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
        before = self.ends()
        self._stop_all()
        after, members = self.ends(), {rank.number for rank in self._counted()}  # others were lost before
        ends = [
            late if late.record or early.code is not None else early
            for early, late in zip(before, after, strict=True)
            if late.status.rank in members
        ]
        if self.remote and (lost := self.remote.lost):
            then = " --resume goes on from what was saved." if self.setting.saves else ""
            return LaunchFailure(f"{lost}; the ranks were stopped.{then}", 0)
        failure = root_cause(ends, self._oom_kills_here())
        if self.remote and (silent := self.remote.silent):
            failure = replace(failure, text=f"{failure.text}\n{silent}")
        if self.signals.first and self.ranks[failure.rank].code == -signal.SIGTERM:
            error = stopped_before(f"rank {failure.rank} was ready to train", self.signals.first)
            return LaunchFailure(str(error), failure.rank, exit_code=error.exit_code)
        return failure

    def new_oom_kills(self, end: RankEnd) -> int | None:
        """Processes of a rank's host that lack of memory has ended since the last call.

        None where its kernel does not say.
        """
        now = end.oom_kills if end.remote else self._oom_kills_here()
        before, self._oom_told[end.host] = self._oom_told.get(end.host, 0), now or 0
        return None if now is None else now - before

    def _oom_kills_here(self) -> int | None:
        """Processes here that lack of memory has ended since the attempt began."""
        kills = oom_kills()
        return None if kills is None or self._oom_kills is None else kills - self._oom_kills

    def _held(self) -> list[RankStatus]:
        """Ranks that SIGSTOP holds for too long: they handle no other signal."""
        late = self._stopped.too_long([rank.number for rank in self.ranks if rank.code is None])
        return [status for status in self.board.read() if status.rank in late]

    def _hung(self) -> list[RankStatus]:
        """Ranks that did nothing for too long; all, if they only wait for another."""
        alive = [status for status in self.board.read() if self.ranks[status.rank].code is None]
        alive = [status for status in alive if status.phase != "joining"]  # which waits for the end of a step
        # what a rank does behind a cut link is not known, and may be more than it was last seen to do
        idle_s = {status.rank: status.idle_s(self.ranks[status.rank].known_ns) for status in alive}
        paging = {rank for rank, seconds in idle_s.items() if seconds > LOOK_S and self.ranks[rank].paging}
        return self.watchdog.look(alive, idle_s, time.monotonic(), paging)

    def _hang(self, hung: Sequence[RankStatus]) -> LaunchFailure:
        numbers = {status.rank for status in hung}
        self.ask_for_stacks(numbers)
        now_ns = time.monotonic_ns()
        ends = self.ends()
        for rank in self.ranks:
            if rank.number in numbers:
                rank.kill()
        self._stop_all()
        return hang([end for end in ends if end.status.rank in numbers], ends, now_ns)

    def ask_for_stacks(self, numbers: Set[int]) -> None:
        """Have ranks that hang write where they do; waits a moment for that."""
        asked = [rank for rank in self.ranks if rank.number in numbers and not rank.stopped]
        for rank in asked:
            rank.signal(signal.SIGUSR2)
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and not all(rank.stack() for rank in asked):
            self._note_ends(0.02)

    def ends(self) -> list[RankEnd]:
        """End or present state of every rank."""
        return [
            RankEnd(
                status=status,
                pid=rank.pid,
                code=rank.code,
                alive_at=rank.alive_at,
                record=ErrorRecord.read(rank.record),
                stack=rank.stack(),
                stopped=rank.stopped,
                host=place.host.name if place.host else place.host_name or HOST,
                remote=isinstance(rank, RemoteRank),
                oom_kills=rank.oom_kills if isinstance(rank, RemoteRank) else None,
            )
            for rank, place, status in zip(self.ranks, self.setting.places, self.board.read(), strict=True)
        ]

    def _stop_all(self) -> None:
        for rank in self.ranks:
            rank.signal(signal.SIGTERM)
        self._note_ends_for(_TERMINATE_S, unless_killing=True)
        self._kill_all()

    def _kill_all(self) -> None:
        self._killing = True
        for rank in self.ranks:
            rank.kill()
        self._note_ends_for(10)  # SIGKILL takes effect at once, but for a rank inside a failing disk or driver

    def _close_ranks(self) -> None:
        self._kill_all()
        for rank in self.ranks:
            if isinstance(rank, StartedRank) and rank.code is None:  # stuck on a failing disk or driver
                os.close(rank.pidfd)
