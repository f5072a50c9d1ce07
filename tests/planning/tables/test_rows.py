"""Rows of tables: misread cells or models put a whole table's predictions off, and nothing says so."""

from __future__ import annotations

import csv
import math
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE
from paceline.planning.cost import frameworks as known
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.layout import Layout
from paceline.planning.tables import cells as cell_readers
from paceline.planning.tables.cells import UnusableError, model_of, number, whole
from paceline.planning.tables.layouts import Row, Skipped, framework_of, layout_of, read, row_of

TABLES = Path(__file__).parents[3] / "benchmarks" / "tables"
CELLS = {
    "model": "Llama 3.1 8B",
    "seq_len": "8192",
    "gpu": "H100",
    "n_gpus": "8",
    "micro_batch": "1",
    "global_batch": "8",
    "precision": "bf16",
    "act_ckpt": "full",
    "zero_fsdp": "FSDP",
    "framework": "torchtitan",
    "step_time_s": "1.4",
    "memory_gib": "",
    "tokens_per_s_per_gpu": "",
    "tflops_per_gpu": "",
    "mfu": "",
    "notes": "",
}


def table(folder: Path, *changes: dict[str, str]) -> tuple[list[Row], list[Skipped]]:
    """Rows of a table with the usual cells, changed row by row."""
    path = folder / "some.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(CELLS))
        writer.writeheader()
        writer.writerows({**CELLS, **change} for change in changes)
    return read([path])


def test_a_row_has_its_place_and_its_time(tmp_path: Path) -> None:
    (row,), skipped = table(tmp_path, {})
    assert (row.place, row.seconds, row.memory_gib, row.out_of_memory) == (("some", 2), 1.4, None, False)
    assert not skipped


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "House model"}, 'hidden is not stated, and "House model" is no model that is known'),
        ({"step_time_s": ""}, "neither a time nor a memory was measured"),
        ({"n_gpus": ""}, "n_gpus is not stated"),
        ({"gpu": "abacus"}, "abacus"),
    ],
)
def test_a_skipped_row_says_why(tmp_path: Path, change: dict[str, str], why: str) -> None:
    """A row that is left out without a word makes any score look better."""
    rows, (skipped,) = table(tmp_path, {}, change)
    assert [row.number for row in rows] == [2]
    assert skipped.number == 3
    assert why in skipped.why


def test_a_time_follows_from_any_rate_that_is_printed(tmp_path: Path) -> None:
    """Tokens, FLOP/s and utilisation of one run are one time."""
    (timed,), _ = table(tmp_path, {})
    layout = timed.layout
    tokens = layout.global_batch * 8192 / 1.4 / 8
    tflops = 3 * layout.trace.flops * layout.global_batch / 8 / 1.4 / 1e12
    rates = [{"tokens_per_s_per_gpu": f"{tokens}"}, {"tflops_per_gpu": f"{tflops}"}, {"mfu": f"{tflops / 989.4 * 100}"}]
    rows, _ = table(tmp_path, *({"step_time_s": "", **rate} for rate in rates))
    assert [row.seconds for row in rows] == pytest.approx([1.4] * 3, rel=1e-3)


def test_a_run_that_ended_without_memory_is_known_as_such(tmp_path: Path) -> None:
    (row,), _ = table(tmp_path, {"step_time_s": "OOM"})
    assert row.out_of_memory
    assert row.seconds is None


def test_rows_of_one_group_do_the_same_work_with_other_plans(tmp_path: Path) -> None:
    """Regret among runs of different work or machines would compare what nobody chooses between."""
    rows, _ = table(tmp_path, {}, {"zero_fsdp": "shard_grad_op"}, {"global_batch": "16"}, {"precision": "fp8 rowwise"})
    assert rows[0].group == rows[1].group
    assert rows[0].plan != rows[1].plan
    assert len({row.group for row in rows}) == 3


@pytest.fixture(scope="module")
def published() -> tuple[list[Row], list[Skipped]]:
    """Rows of all tables of the benchmark."""
    return read(sorted(TABLES.glob("*.csv")))


def test_of_all_given_tables_few_rows_are_unusable(published: tuple[list[Row], list[Skipped]]) -> None:
    rows, skipped = published
    assert len(rows) > 2500
    assert len(skipped) <= 0.05 * (len(rows) + len(skipped))
    unknown = [row for row in skipped if "no model that is known" in row.why or "catalogue" in row.why]
    assert len(unknown) < 0.02 * len(rows)
    assert all(row.why for row in skipped)


# rows whose stated dimensions contradict their stated number of parameters
ODD = {("bloom_tr11_a100", 21), *(("maxtext_tpu_a3_given", line) for line in (2, 3, 4))}
ODD |= {("lucie7b_jeanzay_a100_given", line) for line in (29, 33, 35)}


def test_models_have_the_stated_parameters_and_rows_the_stated_degrees(
    published: tuple[list[Row], list[Skipped]],
) -> None:
    """Embeddings counted twice made a 1B model a fifth too large, in 390 rows."""
    for row in published[0]:
        stated = {name: number(row.cells.get(name, "")) for name in ("n_params", "n_gpus", "tp", "pp", "cp")}
        if stated["n_params"] and row.place not in ODD:
            assert row.layout.trace.parameters == pytest.approx(stated["n_params"], rel=0.03), row.place
        assert stated["n_gpus"] in (None, row.layout.ranks), row.place
        assert all(stated[name] in (None, getattr(row.layout, name)) for name in ("tp", "pp", "cp")), row.place


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
    with pytest.raises(UnusableError, match=r"hidden.*House model"):
        model_of({"model": "House model", "seq_len": "2048"}, [], 1, 1)
    with pytest.raises(UnusableError, match="seq_len"):
        model_of({"model": "House model", "hidden": "4096"}, [], 1, 1)
    with pytest.raises(UnusableError, match=r"n_layers.*n_params"):
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


LLAMA_LIKE = {
    "model": "Llama-like 1B",
    "n_layers": "16",
    "hidden": "2048",
    "ffn": "8192",
    "n_heads": "32",
    "seq_len": "4096",
    "vocab": "131072",
}


@pytest.mark.parametrize(
    ("notes", "size", "parameters"),
    [
        ("tied embeddings", "", 1342e6),
        ("untied embeddings", "", 1610e6),
        ("", "1342177280", 1342e6),
        ("", "1610612736", 1610e6),
    ],
)
def test_a_head_shares_the_embedding_as_stated_or_as_its_parameters_tell(
    notes: str, size: str, parameters: float
) -> None:
    trace = model_of({**LLAMA_LIKE, "notes": notes, "n_params": size}, [], 1, 1)
    assert trace.parameters == pytest.approx(parameters, rel=1e-3)
    assert trace.blocks[1].parameters == pytest.approx(67.1e6, rel=1e-3)  # its layers are gated in any case


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,024", 1024),
        ("7.5e9", 7.5e9),
        ("175B", 175e9),
        ("250k-class (150257 in estimates)", 250e3),
        ("8K", 8e3),
        ("", None),
        ("V not stated", None),
        ("v4", None),
    ],
)
def test_numbers_are_found_in_what_people_write(text: str, value: float | None) -> None:
    assert number(text) == value


@given(st.integers(0, 10**12))
def test_any_whole_number_is_read_with_and_without_its_commas(value: int) -> None:
    assert whole({"n": str(value)}, "n") == whole({"n": f"{value:,}"}, "n") == value


@given(st.text())
def test_no_text_makes_a_reader_fail(text: str) -> None:
    cells = dict.fromkeys(("precision", "act_ckpt", "zero_fsdp", "notes", "framework", "interconnect"), text)
    number(text)
    cell_readers.precision(cells, CATALOGUE["H100-SXM"])
    cell_readers.products(cells)
    cell_readers.moment_bytes(cells)
    cell_readers.recomputed(cells)
    cell_readers.sequence(cells)
    cell_readers.sharding(text, "none")
    cell_readers.between_bytes_per_s(text, 8)
    assert 0 < cell_readers.fabric_share(text) <= 1


def test_what_is_not_stated_is_an_error_that_names_the_column() -> None:
    with pytest.raises(UnusableError, match="global_batch"):
        whole({"global_batch": "per recipe"}, "global_batch")
    assert whole({}, "tp", 1) == 1


@pytest.mark.parametrize(
    ("text", "gigabits_per_device"),
    [
        ("400Gb/s RDMA per GPU", 400),
        ("8x200Gb/s HDR IB per node", 200),
        ("NVLink; 4x100Gb/s Omni-Path", 50),
        ("NVSwitch; 8x400Gb/s NDR", 400),
        ("100GbE", 12.5),
        ("1600 Gbps EFA", 200),
        ("NVLink 600 GB/s", None),
        ("not stated", None),
    ],
)
def test_a_rate_is_a_hosts_unless_the_text_says_a_devices(text: str, gigabits_per_device: float | None) -> None:
    """A device's 400 Gb/s read as its host's made every plan over hosts eight times too slow."""
    found = cell_readers.between_bytes_per_s(text, 8)
    assert found == (None if gigabits_per_device is None else pytest.approx(gigabits_per_device * 1e9 / 8))


def test_fabrics_whose_packets_processors_carry_reach_less_of_their_rate() -> None:
    shares = [cell_readers.fabric_share(text) for text in ("4x100Gb/s Omni-Path", "100 Gb/s TCP", "8x200Gb/s HDR IB")]
    assert shares[0] < shares[1] < shares[2] == 1.0


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ("FSDP over 48", "zero3"),
        ("HSDP: fsdp within a slice", "hybrid"),
        ("FULL_SHARD", "zero3"),
        ("SHARD_GRAD_OP", "zero2"),
        ("ZeRO-1", "zero1"),
        ("dist-opt=True", "zero1"),
        ("optim_grads_params", "zero3"),
        ("optim_grads", "zero2"),
        ("DDP", "none"),
        ("", "zero1"),
        ("per recipe", "zero1"),
    ],
)
def test_sharding_is_read_by_any_of_its_names_and_else_is_the_frameworks(text: str, sharding: str) -> None:
    assert cell_readers.sharding(text, "zero1") == sharding


@pytest.mark.parametrize(
    ("text", "products"),
    [
        ("bf16", ""),
        ("fp8 rowwise", "fp8-row"),
        ("float8 (rowwise)", "fp8-row"),
        ("fp8 (current scaling)", "fp8"),
        ("fp8 blockwise 128x128", "fp8-block"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "fp4"),
        ("FP8-MX", "mxfp8"),
        ("FP8-CS (FP8-MX)", "fp8"),
        ("fp8 fine-grained", "fp8-block"),
        ("int8 (AQT)", "int8"),
    ],
)
def test_products_have_the_precision_and_the_scales_that_are_written(text: str, products: str) -> None:
    assert cell_readers.products({"precision": text}) == products


@pytest.mark.parametrize(
    ("text", "device", "precision"),
    [
        ("bf16", "A100-SXM-80", "bf16"),
        ("mixed", "V100-SXM-32", "fp16"),
        ("AMP", "H100-SXM", "bf16"),
        ("fp8 rowwise", "H100-SXM", "bf16"),
        ("fp16 with fp32 grad", "A100-SXM-80", "fp16"),
        ("fp32", "V100-SXM-32", "fp32"),
        ("TF32", "A100-SXM-80", "tf32"),
        ("", "TPU-v4", "bf16"),
    ],
)
def test_activations_have_the_precision_that_is_written_or_the_devices_usual_one(
    text: str, device: str, precision: str
) -> None:
    assert cell_readers.precision({"precision": text}, CATALOGUE[device]) == precision


@pytest.mark.parametrize(
    ("text", "remat"),
    [
        ("selective(op)", "selective"),
        ("save_qkv_proj", "selective"),
        ("minimal", "selective"),
        ("full", "block"),
        ("every layer", "block"),
        ("none", "none"),
        ("no full recompute", "none"),
        ("per recipe", "unknown"),
        ("not stated", "unknown"),
        ("", "unknown"),
    ],
)
def test_recomputation_that_is_not_stated_is_unknown_not_none(text: str, remat: str) -> None:
    """Taken for none, runs of large models would be refused as too large."""
    assert cell_readers.recomputed({"act_ckpt": text}) == remat


@pytest.mark.parametrize(
    ("notes", "size"),
    [("8-bit Adam", 1.0), ("bf16 optimizer states", 2.0), ("Adam moments in bf16", 2.0), ("Adam", 4.0)],
)
def test_narrow_moments_are_read_from_the_notes(notes: str, size: float) -> None:
    assert cell_readers.moment_bytes({"notes": notes, "precision": "bf16"}) == size


def test_sequence_parallelism_is_read_and_its_absence_too() -> None:
    assert cell_readers.sequence({"act_ckpt": "seq+selective"})
    assert cell_readers.sequence({"notes": "with sequence-parallel"})
    assert not cell_readers.sequence({"notes": "no sequence parallelism; sequence-parallel=False"})
    assert not cell_readers.sequence({})


ROW_CELLS = {
    "model": "GPT 7B",
    "n_params": "6.9e9",
    "n_layers": "32",
    "hidden": "4096",
    "n_heads": "32",
    "seq_len": "2048",
    "vocab": "50257",
    "gpu": "A100-SXM-80GB",
    "gpus_per_node": "8",
    "interconnect": "NVLink; 8x200Gb/s HDR IB per node",
    "n_gpus": "64",
    "tp": "2",
    "pp": "4",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "bf16",
    "act_ckpt": "full",
    "framework": "Megatron-LM",
    "step_time_s": "9.5",
}


def layout(**cells: str) -> Layout:
    return layout_of({**ROW_CELLS, **cells}, [])


def framework(**cells: str) -> Any:
    row = {**ROW_CELLS, **cells}
    return framework_of(row, layout(**cells).machines.device)


def test_a_row_is_the_plan_that_it_states() -> None:
    found = layout()
    assert (found.tp, found.pp, found.data_ranks, found.microbatches, found.samples) == (2, 4, 8, 8, 1.0)
    assert found.remat == "block"
    assert found.machines.hosts == 8
    assert found.machines.between.bandwidth == 25e9
    assert found.cut == (9, 8, 8, 9)  # Megatron's: embedding and head come on top of equal numbers of layers


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"n_gpus": "63"}, r"\b63\b.*\b8\b"),
        ({"n_gpus": "", "dp": ""}, "n_gpus"),
        ({"global_batch": ""}, "global_batch"),
    ],
)
def test_a_row_that_states_too_little_says_what(changed: dict[str, str], what: str) -> None:
    with pytest.raises(UnusableError, match=what):
        layout(**changed)


@pytest.mark.parametrize(
    ("cells", "name", "value"),
    [
        ({"global_batch": "131,072 tokens"}, "global_batch", 64),
        ({"zero_fsdp": "dist-opt=True"}, "zero_dp", True),
        ({"zero_fsdp": "none"}, "zero_dp", False),
        # stages are as many as stated, or as divide the layers; none is without a layer
        ({"vpp": "2"}, "chunks", 2),
        ({"vpp": "2"}, "schedule", "interleaved"),
        ({"schedule": "interleaved 1F1B"}, "chunks", 4),
        ({"vpp": "16"}, "chunks", 8),
        ({"notes": "LoRA, rank 16"}, "lora", 16),
        ({"model": "GPT 7B LoRA"}, "lora", 32),
        ({"cp": "2", "framework": "DeepSpeed"}, "ulysses", True),
        ({"cp": "2", "notes": "Ulysses"}, "ulysses", True),
        ({"cp": "2"}, "ulysses", False),
        ({}, "lora", 0),
        # a model without experts has none to divide
        ({"ep": "8"}, "ep", 1),
        # InfiniBand without a number of cards is one of a host's
        ({"interconnect": "NVSwitch + HDR InfiniBand 200 Gb/s"}, "machines.between.bandwidth", 25e9),
        ({"interconnect": "100GbE"}, "machines.between.bandwidth", pytest.approx(12.5e9 / 8)),
    ],
)
def test_a_cell_is_read_as_it_is_meant(cells: dict[str, str], name: str, value: object) -> None:
    assert attrgetter(name)(layout(**cells)) == value


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("FSDP over 16", (16, 4, 3)),
        ("HSDP: fsdp within a host", (8, 8, 3)),
        ("full_shard", (64, 1, 3)),
        ("shard_grad_op", (64, 1, 2)),
        ("none", (1, 64, 3)),
    ],
)
def test_ranks_shard_the_state_as_stated(text: str, degrees: tuple[int, int, int]) -> None:
    found = layout(tp="1", pp="1", zero_fsdp=text, framework="FSDP", micro_batch="", act_ckpt="none")
    assert (found.fsdp, found.dp, found.zero) == degrees


def test_experts_are_folded_where_the_framework_does_so() -> None:
    mixture = {"model": "Mixtral 8x7B", "hidden": "", "n_layers": "", "n_params": "", "n_heads": "", "vocab": ""}
    folded = layout(**mixture, ep="8", framework="Megatron Core, NeMo", gpu="H100", seq_len="4096")
    assert (folded.expert_ranks, folded.ep) == (8, 1)
    other = layout(**mixture, ep="8", framework="torchtitan", gpu="H100", seq_len="4096")
    assert (other.expert_ranks, other.ep) == (0, 8)


MIXTURE = {
    "model": "Mixtral 8x7B",
    **dict.fromkeys(("hidden", "n_layers", "n_params", "n_heads", "vocab"), ""),
    "framework": "Megatron Core, NeMo",
    "gpu": "H100",
    "seq_len": "4096",
    "ep": "4",
}


@pytest.mark.parametrize(
    ("notes", "parts", "tp"),
    [
        ("", 4, 1),
        ("expert tensor parallel 2", 8, 2),
        ("expert tp=2", 8, 2),
        ("etp2", 8, 2),
        ("expert-tensor-parallel-size=2", 8, 2),
        ("tp2 ep4 etp1", 4, 1),
    ],
)
def test_experts_are_divided_as_the_notes_say(notes: str, parts: int, tp: int) -> None:
    found = layout(**MIXTURE, notes=notes)
    assert (found.expert_parts, found.expert_tp) == (parts, tp)
    assert found.expert_ranks * found.expert_tp == found.expert_parts


@pytest.mark.parametrize(
    ("text", "notes", "remat"),
    [
        ("selective (core_attn)", "", "selective"),
        ("moe_act, layernorm, mla_up_proj", "", "selective"),
        ("layernorm", "", "selective"),
        ("recompute moe", "", "block"),
        ("selective (mlp)", "", "block"),
        ("not stated", "recompute modules: moe, layernorm", "block"),
        ("full", "", "block"),
        ("none", "", "none"),
    ],
)
def test_modules_that_are_recomputed_are_a_part_of_each_layer(text: str, notes: str, remat: str) -> None:
    """Recomputed experts that are read as none make a step too fast and its memory too large."""
    cells = {**MIXTURE, "model": "DeepSeek-V3", "n_gpus": "256"} if "m" in text + notes else MIXTURE
    found = layout(**cells, act_ckpt=text, notes=notes)
    assert found.remat == remat
    assert found.remat_share == 1 if text == "full" or remat != "block" else 0 < found.remat_share < 0.6


def test_recomputed_experts_are_most_of_a_mixture_and_attention_is_the_rest() -> None:
    shares = [layout(**MIXTURE, act_ckpt=text).remat_share for text in ("moe", "moe, core_attn")]
    assert 0.6 < shares[0] < shares[1] < 1
    dense = layout(act_ckpt="moe"), layout(act_ckpt="mlp")
    assert dense[0].remat == "selective"
    assert 0.4 < dense[1].remat_share < 0.7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pp": "64", "n_gpus": "64"}, r"\b64\b.*\b34\b"),
        ({"hidden": "0", "n_heads": "32"}, "hidden"),
        ({"gpus_per_node": "0"}, "gpus_per_node"),
    ],
)
def test_a_row_that_cannot_have_run_says_why(tmp_path: Path, change: dict[str, str], why: str) -> None:
    names = dict.fromkeys((*CELLS, *change), "")
    with (tmp_path / "some.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerow({**names, **CELLS, "framework": "Megatron-LM", **change})
    rows, (skipped,) = read([tmp_path / "some.csv"])
    assert not rows
    assert re.search(why, skipped.why)


@given(
    st.fixed_dictionaries(dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "micro_batch", "n_heads"), st.integers(0, 9)))
)
def test_any_numbers_are_a_layout_with_a_time_or_a_reason(numbers: dict[str, int]) -> None:
    cells = {**ROW_CELLS, **{name: str(value) for name, value in numbers.items()}}
    try:
        row = row_of("some", 2, cells, [])
    except UnusableError:
        return
    assert 0 < predict_layout(row.layout).step_time_s < math.inf


def test_recomputation_that_is_not_stated_is_the_least_that_fits() -> None:
    """As its users would have it: the run was made, so it fitted."""
    roomy, tight = (
        layout(act_ckpt="per recipe", framework="FSDP", tp="1", pp="1", micro_batch=size, global_batch="4096")
        for size in ("1", "64")
    )
    assert roomy.remat == "none"
    assert tight.remat == "block"


def test_devices_on_pcie_have_no_nvlink() -> None:
    assert layout(interconnect="PCIe; 100GbE").machines.device.inside.bandwidth < 50e9
    assert layout(interconnect="NVLink, PCIe 4").machines.device.inside.bandwidth > 200e9


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ({"framework": "torchtitan"}, known.TORCHTITAN),
        ({"framework": "nanotron (TP reduce-scatter)", "zero_fsdp": "none (zero 0, DDP)"}, known.NANOTRON),
        ({"framework": "torchtitan; torch.compile"}, known.TORCHTITAN_COMPILED),
        ({"framework": "MaxText", "gpu": "TPU v5p"}, known.MAXTEXT),
        ({"framework": "Megatron-DeepSpeed"}, known.MEGATRON_DEEPSPEED),
        ({"framework": "DeepSpeed 0.9"}, known.DEEPSPEED),
        ({"framework": "llm-foundry (Composer)"}, known.COMPOSER),
        ({"framework": "LiBai"}, known.ONEFLOW),
        ({"framework": "Megatron-LM"}, known.MEGATRON_LM),
        ({"framework": "Megatron-LM core_v0.6"}, known.MEGATRON_CORE),
        ({"framework": "NeMo", "gpu": "H100"}, known.MEGATRON_CORE),
        ({"framework": "Megatron Bridge; 26.06 NeMo", "gpu": "GB200"}, known.MEGATRON_CORE),
        ({"framework": "Megatron Bridge; 26.06 NeMo", "gpu": "GB200", "precision": "MXFP8"}, known.MEGATRON_CORE),
        ({"framework": "house stack", "zero_fsdp": "FSDP"}, known.FSDP),
        ({"framework": "house stack", "zero_fsdp": "DDP"}, known.DDP),
        ({"framework": "house stack"}, known.OTHER),
    ],
)
def test_frameworks_are_known_by_name_version_and_device(cells: dict[str, str], found: known.Framework) -> None:
    cells = {"tp": "1", "pp": "1", **cells}
    assert framework(**cells).name == found.name


def test_no_attention_is_fused_before_ampere() -> None:
    assert not framework(framework="FSDP", gpu="V100-SXM-32GB", precision="fp16").profile.flash
    assert framework(framework="FSDP").profile.flash
    assert framework(framework="Megatron-LM", notes="flash-attention").profile.flash
    assert not framework(framework="FSDP", notes="no flash attention").profile.flash


@pytest.mark.parametrize(
    ("notes", "graphs"), [("packed sequences; CUDA graphs", True), ("no CUDA graphs", False), ("", False)]
)
def test_kernels_are_replayed_as_graphs_if_the_row_says_so(notes: str, graphs: bool) -> None:
    assert framework(notes=notes).profile.graphs == graphs


@pytest.mark.parametrize("zero", ["none (zero 0, DDP)", "zero1"])
def test_gradients_that_are_accumulated_in_fp32_are_sent_in_fp32(zero: str) -> None:
    """Read as two bytes that the backward pass hides, plans with much data parallelism looked too fast."""
    found = layout(framework="nanotron", precision="bf16 (fp32 grad accumulation)", zero_fsdp=zero, act_ckpt="none")
    assert (found.parameter_bytes, found.gradient_bytes, found.sync_bytes) == (2.0, 4.0, 4.0)
    assert found.zero_dp == (zero == "zero1")
    assert not found.framework.overlaps_gradients
    assert found.framework.sums_gradients


def test_traffic_of_tp_is_hidden_where_the_row_says_so() -> None:
    assert framework(notes="tp-comm-overlap=True").profile.overlaps_tp > 0
    assert framework().profile.overlaps_tp == 0
