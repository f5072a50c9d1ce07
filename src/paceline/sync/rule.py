"""The protocol of a synchronisation rule, and its view of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from paceline.comm import Group
from paceline.errors import SyncError
from paceline.sync.traffic import Traffic


@dataclass
class Replica:
    """One full copy of the model, as a rule sees it from one rank.

    Attributes:
        model: the module whose parameters and buffers this rank holds.
        dp: the ranks that hold the same part of the other replicas.
        parameters: what this rank holds of the model's parameters where that is divided: plain tensors, whose gradients are complete only
            when `after_backward` is called. None: the model's own, whose gradients are complete as the backward pass makes them.
        extra: parameters and buffers outside of the model that are trained with it (of a loss module, of an optimizer).
        alike: whether the replicas have the same parameters already, so that `start_alike` has nothing to do.
        owner: which optimizer steps on a parameter, by number, where there are several; buckets hold parameters of one owner.
        inner: the ranks that hold this replica together; this rank alone where it holds all of it.
        world: all ranks; `world.host` are those on this rank's host.
        notes: 1-D numbers of the engine (loss, votes, times) that are summed over the replicas together with the gradients,
            so that they need no collective of their own. A rule may replace this tensor by a view of its own buffer in `attach`.
        step: the optimizer step under way, counted from 1 over the whole run.
        last_backward: whether the backward pass under way is the last one before `after_backward` (gradient accumulation has several).
        gradients_go: where a backward pass leaves gradients: collected by the rule, kept in `.grad` until a later pass, or refused,
            since the engine did not start it.
        only: the parameters that the backward passes since the last agreement were for, alike on all ranks; None: any of them.
        gradients: after `after_backward`, tensors that hold every agreed gradient once (flat buffers where the rule has them).
        agreed: after `after_backward`, whether gradients and notes are those of all replicas. A rule that agrees on parameters instead
            sets this to False when it is attached, and in the steps between, which then count as this replica's own: see `LocalRule`.
        traffic: what the rule sent so far; it keeps the count.
        said: what the rule has to say of itself, in words, for the record of the run (which algorithm it took and why).
    """

    model: nn.Module
    dp: Group
    notes: Tensor
    parameters: list[nn.Parameter] | None = None
    inner: Group = field(default_factory=Group)
    world: Group = field(default_factory=Group)
    step: int = 0
    last_backward: bool = True
    gradients_go: Literal["collected", "kept", "refused"] = "collected"
    only: set[Tensor] | None = None
    gradients: list[Tensor] = field(default_factory=list)
    agreed: bool = True
    traffic: Traffic = field(default_factory=Traffic)
    said: list[str] = field(default_factory=list)
    extra: list[Tensor] = field(default_factory=list)
    owner: dict[Tensor, int] = field(default_factory=dict)
    alike: bool = False

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
        "loss.backward() makes the gradients of this rank's samples only, and the ranks would train apart. Write engine.backward(loss) in "
        "its place (or engine.step(batch)); for gradients that train nothing, use torch.autograd.grad"
    )


class SyncRule(Protocol):
    """A synchronisation rule, which keeps replicas in agreement.

    There is one instance per rank, called by the engine, never by user code. A rule that inherits from this class needs
    to write only what it does: every method but `attach` does nothing by itself.
    """

    def attach(self, replica: Replica) -> None:
        """Start every replica from the first one's weights (`start_alike`), and register for its gradients."""

    def after_backward(self) -> None:
        """Replace local gradients and `replica.notes` by their sums over all replicas.

        Local gradients are scaled so that their sum is the gradient of the global batch.
        """
        return

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
