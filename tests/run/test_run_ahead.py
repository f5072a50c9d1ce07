"""On accelerators the loop reads the numbers of a step once the next one is queued; nobody sees the difference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Device, Host
from paceline.engine import guard as settings
from paceline.engine.guard import Settings
from paceline.job.stop import SpikeSpec
from paceline.planning.plan import Plan
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline.state.manifest import checkpoints
from ranks import RankError, Ranks
from refusals import raises
from simulated.environment import Simulated
from small_jobs import Points, facts, plain, points, small_job, train_as_rank

EXACT = {
    "model": {"factory": "small_jobs:with_dropout"},
    "data": points(held_out=0.25),
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "clip_norm": 0.5,
    "metrics": ["accuracy"],
}


class SomeLabels(Points):
    """Every third label is left out, so batches have other numbers of them, and gradients are rescaled."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs, label if index % 3 else torch.tensor(-100)


class Picky(nn.Module):
    """Refuses to compute with weights that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = plain()

    def forward(self, x: Tensor) -> Tensor:
        if not all(bool(p.isfinite().all()) for p in self.parameters()):
            raise ValueError("weights that are not finite")
        y: Tensor = self.layer(x)
        return y


def described(path: Path, plan: str, cluster: Cluster, **changes: Any) -> Run:
    """A new run, or the one at `path` to be continued."""
    if not path.exists():
        return Run.create(path, small_job(**changes), cluster, Plan.parse(plan))
    run = Run(path)
    run.continue_with(small_job(**changes), cluster, Plan.parse(plan))
    return run


def accelerators(number: int) -> Cluster:
    """A host with so many simulated ones."""
    devices = tuple(Device(index=i, kind="sim", name="simulated", memory_bytes=2**30) for i in range(number))
    return Cluster(name="here", hosts=(Host(name="here", cores=2, memory_bytes=2**33, gpus=devices),))


def train(path: Path, plan: str, starter: Simulated | Ranks, **changes: Any) -> Run:
    """Train, or continue, on simulated accelerators or, by the fixture `ranks`, on the CPU."""
    size = Plan.parse(plan).ranks
    on_ranks: Any = starter.ranks if isinstance(starter, Simulated) else starter
    described(path, plan, accelerators(size) if isinstance(starter, Simulated) else discover(), **changes)
    on_ranks(size, train_as_rank, path)
    return Run(path)


def evaluations(run: Run) -> dict[int, dict[str, float]]:
    return {e["step"]: e["metrics"] for e in run.events() if e["event"] == "evaluation"}


def saved(run: Run) -> dict[int, dict[str, Tensor]]:
    """Parameters in each checkpoint."""
    found = {}
    for step, folder in checkpoints(run.checkpoints):
        weights = run.path / f"{step}.safetensors"
        if not weights.exists():
            export(folder, weights)
        found[step] = load_file(weights)
    return found


def settings_of(**values: Any) -> Settings:
    return Settings(**{"run_ahead": True, **values})


def test_it_runs_ahead_where_no_number_is_needed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "has_timed_events", lambda device: device.type != "cpu")
    on = torch.device("meta")
    for plan in ("dp=1", "dp=2", "fsdp=2", "tp=2", "dp=2 compress=int8"):
        assert settings_of().runs_ahead(Plan.parse(plan), on)
        assert not settings_of().runs_ahead(Plan.parse(plan), torch.device("cpu"))
    for plan in ("dp=2 sync=local:2", "pp=2 microbatches=2", "fsdp=2 offload=on"):
        assert not settings_of().runs_ahead(Plan.parse(plan), on)
    for values in (
        {"nonfinite": "skip"},
        {"spike": SpikeSpec(policy="skip")},
        {"precision": "fp16"},
        {"run_ahead": False},
    ):
        assert not settings_of(**values).runs_ahead(Plan(), on)


@pytest.mark.parametrize("plan", ["dp=2", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("dp=1", "fsdp=2"))])
def test_record_and_checkpoints_are_those_of_the_cpu(
    tmp_path: Path, simulated: Simulated, ranks: Ranks, plan: str
) -> None:
    changes: dict[str, Any] = {
        **EXACT,
        "model": {"factory": "small_jobs:plain"},
        "data": {"kind": "dataset", "factory": f"{Path(__file__)}:SomeLabels", "held_out": 0.25},
        "evaluate": {"every_steps": 5},
        "checkpoint": {"every_steps": 4, "keep": 9},
        "stop": {"steps": 18},  # 7 steps an epoch
    }
    expected = train(tmp_path / "cpu", plan, ranks, **changes)
    run = train(tmp_path / "sim", plan, simulated, **changes)
    for rank in range(Plan.parse(plan).ranks):
        for found, wanted in zip(facts(run, rank), facts(expected, rank), strict=True):
            assert found == pytest.approx(wanted, rel=1e-4)
    measured, wanted_measures = evaluations(run), evaluations(expected)
    assert list(measured) == list(wanted_measures) == [5, 10, 15, 18]
    for step, metrics in measured.items():
        assert metrics == pytest.approx(wanted_measures[step], rel=1e-4)
    weights, wanted_weights = saved(run), saved(expected)
    assert list(weights) == list(wanted_weights) == [4, 8, 12, 16, 18]
    for step, held in weights.items():
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, wanted_weights[step][name], rtol=1e-3, atol=1e-4)
    # also of the last step, though it has no next one
    assert all(step["step_s"] > 0 for step in run.steps())


def test_a_signal_ends_all_ranks_at_one_step_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = train(tmp_path / "undisturbed", "dp=2", simulated, stop={"steps": 12}, clip_norm=0.5)
    # rank 1 reads one sample to look at it, then four a step and two steps ahead: this is in the sixth
    monkeypatch.setenv("INTERRUPT", "1:30")
    run = train(tmp_path / "run", "dp=2", simulated, stop={"steps": 12}, clip_norm=0.5)
    *_, end = run.events()
    assert (end["reason"], end["interrupted"], end["step"]) == ("SIGTERM", True, 7)
    assert [len(run.steps(rank)) for rank in range(2)] == [7, 7]
    assert [step for step, _ in checkpoints(run.checkpoints)] == [7]
    monkeypatch.delenv("INTERRUPT")
    resumed = train(tmp_path / "run", "dp=2", simulated, stop={"steps": 12}, clip_norm=0.5)
    assert facts(resumed) == facts(undisturbed)
    assert facts(resumed, 1) == facts(undisturbed, 1)


def test_a_clock_and_a_target_end_all_ranks_at_one_step(tmp_path: Path, simulated: Simulated) -> None:
    by_clock = {"data": points(sleep_s=0.005), "stop": {"seconds": 0.3}, "checkpoint": {"every_seconds": 1e-6}}
    by_target = {**EXACT, "evaluate": {"every_steps": 3}, "stop": {"metric_above": {"accuracy": 0.0}}}
    for name, changes, reason in (("clock", by_clock, "seconds: "), ("target", by_target, "metric_above: ")):
        run = train(tmp_path / name, "dp=2", simulated, **changes)
        last = run.events()[-1]["step"]
        assert run.reason is not None
        assert run.reason.startswith(reason)
        assert [step["step"] for step in run.steps(0)] == [step["step"] for step in run.steps(1)]
        assert run.steps(0)[-1]["step"] == checkpoints(run.checkpoints)[-1][0] == last
    assert last == 3


def test_bad_data_is_named_by_its_own_step_and_no_checkpoint_has_what_came_of_it(
    tmp_path: Path, simulated: Simulated, ranks: Ranks
) -> None:
    changes: dict[str, Any] = {"data": points(nan_at=[5]), "checkpoint": {"every_steps": 2, "keep": 9}}
    problem = re.compile(r"\bstep \d+ is nan .*samples \[5\]")
    with raises(RankError, "nonfinite.stopped", problem=problem) as on_cpu:
        train(tmp_path / "cpu", "dp=2", ranks, **changes)
    expected = [step["step"] for step in Run(tmp_path / "cpu").steps()]
    with raises(RankError, "nonfinite.stopped", problem=problem) as raised:
        train(tmp_path / "sim", "dp=2", simulated, **changes)
    for error in (on_cpu.value, raised.value):
        assert f"step {len(expected) + 1} " in error.problems[0].fields["problem"]
    run = Run(tmp_path / "sim")
    assert [step["step"] for step in run.steps()] == expected
    assert list(saved(run)) == [step for step in expected if step % 2 == 0]
    assert all(bool(t.isfinite().all()) for held in saved(run).values() for t in held.values())


def test_what_fails_in_the_next_step_does_not_hide_that_the_last_was_not_finite(
    tmp_path: Path, simulated: Simulated
) -> None:
    model = {"factory": f"{Path(__file__)}:Picky"}
    with raises(RankError, "nonfinite.stopped", problem=re.compile(r"\bstep \d+ is nan\b")):
        train(tmp_path / "run", "dp=1", simulated, data=points(nan_at=[5]), model=model)
