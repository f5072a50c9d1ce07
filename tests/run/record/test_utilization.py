"""MFU of a run: exact FLOPs of the model, without padding, and nothing where the peak is unknown."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Speed
from paceline.run.record.utilization import FLOPS, PEAK, flops_of, peak_of, utilization

LAYERS, HIDDEN, VOCAB, TOKENS = 3, 64, 256, 32
LINEAR = 2 * TOKENS * LAYERS * 12 * HIDDEN**2  # forward FLOPs of a sample in linear layers
HEAD = 2 * TOKENS * HIDDEN * VOCAB
ATTENTION = 4 * TOKENS**2 * HIDDEN * LAYERS


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": "tokens",
        "model": {
            "zoo": "gpt",
            "args": {"layers": LAYERS, "hidden": HIDDEN, "heads": 4, "vocab": VOCAB, "context": TOKENS},
        },
        "data": {"kind": "synthetic", "samples": 64, "shape": [TOKENS], "vocab": VOCAB},
        "loss": "cross_entropy",
        "optimizer": "adamw",
        "precision": "bf16",
        "global_batch": 8,
        "stop": {"steps": 3},
    }
    return Job.model_validate(values | changes)


def servers(*names: str) -> Cluster:
    gpus = tuple(Device(index=i, name=name, memory_bytes=2**36) for i, name in enumerate(names))
    return Cluster(hosts=(Host(name="a", cores=8, memory_bytes=2**38, gpus=gpus),))


def test_the_flops_are_those_of_the_layers() -> None:
    assert flops_of(job()) == {
        "weights": pytest.approx(3 * (LINEAR + HEAD)),
        "activations": pytest.approx(3 * ATTENTION),
        "tokens": TOKENS,
    }


def test_frozen_weights_have_one_gradient_less() -> None:
    found = flops_of(job(adapter={"lora": {"r": 2, "alpha": 4}}))
    assert found is not None
    frozen = 2 * (LINEAR + HEAD)
    assert found["activations"] == pytest.approx(3 * ATTENTION)
    assert frozen < found["weights"] < 1.2 * frozen


def test_the_peak_is_that_of_the_devices_in_use() -> None:
    gpus = servers("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    assert peak_of(job(), Plan(dp=2), gpus) == pytest.approx(2 * 989e12, rel=0.01)
    assert peak_of(job(), Plan(dp=2, precision="fp8"), gpus) == pytest.approx(2 * 989e12, rel=0.01)
    assert peak_of(job(), Plan(dp=3), gpus) == pytest.approx((2 * 989 + 312) * 1e12, rel=0.01)


@pytest.mark.parametrize("gpus", [(), ("A device of tomorrow",), ("H100-SXM", "A device of tomorrow")])
def test_the_peak_of_cpus_and_unknown_devices_is_unknown(gpus: tuple[str, ...]) -> None:
    assert peak_of(job(), Plan(dp=max(1, len(gpus))), servers(*gpus)) is None


def test_padding_does_not_count() -> None:
    full = Speed(step_s=0.5, samples=8, tokens=512, padding=0.0, filled=512)
    half = Speed(step_s=0.5, samples=8, tokens=256, padding=0.5, filled=256)
    sample = {"weights": 6e9, "activations": 4e9, "tokens": 512.0}
    assert used(sample, 1e12, full) == pytest.approx(0.16)
    assert used(sample, 1e12, half) == pytest.approx(16 * (3e9 + 1e9) / 1e12)
    assert used(sample, 1e12, Speed(step_s=0.5, samples=8)) == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("sample", "peak"),
    [
        (None, 1e12),
        ({"weights": 1.0, "activations": 1.0, "tokens": 1.0}, None),
        ({"weights": 1.0, "activations": 1.0, "tokens": 1.0}, "fast"),
        ({"weights": "many"}, 1e12),
    ],
)
def test_without_its_parts_there_is_no_mfu(sample: Any, peak: Any) -> None:
    assert used(sample, peak, Speed(step_s=0.5, samples=8)) is None


def used(sample: Any, peak: Any, speed: Speed) -> float | None:
    events = [{"event": "start", FLOPS: sample, PEAK: 1.0}, {"event": "resume", PEAK: peak}, {"event": "end"}]
    return utilization(events, speed)
