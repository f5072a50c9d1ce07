"""Ranks of one attempt on all hosts: start, signals, results and end."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from paceline.elastic.failure import HOST, ErrorRecord, RankEnd, StopSignals, hang, oom_kills, stopped_before
from paceline.elastic.forkserver import StartedRank, Starter
from paceline.elastic.hosts.hosts import NextGeneration, RemoteRank, RemoteRanks, RunFolder, current_hosts
from paceline.elastic.hosts.messages import Begin
from paceline.elastic.place import RankPlace, on_one_host, rendezvous
from paceline.elastic.stall import Stall, stall_of
from paceline.errors import LaunchError
from paceline.files import scratch_folder
from paceline.rank_environment import RankEnvironment
from paceline.wire.position import ASK, ASK_STOPPED, POSITION, Position
from paceline.wire.status import StatusBoard

COLLECT_S = 0.5  # time after the first failure in which other ranks can report their failures
MEETING_S = 0.02  # seconds between two polls while some ranks wait for others
_TICK_S = 0.2
_TERMINATE_S = 3.0  # from SIGTERM to SIGKILL
_POSITION_S = 2.0  # longest time for ranks to write their positions
_BEHIND_S = 0.6  # longest time of a rank behind the first answers; a rank may be unable to answer
_ANSWER_S = 1.0  # longest time for a hung rank to write its stack trace
_STOPPED_S = 5.0  # a rank that is suspended for longer counts as lost

Rank = StartedRank | RemoteRank


@dataclass(frozen=True)
class Setting:
    """Settings of one attempt: the ranks to start, the function they call, and their deadlines.

    Attributes:
        module_args: import path of the function that every rank calls (`pkg.mod:name`), followed by the function's
            arguments.
        places: places of the ranks, in rank order.
        deadline_s: longest time that a rank may stay in one phase of one step while it is not waiting for others.
        start_deadline_s: longest time that a rank may take to start.
        collect_s: time after the first failure before the other ranks are stopped, in which they may end by themselves.
        threads: number of threads for each rank's torch operations.
        pin_cores: the cores of each rank; None lets the kernel choose the cores.
        port: port of the rendezvous between hosts, at the address of rank 0. On one machine, this is the port of
            torch's own store, if accelerators need a store. None takes a free port.
        saves: True if ranks save a checkpoint before they are stopped. The message of the launcher then mentions the
            checkpoint.
        env: environment variables for the ranks, which extend or override those of this process.
        inherited: descriptors that every rank keeps open until its end. Processes that a rank starts do not inherit
            these descriptors.
        folder: folder that ranks on all hosts read and write. `module_args` contains its path.
        recovers: True if the function takes part in generations (`run/recovery/`). If a rank is killed or hangs, the
            other ranks then continue without it, and the rank is started again.
        follows_steps: True to derive a time limit from earlier steps for a rank that computes while others wait
            (`watchdog.py`). This applies only if ranks recover. `deadline_s` remains the upper limit.
        replica_ranks: number of ranks per replica. The ranks of a replica continue together or not at all.
        workers: number of workers, if the ranks share no process group. Ranks of workers have the lowest numbers; all
            other ranks are servers. If a rank is killed or hangs, the other ranks continue, and the rank is started
            again.
        server_copies: number of processes per server. A server continues as long as one of its processes runs.
        number: number of the attempt, from 0.
    """

    module_args: list[str]
    places: Sequence[RankPlace]
    _: KW_ONLY
    deadline_s: float = 60.0
    start_deadline_s: float = 300.0
    collect_s: float = COLLECT_S
    threads: int = 1
    pin_cores: list[list[int]] | None = None
    port: int | None = None
    saves: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    inherited: Sequence[int] = ()
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
        """Return the message that begins the attempt on another host. `places` has the name of each rank's host."""
        spares_hosts = self.recovers or self.workers is not None
        limits = self.start_deadline_s, self.recovers, spares_hosts, self.replica_ranks
        return Begin(self.number, list(self.module_args), dict(self.env), *limits, places, port=self.port or 0)


class Ranks:
    """Ranks of one attempt, indexed by number. The context manager ends them and removes their files.

    Args:
        tick: called at least five times a second while ranks are prepared.
        tell: called with the name of an event of the run and its details.
        adopts: ranks that hosts have kept since the coordinator was lost, and that continue. All other ranks have
            ended; each is replaced once its host is present.
    """

    def __init__(
        self,
        setting: Setting,
        signals: StopSignals,
        tick: Callable[[], object],
        tell: Callable[[str, dict[str, Any]], object],
        adopts: NextGeneration | None = None,
    ) -> None:
        self.setting, self.signals, self.adopts = setting, signals, adopts
        self.tick, self.tell = tick, tell
        self.poll = select.poll()
        self.starter = Starter(setting.module_args, setting.env)
        self.remote: RemoteRanks | None = None
        self.stopped_now: set[int] = set()  # ranks that were suspended at the last poll
        self._ran_at: dict[int, float] = {}  # time at which each rank was last seen running
        self._ranks: list[Rank] = []
        self._starts: Counter[int] = Counter()  # number of restarts of each rank
        self._told = False
        self._oom_told: dict[str, int] = {}  # number of reported kills for lack of memory, by host
        self._killing = False

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def __getitem__(self, number: int) -> Rank:
        return self._ranks[number]

    def __enter__(self) -> Self:
        self._oom_kills, setting = oom_kills(), self.setting
        kept = self.adopts.kept if self.adopts else None
        with ExitStack() as made:  # closes everything if an error interrupts the setup
            if kept is not None:
                made.callback(kept.end)
                self.folder, self.board, self.starter = kept.scratch, kept.board, kept.starter
            else:
                self.folder = made.enter_context(scratch_folder())
                self.board = StatusBoard.create(self.folder / "status", setting.ranks, setting.number)
                made.callback(self.board.close)
            hosts, numbers = current_hosts(), {place.number for place in setting.places} - {0}
            if hosts and (numbers or kept):
                folder = setting.folder or RunFolder(self.folder)
                links = [link for link in hosts.links if link.number in numbers]
                remote = RemoteRanks(links, self.board, self.folder, folder, self.signals, self.poll, hosts)
                self.remote = made.enter_context(remote)
                if kept is None:
                    self.remote.begin(
                        setting.begin([hosts.cluster.hosts[place.number].name for place in setting.places])
                    )
            made.callback(self._close)
            if self.adopts is not None:
                self._adopt(self.adopts)
            self._made = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def start(self) -> None:
        """Start all ranks.

        Raises:
            LaunchError: a rank cannot be started, or a signal arrived before the start.
        """
        setting = self.setting
        self._prepare()
        key = hosts.key if (hosts := current_hosts()) else None
        self._rendezvous = self._made.enter_context(rendezvous(setting.places, self.folder, setting.port, key))
        # torch's own store needs a socket if a port was requested
        has_store = setting.port is not None and on_one_host(setting.places)
        backlog = max(128, 2 * setting.ranks)
        with setting.places[0].listen(setting.port, backlog) if has_store else nullcontext() as listener:
            for number in range(setting.ranks):
                self._ranks.append(self._start(number, listener))

    def start_again(self, number: int) -> None:
        """Restart a rank whose process has ended."""
        self._starts[number] += 1
        for suffix in (".error", ".stack", POSITION):
            self[number].record.with_suffix(suffix).unlink(missing_ok=True)
        self.board.put(number, 0, "starting", 0, time.monotonic_ns(), generation=-1)
        self._ranks[number] = self._start(number, None)

    @property
    def running(self) -> list[Rank]:
        """Ranks that have not ended yet."""
        return [rank for rank in self if rank.code is None]

    def is_away(self, number: int) -> bool:
        """Return True if the host of a rank is lost."""
        rank = self[number]
        return isinstance(rank, RemoteRank) and rank.link.lost is not None

    def was_lost(self, number: int) -> bool:
        """Return True if a signal ended the rank, or its device has failed.

        A rank that recorded any other error is not lost.
        """
        rank = self[number]
        if rank.code is None:
            return False
        return self.lost_its_device(number) or (rank.code < 0 and not rank.record.exists())

    def lost_its_device(self, number: int) -> bool:
        """Return True if the hardware of the rank's accelerator has failed.

        If the first process of a rank fails before its first step, the cause may be a setting, so the run ends.
        """
        record = ErrorRecord.read(self[number].record)
        has_trained = self._starts[number] > 0 or self.board.read()[number].step > 0
        return has_trained and record is not None and bool(record.device)

    def on_host(self, host: int) -> set[int]:
        """Return the numbers of the ranks on a host."""
        return {rank for rank, place in enumerate(self.setting.places) if place.number == host}

    def note_ends(self, wait_s: float = _TICK_S) -> None:
        """Wait until a rank ends or `wait_s` seconds have passed, and collect the exit codes."""
        here = [rank for rank in self.running if isinstance(rank, StartedRank)]
        by_fd = {rank.pidfd: rank for rank in here}
        if self.remote and self.remote.busy:
            wait_s = min(wait_s, MEETING_S)
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

    def note_ends_for(self, wait_s: float, *, unless_killing: bool = False) -> None:
        """Wait until all ranks have ended or `wait_s` seconds have passed."""
        until = time.monotonic() + wait_s
        while self.running and (left_s := until - time.monotonic()) > 0:
            if unless_killing and self.signals.kill:
                return
            self.note_ends(min(left_s, _TICK_S))

    def wait_for_ends(self, numbers: Collection[int], wait_s: float) -> None:
        """Wait briefly for killed ranks to end."""
        until = time.monotonic() + wait_s
        while any(self[number].code is None for number in numbers) and time.monotonic() < until:
            self.note_ends(MEETING_S)

    def stop_all(self) -> None:
        """End all ranks with SIGTERM, and after some seconds with SIGKILL."""
        for rank in self:
            rank.signal(signal.SIGTERM)
        self.note_ends_for(_TERMINATE_S, unless_killing=True)
        self.kill_all()

    def kill_all(self) -> None:
        """Send SIGKILL to all ranks."""
        self._killing = True
        for rank in self:
            rank.kill()
        self.note_ends_for(10)  # SIGKILL takes effect immediately, unless a rank is blocked by a failing disk or driver

    def kill_hung(self, number: int, members: Sequence[int], stall: Stall | None = None) -> LaunchError:
        """Kill a rank that makes no progress; return the error that describes its state.

        Args:
            members: ranks that communicate with the rank.
            stall: the collective that a rank did not enter, if it is already known.
        """
        ends = self.ends()
        stall = stall or self.stall(members)
        if not self[number].stack():
            self.ask_for_stacks({number})
        ends[number] = replace(ends[number], stack=self[number].stack())
        self[number].kill()
        return hang([ends[number]], ends, time.monotonic_ns(), stall if stall and stall.rank == number else None)

    def stall(self, members: Sequence[int]) -> Stall | None:
        """Find the rank that did not enter a collective, from the positions of all members.

        Running members are asked for their positions. Members that have failed write their positions by themselves.
        """
        if self.setting.workers is not None:  # workers and servers share no process group
            return None
        board = self.board.read()
        files = {number: self[number].record.with_suffix(POSITION) for number in members}
        asked = [
            self[number]
            for number, file in files.items()
            if not (file.exists() or self[number].record.exists() or self[number].code is not None)
            and board[number].phase != "starting"
        ]
        suspended = {rank.number for rank in asked if rank.stopped}
        for rank in asked:
            rank.signal(ASK_STOPPED if rank.number in suspended else ASK)
            if rank.number in suspended:
                rank.signal(signal.SIGCONT)
        # a failed rank writes its error record first
        failed = [self[number] for number in files if self[number] not in asked and self._reports_wait(number)]
        self._wait_for_positions([*asked, *failed], files)
        positions = {n: Position.from_json(file.read_bytes()) for n, file in files.items() if file.exists()}
        for number, file in files.items():
            if self[number].code is None and not self[number].record.exists():
                file.unlink(missing_ok=True)  # a later request needs a new answer
        stall = stall_of({n: position for n, position in positions.items() if position}, board, members, suspended)
        if stall is not None and stall.rank not in positions and isinstance(self[stall.rank], RemoteRank):
            return None  # the rank may be behind a cut link, so its position is unknown
        return stall

    def _reports_wait(self, number: int) -> bool:
        """Return True if a rank has lost a peer and will write its position."""
        record = ErrorRecord.read(self[number].record) if self[number].code is None else None
        return record is not None and record.secondary

    def _wait_for_positions(self, ranks: Sequence[Rank], files: Mapping[int, Path]) -> None:
        until = time.monotonic() + _POSITION_S
        while waits := [rank for rank in ranks if rank.code is None and not files[rank.number].exists()]:
            if len(waits) < len(ranks):
                until = min(until, time.monotonic() + _BEHIND_S)
            if time.monotonic() > until:
                return
            self.note_ends(0.01)

    def overdue(self, members: Collection[int]) -> bool:
        """Return True if a running member reports a wait of `deadline_s`.

        A rank also reports waits that have shorter timeouts of their own. After such a wait, its program may continue.
        """
        for rank in (self[number] for number in members):
            file = rank.record.with_suffix(POSITION)
            if rank.code is None and not rank.record.exists() and file.exists():
                position = Position.from_json(file.read_bytes()) or Position()
                if any(wait.waited_s > 0.95 * self.setting.deadline_s for wait in position.waits):
                    return True
                file.unlink(missing_ok=True)
        return False

    def obey_signals(self) -> None:
        """Forward a signal that the launcher received.

        Raises:
            SystemExit: with exit code 130, after a second SIGINT has killed all ranks.
        """
        if self.signals.kill:
            print("paceline: killing the ranks", file=sys.stderr)
            self.kill_all()
            raise SystemExit(130)
        if self.signals.first and not self._told:
            self._told = True
            what = "save a checkpoint and end" if self.setting.saves else "end"
            kills = "A second Ctrl-C" if self.signals.first == "SIGINT" else "Ctrl-C"
            print(f"paceline: {self.signals.first}: the ranks {what}. {kills} kills them at once.", file=sys.stderr)
            self.tell("stop", {"signal": self.signals.first})
            for rank, status in zip(self, self.board.read() if self._ranks else (), strict=True):
                # During the start of a rank, Python's SIGINT handler would raise KeyboardInterrupt in arbitrary code. A
                # rank that is done ends by itself.
                if status.phase != "done":
                    rank.signal(signal.SIGTERM if status.phase == "starting" else signal.Signals[self.signals.first])

    def stopped_too_long(self, numbers: Sequence[int]) -> list[int]:
        """Select the ranks that have been suspended for too long. These ranks count as lost."""
        now, limit_s = time.monotonic(), min(_STOPPED_S, self.setting.deadline_s / 2)
        self.stopped_now = {number for number in numbers if self[number].stopped}
        self._ran_at = {n: self._ran_at.get(n, now) if n in self.stopped_now else now for n in numbers}
        return sorted(number for number in self.stopped_now if now - self._ran_at[number] > limit_s)

    def ask_for_stacks(self, numbers: Set[int]) -> None:
        """Make hung ranks write their stack traces, and wait briefly for the traces.

        A suspended rank writes its stack trace together with its position.
        """
        asked = [rank for rank in self if rank.number in numbers and rank.code is None and not rank.stopped]
        for rank in asked:
            rank.signal(signal.SIGUSR2)
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and not all(rank.has_stack or rank.code is not None for rank in asked):
            self.note_ends(0.02)

    def ends(self) -> list[RankEnd]:
        """Return the final or current state of every rank."""
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
            for rank, place, status in zip(self, self.setting.places, self.board.read(), strict=True)
        ]

    def oom_kills_here(self) -> int | None:
        """Count the kills for lack of memory on this host during the attempt."""
        kills = oom_kills()
        return None if kills is None or self._oom_kills is None else kills - self._oom_kills

    def new_oom_kills(self, end: RankEnd) -> int | None:
        """Count the kills for lack of memory on a rank's host since the last call.

        The result is None if the kernel of that host does not report the number.
        """
        now = end.oom_kills if end.remote else self.oom_kills_here()
        before, self._oom_told[end.host] = self._oom_told.get(end.host, 0), now or 0
        return None if now is None else now - before

    def _adopt(self, next_generation: NextGeneration) -> None:
        """Take over the kept ranks, and start the missing ranks of this host."""
        assert self.remote is not None
        kept, self._rendezvous = next_generation.kept, next_generation.rendezvous
        self.remote.adopt(self.setting.begin(kept.begin.places))
        here = {rank.number: rank for rank in kept.ranks}
        kept.ranks.clear()
        for number in range(self.setting.ranks):
            self._ranks.append(here.get(number) or self.remote.ranks.get(number) or self._start(number, None))
        for rank in here.values():
            if rank.code is None:
                self.poll.register(rank.pidfd, select.POLLIN)

    def _start(self, number: int, listener: socket.socket | None) -> Rank:
        record = self.folder / f"rank-{number}.error"
        environment = self._environment(number, record, listener)
        if self.remote and (host := self.setting.places[number].number):
            return self.remote.start(host, environment, record)
        rank = self.starter.start(environment, listener if number == 0 else None)
        self.poll.register(rank.pidfd, select.POLLIN)
        return rank

    def _prepare(self) -> None:
        """Wait until ranks can be started on this host."""

        def stopped() -> bool:
            self.tick()
            return self.signals.first is not None

        self.starter.prepare(self.setting.start_deadline_s, stopped)
        if self.signals.first:
            self.obey_signals()
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
            inherited_fds=tuple(setting.inherited),
            # ranks on other hosts continue without this rank, but after SIGTERM it would ask them to stop
            grace_s=0 if self.remote and self.remote.spares_this_host else place.grace_s,
        )

    def _close(self) -> None:
        self.kill_all()
        for rank in self.running:
            if isinstance(rank, StartedRank):  # the rank is blocked by a failing disk or driver
                os.close(rank.pidfd)
