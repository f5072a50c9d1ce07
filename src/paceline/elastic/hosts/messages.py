"""Messages between the coordinator and the agents."""

from __future__ import annotations

from msgspec import Struct

CHUNK_BYTES = 2**18  # largest number of bytes of a file per message
TEXT_LIMIT = 2**18  # largest number of characters of a traceback or a stack trace per message


class Put(Struct, tag=True, frozen=True):
    """Chunk of a file in the attempt's folder, sent in either direction.

    Attributes:
        path: path of the file relative to the folder.
        offset: offset of the chunk in the file, in bytes. -1 appends whole lines to the file.
        last: True if the chunk completes the file.
    """

    path: str
    offset: int
    data: bytes
    last: bool


class Held(Struct, array_like=True, frozen=True):
    """Ranks that a host has kept since the coordinator was lost.

    Attributes:
        newest: number of the newest generation that was announced on this host.
        ranks: number, process id and generation of each running rank.
    """

    attempt: int
    newest: int
    ranks: list[tuple[int, int, int]]

    @property
    def entered(self) -> set[int]:
        """Numbers of the ranks that have a state to continue from."""
        return {number for number, _, generation in self.ranks if generation >= 0}


class Joining(Struct, tag=True, frozen=True):
    """First message of an agent, with its identity, devices and ports.

    Attributes:
        clock_s: the agent's wall clock, in seconds since the Unix epoch.
        identity: text that is equal for processes with the same kernel and network namespace.
        address: address of the agent's end of this connection, at which other hosts can reach the agent.
        host: devices of the agent, as JSON of `paceline.cluster.cluster.Host`.
        port: port on which the agent listens in case it becomes the coordinator; 0 if it never does.
        probes_port: port for probes of other hosts until ranks are prepared; 0 if probes are not answered.
        again: True if the agent has lost the previous coordinator.
        held: ranks that the agent has kept since the loss of the previous coordinator.
    """

    number: int
    count: int
    name: str
    engine: str
    run_name: str
    versions: dict[str, str]
    clock_s: float
    identity: str
    address: str
    host: str
    port: int = 0
    probes_port: int = 0
    again: bool = False
    held: Held | None = None


class Echo(Struct, tag=True, frozen=True):
    """Answer to a `Probe`."""


class Looked(Struct, tag=True, frozen=True):
    """Answer to `Look`. The digest of a missing file or module is ""."""

    digests: dict[str, str]


class Speed(Struct, array_like=True, frozen=True):
    """Measured link to the host with this number."""

    number: int
    round_trip_s: float
    bits_per_s: float


class Measured(Struct, tag=True, frozen=True):
    """Answer to `Measure`. Hosts that did not answer are missing."""

    speeds: list[Speed]


class Ready(Struct, tag=True, frozen=True):
    """Answer to `Begin`, after the host has looked for the token.

    `shares_folder` is true if the host sees the coordinator's folder of the run.
    """

    shares_folder: bool = False


class Row(Struct, array_like=True, frozen=True):
    """Process and status of a rank. `idle_ns` is the time since the rank's last mark on the status board."""

    rank: int
    pid: int
    attempt: int
    phase: str
    step: int
    idle_ns: int
    stopped: bool
    paging: bool
    generation: int


class Rows(Struct, tag=True, frozen=True):
    """Status of all ranks of a host, sent a few times a second."""

    rows: list[Row]


class Told(Struct, tag=True, frozen=True):
    """Error record (JSON) or stack traces of a rank. `suffix` is the suffix of the file."""

    rank: int
    suffix: str
    text: str


class Ended(Struct, tag=True, frozen=True):
    """End of a rank, sent after all files of the rank.

    `oom_kills` is the number of kills for lack of memory on the rank's host during the attempt; None if unknown.
    """

    rank: int
    code: int
    oom_kills: int | None


class Fetch(Struct, tag=True, frozen=True):
    """Request for a folder of the coordinator. `path` is relative to the attempt's folder."""

    path: str


class Interrupted(Struct, tag=True, frozen=True):
    """Signal that an agent received.

    SIGINT stops the run. SIGTERM is a notice: the host leaves if the others can continue.
    """

    signal: str


class Over(Struct, tag=True, frozen=True):
    """Answer to `EndAttempt`, after all ranks of the host have ended."""


class Welcome(Struct, tag=True, frozen=True):
    """Notice that all hosts have connected. The names are in the order of host numbers."""

    names: list[str]


class Refused(Struct, tag=True, frozen=True):
    """Reason why a host cannot take part, with its exit code and error code."""

    reason: str
    code: int = 1
    error: str = ""


class Probe(Struct, tag=True, frozen=True):
    """Bytes of arbitrary content, sent to measure a link."""

    data: bytes


class Measure(Struct, tag=True, frozen=True):
    """Request to measure the links to hosts, each given as number, address and port."""

    targets: list[tuple[int, str, int]]


class Look(Struct, tag=True, frozen=True):
    """Request to compute digests of modules, files and folders.

    In a folder, only files with one of `suffixes` count. If `suffixes` is empty, all files count.
    """

    modules: list[str]
    files: list[str]
    suffixes: list[str]


class Begin(Struct, tag=True, frozen=True):
    """Order to begin an attempt. Messages of type `Put` and `Start` follow.

    Attributes:
        recovers: True if the run can continue without lost ranks.
        spares_hosts: True if the run can continue without a lost host.
        replica_ranks: number of ranks per replica.
        places: name of the host of each rank.
        folder: path, on the coordinator, of the folder that the ranks read and write.
        token: random name of a file that the coordinator has created in the folder. A host that sees this file shares
            the folder.
        folders: subfolders that must exist before the ranks start.
        host: number of the receiving host.
        port: requested port of the rendezvous store; 0 takes a free port.
        pulse_port: port of the coordinator for heartbeats (`Pulse`); 0 to send no heartbeats.
        silence_s: seconds of silence after which each host considers the other host lost.
    """

    attempt: int
    module_args: list[str]
    env: dict[str, str]
    start_deadline_s: float
    recovers: bool
    spares_hosts: bool
    replica_ranks: int
    places: list[str]
    folder: str = ""
    token: str = ""
    folders: list[str] = []
    host: int = 0
    port: int = 0
    pulse_port: int = 0
    silence_s: float = 0.0

    def spares(self, host: str) -> bool:
        """Return True if the run can continue without the host.

        At least one replica must have no rank on the host.
        """
        there = {rank // self.replica_ranks for rank, name in enumerate(self.places) if name == host}
        return self.recovers and len(there) * self.replica_ranks < len(self.places)


class Start(Struct, tag=True, frozen=True):
    """Order to start a rank with these environment variables."""

    environment: dict[str, str]


class Announce(Struct, tag=True, frozen=True):
    """Announcement of the current and the newest generation of the run, with their members.

    Attributes:
        store: address of the rendezvous store from now on; "" if unchanged.
    """

    current: int
    members: list[int]
    newest: int
    newest_members: list[int]
    store: str = ""


class Adopt(Struct, tag=True, frozen=True):
    """Order of a new coordinator to continue with the ranks that the host has kept.

    See `Begin` for the attributes.
    """

    host: int
    pulse_port: int
    silence_s: float


class Signal(Struct, tag=True, frozen=True):
    """Signal for a rank. SIGKILL is also sent to all processes that the rank has started."""

    rank: int
    number: int


class Fetched(Struct, tag=True, frozen=True):
    """Notice that all files of a requested folder have been sent."""

    path: str


class HandOver(Struct, tag=True, frozen=True):
    """Notice that the coordinator leaves the run, whose ranks wait for a new coordinator."""


class EndAttempt(Struct, tag=True, frozen=True):
    """Order to end the attempt, and to kill ranks that still run."""


class Successor(Struct, array_like=True, frozen=True):
    """Host that may become the coordinator.

    Attributes:
        port: port on which the host listens for other hosts; 0 if it never coordinates.
        host: devices of the host, as in `Joining`.
        lost: True if the host is lost, and may come back.
    """

    name: str
    address: str
    port: int
    host: str
    lost: bool


class Past(Struct, array_like=True, frozen=True):
    """Losses of a run so far. From these, a coordinator decides which ranks to leave out.

    Attributes:
        losses: age of each loss in seconds, indexed by rank.
        left_out: ranks that must not be started again.
        released: ranks in `left_out` that have left because a user requested it.
    """

    losses: dict[int, list[float]] = {}
    left_out: list[int] = []
    released: list[int] = []


class Succession(Struct, tag=True, frozen=True):
    """Hosts with which a run continues after the loss of the coordinator.

    Attributes:
        run: directory or URL of the run.
        first_event: first line of the run's event file, by which a host recognizes the directory; "" for a URL.
        hosts: hosts in the order of their numbers. The coordinator is the first.
        past: losses of the run at the time of sending.
    """

    run: str
    first_event: str
    hosts: list[Successor]
    past: Past = Past()


class Elsewhere(Struct, tag=True, frozen=True):
    """Notice to a lost host that another coordinator has taken over.

    Attributes:
        address: address of the new coordinator; `port` is its port.
        names: names of the run's hosts, in the order of their numbers.
    """

    run_name: str
    address: str
    port: int
    names: list[str]


class Dismiss(Struct, tag=True, frozen=True):
    """Notice that the command has ended on host 0, with this exit code.

    If `released` is true, the run continues without this host instead. The code is then 0 if the user has requested
    this, and 143 if the host has received a notice.
    """

    code: int
    released: bool = False


FromHost = (
    Joining | Echo | Measured | Looked | Ready | Rows | Told | Ended | Put | Fetch | Interrupted | Over | Elsewhere
)
ToHost = (
    Welcome
    | Refused
    | Probe
    | Measure
    | Look
    | Begin
    | Put
    | Start
    | Announce
    | Adopt
    | Signal
    | Fetched
    | EndAttempt
    | HandOver
    | Succession
    | Elsewhere
    | Dismiss
)
