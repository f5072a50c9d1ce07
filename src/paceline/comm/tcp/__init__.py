"""Collectives and messages between hosts over TCP, as the backend `tcp` of `torch.distributed`.

Importing this module registers the backend: `dist.init_process_group("tcp", …)`. A lost connection is replaced without
losing or repeating bytes. A group whose ranks are all on one host uses shared memory if available.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from paceline.comm.shm import ShmProcessGroup
from paceline.comm.tcp.process_group import TcpProcessGroup
from paceline.comm.transport import SEVERAL_HOSTS, why_not_shared

__all__ = ["TcpProcessGroup", "create"]


def create(options: Any, known: Any) -> TcpProcessGroup | ShmProcessGroup:
    """Create a process group from `pg_options` and the options that torch passes to a backend."""
    store, rank, size = options.store, options.group_rank, options.group_size
    spread = known == SEVERAL_HOSTS
    shared = not spread and why_not_shared(store, rank, size, options.timeout.total_seconds()) is None
    kind = ShmProcessGroup if shared else TcpProcessGroup
    return kind(store, rank, size, options.timeout, options.group_id)


if not hasattr(dist.Backend, "TCP"):
    dist.Backend.register_backend("tcp", create, extended_api=True, devices=["cpu"])
