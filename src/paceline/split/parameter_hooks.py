"""Hooks and further references on parameters: carried over to a rank's part where that is a whole parameter, refused where it is not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from paceline.errors import PlanError
from paceline.plans.plan import Plan
from paceline.split.parts import Parts

_KEPT_UP_TO_DATE = ("_flat_weights",)  # torch.nn.RNNBase looks them up again when they have changed


def carry_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    """Put the hooks on gradients of one parameter on the one that takes its place."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def hooked_parameters(model: nn.Module) -> dict[str, str]:
    """The names of parameters with hooks on their gradients, each with the name of torch's method that registers such."""
    found = {}
    for name, p in model.named_parameters():
        if p._backward_hooks:
            found[name] = "register_hook"
        if p._post_accumulate_grad_hooks:
            found[name] = "register_post_accumulate_grad_hook"
    return found


def refuse_lost_hooks(hooked: Mapping[str, str], parts: Parts, plan: Plan, shared: Collection[str]) -> None:
    """Refuse hooks that would see a part of a gradient only; on every rank alike.

    Args:
        hooked: of `hooked_parameters`.
        parts: of all parameters, those of other pipeline stages included.
        shared: parameters that several stages hold.

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
                f"plan {plan}: {name} has a hook ({method}), which would see a part of its gradient only, as that is divided or summed "
                f"({', '.join(sorted(axes))}): {' '.join(f'{axis}=1' for axis in sorted(axes))}, or change gradients where they arise "
                "(a hook on an activation, a torch.autograd.Function)."
            )


def refuse_kept_parameters(model: nn.Module) -> None:
    """Refuse modules that keep parameters in plain attributes, where they would go stale.

    Raises:
        PlanError: one does.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", *_KEPT_UP_TO_DATE):
                continue
            for held in _parameters_in(value):
                if id(held) in names:
                    raise PlanError(
                        f"{path or 'the model'} keeps the parameter {names[id(held)]} in its attribute {key}, too. A plan that divides the "
                        "model puts a part in its place, which that attribute would miss: look parameters up when they are needed "
                        "(list(self.parameters()) in forward), or divide nothing (dp only)."
                    )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif type(value) in (list, tuple, dict, set):
        entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for entry in entries:
            yield from _parameters_in(entry)
