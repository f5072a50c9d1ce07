"""Launch of a run's ranks, in one or more attempts."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import Emulation, LinkBytes
from paceline.cluster.machine import interface_of
from paceline.elastic.failure import StopSignals, hang, root_cause, stopped_before
from paceline.elastic.hosts.hosts import Hosts, NextGeneration, current_hosts
from paceline.elastic.hosts.over_hosts import host_processes
from paceline.elastic.independent import losses_of
from paceline.elastic.membership import noted
from paceline.elastic.place import RankPlace, on_hosts, on_this_machine
from paceline.elastic.ranks import MEETING_S, Ranks, Setting
from paceline.elastic.recovery import answer_requests
from paceline.elastic.stall import Stall
from paceline.elastic.watchdog import LOOK_S, Watchdog
from paceline.errors import LaunchError
from paceline.wire.status import RankStatus

# errors of collectives, whose cause may be another rank
_IN_COLLECTIVES = (
    "ranks.deadline",
    "ranks.operation_failed",
    "ranks.interrupted",
    "ranks.calls_differ",
    "ranks.message_size",
    "ranks.all_to_all_sizes",
)


@dataclass(frozen=True)
class Launched:
    """Result of a successful launch. `stopped_by` is the signal that ended the launch early, or None."""

    attempts: int
    stopped_by: str | None


def launch(
    setting: Setting,
    *,
    restarts: int = 0,
    on_tick: Callable[[], object] = lambda: None,
    on_event: Callable[[str, dict[str, Any]], object] = lambda *_: None,
    adopts: NextGeneration | None = None,
) -> Launched:
    """Start all ranks, each with the same function, and wait until all have ended.

    The first SIGINT or SIGTERM is forwarded, so that the ranks save a checkpoint and end. A second SIGINT kills the
    ranks. A rank that is still starting receives SIGTERM for either signal.

    Args:
        restarts: number of restarts allowed per hour, after failures that may not occur again in a new attempt.
        on_tick: called at least five times a second, in this thread.
        on_event: called with ("stop", {signal}), ("restart", {attempt, rank, reason, code}), ("hang", {rank, reason,
            code} and the fields of a `Stall`) and, if ranks recover, ("lost", {rank, waiting, reason, code, stack,
            generation, again, waits}), ("host_lost", {host, number, ranks, reason, generation, again, waits_s,
            revived}), ("host_left" and "host_back", {host, number, ranks, generation}), ("joins", {ranks, generation})
            and ("scaled", {by, ranks, host, generation}).
        adopts: ranks that hosts have kept running after the loss of a coordinator. If None, all ranks are started.

    Raises:
        LaunchError: the ranks could not be started, or a rank raised an exception, hung or was killed. The text names
            the rank and shows its traceback.
        SystemExit: with exit code 130 after a second SIGINT. With exit code 143 if this host has left the run, which
            another host now coordinates.
    """
    if setting.pin_cores is not None and len(setting.pin_cores) != setting.ranks:
        cores = f"pin_cores names the cores of {len(setting.pin_cores)} ranks"
        raise LaunchError(
            "launch.too_few_devices", "{devices}, but {ranks} are needed", devices=cores, ranks=setting.ranks
        )
    if adopts is not None:
        setting = replace(setting, number=adopts.kept.begin.attempt)
    failed_at_s: list[float] = []
    with StopSignals() as signals, ExitStack() as at_end:
        at_end.callback(_show_cursor)
        while True:
            with Ranks(setting, signals, on_tick, on_event, adopts) as ranks:
                attempt = Attempt(ranks)
                if adopts is None:
                    ranks.start()
                failure = attempt.watch()
            if failure is None:
                return Launched(setting.number + 1, signals.first)
            too_often = noted(failed_at_s, time.monotonic()) > restarts
            if failure.final or signals.first or adopts or too_often:
                raise failure
            setting = replace(setting, number=setting.number + 1)
            reason = str(failure).splitlines()[0]
            about = {"attempt": setting.number, "rank": failure.rank, "reason": reason, "code": failure.code}
            on_event("restart", about)


class Attempt:
    """One attempt of a launch, from the start of all ranks until all have ended."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, setting = ranks, ranks.setting
        self.losses = losses_of(ranks)
        follows_steps = setting.recovers and setting.follows_steps
        self.watchdog = Watchdog(setting.deadline_s, setting.start_deadline_s, follows_steps=follows_steps)

    def watch(self) -> LaunchError | None:
        """Wait until all ranks have ended, or were stopped because one rank failed or hung.

        Return None if all ranks ended with exit code 0.

        Raises:
            SystemExit: with exit code 130, after a second SIGINT has killed all ranks.
        """
        ranks, losses, setting = self.ranks, self.losses, self.ranks.setting
        while ranks.running:
            ranks.note_ends(*([MEETING_S] if losses.hurries else []))
            ranks.tick()  # called first, because it ends the attempt if another process has taken over the run
            losses.heed()
            ranks.obey_signals()
            alone = ranks.remote.cut_off() if ranks.remote else None
            if reason := alone or losses.too_few:
                ranks.stop_all()
                return LaunchError("launch.cannot_continue", "{reason}", reason=reason, final=True)
            if setting.saves and setting.folder:
                answer_requests(setting.folder.path, losses)
            if losses.turn():
                return None
            if (forkserver := ranks.starter.forkserver) and forkserver.lost:
                ranks.stop_all()
                return LaunchError(
                    "launch.forkserver_killed",
                    "the forkserver of the ranks (pid {pid}) was killed, so the ranks were stopped.",
                    pid=forkserver.pid,
                )
            if any(map(self._has_failed, losses.counted)):
                ranks.note_ends_for(setting.collect_s)
                return self._failed()
            if not losses.replaces and ranks.signals.first and (held := self._held()):
                return self._hang(held)
            if (hung := self._hung()) or ranks.overdue(losses.counted):
                hung, stall = self._examined(hung)
                if hung and not losses.end(hung, stall):
                    return self._hang(hung, stall)
        return None

    def _has_failed(self, number: int) -> bool:
        rank, ranks = self.ranks[number], self.ranks
        if rank.code is not None:
            return rank.code != 0
        # a rank that has lost its device will end soon, and is then replaced
        return rank.record.exists() and not (self.losses.replaces and ranks.lost_its_device(number))

    def _failed(self) -> LaunchError:
        ranks, before = self.ranks, self.ranks.ends()
        members = set(self.losses.counted)  # all other ranks were lost earlier
        stall = None
        records = [end.record for end in before if end.status.rank in members and end.record]
        if all(record.secondary and (not record.explained or record.code in _IN_COLLECTIVES) for record in records):
            stall = ranks.stall(self.losses.counted)
            late = before[stall.rank] if stall else None
            # a rank that was ended by a signal did not hang; different calls have an error of their own
            if stall and late and not stall.differs and (late.code is None or late.record):
                return self._hang([late.status], stall)
            taking_part = [end for end in before if end.status.rank in members]
            held = [end.status for end in taking_part if end.stopped]
            if held and not stall and not any(end.primary for end in taking_part):
                return self._hang(held)
        ranks.stop_all()
        after = ranks.ends()
        ends = [
            late if late.record or early.code is not None else early
            for early, late in zip(before, after, strict=True)
            if late.status.rank in members
        ]
        if ranks.remote and (lost := ranks.remote.lost):
            then = " --resume goes on from what was saved." if ranks.setting.saves else ""
            return LaunchError("launch.rank_lost", "{lost}; the ranks were stopped.{then}", lost=lost, then=then)
        failure = root_cause(ends, ranks.oom_kills_here(), stall)
        if ranks.remote and (silent := ranks.remote.silent):
            failure.args = (f"{failure}\n{silent}",)
        if ranks.signals.first and ranks[failure.rank].code == -signal.SIGTERM:
            return stopped_before(f"rank {failure.rank} was ready to train", ranks.signals.first)
        return failure

    def _held(self) -> list[RankStatus]:
        """Ranks that SIGSTOP has suspended for too long. A suspended rank handles no other signal."""
        late = self.ranks.stopped_too_long([rank.number for rank in self.ranks.running])
        return [status for status in self.ranks.board.read() if status.rank in late]

    def _hung(self) -> list[RankStatus]:
        """Ranks that have made no progress for too long.

        If all ranks only wait for one another, all ranks are returned.
        """
        ranks = self.ranks
        # a joining rank waits for the end of a step
        alive = [s for s in ranks.board.read() if ranks[s.rank].code is None and s.phase != "joining"]
        # the progress of a rank behind a cut link is unknown; it may be ahead of its last report
        idle_s = {status.rank: status.idle_s(ranks[status.rank].known_ns) for status in alive}
        paging = {rank for rank, seconds in idle_s.items() if seconds > LOOK_S and ranks[rank].paging}
        hung = self.watchdog.look(alive, idle_s, time.monotonic(), paging)
        return [status for status in hung if status.rank not in self.losses.dying]

    def _examined(self, hung: Sequence[RankStatus]) -> tuple[list[RankStatus], Stall | None]:
        """Find the ranks that caused a hang, from the positions of all ranks.

        A rank that waits for others makes no progress either, but is not the cause.
        """
        stall = self.ranks.stall(self.losses.counted)
        if stall is None:
            return list(hung), None
        caused = {status.rank for status in hung} - set(stall.stuck) | {stall.rank}
        return [s for s in self.ranks.board.read() if s.rank in caused and self.ranks[s.rank].code is None], stall

    def _hang(self, hung: Sequence[RankStatus], stall: Stall | None = None) -> LaunchError:
        numbers = {status.rank for status in hung}
        now_ns, ends = time.monotonic_ns(), self.ranks.ends()
        self.ranks.ask_for_stacks(numbers)
        found = [replace(e, stack=self.ranks[e.status.rank].stack()) for e in ends if e.status.rank in numbers]
        error = hang(found, ends, now_ns, stall)
        about = {"rank": error.rank, "reason": error.fields["head"], "code": error.code}
        self.ranks.tell("hang", about | (stall.fields if stall else {}))
        for number in numbers:
            self.ranks[number].kill()
        self.ranks.stop_all()
        return error


@contextmanager
def places_on(
    cluster: Cluster, ranks: int, on_end: Callable[[dict[str, LinkBytes]], None] | None = None
) -> Iterator[list[RankPlace]]:
    """Assign `ranks` ranks to the hosts of a cluster. Emulated hosts run inside the context.

    Args:
        on_end: called at the end, even after an error, with the bytes that the links of each emulated host have
            carried.

    Raises:
        ClusterError: the hosts cannot be emulated here.
        LaunchError: the host processes of the emulated hosts cannot be started.
    """
    if cluster.emulate is None:
        hosts = current_hosts()
        yield on_this_machine(ranks) if hosts is None else _on_these_hosts(hosts, cluster, ranks)
        return
    with Emulation(cluster.emulate) as emulation:
        try:
            with host_processes(cluster, emulation.hosts):
                yield on_hosts(emulation.hosts, cluster.ranks_per_host(ranks))
        finally:
            if on_end:
                on_end(emulation.carried())


def _on_these_hosts(hosts: Hosts, cluster: Cluster, ranks: int) -> list[RankPlace]:
    """Assign ranks to the hosts of this run, and fill the hosts in order.

    Raises:
        LaunchError: host 0 has no device for rank 0.
    """
    per_host = cluster.ranks_per_host(ranks)
    if not per_host[0]:
        raise LaunchError(
            "launch.host_0_without_accelerator",
            "host 0 ({host}) has no accelerator, but other hosts have one, and rank 0 runs on host 0. Start the "
            "hosts in a different order, or leave host 0 out.",
            host=cluster.hosts[0].name,
        )
    return [
        RankPlace(
            rank,
            count,
            hosts.address_of(number),
            interface_of(hosts.address_of(0)) or "lo",  # each host substitutes its own interface
            number=number,
            host_name=cluster.hosts[number].name,
        )
        for number, count in enumerate(per_host)
        for rank in range(count)
    ]


def _show_cursor() -> None:
    """Show the terminal's cursor again, because an interrupted progress display leaves it hidden."""
    # rich replaces sys.stderr with an object that shows control codes as text
    terminal = sys.__stderr__
    if terminal is not None and terminal.isatty():
        terminal.write("\x1b[?25h")
        terminal.flush()
