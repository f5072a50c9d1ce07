"""The protocol of a synchronisation rule, and its view of a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm import Group
from paceline.errors import SyncError
from paceline.sync.traffic import Traffic


class Reduction(NamedTuple):
    """Result of `SyncRule.after_backward`.

    Attributes:
        gradients: tensors that hold every gradient of this rank once; flat buffers where the rule has them.
        scalars: the engine's numbers, summed over the replicas where `everywhere`. The tensor that the rule was given,
            or one of the same length in its own buffer: the engine then writes the next step's numbers there.
        everywhere: True if gradients (for a rule that sends them) and scalars are sums over all replicas.
    """

    gradients: list[Tensor]
    scalars: Tensor
    everywhere: bool = True


@dataclass
class BackwardPass:
    """Settings of the backward pass under way.

    The engine writes them, hooks of a rule read them.

    Attributes:
        gradients: collected by the rule, kept in `.grad` until a later pass, or refused, since the engine did not start
            the pass.
        last: True for the last pass before `after_backward` (gradient accumulation has several).
        only: the parameters that the passes since the last reduction were for, identical on all ranks; None: any of
            them.
    """

    gradients: Literal["collected", "kept", "refused"] = "collected"
    last: bool = True
    only: set[Tensor] | None = None


@dataclass(frozen=True)
class Replica:
    """One full copy of the model, as a rule sees it from one rank.

    Attributes:
        model: the module whose parameters and buffers this rank holds.
        dp: the ranks that hold the same part of the other replicas.
        scalar_count: length of the tensor of scalars that travels with the gradients.
        parameters: what this rank holds of the model's parameters where that is divided: plain tensors, whose gradients
            are complete only when `after_backward` is called. None: the model's own, whose gradients are complete as
            the backward pass makes them.
        inner: the ranks that hold this replica together; this rank alone where it holds all of it.
        world: all ranks; `world.host` are those on this rank's host.
        extra: parameters and buffers outside of the model that are trained with it (of a loss module, of an optimizer).
        owner: which optimizer steps on a parameter, by number, where there are several; buckets hold parameters of one
            owner.
        rows: tables whose gradients are sparse, for rules that take them (`SyncInfo.takes_rows`).
        identical: True if the replicas have the same parameters already, so that `broadcast_state` has nothing to do.
        backward: the backward pass under way.
        traffic: what the rule sent so far; it keeps the count.
        log: takes a line for the record of the run, e.g. which algorithm the rule took and why.
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
        """The parameters that get gradients."""
        held = self.model.parameters() if self.parameters is None else self.parameters
        extra = (p for p in self.extra if isinstance(p, nn.Parameter))
        return [p for p in (*held, *extra) if p.requires_grad]

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter and buffer that this rank holds."""
        yield from self.model.parameters() if self.parameters is None else self.parameters
        yield from self.model.buffers()
        yield from self.extra


def not_by_the_engine() -> SyncError:
    """The error for gradients of a plain `loss.backward()`, which would stay those of one rank."""
    return SyncError(
        "loss.backward() makes the gradients of this rank's samples only, and the ranks would train independently. "
        "Write engine.backward(loss) in its place (or engine.step(batch)); for gradients that train nothing, use "
        "torch.autograd.grad"
    )


def acts_after_step(rule: SyncRule) -> bool:
    """True if a rule has an `after_step` of its own."""
    return getattr(rule.after_step, "__func__", None) is not SyncRule.after_step


class SyncRule(Protocol):
    """A synchronisation rule, which keeps replicas in agreement.

    There is one instance per rank, called by the engine, never by user code. A rule that inherits from this class needs
    to write `attach`, `after_backward` and what else it does: the other methods do nothing by themselves.
    """

    def attach(self, replica: Replica) -> None:
        """Broadcast the first replica's weights (`broadcast_state`), and register for gradients."""

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        """Replace local gradients by their sums over all replicas, and sum `scalars` with them.

        Local gradients are scaled so that their sum is the gradient of the global batch. A rule whose replicas take
        steps of their own leaves them as they are.

        Args:
            step: the optimizer step under way, from 1.
            scalars: 1-D, float64 at first; the engine's numbers (loss, votes, times), which need no collective of their
                own.
        """
        raise NotImplementedError

    def step_optimizer(self, optimizer: Optimizer) -> None:
        """Update the parameters by their gradients."""
        optimizer.step()

    def after_step(self, step: int) -> None:
        """Replace local parameters by agreed ones, for rules that agree on parameters.

        `step` counts optimizer steps from 1.
        """
        return

    def in_agreement(self) -> AbstractContextManager[None]:
        """Context in which every replica has the parameters that all agree on.

        Afterwards it has its own again. Every rank enters it, for measuring and saving. Rules whose replicas never
        differ have nothing to do.
        """
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run: JSON values and tensors of this rank.

        JSON values are the same on all ranks; tensors are error feedback or momentum. Tensors return only on the same
        mesh; on another one, `load_state_dict` gets the JSON values alone.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier run."""
        return

    def detach(self) -> None:
        """Release the model: remove hooks and views, end threads."""
        return
