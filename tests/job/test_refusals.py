"""Jobs that cannot do what they describe are refused when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.spec import load_object
from refusals import raises


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": "mlp",
        "data": {"kind": "digits", "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": "sgd",
        "global_batch": 8,
        "stop": {"epochs": 1},
    }
    return Job(**{**values, **changes})


def test_metrics_without_a_validation_set_are_refused() -> None:
    job()
    with raises(JobError, "job.metrics_without_held_out"):
        job(metrics=["accuracy"])
    with raises(JobError, "job.metric_without_held_out"):
        job(stop={"epochs": 1, "metric_above": {"loss": 0.1}})
    job(metrics=["accuracy"], data={"kind": "dataset", "factory": "a:b", "held_out": 0, "held_out_factory": "a:c"})


def test_one_metric_needs_no_list() -> None:
    assert [one.name for one in job(data="digits", metrics="accuracy").metrics] == ["accuracy"]


def test_a_python_file_is_not_read_as_a_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('x')\n")
    with raises(JobError, "file.python"):
        Job.load(script)


def test_what_a_notebook_defines_is_refused_with_the_remedy() -> None:
    with raises(JobError, "job.object_of_script", name="Net"):
        load_object("__main__:Net")
