"""Parameters of a rank: layouts of shards, ties between parameters, memory, and gradient hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import PlanError
from paceline.job.optimizer import OptimizerSpec
from paceline.planning.plan import Plan

Interval = tuple[int, int]  # (start, stop)
# sizes of the sections along a dimension, such as the sections for query, key and value
Sections = Sequence[int] | None


class Box(NamedTuple):
    """A block that is contiguous in a rank's shard and in the full tensor.

    `own` and `full` are the offsets of the block in the shard and in the full tensor.
    """

    own: tuple[int, ...]
    full: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, own: Tensor) -> Tensor:
        """Return the block as a view of `own`, the shard of the rank."""
        for dim, (start, length) in enumerate(zip(self.own, self.shape, strict=True)):
            own = own.narrow(dim, start, length)
        return own

    def within(self, full: Tensor) -> Tensor:
        """Return the block as a view of `full`, the full tensor."""
        for dim, (start, length) in enumerate(zip(self.full, self.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a rank's shard of a tensor with shape `full`.

    `kept[d]` lists the intervals of dimension d that the rank holds, in the order of the shard. A simple shard has one
    interval per dimension; a shard of a fused query-key-value matrix has three along one dimension. Splits can be
    combined, because each split divides the shard of the previous split.
    """

    full: tuple[int, ...]
    kept: tuple[tuple[Interval, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ShardLayout:
        """Return the layout of an undivided tensor."""
        return cls(tuple(shape), tuple(((0, n),) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's shard."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.kept)

    @property
    def is_whole(self) -> bool:
        """True if the rank holds the full tensor in the original order."""
        return self == ShardLayout.whole(self.full)

    @property
    def numel(self) -> int:
        """Number of elements that the rank holds."""
        return prod(self.shape)

    def divide(self, dim: int, index: int, of: int, sections: Sections = None) -> ShardLayout:
        """Return the layout of shard `index` of `of` equal shards along `dim`.

        If `sections` is given, each section is divided separately. The sizes of the sections must sum to the size of
        the shard along `dim`.

        Raises:
            ValueError: the size of a section is not a multiple of `of`.
        """
        kept: list[Interval] = []
        start = 0
        for size in sections or (self.shape[dim],):
            if size % of:
                raise ValueError(f"{size} is not a multiple of {of}")
            kept += self._intervals(dim, start + size // of * index, start + size // of * (index + 1))
            start += size
        if start != self.shape[dim]:
            raise ValueError(f"the sections sum to {start}, not to {self.shape[dim]}")
        return self._with(dim, kept)

    def narrow(self, dim: int, start: int, stop: int) -> ShardLayout:
        """Return the layout of an interval of this shard, from `start` to `stop` along `dim`."""
        return self._with(dim, self._intervals(dim, start, stop))

    def take(self, full: Tensor) -> Tensor:
        """Return the rank's shard of `full`, as a copy or a view."""
        if tuple(full.shape) != self.full:
            raise ValueError(f"the tensor has shape {tuple(full.shape)}, not {self.full}")
        for dim, intervals in enumerate(self.kept):
            blocks = [full.narrow(dim, start, stop - start) for start, stop in intervals or ((0, 0),)]
            full = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)
        return full

    def put(self, own: Tensor, full: Tensor) -> None:
        """Copy the rank's shard into its place in `full`."""
        for box in self.boxes():
            box.within(full).copy_(box.of(own))

    def boxes(self) -> Iterator[Box]:
        """Yield the contiguous blocks of the shard.

        An empty shard has no blocks, and a scalar has one block without dimensions.
        """
        if not self.numel:
            return
        # for each dimension: (start in the shard, start in the full tensor, length)
        placed: list[list[tuple[int, int, int]]] = []
        for intervals in self.kept:
            lengths = [stop - start for start, stop in intervals]
            starts = [start for start, _ in intervals]
            placed.append(list(zip(accumulate(lengths, initial=0), starts, lengths, strict=False)))
        for choice in product(*placed):
            own, full, shape = zip(*choice, strict=True) if choice else ((), (), ())
            yield Box(own, full, shape)

    def _intervals(self, dim: int, start: int, stop: int) -> list[Interval]:
        found: list[Interval] = []
        passed = 0
        for low, high in self.kept[dim]:
            a, b = max(start - passed, 0), min(stop - passed, high - low)
            if a < b:
                found.append((low + a, low + b))
            passed += high - low
        return found

    def _with(self, dim: int, intervals: Sequence[Interval]) -> ShardLayout:
        merged: list[Interval] = []
        for start, stop in intervals:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return replace(self, kept=(*self.kept[:dim], tuple(merged) or ((0, 0),), *self.kept[dim + 1 :]))


@dataclass
class Part:
    """One parameter, and the part of it that this rank holds.

    Attributes:
        name: name of the parameter in the undivided model. No split renames a module or parameter.
        layout: this rank's shard of the full parameter.
        sharded: the mesh axes along which ranks hold different shards. Along all other axes of a replica, ranks hold
            the same shard.
        summed: the axes along which gradients are partial sums (DTensor's `Partial`) until `Split.after_backward`
            reduces them.
        stages: number of pipeline stages that hold the parameter; 1 without a pipeline. A tied parameter may be in two
            stages.
        writes: True if this pipeline rank saves the parameter in checkpoints. If several stages hold the parameter,
            only one rank saves it.
    """

    name: str
    layout: ShardLayout
    sharded: set[str] = field(default_factory=set)
    summed: set[str] = field(default_factory=set)
    stages: int = 1
    writes: bool = True


Parts = dict[str, Part]


class WeightSource(Protocol):
    """Source of a model's tensors by name; each can be read in part."""

    def __iter__(self) -> Iterator[str]: ...

    def fill(self, name: str, own: Tensor, layout: ShardLayout | None = None) -> None:
        """Read a rank's part of a tensor into `own`, converting dtype and device.

        Without a layout, the whole tensor is read.
        """


def whole_parts(model: nn.Module) -> Parts:
    """List every parameter of an undivided model.

    A tied parameter is listed once, under its first name.
    """
    return {name: Part(name, ShardLayout.whole(p.shape)) for name, p in model.named_parameters()}


def first_names(named: Callable[..., Iterator[tuple[str, Tensor]]]) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of its tensor.

    Args:
        named: the method `named_parameters` or `named_buffers` of the model.
    """
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in named(remove_duplicate=False)}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the additional names of tied parameters and shared buffers to their saved names."""
    kinds = (("model", model.named_parameters), ("buffer", model.named_buffers))
    return {
        f"{kind}/{name}": f"{kind}/{first}"
        for kind, named in kinds
        for name, first in first_names(named).items()
        if name != first
    }


def shard_parameter(
    module: nn.Module, name: str, part: Part, *, axis: str, dim: int, index: int, of: int, sections: Sections = None
) -> None:
    """Replace a parameter of `module` with one of `of` shards, and record the division.

    The shard has number `index` along `dim`. A parameter on the meta device stays there. A real parameter is copied, so
    that the full parameter can be freed.

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
    """Return the local tensor of a parameter or gradient, such as a DTensor's shard."""
    # Without a DTensor, importing the class would take most of the time of a short run.
    tensors = sys.modules.get("torch.distributed.tensor")
    return parameter.to_local() if tensors is not None and isinstance(parameter, tensors.DTensor) else parameter


class StateBytes(NamedTuple):
    """Bytes of training state that a rank holds before the optimizer step.

    Activations and buffers are not included.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Total bytes of parameters, gradients and optimizer state."""
        return sum(self)


def held_bytes(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> StateBytes:
    """Count the bytes of training state that this rank holds, by storage.

    For an FSDP2 parameter, only the shard is counted. Memory that several tensors share is counted once.

    Args:
        parameters: all parameters of this rank, which may be DTensors.
        optimizer: the optimizer of the parameters or of their local tensors.
    """
    return StateBytes(*map(_bytes, state_tensors(parameters, optimizer)))


def state_tensors(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the parameters, their gradients, and the tensors of the optimizer's state."""
    own = list(parameters)
    gradients = [
        tensor
        for grad in (p.grad for p in own if p.grad is not None)
        for tensor in ((grad._values(), grad._indices()) if grad.is_sparse else (grad,))
    ]
    return own, gradients, [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)]


def predicted_bytes(
    parts: Parts,
    like: Mapping[str, Tensor],
    optimizer: OptimizerSpec,
    matrices: Collection[Tensor] = (),
    *,
    copies: int = 0,
) -> StateBytes:
    """Predict this rank's bytes of training state from the layouts of its parameters.

    The result is exact except for the padding of FSDP2. If a dimension cannot be divided evenly, the parameters and
    gradients of all ranks are padded to the size on the first rank.

    Args:
        parts: the parts of the parameters that this rank holds.
        like: the parameters, full or divided, on any device; only dtype and `requires_grad` are read.
        optimizer: the job's optimizer settings.
        matrices: entries of `like` that Muon updates, if it is the job's optimizer.
        copies: number of copies of the weights, such as a moving average, that are also stored.
    """
    parameters = gradients = state = 0
    for name, part in parts.items():
        own = part.layout.numel * like[name].element_size()
        parameters += own
        if like[name].requires_grad:
            gradients += own
            size, matrix = like[name].element_size(), like[name] in matrices
            state += own * copies + optimizer.state_bytes(part.layout.shape, size, matrix=matrix)
    return StateBytes(parameters, gradients, state)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def replace_tensors(
    model: nn.Module, parameter: Callable[[nn.Parameter], Tensor] | None, buffer: Callable[[Tensor], Tensor] | None
) -> None:
    """Replace the parameters and buffers of all modules in place; tied tensors stay tied."""
    made: dict[Tensor, Any] = {}  # tensors are hashed by identity
    for module in model.modules():
        tables: tuple[tuple[Any, Any], ...] = (module._parameters, parameter), (module._buffers, buffer)
        for tensors, make in tables:
            for name, old in tensors.items():
                if old is not None and make is not None:
                    if old not in made:
                        made[old] = make(old)
                    tensors[name] = made[old]


# torch.nn.RNNBase rebuilds its flat weights in a forward pass if the parameters were replaced
KEPT_UP_TO_DATE = ("_flat_weights",)


def carry_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    """Register the gradient hooks of a parameter on its replacement."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def hooked_parameters(model: nn.Module) -> dict[str, str]:
    """Map parameters that have gradient hooks to the torch method that registers such hooks."""
    found = {}
    for name, p in model.named_parameters():
        if p._backward_hooks:
            found[name] = "register_hook"
        if p._post_accumulate_grad_hooks:
            found[name] = "register_post_accumulate_grad_hook"
    return found


def refuse_lost_hooks(hooked: Mapping[str, str], parts: Parts, plan: Plan, shared: Collection[str]) -> None:
    """Raise an error for hooks that would get only a part of a gradient.

    All ranks make the same decision.

    Args:
        hooked: result of `hooked_parameters`.
        parts: the parts of all parameters, including the parameters of other pipeline stages.
        shared: names of the parameters that several stages hold.

    Raises:
        PlanError: a parameter with hooks is divided, or its gradient is summed after the backward pass.
    """
    for name, method in hooked.items():
        axes = {*parts[name].sharded, *parts[name].summed}
        if plan.fsdp > 1:
            axes.add("fsdp")
        if plan.pp > 1 and (name in shared or method == "register_post_accumulate_grad_hook"):
            axes.add("pp")
        if axes:
            raise PlanError(
                "plan.gradient_hook",
                "plan {plan}: {name} has a hook ({method}) that would get only a part of the gradient, because the "
                "gradient is divided or summed ({axes}). Use {advice}, or change the gradient at its origin with a "
                "hook on an activation or a torch.autograd.Function.",
                plan=plan,
                name=name,
                method=method,
                axes=sorted(axes),
                advice=" ".join(f"{axis}=1" for axis in sorted(axes)),
            )


def refuse_kept_parameters(model: nn.Module) -> None:
    """Raise an error if modules have parameters in plain attributes, which would become stale.

    Raises:
        PlanError: a module has a parameter in a plain attribute.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", *KEPT_UP_TO_DATE):
                continue
            for held in _parameters_in(value):
                if id(held) in names:
                    raise PlanError(
                        "plan.parameter_kept_twice",
                        "{module} also keeps the parameter {name} in its attribute {attribute}. A plan that divides "
                        "the model replaces the parameter with a part, but this attribute would keep the whole "
                        "parameter. Look up parameters when they are needed (list(self.parameters()) in forward), or "
                        "do not divide the model (dp only).",
                        module=path or "the model",
                        name=names[id(held)],
                        attribute=key,
                    )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif type(value) in (list, tuple, dict, set):
        entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for entry in entries:
            yield from _parameters_in(entry)
