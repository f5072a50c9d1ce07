"""Mixtures of experts: token counts, and the weight of the load-balancing loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.device import widest_float


class BalancedRouter(Protocol):
    """A router with a load-balancing loss; any module with these attributes is one.

    Attributes:
        weight: the parameter of the router.
        taken: number of tokens that each expert has processed, shape (experts,).
        dropped: number of choices that were dropped because the chosen expert was full, shape ().
        sequence_weight: weight of each sequence's load-balancing loss in the next forward pass; see `weigh_balance`.
        token_weight: weight of each token, shape (n, t), for packed sequences: the weight of a document's loss is the
            sum over its tokens. None if documents share the weight of their sequence in proportion to their tokens.
        pieces: number of ranks over which each sequence is divided.
        sum_over_pieces: function that sums the token counts of a sequence over the ranks that share it.
    """

    weight: Tensor
    taken: Tensor
    dropped: Tensor
    sequence_weight: Tensor | None
    token_weight: Tensor | None
    pieces: int
    sum_over_pieces: Callable[[Tensor], object]


def routers_of(model: nn.Module) -> Iterator[tuple[str, BalancedRouter]]:
    """Yield the name and module of each router that has a load-balancing loss."""
    for name, module in model.named_modules():
        if hasattr(module, "sequence_weight") and hasattr(module, "sum_over_pieces"):
            yield name, cast(BalancedRouter, module)


def moe_counts(model: nn.Module) -> dict[str, Any]:
    """Return this rank's token counts of the model's routers in training; {} without routers.

    Returns:
        `routed`: number of choices of an expert (tokens * top_k, over all layers). `dropped`: number of choices for
            which the expert was full. `load`: for each router, by name, the number of tokens that each expert has
            processed. The counts can be summed over ranks that read different samples or different parts of a sequence.
            Ranks that read the same samples have equal counts.
    """
    routers = dict(routers_of(model))
    if not routers:
        return {}
    taken = {name: router.taken.tolist() for name, router in routers.items()}
    dropped = sum(int(router.dropped) for router in routers.values())
    return {"routed": sum(map(sum, taken.values())) + dropped, "dropped": dropped, "load": taken}


def add_counts(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum several results of `moe_counts`; return {} if all are empty."""
    some = [counts for counts in found if counts]
    if not some:
        return {}
    load: dict[str, list[int]] = {}
    for counts in some:
        for name, taken in counts["load"].items():
            load[name] = [a + b for a, b in zip(load.get(name, [0] * len(taken)), taken, strict=True)]
    return {"routed": sum(c["routed"] for c in some), "dropped": sum(c["dropped"] for c in some), "load": load}


def weigh_balance(model: nn.Module, weight: Tensor | float | None, of_tokens: Tensor | None = None) -> None:
    """Set the weight of each sequence's load-balancing loss for the next forward passes.

    A caller that scales the loss of a microbatch before the backward pass must scale the load-balancing loss in the
    same way: the weight of a sequence is its share of the items (tokens) in the global mean.

    Args:
        weight: one number for all sequences, or one for each of the n sequences of the next forward pass, shape (n,).
            None, the initial value, means 1 / n, which is correct if the loss is the mean over all sequences of a
            forward pass.
        of_tokens: weight of each token, shape (n, t); see `BalancedRouter.token_weight`.
    """
    routers = [router for _, router in routers_of(model)]
    if routers:
        device = routers[0].weight.device
        given = None if weight is None else torch.as_tensor(weight, dtype=widest_float(device), device=device)
        for router in routers:
            router.sequence_weight, router.token_weight = given, of_tokens


def by_expert(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort the choices by expert, and count the choices of each expert.

    Choice j of a token has the index token * k + j. Choices without an expert come last. The counts have the shape
    (experts,).
    """
    of_expert, order = top_k_index.flatten().sort(stable=True)
    bounds = torch.searchsorted(of_expert, torch.arange(experts + 1, device=order.device))
    return order, bounds.diff()


def combined(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (tokens, hidden) of each token's rows.

    `rows[i]` belongs to choice `order[i]`. `weights` has the shape (tokens, k). The function avoids atomic additions,
    because they are nondeterministic on a GPU.
    """
    (tokens, k), hidden = weights.shape, rows.shape[1]
    weighted = rows * weights.flatten()[order].unsqueeze(-1)
    return weighted.new_zeros(tokens * k, hidden).index_copy(0, order, weighted).view(tokens, k, hidden).sum(1)


def without_values(tensor: Tensor) -> bool:
    """Return True if a tensor has a shape but no values (a meta tensor or a `FakeTensor`)."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
