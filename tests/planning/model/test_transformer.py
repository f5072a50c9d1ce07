"""A model by its dimensions alone: its parameters, FLOPs and activations are those of the papers that count them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_families import LLAMA_70B
from paceline.job.model import Dimensions
from paceline.planning.model.transformer import transformer

GPT3 = Dimensions(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)


def test_parameters_are_those_that_the_models_are_named_after() -> None:
    assert transformer(GPT3).parameters == pytest.approx(174.6e9, rel=1e-3)
    assert transformer(LLAMA_70B).parameters == pytest.approx(70.55e9, rel=1e-3)


def test_flops_are_those_of_narayanan_et_al() -> None:
    """Equation 3 of arXiv:2104.04473 without recomputation, forward alone: 24 B s l h² (1 + s / 6h + V / 12lh)."""
    layers, hidden, seq, vocab = GPT3.layers, GPT3.hidden, GPT3.seq, GPT3.vocab
    expected = 24 * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert transformer(GPT3).flops == pytest.approx(expected, rel=1e-9)


def test_kept_activations_are_those_of_korthikanti_et_al() -> None:
    """§4.1 of arXiv:2205.05198.

    34 + 5 a s / h bytes a token and unit of width, of which tensor parallelism divides all but 10.
    """
    layer = transformer(GPT3).blocks[1]
    units = GPT3.seq * GPT3.hidden
    assert 2 * layer.kept_outside == 10 * units
    assert 2 * layer.kept_inside == 24 * units
    assert 2 * layer.kept_scores == pytest.approx(5 * GPT3.heads * GPT3.seq / GPT3.hidden * units)


@given(experts=st.integers(2, 64), top_k=st.integers(1, 2))
def test_experts_add_parameters_for_all_and_work_for_those_that_a_token_meets(experts: int, top_k: int) -> None:
    dense = transformer(Dimensions(layers=2, hidden=256, heads=4, seq=64, vocab=1000))
    sparse = transformer(Dimensions(layers=2, hidden=256, heads=4, seq=64, vocab=1000, experts=experts, top_k=top_k))
    assert sparse.blocks[1].experts == experts * 2 * 256 * 1024
    more = sparse.blocks[1].flops - dense.blocks[1].flops
    router = 2 * 64 * 256 * experts
    assert more == pytest.approx((top_k - 1) * 2 * 64 * 2 * 256 * 1024 + router)


def test_ranks_that_share_keys_and_values_compute_their_own_and_hold_all_weights_of_them() -> None:
    """Eight heads of keys and values over 16 ranks: half as many columns as with sixteen heads, once for each rank."""
    whole, shared, many = (
        transformer(d, tp)
        for d, tp in ((LLAMA_70B, 8), (LLAMA_70B, 16), (LLAMA_70B.model_copy(update={"kv_heads": 16}), 16))
    )
    assert whole == transformer(LLAMA_70B)
    assert shared.blocks[1].gemms == many.blocks[1].gemms
    assert shared.blocks[1].keys == many.blocks[1].keys
    assert shared.parameters == whole.parameters
    keys_and_values = 2 * 8 * 128 * 8192
    assert shared.blocks[1].vectors - whole.blocks[1].vectors == keys_and_values
    assert whole.blocks[1].matrices - shared.blocks[1].matrices == keys_and_values


def test_equal_layers_are_one_object_so_that_searches_cost_them_once() -> None:
    assert len({id(block) for block in transformer(GPT3)}) == 3


def test_planning_from_dimensions_needs_no_torch() -> None:
    code = (
        "import sys; import paceline.planning.model.transformer, paceline.planning.cost.estimate; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
