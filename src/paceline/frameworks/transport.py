"""The process group of ranks that another launcher has started: torchrun, `accelerate launch`, Lightning."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from paceline.comm.process_group import register
from paceline.device import accelerator_type, default_backend, use
from paceline.errors import LaunchError
from paceline.planning.sync_info import BETWEEN_HOSTS, WITHIN_HOST
from paceline.rank_environment import LOCAL_RANK, WORLD_SIZE


def cpu_backend(*, one_host: bool) -> str:
    """Backend for ranks on CPUs, known to torch now: `shm` on one host, else `tcp`."""
    backend = WITHIN_HOST if one_host else BETWEEN_HOSTS
    register(backend)
    return backend


def init_process_group(**options: Any) -> None:
    """`torch.distributed.init_process_group` over paceline's transports, if the ranks are on CPUs.

    Frameworks use a process group that is there already, so call it before them. On accelerators the backend is
    torch's own. Alone, without a launcher, it does nothing.

    Args:
        options: passed on, e.g. `timeout`.

    Raises:
        LaunchError: there is a process group already.
        ClusterError: the ranks cannot share memory.
    """
    ranks = int(os.environ.get(WORLD_SIZE, "1"))
    if ranks == 1:
        return
    if dist.is_initialized():
        raise LaunchError(
            f"there is a process group over {dist.get_backend()} already: call init_process_group before the "
            "framework makes its own, e.g. before Accelerator() or TrainingArguments()"
        )
    if accelerator_type() is not None:
        device = use(int(os.environ.get(LOCAL_RANK, "0")))
        dist.init_process_group(default_backend(device), **options)
        return
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    dist.init_process_group(cpu_backend(one_host=on_this_host == ranks), **options)
