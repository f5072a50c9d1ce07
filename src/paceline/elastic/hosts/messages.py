"""Messages between the coordinator and the agents."""

from __future__ import annotations

from msgspec import Struct

CHUNK_BYTES = 2**18  # bytes of a file per message
TEXT_LIMIT = 2**18  # characters of a traceback or a stack per message


class Put(Struct, tag=True, frozen=True):
    """Chunk of a file of the attempt's folder, in either direction.

    Attributes:
        path: path relative to that folder.
        offset: offset of the chunk in bytes; -1 appends whole lines.
        last: the chunk completes the file.
    """

    path: str
    offset: int
    data: bytes
    last: bool


class Held(Struct, array_like=True, frozen=True):
    """Ranks that a host has kept since the coordinator was lost.

    Attributes:
        newest: number of the newest generation announced on that host.
        ranks: number, process id and generation of each living rank.
    """

    attempt: int
    newest: int
    ranks: list[tuple[int, int, int]]

    @property
    def entered(self) -> set[int]:
        """Ranks that have a state to continue from."""
        return {number for number, _, generation in self.ranks if generation >= 0}


class Joining(Struct, tag=True, frozen=True):
    """First message of an agent: its identity, devices and ports.

    Attributes:
        clock_s: the agent's wall clock, in seconds since the Unix epoch.
        identity: equal for processes with the same kernel and network namespace.
        address: address of the agent's end of this connection, where other hosts reach it.
        host: the agent's devices, as JSON of `paceline.cluster.cluster.Host`.
        port: port at that address where the agent would listen as the coordinator; 0 if it never coordinates.
        probes_port: port for other hosts' probes until ranks are prepared; 0 if none are answered.
        again: the agent has lost the coordinator, and meets the other hosts again.
        held: the ranks that the agent has kept in that case.
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
    """Answer to `Look`: digest by name; "" for a missing file or module."""

    digests: dict[str, str]


class Speed(Struct, array_like=True, frozen=True):
    """Measured link to another host, by its number."""

    number: int
    round_trip_s: float
    bits_per_s: float


class Measured(Struct, tag=True, frozen=True):
    """Answer to `Measure`, without the hosts that did not answer."""

    speeds: list[Speed]


class Ready(Struct, tag=True, frozen=True):
    """Answer to `Begin`, after the search for the token."""


class Row(Struct, array_like=True, frozen=True):
    """Rank's process, and its slot of the status board. `idle_ns` is the time since its last mark."""

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
    """Error record (JSON) or stack traces of a rank; `suffix` is the file's suffix."""

    rank: int
    suffix: str
    text: str


class Ended(Struct, tag=True, frozen=True):
    """End of a rank, sent after all its files. `oom_kills`: count on its host during the attempt; None if unknown."""

    rank: int
    code: int
    oom_kills: int | None


class Fetch(Struct, tag=True, frozen=True):
    """Request of a rank for a folder of the coordinator. `path` is relative to the attempt's folder."""

    path: str


class Interrupted(Struct, tag=True, frozen=True):
    """Signal that an agent received, for the whole run."""

    signal: str


class Over(Struct, tag=True, frozen=True):
    """Answer to `EndAttempt`: no ranks are left."""


class Welcome(Struct, tag=True, frozen=True):
    """Notice that all hosts have connected, with their names in the order of their numbers."""

    names: list[str]


class Refused(Struct, tag=True, frozen=True):
    """Reason why a host cannot take part, with its exit code and error code."""

    reason: str
    code: int = 1
    error: str = ""


class Probe(Struct, tag=True, frozen=True):
    """Arbitrary bytes that measure the link."""

    data: bytes


class Measure(Struct, tag=True, frozen=True):
    """Hosts to measure the link to: number, address, port."""

    targets: list[tuple[int, str, int]]


class Look(Struct, tag=True, frozen=True):
    """Modules, files and folders to compute digests of.

    In a folder, only files with one of `suffixes` count; all files if there are none.
    """

    modules: list[str]
    files: list[str]
    suffixes: list[str]


class Begin(Struct, tag=True, frozen=True):
    """Begin of an attempt; `Put` and `Start` follow.

    Attributes:
        recovers: the run continues without lost ranks.
        spares_hosts: the run continues without a lost host if possible.
        replica_ranks: number of ranks of a replica.
        places: name of each rank's host.
        folder: folder that the ranks read and write, by its path on the coordinator.
        token: random name of a file that the coordinator has created there: a host that sees it shares the folder.
        folders: folders within it that the ranks expect to exist.
        host: number of the host.
        port: port for the ranks' store, as requested; 0 takes a free one.
        pulse_port: the coordinator's port for this host's `Pulse`; 0 if silence has no consequences.
        silence_s: seconds of silence after which each side considers the other lost.
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
        """True if the run can continue without that host.

        This is so if some replica has no rank on it.
        """
        there = {rank // self.replica_ranks for rank, name in enumerate(self.places) if name == host}
        return self.recovers and len(there) * self.replica_ranks < len(self.places)


class Start(Struct, tag=True, frozen=True):
    """Order to start a rank, with the environment variables of its place."""

    environment: dict[str, str]


class Announce(Struct, tag=True, frozen=True):
    """Generations of the run with their members: the current one, and the newest.

    Attributes:
        store: where ranks meet from now on; "" if unchanged.
    """

    current: int
    members: list[int]
    newest: int
    newest_members: list[int]
    store: str = ""


class Adopt(Struct, tag=True, frozen=True):
    """Transfer of a host's kept ranks to another coordinator.

    The attributes are those of `Begin`.
    """

    host: int
    pulse_port: int
    silence_s: float


class Signal(Struct, tag=True, frozen=True):
    """Signal for a rank; SIGKILL also goes to all processes that it started."""

    rank: int
    number: int


class Fetched(Struct, tag=True, frozen=True):
    """Notice that all files of a requested folder have been sent."""

    path: str


class EndAttempt(Struct, tag=True, frozen=True):
    """End of the attempt: ranks that still run are killed."""


class Successor(Struct, array_like=True, frozen=True):
    """Host that can become the coordinator.

    Attributes:
        port: port where it would listen, at its address; 0 if it never coordinates.
        host: the host's devices, as in `Joining`.
        lost: the host is lost, and may come back.
    """

    name: str
    address: str
    port: int
    host: str
    lost: bool


class Past(Struct, array_like=True, frozen=True):
    """Losses of a run so far, which decide the ranks to leave out.

    Attributes:
        losses: by rank, the age of each loss in seconds.
        left_out: ranks that are not started again.
        released: the left-out ranks that have left on request.
    """

    losses: dict[int, list[float]] = {}
    left_out: list[int] = []
    released: list[int] = []


class Succession(Struct, tag=True, frozen=True):
    """Hosts of a run that continues if the coordinator is lost.

    Attributes:
        run: directory or URL of the run.
        first_event: first line of the run's events, by which a host recognizes the directory; "" for a URL.
        hosts: hosts in the order of their numbers, the coordinator first.
        past: losses at the time of sending.
    """

    run: str
    first_event: str
    hosts: list[Successor]
    past: Past = Past()


class Elsewhere(Struct, tag=True, frozen=True):
    """Address of the coordinator that took over, for a lost host.

    Attributes:
        address: address and port of that coordinator.
        names: names of the run's hosts, by number.
    """

    run_name: str
    address: str
    port: int
    names: list[str]


class Dismiss(Struct, tag=True, frozen=True):
    """Dismissal: the command has ended on host 0 with this exit code.

    With `released`, the run continues without this host.
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
    | Succession
    | Elsewhere
    | Dismiss
)
