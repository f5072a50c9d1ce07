"""The process group for the CPU that carries what `simccl` moves."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from simulated.environment import INNER


def inner_group(options: Any) -> Any:
    """A process group from the options that torch gives a backend: paceline's over shared memory or TCP, or gloo.

    Raises:
        ValueError: the environment names another one.
    """
    kind = os.environ.get(INNER) or "shm"
    if kind == "shm":
        from paceline.comm import shm

        return shm.create(options, None)
    if kind == "tcp":
        from paceline.comm import tcp

        return tcp.create(options, None)
    if kind == "gloo":
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    raise ValueError(f"{INNER}={kind}: it is shm, tcp or gloo")
