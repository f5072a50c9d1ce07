"""Optimizers and losses of a user's own loop, with errors for unsupported calls.

An optimizer may only step with gradients that are reduced over all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.comm import Group
from paceline.data.loader import Loader, Position
from paceline.device import on_accelerator, uploaded, widest_float
from paceline.direct_calls import HOOKS_OF_LOOPS, take_step
from paceline.errors import CheckpointError, DataError, JobError, PlanError, SyncError
from paceline.planning.plan import Plan
from paceline.sync.rule import Replica, not_by_the_engine

if TYPE_CHECKING:
    from paceline.run.own_loop.engine import Engine


_KNOWN: WeakSet[Optimizer] = WeakSet()  # the optimizers of all engines in this process

Closure = Callable[[], Any]


class OptimizerSteps:
    """Numbered optimizers of a loop, and the state of each optimizer's gradients.

    Attributes:
        optimizers: the optimizers, in the order that `setup` was given.
        gradients: by optimizer number, `own` for gradients of this rank alone, `reduced` for gradients summed over all
            ranks, or `left` if another optimizer has stepped since. After its step, an optimizer has no entry until
            the next backward pass.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.gradients: dict[int, Literal["own", "reduced", "left"]] = {}
        self._ignored: set[int] = set()
        self._by_engine = False
        self._hooks: list[Any] = []
        # optimizers whose `step` requires a closure, such as L-BFGS
        self._with_closure = {
            number
            for number, optimizer in enumerate(self.optimizers)
            if (closure := inspect.signature(optimizer.step).parameters.get("closure")) is not None
            and closure.default is inspect.Parameter.empty
        }

    def watch(
        self,
        before: Callable[[], object],
        after: Callable[[], object],
        newest_loss: Callable[[], Tensor],
        *,
        ranks: int,
        divided_by: Plan | None = None,
        scaled: bool = False,
    ) -> None:
        """Check the steps of these optimizers.

        On several ranks, check the steps of all optimizers in the process.

        Args:
            before: on several ranks, called before each step that the loop takes with `optimizer.step()`.
            after: called after each step that the loop takes with `optimizer.step()`.
            newest_loss: function that returns the newest mean loss over all ranks.
            divided_by: the plan, if it divides the model.
            scaled: whether gradients stay scaled until the engine's update (fp16).
        """
        self._before, self._after, self._newest_loss, self._divided_by = before, after, newest_loss, divided_by
        self._ranks, self._scaled = ranks, scaled
        _KNOWN.update(self.optimizers)
        if ranks > 1:
            self._hooks = [register_optimizer_step_pre_hook(self._before_any_step)]
        else:
            # on one rank, other optimizers of the process may train freely
            self._hooks = [o.register_step_pre_hook(self._before_any_step) for o in self.optimizers]
        self._hooks += [o.register_step_post_hook(self._after_own_step) for o in self.optimizers]
        HOOKS_OF_LOOPS.update(hook.id for hook in self._hooks)

    @contextmanager
    def by_the_engine(self) -> Iterator[None]:
        """Within this context, the engine steps the optimizers, and no step is checked."""
        self._by_engine = True
        try:
            yield
        finally:
            self._by_engine = False

    def ignore(self, optimizer: Optimizer) -> None:
        """Stop checking the steps of an optimizer."""
        self._ignored.add(id(optimizer))

    def close(self) -> None:
        """Stop watching steps."""
        for hook in self._hooks:
            hook.remove()
            HOOKS_OF_LOOPS.discard(hook.id)

    # Ownership of parameters

    def numbers(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Return the numbers of the given optimizers; without arguments, of all.

        Raises:
            JobError: an optimizer does not belong to this loop, or is given twice.
        """
        if not optimizers:
            return set(range(len(self.optimizers)))
        numbers = {i for i, own in enumerate(self.optimizers) if any(own is one for one in optimizers)}
        if len(numbers) != len(optimizers):
            raise JobError(
                "loop.other_optimizer",
                "backward and update accept only the optimizers that paceline.setup was given, each at most once",
            )
        return numbers

    def parameters_of(self, numbers: set[int]) -> list[nn.Parameter]:
        """Return the trainable parameters of these optimizers."""
        held = (self.optimizers[number] for number in sorted(numbers))
        return [p for optimizer in held for g in optimizer.param_groups for p in g["params"] if p.requires_grad]

    def check_no_closure(self, numbers: set[int]) -> None:
        """Raise JobError if an optimizer needs a closure to step."""
        for number in sorted(numbers & self._with_closure):
            raise JobError(
                "loop.closure_needed",
                "{class_name} needs a closure, so your loop calls its step. Write `def closure(): "
                "optimizer.zero_grad(); loss = loss_of(model(x), y); engine.backward(loss); return loss`, then "
                "`optimizer.step(closure)`",
                class_name=type(self.optimizers[number]).__name__,
            )

    # State of the gradients

    def with_gradients(self, numbers: set[int], *, own: bool) -> set[int]:
        """Select the optimizers that have unreduced (`own`) or reduced gradients."""
        return {n for n in numbers if n in self.gradients and (self.gradients[n] == "own") == own}

    def computed(self, numbers: set[int], *, reduced: bool) -> None:
        """Record new gradients; `reduced` means that they are summed over all ranks."""
        self.gradients |= dict.fromkeys(numbers, "reduced" if reduced else "own")

    def stepped(self, numbers: set[int]) -> None:
        """Record a step of these optimizers, which clears their gradients."""
        left = self.with_gradients(self.gradients.keys() - numbers, own=False)
        self.gradients = {n: "left" if n in left else of for n, of in self.gradients.items() if n not in numbers}

    def refuse_leftovers(self, targets: set[int], *, named: bool) -> None:
        """Refuse to add to leftover gradients of an earlier loss.

        Gradients are left over if another optimizer has stepped with that loss.
        """
        for number in sorted(n for n in targets if self.gradients.get(n) == "left"):
            if named and any(p.grad is not None for p in self.parameters_of({number})):
                raise JobError(
                    "loop.stale_gradients",
                    "optimizer {optimizer} still has gradients of an earlier loss, with which another optimizer "
                    "stepped. Name that optimizer in its call too, engine.backward(loss, optimizer), or clear the "
                    "gradients with optimizer.zero_grad().",
                    optimizer=number,
                )
            self.gradients[number] = "reduced"

    # Steps that the loop takes itself

    def _before_any_step(self, optimizer: Optimizer, args: Any, keywords: Any) -> tuple[Any, Any] | None:
        if self._by_engine or id(optimizer) in self._ignored:
            return None
        number = next((i for i, own in enumerate(self.optimizers) if own is optimizer), None)
        if number is None:
            if optimizer not in _KNOWN:  # an optimizer in `_KNOWN` belongs to another engine
                self._check_outer_step(optimizer)
            return None
        if self._scaled:
            raise JobError(
                "loop.optimizer_step_fp16",
                "precision=fp16 scales the gradients. Write engine.update() instead of optimizer.step().",
            )
        closure = args[1] if len(args) > 1 else keywords.get("closure")  # torch passes the optimizer first
        if closure is not None:
            without = {k: v for k, v in keywords.items() if k != "closure"}
            return (optimizer, self._agreed_closure(number, closure), *args[2:]), without
        self._check_step(number)
        if self._ranks > 1:  # on one rank, skip `before`: it reads the loss, and so would wait for the accelerator
            self._before()
        return None

    def _agreed_closure(self, number: int, closure: Closure) -> Closure:
        """Wrap the closure so that it returns the mean loss over all ranks.

        A line search then makes the same decisions on all ranks.
        """
        if self._divided_by is not None:
            raise PlanError(
                "loop.closure_divided",
                "{class_name} with a closure works on whole parameters, but plan {plan} divides them. Use dp={ranks}.",
                class_name=type(self.optimizers[number]).__name__,
                plan=self._divided_by,
                ranks=self._ranks,
            )

        def agreed() -> Any:
            own = closure()
            self._check_step(number)
            return own if own is None else self._newest_loss().to(torch.as_tensor(own).dtype)

        return agreed

    def _check_outer_step(self, optimizer: Optimizer) -> None:
        """Check the step of an optimizer that wraps a loop's optimizer, or the reverse.

        SAM and Lookahead, for example, wrap an optimizer.
        """
        owner = {p: i for i, own in enumerate(self.optimizers) for g in own.param_groups for p in g["params"]}
        stepped = {p for g in optimizer.param_groups for p in g["params"]}
        if not stepped & owner.keys() and stepped <= {p for o in _KNOWN for g in o.param_groups for p in g["params"]}:
            return  # the optimizer steps parameters of another engine, which checks the step
        owners = {owner.get(p) for p in stepped}
        if None in owners:
            raise JobError(
                "loop.optimizer_unknown",
                "{class_name} updates parameters that paceline.setup was not given, so every rank would train its "
                "own copy. Pass all models and optimizers to setup: setup([model, other], [optimizer, "
                "other_optimizer], …). If every rank should train its own copy, call engine.ignore(optimizer).",
                class_name=type(optimizer).__name__,
            )
        for number in owners:
            assert number is not None
            self._check_step(number)

    def _check_step(self, number: int) -> None:
        if self.gradients.get(number) == "own":
            raise SyncError(
                "loop.gradients_not_reduced",
                "the newest gradients are those of this rank alone (sync=False). Use sync=True in the last "
                "engine.backward before optimizer.step(), or call engine.update().",
            )
        if number not in self.gradients:
            raise SyncError(
                "loop.step_without_backward",
                "optimizer.step() was called without engine.backward(loss) since the last step. Write "
                "engine.backward(loss) instead of loss.backward(), which does not reduce gradients over the ranks.",
            )

    def _after_own_step(self, optimizer: Optimizer, args: Any, keywords: Any) -> None:
        if self._by_engine:
            return
        number = next(i for i, own in enumerate(self.optimizers) if own is optimizer)
        self.gradients.pop(number, None)
        self._after()


class Optimizers:
    """Several optimizers with the interface of one optimizer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """States of all optimizers, by parameter."""
        together: dict[Tensor, Any] = {}
        for optimizer in self.optimizers:
            if shared := [p for p in optimizer.state if p in together]:
                raise CheckpointError(
                    "checkpoint.parameter_of_two_optimizers",
                    "two optimizers update the same parameter of shape {shape}, so its state has no unique name. "
                    "Give each parameter to only one optimizer.",
                    shape=tuple(shared[0].shape),
                )
            together |= optimizer.state
        return together

    def step(self) -> None:
        """Step every optimizer."""
        for optimizer in self.optimizers:
            take_step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return one state in the form of `Optimizer.state_dict`.

        Parameters are numbered consecutively over all optimizers.
        """
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, own in zip(self._firsts(), (o.state_dict() for o in self.optimizers), strict=True):
            states |= {first + number: state for number, state in own["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load each optimizer's part of a state from `state_dict`."""
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
        sizes = (sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in self.optimizers)
        return list(accumulate(sizes, initial=0))[:-1]


@contextmanager
def summed_apart(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set earlier gradients aside within this context, and add them at its end.

    The earlier gradients are already summed over the ranks, so the next sum must not include them.
    """
    earlier: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            earlier[parameter] = parameter.grad.clone()  # a copy, because the next sum may reuse the gradient's memory
            parameter.grad = None
    yield
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class LossShares:
    """Weights of losses, from the batches that were read since the last loss.

    Args:
        loaders: all loaders of the loop; the list may grow later.
        data_group: group of the ranks that read different samples.
    """

    def __init__(self, loaders: Sequence[Loader], data_group: Group, device: torch.device) -> None:
        self.loaders, self.data_group, self.device = loaders, data_group, device
        # by loader: position at the last loss
        self._seen: dict[int, Position] = {}
        self._read_ahead = False

    def forget(self) -> None:
        """Forget all earlier positions, for example after loading a checkpoint."""
        self._seen.clear()

    def weigh(self, loss: Tensor, items: float | Tensor | None, *, local_steps: bool) -> tuple[float | Tensor, Tensor]:
        """Return the weight of this rank's loss, and the global mean loss.

        Args:
            items: number of items in the mean; None takes the number of samples in the loaders' last batch.
            local_steps: whether each replica steps with the gradient of its own mean loss.
        """
        alone = self.data_group.size == 1
        # a single rank sums nothing, and a conversion would launch another kernel
        keeps = alone and on_accelerator(loss) and loss.dtype.is_floating_point
        wide = _at_least_float32(loss.dtype) if keeps else widest_float(self.device)
        own = loss.detach().to(wide, copy=True).reshape(())  # the loop may change its own loss
        if items is None:
            share = self._share()
            if alone and share == 1.0:
                return 1.0, own.to(self.device)
            mean = (own * share).to(self.device) if share else torch.zeros((), dtype=wide, device=self.device)
            self.data_group.all_reduce(mean)
            return 1.0 if local_steps and share else share, mean
        count = items.to(self.device, wide) if isinstance(items, Tensor) else uploaded([items], wide, self.device)[0]
        sums = torch.stack([torch.where(count > 0, own * count, 0.0), count])
        self.data_group.all_reduce(sums)
        total = sums[1].clamp(min=torch.finfo(wide).tiny)
        own_share: Tensor = (count > 0) if local_steps else count / total
        return own_share.to(loss.dtype), sums[0] / total

    def check_data(self) -> None:
        """Raise DataError if `setup` was given a loader that the loop has not read.

        Otherwise every rank would train on its own, undivided batches.
        """
        if self.data_group.size > 1 and self.loaders and all(loader.position is None for loader in self.loaders):
            raise DataError(
                "loop.loader_unused",
                "setup was given a DataLoader, but no batch was read from engine.loader yet, so this loss belongs "
                "to other data. Use `for batch in engine.loader`, which yields this rank's part. If every rank has "
                "its own data, call setup without a loader.",
            )

    def _share(self) -> float:
        """Return the fraction of the global batch's samples in this rank's loss.

        Raises:
            DataError: it is unknown which batches the loss was computed from.
        """
        # ignore loaders that were read to the end, for example for validation
        running = [loader for loader in self.loaders if loader.running] or self.loaders
        seen = {
            id(loader): (loader.position, self._seen.get(id(loader)))
            for loader in running
            if loader.position is not None
        }
        for loader in running:
            loader.check_weight()
        shares = {position.local / position.total for position, _ in seen.values()}
        if len(shares) > 1:
            raise DataError(
                "loop.weight_unknown",
                "the loaders' last batches are divided in different proportions, so the weight of this loss is "
                "unknown. Pass the number of items: engine.backward(loss, items=len(x))",
            )
        self._read_ahead = self._read_ahead or any(_skipped(before, now) for now, before in seen.values())
        share = shares.pop() if shares else 1.0 / self.data_group.size
        if self._read_ahead and any(
            before is not None and before.local / before.total != share for _, before in seen.values()
        ):
            raise DataError(
                "loop.read_ahead",
                "the loop reads batches ahead of their losses, and these batches are divided in different "
                "proportions, so the weight of this loss is not known. Pass the number of items, "
                "engine.backward(loss, items=len(x)), or set drop_last=True.",
            )
        self._seen |= {number: now for number, (now, _) in seen.items()}
        return share


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _skipped(before: Position | None, now: Position) -> bool:
    if before is None:
        return now.epoch == 0 and now.step == 1
    return now.step > before.step + 1 if now.epoch == before.epoch else now.step > 0


def check_backward(engine: Engine, loss: Any, *, casts: bool, sync: bool) -> None:
    """Refuse calls of `engine.backward` that the plan or the loss does not support.

    Args:
        casts: whether the loss was computed within `engine.autocast`.

    Raises:
        JobError: the loss is not a single number, or was computed outside of `engine.autocast`.
        PlanError: the engine must run the forward pass under this plan, or the plan divides the logits that the loss
            needs.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise JobError(
            "loop.loss_not_a_number",
            "backward needs this rank's mean loss, a single number with a gradient, but got {found}",
            found=what,
        )
    if engine.precision in ("bf16", "fp16", "fp8") and not casts:
        raise JobError(
            "loop.no_autocast",
            "precision={precision}: compute the model and the loss inside `with engine.autocast():`. Otherwise "
            "they stay in fp32",
            precision=engine.precision,
        )
    plan = engine.plan
    if engine.local_steps and engine.split is not None:
        raise PlanError(
            "loop.rule_needs_step",
            "plan {plan}: with sync={sync}, divided replicas can be trained only by engine.step(batch)",
            plan=plan,
            sync=plan.sync,
        )
    refuse_own_passes(plan)
    if engine.split is not None and not sync:
        raise PlanError(
            "loop.backward_without_sync",
            "plan {plan} divides the model, but engine.backward(loss, sync=False) needs undivided replicas: "
            "dp={size}. Leave out sync=False.",
            plan=plan,
            size=engine.group.size,
        )
    if engine.compute.divides_logits:
        raise PlanError(
            "loop.loss_under_tp",
            "with tp, do not pass the loss to setup, so that the model returns whole logits to your own loss",
        )


def refuse_own_passes(plan: Plan) -> None:
    """Refuse plans under which only the engine can run the forward pass."""
    if plan.pp > 1 or plan.cp > 1:
        raise PlanError(
            "loop.forward_by_engine",
            "plan {plan}: with pp or cp, the engine runs the forward pass. Give paceline.setup a loss and call "
            "engine.step(batch), or use dp, fsdp, ep or tp.",
            plan=plan,
        )


def check_all_step(plan: Plan, stepped: int, optimizers: int) -> None:
    """Refuse to step only some optimizers if the sync rule counts steps."""
    if stepped < optimizers:
        raise PlanError(
            "loop.rule_counts_steps",
            "sync={sync} counts the steps of a replica, but the optimizers of this loop take different numbers of "
            "steps. Use sync=allreduce.",
            sync=plan.sync,
        )


class Refusals:
    """Hooks that refuse backward passes outside of the engine, and copies of divided models."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._uncopied: list[nn.Module] = []

    def refuse_backward(self, parameters: Iterable[nn.Parameter], replica: Replica) -> None:
        """Make `loss.backward()` raise an error if it reaches these parameters.

        Earlier hooks are removed.
        """

        def refuse(_: Tensor) -> None:
            if replica.backward.gradients == "refused":
                raise not_by_the_engine()

        self._remove_hooks()
        self._hooks = [p.register_post_accumulate_grad_hook(refuse) for p in parameters if p.requires_grad]

    def refuse_copies(self, model: nn.Module, plan: Plan, ranks: int) -> None:
        """Make `deepcopy` of a divided module raise an error.

        A copy would still use the original's shards, so an average of the weights would be wrong.
        """

        def refuse(memo: Any) -> Any:
            raise JobError(
                "loop.copy_of_divided",
                "plan {plan} divides the model, so a copy of the model (AveragedModel, deepcopy) would be "
                "incomplete. Copy it before setup and update the copy from engine.export, or use dp={ranks}.",
                plan=plan,
                ranks=ranks,
            )

        self._uncopied = list(model.modules())
        for module in self._uncopied:
            module.__deepcopy__ = refuse  # type: ignore[assignment]

    def close(self) -> None:
        """Remove all hooks from the model."""
        self._remove_hooks()
        for module in self._uncopied:
            module.__dict__.pop("__deepcopy__", None)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


class NoLoader:
    """Placeholder for the loader in loops whose ranks have their own data."""

    position = None
    indices: Sequence[int] = ()
    is_packed = pads_at_end = False  # as for any other data whose sequences are not declared

    def __init__(self, group: Group) -> None:
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        raise DataError(
            "loop.no_loader",
            "setup was called without a loader. Pass a DataLoader to setup, or iterate over engine.deal(loader).",
        )

    def fill_every_rank(self, what: str) -> None:
        """Do nothing, because every rank has its own data."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return

    def close(self) -> None:
        return


def no_loss(output: Any, target: Any) -> Tensor:
    """Placeholder for the loss in loops that compute the loss themselves; raises an error."""
    raise JobError("loop.no_loss", "setup was called without a loss")
