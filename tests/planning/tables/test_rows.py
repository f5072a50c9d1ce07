"""Rows of tables: every one is used, or is skipped with a reason."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paceline.planning.tables.layouts import Row, Skipped, read

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


def test_of_all_given_tables_few_rows_are_unusable_for_want_of_our_knowledge() -> None:
    rows, skipped = read(sorted(TABLES.glob("*.csv")))
    assert len(rows) > 1500
    unknown = [row for row in skipped if "no model that is known" in row.why or "catalogue" in row.why]
    assert len(unknown) < 0.02 * len(rows)
    assert all(row.why for row in skipped)
