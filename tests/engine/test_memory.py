"""The memory of a rank by part counts every storage once."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.device import Memory
from paceline.engine.memory import measured_parts
from paceline.run.record.run import Run
from ranks import Ranks
from small_jobs import new_run, small_job, train_as_rank


@pytest.mark.parametrize(
    ("plan", "weights", "copies"),
    [("dp=2", 1.0, 0.0), ("fsdp=2", 0.5, 0.0), ("dp=2 sync=diloco:3", 1.0, 1.0)],
)
def test_parts_of_a_rank_are_the_bytes_of_its_tensors(
    ranks: Ranks, tmp_path: Path, plan: str, weights: float, copies: float
) -> None:
    run = new_run(tmp_path / "run", small_job(), plan)
    ranks(2, train_as_rank, run.path, backend="shm")
    run = Run(run.path)
    whole = 4 * next(event["parameters"] for event in run.events() if event["event"] == "start")
    use = next(step["use"] for step in run.steps() if "weights_bytes" in step.get("use", {}))
    for part in ("weights", "gradients", "optimizer"):
        assert use[f"{part}_bytes"] == pytest.approx(weights * whole, abs=0 if weights == 1 else 64), part
    assert use["communication_bytes"] >= copies * whole
    assert not {"activations_bytes", "cache_bytes"} & use.keys(), "no allocator counts on CPUs"


def test_the_rest_of_a_devices_peak_is_activations_and_what_is_reserved_beyond_it_is_cache() -> None:
    counted = Memory(allocated=50, peak=100, reserved=90, peak_reserved=130, free=20, total=200)
    assert measured_parts({"weights": 30, "gradients": 20}, counted) == {
        "weights": 30,
        "gradients": 20,
        "activations": 50,
        "cache": 30,
    }
    assert counted.elsewhere == 90
