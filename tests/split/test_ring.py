"""Ring attention over several ranks is the attention of one process.

Values and gradients, every division of the tokens, every kernel.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.comm import Group
from paceline.split.ring import (
    attend,
    attend_backward,
    attend_by_matrices,
    attend_by_matrices_backward,
    held,
    join_ring,
    ring_attention,
)
from ranks import Backend, Ranks

SAMPLES, HEADS, SIZE = 2, 4, 6


def inputs(tokens: int, key_heads: int, value_size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value and the gradient of the output, as a projection leaves them: (n, t, heads, size) transposed."""
    torch.manual_seed(7)
    shapes = [(HEADS, SIZE), (key_heads, SIZE), (key_heads, value_size), (HEADS, value_size)]
    return [
        torch.randn(SAMPLES, tokens, heads, size, dtype=torch.float64).to(dtype).transpose(1, 2)
        for heads, size in shapes
    ]


def one_process(tokens: int, causal: bool, key_heads: int, value_size: int, scale: float | None) -> list[Tensor]:
    query, key, value, grad = inputs(tokens, key_heads, value_size)
    given = [t.requires_grad_() for t in (query, key, value)]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def own(full: Tensor, group: Group) -> Tensor:
    return torch.cat([full[:, :, a:b] for a, b in held(full.shape[2], group.rank, group.size)], 2)


def in_a_ring(
    tokens: int, causal: bool, key_heads: int, value_size: int, scale: float | None, dtype: torch.dtype
) -> dict[str, Any]:
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    query, key, value, grad = (own(t, group) for t in inputs(tokens, key_heads, value_size, dtype))
    given = [t.requires_grad_() for t in (query, key, value)]
    out = ring_attention(query, key, value, join_ring(group), causal=causal, scale=scale)
    assert out.dtype == dtype
    return {
        "held": held(tokens, group.rank, group.size),
        "tensors": [out.detach(), *torch.autograd.grad(out, given, grad)],
    }


def assembled(parts: list[dict[str, Any]], like: list[Tensor]) -> list[Tensor]:
    whole = [torch.full_like(t, math.nan) for t in like]
    for part in parts:
        for full, piece in zip(whole, part["tensors"], strict=True):
            places = torch.cat([torch.arange(a, b) for a, b in part["held"]])
            full[:, :, places] = piece.to(full.dtype)
    return whole


@pytest.mark.parametrize(
    ("backend", "size", "tokens", "causal", "key_heads", "value_size", "scale"),
    [
        pytest.param("gloo", 4, 24, True, 2, 6, 0.3, id="grouped queries: each key head serves two heads"),
        pytest.param("shm", 3, 9, True, 4, 6, None, id="9 tokens do not make 6 chunks"),
        pytest.param("shm", 3, 9, False, 1, 9, None, id="all tokens see all, with one key head and larger values"),
        pytest.param("shm", 2, 4, True, 4, 3, None, id="chunks of one token, and values smaller than keys"),
    ],
)
def test_a_ring_of_ranks_attends_as_one_process(
    ranks: Ranks,
    backend: Backend,
    size: int,
    tokens: int,
    causal: bool,
    key_heads: int,
    value_size: int,
    scale: float | None,
) -> None:
    expected = one_process(tokens, causal, key_heads, value_size, scale)
    parts = ranks(size, in_a_ring, tokens, causal, key_heads, value_size, scale, torch.float64, backend=backend)
    for found, right in zip(assembled(parts, expected), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)


def test_blocks_of_bfloat16_are_merged_in_float32(ranks: Ranks) -> None:
    expected = one_process(32, True, 2, 6, None)
    single = [t.to(torch.bfloat16) for t in expected]
    parts = ranks(4, in_a_ring, 32, True, 2, 6, None, torch.bfloat16, backend="shm")
    for found, right, rounded in zip(assembled(parts, expected), expected, single, strict=True):
        error, rounding = (found - right).norm() / right.norm(), (rounded.double() - right).norm() / right.norm()
        assert error < 6 * rounding, "as much as the kernel's own rounding, and not more with every rank"


def test_causal_work_is_the_same_on_every_rank() -> None:
    for ranks in (2, 4, 8):
        tokens = 16 * ranks
        places = [torch.cat([torch.arange(a, b) for a, b in held(tokens, rank, ranks)]) for rank in range(ranks)]
        assert torch.equal(torch.cat(places).sort().values, torch.arange(tokens)), "every token once"
        assert len({int((place + 1).sum()) for place in places}) == 1, "token i sees i + 1 tokens"


def test_tokens_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens cannot be divided evenly among 4 ranks"):
        held(10, 0, 4)


@pytest.mark.parametrize("causal", [True, False])
def test_the_path_for_devices_without_a_kernel_computes_what_the_kernel_does(causal: bool) -> None:
    query, key, value, grad = inputs(10, 2, SIZE)
    kernel = attend(query, key, value, causal, 0.4)
    matrices = attend_by_matrices(query, key, value, causal, 0.4)
    torch.testing.assert_close(matrices, kernel, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        attend_by_matrices_backward(grad, query, key, value, *kernel, causal, 0.4),
        attend_backward(grad, query, key, value, *kernel, causal, 0.4),
        rtol=1e-11,
        atol=1e-12,
    )


def checked_as_an_operator() -> None:
    """torch's own test of an operator: its fake twin has the same shapes and strides, and torch.compile traces it."""
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    *qkv, _ = (own(t, group).requires_grad_() for t in inputs(8, 2, SIZE))
    arguments = (*qkv, join_ring(group), True, 0.5)
    torch.library.opcheck(
        torch.ops.paceline.ring_attention.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_the_ring_is_an_operator_that_compilers_can_rely_on(ranks: Ranks) -> None:
    ranks(2, checked_as_an_operator)


def left_by_a_peer() -> str:
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    if group.rank == 1:
        return ""  # ends without having sent anything
    query, key, value, _ = (own(t, group) for t in inputs(8, 2, SIZE))
    try:
        ring_attention(query, key, value, join_ring(group), causal=True)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_is_gone_is_an_error_and_no_hang(ranks: Ranks) -> None:
    error, _ = ranks(2, left_by_a_peer, backend="shm", deadline_s=30)
    assert error.startswith("SyncError: ")
    assert "ring attention" in error
