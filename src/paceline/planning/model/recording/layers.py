"""Layers that a recording keeps whole: linear layers and embeddings."""

from __future__ import annotations

from typing import Protocol, TypeGuard, cast

from torch import Tensor, nn


def is_linear(module: nn.Module) -> bool:
    """True if the module computes x W (+ b) and nothing else.

    It is an `nn.Linear`, or `Conv1D` of transformers, whose weight is transposed.
    """
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """True for transformers' `Conv1D`, with weight (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_embedding(module: nn.Module) -> bool:
    """True if the module looks up rows of its weight without needing all of them.

    A maximal norm or counts would need all.
    """
    if type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def has_max_norm(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """True if a module is an embedding that renormalises the rows that it looks up."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


class Weighted(Protocol):
    """Common attributes of linear layers and embeddings."""

    weight: Tensor
    bias: Tensor | None


def weighted(module: nn.Module) -> Weighted:
    """The module, typed as one with a weight and perhaps a bias."""
    return cast("Weighted", module)
