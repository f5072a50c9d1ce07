"""Jobs that a system cannot train are refused before anything starts, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Device, Emulate, Host
from paceline.errors import RunError
from paceline.job.job import Job
from paceline_lab.systems.compare import Compare
from paceline_lab.systems.proof import as_compared, must_be_cpus_of_this_machine, must_draw_nothing
from paceline_lab.systems.system import SYSTEMS, System
from refusals import raises

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
    with raises(RunError, "extension.unknown", name="hovorod", noun="system"):
        Compare(job(), None, ["hovorod"], out=tmp_path / "out", say=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"global_batch": 7}, "compare.batch_uneven"),
        ({"precision": "bf16"}, "compare.precision"),
    ],
)
def test_jobs_on_which_systems_would_do_other_work_are_refused(changes: dict[str, Any], code: str) -> None:
    with raises(RunError, code):
        as_compared(job(**changes), 20, 4)


def test_what_is_compared_logs_to_no_tracker() -> None:
    assert as_compared(job(trackers=["tensorboard"]), 20, 4).trackers == ()


def test_machines_on_which_the_others_would_compute_elsewhere_are_refused(tmp_path: Path) -> None:
    gpu = Device(index=0, name="H200", memory_bytes=2**37, bf16=True)
    host = Host(name="a", cores=2, memory_bytes=2**34)
    for hosts, reason in (
        ((host.model_copy(update={"gpus": (gpu,)}),), "compare.accelerators"),
        ((host, host.model_copy(update={"name": "b"})), "compare.several_hosts"),
    ):
        with raises(RunError, reason):
            must_be_cpus_of_this_machine(Cluster(hosts=hosts))


def test_a_model_with_dropout_is_refused_with_the_place_of_it() -> None:
    dropped = job(model={"zoo": "gpt", "args": {"layers": 1, "dropout": 0.1}}, data={"kind": "text", "path": "."})
    with raises(RunError, "compare.dropout", name="dropout", p=0.1):
        must_draw_nothing(dropped)
    must_draw_nothing(job())


def test_a_system_that_cannot_be_built_is_tried_once_for_all_its_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fails(system: System, say: Callable[[str], object]) -> Path:
        tried.append(system.name)
        raise RunError("test.planted", "the compiler fails")

    monkeypatch.setattr("paceline_lab.systems.compare.python_of", fails)
    compare = Compare(job(), None, ["horovod"], repeat=1, steps=12, out=tmp_path / "out", say=print)
    assert len([way for way in compare.ways if way.system.name == "horovod"]) == 2, "as documented, and tuned"
    assert compare.run() is None
    assert sorted(tried) == ["horovod", "paceline", "plain"]
    assert compare.left_out["Horovod"] == "the compiler fails"
