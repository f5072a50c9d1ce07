"""A model by its dimensions alone: its parameters, FLOPs and activations are those of the papers that count them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_families import LLAMA_70B
from paceline.cluster.cluster import cluster_from
from paceline.comm import Group
from paceline.job.job import Job
from paceline.job.loss_items import call
from paceline.job.model import Dimensions, ModelSpec
from paceline.planning.model.forward_pass import batch_of
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.model.model_info import model_info, without_memory
from paceline.planning.model.transformer import active_parameters, transformer
from paceline.planning.plan import Plan
from paceline.planning.prediction import layout_of
from paceline.split.layout import whole_parts
from paceline.split.tensor_parallel import shard_tensors
from refusals import raises

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
    ("wrong", "code", "fields"),
    [
        ({"hidden": 65}, "model.hidden_not_divisible", {"hidden": 65, "heads": 4, "fitting": 64}),
        ({"expert_ffn": 32}, "model.no_experts", {"key": "expert_ffn"}),
        ({"mla": LATENT, "kv_heads": 2}, "model.mla_alone", {}),
        ({"full_every": 2}, "model.full_every_alone", {}),
        ({"source_seq": 64}, "model.no_encoder", {}),
        ({"mamba": MAMBA}, "model.pattern_missing", {"key": "mamba"}),
        (
            {"delta": {"key_heads": 2, "value_heads": 4, "head_dim": 16}},
            "model.pattern_missing",
            {"key": "delta"},
        ),
        ({"pattern": "*-"}, "model.pattern_length", {"letters": 2, "layers": 4}),
        ({"pattern": "*-x-"}, "model.pattern_letter", {"letter": "x"}),
        ({"pattern": "M-*-"}, "model.pattern_without_key", {"letter": "M", "key": "mamba"}),
        ({"pattern": "*E*E"}, "model.pattern_without_key", {"letter": "E", "key": "experts"}),
    ],
)
def test_dimensions_that_do_not_belong_together_are_refused(
    wrong: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(ValueError, code, **fields):
        dimensions(**wrong)


LAYER = BlockTrace(
    "layer", "layers.0", (Gemm(8, 4, 4, divided="n"), Gemm(8, 8, 2, batch=2, divided="batch")), matrices=16, vectors=4
)
HEAD = BlockTrace("head", "", (Gemm(8, 100, 4),), matrices=400)


def test_flops_are_two_for_each_multiplication_in_every_head_and_repetition() -> None:
    assert Gemm(8, 4, 5).flops == 2 * 8 * 4 * 5
    assert Gemm(8, 8, 2, batch=3, times=2).flops == 2 * 3 * 2 * 8 * 8 * 2
    assert Gemm(8, 8, 2, batch=3, causal=True).flops == Gemm(8, 8, 2, batch=3).flops
    assert LAYER.flops == 2 * 8 * 4 * 4 + 2 * 2 * 8 * 8 * 2
    assert ModelTrace((LAYER, LAYER, HEAD)).flops == 2 * LAYER.flops + HEAD.flops


def test_a_parameter_that_stands_in_two_blocks_counts_once() -> None:
    tied = ModelTrace((replace(HEAD, kind="embedding"), LAYER, HEAD), tied=400)
    assert tied.parameters == 400 + 20


def test_neighbours_that_are_equal_are_one_run() -> None:
    other = replace(LAYER, kernels=5)
    assert ModelTrace((LAYER, LAYER, other, LAYER, HEAD)).runs == ((LAYER, 2), (other, 1), (LAYER, 1), (HEAD, 1))
    assert list(ModelTrace((LAYER, HEAD))) == [LAYER, HEAD]


def test_sums_over_tp_are_as_wide_as_the_products_that_make_them() -> None:
    """A whole model as one block passes on one number, its loss, and sums far more in its middle."""
    model = replace(LAYER, gemms=(Gemm(1024, 256, 64, divided="n"), Gemm(1024, 64, 256, divided="k")), boundary=1.0)
    assert model.reduced == 1024 * 64
    layer = transformer(Dimensions(layers=2, hidden=64, heads=4, seq=16, vocab=100)).blocks[1]
    assert layer.reduced == layer.boundary


TRUNK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    # two divide the vocabulary and the feed-forward layer, four do not
    "uneven": TRUNK | {"model_type": "llama", "vocab_size": 122, "intermediate_size": 66},
    # four ranks share two heads of keys and values, whose projections every rank holds whole
    "grouped": TRUNK | {"model_type": "llama", "vocab_size": 122, "intermediate_size": 64, "num_key_value_heads": 2},
    "tied": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120},
    "mixture": TRUNK
    | {
        "model_type": "mixtral",
        "vocab_size": 122,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "num_local_experts": 4,
    },
    "relative": TRUNK
    | {"model_type": "deberta-v2", "vocab_size": 120, "intermediate_size": 64, "relative_attention": True},
}


def job_of(folder: Path, name: str) -> Job:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(MODELS[name]))
    task = "masked_lm" if name == "relative" else "causal_lm"
    data = {"kind": "synthetic", "shape": [16], "vocab": 120}
    return Job(
        model={"hf": str(file), "task": task},
        data=data,
        loss="cross_entropy",
        optimizer="sgd",
        global_batch=8,
        stop={"steps": 1},
    )


def divided_by_the_split(folder: Path, tp: int) -> dict[str, int]:
    """Elements of the matrices of each model that its split divides, of which every rank gets as many."""
    found = {}
    for name in MODELS:
        job = job_of(folder, name)
        model, loss = without_memory(job.model).train(), job.loss.build()
        sizes, parts = {name: p.shape for name, p in model.named_parameters()}, whole_parts(model)
        shard_tensors(model, parts, Group(0, tp), batch_of(job, 2), partial(call, loss=loss))
        found[name] = sum(size.numel() for name, size in sizes.items() if len(size) > 1 and "tp" in parts[name].sharded)
    return found


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_planner_counts_the_weights_that_the_split_divides(tp: int, tmp_path: Path) -> None:
    jobs, cluster = {name: job_of(tmp_path, name) for name in MODELS}, cluster_from("4xH100-SXM")
    split = divided_by_the_split(tmp_path, tp)
    for name, job in jobs.items():
        trace = layout_of(job, cluster, Plan.parse(f"tp={tp}")).trace
        assert sum(block.matrices for block in trace) - trace.tied == split[name] > 0, name
