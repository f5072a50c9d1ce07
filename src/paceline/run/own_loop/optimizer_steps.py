"""Steps of a user's optimizers: each needs gradients that all ranks agreed on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import CheckpointError, JobError, PlanError, SyncError
from paceline.planning.plan import Plan

_KNOWN: WeakSet[Optimizer] = WeakSet()  # the optimizers of all engines in this process

Closure = Callable[[], Any]


class OptimizerSteps:
    """Optimizers of a loop, by number, and which of them may step.

    Attributes:
        optimizers: in the order in which `setup` was given them.
        agreed: those whose gradients are of the global batch now.
        kept: those whose gradients are still this rank's alone.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.agreed: set[int] = set()
        self.kept: set[int] = set()
        self._left: set[int] = set()  # those that still have gradients of a backward pass whose update was of another
        self._ignored: set[int] = set()
        self._by_engine = False
        self._hooks: list[Any] = []
        # L-BFGS: its `step` cannot be called without a closure
        self._with_closure = {
            number
            for number, optimizer in enumerate(self.optimizers)
            if (closure := inspect.signature(optimizer.step).parameters.get("closure")) is not None
            and closure.default is inspect.Parameter.empty
        }

    def watch(
        self,
        before: Callable[[], object],
        after: Callable[[int], object],
        newest_loss: Callable[[], Tensor],
        *,
        ranks: int,
        divided_by: Plan | None = None,
    ) -> None:
        """Check every optimizer step in this process, where there is more than one rank.

        Args:
            before: called before a step that the loop takes by `optimizer.step()`.
            after: called with the optimizer's number after such a step.
            newest_loss: the mean loss over all ranks.
            divided_by: the plan, where it divides the model.
        """
        self._before, self._after, self._newest_loss, self._divided_by = before, after, newest_loss, divided_by
        self._ranks = ranks
        _KNOWN.update(self.optimizers)
        self._hooks = [register_optimizer_step_pre_hook(self._before_any_step)] if ranks > 1 else []
        self._hooks += [o.register_step_post_hook(self._after_own_step) for o in self.optimizers]

    @contextmanager
    def by_the_engine(self) -> Iterator[None]:
        """Context in which the engine steps the optimizers, and no step is checked."""
        self._by_engine = True
        try:
            yield
        finally:
            self._by_engine = False

    def ignore(self, optimizer: Optimizer) -> None:
        """Check the steps of an optimizer no more."""
        self._ignored.add(id(optimizer))

    def close(self) -> None:
        """Watch no steps any more."""
        for hook in self._hooks:
            hook.remove()

    # Which parameters are whose

    def numbers(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Numbers of some optimizers; of all where none is named.

        Raises:
            JobError: one is not of this loop, or named twice.
        """
        if not optimizers:
            return set(range(len(self.optimizers)))
        numbers = {i for i, own in enumerate(self.optimizers) if any(own is one for one in optimizers)}
        if len(numbers) != len(optimizers):
            raise JobError("backward and update take the optimizers that paceline.setup was given, each once")
        return numbers

    def parameters_of(self, numbers: set[int]) -> list[nn.Parameter]:
        """Trainable parameters that these optimizers hold."""
        held = (self.optimizers[number] for number in sorted(numbers))
        return [p for optimizer in held for g in optimizer.param_groups for p in g["params"] if p.requires_grad]

    def check_no_closure(self, numbers: set[int]) -> None:
        """Raise JobError if an optimizer needs a closure to step."""
        for number in sorted(numbers & self._with_closure):
            raise JobError(
                f"{type(self.optimizers[number]).__name__} needs a closure, so the loop steps it: write "
                "`def closure(): optimizer.zero_grad(); loss = loss_of(model(x), y); engine.backward(loss); "
                "return loss`, then `optimizer.step(closure)`"
            )

    # What happens to their gradients

    def computed(self, numbers: set[int], *, agreed: bool) -> None:
        """Note gradients that were computed, and whether the ranks agreed on them."""
        if agreed:
            self.kept -= numbers
            self.agreed |= numbers
        else:
            self.kept |= numbers

    def stepped(self, numbers: set[int]) -> None:
        """Note an update by these optimizers, whose gradients are used up."""
        self._left = (self._left | self.agreed) - numbers
        self.agreed -= numbers

    def forget(self) -> None:
        """Note that there are no gradients."""
        self.agreed.clear()
        self.kept.clear()
        self._left.clear()

    def refuse_leftovers(self, targets: set[int], *, named: bool) -> None:
        """Refuse to add to gradients of an earlier loss, whose update was another optimizer's."""
        left = [
            number
            for number in sorted(targets & self._left)
            if any(p.grad is not None for p in self.parameters_of({number}))
        ]
        self._left -= targets
        if left and named:
            raise JobError(
                f"optimizer {left[0]} still has gradients of an earlier loss, whose update was of another "
                "optimizer. Name the optimizer in that call too, engine.backward(loss, optimizer), or clear them with "
                "optimizer.zero_grad()"
            )

    # Steps that the loop takes itself

    def _before_any_step(self, optimizer: Optimizer, args: Any, keywords: Any) -> tuple[Any, Any] | None:
        if self._by_engine or id(optimizer) in self._ignored:
            return None
        number = next((i for i, own in enumerate(self.optimizers) if own is optimizer), None)
        if number is None:
            if optimizer not in _KNOWN:  # else it is another engine's
                self._check_outer_step(optimizer)
            return None
        closure = args[1] if len(args) > 1 else keywords.get("closure")  # torch gives the optimizer first
        if closure is not None:
            without = {k: v for k, v in keywords.items() if k != "closure"}
            return (optimizer, self._agreed_closure(optimizer, closure), *args[2:]), without
        self._check_step(number)
        self._before()
        return None

    def _agreed_closure(self, optimizer: Optimizer, closure: Closure) -> Closure:
        """The closure, returning the mean loss over all ranks.

        A line search must decide the same on every rank.
        """
        if self._divided_by is not None:
            raise PlanError(
                f"{type(optimizer).__name__} with a closure works on whole parameters; plan {self._divided_by} "
                f"divides them. Use dp={self._ranks}"
            )

        def agreed() -> Any:
            own = closure()
            return own if own is None else self._newest_loss().to(torch.as_tensor(own).dtype)

        return agreed

    def _check_outer_step(self, optimizer: Optimizer) -> None:
        """Check the step of an optimizer within the loop's, as in SAM and Lookahead."""
        owner = {p: i for i, own in enumerate(self.optimizers) for g in own.param_groups for p in g["params"]}
        stepped = {p for g in optimizer.param_groups for p in g["params"]}
        if not stepped & owner.keys() and stepped <= {p for o in _KNOWN for g in o.param_groups for p in g["params"]}:
            return  # it works within another engine's, which checks it
        owners = {owner.get(p) for p in stepped}
        if None in owners:
            raise JobError(
                f"{type(optimizer).__name__} steps on parameters that paceline.setup was not given: every rank "
                "would train its own. Give setup all models and optimizers, setup([model, other], [optimizer, "
                "other_optimizer], …); or, for one that every rank is to train by itself, engine.ignore(optimizer)"
            )
        for number in owners:
            assert number is not None
            self._check_step(number)

    def _check_step(self, number: int) -> None:
        if number in self.kept:
            raise SyncError(
                "the newest gradients are this rank's alone (sync=False): the last engine.backward before "
                "optimizer.step() needs sync=True, or write engine.update()"
            )
        if number not in self.agreed:
            raise SyncError(
                "optimizer.step() without engine.backward(loss) since its last step: the ranks have no "
                "gradients in common. Write engine.backward(loss) instead of loss.backward()"
            )

    def _after_own_step(self, optimizer: Optimizer, args: Any, keywords: Any) -> None:
        if self._by_engine:
            return
        number = next(i for i, own in enumerate(self.optimizers) if own is optimizer)
        self.agreed.discard(number)
        self._left.discard(number)
        self._after(number)


class Optimizers:
    """Several optimizers with the interface of one: parameter groups and states in order."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The states of all, by parameter."""
        together: dict[Tensor, Any] = {}
        for optimizer in self.optimizers:
            if shared := [p for p in optimizer.state if p in together]:
                raise CheckpointError(
                    f"a parameter of shape {tuple(shared[0].shape)} is stepped on by two optimizers, so its state has "
                    "no single name; give each parameter to one optimizer"
                )
            together |= optimizer.state
        return together

    def step(self) -> None:
        """Step every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """State as `Optimizer.state_dict` gives it, parameters numbered over all."""
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, own in zip(self._firsts(), (o.state_dict() for o in self.optimizers), strict=True):
            states |= {first + number: state for number, state in own["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each optimizer its part of what `state_dict` said."""
        groups = list(state["param_groups"])
        for first, optimizer in zip(self._firsts(), self.optimizers, strict=True):
            own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            numbers = {number for group in own for number in group["params"]}
            optimizer.load_state_dict(
                {
                    "state": {number - first: value for number, value in state["state"].items() if number in numbers},
                    "param_groups": [
                        {**group, "params": [number - first for number in group["params"]]} for group in own
                    ],
                }
            )

    def _firsts(self) -> list[int]:
        firsts, count = [], 0
        for optimizer in self.optimizers:
            firsts.append(count)
            count += sum(len(group["params"]) for group in optimizer.param_groups)
        return firsts
