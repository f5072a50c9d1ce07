"""Descriptions of transports between ranks on CPUs, the values of `transport=` in a plan."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from paceline.errors import ClusterError, PlanError
from paceline.extensions import ExtensionPoint

# of gradients on slow links: sending begins early, and a message is still long against its latency
BUCKET_BYTES_BETWEEN_HOSTS = 4 * 2**20
_LEAST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class TransportInfo:
    """Description of a transport, readable without torch.

    Attributes:
        backend: import path of a function that makes a backend or process group for torch, called with
            `torch.distributed`'s options (store, group_rank, group_size, timeout, …) and None; None: torch has it.
        one_host: True if all ranks must be on one host.
        within_hosts: False if its groups on one host are another transport's under its name.
        shares_memory: True if tensors of a group lie in memory that its ranks share, as
            `paceline.comm.process_group.Transport` says; sums then cost in a step what they cost alone.
        obstacle: import path of a function of (store, rank, size, timeout_s), called by all ranks together before they
            have a group, that returns why they cannot use it, or None.
    """

    backend: str | None
    one_host: bool = False
    within_hosts: bool = True
    shares_memory: bool = False
    obstacle: str | None = None


TRANSPORTS = ExtensionPoint(
    "transport",
    "paceline.transports",
    TransportInfo,
    {
        "shm": TransportInfo(
            "paceline.comm.shm:create",
            one_host=True,
            shares_memory=True,
            obstacle="paceline.comm.transport:why_not_shared",
        ),
        "gloo": TransportInfo(None),
        "tcp": TransportInfo("paceline.comm.tcp:create", within_hosts=False),
    },
    PlanError,
    words=("auto",),
)


# what `auto` takes: within a host, between hosts, and within a host that allows no shared memory
WITHIN_HOST, BETWEEN_HOSTS, WITHOUT_SHARED_MEMORY = "shm", "tcp", "gloo"


def carriers(*, several_hosts: bool) -> tuple[str, ...]:
    """Names of the transports that carry messages within a host, or between several.

    Packages' own are among them; one whose description cannot be loaded is left out.
    """
    found = []
    for name in TRANSPORTS.names:
        with suppress(PlanError):
            info = TRANSPORTS[name]
            if not info.one_host if several_hosts else info.within_hosts:
                found.append(name)
    return tuple(found)


def problem_with_transport(name: object) -> str | None:
    """The problem with a value of `transport`; None if it is valid."""
    if name == "auto" or name in TRANSPORTS.built_in:
        return None
    if name in ("nccl", "rccl", "xccl"):
        return (
            f"{name} carries messages between GPUs, and ranks with GPUs use it automatically: leave transport out. "
            f"{devices_of_ranks()}"
        )
    if name not in TRANSPORTS.names:
        return f'transport is {" or ".join(("auto", *TRANSPORTS.names))}, not "{name}"'
    try:
        TRANSPORTS[str(name)]
    except PlanError as error:
        return str(error)
    return None


def devices_of_ranks() -> str:
    """Describe the devices that ranks use on this machine, for messages."""
    from paceline.cluster.machine import find_gpus  # slow, only for a message

    try:
        found = find_gpus().devices
    except ClusterError as error:
        return str(error)
    if not found:
        return "paceline finds no GPU on this machine, so ranks use its cores. `paceline doctor` shows what it finds"
    return f"Ranks use the GPUs of this machine, {len(found)} x {found[0].name}. `paceline doctor` lists them"


def bucket_bytes_between_hosts(gradient_bytes: float) -> float:
    """Size of buckets of gradients; a small model's are smaller.

    The last one is sent when the backward pass is over.
    """
    return min(BUCKET_BYTES_BETWEEN_HOSTS, max(_LEAST_BUCKET_BYTES, gradient_bytes / 8))
