"""Collectives and messages over shared memory of one host, as a backend of `torch.distributed`.

Importing this module registers the backend: `dist.init_process_group("shm", …)`. DDP, FSDP2, DTensor, DeviceMesh and
pipelines run over this backend without changes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from paceline.comm.shm.process_group import ShmProcessGroup

__all__ = ["ShmProcessGroup", "create"]


def create(options: Any, _: Any) -> ShmProcessGroup:
    """Create a process group from the options that torch passes to a backend."""
    return ShmProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


if not hasattr(dist.Backend, "SHM"):
    dist.Backend.register_backend("shm", create, extended_api=True, devices=["cpu"])
