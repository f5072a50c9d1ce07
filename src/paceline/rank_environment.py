"""Environment variables of a rank.

Only this module writes and reads RANK, MASTER_ADDR and PACELINE_… variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError

# In a rank that torchrun or another launcher has started, only the first five are set, besides PACELINE_ variables of
# the user.
RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_RANK",
)
_ADDRESS, _HOST, _STATUS, _STORE_FD = "PACELINE_ADDRESS", "PACELINE_HOST", "PACELINE_STATUS", "PACELINE_STORE_FD"
# the run's key, if passed on: an inherited descriptor, or a file of mode 0600
KEY_FD, KEY_FILE = "PACELINE_KEY_FD", "PACELINE_KEY_FILE"
STORE, _GRACE = "PACELINE_STORE", "PACELINE_GRACE"
ENCRYPT = "PACELINE_ENCRYPT"  # set to off: gradients between hosts are authenticated but not encrypted

# set if a rank's run directory is a copy; checkpoints are then read from the host that has the original
FOLDER_IS_COPY = "PACELINE_FOLDER_IS_COPY"


@dataclass(frozen=True)
class HostEntry:
    """Emulated host, with the information that a process needs to enter it.

    Attributes:
        network_namespace: path of the host's network namespace.
        bridge: path of the network namespace of the bridge that connects the hosts.
        control_group: folder of the control group that limits the host's cores; None without a limit.
    """

    name: str
    network_namespace: str
    bridge: str
    control_group: Path | None = None

    def to_env(self) -> dict[str, str]:
        """Return the variables that `from_env` reads."""
        return {
            _HOST: self.name,
            "PACELINE_NAMESPACE": self.network_namespace,
            "PACELINE_BRIDGE": self.bridge,
            "PACELINE_CGROUP": str(self.control_group or ""),
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> HostEntry | None:
        """Return the emulated host that the variables name; None if they name no host."""
        name = environ.get(_HOST)
        if not name:
            return None
        namespace, bridge = (environ.get(variable, "") for variable in ("PACELINE_NAMESPACE", "PACELINE_BRIDGE"))
        return cls(name, namespace, bridge, _path(environ.get("PACELINE_CGROUP")))


@dataclass(frozen=True)
class RankEnvironment:
    """A rank's place in its run: its number, its addresses, and its launcher's files.

    Attributes:
        local_rank: number of the rank among the `local_world_size` ranks of its host.
        master_address: host of rank 0, which serves torch's own store on `master_port`; port 0 means a free port.
        attempt: number of earlier restarts; every attempt has its own rendezvous.
        starts: number of earlier starts of this rank in this attempt.
        address: address at which the other ranks reach this one; None if the rank determines it itself.
        interface: network interface of `address`.
        threads: number of threads of each torch operation; None leaves the choice to torch.
        cores: cores to which the rank is pinned; empty leaves the choice to the kernel.
        host: emulated host to enter; None if the rank runs directly on this machine.
        status_file: file to which the rank writes its status; None without paceline's launcher.
        error_file: file to which the rank writes its error for the launcher.
        launcher: process id of the launcher.
        store: Unix socket, or address and port, of the store through which the ranks find each other.
        key_fd: file descriptor of the run's key.
        store_fd: file descriptor of the socket on which rank 0 serves torch's own store, if a library needs that store.
        inherited_fds: file descriptors that the rank holds open until it ends; processes that it starts do not inherit
            them.
        grace_s: seconds in which a rank can save after its launcher was killed; with 0, the rank is killed at once.
    """

    rank: int
    world_size: int
    master_address: str
    master_port: int
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0
    starts: int = 0
    address: str | None = None
    interface: str | None = None
    threads: int | None = None
    cores: tuple[int, ...] = ()
    host: HostEntry | None = None
    status_file: Path | None = None
    error_file: Path | None = None
    launcher: int | None = None
    store: str | None = None
    key_fd: int | None = None
    store_fd: int | None = None
    inherited_fds: tuple[int, ...] = ()
    grace_s: int = 30

    def to_env(self) -> dict[str, str]:
        """Return the variables that `from_env` reads; omit None and empty values."""
        values = {
            RANK: self.rank,
            WORLD_SIZE: self.world_size,
            MASTER_ADDR: self.master_address,
            MASTER_PORT: self.master_port,
            LOCAL_RANK: self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "PACELINE_ATTEMPT": self.attempt,
            "PACELINE_STARTS": self.starts,
            _ADDRESS: self.address,
            "GLOO_SOCKET_IFNAME": self.interface,  # gloo also listens only on this interface
            "OMP_NUM_THREADS": self.threads,
            "MKL_NUM_THREADS": self.threads,
            "PACELINE_CORES": ",".join(map(str, self.cores)) or None,
            _STATUS: self.status_file,
            "PACELINE_ERROR_FILE": self.error_file,
            "PACELINE_LAUNCHER": self.launcher,
            STORE: self.store,
            KEY_FD: self.key_fd,
            _STORE_FD: self.store_fd,
            "PACELINE_INHERITED": ",".join(map(str, self.inherited_fds)) or None,
            _GRACE: self.grace_s,
        }
        own = {name: str(value) for name, value in values.items() if value is not None}
        return own | (self.host.to_env() if self.host else {})

    @staticmethod
    def names() -> frozenset[str]:
        """Return all variables that `to_env` can write."""
        return _NAMES

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read the environment of a rank from the variables.

        Raises:
            LaunchError: the rank, the number of ranks or the address of rank 0 is not set.
        """
        absent = [name for name in (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) if name not in environ]
        if absent:
            raise LaunchError(
                "launch.environment_incomplete",
                "RANK is set, but these variables are not: {absent}. Start the script with "
                "torchrun or `paceline train`.",
                absent=list(absent),
            )
        threads = environ.get("OMP_NUM_THREADS", "")
        return cls(
            rank=int(environ[RANK]),
            world_size=int(environ[WORLD_SIZE]),
            master_address=environ[MASTER_ADDR],
            master_port=int(environ[MASTER_PORT]),
            local_rank=int(environ.get(LOCAL_RANK, 0)),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
            attempt=int(environ.get("PACELINE_ATTEMPT") or environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            starts=int(environ.get("PACELINE_STARTS") or "0"),
            address=environ.get(_ADDRESS) or None,
            interface=environ.get("GLOO_SOCKET_IFNAME"),
            threads=int(threads) if threads.isdecimal() else None,  # OpenMP allows a list, one number for each level
            cores=_numbers(environ.get("PACELINE_CORES")),
            host=HostEntry.from_env(environ),
            status_file=_path(environ.get(_STATUS)),
            error_file=_path(environ.get("PACELINE_ERROR_FILE")),
            launcher=int(environ["PACELINE_LAUNCHER"]) if "PACELINE_LAUNCHER" in environ else None,
            store=environ.get(STORE) or None,
            key_fd=int(environ[KEY_FD]) if KEY_FD in environ else None,
            store_fd=int(environ[_STORE_FD]) if _STORE_FD in environ else None,
            inherited_fds=_numbers(environ.get("PACELINE_INHERITED")),
            grace_s=int(environ.get(_GRACE, cls.grace_s)),
        )


_SOME = Path("/")
_NAMES = frozenset(
    RankEnvironment(
        0, 1, "", 0, 0, 1, 0, 0, "a", "i", 1, (0,), HostEntry("h", "n", "b", _SOME), _SOME, _SOME, 0, "s", 0, 0, (0,)
    ).to_env()
)


def is_our_rank() -> bool:
    """Return True in a rank process that paceline's own launcher started and watches."""
    return _STATUS in os.environ


def own_rank() -> int:
    """Return this process's rank, or 0 if this process is not a rank.

    A process that is not a rank acts for all ranks, like rank 0.
    """
    return int(os.environ.get(RANK, "0"))


def take_store_fd() -> int | None:
    """Return the socket of torch's own store on rank 0; None if not opened.

    Later calls return None.
    """
    descriptor = os.environ.pop(_STORE_FD, None)
    return None if descriptor is None else int(descriptor)


def named_address() -> str | None:
    """Return this rank's address if the launcher or the user sets it, otherwise None."""
    return os.environ.get(_ADDRESS) or None


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, filter(None, (text or "").split(","))))


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
