"""Launch of ranks in attempts, each watched until all its ranks have ended."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import Emulation, LinkBytes
from paceline.cluster.machine import interface_of
from paceline.elastic.failure import LaunchFailure, StopSignals, hang, root_cause, stopped_before
from paceline.elastic.hosts.hosts import Hosts, NextGeneration, RunFolder, current_hosts
from paceline.elastic.hosts.over_hosts import host_processes
from paceline.elastic.independent import Independent
from paceline.elastic.membership import noted
from paceline.elastic.place import RankPlace, on_hosts, on_this_machine
from paceline.elastic.ranks import MEETING_S, Ranks, Setting
from paceline.elastic.recovery import Recovery, answer_requests
from paceline.elastic.watchdog import LOOK_S, Watchdog
from paceline.errors import LaunchError
from paceline.wire.status import RankStatus

COLLECT_S = 0.5  # after the first failure, for the others to say what they saw


@dataclass(frozen=True)
class Launched:
    """End of a launch that did not fail. `stopped_by`: the signal that made it end early, or None."""

    attempts: int
    stopped_by: str | None


def launch(
    module_args: list[str],
    *,
    ranks: int,
    threads: int,
    pin_cores: list[list[int]] | None,
    deadline_s: float,
    places: Sequence[RankPlace] | None = None,
    start_deadline_s: float = 300,
    collect_s: float = COLLECT_S,
    port: int | None = None,
    restarts: int = 0,
    saves: bool = True,
    on_tick: Callable[[], None] | None = None,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
    env: Mapping[str, str] = {},
    inherited: Sequence[int] = (),
    folder: RunFolder | None = None,
    recovers: bool = False,
    follows_steps: bool = False,
    replica_ranks: int = 1,
    workers: int | None = None,
    server_copies: int = 1,
    adopts: NextGeneration | None = None,
) -> Launched:
    """Call a function on every rank, in its place, and wait until all have ended.

    SIGINT and SIGTERM are forwarded once, for the ranks to save and end; a second SIGINT kills them. A rank that is
    still starting gets SIGTERM for either.

    Args:
        module_args: the import path of the function that every rank calls (`pkg.mod:name`), then its arguments.
        threads: of each rank's torch operations.
        pin_cores: the cores of each rank, or None to leave that to the kernel.
        deadline_s: the longest that a rank may stay in one phase of one step while it is not waiting for others.
        places: of the ranks, on emulated hosts; None is this machine as it is.
        start_deadline_s: the same for the start-up.
        collect_s: after the first failure, for the other ranks to end by themselves before they are stopped.
        port: of the rendezvous between hosts, at rank 0's address; on one machine, of torch's own store, where
            accelerators need that. None takes a free one.
        restarts: how often in an hour to start again after failures that another attempt may survive.
        saves: whether ranks that are told to stop save a checkpoint first, for the message then.
        on_tick: called at least five times a second, in this thread.
        on_event: called with ("stop", {signal}), ("restart", {attempt, rank, reason}) and, where ranks recover,
            ("lost", {rank, waiting, reason, stack, generation, again, waits}),
            ("host_lost", {host, number, ranks, reason, generation, again, waits_s, revived}),
            ("host_back", {host, number, ranks, generation}), ("joins", {ranks, generation}) and
            ("scaled", {by, ranks, host, generation}).
        env: variables for the ranks, over those of this process.
        inherited: descriptors that every rank holds open until it ends; not the processes that it starts.
        folder: that the ranks read and write, on whichever host they are; it is named among `module_args`.
        recovers: the function takes part in generations (`run/recovery/`): a rank that is killed or hangs is left
            out and started again, while the others go on.
        follows_steps: where ranks recover, the limit of one that computes, and that others wait for, follows from the
            steps that the run has taken (`watchdog.py`); `deadline_s` stays the longest.
        replica_ranks: ranks of a replica, which go on together or not at all.
        workers: where no group joins the ranks, how many of the first ones end by themselves; the others serve them.
            Each that is killed or hangs is started again, while the others go on.
        server_copies: processes of each server, any of which may be lost while another is there.
        adopts: take over the ranks that hosts have kept, instead of starting new ones.

    Raises:
        LaunchError: the ranks could not be started, or one raised, hung or was killed; the text tells which, and shows
            its traceback.
        SystemExit: 130, after a second SIGINT.
    """
    if pin_cores is not None and len(pin_cores) != ranks:
        raise LaunchError(f"pin_cores names the cores of {len(pin_cores)} ranks, but {ranks} are to be started")
    setting = Setting(
        module_args=module_args,
        places=on_this_machine(ranks) if places is None else places,
        threads=threads,
        pin_cores=pin_cores,
        deadline_s=deadline_s,
        start_deadline_s=start_deadline_s,
        collect_s=collect_s,
        port=port,
        saves=saves,
        env=env,
        inherited=tuple(inherited),
        folder=folder,
        recovers=recovers,
        follows_steps=follows_steps,
        replica_ranks=replica_ranks,
        workers=workers,
        server_copies=server_copies,
    )
    failed_at_s: list[float] = []
    with StopSignals() as signals, ExitStack() as at_end:
        at_end.callback(_show_cursor)
        while True:
            with Attempt(setting, signals, on_tick, on_event, adopts) as attempt:
                failure = attempt.watch()
            if failure is None:
                return Launched(setting.number + 1, signals.first)
            too_often = noted(failed_at_s, time.monotonic()) > restarts
            if failure.final or signals.first or adopts or too_often:
                raise failure.as_error()
            setting = replace(setting, number=setting.number + 1)
            if on_event:
                reason = failure.text.splitlines()[0]
                on_event("restart", {"attempt": setting.number, "rank": failure.rank, "reason": reason})


class Attempt:
    """One start of all ranks, watched until all have ended. As a context, it cleans up at the end.

    It has a rendezvous, a status board and a private folder of its own.
    """

    def __init__(
        self,
        setting: Setting,
        signals: StopSignals,
        on_tick: Callable[[], None] | None,
        on_event: Callable[[str, dict[str, Any]], None] | None,
        adopts: NextGeneration | None = None,
    ) -> None:
        if adopts is not None:
            setting = replace(setting, places=adopts.places, number=adopts.kept.begin.attempt)
        self.setting, self.signals, self.adopts = setting, signals, adopts
        self.ranks = Ranks(setting, signals, on_tick, on_event, adopts)
        self.recovery: Recovery | Independent | None = None  # None stops all when one is lost
        self.watchdog = Watchdog(
            setting.deadline_s, setting.start_deadline_s, follows_steps=setting.recovers and setting.follows_steps
        )

    def __enter__(self) -> Self:
        setting = self.setting
        with ExitStack() as unless_started:
            ranks = unless_started.enter_context(self.ranks)
            if self.adopts is not None:
                self.recovery = Recovery(ranks, self.adopts.generation)
            elif setting.workers is not None:
                self.recovery = Independent(ranks, setting.workers, setting.replica_ranks, setting.server_copies)
            elif setting.recovers:
                self.recovery = Recovery(ranks)
            if self.adopts is None:
                ranks.start()
            unless_started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.__exit__()

    def watch(self) -> LaunchFailure | None:
        """Wait until all ranks have ended, or all were stopped since one failed or hangs.

        None when all ended with exit code 0.

        Raises:
            SystemExit: 130, when a second SIGINT came and all were killed.
        """
        ranks, recovery, setting = self.ranks, self.recovery, self.setting
        while ranks.running:
            ranks.note_ends(*([MEETING_S] if recovery and recovery.hurries else []))
            ranks.tick()  # before anything is decided: it ends an attempt whose run was taken over
            ranks.obey_signals()
            alone = ranks.remote.cut_off() if ranks.remote else None
            if reason := alone or (recovery.too_few if recovery else None):
                ranks.stop_all()
                return LaunchFailure(reason, 0, final=True)
            if setting.saves and setting.folder:
                answer_requests(setting.folder.path, recovery)
            if recovery and recovery.turn():
                return None
            if (forkserver := ranks.starter.forkserver) and forkserver.lost:
                ranks.stop_all()
                text = f"the forkserver of the ranks (pid {forkserver.pid}) was killed, and they were stopped."
                return LaunchFailure(text, 0)
            counted = [ranks[number] for number in self._counted]
            if any(rank.code or (rank.code is None and rank.record.exists()) for rank in counted):
                ranks.note_ends_for(setting.collect_s)
                return self._failed()
            if recovery is None and self.signals.first and (held := self._held()):
                return self._hang(held)
            if (hung := self._hung()) and not (recovery and recovery.end(hung)):
                return self._hang(hung)
        return None

    @property
    def _counted(self) -> Sequence[int]:
        """Ranks whose failure is the attempt's."""
        return range(self.setting.ranks) if self.recovery is None else self.recovery.counted

    def _failed(self) -> LaunchFailure:
        """The failure to report, once all other ranks are stopped."""
        ranks, before = self.ranks, self.ranks.ends()
        ranks.stop_all()
        after, members = ranks.ends(), set(self._counted)  # others were lost before
        ends = [
            late if late.record or early.code is not None else early
            for early, late in zip(before, after, strict=True)
            if late.status.rank in members
        ]
        if ranks.remote and (lost := ranks.remote.lost):
            then = " --resume goes on from what was saved." if self.setting.saves else ""
            return LaunchFailure(f"{lost}; the ranks were stopped.{then}", 0)
        failure = root_cause(ends, ranks.oom_kills_here())
        if ranks.remote and (silent := ranks.remote.silent):
            failure = replace(failure, text=f"{failure.text}\n{silent}")
        if self.signals.first and ranks[failure.rank].code == -signal.SIGTERM:
            error = stopped_before(f"rank {failure.rank} was ready to train", self.signals.first)
            return LaunchFailure(str(error), failure.rank, exit_code=error.exit_code)
        return failure

    def _held(self) -> list[RankStatus]:
        """Ranks that SIGSTOP holds for too long: they handle no other signal."""
        late = self.ranks.stopped_too_long([rank.number for rank in self.ranks.running])
        return [status for status in self.ranks.board.read() if status.rank in late]

    def _hung(self) -> list[RankStatus]:
        """Ranks that did nothing for too long; all, if they only wait for another."""
        ranks = self.ranks
        # one that is joining waits for the end of a step
        alive = [s for s in ranks.board.read() if ranks[s.rank].code is None and s.phase != "joining"]
        # what a rank does behind a cut link is not known, and may be more than it was last seen to do
        idle_s = {status.rank: status.idle_s(ranks[status.rank].known_ns) for status in alive}
        paging = {rank for rank, seconds in idle_s.items() if seconds > LOOK_S and ranks[rank].paging}
        return self.watchdog.look(alive, idle_s, time.monotonic(), paging)

    def _hang(self, hung: Sequence[RankStatus]) -> LaunchFailure:
        numbers = {status.rank for status in hung}
        self.ranks.ask_for_stacks(numbers)
        now_ns, ends = time.monotonic_ns(), self.ranks.ends()
        for number in numbers:
            self.ranks[number].kill()
        self.ranks.stop_all()
        return hang([end for end in ends if end.status.rank in numbers], ends, now_ns)


@contextmanager
def places_on(
    cluster: Cluster, ranks: int, on_end: Callable[[dict[str, LinkBytes]], None] | None = None
) -> Iterator[list[RankPlace]]:
    """Places of `ranks` ranks on a cluster; emulated hosts are up within the context.

    Args:
        on_end: called at the end, however it comes, with what the links of emulated hosts have carried, by host.

    Raises:
        ClusterError: the hosts cannot be emulated here.
        LaunchError: their host processes cannot be started.
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
    """Places of ranks on the hosts of this run, filled in their order.

    Raises:
        LaunchError: rank 0 would not be on host 0.
    """
    per_host = cluster.ranks_per_host(ranks)
    if not per_host[0]:
        raise LaunchError(
            f"host 0 ({cluster.hosts[0].name}) has no accelerator, and others have: rank 0 runs on host 0. Start the "
            "hosts in another order, or without that one."
        )
    return [
        RankPlace(
            rank,
            count,
            hosts.address_of(number),
            interface_of(hosts.address_of(0)) or "lo",  # each host puts its own there
            number=number,
            host_name=cluster.hosts[number].name,
        )
        for number, count in enumerate(per_host)
        for rank in range(count)
    ]


def _show_cursor() -> None:
    """Show the terminal's cursor again, which a progress display that was cut off leaves hidden."""
    # rich replaces sys.stderr by an object that shows control codes as text
    terminal = sys.__stderr__
    if terminal is not None and terminal.isatty():
        terminal.write("\x1b[?25h")
        terminal.flush()
