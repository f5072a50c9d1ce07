"""The training benchmark compares equal work, and its figures are what they claim."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import local_speed as speed
from paceline.elastic.forkserver import ALLOCATOR

_FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PROOF_STEPS", 30)  # more than an epoch


@pytest.mark.slow
def test_ddp_and_our_loop_take_the_same_steps_on_the_same_batches(tmp_path: Path) -> None:
    work = speed.Work.lay_out(tmp_path / "work", speed.CNN)
    plan = replace(speed.SAME_LAYOUT, memory_format="channels_last", fused=True)
    with work.ddp("--bucket-view", allocator=speed.AS_RUN) as ddp, work.paceline(plan) as ours:
        speed.prove_same_work({speed.DDP: ddp, speed.OURS_TUNED: ours})
        assert (
            min(ddp.ask(["steps", 1]) + ours.ask(["steps", 1]) + ddp.ask(["batches", 1]) + ours.ask(["batches", 1])) > 0
        )


@pytest.mark.slow
def test_other_work_than_that_of_ddp_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PROOF_STEPS", 5)
    work = speed.Work.lay_out(tmp_path / "work", speed.CNN)
    other = replace(work, job=speed.CNN | {"optimizer": {"name": "adamw", "lr": 3e-4}})
    with (
        work.ddp(allocator=ALLOCATOR) as ddp,
        other.paceline(speed.SAME_LAYOUT) as ours,
        pytest.raises(SystemExit, match="paceline, same layout does not do the work of DDP"),
    ):
        speed.prove_same_work({speed.DDP: ddp, speed.OURS: ours})


@pytest.mark.slow
def test_ranks_that_train_alone_do_not_agree_and_hold_memory_that_is_measured(tmp_path: Path) -> None:
    work = speed.Work.lay_out(tmp_path / "work", speed.WIDE)
    with work.paceline(replace(speed.SAME_LAYOUT, dp=1)) as alone:
        after, peak = speed.memory_of(alone, 2)
        assert peak >= after > 4 * 4 * 25_000_000  # weights, gradients and Adam's two moments
        assert all(len(losses) == 2 for losses in alone.ask(["losses", 2]))


def test_figures_are_median_ratios_of_neighbouring_blocks() -> None:
    sides = (speed.DDP, speed.DDP_EQUAL, speed.OURS, speed.OURS_TUNED, speed.LIMIT, speed.LIMIT_TUNED)
    # The second block of all is ten times as slow: other work on the machine. Ratios of neighbours do not see it.
    times_s = {side: [s, 10 * s, s] for side, s in zip(sides, (12.0, 10.0, 8.0, 5.0, 6.0, 4.5), strict=True)}
    memory = {
        name: {speed.DDP: speed.Memory(100, 200), speed.OURS: speed.Memory(90, 150)}
        for name in ("cifar_cnn", "25 million parameters")
    }
    ratios = speed.ratios(times_s)
    assert speed.figures(ratios, memory) == pytest.approx(
        {
            "ratio_to_ddp_same_layout": 10 / 8,
            "ratio_to_ddp_as_run_same_layout": 12 / 8,
            "ratio_to_ddp": 12 / 5,
            "ratio_to_ddp_equal_allocator": 10 / 5,
            "share_of_no_communication_limit": 6 / 8,
            "memory_ratio_to_ddp": 0.9,
            "peak_memory_ratio_to_ddp": 0.75,
            "memory_ratio_to_ddp_large": 0.9,
            "peak_memory_ratio_to_ddp_large": 0.75,
        }
    )
    assert len([*speed.lines(times_s, {speed.DDP: 1e-3}, ratios)]) == 6 + 6
    assert len([*speed.memory_lines(memory)]) == 4


@pytest.mark.slow
def test_the_hand_written_loop_imports_nothing_of_paceline() -> None:
    code = "import sys, ddp_loop; sys.exit(any(name.partition('.')[0] == 'paceline' for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], cwd=_FOLDER, check=True, timeout=60)
