"""Weak scaling of a comparison: the grown job, its figures, their label, and what is refused."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from paceline.errors import RunError
from paceline.job.job import Job
from paceline_lab.report.systems_view import write_systems_page
from paceline_lab.systems.compare import Compare
from paceline_lab.systems.compared import ComparedWay, Comparison, TakenRun, figures, show, summary
from paceline_lab.systems.proof import Proof, grown
from refusals import raises

SMALL: dict[str, Any] = {
    "model": {"zoo": "mlp", "args": {"hidden": 8}},
    "data": {"kind": "synthetic", "samples": 4096, "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "global_batch": 16,
    "stop": {"steps": 12},
}
STEP_S = {"plain": 0.010, "plain-all": 0.016, "paceline": 0.0125, "ddp": 0.020}


def job(**changes: Any) -> Job:
    return Job.model_validate(SMALL | changes)


def compared(folder: Path, *, weak: bool) -> Comparison:
    """A comparison whose runs took known times."""
    compare = Compare(job(), None, ["ddp"], weak=weak, steps=12, tuned=False, out=folder, say=print)
    for way, step_s in STEP_S.items():
        compare.proofs[way] = Proof(0.0)
        compare.runs[way] = [
            TakenRun(way, number, step_s, 1.0, 2**20, None, None, [1.0] * 12, [i * step_s for i in range(12)])
            for number in range(3)
        ]
    return summary(compare)


def ways_of(found: Comparison) -> dict[str, ComparedWay]:
    return {way.way: way for way in found.ways}


def test_weak_efficiency_is_the_step_of_one_process_with_a_ranks_batch_over_that_of_all(tmp_path: Path) -> None:
    found = compared(tmp_path / "weak", weak=True)
    ways = ways_of(found)
    assert (found.scaling, found.global_batch, found.batch_alone) == ("weak", 16 * found.ranks, 16)
    for name in ("paceline", "ddp"):
        efficiency, speedup = ways[name].efficiency, ways[name].speedup
        assert efficiency is not None
        assert speedup is not None
        assert efficiency.middle == pytest.approx(0.010 / STEP_S[name])
        assert speedup.middle == pytest.approx(found.ranks * 0.010 / STEP_S[name])
        assert ways[name].samples_per_s.middle == pytest.approx(16 * found.ranks / STEP_S[name])
    assert ways["plain"].label == "one core, batch 16"
    assert ways["plain"].samples_per_s.middle == pytest.approx(1600)
    named = figures(found)
    assert named["weak_efficiency_ddp"] == pytest.approx(0.5)
    assert named["weak_speedup_plain"] == pytest.approx(1.0)
    assert not any(name.startswith("strong") for name in named)


def test_the_run_with_a_smaller_batch_is_no_rival(tmp_path: Path) -> None:
    found = compared(tmp_path / "weak", weak=True)
    assert ways_of(found)["plain"].ratio is None
    assert found.best_other == "plain-all", "all cores, with the batch of all ranks"
    assert found.remarks[0].startswith("paceline takes the shortest steps")
    assert not any("One process alone" in remark for remark in found.remarks)


def test_strong_efficiency_stays_that_of_the_same_batch(tmp_path: Path) -> None:
    found = compared(tmp_path / "strong", weak=False)
    ddp, alone = ways_of(found)["ddp"], ways_of(found)["plain"]
    assert (found.scaling, found.global_batch, found.batch_alone) == ("strong", 16, 16)
    assert ddp.efficiency is not None
    assert ddp.efficiency.middle == pytest.approx(0.5 / found.ranks)
    assert alone.ratio is not None
    assert alone.label == "one core"


@pytest.mark.parametrize(("weak", "word"), [(True, "weak"), (False, "strong")])
def test_page_and_terminal_say_which_scaling_a_speedup_is_of(tmp_path: Path, weak: bool, word: str) -> None:
    found = compared(tmp_path / "kept", weak=weak)
    other = "strong" if weak else "weak"
    page = write_systems_page(found, tmp_path).read_text()
    screen = Console(file=io.StringIO(), width=200)
    show(found, screen)
    told = screen.file.getvalue()  # type: ignore[attr-defined]
    for text in (page, told):
        assert f"{word} speedup" in text
        assert f"{other} speedup" not in text
    assert f"{word} efficiency" in page
    assert f"{word} scaling" in page
    assert msgspec.convert(asdict(found), Comparison).scaling == word


def test_a_kept_comparison_goes_on_by_the_same_scaling_alone(tmp_path: Path) -> None:
    """The same batch in all, and the same ranks: only the scaling is another."""
    kept = tmp_path / "kept"
    weak = Compare(job(), None, ["ddp"], weak=True, steps=12, out=kept, say=print)
    Compare(job(), None, ["ddp"], weak=True, steps=12, out=kept, say=print)
    with raises(RunError, "bench.other_benchmark"):
        Compare(job(global_batch=weak.job.global_batch), None, ["ddp"], steps=12, out=kept, say=print)


@pytest.mark.parametrize(
    ("changes", "ranks", "code"),
    [
        ({"global_batch": 1100}, 4, "compare.weak_too_few_samples"),
        ({}, 1, "compare.weak_of_one"),
        ({"model": "simclr", "loss": "contrastive"}, 4, "compare.weak_joint_loss"),
    ],
)
def test_a_batch_that_cannot_grow_fairly_is_refused(changes: dict[str, Any], ranks: int, code: str) -> None:
    with raises(RunError, code):
        grown(job(**changes), ranks)


def test_nothing_is_begun_where_the_data_is_too_short(tmp_path: Path) -> None:
    with raises(RunError, "compare.weak_too_few_samples"):
        Compare(job(global_batch=4096), None, ["ddp"], weak=True, out=tmp_path / "out", say=print)
    assert not (tmp_path / "out").exists()
