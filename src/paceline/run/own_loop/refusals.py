"""Calls that a user's own loop cannot make, each with what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.comm import Group
from paceline.errors import DataError, JobError, PlanError
from paceline.planning.plan import Plan
from paceline.sync.rule import Replica, not_by_the_engine

if TYPE_CHECKING:
    from paceline.run.own_loop.loop import OwnLoop


def check_backward(engine: OwnLoop, loss: Any, *, casts: bool, sync: bool) -> None:
    """Refuse a call of `engine.backward` that cannot work.

    Args:
        casts: True if the loss was computed in the precision given to `setup`.

    Raises:
        JobError: the loss is no single number, or was computed outside of `engine.autocast`.
        PlanError: the plan computes the passes itself, or divides what the loss needs whole.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise JobError(f"backward takes this rank's mean loss, a single number with a gradient; this is {what}")
    if engine.precision in ("bf16", "fp16") and not casts:
        raise JobError(
            f"precision={engine.precision}: compute the model and the loss within `with engine.autocast():`, "
            "else they stay in fp32"
        )
    plan = engine.plan
    if engine.local_steps and engine.split is not None:
        raise PlanError(
            f"plan {plan}: with sync={plan.sync}, replicas that are divided are trained by engine.step(batch) alone"
        )
    refuse_own_passes(plan)
    if engine.split is not None and not sync:
        raise PlanError(
            f"plan {plan} divides the model: engine.backward(loss, sync=False) is for dp={engine.group.size}; leave "
            "sync out"
        )
    if engine.compute.divides_logits:
        raise PlanError("tp: leave the loss out of setup, so that the model gives whole logits to a loss of your own")


def refuse_own_passes(plan: Plan) -> None:
    """Refuse plans under which a loop cannot compute the model's output itself."""
    if plan.pp > 1 or plan.cp > 1:
        raise PlanError(
            f"plan {plan}: with pp or cp, the engine runs the forward pass. Give paceline.setup a loss and call "
            "engine.step(batch), or use dp, fsdp, ep or tp."
        )


def check_all_step(plan: Plan, stepped: int, optimizers: int) -> None:
    """Refuse an update by some of several optimizers, where the rule counts a replica's steps."""
    if stepped < optimizers:
        raise PlanError(
            f"sync={plan.sync} counts the steps of a replica, and several optimizers take different ones; use "
            "sync=allreduce"
        )


class Refusals:
    """Errors hung on a model, for backward passes past the engine and for copies."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._uncopied: list[nn.Module] = []

    def refuse_backward(self, parameters: Iterable[nn.Parameter], replica: Replica) -> None:
        """Make `loss.backward()` an error at these parameters, and at no others any more."""

        def refuse(_: Tensor) -> None:
            if replica.backward.gradients == "refused":
                raise not_by_the_engine()

        self._remove_hooks()
        self._hooks = [p.register_post_accumulate_grad_hook(refuse) for p in parameters if p.requires_grad]

    def refuse_copies(self, model: nn.Module, plan: Plan, ranks: int) -> None:
        """Make `deepcopy` of a divided module an error.

        A copy would compute with the original's parts: an average of the weights that is none.
        """

        def refuse(memo: Any) -> Any:
            raise JobError(
                f"plan {plan} divides the model, so a copy of it (AveragedModel, deepcopy) would not be a model of "
                f"its own. Copy it before setup and update it from engine.export, or use dp={ranks}"
            )

        self._uncopied = list(model.modules())
        for module in self._uncopied:
            module.__deepcopy__ = refuse  # type: ignore[assignment]

    def close(self) -> None:
        """Take all of them off the model."""
        self._remove_hooks()
        for module in self._uncopied:
            module.__dict__.pop("__deepcopy__", None)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


class NoLoader:
    """Placeholder for a loader, in loops where every rank brings its own data."""

    position = None
    indices: Sequence[int] = ()

    def __init__(self, group: Group) -> None:
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        raise DataError("setup was given no loader: pass a DataLoader to setup, or iterate one of engine.deal(loader)")

    def fill_every_rank(self, what: str) -> None:
        """Nothing to require: every rank computes with the data that it brings."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return

    def close(self) -> None:
        return


def no_loss(output: Any, target: Any) -> Tensor:
    """Placeholder for a loss, in loops that compute their own."""
    raise JobError("setup was given no loss")
