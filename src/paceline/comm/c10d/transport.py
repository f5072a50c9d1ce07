"""Transport of a group of ranks: its name and its memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.job.spec import load_object
from paceline.planning.transport_info import TRANSPORTS


class Transport:
    """Transport behind a `Group`; this base is that of torch's own process groups.

    A process group of paceline, or of another package, that has memory of its own returns a subclass as its attribute
    `transport`.

    Attributes:
        name: as in a plan (`shm`, `tcp`, `gloo`), or torch's name of an accelerator's.
        shares_memory: True if tensors from `empty` lie in memory that all ranks share.
        unauthenticated: connections without the run's key that this rank has turned away so far.
    """

    shares_memory = False
    unauthenticated = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor of zeros in the transport's memory; None where it has none. All ranks ask for it together."""
        return None

    def release(self, tensor: Tensor) -> None:
        """Free a tensor from `empty`."""

    def place_of(self, tensor: Tensor) -> tuple[int, int]:
        """Arena and byte offset of a contiguous tensor; arena 0 is no shared memory.

        They are equal on ranks whose tensors have the same place.
        """
        return 0, 0

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' memory at the place of this rank's tensor, where memory is shared."""
        raise NotImplementedError(f"{self.name} shares no memory")


def transport_of(group: dist.ProcessGroup | None) -> Transport:
    """Transport of a process group; `none` without one, as a rank alone."""
    if group is None:
        return Transport("none")
    own = getattr(group, "transport", None)
    return own if isinstance(own, Transport) else Transport(dist.get_backend(group))


def register(name: str) -> None:
    """Register a plan's transport with torch, so that `new_group` takes its name.

    Raises:
        PlanError: it is another package's, and its description cannot be loaded.
        JobError: what it names cannot be imported.
    """
    # Packages are not looked for where the name is built in.
    known = name in TRANSPORTS.built_in or name in TRANSPORTS.installed
    if not known or (path := TRANSPORTS[name].backend) is None:
        return
    create = load_object(path)
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
