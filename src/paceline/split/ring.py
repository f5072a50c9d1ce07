"""Ring attention: exact attention over sequences whose tokens are divided over ranks.

Ranks pass their keys and values around a ring (Liu et al., 2023, arXiv:2310.01889). PyTorch's own `context_parallel`
(torch.distributed.tensor.experimental) uses the same algorithm, but has kernels only for GPUs, needs DTensors for
query, key and value, and patches `scaled_dot_product_attention` for the whole process. This module uses plain tensors
and also runs on the CPU. It implements the ring as one operator, which works with torch.compile and activation
checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm import Group
from paceline.device import has_flash_attention

# groups by name, because operators accept only plain values as arguments
_RINGS: WeakValueDictionary[str, Group] = WeakValueDictionary()


def join_ring(group: Group) -> str:
    """Register a group of two or more ranks for `ring_attention` and return its name.

    The registration ends when the group is deleted.
    """
    assert group.backend is not None, "attention in a group of one rank needs no ring"
    name: str = group.backend.group_name
    _RINGS[name] = group
    return name


def held(tokens: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Return the intervals of a sequence that a rank holds, in order.

    With causal attention, a late token attends to more tokens than an early token. To give all ranks the same work, the
    sequence is cut into 2 * `ranks` chunks, and rank r holds the chunks r and 2 * ranks - 1 - r (Llama 3,
    arXiv:2407.21783, section 3.3.2). If `tokens`, the length, is not a multiple of 2 * `ranks`, the sequence is cut
    into `ranks` chunks, and the last rank has the most work.

    Raises:
        ValueError: `tokens` is not a multiple of `ranks`.
    """
    if tokens % ranks:
        raise ValueError(f"{tokens} tokens cannot be divided evenly among {ranks} ranks")
    if tokens % (2 * ranks):
        chunk = tokens // ranks
        return [(rank * chunk, (rank + 1) * chunk)]
    chunk = tokens // (2 * ranks)
    return [(first * chunk, (first + 1) * chunk) for first in (rank, 2 * ranks - 1 - rank)]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, ring: str, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Compute attention of this rank's queries over the tokens of all ranks.

    The result is the same as with `F.scaled_dot_product_attention`. Every rank sends keys and values `ranks - 1` times
    while it computes. In the backward pass, every rank also sends their gradients.

    Args:
        query: queries of shape (n, heads, t, size), for the t tokens that the rank holds according to `held`.
        key: keys of shape (n, key heads, t, size); `heads` must be a multiple of `key heads`.
        value: values of shape (n, key heads, t, value size).
        ring: the name of the group from `join_ring`.
        causal: whether a token attends only to itself and to earlier tokens of the whole sequence.
        scale: factor of the scores; 1 / sqrt(size) by default.

    Raises:
        SyncError: a rank is lost or did not arrive within the deadline of the group.
    """
    device = query.device.type
    # torch does the same for its own attention
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    sizes = query.shape[-1], value.shape[-1]
    # the kernels require the same head size for query, key and value; on accelerators, it must be a multiple of 8
    size = max(sizes) if device == "cpu" else -(-max(sizes) // 8) * 8
    query, key, value = (F.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in (query, key, value))
    # the kernels require dense rows; keys and values are copied anyway because they are sent
    query = query if query.stride(-1) == 1 else query.contiguous()
    mixed: Tensor = _ring_attention(query, key, value, ring, causal, scale)[0]
    return mixed[..., : sizes[1]] if sizes[1] < size else mixed


@torch.library.custom_op("paceline::ring_attention", mutates_args=())
def _ring_attention(
    query: Tensor, key: Tensor, value: Tensor, ring: str, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (n, heads, t, size) and the scores' log-sum-exp (n, heads, t)."""
    group = _RINGS[ring]
    tokens, pair = query.shape[2], _Pair.of(key, value)
    mixed = log_sum = query.new_empty(0)
    for step in range(group.size):
        arriving = _pass_on(group, pair) if step + 1 < group.size else None
        seen = _seen(tokens, group.rank, (group.rank - step) % group.size, causal)
        if seen is not None:
            block, block_log_sum = attend(
                query[:, :, seen.rows], pair.key[:, :, seen.columns], pair.value[:, :, seen.columns], seen.causal, scale
            )
            if step == 0:
                mixed, log_sum = block.to(state_dtype(query)), block_log_sum.contiguous()
            else:
                _merge(mixed[:, :, seen.rows], log_sum[:, :, seen.rows], block, block_log_sum)
        if arriving is not None:
            pair = arriving()
    return _by_token(mixed.to(query.dtype)), log_sum


@_ring_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _like_by_token(query), query.new_empty(query.shape[:3], dtype=state_dtype(query))


@torch.library.custom_op("paceline::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    log_sum: Tensor,
    ring: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value.

    The gradients travel around the ring one step behind the keys and values, and arrive at the rank that holds these
    keys and values.
    """
    group = _RINGS[ring]
    tokens, pair = query.shape[2], _Pair.of(key, value)
    # the kernels require a dense last dimension
    grad = _by_token(grad)
    of_query = torch.zeros_like(query, dtype=state_dtype(query))
    gradients = pair.with_packed(torch.zeros_like(pair.packed, dtype=state_dtype(query)))
    travelling: Callable[[], _Pair] | None = None
    for step in range(group.size):
        arriving = _pass_on(group, pair) if step + 1 < group.size else None
        seen = _seen(tokens, group.rank, (group.rank - step) % group.size, causal)
        if seen is not None:
            rows, columns = (slice(None), slice(None), seen.rows), (slice(None), slice(None), seen.columns)
            own, other = (grad[rows], query[rows]), (pair.key[columns], pair.value[columns])
            added = attend_backward(*own, *other, mixed[rows], log_sum[rows], seen.causal, scale)
        if travelling is not None:
            gradients = travelling()
        if seen is not None:
            of_query[rows] += added[0]
            gradients.key[columns] += added[1]
            gradients.value[columns] += added[2]
        travelling = _pass_on(group, gradients)
        if arriving is not None:
            pair = arriving()
    assert travelling is not None
    gradients = travelling()
    return (
        _by_token(of_query.to(query.dtype)),
        _like_by_token(key).copy_(gradients.key),
        _like_by_token(value).copy_(gradients.value),
    )


@_ring_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _like_by_token(query), _like_by_token(key), _like_by_token(value)


def _save(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor, Tensor, Tensor, str, bool, float],
    output: tuple[Tensor, Tensor],
) -> None:
    query, key, value, *ctx.settings = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _ring_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)  # type: ignore[attr-defined]
    return (*grads, None, None, None)


_ring_attention.register_autograd(_backward, setup_context=_save)


@dataclass(frozen=True)
class _Seen:
    """A block of scores: the queries `rows` attend to the keys `columns`."""

    rows: slice
    columns: slice
    causal: bool


def _seen(tokens: int, rank: int, owner: int, causal: bool) -> _Seen | None:
    """Return the block in which queries of `rank` attend to keys of `owner`, if any.

    If `tokens` is even, each rank holds two chunks, an early chunk and a late chunk (see `held`). Every late chunk
    follows all early chunks. If rank < owner, the rank's early chunk precedes the owner's early chunk, and the rank's
    late chunk follows the owner's late chunk.
    """
    everything, half = slice(0, tokens), tokens // 2
    if not causal or owner == rank:
        return _Seen(everything, everything, causal)
    if tokens % 2:
        return _Seen(everything, everything, False) if owner < rank else None
    return _Seen(everything, slice(0, half), False) if owner < rank else _Seen(slice(half, tokens), everything, False)


def _merge(mixed: Tensor, log_sum: Tensor, block: Tensor, block_log_sum: Tensor) -> None:
    """Merge the output of a block into the accumulated output `mixed`.

    The weights are the sums of the exponential scores.
    """
    mixed.lerp_(block.to(mixed.dtype), torch.sigmoid(block_log_sum - log_sum).unsqueeze(-1))
    log_sum.copy_(torch.logaddexp(log_sum, block_log_sum))


@dataclass(frozen=True)
class _Pair:
    """Keys and values, or their gradients, in one block of memory.

    The block is sent as one message.
    """

    packed: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _Pair:
        packed = torch.cat((key.reshape(-1), value.reshape(-1)))
        return cls(packed, packed[: key.numel()].view(key.shape), packed[key.numel() :].view(value.shape))

    def with_packed(self, packed: Tensor) -> _Pair:
        """Return a pair with the same shapes that uses the memory `packed`."""
        keys = self.key.numel()
        return _Pair(packed, packed[:keys].view(self.key.shape), packed[keys:].view(self.value.shape))


def _pass_on(group: Group, pair: _Pair) -> Callable[[], _Pair]:
    """Send a pair to the next rank; the returned function receives a pair."""
    received = torch.empty_like(pair.packed)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    pending = group.start_exchange([(after, pair.packed)], [(before, received)], "ring attention")

    def arrived() -> _Pair:
        pending.wait()
        return pair.with_packed(received)

    return arrived


def _by_token(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor (n, heads, t, size) that is stored token by token."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _like_by_token(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)


_aten = torch.ops.aten


def state_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of merged blocks, which has at least 32 bits."""
    return torch.promote_types(query.dtype, torch.float32)


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention (n, heads, t, size) and the scores' log-sum-exp (n, heads, t).

    Both results have the dtype `state_dtype`. Key and value have the shape (n, key heads, keys, size), where `heads` is
    a multiple of `key heads`. `causal` requires equal numbers of queries and keys.
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
    """Compute the gradients of query, key and value from one block.

    `mixed` is the attention output over all blocks, and `log_sum` is the log-sum-exp over all blocks.
    """
    if query.device.type == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, mixed, log_sum, 0.0, causal, scale=scale
        )
    elif _flash_fits(query):
        # a placeholder for the random state of dropout, which is disabled
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)
        given = grad, query, key, value, mixed, log_sum.contiguous(), None, None, query.shape[2], key.shape[2]
        grads = _aten._scaled_dot_product_flash_attention_backward(*given, 0.0, causal, unused, unused, scale=scale)
    else:
        grads = attend_by_matrices_backward(grad, query, key, value, mixed, log_sum, causal, scale)
    of_query, of_key, of_value = grads
    return of_query, of_key, of_value


def attend_by_matrices(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `attend` if no kernel exists, as for float32 and float64 on a GPU.

    All scores of the block are in memory at the same time.
    """
    scores = _scores(query, key, causal, scale)
    log_sum = scores.logsumexp(-1)
    mixed = (scores - log_sum.unsqueeze(-1)).exp_() @ _grouped(value)
    return mixed.flatten(1, 2).to(query.dtype), log_sum.flatten(1, 2)


def attend_by_matrices_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value for `attend_by_matrices`."""
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
    scores: Tensor = query.unflatten(1, (key.shape[1], -1)).to(state_dtype(query)) @ _grouped(key).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _grouped(key: Tensor) -> Tensor:
    """Reshape keys to (n, key heads, 1, keys, size), which broadcasts over query heads."""
    return key.unsqueeze(2).to(state_dtype(key))


def _flash_fits(query: Tensor) -> bool:
    """Return True if the flash kernel supports a query (Dao, 2023, arXiv:2307.08691)."""
    return (
        query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256 and has_flash_attention(query.device)
    )
