"""Coordinator's view of the other hosts, and of the ranks on them."""

from __future__ import annotations

import json
import os
import queue
import secrets
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from msgspec import Struct

from paceline.cluster.cluster import Cluster
from paceline.cluster.network import inside
from paceline.elastic.failure import StopSignals, stack_beside
from paceline.elastic.hosts import messages
from paceline.elastic.hosts.agent import AgentAttempt
from paceline.elastic.hosts.files import parts_of, place_in, receive
from paceline.elastic.hosts.link import AbsentLink, Link, Meeting, Pulses
from paceline.elastic.leadership import RunLock, is_quorum
from paceline.elastic.place import NEEDS, RankPlace, Rendezvous
from paceline.errors import LaunchError
from paceline.files import write_whole
from paceline.rank_environment import RankEnvironment
from paceline.storage.url import is_url
from paceline.wire.connection import Connection
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener
from paceline.wire.position import POSITION
from paceline.wire.status import PHASES, Generation, StatusBoard

M = TypeVar("M", bound=Struct)
WAIT = "PACELINE_HOSTS_WAIT_S"  # longest wait for a host, both at the start and after the host is lost
_WAIT_S = 300.0


def hosts_wait_s() -> float:
    """Return the longest wait in seconds for hosts to connect.

    Raises:
        LaunchError: `PACELINE_HOSTS_WAIT_S` is not a number.
    """
    text = os.environ.get(WAIT, "")
    try:
        return float(text) if text else _WAIT_S
    except ValueError:
        raise LaunchError(
            "hosts.wait_invalid", "{variable}={text} is not a number of seconds", variable=WAIT, text=text
        ) from None


@dataclass(frozen=True)
class NextGeneration:
    """First generation of the kept ranks after the loss of a coordinator.

    Attributes:
        kept: the attempt on this host, with the ranks that it has kept.
        lock: the lock of the run directory.
        generation: generation of the ranks that continue.
        places: places of all ranks of the run.
        rendezvous: store through which the ranks meet.
    """

    kept: AgentAttempt
    lock: RunLock
    generation: Generation
    places: list[RankPlace]
    rendezvous: Rendezvous
    _made: ExitStack

    def close(self) -> None:
        """Release the run directory and the rendezvous.

        Ranks that were not taken over are ended.
        """
        self._made.close()
        self.kept.end()


@dataclass(frozen=True)
class Takeover:
    """Run that this host continues after the loss of the coordinator.

    Attributes:
        run: directory or URL of the run.
        lost: name of the host that coordinated the run.
        by: name of this host.
        next_generation: generation that the kept ranks have begun; None if the run starts again from a checkpoint.
    """

    run: str
    lost: str
    by: str
    next_generation: NextGeneration | None = None

    @property
    def job_file(self) -> Path | None:
        """Path of the run's job file; None if the run is at a URL."""
        return None if is_url(self.run) else Path(self.run) / "job.yaml"


class Returns:
    """Record of the lost hosts that may come back or have come back.

    Args:
        revive: function that restarts the host process of a host; None if paceline does not start host processes.

    Attributes:
        left_out: numbers of the hosts that may not come back, each with the reason.
    """

    def __init__(self, revive: Callable[[int], None] | None = None) -> None:
        self._revive = revive
        self.expected: set[int] = set()
        self.left_out: dict[int, str] = {}
        self._back: queue.Queue[Link] = queue.Queue()

    @property
    def revives(self) -> bool:
        """True if this process restarts hosts that may come back."""
        return self._revive is not None

    def expect(self, host: int) -> None:
        """Allow a lost host to come back, and restart its host process if possible."""
        self.left_out.pop(host, None)
        self.expected.add(host)
        if self._revive is not None:
            with suppress(LaunchError):  # the host then does not come back
                self._revive(host)

    def leave_out(self, host: int, why: str = "was lost too often within an hour, and is left out of the run.") -> None:
        """Do not allow a host to come back, and store the reason `why`."""
        self.expected.discard(host)
        self.left_out[host] = why

    def take_in(self, link: Link) -> None:
        """Record that a host has come back."""
        self.expected.discard(link.number)
        self._back.put(link)

    def back(self) -> list[Link]:
        """Return the hosts that have come back since the last call."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._back.get_nowait())
        return found


class Hosts:
    """All hosts of the run. This host is the first.

    Attributes:
        cluster: devices and links of the hosts.
        address: address at which other hosts reach this host.
        key: key of the run.
        compared: requests for digests of code and data that were found to be equal on all hosts.
        takeover: run to continue after the loss of the previous coordinator; None for a new run.
        past: losses of the run, as last recorded.
        returns: record of the hosts that may come back; None if no host can come back.
        least: minimum number of hosts with which the run continues; 0 for no minimum.
        meeting: listener to which other hosts connect.
        engine: name of the launch engine that started the hosts.
        run: directory or URL of the run, as the other hosts know it; "" if they cannot continue the run.
        notices: hosts that have received SIGTERM, each with the time at which this host learned of it, by the monotonic
            clock.

    Args:
        namespace: network namespace of `address` if this host is emulated, otherwise None.
    """

    takeover: Takeover | None = None
    returns: Returns | None = None

    def __init__(
        self, cluster: Cluster, address: str, links: Sequence[Link], key: RunKey, namespace: str | None = None
    ) -> None:
        self.cluster, self.address, self.key, self._namespace = cluster, address, key, namespace
        self.links = sorted(links, key=lambda link: link.number)
        self.compared: list[messages.Look] = []
        self.least = 0
        self.meeting: Meeting | None = None
        self.past = messages.Past()
        self.engine = self.run = ""
        self.notices: dict[int, float] = {}

    @property
    def absent(self) -> list[Link]:
        """Hosts that have not connected yet, but may connect during the run."""
        return [link for link in self.links if isinstance(link, AbsentLink)]

    @property
    def there(self) -> int:
        """Number of hosts that take part, including this one."""
        return 1 + sum(link.lost is None for link in self.links)

    @property
    def too_few(self) -> bool:
        """True if fewer hosts take part than the run needs."""
        return self.there < self.least

    def address_of(self, number: int) -> str:
        """Return the address at which other hosts reach host `number`."""
        return self.links[number - 1].address if number else self.address

    def ask(self, question: Struct, kind: type[M], deadline_s: float) -> list[tuple[Link, M]]:
        """Send a question to all other connected hosts; return their answers.

        Raises:
            LaunchError: a host does not answer in time.
            SystemExit: with exit code 130 or 143, if a host received SIGINT or SIGTERM during this call.
        """
        links = [link for link in self.links if link.lost is None]
        for link in links:
            link.send(question)
        answers = [(link, link.answer(kind, deadline_s)) for link in links]
        for link, answer in answers:
            if answer is None:
                raise LaunchError("hosts.lost", "{host} is lost: {reason}", host=link.who, reason=link.lost)
        return [(link, answer) for link, answer in answers if answer is not None]

    def listener(
        self,
        kinds: Any,
        port: int = 0,
        on_connection: Callable[[Connection], object] = lambda _: None,
        on_message: Callable[[Connection, Any], None] | None = None,
    ) -> Listener:
        """Listen at the address of this host. Port 0 takes any free port."""

        def made() -> Listener:
            return Listener((self.address, port), self.key, kinds, on_connection, on_message=on_message)

        return made() if self._namespace is None else inside(self._namespace, made)

    def add(self, link: Link) -> None:
        """Add a host with the next free number."""
        self.links.append(link)
        self.cluster = self.cluster.model_copy(update={"hosts": (*self.cluster.hosts, link.host)})

    def replace(self, link: Link) -> None:
        """Replace a lost host with a host that has come back."""
        self.links[link.number - 1] = link

    def dismiss(self, code: int) -> None:
        """Dismiss all other hosts with this exit code, and accept no more hosts."""
        if self.meeting is not None:
            self.meeting.close()
        for link in self.links:
            link.send(messages.Dismiss(code))
            if link.lost is None:
                link.connection.close()


_current: list[Hosts] = []


def current_hosts() -> Hosts | None:
    """Return the hosts that this process coordinates, or None if there is only this host."""
    return _current[-1] if _current else None


@contextmanager
def coordinating(hosts: Hosts) -> Iterator[Hosts]:
    """Make `current_hosts` return these hosts inside the context."""
    _current.append(hosts)
    try:
        yield hosts
    finally:
        _current.remove(hosts)


_SILENT_S = 10.0  # while ranks are being ended, a host that is silent for longer counts as lost
# time for a host to prepare for ranks; time for a host to end its ranks and send its files
_READY_S, _OVER_S = 60.0, 30.0
_TOKEN = ".paceline-host-"
_SENDING_S = 0.1  # longest time per turn for sending files, because this delays signals and reports of losses


@dataclass(frozen=True)
class RunFolder:
    """Folder that the ranks of an attempt read and write.

    `files` and `folders` are paths within the folder that exist before the ranks start.
    """

    path: Path
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


@dataclass
class RemoteRank:
    """Rank on another host, which sends the rank's error record and stack traces."""

    number: int
    link: Link
    record: Path
    pid: int = 0
    alive_at: float = field(default_factory=time.time)
    code: int | None = None
    stopped: bool = False
    paging: bool = False
    oom_kills: int | None = None

    @property
    def known_ns(self) -> int:
        """Time of the last message from the rank's host, by the monotonic clock."""
        return int(self.link.heard_at * 1e9)

    def signal(self, number: int) -> None:
        """Send a signal to the rank, but not to processes that it started."""
        if self.code is None:
            self.link.send(messages.Signal(self.number, number))

    def kill(self) -> None:
        """Send SIGKILL to the rank and all processes that it started."""
        self.signal(signal.SIGKILL)

    @property
    def has_stack(self) -> bool:
        """True if the rank's host has sent the stack traces."""
        return bool(self.stack())

    def stack(self) -> str:
        """Return the stack traces that the rank's host has sent."""
        return stack_beside(self.record)


class RemoteRanks:
    """Ranks of one attempt on other hosts. The context manager ends all these ranks.

    Args:
        scratch: folder for the attempt's error records.
    """

    def __init__(
        self,
        links: Sequence[Link],
        board: StatusBoard,
        scratch: Path,
        folder: RunFolder,
        signals: StopSignals,
        poll: select.poll,
        hosts: Hosts,
    ) -> None:
        self.links, self.board, self.scratch, self.folder = list(links), board, scratch, folder
        self.signals, self.poll, self.hosts = signals, poll, hosts
        self._begin: messages.Begin | None = None
        self._announced: messages.Announce | None = None
        self._ready: list[Link] = []  # hosts that have come back
        self._preparing: list[Link] = []  # hosts that look for the token
        self._token: Path | None = None
        self._pulses: Pulses | None = None
        self.ranks: dict[int, RemoteRank] = {}
        # hosts without which the run continues, because they are lost or have not connected yet
        self.spared: list[Link] = [link for link in links if link.is_known_lost]
        self._silent: list[Link] = []
        # folders that hosts have requested, as messages to send
        self._folders: list[tuple[Link, Iterator[Struct]]] = []
        self._released: dict[Link, int] = {}  # hosts whose ranks have left, each with its exit code

    def __enter__(self) -> Self:
        for link in self.links:
            link.watch(self.poll)
        return self

    def __exit__(self, *_: object) -> None:
        """End the remaining ranks, and receive the last files."""
        for link in self.links:
            link.send(messages.EndAttempt())
        for link in self.links:
            if self._begin:
                self._until(link, messages.Over, _OVER_S)
            link.unwatch()
        if self._pulses:
            self._pulses.close()
        if self._token:
            self._token.unlink(missing_ok=True)

    def begin(self, begin: messages.Begin) -> None:
        """Let every other host prepare for its ranks.

        Raises:
            LaunchError: a host is lost, or a required host is missing.
        """
        if self.spared and not begin.spares_hosts:
            raise LaunchError(
                "hosts.too_few",
                "this run cannot begin without {missing}. Only runs that recover in place ({needs}) allow hosts to "
                "join later. Start all hosts.",
                missing=[link.who for link in self.spared],
                needs=NEEDS,
            )
        self._begin = self._whole(begin)
        token = self._show_token()
        there = [link for link in self.links if link not in self.spared]
        for link in there:
            self._prepare(link, token)
        for link in there:
            if (ready := self._until(link, messages.Ready, _READY_S)) is None:
                raise LaunchError("hosts.lost_at_start", "{reason}", reason=self._of_lost(link))
            link.shares_folder = ready.shares_folder
        self._preparing.clear()
        self._hide_token()

    @property
    def spares_this_host(self) -> bool:
        """True if the other hosts continue after the loss of this host.

        This is false for emulated hosts, which never take over coordination.
        """
        succeeds = any(link.standby_port for link in self.hosts.links)
        return succeeds and self._begin is not None and self._begin.spares(self.hosts.cluster.hosts[0].name)

    def _whole(self, begin: messages.Begin) -> messages.Begin:
        """Complete the message with the folder and the heartbeat port; start to listen for heartbeats."""
        if begin.spares_hosts:
            self._pulses = Pulses(
                lambda kinds, take: self.hosts.listener(kinds, on_message=take),
                self._fall_silent,
                len(set(begin.places)),
            )
        port, silence_s = (self._pulses.port, self._pulses.limit_s) if self._pulses else (0, 0.0)
        folder, folders = str(self.folder.path), list(self.folder.folders)
        return msgspec.structs.replace(begin, folder=folder, folders=folders, pulse_port=port, silence_s=silence_s)

    def _show_token(self) -> Path:
        """Create the token file in the folder, by which hosts recognize a shared folder."""
        if self._token is None:
            self._token = self.folder.path / f"{_TOKEN}{secrets.token_hex(16)}"
            self._token.touch(mode=0o600)
        return self._token

    def _hide_token(self) -> None:
        """Remove the token file, unless hosts still look for it."""
        if self._token and all(link.lost is not None for link in self._preparing):
            self._token.unlink(missing_ok=True)
            self._token = None

    def _prepare(self, link: Link, token: Path) -> None:
        assert self._begin is not None
        self._preparing.append(link)
        link.send(msgspec.structs.replace(self._begin, host=link.number, token=token.name))
        for name in self.folder.files:
            for part in parts_of(self.folder.path / name, self.folder.path):
                link.send(part)

    def expect(self, host: int, *, again: bool) -> bool:
        """Decide whether a lost host may come back. Return the decision."""
        if self.hosts.returns is None:
            return False
        self.hosts.returns.expect(host) if again else self.hosts.returns.leave_out(host)
        return again

    def release(self, host: int, code: int = 0) -> None:
        """Dismiss a host whose ranks have left, after the end of its attempt.

        Args:
            code: exit code of the host's command.
        """
        link = self.link_to(host)
        self.spared.append(link)
        self._released[link] = code
        link.send(messages.EndAttempt())

    def link_to(self, host: int) -> Link:
        """Return the link to the host with this number."""
        return next(link for link in self.links if link.number == host)

    def may_hand_over(self, stay: Set[int]) -> bool:
        """Return True if any host in `stay` can coordinate in place of this host."""
        others = [link for link in self.links if link.number in stay]
        can_lead = all(link.standby_port and link.shares_folder for link in others)
        return self.spares_this_host and can_lead and not is_url(self.hosts.run)

    def hand_over(self) -> None:
        """Leave all other hosts, and the ranks on them, to a new coordinator."""
        for link in self.hosts.links:
            link.send(messages.HandOver())
            link.lose("another host coordinates it")

    def _dismiss(self, link: Link) -> None:
        link.send(messages.Dismiss(self._released.pop(link), released=True))
        link.lose("it has left the run")
        if self._pulses is not None:
            self._pulses.forget(link.number)
        self.hosts.replace(AbsentLink(link.number, link.name, link.host))  # any host may replace the dismissed host

    def returned(self) -> list[Link]:
        """Return the hosts that have come back, and are ready to start their ranks."""
        for link in self.hosts.returns.back() if self.hosts.returns else ():
            assert self._pulses is not None
            self._pulses.forget(link.number)
            self.hosts.replace(link)
            self.links = [link if link.number == other.number else other for other in self.links]
            link.watch(self.poll)
            self._prepare(link, self._show_token())  # other hosts may use the same token
            if self._announced is not None:
                link.send(self._announced)
        ready, self._ready = self._ready, []
        return ready

    def adopt(self, begin: messages.Begin) -> None:
        """Take over the ranks that hosts have kept.

        All other ranks on these hosts count as ended.
        """
        self._begin = self._whole(begin)
        links = {link.name: link for link in self.links}
        for number, name in enumerate(begin.places):
            if link := links.get(name):
                record = self.scratch / f"rank-{number}.error"
                self.ranks[number] = RemoteRank(number, link, record, code=-signal.SIGKILL)
        for link in self.links:
            if link.lost is not None:
                continue
            if link.held is None:
                self._prepare(link, self._show_token())
                continue
            link.shares_folder = True
            for number, pid, generation in link.held.ranks:
                self.ranks[number].pid, self.ranks[number].code = pid, None
                self.board.put(number, pid, "sync", 0, time.monotonic_ns(), generation)
            link.send(messages.Adopt(link.number, self._begin.pulse_port, self._begin.silence_s))

    def start(self, host: int, environment: RankEnvironment, record: Path) -> RemoteRank:
        """Start a rank on host number `host`."""
        link = self.link_to(host)
        # if the host came back, it may have a new host process with another address
        environment = replace(environment, address=link.address)
        rank = self.ranks[environment.rank] = RemoteRank(environment.rank, link, record)
        link.send(messages.Start(environment.to_env()))
        return rank

    def spare(self, may_go: Callable[[list[int]], bool] = lambda _: True) -> list[tuple[Link, list[int], str]]:
        """Continue without the lost hosts; return each lost host with its ranks and the reason.

        Args:
            may_go: function that returns True if the run can continue without the given ranks and the ranks of earlier
                calls.
        """
        self._end_lost()
        spared = []
        for link in self.links:
            if link.lost is not None and link not in self.spared:
                numbers = [rank.number for rank in self._ranks_of(link)]
                if may_go(numbers):
                    self.spared.append(link)
                    spared.append((link, numbers, self._of_lost(link)))
        return spared

    def announce(self, current: Generation, newest: Generation) -> None:
        """Announce the generations of the run to the ranks of other hosts."""
        self._announced = messages.Announce(current.number, list(current.members), newest.number, list(newest.members))
        for link in self.links:
            link.send(self._announced)

    def turn(self) -> None:
        """Handle the messages that hosts have sent."""
        for link in self.links:
            for message in link.waiting():
                self._obey(link, message)
        self._end_lost()
        until = time.monotonic() + _SENDING_S
        self._folders = [folder for folder in self._folders if not folder[0].offer(folder[1], until)]

    @property
    def busy(self) -> bool:
        """True while chunks of folders wait to be sent."""
        return bool(self._folders)

    def give_up_silent(self) -> None:
        """Mark hosts that have been silent for too long as lost.

        A host that runs ranks normally sends several messages a second.
        """
        for link in self.links:
            silent_s = time.monotonic() - link.heard_at
            if link.lost is None and silent_s > _SILENT_S and any(self._ranks_of(link)):
                self._silent.append(link)
                link.lose(f"nothing has come from it for {silent_s:.0f} s")

    def cut_off(self) -> str | None:
        """Return an error text if this host has no quorum, otherwise None.

        Hosts whose process has ended do not count. Silent hosts may still run, and may continue on their own. This host
        and the hosts that it reaches must therefore be at least half of the remaining hosts. If both sides have half of
        the hosts, the coordinator's side continues.
        """
        silent = [link for link in self.links if link.silent]
        reached = 1 + sum(link.lost is None and not link.silent for link in self.links)
        if is_quorum(reached, reached + len(silent)):
            return None
        return (
            f"of {reached + len(silent)} hosts this one reaches {reached - 1}, and nothing has come from "
            f"{', '.join(link.who for link in silent)}: as these may go on, this side stops."
        )

    @property
    def lost(self) -> str | None:
        """Text that names a lost host and its ranks, or None.

        Hosts that were silent for too long, and hosts without which the run continues, do not count.
        """
        known = {*self._silent, *self.spared}
        lost = (link for link in self.links if link.lost is not None and link not in known)
        return next(map(self._of_lost, lost), None)

    @property
    def silent(self) -> str:
        """Names and ranks of hosts that were silent for too long, one line each."""
        return "\n".join(map(self._of_lost, self._silent))

    def _end_lost(self) -> None:
        """Record the ranks of lost hosts as killed."""
        for rank in self.ranks.values():
            if rank.link.lost is not None and rank.code is None:
                rank.code, rank.stopped, rank.paging = -signal.SIGKILL, False, False

    def _fall_silent(self, host: int, silent_s: float) -> None:
        for link in self.links:
            if link.number == host and link.lost is None:
                link.fall_silent(silent_s)

    def _until(self, link: Link, kind: type[M], deadline_s: float) -> M | None:
        """Handle messages until one of this type arrives, and return this message.

        A host that does not send this message in time counts as lost.
        """
        until = time.monotonic() + deadline_s
        while (message := link.receive(max(0.1, until - time.monotonic()))) is not None:
            if isinstance(message, kind):
                return message
            self._obey(link, message)
        return None

    def _of_lost(self, link: Link) -> str:
        numbers = [str(rank.number) for rank in self._ranks_of(link)]
        ranks = f", which had rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""
        return f"{link.who}{ranks}, is lost: {link.lost}" if ranks else f"{link.who} is lost: {link.lost}"

    def _ranks_of(self, link: Link) -> Iterator[RemoteRank]:
        return (rank for rank in self.ranks.values() if rank.link is link)

    def _obey(self, link: Link, message: Any) -> None:
        match message:
            case messages.Ready() if link in self._preparing:
                link.shares_folder = message.shares_folder
                self._ready.append(link)
                self._preparing.remove(link)
                self._hide_token()
            case messages.Rows():
                self._note(link, message)
            case messages.Put():
                receive(message, self.folder.path)
            case messages.Told():
                self._tell(link, message)
            case messages.Fetch():
                self._folders.append((link, self._folder(message.path)))
            case messages.Over() if link in self._released:
                self._dismiss(link)
            case messages.Interrupted(signal="SIGTERM"):
                self.hosts.notices.setdefault(link.number, time.monotonic())
            case messages.Interrupted():
                self.signals.first = self.signals.first or message.signal
            case messages.Ended() if rank := self._rank_of(link, message.rank):
                rank.code, rank.oom_kills = message.code, message.oom_kills
                rank.stopped = rank.paging = False

    def _rank_of(self, link: Link, number: int) -> RemoteRank | None:
        """Return the rank with this number if it is on the given host, otherwise None."""
        rank = self.ranks.get(number)
        return rank if rank is not None and rank.link is link else None

    def _note(self, link: Link, message: messages.Rows) -> None:
        now, now_ns = time.time(), time.monotonic_ns()
        for row in message.rows:
            rank = self._rank_of(link, row.rank)
            if rank is None or row.phase not in PHASES:
                continue
            rank.pid, rank.stopped, rank.paging = row.pid, row.stopped, row.paging
            if rank.code is None:
                rank.alive_at = now
            self.board.put(row.rank, rank.pid, row.phase, row.step, now_ns - row.idle_ns, row.generation)

    def _tell(self, link: Link, message: messages.Told) -> None:
        """Store a rank's error record, stack or position. The time of a record is converted to this host's clock."""
        rank = self._rank_of(link, message.rank)
        if rank is None or message.suffix not in (".error", ".stack", POSITION):
            return
        text = message.text
        if message.suffix == ".error":
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(text)
                text = json.dumps({**record, "time": record["time"] - link.clock_ahead_s, "host": link.name})
        write_whole(rank.record.with_suffix(message.suffix), text)

    def _folder(self, name: str) -> Iterator[Struct]:
        folder = place_in(self.folder.path, name)
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.is_file():
                with suppress(FileNotFoundError):  # the run has removed the file
                    yield from parts_of(file, self.folder.path)
        yield messages.Fetched(name)
