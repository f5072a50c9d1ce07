"""Messages between the coordinator and the agents."""

from __future__ import annotations

from msgspec import Struct

CHUNK_BYTES = 2**18  # of a file in one message
TEXT_LIMIT = 2**18  # characters of a traceback or a stack in one message


class Put(Struct, tag=True, frozen=True):
    """Part of a file of the attempt's folder, either way.

    Attributes:
        path: relative to that folder.
        offset: where the part begins; -1 appends whole lines.
        last: the file is whole with it.
    """

    path: str
    offset: int
    data: bytes
    last: bool


class Held(Struct, array_like=True, frozen=True):
    """Ranks of an attempt that a host has kept since the coordinator was lost.

    Attributes:
        newest: number of the newest generation that was announced there.
        ranks: number, process id and generation of each that lives.
    """

    attempt: int
    newest: int
    ranks: list[tuple[int, int, int]]

    @property
    def entered(self) -> set[int]:
        """Ranks that have a state to go on from."""
        return {number for number, _, generation in self.ranks if generation >= 0}


class Joining(Struct, tag=True, frozen=True):
    """First message of an agent: its identity, devices and ports.

    Attributes:
        clock_s: its wall clock, seconds since the epoch.
        identity: equal for processes with one kernel and network namespace.
        address: address of its end of this connection, where other hosts reach it.
        host: its devices, as JSON of `paceline.cluster.cluster.Host`.
        port: where it would listen as the coordinator, at that address; 0 if it never does.
        probes_port: where it answers other hosts' probes until ranks are prepared; 0 if it does not.
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
    """Answer to `Look`: digest by name; "" for what is not there."""

    digests: dict[str, str]


class Speed(Struct, array_like=True, frozen=True):
    """Network to another host, by its number."""

    number: int
    round_trip_s: float
    bits_per_s: float


class Measured(Struct, tag=True, frozen=True):
    """Answer to `Measure`, without the hosts that do not answer."""

    speeds: list[Speed]


class Ready(Struct, tag=True, frozen=True):
    """Answer to `Begin`, once the token was looked for."""


class Row(Struct, array_like=True, frozen=True):
    """A rank's process, and its slot of the status board; `idle_ns` since its last mark."""

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
    """Status of every rank of a host, a few times a second."""

    rows: list[Row]


class Told(Struct, tag=True, frozen=True):
    """Error record (JSON) or stack traces that a rank left; `suffix` is that of the file."""

    rank: int
    suffix: str
    text: str


class Ended(Struct, tag=True, frozen=True):
    """End of a rank, after all that it wrote. `oom_kills`: on its host during the attempt; None where unknown."""

    rank: int
    code: int
    oom_kills: int | None


class Fetch(Struct, tag=True, frozen=True):
    """A rank asks for a folder of the coordinator's, `path` in the attempt's folder."""

    path: str


class Interrupted(Struct, tag=True, frozen=True):
    """A signal that an agent got, for the whole run."""

    signal: str


class Over(Struct, tag=True, frozen=True):
    """Answer to `EndAttempt`: no rank is left."""


class Welcome(Struct, tag=True, frozen=True):
    """All hosts have come; their names, in the order of their numbers."""

    names: list[str]


class Refused(Struct, tag=True, frozen=True):
    """Reason why a host cannot take part, with its exit code and error code."""

    reason: str
    code: int = 1
    error: str = ""


class Probe(Struct, tag=True, frozen=True):
    """Bytes of any value, to measure the link."""

    data: bytes


class Measure(Struct, tag=True, frozen=True):
    """Hosts to measure to: number, address, port."""

    targets: list[tuple[int, str, int]]


class Look(Struct, tag=True, frozen=True):
    """Modules, and files or folders, to look at.

    Of a folder, files count that end with one of `suffixes`; all, without any.
    """

    modules: list[str]
    files: list[str]
    suffixes: list[str]


class Begin(Struct, tag=True, frozen=True):
    """An attempt begins; `Put` and `Start` follow.

    Attributes:
        recovers: the run goes on without ranks that are lost.
        spares_hosts: it goes on without a host that is lost, where it can.
        replica_ranks: ranks of a replica.
        places: name of each rank's host.
        folder: that the ranks read and write, as the coordinator names it.
        token: name of a file that the coordinator has made there, of random name: who sees it shares the folder.
        folders: within it, which ranks expect to be there.
        host: number of the host.
        port: for the ranks' store, as was asked for; 0 takes a free one.
        pulse_port: of the coordinator, for this host's `Pulse`; 0 where silence ends nothing.
        silence_s: after which either is lost to the other.
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
        """True if the run can go on without that host.

        A replica has no rank there.
        """
        there = {rank // self.replica_ranks for rank, name in enumerate(self.places) if name == host}
        return self.recovers and len(there) * self.replica_ranks < len(self.places)


class Start(Struct, tag=True, frozen=True):
    """A rank to start, with the environment variables of its place."""

    environment: dict[str, str]


class Announce(Struct, tag=True, frozen=True):
    """Generations of the run with their members: the current one, and the newest.

    Attributes:
        store: where ranks meet from now on; "" where that is as before.
    """

    current: int
    members: list[int]
    newest: int
    newest_members: list[int]
    store: str = ""


class Adopt(Struct, tag=True, frozen=True):
    """The ranks that a host has kept are another coordinator's now.

    Its attributes are those of `Begin`.
    """

    host: int
    pulse_port: int
    silence_s: float


class Signal(Struct, tag=True, frozen=True):
    """A signal for a rank; SIGKILL is for all that it started as well."""

    rank: int
    number: int


class Fetched(Struct, tag=True, frozen=True):
    """All files of a folder that was asked for have been sent."""

    path: str


class EndAttempt(Struct, tag=True, frozen=True):
    """The attempt is over: whatever still runs is killed."""


class Successor(Struct, array_like=True, frozen=True):
    """A host that would coordinate.

    Attributes:
        port: where it would listen, at its address; 0 if it never does.
        host: its devices, as in `Joining`.
        lost: it may come back.
    """

    name: str
    address: str
    port: int
    host: str
    lost: bool


class Past(Struct, array_like=True, frozen=True):
    """Losses of a run so far, which decide who is left out.

    Attributes:
        losses: of ranks that were lost, how many seconds ago each time.
        left_out: ranks that are not started again.
        released: those of them that have left as somebody asked.
    """

    losses: dict[int, list[float]] = {}
    left_out: list[int] = []
    released: list[int] = []


class Succession(Struct, tag=True, frozen=True):
    """The hosts of a run that is to go on when the coordinator is lost.

    Attributes:
        run: its directory, or its URL.
        first_event: first line of its events, by which a host sees that it has that directory; "" of a URL.
        hosts: by number, the coordinator first.
        past: when this was sent.
    """

    run: str
    first_event: str
    hosts: list[Successor]
    past: Past = Past()


class Elsewhere(Struct, tag=True, frozen=True):
    """Address of the coordinator that took over, for a host that was lost.

    Attributes:
        address: of that, and its port.
        names: of the run's hosts, by number.
    """

    run_name: str
    address: str
    port: int
    names: list[str]


class Dismiss(Struct, tag=True, frozen=True):
    """The command has ended on host 0, with this exit code.

    Or it goes on without this host, which is `released`.
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
