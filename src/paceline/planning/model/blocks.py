"""The repeated blocks of a plain model, found by its structure alone."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_NUMBERED = re.compile(r"(.*?)\d+")
_EXPERTS = re.compile("expert", re.IGNORECASE)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_Found = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module) -> list[str]:
    """Names of a model's repeated blocks, in registration order; none lies inside another.

    A block is one of at least two modules of a class that are in lists (`ModuleList`, `Sequential`, children such as
    `layer1`, `layer2`) and hold at least two weight matrices each: the layers of a transformer, the residual layers in
    the stages of a ResNet. A list whose items only hold lists of blocks is a list of stages, and the blocks in them are
    taken. Experts of a mixture are parts of their block; they are recognised by the word "expert" in the name of their
    list.

    A model without such blocks falls back to its single layers with a weight matrix, as in
    `Sequential(Linear, Tanh, Linear)`, if those in lists hold at least half of its parameters. They make cuts of a
    pipeline possible; activations and norms stay between them.

    No forward pass is run and no weight is read, so it works on the meta device. Returns [] if nothing repeats.
    """
    blocks = _repeated(list(_in_lists(model, "", matrices=2)))
    if not blocks:
        blocks = _repeated(list(_in_lists(model, "", matrices=1)))
        if 2 * _parameters(blocks) < sum(p.numel() for p in model.parameters()):
            return []
    return [name for name, _ in blocks]


def mixtures(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that hold all experts of a mixture in one tensor, with their names.

    Such a module has `num_experts` of two or more, which every parameter of its own has as dim 0, one of three
    dimensions, and is called with tokens, expert indices and weights.
    """
    return ((name, module) for name, module in model.named_modules() if _is_experts(module))


def _is_experts(module: nn.Module) -> bool:
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or count < 2 or not any(p.dim() == 3 for p in own):
        return False
    if any(p.shape[:1] != (count,) for p in own):
        return False
    wanted = inspect.signature(module.forward).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in wanted) == 3


def submodules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names.

    Raises:
        AttributeError: the model has no module of that name.
    """
    return [model.get_submodule(name) for name in names]


def _in_lists(module: nn.Module, prefix: str, *, matrices: int) -> Iterator[tuple[str, nn.Module]]:
    """Outermost list items with at least `matrices` weight matrices.

    If blocks are wanted, those inside of stages, not the stages.
    """
    listed = _listed(module)
    # yields a module that is registered twice once
    for name, child in module.named_children():
        if _EXPERTS.search(name):
            continue
        if name not in listed or isinstance(child, _WITHOUT_FORWARD) or (matrices > 1 and _is_stage(child)):
            yield from _in_lists(child, f"{prefix}{name}.", matrices=matrices)
        elif _matrices(child) >= matrices:
            yield prefix + name, child


def _listed(module: nn.Module) -> set[str]:
    """Names of the children that form a list: `0`, `1`, …, or several of `layer1`, `layer2`, …."""
    stems = {name: found[1] for name in _with_parameters(module) if (found := _NUMBERED.fullmatch(name))}
    often = Counter(stems.values())
    return {name for name, stem in stems.items() if not stem or often[stem] > 1}


def _is_stage(item: nn.Module) -> bool:
    """True if a list item is not a block but a stage.

    A stage has one list of blocks, and besides it at most modules that lead from stage to stage. A transformer's block
    has norms or gates of its own; the list in a residual layer holds single layers, that in a block of T5 holds
    different ones.
    """
    if _is_list_of_blocks(item):
        return True
    children = _with_parameters(item)
    lists = [name for name, child in children.items() if not _EXPERTS.search(name) and _is_list_of_blocks(child)]
    own = any(True for _ in item.parameters(recurse=False)) or any(
        not any(True for _ in child.children()) for child in children.values()
    )
    return len(lists) == 1 and not own


def _is_list_of_blocks(module: nn.Module) -> bool:
    items = _with_parameters(module)
    all_listed = len(_listed(module)) == len(items) > 0
    return (
        all_listed
        and len({type(item) for item in items.values()}) == 1
        and all(_matrices(item) > 1 for item in items.values())
    )


def _with_parameters(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}


def _repeated(found: _Found) -> _Found:
    often = Counter(type(module) for _, module in found)
    return [(name, module) for name, module in found if often[type(module)] > 1]


def _matrices(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _parameters(found: _Found) -> int:
    return sum(parameter.numel() for _, module in found for parameter in module.parameters())
