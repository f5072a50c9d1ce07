"""The protocol of a synchronization rule, the data of a rule, and its start.

All replicas begin with the first replica's values. First, the ranks compare names, shapes and dtypes of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.checks import CheckedGroup, check_equal
from paceline.comm.group import Group
from paceline.direct_calls import take_step
from paceline.errors import JobError, PlanError, SyncError
from paceline.job.spec import load_object
from paceline.planning.plan import Plan
from paceline.planning.sync_info import RULES, SyncSpec


class Reduction(NamedTuple):
    """Result of `SyncRule.after_backward`.

    Attributes:
        gradients: tensors with all gradients of this rank, each contained once; flat buffers if the rule uses them.
        scalars: the engine's scalars, summed over the replicas if `everywhere` is True. This is the tensor that the
            rule received, or a tensor of the same length in the rule's buffer. The engine writes the next step's
            scalars to this tensor.
        everywhere: True if the scalars, and the gradients if the rule sends gradients, are sums over all replicas.
        sparse: parameters with sparse gradients, which are not in `gradients` and may contain a row several times.
    """

    gradients: list[Tensor]
    scalars: Tensor
    everywhere: bool = True
    sparse: Sequence[nn.Parameter] = ()


@dataclass
class Traffic:
    """Traffic counters of one rank since the start of the run.

    Attributes:
        sent_bytes: bytes that the rule has sent.
        plain_bytes: bytes that an uncompressed all-reduce of the same tensors in their own dtype would send.
        error_square: sum of the squared L2 norms of compression errors, before error feedback.
        signal_square: sum of the squared L2 norms of the tensors before compression.
    """

    sent_bytes: int = 0
    plain_bytes: int = 0
    error_square: float = 0.0
    signal_square: float = 0.0

    @contextmanager
    def counting(self, group: Group, plain_bytes: int | None = None) -> Iterator[None]:
        """Count the bytes that this rank sends over a group within this context.

        Args:
            plain_bytes: bytes that an uncompressed all-reduce would send; None means the bytes that are sent.
        """
        before = group.sent_bytes
        yield
        sent = group.sent_bytes - before
        self.add(sent, sent if plain_bytes is None else plain_bytes)

    def add(self, sent_bytes: int, plain_bytes: int) -> None:
        """Count the bytes of one sum."""
        self.sent_bytes += sent_bytes
        self.plain_bytes += plain_bytes

    def become(self, parts: Iterable[Traffic]) -> None:
        """Set these counters to the sum of several parts."""
        parts = list(parts)
        for each in fields(self):
            setattr(self, each.name, sum(getattr(part, each.name) for part in parts))

    @property
    def relative_error(self) -> float:
        """L2 norm of the compression error relative to the data; 0 without compression."""
        return (self.error_square / self.signal_square) ** 0.5 if self.signal_square > 0 else 0.0


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce: 2 (n - 1) / n of `nbytes`."""
    return 2 * (ranks - 1) * nbytes // ranks


_TOGETHER_BYTES = 25 * 2**20


@dataclass
class BackwardPass:
    """Settings of the current backward pass.

    The engine writes these settings, and the gradient hooks of a rule read them.

    Attributes:
        gradients: `collected` by the rule, `kept` in `.grad` until a later pass, or `refused` if the engine did not
            start the pass.
        last: True for the last pass before `after_backward` (gradient accumulation has several).
        only: the parameters that got gradients since the last reduction, identical on all ranks; None if every
            parameter may get a gradient.
    """

    gradients: Literal["collected", "kept", "refused"] = "collected"
    last: bool = True
    only: set[Tensor] | None = None


@dataclass(frozen=True)
class Replica:
    """A full copy of the model, as a rule on one rank sees it.

    Attributes:
        model: the module with this rank's parameters and buffers.
        dp: this rank and the ranks of the other replicas that hold the same part of the model.
        scalar_count: length of the tensor of scalars that is reduced together with the gradients.
        parameters: this rank's parts of a divided model's parameters, as plain tensors. Their gradients are complete
            only when `after_backward` is called. None means the model's own parameters, whose gradients are complete as
            soon as the backward pass computes them.
        inner: the ranks of this replica; only this rank if it holds the whole replica.
        world: all ranks; `world.host` is the group of the ranks on this rank's host.
        extra: parameters and buffers outside of the model that are trained with the model, such as parameters of a loss
            module.
        owner: index of each parameter's optimizer, if there are several optimizers. A bucket contains only parameters
            of one optimizer.
        rows: tables with sparse gradients, for rules that support them (`SyncInfo.takes_rows`).
        identical: True if the replicas already have the same parameters and `broadcast_state` need not broadcast them.
        backward: the current backward pass.
        traffic: traffic counters, which the rule updates.
        log: function that adds a line to the run's record, such as the choice of an algorithm.
    """

    model: nn.Module
    dp: Group
    scalar_count: int = 0
    parameters: list[nn.Parameter] | None = None
    inner: Group = field(default_factory=Group)
    world: Group = field(default_factory=Group)
    extra: list[Tensor] = field(default_factory=list)
    owner: dict[Tensor, int] = field(default_factory=dict)
    rows: set[Tensor] = field(default_factory=set)
    identical: bool = False
    backward: BackwardPass = field(default_factory=BackwardPass)
    traffic: Traffic = field(default_factory=Traffic)
    log: Callable[[str], object] = lambda line: None

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters that get gradients."""
        held = self.model.parameters() if self.parameters is None else self.parameters
        extra = (p for p in self.extra if isinstance(p, nn.Parameter))
        return [p for p in (*held, *extra) if p.requires_grad]

    def tensors(self) -> Iterator[Tensor]:
        """All parameters and buffers that this rank holds."""
        yield from self.model.parameters() if self.parameters is None else self.parameters
        yield from self.model.buffers()
        yield from self.extra


def not_by_the_engine() -> SyncError:
    """Return the error for a plain `loss.backward()`, whose gradients would not be reduced."""
    return SyncError(
        "loop.plain_backward",
        "loss.backward() computes only the gradients of this rank's samples, so the ranks would train "
        "independently. Call engine.backward(loss) instead (or engine.step(batch)). For gradients that are not "
        "used for training, use torch.autograd.grad.",
    )


def acts_after_step(rule: SyncRule) -> bool:
    """Return True if a rule overrides `after_step`."""
    return getattr(rule.after_step, "__func__", None) is not SyncRule.after_step


class SyncRule(Protocol):
    """A synchronization rule, which keeps replicas consistent.

    Each rank has one instance. The engine calls the instance; user code never does. A subclass must implement `attach`
    and `after_backward`. The other methods do nothing by default.
    """

    def attach(self, replica: Replica) -> None:
        """Broadcast the first replica's weights (`broadcast_state`), and register gradient hooks."""

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        """Replace local gradients with their sums over all replicas, and also sum `scalars`.

        Local gradients are scaled so that their sum is the gradient of the global batch. A rule whose replicas take
        local steps does not change the gradients.

        Args:
            step: number of the current optimizer step, counted from 1.
            scalars: the engine's scalars (loss, votes, times), 1-D and initially float64. Summing the scalars together
                with the gradients saves a collective.
        """
        raise NotImplementedError

    def step_optimizer(self, optimizer: Optimizer) -> None:
        """Update the parameters with their gradients."""
        take_step(optimizer)

    def after_step(self, step: int) -> None:
        """Replace local parameters with shared parameters, in rules that average parameters.

        `step` counts optimizer steps from 1.
        """
        return

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which every replica has the shared parameters.

        After the context, each replica has its own parameters again. Every rank must enter this context for evaluations
        and checkpoints. If the rule keeps replicas equal at every step, the context has no effect.
        """
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run: JSON values and tensors of this rank.

        JSON values are the same on all ranks. Tensors are, for example, error feedback or momentum, and are restored
        only on the same mesh. On another mesh, `load_state_dict` receives only the JSON values.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier run."""
        return

    def detach(self) -> None:
        """Release the model: remove hooks and views, and end threads."""
        return


def broadcast_state(replica: Replica) -> None:
    """Broadcast the first replica's weights and buffers; every rule's `attach` calls this first.

    Raises:
        SyncError: the replicas have parameters of different names, shapes or dtypes. The message shows the first
            difference.
    """
    if replica.dp.size == 1 or replica.identical:
        return
    if not replica.dp.is_fake:
        check_equal(replica.dp, _descriptions(replica))
    broadcast_tensors(replica.dp, [tensor.detach() for tensor in replica.tensors()], root=0)


def broadcast_tensors(group: Group, tensors: Iterable[Tensor], root: int) -> None:
    """Replace tensors on every rank with the tensors of rank `root`.

    Small tensors share a collective. The tensors may be on a different device than the group's device.
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
    names = {id(t): name for name, t in (*replica.model.named_parameters(), *replica.model.named_buffers())}
    return [
        f"{names.get(id(tensor), f'tensor {i}')} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + ("" if tensor.requires_grad else " without gradient")
        for i, tensor in enumerate(replica.tensors())
    ]


def _in_parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of neighbouring tensors with a few megabytes each.

    Small groups avoid a second copy of the model.
    """
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
    """Build the rule that a plan names, not yet attached to a replica.

    Raises:
        PlanError: a rule of another package cannot be imported, or does not accept its arguments.
    """
    spec = SyncSpec.parse(plan.sync)
    info, arguments = spec.info, dict(spec.arguments)
    first = [arguments.pop("")] if "" in arguments else []
    if info.compresses:
        arguments["compress"] = plan.compress
    try:
        rule: SyncRule = load_object(info.rule)(*first, **arguments)
    except (JobError, TypeError, ValueError) as error:
        raise PlanError(
            "plan.rule_not_made",
            "sync={name}: the rule {rule} cannot be created: {error}",
            name=spec.name,
            rule=info.rule,
            error=error,
        ) from error
    return rule


def attach(rule: SyncRule, replica: Replica, plan: Plan) -> None:
    """Attach a replica to a sync rule.

    If the rule comes from another package, the ranks compare every collective call before it starts.

    Raises:
        SyncError: the replicas hold different parameters.
    """
    # in a dry run no rank answers, so calls cannot be compared
    if SyncSpec.parse(plan.sync).name not in RULES.built_in and not replica.world.is_fake:
        dp, inner, world = (CheckedGroup.of(group) for group in (replica.dp, replica.inner, replica.world))
        replica = replace(replica, dp=dp, inner=inner, world=world)
    rule.attach(replica)
