"""Choice of one transport for all ranks, and process groups of some ranks."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from paceline.cluster.machine import host_identity as host_identity
from paceline.comm.process_group import register
from paceline.comm.rendezvous import tell_all
from paceline.comm.shm.collectives import segment_bytes
from paceline.comm.shm.segment import Handle, OwnedSegment, attach, create
from paceline.errors import ClusterError, LaunchError
from paceline.job.spec import load_object
from paceline.planning.sync_info import BETWEEN_HOSTS, TRANSPORTS, WITHIN_HOST, WITHOUT_SHARED_MEMORY
from paceline.rank_environment import ENCRYPT

SEVERAL_HOSTS = "the ranks are on several hosts"  # also in `pg_options` of a `tcp` group, if known


def choose(store: Store, rank: int, size: int, wanted: str, timeout_s: float) -> tuple[str, str | None]:
    """Choose the backend for ranks on CPUs, the same on all ranks.

    `auto` means `shm` if all ranks can share memory, and `tcp` on several hosts. On one host without shared memory,
    `auto` means `gloo`, and the reason is returned. `tcp` encrypts and survives lost connections, and is about as fast
    as gloo's plaintext between hosts. For 16 MiB over emulated links of 1 Gbit/s, `tcp` reaches 0.97 to 0.99 of gloo's
    speed. Over loopback with two ranks, `tcp` reaches 0.83 of gloo's speed (1.23 with encrypt=off) for 16 MiB, and
    takes a fifth of gloo's time for 1 KiB (`benchmarks/hosts.py`). With `tcp`, groups whose ranks are all on one host
    use shared memory.

    Raises:
        ClusterError: the requested transport is not available.
    """
    if size == 1:
        return WITHOUT_SHARED_MEMORY, None
    if wanted != "auto":
        obstacle = TRANSPORTS[wanted].obstacle
        if obstacle is not None and (reason := load_object(obstacle)(store, rank, size, timeout_s)):
            raise ClusterError(
                "ranks.transport_unavailable",
                "transport={wanted} is not available: {reason}. With transport=auto, the ranks use TCP.",
                wanted=wanted,
                reason=reason,
            )
        return wanted, _note(wanted)
    reason = why_not_shared(store, rank, size, timeout_s)
    if reason is None:
        return WITHIN_HOST, None
    if reason == SEVERAL_HOSTS:
        return BETWEEN_HOSTS, _note(BETWEEN_HOSTS)
    return WITHOUT_SHARED_MEMORY, reason


def encrypts() -> bool:
    """Return False if PACELINE_ENCRYPT=off disables encryption between hosts.

    Raises:
        LaunchError: PACELINE_ENCRYPT is neither `on` nor `off`.
    """
    wanted = os.environ.get(ENCRYPT, "on")
    if wanted not in ("on", "off"):
        raise LaunchError(
            "ranks.encrypt_invalid", "{variable}={wanted} is neither on nor off", variable=ENCRYPT, wanted=wanted
        )
    return wanted == "on"


def _note(transport: str) -> str | None:
    if transport != BETWEEN_HOSTS or encrypts():
        return None
    return "encrypt=off, so attackers on the network can read and change the tensors; ranks still need the run's key"


def why_not_shared(store: Store, rank: int, size: int, timeout_s: float) -> str | None:
    """Return the reason why a rank cannot share memory with all other ranks, or None.

    Each rank tries to map the memory of the other ranks, and the ranks exchange the results.
    """
    own: OwnedSegment | None = None
    reason: str | None = None
    try:
        own = create(segment_bytes(size), "proof")
    except ClusterError as error:
        reason = str(error)
    try:
        offers = tell_all(store, "offer", rank, size, timeout_s, [host_identity(), own and asdict(own.handle)])
        if len({host for host, _ in offers}) > 1:
            return SEVERAL_HOSTS
        if all(handle for _, handle in offers):
            reason = _try(lambda: [attach(Handle(**handle)) for _, handle in offers])
        verdicts = tell_all(store, "verdict", rank, size, timeout_s, reason)
    finally:
        if own is not None:
            own.close_descriptor()
    return next((f"{verdict} (rank {r})" for r, verdict in enumerate(verdicts) if verdict), None)


def _try(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except ClusterError as error:
        return str(error)
    return None


# number of requests for each set of ranks, by parent
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def make_process_group(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    deadline_s: float,
    *,
    share_memory: bool,
    spread: bool,
    host_memory: bool = False,
) -> tuple[dist.ProcessGroup, Store]:
    """Create a process group of some ranks of `parent`, and its store.

    Exactly these ranks must call this function.

    `dist.new_group` would derive the group's name from the number of groups in each process. Ranks that created
    different groups before would then use different names, and a group that is created again would find the keys of its
    predecessor. Therefore, this function derives the name from the parent's name, the ranks, and the number of
    requests.

    Args:
        ranks: rank numbers in `parent`, in ascending order.
        share_memory: True if the ranks are on one host and use shared memory if possible; otherwise, the group uses the
            parent's backend.
        spread: True if the ranks are known to be on several hosts.
        host_memory: True for a group of ranks on accelerators that sends tensors in the hosts' memory.
    """
    everyone = dist.get_process_group_ranks(parent)
    members = [everyone[r] for r in ranks]
    own_rank, timeout = members.index(dist.get_rank()), timedelta(seconds=deadline_s)
    readable = f"{parent.group_name}/{'+'.join(map(str, ranks))}"
    counts = _made.setdefault(parent, Counter())
    counts[readable] += 1
    name = distributed_c10d.GroupName(
        hashlib.sha1(f"{readable}/{counts[readable]}".encode(), usedforsecurity=False).hexdigest()
    )
    store = PrefixStore(name, distributed_c10d._get_default_store())
    backend = dist.get_backend(parent)
    if share_memory or host_memory:
        found, _ = choose(store, own_rank, len(members), "auto", deadline_s)
        if host_memory or TRANSPORTS[found].one_host:
            register(found)
            backend = dist.Backend(found)
    with _not_split_from_the_default_group():
        made, _ = distributed_c10d._new_process_group_helper(
            len(members),
            own_rank,
            members,
            backend,
            distributed_c10d._get_default_store(),
            name,
            backend_options=SEVERAL_HOSTS if spread and backend == BETWEEN_HOSTS else None,
            timeout=timeout,
            group_desc=readable,
        )
    distributed_c10d._world.pg_group_ranks[made] = {member: r for r, member in enumerate(members)}
    return made, store


@contextmanager
def _not_split_from_the_default_group() -> Iterator[None]:
    """Prevent a split of the default group's communicator.

    Otherwise, torch would split a default group that is bound to a device, and every rank would have to take part.
    """
    default = distributed_c10d._get_default_group()
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
