"""Memory of a rank by part, from its tensors and the statistics of the allocator."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.comm.group import Bucket
from paceline.device import Memory
from paceline.split.layout import local, state_tensors

if TYPE_CHECKING:
    from paceline.engine.engine import RankEngine


def tensor_bytes(engine: RankEngine) -> dict[str, int]:
    """Count the bytes of a rank's tensors on its device by part, each storage once.

    Gradients in buckets count as gradients. Communication is the parameters that FSDP2 has gathered now, the rest of
    the buckets, and the other tensors of the sync rule. The parts are those of `planning.cost.memory.PARTS`.
    """
    parameters, gradients, optimizer = state_tensors(engine.named_parameters().values(), engine.optimizer)
    gathered, accumulated = _of_fsdp(engine)
    of_rule = list(_of_rule(engine.rule, {id(engine.replica)}))
    buckets = [one for one in of_rule if isinstance(one, Bucket)]
    counted: set[int] = set()

    def size(tensors: Iterable[Tensor]) -> int:
        total = 0
        for storage in (local(tensor).untyped_storage() for tensor in tensors):
            if storage.device.type == engine.device.type and storage._cdata not in counted:
                counted.add(storage._cdata)
                total += storage.nbytes()
        return total

    weights = size([*parameters, *engine.model.parameters(), *engine.model.buffers()])
    flat = [size([bucket.flat]) for bucket in buckets]
    own = sum(min(whole, bucket.gradients.nbytes) for whole, bucket in zip(flat, buckets, strict=True))
    return {
        "weights": weights,
        "gradients": own + size([*gradients, *accumulated]),
        "optimizer": size(optimizer),
        "communication": sum(flat) - own + size([*gathered, *(one for one in of_rule if isinstance(one, Tensor))]),
    }


def _of_rule(part: object, seen: set[int]) -> Iterator[Bucket | Tensor]:
    """Yield the buckets and tensors of a sync rule, including those of its own objects."""
    for one in tree_leaves(getattr(part, "__dict__", {})):
        if isinstance(one, Bucket | Tensor):
            yield one
        elif type(one).__module__.startswith("paceline.sync") and id(one) not in seen:
            seen.add(id(one))
            yield from _of_rule(one, seen)


def _of_fsdp(engine: RankEngine) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gathered parameters of FSDP2, and the accumulated gradients of gathered parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it would take seconds
    modules = [m for m in engine.model.modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)]
    # as in `split.fsdp`, because gathered parameters have no public name
    groups: list[Any] = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    held = [one for group in groups for one in group.fsdp_params]
    fully = None if engine.split is None else engine.split.fully
    gradients = [] if fully is None else fully.whole_gradients()
    return [tensor for one in held for tensor in one.all_gather_outputs], gradients


def measured_parts(tensors: Mapping[str, int], counted: Memory | None) -> dict[str, int]:
    """Add the parts of a device's peak to the bytes of tensors.

    The peak without these tensors counts as activations. On CPUs, the allocator does not count, so no parts are added.
    """
    if counted is None:
        return dict(tensors)
    activations, cache = counted.peak - sum(tensors.values()), counted.peak_reserved - counted.peak
    return {**tensors, "activations": max(activations, 0), "cache": max(cache, 0)}
