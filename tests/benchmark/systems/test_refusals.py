"""Jobs that a system cannot train are refused before anything starts, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.benchmark.systems.compare import Compare
from paceline.benchmark.systems.system import SYSTEMS
from paceline.cluster.cluster import Cluster, Emulate
from paceline.cluster.discover import discover
from paceline.errors import RunError
from paceline.job.job import Job

DIGITS: dict[str, Any] = {
    "model": "cifar_cnn",
    "data": "digits",
    "loss": "cross_entropy",
    "optimizer": "adamw",
    "global_batch": 64,
    "stop": {"steps": 20},
}


def job(**changes: Any) -> Job:
    return Job.model_validate(DIGITS | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "simclr", "loss": "contrastive"}, "the model would have to be written again"),
        (
            {"loss": {"name": "cross_entropy", "args": {"label_smoothing": 0.1}}},
            "the loss would have to be written again",
        ),
        ({"clip_norm": 1.0}, "Keras clips the gradient of each replica"),
        ({"optimizer": {"name": "sgd", "weight_decay": 0.1}}, "Keras has no sgd of these settings"),
        ({"optimizer": "lamb"}, "Keras has no lamb"),
    ],
)
def test_tensorflow_refuses_what_it_would_compute_otherwise(changes: dict[str, Any], reason: str) -> None:
    for name in ("tf-mirrored", "tf-multiworker", "tf-server"):
        system = SYSTEMS[name].load()
        assert reason in (system.refuses(job(**changes), discover()) or "")
        assert system.refuses(job(), discover()) is None


@pytest.mark.needs_root
def test_systems_of_one_host_refuse_several() -> None:
    hosts = Cluster(emulate=Emulate(hosts=2))
    for name in ("tf-mirrored", "ray-train", "horovod", "torchft"):
        assert SYSTEMS[name].load().refuses(job(), hosts) is not None
    for name in ("ddp", "fsdp", "tf-multiworker", "accelerate"):
        assert SYSTEMS[name].load().refuses(job(), hosts) is None


def test_every_name_is_a_system_that_names_its_documentation() -> None:
    for name in SYSTEMS.names:
        system = SYSTEMS[name].load()
        assert system.name == name
        assert system.documentation.startswith(("https://", "docs/"))


def test_a_name_that_nobody_knows_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r'unknown system "hovorod"\. Did you mean "horovod"'):
        Compare(job(), None, ["hovorod"], out=tmp_path / "out", say=print)
    assert not (tmp_path / "out").exists()


def test_a_batch_that_cannot_be_dealt_evenly_is_refused(tmp_path: Path) -> None:
    if discover().devices % 7 == 0:
        pytest.skip("seven devices deal a batch of seven")
    with pytest.raises(RunError, match="global_batch 7 cannot be dealt evenly"):
        Compare(job(global_batch=7), None, ["ddp"], out=tmp_path / "out", say=print)
