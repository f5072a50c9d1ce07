"""Hooks and further references on parameters of a divided model.

Hooks are carried over to a rank's part if that is a whole parameter, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from paceline.errors import PlanError
from paceline.planning.plan import Plan
from paceline.split.layout import Parts

# torch.nn.RNNBase rebuilds these in a forward pass if the parameters were replaced
KEPT_UP_TO_DATE = ("_flat_weights",)


def carry_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    """Register the gradient hooks of one parameter on its replacement."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def hooked_parameters(model: nn.Module) -> dict[str, str]:
    """Names of parameters with gradient hooks, each with torch's method that registers such a hook."""
    found = {}
    for name, p in model.named_parameters():
        if p._backward_hooks:
            found[name] = "register_hook"
        if p._post_accumulate_grad_hooks:
            found[name] = "register_post_accumulate_grad_hook"
    return found


def refuse_lost_hooks(hooked: Mapping[str, str], parts: Parts, plan: Plan, shared: Collection[str]) -> None:
    """Refuse hooks that would see only a part of a gradient; on every rank alike.

    Args:
        hooked: result of `hooked_parameters`.
        parts: parts of all parameters, including those of other pipeline stages.
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
                f"plan {plan}: {name} has a hook ({method}), which would see a part of its gradient only, as that is "
                f"divided or summed ({', '.join(sorted(axes))}): {' '.join(f'{axis}=1' for axis in sorted(axes))}, or "
                "change gradients where they arise (a hook on an activation, a torch.autograd.Function)."
            )


def refuse_kept_parameters(model: nn.Module) -> None:
    """Refuse modules that keep parameters in plain attributes, where they would become stale.

    Raises:
        PlanError: a module does.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", *KEPT_UP_TO_DATE):
                continue
            for held in _parameters_in(value):
                if id(held) in names:
                    raise PlanError(
                        f"{path or 'the model'} keeps the parameter {names[id(held)]} in its attribute {key}, too. A "
                        "plan that divides the model puts a part in its place, which that attribute would miss: look "
                        "parameters up when they are needed (list(self.parameters()) in forward), or divide nothing "
                        "(dp only)."
                    )


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif type(value) in (list, tuple, dict, set):
        entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for entry in entries:
            yield from _parameters_in(entry)
