"""Memory for a model that was built and divided on the meta device.

Only this rank's parts are allocated; nothing is read or initialised.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.split.parameter_hooks import carry_hooks


def allocate(module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Give every parameter and buffer of `module` memory on `device`.

    Meta tensors become uninitialised tensors of the same shape, to be filled through `paceline.split.parts.local`; real
    buffers and parameters keep their values and move. A tensor that is used in several places stays one tensor and
    keeps its attributes. `local` of an FSDP2 parameter must be called after this: FSDP2 pads uneven shards and so
    replaces their memory once more.

    Args:
        module: plain, or sharded by `shard_fully`.
        device: the device that the rank computes on.
        offload: put FSDP2's shards in host memory instead (`CPUOffloadPolicy` demands it); all other tensors still go
            to `device`.
    """
    sharded_on = torch.device("cpu") if offload else device
    made: dict[Tensor, Tensor] = {}  # tensors are hashed by identity
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                submodule._parameters[name] = _parameter(parameter, device, sharded_on, made)
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = made.setdefault(buffer, _on(buffer, device))
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            # FSDP2 looks up its shards anew after every `_apply`
            submodule._apply(_identity, recurse=False)


def _parameter(
    parameter: nn.Parameter, device: torch.device, sharded_on: torch.device, made: dict[Tensor, Tensor]
) -> nn.Parameter:
    if parameter in made:
        return made[parameter]  # type: ignore[return-value]
    sharded = isinstance(parameter, DTensor)
    own = _on(parameter.detach(), sharded_on if sharded else device)
    new = nn.Parameter(own, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    if sharded:  # FSDP2 holds this very object
        torch.utils.swap_tensors(parameter, new)
        new = parameter
    else:
        carry_hooks(parameter, new)
    made[parameter] = made[new] = new
    return new


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
