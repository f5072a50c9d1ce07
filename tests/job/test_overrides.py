"""Overridden keys of a job are checked as those of its file, and a mistake names the override."""

from __future__ import annotations

import re
import string
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import write_job
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.yaml_file import to_yaml

KEYS = st.text(string.ascii_letters + "_", min_size=1, max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda part: st.lists(part) | st.dictionaries(KEYS, part), max_leaves=5)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"kind": "synthetic", "samples": 48}
    return write_job(tmp_path_factory.mktemp("jobs") / "job.yaml", data=data, metrics=["accuracy"])


@pytest.fixture(scope="module")
def loaded(job: Path) -> Job:
    return Job.load(job)


@given(path=st.lists(KEYS, min_size=1, max_size=4), value=VALUES)
def test_every_yaml_value_arrives_at_its_key_and_nowhere_else(path: list[str], value: Any, loaded: Job) -> None:
    text = to_yaml({"value": value}).removeprefix("value:")
    key = ".".join(["model", "args", *path])
    changed = loaded.replace([f"{key}={text}"])
    assert changed == loaded.replace({key: value})
    found: Any = changed.model.args
    for part in path:
        found = found[part]
    assert found == value
    assert changed.replace({"model.args": loaded.model.args}) == loaded


@given(changes=st.lists(st.text() | st.from_regex(r"(stop|optimizer|metrics)(\.[a-z0-9]*)*=.*"), max_size=3))
def test_any_text_is_an_override_or_a_job_error(changes: list[str], loaded: Job) -> None:
    with suppress(JobError):
        assert isinstance(loaded.replace(changes), Job)


@given(number=st.floats(1e-30, 1e30), digits=st.integers(0, 17), style=st.sampled_from("egEG"))
def test_numbers_in_every_notation_are_numbers(number: float, digits: int, style: str, loaded: Job) -> None:
    text = f"{number:.{digits}{style}}"
    assert loaded.replace([f"optimizer.lr={text}"]).optimizer.lr == float(text)


def test_parts_of_a_job_change_without_the_rest(job: Path) -> None:
    changed = Job.load(
        job,
        set=[
            "optimizer.lr=3e-4",
            "model.args.hidden=128",
            "stop={epochs: 2}",
            "metrics=[accuracy,top5]",
            "data.held_out=0.5",
            "spike.threshold=5",
        ],
    )
    assert (changed.optimizer.lr, changed.optimizer.momentum) == (3e-4, 0.9)
    assert changed.model.args == {"hidden": 128}
    assert (changed.stop.epochs, changed.stop.steps) == (2, None)
    assert [metric.name for metric in changed.metrics] == ["accuracy", "top5"]
    assert changed.spike.threshold == 5
    assert Job.load(job).optimizer.lr == 0.1, "the file stays as it is"


def test_short_forms_take_further_keys(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("points = net = None\n")
    names = {"model": "own.py:net", "data": "own.py:points", "loss": "cross_entropy", "metrics": ["accuracy", "top5"]}
    file = write_job(tmp_path / "job.yaml", optimizer="adamw", spike="skip", **names)
    changed = Job.load(
        file,
        set={
            "optimizer.lr": 0.5,
            "model.args.depth": 2,
            "data.args.samples": 9,
            "data.held_out": 0.5,
            "loss.args.label_smoothing": 0.1,
            "spike.window": 20,
            "metrics.1": "mse",
        },
    )
    assert (changed.optimizer.name, changed.optimizer.lr) == ("adamw", 0.5)
    assert changed.model.factory == f"{tmp_path}/own.py:net"
    assert changed.data.kind == "dataset"
    assert changed.data.args == {"samples": 9}
    assert changed.loss.args == {"label_smoothing": 0.1}
    assert (changed.spike.policy, changed.spike.window) == ("skip", 20)
    assert [metric.name for metric in changed.metrics] == ["accuracy", "mse"]


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        (["optimizer.lrr=1"], "--set optimizer.lrr"),
        (["optimiser.lr=1"], "--set optimiser.lr"),
        (["optimizer.lr=fast"], "--set optimizer.lr"),
        ([r'stop={"epoch": 2}'], "--set stop"),
        (["stop.epochs=0", "stop.steps=-1"], "--set stop."),
        (["optimizer.name=lamb"], "--set optimizer.name"),  # which has no momentum
        ({"optimizer.lr": "fast"}, "set optimizer.lr"),
        (["seed.x=1"], "--set seed.x"),
        (["metrics.first=mse"], "--set metrics.first"),
        (["metrics.1=mse"], "--set metrics.1"),
        (["optimizer..lr=1"], "--set optimizer..lr"),
        (["metrics=[accuracy"], "--set metrics"),
        (["stop={steps: 1, steps: 2}"], "--set stop"),
        (["optimizer.lr="], "--set optimizer.lr"),
        (["optimizer.lr"], "--set optimizer.lr"),
        (["seed=1", "seed=2"], "--set seed"),
        (["optimizer.lr=1", "optimizer=sgd"], "--set optimizer"),
    ],
)
def test_a_mistake_names_the_override_and_no_line(changes: Any, blamed: str, job: Path) -> None:
    with pytest.raises(JobError) as refused:
        Job.load(job, set=changes)
    for line in str(refused.value).splitlines():
        assert line.startswith(blamed)  # the place, which is before the text of each mistake
        assert not re.search(r"job\.yaml|line \d", line)


def test_mistakes_of_the_file_keep_their_lines(tmp_path: Path) -> None:
    file = write_job(tmp_path / "job.yaml", seed="one")
    with pytest.raises(JobError) as refused:
        Job.load(file, set=["optimizer.lrr=1"])
    places = {line.partition(":")[0] for line in str(refused.value).splitlines()}
    assert places == {"--set optimizer.lrr", f"{file}, line {file.read_text().splitlines().index('seed: one') + 1}"}


def test_a_changed_copy_is_another_job(loaded: Job) -> None:
    changed = loaded.replace({"optimizer.lr": 0.5, "stop.epochs": 2})
    assert (changed.optimizer.lr, changed.stop.epochs, loaded.optimizer.lr) == (0.5, 2, 0.1)
    with pytest.raises(JobError):
        loaded.replace({"optimizer.lrr": 0.5})
