"""Layers of today's models: their products, what they keep and what they send are those of their definitions."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.job.model import Dimensions, ModelSpec
from paceline.planning.model.graph import BlockTrace
from paceline.planning.model.model_info import model_info
from paceline.planning.model.transformer import active_parameters, transformer

LLAMA: dict[str, Any] = {"gated": True, "tied": False, "positions": False, "seq": 256, "vocab": 1000}
SMALL: dict[str, Any] = LLAMA | {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128}
LATENT = {"q_rank": 24, "kv_rank": 16, "nope": 16, "rope": 8, "value": 12}
MAMBA = {"state": 16, "heads": 8, "head_dim": 16, "groups": 2, "conv": 4}
MIXTURE = {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1, "dense_layers": 1}
NEW: dict[str, dict[str, Any]] = {
    "wide heads": {"head_dim": 32, "kv_heads": 2, "biases": "qkv"},
    "latent attention": {"mla": LATENT, "mtp": 1} | MIXTURE,
    "latent attention without a rank of queries": {"mla": {key: LATENT[key] for key in LATENT if key != "q_rank"}},
    "every other layer a mixture": {"experts": 4, "moe_every": 2, "shared_ffn": 48, "gated": False},
    "experts on a narrow projection": {"experts": 4, "expert_hidden": 16, "biases": "none", "gated": False},
    "windows": {"window": 64, "full_every": 2},
    "encoder and decoder": {"encoder_layers": 3, "source_seq": 128, "kv_heads": 2, "tied": True},
    "masked tokens": {"segments": 2, "predicted": 0.25, "pooled": True, "positions": 512, "gated": False},
    "hybrid": {"mamba": MAMBA, "pattern": "M-*E", "experts": 4, "top_k": 2, "mtp": 1},
    "linear attention": {
        "delta": {"key_heads": 2, "value_heads": 4, "head_dim": 16},
        "pattern": "DE*E",
        "experts": 4,
        "gated_attention": True,
    },
    "parallel": {"parallel": True, "kv_heads": 1},
}


def dimensions(**more: Any) -> Dimensions:
    return Dimensions(**SMALL | more)


def squares(block: BlockTrace) -> list[tuple[float, int, int, int, bool]]:
    return [(gemm.rows, gemm.n, gemm.k, gemm.batch, gemm.causal) for gemm in block.gemms if gemm.batch]


@pytest.mark.parametrize("more", NEW.values(), ids=NEW)
def test_the_plan_checks_and_the_trace_count_the_same_parameters(more: dict[str, Any]) -> None:
    d = dimensions(**more)
    found, trace = model_info(ModelSpec(transformer=d)), transformer(d)
    assert found.numel == trace.parameters
    assert found.total.experts == sum(block.experts for block in trace)
    assert len(found.blocks) == d.encoder_layers + d.layers + d.mtp
    assert set(found.blocks) < set(found.modules)


@pytest.mark.parametrize("more", NEW.values(), ids=NEW)
def test_every_weight_that_is_divided_or_whole_has_its_product(more: dict[str, Any]) -> None:
    for block in transformer(dimensions(**more)).blocks[1:-1]:
        weights = sum(gemm.n * gemm.k * gemm.times * max(gemm.experts, 1) for gemm in block.gemms if not gemm.batch)
        assert 0 <= block.parameters - weights < 2000  # norms, biases, a convolution
        divided = [gemm for gemm in block.gemms if not gemm.batch and not gemm.experts and gemm.divided != "none"]
        assert block.matrices == sum(gemm.n * gemm.k * gemm.times for gemm in divided)


def test_latent_attention_has_wider_queries_than_values_and_sends_whole_keys() -> None:
    layer = transformer(dimensions(mla=LATENT)).blocks[1]
    assert squares(layer) == [(256, 256, 24, 4, True), (256, 12, 256, 4, True)]
    down = [(gemm.n, gemm.k) for gemm in layer.gemms if gemm.divided == "none"]
    assert down == [(24, 64), (16 + 8, 64)]  # whole on every rank of tp
    assert layer.keys == 256 * 4 * (24 + 12)


def test_a_window_costs_what_it_reaches_over_and_layers_between_see_all() -> None:
    found = transformer(dimensions(window=64, full_every=4, seq=1024)).blocks[1:-1]
    assert [squares(block)[0] for block in found[:3]] == [(1024, 64, 16, 4, False)] * 3
    assert squares(found[3])[0] == (1024, 1024, 16, 4, True)
    assert found[0].kept_scores == found[3].kept_scores / 16
    assert found[0].kind != found[3].kind


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    assert transformer(dimensions(window=256)).blocks[1] == transformer(dimensions()).blocks[1]


def test_dense_layers_and_mixtures_are_different_blocks() -> None:
    trace = transformer(dimensions(**MIXTURE))
    assert [block.kind for block in trace] == ["embedding", "layer", *["mixture"] * 3, "head"]
    dense, mixture = trace.blocks[1:3]
    assert (dense.experts, dense.routed) == (0, 0)
    assert mixture.experts == 8 * 3 * 64 * 32
    assert mixture.matrices - 4 * 64 * 64 == 3 * 64 * 32  # the shared expert is an ordinary weight
    assert mixture.routed == 256 * 64 * 2
    assert active_parameters(dimensions(**MIXTURE)) == trace.parameters - 3 * (8 - 2) * 3 * 64 * 32


def test_experts_on_a_narrow_projection_are_sent_less() -> None:
    block = transformer(dimensions(experts=4, top_k=2, expert_hidden=16)).blocks[1]
    assert block.routed == 256 * 16 * 2
    assert block.experts == 4 * 3 * 16 * 128


def test_an_encoder_stands_before_the_decoder_that_attends_to_it() -> None:
    trace = transformer(dimensions(encoder_layers=2, source_seq=512))
    assert [block.kind for block in trace] == ["embedding", *["encoder"] * 2, "between", *["layer"] * 4, "head"]
    encoder, decoder = trace.blocks[1], trace.blocks[4]
    assert squares(encoder) == [(512, 512, 16, 4, False), (512, 16, 512, 4, False)]
    assert squares(decoder)[2:] == [(256, 512, 16, 4, False), (256, 16, 512, 4, False)]
    assert (encoder.reductions, decoder.reductions) == (2, 3)


def test_a_head_for_masked_tokens_computes_those_alone() -> None:
    whole, masked = dimensions(gated=False), dimensions(gated=False, predicted=0.125)
    all_tokens, some = transformer(whole).blocks[-1], transformer(masked).blocks[-1]
    assert some.gemms[-1].rows == all_tokens.gemms[-1].rows / 8
    assert some.kept_inside == all_tokens.kept_inside / 8


def test_further_tokens_are_predicted_with_the_same_vocabulary() -> None:
    plain, further = transformer(dimensions()), transformer(dimensions(mtp=1))
    assert [block.kind for block in further][-2:] == ["mtp", "head"]
    assert further.blocks[-1].flops == 2 * plain.blocks[-1].flops
    assert further.blocks[-1].parameters == plain.blocks[-1].parameters
    assert further.blocks[-2].flops - plain.blocks[1].flops == 2 * 256 * 64 * 128


def test_a_hybrid_has_the_layers_of_its_pattern() -> None:
    trace = transformer(dimensions(mamba=MAMBA, pattern="M*-E", experts=4))
    assert [block.kind for block in trace][1:-1] == ["mamba", "attention", "feed_forward", "mixture"]
    mamba = trace.blocks[1]
    inner, group = 8 * 16, 2 * 16
    assert mamba.matrices == 64 * (2 * inner + 2 * group + 8) + inner * 64
    # in chunks of 128 tokens: scores of each group, their product with each head, states and their outputs
    assert sum(gemm.flops for gemm in mamba.gemms if gemm.batch) == 2 * 256 * (
        128 * group + 128 * inner + 2 * 16 * inner
    )
    assert [block.reductions for block in trace][1:-1] == [1, 1, 1, 1]


def test_linear_attention_costs_as_much_for_each_token_of_a_long_sequence() -> None:
    delta = {"key_heads": 2, "value_heads": 4, "head_dim": 16}
    short, long = (transformer(dimensions(delta=delta, pattern="D-*-", seq=seq)) for seq in (1024, 4096))
    assert long.blocks[1].flops == 4 * short.blocks[1].flops
    assert long.blocks[3].flops > 6 * short.blocks[3].flops
    assert short.blocks[1].kind == "delta"


def test_a_gate_of_attention_is_one_more_width_of_queries() -> None:
    plain, gated = transformer(dimensions()).blocks[1], transformer(dimensions(gated_attention=True)).blocks[1]
    assert gated.matrices - plain.matrices == 64 * 64


def test_parallel_parts_are_summed_once() -> None:
    layer = transformer(dimensions(parallel=True)).blocks[1]
    assert layer.reductions == 1
    assert layer.outside < transformer(dimensions()).blocks[1].outside
    assert layer.flops == transformer(dimensions()).blocks[1].flops


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": 65}, "65 does not divide into 4 heads; 64 would, or give head_dim"),
        ({"expert_ffn": 32}, "expert_ffn: there are no experts; say how many with experts"),
        ({"mla": LATENT, "kv_heads": 2}, "mla: its own nope, rope and value take the place"),
        ({"full_every": 2}, "say how many the others see with window"),
        ({"source_seq": 64}, "say how many layers it has with encoder_layers"),
        ({"mamba": MAMBA}, "say which layers it is with pattern"),
        ({"delta": {"key_heads": 2, "value_heads": 4, "head_dim": 16}}, "delta: say which layers it is with pattern"),
        ({"pattern": "*-"}, "2 letters for 4 layers"),
        ({"pattern": "*-x-"}, 'unknown letter "x"'),
        ({"pattern": "M-*-"}, '"M" without mamba; give mamba, too'),
        ({"pattern": "*E*E"}, '"E" without experts; give experts, too'),
    ],
)
def test_dimensions_that_do_not_belong_together_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dimensions(**wrong)
