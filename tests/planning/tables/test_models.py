"""Models of rows, by name and by dimensions: a wrong model makes every prediction of its table wrong."""

from __future__ import annotations

import pytest

from paceline.planning.tables.cells import UnusableError, model_of

GPT = {"model": "GPT 7B", "n_layers": "32", "hidden": "4096", "n_heads": "32", "seq_len": "2048", "vocab": "50257"}


def test_a_known_name_is_enough() -> None:
    trace = model_of({"model": "Llama 3.1 8B", "seq_len": "8192"}, [], 1, 1)
    assert trace.parameters == pytest.approx(8.03e9, rel=0.01)
    assert trace.tokens == 8192


def test_stated_dimensions_go_before_those_of_a_name() -> None:
    cells = {"model": "Llama 3.1 8B", "seq_len": "2048", "hidden": "2048", "n_layers": "4", "n_heads": "16"}
    assert model_of(cells, [], 1, 1).parameters < 1e9


def test_what_agrees_with_a_name_is_that_model_with_the_rows_sequence() -> None:
    """Its grouped heads and gates, which a table does not state, come with the name."""
    cells = {"model": "Llama 3.1 8B", "seq_len": "2048", "hidden": "4096", "n_layers": "32"}
    trace = model_of(cells, [], 1, 1)
    assert trace.parameters == pytest.approx(8.03e9, rel=0.01)
    assert trace.tokens == 2048


def test_a_model_of_no_known_name_needs_dimensions_and_says_so() -> None:
    with pytest.raises(UnusableError, match='hidden is not stated, and "House model" is no model that is known'):
        model_of({"model": "House model", "seq_len": "2048"}, [], 1, 1)
    with pytest.raises(UnusableError, match="seq_len is not stated"):
        model_of({"model": "House model", "hidden": "4096"}, [], 1, 1)
    with pytest.raises(UnusableError, match="neither n_layers nor n_params"):
        model_of({"model": "House model", "hidden": "4096", "seq_len": "2048"}, [], 1, 1)


def test_layers_follow_from_the_number_of_parameters() -> None:
    stated = model_of(GPT, [], 1, 1)
    counted = model_of({**GPT, "n_layers": "", "n_params": "6.7e9"}, [], 1, 4)
    assert len(counted.blocks) == len(stated.blocks)


def test_heads_that_a_row_leaves_out_are_those_of_a_row_as_wide() -> None:
    others = [{**GPT, "n_heads": "64"}]
    without = {key: value for key, value in GPT.items() if key != "n_heads"}
    heads = [max(gemm.batch for gemm in model_of(without, some, 1, 1).blocks[1].gemms) for some in (others, [])]
    assert heads == [64, 32]  # or heads of 128


def test_a_feed_forward_part_has_the_matrices_that_its_parameters_tell() -> None:
    """Two or three matrices differ by a sixth of all FLOPs."""
    cells = {**GPT, "model": "House model", "ffn": "11008"}
    gated, plain = (model_of({**cells, "n_params": size}, [], 1, 1).parameters for size in ("6.74e9", "5.2e9"))
    assert gated > 1.2 * plain


def test_megatron_pads_vocabularies_for_each_rank_of_tp() -> None:
    one, eight = (model_of({**GPT, "framework": "Megatron-LM"}, [], tp, 1).blocks[-1].gemms[-1].n for tp in (1, 8))
    assert (one, eight) == (50304, 51200)
    assert model_of({**GPT, "framework": "FSDP"}, [], 1, 1).blocks[-1].gemms[-1].n == 50264


def test_of_t5_the_stated_length_is_the_encoders() -> None:
    """Its decoder's targets have 114 tokens; counted as long as the sources, T5 would take twice its time."""
    short, long = (model_of({"model": "T5 11B", "seq_len": str(seq)}, [], 1, 1) for seq in (512, 1024))
    assert 1.5 < long.flops / short.flops < 2.1


def test_bert_leaves_out_the_padding_that_its_recipe_leaves_out() -> None:
    recipe = {"model": "BERT-Large", "seq_len": "512", "notes": "pre-training phase 2", "framework": "PyTorch"}
    assert model_of(recipe, [], 1, 1).tokens < 300
    assert model_of({**recipe, "framework": "TensorFlow"}, [], 1, 1).tokens == 512
    assert model_of({**recipe, "seq_len": "128"}, [], 1, 1).tokens == 128


def test_a_masked_language_model_has_logits_for_masked_tokens_only() -> None:
    bert = {"model": "BERT-Large", "seq_len": "512", "framework": "TensorFlow"}
    masked, fine_tuned = (
        model_of({**bert, "notes": notes}, [], 1, 1).blocks[-1].flops for notes in ("80 of 512", "fine-tuning on SQuAD")
    )
    assert fine_tuned < 0.1 * masked


def test_lengths_are_binary_thousands() -> None:
    assert model_of({**GPT, "seq_len": "8K"}, [], 1, 1).tokens == 8192
    assert model_of({**GPT, "seq_len": "", "notes": "seq len 4096"}, [], 1, 1).tokens == 4096


def test_mixtures_are_read_from_the_options_that_ran_them() -> None:
    notes = "num-experts=8 moe-router-topk=2 moe-ffn-hidden-size=2048"
    dense, mixture = (model_of({**GPT, "notes": some}, [], 1, 1) for some in ("", notes))
    assert not any(block.experts for block in dense.blocks)
    assert all(block.experts for block in mixture.blocks[1:-1])
