"""Attention within the documents of packed sequences.

A packed sequence holds several documents. Its `position_ids` restart at 0 with each document, and a token may attend
only to tokens of its own document. On GPUs in half precision, `torch.nn.attention.varlen` computes only these pairs of
tokens. Elsewhere, a mask excludes all other pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.device import has_varlen_attention
from paceline.job.experts import without_values


def attend(query: Tensor, key: Tensor, value: Tensor, within: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Compute causal attention, confined to documents if `within` is given.

    Args:
        query: queries, shape (n, heads, t, size).
        key: keys, same shape as `query`.
        value: values, same shape as `query`.
        within: the documents, as returned by `causal_documents`; None if each sequence is one document.
        dropout: probability of dropping an attention weight.

    Returns:
        Weighted sums of the values, shape (n, heads, t, size).
    """
    if within is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
    if within.dim() > 1:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=within, dropout_p=dropout)
    from torch.nn.attention.varlen import varlen_attn

    n, heads, t, size = query.shape
    query, key, value = (x.transpose(1, 2).reshape(n * t, heads, size) for x in (query, key, value))
    # `t` bounds the lengths, so the host need not wait for the device to compute the longest document
    mixed = varlen_attn(query, key, value, within, within, t, t, window_size=(-1, 0))
    assert isinstance(mixed, Tensor)
    return mixed.view(n, t, heads, size).transpose(1, 2)


def causal_documents(documents: Tensor, x: Tensor, heads: int, dropout: float) -> Tensor:
    """Prepare the argument `within` for all calls of `attend` in a forward pass.

    Args:
        documents: number of each token's document, as returned by `numbered`, shape (n, t).
        x: activations before the first attention, shape (n, t, hidden).
        heads: number of attention heads.
        dropout: probability of dropping an attention weight in this forward pass.

    Returns:
        If `attend` can use `torch.nn.attention.varlen`: cumulative lengths of the documents, beginning with 0, int32,
        shape (documents + 1,). Otherwise: a mask to add to the scores, shape (n, 1, t, t).
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if not dropout and has_variable_lengths(x, dtype, x.shape[-1] // heads):
        flat = documents.flatten()
        begins = F.pad((flat[1:] != flat[:-1]).nonzero().flatten() + 1, (1, 0))
        return F.pad(begins, (0, 1), value=len(flat)).to(torch.int32)
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    mask = torch.zeros(same.shape, dtype=dtype, device=x.device)
    # added to the scores, because a boolean mask would be converted again in every layer
    return mask.masked_fill_(~same.tril(), float("-inf")).unsqueeze(1)


def numbered(position_ids: Tensor) -> Tensor:
    """Number the documents of packed sequences across the whole batch.

    A document begins where a position is not larger than the position before it.

    Args:
        position_ids: position of each token in its document, shape (n, t).

    Returns:
        Number of each token's document, shape (n, t). Numbers increase within a row, and no two rows share a number.
    """
    n, t = position_ids.shape
    begins = F.pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0))
    return begins.cumsum(1) + t * torch.arange(n, device=position_ids.device).unsqueeze(1)


def lengths(documents: Tensor) -> Tensor:
    """Return the number of tokens in each token's document, shape (n, t)."""
    flat = documents.flatten()
    return (torch.searchsorted(flat, flat, right=True) - torch.searchsorted(flat, flat)).view(documents.shape)


def has_variable_lengths(x: Tensor, dtype: torch.dtype, size: int) -> bool:
    """Return True if `torch.nn.attention.varlen` supports the device, the dtype and the head size."""
    if dtype not in (torch.float16, torch.bfloat16) or not has_varlen_attention(x.device):
        return False
    # The shape of the cumulative lengths depends on values, which are unknown while compiling and on the meta device.
    return not (torch.compiler.is_compiling() or without_values(x) or size % 8 or size > 256)
