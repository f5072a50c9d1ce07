"""Moments of Adam in few bits: near those in fp32, the same under every split, and divided again on a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import paceline
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.optimizer import OptimizerSpec
from paceline.run.convert import export
from refusals import raises

SIZES = {"layers": 2, "hidden": 128, "heads": 4, "context": 8, "vocab": 64}
STATES = ["bf16", "int8"]


def job(state: str, **keys: Any) -> Job:
    given: dict[str, Any] = {
        "model": {"zoo": "gpt", "args": SIZES},
        "data": {"kind": "synthetic", "samples": 16, "shape": [8], "vocab": 64, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "state": state},
        "global_batch": 4,
        "stop": {"steps": 4},
    }
    return Job(**{**given, **keys})


def trained(name: str, state: str | None, dtype: torch.dtype = torch.float32) -> tuple[float, nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 80), nn.ReLU(), nn.Linear(80, 10)).to(dtype)
    inputs, labels = torch.randn(64, 100, dtype=dtype), torch.randint(10, (64,))
    spec = OptimizerSpec(name=name, lr=3e-3, weight_decay=0.1, state=state)
    optimizer = spec.build(dict(model.named_parameters()))
    for _ in range(30):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.item(), model, optimizer


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("state", STATES)
def test_training_is_near_that_with_full_moments_and_the_state_has_the_predicted_bytes(name: str, state: str) -> None:
    expected, _, full = trained(name, None)
    found, model, optimizer = trained(name, state)
    assert found == pytest.approx(expected, rel=0.05)
    held, whole = (sum(v.nbytes for s in o.state.values() for v in s.values()) for o in (optimizer, full))
    spec = OptimizerSpec(name=name, state=state)
    assert held == sum(spec.state_bytes(p.shape, p.element_size()) for p in model.parameters())
    assert held < 0.55 * whole


def test_small_changes_of_a_second_moment_in_bf16_are_not_lost() -> None:
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = OptimizerSpec(name="adamw", state="bf16").build([parameter])
    gradient = torch.linspace(0.5, 1.5, 4096)
    for scale in [1.0] * 50 + [0.0] * 300:
        parameter.grad = gradient * scale
        optimizer.step()
    # rounding to nearest would leave 0.999**300 at 1
    expected = gradient.square() * (1 - 0.999**50) * 0.999**300
    kept = optimizer.state[parameter]["exp_avg_sq"].float()
    assert float((kept / expected).mean()) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.timeout(600)
def test_every_split_computes_the_updates_of_one_process(state: str) -> None:
    for plan in ["fsdp=2", "tp=2"] if state == "int8" else ["tp=2 fsdp=2", "pp=2 microbatches=2"]:
        parity = paceline.check(job(state), f"{plan} precision=fp64", steps=3)
        assert parity.holds, parity


@pytest.mark.parametrize("state", STATES)
@pytest.mark.timeout(600)
def test_moments_are_divided_again_by_a_resume_under_another_plan(tmp_path: Path, state: str) -> None:
    straight = paceline.train(job(state, precision="fp64"), "dp=1", run=tmp_path / "straight")
    paceline.train(job(state, precision="fp64", stop={"steps": 2}), "tp=2", run=tmp_path / "run")
    resumed = paceline.train(job(state, precision="fp64"), "fsdp=2", run=tmp_path / "run", resume=True)
    files = [tmp_path / "straight.safetensors", tmp_path / "resumed.safetensors"]
    for run, file in zip((straight, resumed), files, strict=True):
        export(run.path, file)
    expected, found = map(load_file, files)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.timeout(300)
def test_a_tp_that_cuts_a_block_of_moments_is_refused() -> None:
    with raises(paceline.PacelineError, "plan.moments_block_cut"):
        paceline.check(job("int8", model={"zoo": "gpt", "args": {**SIZES, "hidden": 64}}), "tp=2", steps=1)


def test_states_of_other_optimizers_are_refused() -> None:
    with raises(JobError, "optimizer.state_of_other", name="sgd", state="int8"):
        job("int8", optimizer={"name": "sgd", "state": "int8"})
