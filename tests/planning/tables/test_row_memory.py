"""A plan that is proposed and runs out of memory costs a start of the cluster; one that is refused may be the best."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.memory import MEASURED_SPREAD, PROPOSED, SPREAD, fit_probability, memory, usable_bytes
from paceline.planning.machines import Adjustment, adjustment
from paceline.planning.tables.layouts import Row, layout_of, read
from paceline.planning.tables.row_memory import counted_bytes, memory_ratio

TABLES = Path(__file__).parents[3] / "benchmarks" / "tables"
# tables with measured memory, or with runs that ran out of memory
NAMES = (
    "bloom_tr11_a100",
    "korthikanti_2022_memory",
    "lowprec_torchao_2025_given",
    "megatron_golden_values_large",
    "torchtitan_llama_given",
    "ultrascale_h100_given",
    "ultrascale_oom_h100_given",
)
CELLS = {
    "model": "Llama 3.1 8B",
    "seq_len": "8192",
    "gpu": "H100",
    "n_gpus": "8",
    "micro_batch": "1",
    "global_batch": "8",
    "precision": "bf16",
    "act_ckpt": "none",
    "zero_fsdp": "FSDP",
    "framework": "torchtitan",
}
NANOTRON = {
    "model": "Llama-like 1B",
    "n_layers": "16",
    "hidden": "2048",
    "ffn": "8192",
    "n_heads": "32",
    "seq_len": "4096",
    "vocab": "131072",
    "global_batch": "256",
    "precision": "bf16 (fp32 grad accumulation)",
    "zero_fsdp": "zero1",
    "framework": "nanotron",
    "notes": "tied embeddings",
}


def layout(**cells: str) -> Layout:
    return layout_of({**CELLS, **cells}, [])


def row(**cells: str) -> Row:
    return Row("some", 2, {**CELLS, **cells}, layout(**cells), 1.0, float(cells.get("memory_gib", "40")), False)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rows of all tables with measured memory."""
    return read(TABLES / f"{name}.csv" for name in NAMES)[0]


def test_predicted_memory_is_what_was_measured(rows: list[Row]) -> None:
    logs: dict[str, list[float]] = {}
    for one in rows:
        if one.memory_gib:
            logs.setdefault(one.table, []).append(math.log(memory_ratio(one)))
    every = [abs(log) for found in logs.values() for log in found]
    assert len(every) > 600
    assert median(every) <= 0.075
    assert max(median(map(abs, found)) for found in logs.values()) <= 0.11
    # the stated spread covers 80 % of the rows
    assert 0.75 <= fmean(each <= 1.2816 * SPREAD for each in every) <= 0.85


def test_plans_that_ran_fit_and_those_that_did_not_do_not(rows: list[Row]) -> None:
    ran = [one for one in rows if one.seconds]
    burst = [one for one in rows if one.out_of_memory]
    assert len(burst) > 230
    assert fmean(not predict_layout(one.layout).fits for one in burst) >= 0.97
    assert fmean(predict_layout(one.layout).fits for one in ran) >= 0.95


def test_a_rows_memory_is_compared_with_the_parts_that_it_counts() -> None:
    every = sum(memory(layout()).values())
    torchs = counted_bytes(row(framework="FSDP", notes="memory is torch's"))
    assert torchs < counted_bytes(row()) < every
    assert counted_bytes(row(notes="ACTIVATION memory GiB/GPU")) < torchs


def test_the_memory_of_the_first_stage_is_that_of_the_first_stage() -> None:
    pipeline: dict[str, str] = {**NANOTRON, "n_gpus": "8", "pp": "8", "micro_batch": "1"}
    # the embedding and most of the microbatches in flight are on the first stage, the logits on the last
    first = counted_bytes(row(**{**pipeline, "notes": "tied embeddings; memory is torch's of rank 0, the first stage"}))
    fullest = counted_bytes(row(**{**pipeline, "notes": "tied embeddings; memory is torch's"}))
    assert first <= fullest


@pytest.mark.parametrize(("pp", "cut"), [("2", (12, 6)), ("4", (7, 5, 5, 1)), ("8", (4, 3, 2, 3, 2, 2, 1, 1))])
def test_a_stage_ends_with_the_layer_that_exceeds_its_share(pp: str, cut: tuple[int, ...]) -> None:
    """The head counts as much as four layers, so the first stages have more layers than an even cut."""
    found = layout(**{**NANOTRON, "pp": pp})
    assert found.cut == cut
    assert sum(found.cut) == len(found.trace.blocks)


def test_replicas_that_accumulate_in_fp32_also_have_buffers_of_16_bits() -> None:
    one, two = (memory(layout(**{**NANOTRON, "n_gpus": n, "zero_fsdp": "none"})) for n in ("1", "2"))
    assert two["gradients"] == pytest.approx(1.5 * one["gradients"], rel=1e-6)


def test_adapters_leave_weights_in_the_precision_of_products_and_fewer_inputs() -> None:
    whole = memory(layout(framework="NeMo", gpu="H100"))
    adapted = memory(layout(framework="NeMo", gpu="H100", notes="LoRA rank=16"))
    narrow = memory(layout(framework="NeMo", gpu="H100", notes="LoRA rank=16", precision="fp8"))
    wide = memory(layout(framework="FSDP", notes="LoRA rank=16", zero_fsdp="DDP"))
    full = memory(layout(framework="FSDP", zero_fsdp="DDP"))
    assert adapted["activations"] < whole["activations"]
    assert narrow["parameters"] < 0.55 * adapted["parameters"]
    assert wide["parameters"] < 0.55 * full["parameters"]


def test_loss_that_is_not_compiled_keeps_more_logits() -> None:
    compiled, older = (
        memory(layout(framework="torchtitan compile", source=source)) for source in ("torchtitan", "torchtitan 2024-12")
    )
    assert older["logits"] > 2 * compiled["logits"]
    assert older["activations"] == compiled["activations"]


def test_unstated_recomputation_is_the_frameworks_default() -> None:
    assert layout(act_ckpt="not stated").remat == "selective"
    assert layout(act_ckpt="none").remat == "none"


@pytest.mark.parametrize(
    ("notes", "sequence"),
    [("", True), ("flags: overlap-grad-reduce=True", False), ("flags: sequence-parallel=True", True)],
)
def test_sequence_parallelism_is_a_flag_where_flags_are_listed(notes: str, sequence: bool) -> None:
    assert layout(framework="Megatron Core", notes=notes, tp="2").sequence == sequence


# probabilities


def test_a_proposed_plan_fits_with_the_stated_probability() -> None:
    found = layout()
    most = usable_bytes(found)
    assert fit_probability(found, most) == pytest.approx(PROPOSED, abs=1e-6)
    assert fit_probability(found, 0.7 * most) > 0.99
    assert fit_probability(found, 2 * most) < 0.01
    # the driver takes a part of the device
    assert fit_probability(found, 80 * 2**30) < 0.5


def test_a_plan_that_is_more_likely_to_fit_than_not_fits() -> None:
    small, large = predict_layout(layout(act_ckpt="full")), predict_layout(layout(micro_batch="16", global_batch="128"))
    assert (small.fits, large.fits) == (True, False)
    assert small.fit_probability > 0.9 > 0.1 > large.fit_probability


def runs(ratio: float, count: int) -> list[Row]:
    gib = ratio * counted_bytes(row()) / 2**30
    return [row(memory_gib=str(gib))] * count


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_measured_runs_of_the_user_correct_memory_and_narrow_its_spread(ratio: float) -> None:
    few, many = (adjustment(runs(ratio, count)) for count in (1, 20))
    assert SPREAD > few.memory_spread > many.memory_spread > 0
    assert abs(math.log(ratio)) > abs(math.log(many.memory_factor)) > abs(math.log(few.memory_factor)) > 0

    def with_runs(found: Adjustment) -> Layout:
        plain = layout()
        return replace(plain, machines=replace(plain.machines, adjustment=found))

    plain, corrected = memory(layout()), memory(with_runs(many))
    assert sum(corrected.values()) / sum(plain.values()) == pytest.approx(many.memory_factor)
    assert usable_bytes(with_runs(many)) > usable_bytes(with_runs(few)) > usable_bytes(layout())


def test_runs_without_memory_change_nothing() -> None:
    timed: Any = replace(row(), memory_gib=None)
    found = adjustment([timed] * 3)
    assert found.memory_factor == 1.0
    assert found.memory_spread == pytest.approx(SPREAD)
    assert MEASURED_SPREAD < SPREAD
