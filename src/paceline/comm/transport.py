"""Choice of a run's transport, made by all ranks together before there is a group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.address import host_identity as host_identity
from paceline.comm.shm import futex
from paceline.comm.shm.rounds import segment_bytes
from paceline.comm.shm.segment import Handle, attach, create
from paceline.errors import ClusterError, LaunchError
from paceline.generation import GenerationOver, generation_is_over
from paceline.job.spec import load_object
from paceline.planning.transport_info import BETWEEN_HOSTS, TRANSPORTS, WITHIN_HOST, WITHOUT_SHARED_MEMORY
from paceline.rank_environment import ENCRYPT

SEVERAL_HOSTS = "the ranks are on several hosts"  # also what `pg_options` of a `tcp` group say where that is known


def choose(store: Store, rank: int, size: int, wanted: str, timeout_s: float) -> tuple[str, str | None]:
    """The backend for ranks on CPUs, the same on all of them.

    `auto` is `shm` where all can share memory; between several hosts `tcp`; else, on one host, `gloo`, and then why.
    Between hosts `tcp`, which encrypts and survives a link that is cut, takes as long as gloo's plaintext: 0.97 to
    0.99 of its speed for 16 MiB over emulated links of 1 Gbit/s. Over loopback, two ranks, it has 0.83 of it (1.23
    with encrypt=off) for 16 MiB, and takes a fifth of its time for 1 KiB (`benchmarks/hosts.py`). Where `tcp` is asked
    for, groups whose ranks are all on one host are shared memory under that name.

    Raises:
        ClusterError: the transport that is asked for cannot be had.
    """
    if size == 1:
        return WITHOUT_SHARED_MEMORY, None
    if wanted != "auto":
        obstacle = TRANSPORTS[wanted].obstacle
        if obstacle is not None and (reason := load_object(obstacle)(store, rank, size, timeout_s)):
            raise ClusterError(
                f"transport={wanted} cannot be had: {reason}. With transport=auto the ranks talk over TCP."
            )
        return wanted, _note(wanted)
    reason = why_not_shared(store, rank, size, timeout_s)
    if reason is None:
        return WITHIN_HOST, None
    if reason == SEVERAL_HOSTS:
        return BETWEEN_HOSTS, _note(BETWEEN_HOSTS)
    return WITHOUT_SHARED_MEMORY, reason


def encrypts() -> bool:
    """True unless PACELINE_ENCRYPT=off has tensors travel between hosts as they are.

    Raises:
        LaunchError: it is neither on nor off.
    """
    wanted = os.environ.get(ENCRYPT, "on")
    if wanted not in ("on", "off"):
        raise LaunchError(f"{ENCRYPT}={wanted} is neither on nor off")
    return wanted == "on"


def _note(transport: str) -> str | None:
    if transport != BETWEEN_HOSTS or encrypts():
        return None
    return "encrypt=off, so whoever is on the way can read and change the tensors; ranks still prove the run's key"


def why_not_shared(store: Store, rank: int, size: int, timeout_s: float) -> str | None:
    """The reason why some rank cannot share memory with all others, or None.

    It is found out by trying, and told to all.
    """
    if len(set(tell_all(store, "host", rank, size, timeout_s, host_identity()))) > 1:
        return SEVERAL_HOSTS
    own, reason = None, futex.unsupported()
    try:
        if reason is None:
            own = create(segment_bytes(size), "proof")
    except ClusterError as error:
        reason = str(error)
    try:
        offers = tell_all(store, "offer", rank, size, timeout_s, [own and asdict(own.handle), reason])
        if all(handle for handle, _ in offers):
            reason = _try(lambda: [attach(Handle(**handle)) for handle, _ in offers])
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


def tell_all(store: Store, what: str, rank: int, size: int, timeout_s: float, value: Any) -> list[Any]:
    """Every rank's value (JSON), by rank.

    Raises:
        LaunchError: ranks did not come in time; names them.
    """
    keys = [f"transport/{what}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistStoreError
        if generation_is_over():
            raise GenerationOver(f"rank {rank} waits for these ranks no more") from error
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise LaunchError(
            f"rank {rank} waited {timeout_s:g} s for ranks {missing}, which did not come to the start of the run"
        ) from error
    return [json.loads(value) for value in store.multi_get(keys)]
