"""Agent of a host, which follows the coordinator's orders until it is dismissed."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cluster.machine import interface_of
from paceline.elastic.failure import ErrorRecord, StopSignals, oom_kills
from paceline.elastic.forkserver import StartedRank, Starter
from paceline.elastic.hosts import messages
from paceline.elastic.hosts.files import WANTED, WrittenFiles, digests, place_in
from paceline.elastic.hosts.link import Meeting, Peer, Pulse, speeds_to
from paceline.elastic.membership import announce, store_file
from paceline.errors import LaunchError
from paceline.files import scratch_folder, write_whole
from paceline.rank_environment import FOLDER_IS_COPY, RankEnvironment
from paceline.wire.connection import Connection
from paceline.wire.key import key_descriptor, own_key
from paceline.wire.listener import Listener
from paceline.wire.position import POSITION
from paceline.wire.status import Generation, StatusBoard

_TICK_S, _MEETING_S = 0.2, 0.02  # seconds between two polls, normally and while ranks are entering a generation
_SAVE_S = 30.0  # time for ranks to save a checkpoint and end after the coordinator is lost


class Coordinator(Peer):
    """Agent's view of host 0.

    Attributes:
        name: name of host 0.
        run_name: name of the run in the launch engine.
        standby: listener where other hosts connect if this host becomes the coordinator.
        probes: listener that answers probes of other hosts until ranks are prepared.
        succession: hosts with which the run can continue without host 0; None if it cannot continue.
        told_at: time at which the succession arrived, by the monotonic clock.
        released: True if the run continues without this host.
        hands_over: True if host 0 has left the run, and another host coordinates from now on.
        noticed: True if this host has received SIGTERM and should leave the run.
        attempt: ranks on this host that may continue after the loss of host 0.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        run_name: str,
        standby: Meeting | None = None,
        probes: Listener | None = None,
    ) -> None:
        super().__init__(connection)
        self.name, self.run_name, self.standby, self.probes = name, run_name, standby, probes
        self.succession: messages.Succession | None = None
        self.told_at = 0.0
        self.released = self.hands_over = self.noticed = False
        self.attempt: AgentAttempt | None = None

    @property
    def who(self) -> str:
        """Name and number, for messages."""
        return f"host {self.name} (number 0)"

    @property
    def address(self) -> str:
        """Address at which this host can reach host 0."""
        return self.connection.peer.rpartition(":")[0]

    def direct_others(self) -> None:
        """Send the address of host 0 to hosts that connect to this host by mistake."""
        if self.standby is not None and self.succession is not None:
            first, names = self.succession.hosts[0], [host.name for host in self.succession.hosts]
            self.standby.direct(messages.Elsewhere(self.run_name, first.address, first.port, names))

    def end_probes(self) -> None:
        """Stop answering probes."""
        if self.probes is not None:
            self.probes.close()
            self.probes = None

    def close(self) -> None:
        """Close the connection to host 0, and end the ranks on this host."""
        self.end_probes()
        self.connection.close()
        if self.attempt is not None:
            self.attempt.end()
        if self.standby is not None:
            self.standby.close()


def run_agent(coordinator: Coordinator, who: str) -> int:
    """Follow orders until the coordinator dismisses this host. Return the exit code of host 0's command."""
    attempt = coordinator.attempt
    with StopSignals() as signals:
        signals.first, told = "SIGTERM" if coordinator.noticed else None, False
        try:
            while True:
                _wait(coordinator, attempt)
                while (message := coordinator.take()) is not None:
                    match message:
                        case messages.Dismiss():
                            coordinator.released = message.released
                            return message.code
                        case messages.Refused():
                            raise LaunchError(
                                "hosts.refused",
                                "host 0 refused {host}: {reason}",
                                host=who,
                                reason=message.reason,
                            )
                        case messages.Probe():
                            coordinator.send(messages.Echo())
                        case messages.Measure():
                            coordinator.send(speeds_to(message.targets, own_key()))
                        case messages.Look():
                            coordinator.send(messages.Looked(digests(message)))
                        case messages.Succession():
                            coordinator.succession, coordinator.told_at = message, time.monotonic()
                        case messages.HandOver():
                            coordinator.hands_over = True
                            coordinator.lose("it has left the run")
                        case messages.Begin():
                            coordinator.end_probes()
                            attempt = AgentAttempt(message, coordinator)
                        case _ if attempt is not None and attempt.obey(message):
                            attempt = None
                if signals.first and not told:
                    told = True
                    then = "stops the run" if signals.first == "SIGINT" else "lets this host leave, or stops the run"
                    _say(f"{who}: {signals.first}, told to {coordinator.who}, which {then}")
                    coordinator.send(messages.Interrupted(signals.first))
                if coordinator.lost is not None or signals.kill:
                    return _alone(coordinator, who, signals, goes_on=_may_go_on(coordinator, attempt, signals))
                if attempt is not None:
                    attempt.turn()
                coordinator.direct_others()
        finally:
            coordinator.noticed = signals.first == "SIGTERM"
            coordinator.end_probes()
            coordinator.attempt = attempt if _may_go_on(coordinator, attempt, signals) else None
            if coordinator.attempt is not None:
                coordinator.attempt.keep()
            elif attempt is not None:
                attempt.stop(_SAVE_S if coordinator.lost is not None and _may_save(coordinator, attempt) else 0.0)
                attempt.close()


def _may_go_on(coordinator: Coordinator, attempt: AgentAttempt | None, signals: StopSignals) -> bool:
    """Return True if the ranks on this host may continue without the coordinator."""
    is_alone = coordinator.lost is not None and coordinator.succession is not None
    # a host with a notice tells the next coordinator
    goes_on = signals.first is None or (coordinator.hands_over and signals.first == "SIGTERM" and not signals.kill)
    return is_alone and goes_on and attempt is not None and attempt.recovers_alone and attempt.copy is None


def _may_save(coordinator: Coordinator, attempt: AgentAttempt) -> bool:
    """Return True if the ranks on this host can save a checkpoint without the coordinator.

    Ranks that may wait for a new coordinator cannot save, because they cannot finish a step without the ranks of host
    0, which have ended. Ranks behind a cut network cannot save either, because after SIGTERM they would only wait for
    the other ranks.
    """
    waits = attempt.recovers_alone and coordinator.succession is not None
    return not waits and not coordinator.silent


def _wait(coordinator: Coordinator, attempt: AgentAttempt | None) -> None:
    """Wait briefly for a message or the end of a rank."""
    descriptors = [coordinator.connection.fileno(), *(attempt.descriptors() if attempt else [])]
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    tick_s = _MEETING_S if attempt and attempt.meets else _TICK_S
    poll.poll(0 if attempt and attempt.busy else tick_s * 1000)


def _alone(coordinator: Coordinator, who: str, signals: StopSignals, *, goes_on: bool) -> int:
    if coordinator.lost is None:
        _say(f"{who}: killing the ranks")
        return 130
    lost = "has left the run" if coordinator.hands_over else f"is lost ({coordinator.lost})"
    _say(f"{who}: {coordinator.who} {lost}{'' if goes_on else '; the ranks here are stopped'}")
    return 1 if goes_on or signals.first is None else 128 + signal.Signals[signals.first]


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


_ANSWERS_S = 1.0  # time after a signal in which ranks may write a stack or a position
_ROWS_S = 0.25  # seconds between two status messages
_SENDING_S = 0.1  # longest time per turn for sending files, because this delays messages and reports of losses
_IDLE_S = 5.0  # ranks that are idle for longer are assumed to wait for ranks of a lost host


class AgentAttempt:
    """Ranks that this host runs for the coordinator, from `Begin` to `EndAttempt`."""

    def __init__(self, begin: messages.Begin, coordinator: Coordinator) -> None:
        self.begin, self.coordinator = begin, coordinator
        self.ranks: list[StartedRank] = []
        self._told: dict[Path, tuple[int, int]] = {}  # size and time of the last change of each file that was sent
        self._ended: set[int] = set()
        self._oom_kills = oom_kills()
        self._rows_at, self._signalled_at, self._newest = 0.0, -math.inf, 0
        self._shown: list[tuple[int, bool]] = []  # generation of each rank, and whether the rank waits to join
        self._asked: set[str] = set()
        self._made = ExitStack()
        self.scratch = self._made.enter_context(scratch_folder())
        self.board = StatusBoard.create(self.scratch / "status", len(begin.places), begin.attempt)
        self._made.callback(self.board.close)
        key = own_key()
        self._key_fd = None if key is None else key_descriptor(key)
        if self._key_fd is not None:
            self._made.callback(os.close, self._key_fd)
        self.copy = self._copy()
        self._parts: Iterator[messages.Put] | None = None
        arguments = [str(self.copy.folder) if self.copy and a == begin.folder else a for a in begin.module_args]
        self.starter = Starter(arguments, {**begin.env, **({FOLDER_IS_COPY: "1"} if self.copy else {})})
        self._prepared = False
        self._beat(begin)
        coordinator.send(messages.Ready(shares_folder=self.copy is None))

    @property
    def recovers_alone(self) -> bool:
        """True if the ranks on this host may continue without the coordinator's host."""
        return self.begin.spares(self.coordinator.name)

    @property
    def busy(self) -> bool:
        """True while chunks of files wait to be sent."""
        return self._parts is not None

    @property
    def meets(self) -> bool:
        """True while ranks on this host are entering a generation, or may answer a signal."""
        if time.monotonic() - self._signalled_at < _ANSWERS_S:
            return True
        board = self.board.read()
        return any(rank.code is None and board[rank.number].generation != self._newest for rank in self.ranks)

    def held(self) -> messages.Held:
        """Return the running ranks for a new coordinator. The ends of other ranks are not reported again."""
        board = self.board.read()
        for rank in self.ranks:
            if rank.code is None and rank.has_ended:
                rank.note_end()
            if rank.code is not None:
                self._ended.add(rank.number)
        living = [rank for rank in self.ranks if rank.code is None]
        newest = max(self.board.current_generation, self.board.wanted_generation)
        ranks = [(rank.number, rank.pid, board[rank.number].generation) for rank in living]
        return messages.Held(self.begin.attempt, newest, ranks)

    def keep(self) -> None:
        """Interrupt the ranks' step, and make the ranks wait for a new coordinator."""
        number = max(self.board.current_generation, self.board.wanted_generation) + 1
        self.announce(messages.Announce(number, [], number, []))

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when a rank ends."""
        return [rank.pidfd for rank in self.ranks if rank.code is None]

    def obey(self, message: Any) -> bool:
        """Carry out an order of the coordinator; return True once the attempt is over."""
        match message:
            case messages.Put():
                if self.copy:
                    self.copy.receive(message)
            case messages.Start():
                self._start(message)
            case messages.Announce():
                self.announce(message)
            case messages.Adopt():
                self._beat(message)
            case messages.Signal():
                self._signalled_at = time.monotonic()
                for rank in self.ranks:
                    if rank.number == message.rank:
                        rank.kill() if message.number == signal.SIGKILL else rank.signal(message.number)
            case messages.Fetched():
                self._asked.discard(message.path)
                if self.copy:
                    (self.copy.folder / WANTED / message.path.replace("/", "|")).unlink(missing_ok=True)
            case messages.EndAttempt():
                self.end()
                self.coordinator.send(messages.Over())
                return True
        return False

    def turn(self) -> None:
        """Record ranks that have ended, and send all changes to the coordinator."""
        self._tell_rows()
        self._tell_texts()
        self._ask()
        ended = [rank for rank in self.ranks if rank.code is None and rank.has_ended]
        for rank in ended:
            rank.note_end()
            if rank.code and rank.code < 0:  # reported immediately, because other hosts wait for this report
                self._tell_end(rank)
        untold = [rank for rank in ended if rank.number not in self._ended]
        self._send_parts(time.monotonic() + (math.inf if untold else _SENDING_S))
        for rank in untold:
            self._tell_end(rank)

    def stop(self, save_s: float) -> None:
        """End the running ranks with SIGKILL.

        If `save_s` is positive, the ranks first receive SIGTERM and get this many seconds to save a checkpoint.
        """
        for rank in self.ranks if save_s else ():
            rank.signal(signal.SIGTERM)
        until = time.monotonic() + save_s
        while save_s and self._may_save() and time.monotonic() < until:
            time.sleep(0.05)
        for rank in self.ranks:
            if rank.code is None:
                rank.note_end()
        self._send_parts(math.inf)
        for rank in self.ranks:
            self._tell_end(rank)

    def _may_save(self) -> bool:
        """Return True while a running rank makes progress or writes a checkpoint."""
        now_ns, board = time.monotonic_ns(), self.board.read()
        living = [board[rank.number] for rank in self.ranks if not rank.has_ended]
        return any(status.phase == "checkpoint" or status.idle_s(now_ns) < _IDLE_S for status in living)

    def end(self) -> None:
        """Kill the ranks, and remove the attempt's files on this host."""
        self.stop(0.0)
        self.close()

    def close(self) -> None:
        """Remove the attempt's files on this host."""
        self.ranks.clear()
        self._made.close()

    def _beat(self, message: messages.Begin | messages.Adopt) -> None:
        if message.pulse_port:
            where, silent = (self.coordinator.address, message.pulse_port), self.coordinator.fall_silent
            hosts = len(set(self.begin.places))
            self._made.callback(Pulse(where, own_key(), message.host, message.silence_s, silent, hosts).close)

    def _copy(self) -> WrittenFiles | None:
        """Make a private copy of the attempt's folder; return None if the hosts share it."""
        begin = self.begin
        if (Path(begin.folder) / begin.token).is_file():
            return None
        copy = self._made.enter_context(scratch_folder())
        for folder in begin.folders:
            place_in(copy, folder).mkdir(mode=0o700)
        return WrittenFiles(copy)

    def _start(self, message: messages.Start) -> None:
        self._forget(int(message.environment.get("RANK", "0")))
        try:
            if not self._prepared:
                self.starter.prepare(self.begin.start_deadline_s, self._is_alone)
                self._prepared = True
            told = RankEnvironment.from_env(message.environment)
            environment = replace(
                told,
                interface=interface_of(told.address or ""),
                status_file=self.scratch / "status",
                error_file=self.scratch / f"rank-{told.rank}.error",
                launcher=os.getpid(),
                key_fd=self._key_fd,
                store_fd=None,
                inherited_fds=(),
                # the other hosts continue without this host, but after SIGTERM its ranks would ask them to stop
                grace_s=0 if self.begin.spares_hosts else told.grace_s,
            )
            rank = self.starter.start(environment, None)
        except (LaunchError, ValueError) as error:
            number = int(message.environment.get("RANK", "0"))
            record = ErrorRecord.of(error, number)
            record.write(self.scratch / f"rank-{number}.error")
            self._tell_text(self.scratch / f"rank-{number}.error", number)
            self.coordinator.send(messages.Ended(number, 1, None))
            return
        self.ranks.append(rank)
        self._tell_rows(at_once=True)

    def _forget(self, number: int) -> None:
        for rank in [rank for rank in self.ranks if rank.number == number and rank.code is not None]:
            self.ranks.remove(rank)
            self._ended.discard(number)
            for path in map(rank.record.with_suffix, (".error", ".stack", POSITION)):
                path.unlink(missing_ok=True)
                self._told.pop(path, None)
            self.board.put(number, 0, "starting", 0, time.monotonic_ns(), generation=-1)

    def announce(self, message: messages.Announce) -> None:
        """Announce the run's generations to the ranks on this host."""
        if message.store:
            write_whole(store_file(self.scratch), message.store)
        current = Generation(message.current, tuple(message.members))
        announce(self.board, self.scratch, current, Generation(message.newest, tuple(message.newest_members)))
        self._newest = message.newest

    def _is_alone(self) -> bool:
        """Send a message as a sign of life; return True if the coordinator is lost."""
        self.coordinator.send(messages.Echo())
        return self.coordinator.lost is not None

    def _tell_rows(self, *, at_once: bool = False) -> None:
        board = self.board.read()
        # changes that begin or complete a generation are sent immediately
        shown = [(board[r.number].generation, board[r.number].phase == "joining") for r in self.ranks]
        if not at_once and time.monotonic() - self._rows_at < _ROWS_S and shown == self._shown:
            return
        self._rows_at, self._shown, now_ns = time.monotonic(), shown, time.monotonic_ns()
        rows = []
        for rank in self.ranks:
            status = board[rank.number]
            idle_ns = max(0, now_ns - status.changed_ns)
            place = status.phase, status.step, idle_ns, rank.stopped, rank.paging, status.generation
            rows.append(messages.Row(rank.number, rank.pid, status.attempt, *place))
        if rows:
            self.coordinator.send(messages.Rows(rows))

    def _tell_texts(self) -> None:
        for rank in self.ranks:
            if rank.number not in self._ended:
                # a suspended rank writes its position last, and then its stack is whole
                position = (POSITION,) if rank.record.with_suffix(POSITION).exists() else ()
                stack = (".stack",) if rank.has_ended or rank.has_stack else ()
                for path in map(rank.record.with_suffix, (".error", *stack, *position)):
                    self._tell_text(path, rank.number)

    def _tell_text(self, path: Path, rank: int) -> None:
        if path.exists() and (found := path.stat()).st_size > 0:
            written = found.st_size, found.st_mtime_ns
            if self._told.get(path) == written:
                return
            self._told[path] = written
            self.coordinator.send(
                messages.Told(rank, path.suffix, path.read_text(errors="replace")[: messages.TEXT_LIMIT])
            )

    def _tell_end(self, rank: StartedRank) -> None:
        if rank.number not in self._ended and rank.code is not None:
            self._tell_rows(at_once=True)  # sends the last status of the rank
            self._tell_texts()
            self._ended.add(rank.number)
            kills = oom_kills()
            known = kills is not None and self._oom_kills is not None
            self.coordinator.send(messages.Ended(rank.number, rank.code, kills - self._oom_kills if known else None))  # type: ignore[operator]

    def _ask(self) -> None:
        wanted = self.copy.folder / WANTED if self.copy else None
        for path in sorted(wanted.iterdir()) if wanted and wanted.is_dir() else ():
            name = path.name.replace("|", "/")
            if name not in self._asked:
                self._asked.add(name)
                self.coordinator.send(messages.Fetch(name))

    def _send_parts(self, until: float) -> None:
        """Send chunks of new files until the monotonic clock reaches `until`. Infinity sends all chunks."""
        if self.copy is None:
            return
        self._parts = self._parts or self.copy.parts()
        for part in self._parts:
            self.coordinator.send(part)
            if time.monotonic() > until:
                return
        self._parts = None
        for part in self.copy.parts() if until == math.inf else ():  # files that were written after the first listing
            self.coordinator.send(part)
