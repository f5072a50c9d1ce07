"""The part of each parameter that a rank holds, for the engine, norms and checkpoints."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from torch import Tensor, nn

from paceline.split.layout import ShardLayout


@dataclass
class Part:
    """One parameter as this rank holds it.

    Attributes:
        name: its name in the undivided model. No split renames a module or parameter.
        layout: this rank's shard of the full parameter.
        sharded: the mesh axes along which the ranks hold different shards. Along all others of a replica they hold the
            same one.
        summed: the axes along which gradients are partial sums (DTensor's `Partial`) until `Split.after_backward`
            reduces them.
        stages: number of pipeline stages that hold it (a tied parameter may be in two); 1 without a pipeline.
        writes: True if this pipeline rank saves it, where several stages hold it.
    """

    name: str
    layout: ShardLayout
    sharded: set[str] = field(default_factory=set)
    summed: set[str] = field(default_factory=set)
    stages: int = 1
    writes: bool = True


Parts = dict[str, Part]


def whole_parts(model: nn.Module) -> Parts:
    """Every parameter of a model, undivided; a tied one once, under its first name."""
    return {name: Part(name, ShardLayout.whole(p.shape)) for name, p in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and shared buffers, each with the name that is saved."""
    further: dict[str, str] = {}
    for kind, named in (("model", model.named_parameters), ("buffer", model.named_buffers)):
        first: dict[Tensor, str] = {}
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(tensor, name) != name:
                further[f"{kind}/{name}"] = f"{kind}/{first[tensor]}"
    return further


def shard_parameter(
    module: nn.Module,
    name: str,
    part: Part,
    *,
    axis: str,
    dim: int,
    index: int,
    of: int,
    sections: tuple[int, ...] | None = None,
) -> None:
    """Replace parameter `name` of `module` by part `index` of `of` along `dim`, and note it.

    A parameter on the meta device stays there; a real one is copied, so that the full one can be freed.

    Raises:
        ValueError: the size of `dim` (or of one of its sections) is not a multiple of `of`.
    """
    parameter: Tensor = getattr(module, name)
    one = ShardLayout.whole(parameter.shape).divide(dim, index, of, sections)
    own = nn.Parameter(one.take(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    part.layout = part.layout.divide(dim, index, of, sections)
    part.sharded.add(axis)
    setattr(module, name, own)


def local(parameter: Tensor) -> Tensor:
    """The local memory of a parameter or gradient: a DTensor's shard, or the tensor itself."""
    # Where nothing has made a DTensor, their import would take most of a short run's time.
    tensors = sys.modules.get("torch.distributed.tensor")
    return parameter.to_local() if tensors is not None and isinstance(parameter, tensors.DTensor) else parameter
