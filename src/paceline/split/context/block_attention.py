"""Attention between one block of queries and one of keys, mergeable over blocks.

PyTorch's kernels compute it, or matrix products where there is no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.device import has_flash_attention

_aten = torch.ops.aten


def state_dtype(query: Tensor) -> torch.dtype:
    """The dtype of merged blocks: at least 32 bits, as in the kernels' sums."""
    return torch.promote_types(query.dtype, torch.float32)


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention output (n, heads, t, size) and the scores' log-sum-exp (n, heads, t).

    Both are in `state_dtype`. Key and value are (n, key heads, keys, size), with `heads` a multiple of `key heads`.
    `causal` requires as many queries as keys.
    """
    if query.device.type == "cpu":
        mixed, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    elif _flash_fits(query):
        mixed, log_sum, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        mixed, log_sum = attend_by_matrices(query, key, value, causal, scale)
    return mixed, log_sum


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from this block. `mixed` and `log_sum` are those over all blocks."""
    if query.device.type == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, mixed, log_sum, 0.0, causal, scale=scale
        )
    elif _flash_fits(query):
        # the random state of dropout, which is off
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            mixed,
            log_sum.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unused,
            unused,
            scale=scale,
        )
    else:
        grads = attend_by_matrices_backward(grad, query, key, value, mixed, log_sum, causal, scale)
    of_query, of_key, of_value = grads
    return of_query, of_key, of_value


def attend_by_matrices(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`attend` for float32 and float64 on a GPU, where no kernel computes it.

    Holds all scores of the block in memory.
    """
    scores = _scores(query, key, causal, scale)
    log_sum = scores.logsumexp(-1)
    mixed = (scores - log_sum.unsqueeze(-1)).exp_() @ _grouped(value)
    return mixed.flatten(1, 2).to(query.dtype), log_sum.flatten(1, 2)


def attend_by_matrices_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` for `attend_by_matrices`."""
    groups = key.shape[1]
    grad, mixed = (t.unflatten(1, (groups, -1)).to(state_dtype(query)) for t in (grad, mixed))
    weights = (_scores(query, key, causal, scale) - log_sum.unflatten(1, (groups, -1)).unsqueeze(-1)).exp_()
    of_weights = grad @ _grouped(value).mT - (grad * mixed).sum(-1, keepdim=True)
    of_scores = weights * of_weights * scale
    of_query = of_scores @ _grouped(key)
    of_key = of_scores.mT @ query.unflatten(1, (groups, -1)).to(state_dtype(query))
    of_value = weights.mT @ grad
    return of_query.flatten(1, 2), of_key.sum(2), of_value.sum(2)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention scores (n, key heads, heads per key head, queries, keys)."""
    scores: Tensor = query.unflatten(1, (key.shape[1], -1)).to(state_dtype(query)) @ _grouped(key).mT * scale
    if causal:
        scores.masked_fill_(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1), float("-inf")
        )
    return scores


def _grouped(key: Tensor) -> Tensor:
    """Keys (n, key heads, 1, keys, size), ready to be broadcast over their heads."""
    return key.unsqueeze(2).to(state_dtype(key))


def _flash_fits(query: Tensor) -> bool:
    """True if the flash kernel of accelerators supports the query (Dao, 2023, arXiv:2307.08691)."""
    return (
        query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256 and has_flash_attention(query.device)
    )
