"""The benchmark of published runs.

Odd cells are read as meant, what fitted constants is not scored, scores are what they say.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import published as benchmark
import published_ablation as ablation
import published_fit as fits
import published_rows as rows
import published_score as scores
from paceline.planning.cost import constants
from paceline.planning.cost.estimate import step_time_s
from paceline.planning.cost.layout import Interval
from paceline.planning.tables.cells import number

_CELLS = {
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
    "n_gpus": "16",
    "tp": "2",
    "pp": "4",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "bf16",
    "act_ckpt": "full",
    "schedule": "1F1B",
    "framework": "Megatron-LM",
    "step_time_s": "9.5",
}


def table(folder: Path, *changes: dict[str, str]) -> Path:
    """A table with the usual cells, changed row by row."""
    folder.mkdir(exist_ok=True)
    with (folder / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        names = list(dict.fromkeys([*_CELLS, *(name for change in changes for name in change)]))
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(_CELLS | change for change in changes)
    return folder


def read_one(folder: Path, **cells: str) -> Any:
    (found,), _ = rows.read([table(folder, cells) / "runs.csv"])
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("250k-class (150257 in estimates)", 250e3),
        ("1,024", 1024),
        ("175B", 175e9),
        ("7.5e9", 7.5e9),
        ("", None),
        ("V not stated", None),
    ],
)
def test_numbers_are_found_in_what_people_write(text: str, value: float | None) -> None:
    assert number(text) == value


def test_a_row_becomes_the_plan_that_it_states(tmp_path: Path) -> None:
    layout = read_one(tmp_path).layout
    assert (layout.tp, layout.pp, layout.dp, layout.microbatches, layout.samples) == (2, 4, 2, 32, 1.0)
    assert layout.cut == (9, 8, 8, 9)
    assert layout.machines.between.bandwidth == pytest.approx(25e9)
    assert layout.trace.blocks[-1].gemms[0].n == 50432  # the vocabulary is padded so that it divides


def test_what_is_blank_follows_from_the_rest(tmp_path: Path) -> None:
    found = read_one(tmp_path, n_layers="", n_heads="", step_time_s="", tokens_per_s_per_gpu="862", global_batch="64")
    assert len(found.layout.trace.blocks) == 34
    assert found.seconds == pytest.approx(64 * 2048 / 862 / 16)
    by_tflops = read_one(tmp_path, step_time_s="", tflops_per_gpu="140", notes="tflops incl recompute")
    assert by_tflops.seconds == pytest.approx(4 * by_tflops.layout.trace.flops * 64 / 16 / 140e12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp:FULL_SHARD", {"fsdp": 2, "zero": 3, "dp": 1}),
        ("FSDP/zero2 (shards not resharded after fwd)", {"fsdp": 2, "zero": 2, "dp": 1}),
        ("dist-optimizer(zero1)", {"fsdp": 1, "dp": 2, "zero_dp": True}),
        ("none", {"fsdp": 1, "dp": 2, "zero_dp": False}),
    ],
)
def test_sharding_is_read_in_all_its_spellings(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    layout = read_one(tmp_path, zero_fsdp=text).layout
    assert {name: getattr(layout, name) for name in expected} == expected


def test_selective_recomputation_and_sequence_parallelism_are_told_apart(tmp_path: Path) -> None:
    both = read_one(tmp_path, act_ckpt="selective(attn core)+sequence-parallel").layout
    assert (both.remat, both.sequence) == ("selective", True)
    full = read_one(tmp_path, act_ckpt="full", notes="no sequence parallel").layout
    assert (full.remat, full.sequence) == ("block", False)


def test_rows_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    changes = ({"gpu": "Abacus 3000"}, {"hidden": ""}, {"step_time_s": ""}, {"n_gpus": "15"})
    used, skipped = rows.read([table(tmp_path, *changes) / "runs.csv"])
    assert not used
    assert len(skipped) == 4
    assert all(each.why for each in skipped)


def test_a_tenth_of_each_table_is_set_aside_and_not_scored() -> None:
    every, _ = rows.read(sorted(rows.TABLES.glob("*.csv")))
    aside = rows.set_aside(every)
    for table in {row.table for row in every if row.seconds}:
        timed = [row for row in every if row.table == table and row.seconds]
        assert 1 <= sum(row.place in aside for row in timed) <= max(1, len(timed) / 10)
    assert aside == rows.set_aside(every)
    assert not aside & {each.row.place for each in benchmark.predict(every[:200], aside)}


def test_predictions_without_a_source_leave_what_is_fitted_as_it_was() -> None:
    every, _ = rows.read([rows.TABLES / "megatron_sc21_table1.csv"])
    before, values = [step_time_s(row.layout) for row in every], json.loads(fits.FITS.read_text(encoding="utf-8"))
    with benchmark.without("megatron_sc21_table1", values):
        assert [step_time_s(row.layout) for row in every] != before
    assert [step_time_s(row.layout) for row in every] == before


def test_the_fit_moves_towards_what_rows_were_made_with_and_ends_at_what_is_assumed_without_rows() -> None:
    every, _ = rows.read([rows.TABLES / "megatron_sc21_table1.csv"])
    slowed = [replace(row, seconds=1.15 * step_time_s(row.layout)) for row in every]

    def worst(values: dict[str, float]) -> float:
        return max(abs(step_time_s(row.layout, values) / (row.seconds or 0.0) - 1) for row in slowed)

    values, without = fits.fit(slowed, without_each=True)
    assumed = {name: each.value for name, each in constants.ASSUMED.items()}
    assert worst(values) < worst(assumed)
    assert values["SUSTAINED_AMPERE"] < constants.ASSUMED["SUSTAINED_AMPERE"].value
    assert without["megatron_sc21_table1"] == pytest.approx(assumed, rel=0.02)
    constants.use()


def test_constants_that_do_not_matter_to_a_row_change_nothing() -> None:
    every, _ = rows.read(sorted(rows.TABLES.glob("*.csv")))
    for row in fits.sample(every)[::40]:
        before = step_time_s(row.layout, {})
        for name, value in constants.FITTED.items():
            if not fits.matters(name, row.layout):
                assert step_time_s(row.layout, {name: 1.1 * value}) == before, (row.place, name)
    constants.use()


def test_the_shipped_values_are_those_that_the_fit_would_write() -> None:
    assert fits.FITTED.read_text(encoding="utf-8") == fits.as_module(constants.FITTED)
    assert constants.FITTED.keys() == constants.ASSUMED.keys()
    assert len(constants.FITTED) <= 40


def test_the_null_model_predicts_what_has_one_constant_exactly(tmp_path: Path) -> None:
    """Three sizes of batch without a pipeline: time in proportion to FLOPs is all that there is."""
    changes = [
        {"pp": "1", "tp": "1", "n_gpus": "8", "global_batch": str(8 * count), "step_time_s": str(count)}
        for count in (1, 2, 4)
    ]
    used, _ = rows.read([table(tmp_path, *changes) / "runs.csv"])
    assert [each.null_s for each in benchmark.predict(used, set())] == pytest.approx([1.0, 2.0, 4.0])


def test_regret_is_what_the_choice_costs_and_ties_are_told(tmp_path: Path) -> None:
    used, _ = rows.read(
        [table(tmp_path, {"tp": "2", "step_time_s": "10"}, {"tp": "4", "step_time_s": "12"}) / "runs.csv"]
    )

    def predicted(*seconds: float) -> list[Any]:
        interval = Interval(1.0, 2.0, "")
        return [
            scores.Predicted(row, one, one, interval, one, one, 1.0, 1.0, True, interval)
            for row, one in zip(used, seconds, strict=True)
        ]

    assert scores.score(predicted(9.0, 8.0)).mean_regret == pytest.approx(0.2)
    assert scores.score(predicted(8.0, 9.0)).mean_regret == 0.0
    tied = scores.score(predicted(9.0, 9.0))
    assert tied.mean_regret == pytest.approx(0.1)
    assert tied.ties == 1


def test_the_same_plan_twice_is_no_choice(tmp_path: Path) -> None:
    used, _ = rows.read([table(tmp_path, {"step_time_s": "10"}, {"step_time_s": "12"}) / "runs.csv"])
    wide = Interval(1.0, 20.0, "")
    same = [scores.Predicted(row, 9.0, 9.0, wide, 9.0, 9.0, 1.0, 1.0, True, wide) for row in used]
    assert scores.score(same).groups == 0
    assert scores.score(same).coverage == 1.0


def test_any_tables_in_the_same_columns_can_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "environment_line", lambda: "here")
    folder = table(
        tmp_path / "tables",
        {"framework": "Unheard-of 1.0", "gpu": "H100 80GB HBM3"},
        {"memory_gib": "OOM", "step_time_s": ""},
        {"gpu": "Abacus 3000"},
    )
    assert benchmark.main(["--tables", str(folder), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["rows_used"] == 1
    assert figures["missed_oom"] == 1
    assert figures["unusable_share"] == pytest.approx(1 / 3)


@pytest.mark.timeout(600)
def test_predictions_without_their_source_are_as_right_as_the_results_say() -> None:
    every, skipped = rows.read(sorted(rows.TABLES.glob("*.csv")))
    predicted = benchmark.predict(every, rows.set_aside(every))
    figures = benchmark.figures(predicted, skipped, {}, {0: [], 10: []})
    assert figures["mean_error"] <= 0.135
    assert figures["mean_over_tables"] <= 0.14
    assert figures["p90_error"] <= 0.34
    assert figures["cold_mean_error"] <= 0.20
    assert figures["cold_mean_over_tables"] <= 0.18
    assert figures["mean_regret"] <= 0.06
    assert figures["mean_error"] <= 0.8 * figures["baseline_mean_error"]
    assert figures["mean_over_tables"] <= 0.8 * figures["baseline_mean_over_tables"]
    assert figures["p90_error"] <= 0.8 * figures["baseline_p90_error"]
    assert figures["cold_mean_error"] <= 0.8 * figures["baseline_cold_mean_error"]
    assert figures["tables_worse_than_null"] <= 0.10
    assert figures["fits_right"] >= 0.95
    assert figures["memory_median_error"] <= 0.08
    assert 0.75 <= figures["coverage_80"] <= 0.85
    assert figures["unusable_share"] <= 0.05


@pytest.mark.timeout(600)
def test_the_marks_hold_on_the_tables_that_tell_models_apart() -> None:
    names = (
        "vtrain_single_a100",
        "bloom_tr11_a100",
        "megatron_sc21_table1",
        "korthikanti_2022_table5",
        "llmfoundry_mpt_a100",
    )
    every, _ = rows.read([rows.TABLES / f"{name}.csv" for name in names])
    found = scores.score(benchmark.predict(every, rows.set_aside(every)))
    assert found.mean_error <= 0.08
    assert found.p90_error <= 0.20
    assert found.rank_correlation >= 0.97
    assert found.oom_missed == 0
    assert found.mean_error < found.null_mean_error / 3


@pytest.mark.timeout(600)
def test_pieces_that_were_taken_out_are_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _ = rows.read([table(tmp_path, {}, {"micro_batch": "2"}) / "runs.csv"])
    before, moved = ablation.errors(found, set()), 0
    for piece in ablation.PIECES:
        moved += ablation.errors(found, set(), piece) != before
        assert ablation.errors(found, set()) == before
    assert moved > len(ablation.PIECES) / 4
