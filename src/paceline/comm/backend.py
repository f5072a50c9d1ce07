"""Rendezvous of a run's ranks: under paceline's launcher, under torchrun, or alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

# Its functions bind the default group at import, and torch.optim imports them at its first step.
# If they are imported before a group exists, they hold none; otherwise the group's threads outlive `leave`, and
# sometimes one of them aborts the process at Python's end.
import torch.distributed.nn.functional
from torch.distributed import Store  # type: ignore[attr-defined]

# Imported before ranks are forked from the forkserver; otherwise `register_transport` would import it in each rank.
# `positions` registers the function that reads this rank's position when the launcher asks for it.
import paceline.comm.positions
import paceline.comm.tcp  # noqa: F401
from paceline.cluster.launch_engines import is_rank
from paceline.cluster.machine import host_identity, own_interface
from paceline.comm.group import Group
from paceline.comm.interruption import Interruption
from paceline.comm.process_group import LAST_WORD_S, abort_all
from paceline.comm.process_group import register as register_transport
from paceline.comm.rendezvous import close_stores, drop_torchs_port, register, rendezvous_store, tell_all, torchs_store
from paceline.comm.transport import SEVERAL_HOSTS, choose
from paceline.device import default_backend, is_accelerator, use
from paceline.errors import report_failure
from paceline.planning.sync_info import BETWEEN_HOSTS
from paceline.rank_environment import LOCAL_RANK, RankEnvironment
from paceline.wire.status import Generation, ends_generation, interrupted

_joins = count()  # by this process so far
_joined_by = [0]  # the process of the last join


@contextmanager
def joined(
    *, deadline_s: float = 300.0, transport: str = "auto", generation: Generation | None = None
) -> Iterator[Group]:
    """Return a context in which this process is in the group of a run's ranks.

    A process that user code forks from this process does not leave the group, because the connections belong to the
    parent process.
    """
    group = join(deadline_s=deadline_s, transport=transport, generation=generation)
    try:
        yield group
    except BaseException as error:
        if _is_fork():
            raise
        over = ends_generation(error)
        if not over:
            report_failure(error)  # first, because the other ranks may be gone and later calls may be slow
        abort_all(0.0 if over else LAST_WORD_S)
        if group.interruption is not None:
            with suppress(RuntimeError):  # the device may be lost
                group.interruption.abort()
            if over:  # undefined results may have caused an error of any type
                raise interrupted() from error
        raise
    finally:
        leave(group)


def join(*, deadline_s: float = 300.0, transport: str = "auto", generation: Generation | None = None) -> Group:
    """Join the run that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    With `generation`, only the processes of this generation meet.

    Without these environment variables, the group has one rank.

    On accelerators, the transport is torch's own library. On CPUs, `auto` means shared memory if all ranks are on one
    host that supports it, and paceline's TCP transport on several hosts. Otherwise, `auto` means gloo, and the group's
    `transport_note` gives the reason. If user code has already initialized a process group, this group is used.

    Raises:
        LaunchError: the environment variables are incomplete, or the rendezvous cannot be reached or served.
        ClusterError: the machine has fewer accelerators than ranks, or the requested transport is not available.
    """
    _joined_by[0] = os.getpid()
    device, store, note = use(int(os.environ.get(LOCAL_RANK, 0))), None, None
    if not dist.is_initialized():
        if not is_rank():
            return Group(device=device, deadline_s=deadline_s)
        environment = RankEnvironment.from_env()
        if generation is not None:
            environment = replace(
                environment, rank=generation.rank_of(environment.rank), world_size=len(generation.members)
            )
        rank, size = environment.rank, environment.world_size
        number = next(_joins) if generation is None else generation.number
        store, (backend, note) = _met(environment, device, transport, deadline_s, number)
        interruption = None
        if not is_accelerator(device):
            register_transport(backend)
            _keep_gloo_to_the_interface()
        elif generation is not None:
            interruption = Interruption(device)
            deadline_s *= 2  # the supervisor ends waits at the deadline, because it knows which rank is late
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=deadline_s),
                device_id=device if is_accelerator(device) else None,
                pg_options=SEVERAL_HOSTS if transport == "auto" and backend == BETWEEN_HOSTS else None,
            )
            return _group(store, deadline_s, device, note, interruption)
        except BaseException as error:
            over = ends_generation(error)
            if interruption is not None:
                with suppress(RuntimeError):
                    interruption.abort()
                interruption.end()
            if over:
                _drop()
                raise interrupted() from error
            raise
    return _group(store, deadline_s, device, note)


def _group(
    store: Store | None,
    deadline_s: float,
    device: torch.device,
    note: str | None,
    interruption: Interruption | None = None,
) -> Group:
    group = Group(
        dist.get_rank(), dist.get_world_size(), dist.group.WORLD, store, deadline_s, device=device, transport_note=note
    )
    group.interruption = interruption
    register(store, group.rank)
    group.hosts = _hosts(group)
    return group


def group_of(process_group: dist.ProcessGroup | None, device: torch.device) -> Group:
    """Wrap a process group of other code; None means the default process group.

    All ranks of the process group must call this function.
    """
    backend = process_group or dist.group.WORLD
    assert backend is not None
    group = Group(dist.get_rank(backend), dist.get_world_size(backend), backend, device=device)
    group.hosts = _hosts(group)
    return group


def _drop() -> None:
    """End a group whose other ranks are gone."""
    abort_all(0.0)
    if dist.is_initialized():
        dist.destroy_process_group()
    # Torch has counted an unfinished group, and would derive the next name from that count. Ranks that were absent
    # have not counted it, and groups with different names do not meet.
    dist.distributed_c10d._world.group_count = 0
    close_stores()


def leave(group: Group) -> None:
    """End the process group of `join`; in a process forked since then, do nothing."""
    if group.store is not None and not _is_fork():
        if group.interruption is not None:
            group.interruption.end()
        # A remaining reference to the process group keeps its threads alive. A thread that drops a tensor while Python
        # ends aborts the process.
        group.close()
        close_stores()


def _is_fork() -> bool:
    """Return True in a process that user code has forked from a rank."""
    return os.getpid() != _joined_by[0]


def _met(
    environment: RankEnvironment, device: torch.device, transport: str, deadline_s: float, number: int
) -> tuple[Store, tuple[str, str | None]]:
    """Return the rendezvous store, the transport that all ranks chose, and a note.

    A rank that joins again may reach the previous store, which rank 0 has not closed yet. The rank then retries.
    """
    until = time.monotonic() + deadline_s
    while True:
        try:
            store = rendezvous_store(environment, deadline_s, number)
            if is_accelerator(device):
                # ensures that all ranks meet at this store, and none at a store that is being closed
                tell_all(store, "here", environment.rank, environment.world_size, deadline_s, None)
                store, note = torchs_store(environment, store, deadline_s)
                return store, (default_backend(device), note)
            drop_torchs_port()
            return store, choose(store, environment.rank, environment.world_size, transport, deadline_s)
        except BaseException as error:
            close_stores()
            lost = isinstance(error, dist.DistNetworkError)
            if not lost or number == 0 or environment.rank == 0 or time.monotonic() > until:
                raise
            time.sleep(0.05)


def _keep_gloo_to_the_interface() -> None:
    """Make gloo listen on the cluster's interface.

    By default, gloo listens on the address of the host's name, also for groups that are created later.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := own_interface()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _hosts(group: Group) -> tuple[int, ...]:
    names = group.gather_json(host_identity())
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)
