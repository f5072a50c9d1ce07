"""Published curves: every one can be read, predicted, and traced to its source."""

from __future__ import annotations

import pytest

from paceline.cluster.named import accelerator
from paceline.job.job import Job
from paceline.planning.model.model_info import trace
from paceline_lab.simulated.measured_here import PublishedCurve, alike, held_against, kind_of, published_curves

LLAMA = {"transformer": {"name": "llama-3.1-8b"}}


def job(model: object = LLAMA, data: str = "synthetic", precision: str = "bf16") -> Job:
    values = {"name": "a", "model": model, "data": data, "precision": precision, "loss": "cross_entropy"}
    others = {"optimizer": {"name": "adamw", "lr": 0.1}, "global_batch": 8, "stop": {"steps": 10}}
    return Job.model_validate(values | others)


@pytest.mark.parametrize("curve", published_curves(), ids=lambda curve: curve.id)
def test_a_curve_names_its_source_and_ascends(curve: PublishedCurve) -> None:
    assert curve.url.startswith("https://")
    assert len(curve.source) > 10
    assert curve.devices == sorted(set(curve.devices))
    batches = [row.layout.global_batch for row in curve.rows]
    grown = batches[-1] / batches[0]
    if curve.scaling == "strong":
        assert grown == pytest.approx(1, rel=0.01)
    else:
        assert grown > 1.2
    assert all(row.layout.ranks == n for row, n in zip(curve.rows, curve.devices, strict=True))


def test_names_are_unique_and_every_kind_of_scaling_has_curves() -> None:
    curves = published_curves()
    assert len({curve.id for curve in curves}) == len(curves)
    assert {(curve.kind, curve.scaling) for curve in curves} == {
        (kind, scaling) for kind in ("images", "language") for scaling in ("strong", "weak")
    }


def test_efficiencies_are_those_that_the_sources_print() -> None:
    found = {held.curve.id: held for held in held_against()}
    assert found["resnet50-ddp-a100"].efficiency[-1] == pytest.approx(16621 / 8 / 2470, rel=0.002)  # images a second
    assert found["llama405b-h100"].efficiency[-1] == pytest.approx(400 / 430, rel=0.002)  # TFLOP/s
    assert found["gpt16b-maxtext-v5e"].efficiency[-1] == pytest.approx(108 / 120, rel=0.002)
    assert found["gpt-sc21-a100"].efficiency[-1] == pytest.approx(163 / 137, rel=0.03)  # models grow with the devices


def test_curves_beside_are_of_the_same_kind_and_say_how_they_differ() -> None:
    model = trace(job(), "bf16")
    assert kind_of(model) == "language"
    beside = alike(model, accelerator("H100-SXM"), "weak")
    assert {one.held.curve.kind for one in beside} == {"language"}
    assert {one.held.curve.scaling for one in beside} == {"weak"}
    assert [one.distance for one in beside] == sorted(one.distance for one in beside)
    assert beside[0].held.rows[0].layout.machines.device.name == "H100-SXM", "the same hardware comes first"
    assert len({one.held.curve.source for one in beside}) == len(beside)
    on_another = alike(model, accelerator("A100-SXM-80"), "weak")[-1]
    assert any("instead of A100-SXM-80" in text for text in on_another.differences)


def test_nothing_stands_beside_a_model_of_no_known_kind() -> None:
    table = trace(job("mlp", "digits", "fp32"), "fp32")
    assert kind_of(table) is None
    assert alike(table, accelerator("H100-SXM"), "strong") == []
