"""The benchmark of plans that experts made: its table says where each row is from, and ours are held against theirs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import yaml

import experts as benchmark
import experts_rows as rows
from paceline.planning.machines import machines

_FOLDER = Path(__file__).parents[2] / "benchmarks"
_TABLE = _FOLDER / "experts" / "plans.csv"
_SMALL = ("gpt-22b-korthikanti", "gpt3-175b-korthikanti")
_SOURCES = re.compile(r"https://|git [\w.-]+/[\w.-]+@[0-9a-f]{7,}|git [\w.-]+/[\w.-]+ \S+@[0-9a-f]{7,}")
_TOO_SLOW = 1.05


def cells() -> list[dict[str, str]]:
    with _TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_run_has_a_name_a_source_and_how_it_was_read() -> None:
    found = cells()
    assert len({row["id"] for row in found}) == len(found) > 30
    for row in found:
        assert row["source"], row["id"]
        assert _SOURCES.search(row["url_or_path"]), row["id"]
        assert row["verified"].startswith(("yes", "quoted")), row["id"]


def test_every_run_has_a_plan_and_a_speed() -> None:
    for row in cells():
        assert any(row[name] for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")), row["id"]
        degrees = [int(row[name]) for name in ("tp", "pp", "dp", "cp")]
        assert all(degrees), row["id"]
        product = degrees[0] * degrees[1] * degrees[2] * degrees[3]
        assert product == int(row["n_gpus"]), row["id"]


def test_cluster_and_dimensions_say_what_the_columns_say() -> None:
    for row in cells():
        numbers = [int(number) for number in re.findall(r"(\d+)x", row["cluster"].split(",")[0])]
        devices = numbers[0] * (numbers[1] if len(numbers) > 1 else 1)
        assert devices == int(row["n_gpus"]), row["id"]
        dimensions = yaml.safe_load(row["dimensions"])
        assert dimensions["layers"] == int(row["n_layers"]), row["id"]
        assert dimensions["hidden"] == int(row["hidden"]), row["id"]
        assert dimensions["seq"] == int(row["seq_len"]), row["id"]
        assert dimensions["heads"] == int(row["n_heads"]), row["id"]


def test_the_cluster_of_a_row_has_the_memory_that_its_columns_say() -> None:
    found, _ = rows.experts()
    for expert in found:
        read, named = expert.row.layout.machines, machines(expert.cluster)
        assert named.devices == int(expert.row.cells["n_gpus"]), expert.name
        assert named.device.memory_bytes == read.device.memory_bytes, expert.name


def test_dimensions_have_as_many_parameters_as_were_published() -> None:
    found, _ = rows.experts()
    for expert in found:
        published = float(expert.row.cells["n_params"])
        # DeepSeek-V3's do not count its layer for a further token
        assert expert.row.layout.trace.parameters == pytest.approx(published, rel=0.025), expert.name


def test_every_published_plan_is_legal() -> None:
    found, skipped = rows.experts()
    refused = {expert.name: expert.reasons for expert in found if expert.reasons}
    assert not refused
    assert len(found) == len(cells())
    assert not skipped


def test_a_sharded_optimizer_is_said_as_fsdp_and_what_cannot_be_said_is_told() -> None:
    found, _ = rows.experts(names=["bloom-176b", "gpt-175b-3072-gpus"])
    bloom, gpt = found
    assert str(bloom.plan).startswith("fsdp=8 tp=4 pp=12 zero=1")
    assert "virtual=6" in str(gpt.plan) or gpt.unsaid == ("virtual=6",)
    assert rows.as_numbers(gpt, bloom.row.layout).chunks == 6


def test_ours_is_no_slower_than_small_plans_of_experts_and_says_why() -> None:
    found, _ = rows.experts(names=_SMALL)
    verdicts = [benchmark.judge(expert) for expert in found]
    assert [each.expert.name for each in verdicts] == list(_SMALL)
    for each in verdicts:
        assert each.comparable
        assert each.ratio <= _TOO_SLOW
        assert "theirs" in each.words
    figures = benchmark.figures(verdicts, 0)
    assert figures["legal"] == 1.0
    assert figures["rows"] == 2
    assert figures["worst_ours_to_theirs"] == max(each.ratio for each in verdicts)


@pytest.mark.slow
def test_ours_is_never_slower_than_a_plan_of_experts() -> None:
    found, _ = rows.experts()
    verdicts = [benchmark.judge(expert) for expert in found]
    slower = {each.expert.name: each.ratio for each in verdicts if each.comparable and each.ratio > _TOO_SLOW}
    assert not slower
