"""A simulated accelerator on CPU memory, for tests: torch's device `sim`, with streams that run as late as they may.

A missing synchronisation is then a wrong number at once. Read `csrc/streams.cpp` first, then `collectives.py`. A
process gets the device by `load`; commands and ranks that are started with `environment.simulated_environment` load it
as soon as they import torch.
"""

from __future__ import annotations

import os

LOADED = "PACELINE_SIMULATED"
"""Set to 1: whoever imports torch gets the device `sim`."""


def load() -> None:
    """Register the device `sim` and its collective library `simccl` with this process's torch, for good.

    Raises:
        RuntimeError: it is not built; see `build.py`.
    """
    from simulated import collectives, device

    device.register()
    collectives.register()


def load_if_asked() -> bool:
    """Call `load` where the environment says so; costs nothing elsewhere. Returns True if the device is there."""
    if os.environ.get(LOADED) != "1":
        return False
    load()
    return True
