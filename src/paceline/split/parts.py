"""What every split notes about the parameters that it divides, and what the engine, the norms and the checkpoints read."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from paceline.split.layout import Layout


@dataclass
class Part:
    """One parameter as this rank holds it.

    Attributes:
        name: its name in the undivided model. No split renames a module or parameter.
        layout: which part of the full parameter this rank holds.
        sharded: the mesh axes along which the ranks hold different parts. Along all others of a replica they hold the same.
        summed: the axes along which the gradients that the backward pass leaves are only addends, and `Split.after_backward` sums them.
        stages: how many pipeline stages hold it (a tied parameter may live on two); 1 where there is no pipeline.
        writes: whether this pipeline rank is the one that saves it, where several stages hold it.
    """

    name: str
    layout: Layout
    sharded: set[str] = field(default_factory=set)
    summed: set[str] = field(default_factory=set)
    stages: int = 1
    writes: bool = True


Parts = dict[str, Part]


def whole_parts(model: nn.Module) -> Parts:
    """Every parameter of a model, undivided; a tied one once, under its first name."""
    return {name: Part(name, Layout.whole(p.shape)) for name, p in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of tied parameters and shared buffers, each with the name under which the tensor is saved."""
    further: dict[str, str] = {}
    for kind, named in (("model", model.named_parameters), ("buffer", model.named_buffers)):
        first: dict[Tensor, str] = {}
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(tensor, name) != name:
                further[f"{kind}/{name}"] = f"{kind}/{first[tensor]}"
    return further


def shard_parameter(
    module: nn.Module, name: str, part: Part, *, axis: str, dim: int, index: int, of: int, sections: tuple[int, ...] | None = None
) -> None:
    """Replace parameter `name` of `module` by its part `index` of `of` along `dim`, and note it in `part`.

    A parameter on the meta device stays there; a real one is copied, so that the full one can go.

    Raises:
        ValueError: `dim` (or one of its sections) is no multiple of `of`.
    """
    parameter: Tensor = getattr(module, name)
    one = Layout.whole(parameter.shape).divide(dim, index, of, sections)
    own = nn.Parameter(one.take(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    part.layout = part.layout.divide(dim, index, of, sections)
    part.sharded.add(axis)
    setattr(module, name, own)


def local(parameter: Tensor) -> Tensor:
    """The memory that this rank holds of a parameter or gradient: that of a DTensor's shard, or the tensor itself."""
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
