"""Start of a rule: made from the plan's words, and given a replica.

All replicas begin with the first one's values for the same parameters; names, shapes and dtypes are compared first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.comm.agree import agree_on
from paceline.comm.checked import CheckedGroup
from paceline.errors import JobError, PlanError
from paceline.job.spec import load_object
from paceline.planning.plan import Plan
from paceline.planning.sync_info import RULES, SyncSpec
from paceline.sync.rule import Replica, SyncRule

_TOGETHER_BYTES = 25 * 2**20


def broadcast_state(replica: Replica) -> None:
    """Give every replica the weights and buffers of the first; every rule's `attach` begins so.

    Raises:
        SyncError: the replicas hold different parameters; names the first that differs, with both ranks' shape and
            dtype.
    """
    if replica.dp.size == 1 or replica.identical:
        return
    if not replica.dp.is_fake:
        agree_on(replica.dp, _descriptions(replica))
    broadcast_tensors(replica.dp, [tensor.detach() for tensor in replica.tensors()], root=0)


def broadcast_tensors(group: Group, tensors: Iterable[Tensor], root: int) -> None:
    """Replace tensors on every rank by those of rank `root`. Many small ones go in one collective.

    They may lie on other devices than the group's.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        for together in _in_parts(alike):
            flat = torch.cat([t.reshape(-1).to(group.device) for t in together])
            group.broadcast(flat, root)
            for tensor, part in zip(together, flat.split([t.numel() for t in together]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _descriptions(replica: Replica) -> list[str]:
    """A line per parameter and buffer, in order."""
    names = {id(t): name for name, t in (*replica.model.named_parameters(), *replica.model.named_buffers())}
    return [
        f"{names.get(id(tensor), f'tensor {i}')} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + ("" if tensor.requires_grad else " without gradient")
        for i, tensor in enumerate(replica.tensors())
    ]


def _in_parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of neighbouring tensors of some megabytes, which avoids a second copy of the model."""
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        part.append(tensor)
        size += tensor.nbytes
        if size >= _TOGETHER_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def build_rule(plan: Plan) -> SyncRule:
    """The rule that a plan names, not yet attached to a replica.

    Raises:
        PlanError: another package's rule cannot be imported, or does not take its arguments.
    """
    spec = SyncSpec.parse(plan.sync)
    info, arguments = spec.info, dict(spec.arguments)
    first = [arguments.pop("")] if "" in arguments else []
    if info.compresses:
        arguments["compress"] = plan.compress
    try:
        rule: SyncRule = load_object(info.rule)(*first, **arguments)
    except (JobError, TypeError, ValueError) as error:
        raise PlanError(f"sync={spec.name}: the rule {info.rule} cannot be made: {error}") from error
    return rule


def attach(rule: SyncRule, replica: Replica, plan: Plan) -> None:
    """Hand a replica to the rule of its plan.

    Every call of another package's rule is compared over the ranks before it starts.

    Raises:
        SyncError: the replicas hold different parameters.
    """
    # in a dry run no rank answers, so there is nothing to compare
    if SyncSpec.parse(plan.sync).name not in RULES.built_in and not replica.world.is_fake:
        dp, inner, world = (CheckedGroup.of(group) for group in (replica.dp, replica.inner, replica.world))
        replica = replace(replica, dp=dp, inner=inner, world=world)
    rule.attach(replica)
