"""Reading job files.

A mistake that is not named where it stands costs its author an hour; a job that changes in writing, a run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import JobError, Problem
from paceline.job.job import Job
from refusals import assert_problem, raises

GOOD = """\
model: {zoo: mlp}
data: digits
loss: cross_entropy
metrics: [accuracy]
optimizer:
  name: adamw
  lr: 1e-3
global_batch: 64
stop:
  epochs: 2
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("job.yaml")


def complaints(file: Path, text: str) -> tuple[Problem, ...]:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as caught:
        Job.load(file)
    return caught.value.problems


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_good_file_becomes_the_job_it_describes(job_file: Path) -> None:
    job_file.write_text(GOOD)
    job = Job.load(job_file)
    assert (job.model.zoo, job.data.kind, job.optimizer.name, job.global_batch, job.stop.epochs) == (
        "mlp",
        "digits",
        "adamw",
        64,
        2,
    )
    assert job.optimizer.lr == 1e-3  # YAML 1.1 reads 1e-3 as text


MISTAKES: list[tuple[str, str, int | None, str, dict[str, Any]]] = [
    ("optimizer:", "optimiser:", 5, "file.unknown_key", {"key": "optimiser", "hint": re.compile('"optimizer"')}),
    ("  lr: 1e-3", "  lrr: 1e-3", 7, "file.unknown_key", {"above": "optimizer", "hint": re.compile('"lr"')}),
    ("global_batch: 64", "global_batch: abc", 8, "file.wrong_type", {"key": "global_batch", "value": "'abc'"}),
    ("global_batch: 64", "global_batch: 0", 8, "file.value_out_of_range", {"key": "global_batch", "value": 0}),
    ("  lr: 1e-3", "  lr: fast", 7, "file.wrong_type", {"key": "optimizer.lr", "value": "'fast'"}),
    ("  lr: 1e-3", "  lr: .nan", 7, "file.wrong_type", {"key": "optimizer.lr", "value": "nan"}),
    ("name: adamw", "name: adamv", 6, "optimizer.unknown", {"name": "adamv", "hint": re.compile("adam")}),
    ("data: digits", "data: digitz", 2, "file.unknown_kind", {"kind": "digitz", "hint": re.compile('"digits"')}),
    (
        "data: digits",
        "data: {path: x}",
        2,
        "file.missing_kind",
        {"key": "data", "hint": re.compile("arrays, records")},
    ),
    ("data: digits", "data: {kind: images}", 2, "file.missing_key", {"above": "data", "key": "path"}),
    (
        "data: digits",
        "data: {kind: text, path: x, contxt: 3}",
        2,
        "file.unknown_key",
        {"key": "contxt", "hint": re.compile('"context"')},
    ),
    ("data: digits", "data: {kind: arrays, path: x, inputs: 3}", 2, "file.wrong_type", {"key": "data.inputs"}),
    (
        "data: digits",
        "data: {kind: images, path: x, shape: [3, a, 4]}",
        2,
        "file.wrong_type",
        {"key": "data.shape[1]", "value": "'a'"},
    ),
    ("data: digits", "data: {kind: images, path: x, shape: [3]}", 2, "file.too_few_entries", {"key": "data.shape"}),
    ("global_batch: 64\n", "", None, "file.missing_key", {"key": "global_batch"}),
    ("  epochs: 2", "  plateau: {over: 3}", 10, "file.missing_key", {"above": "stop.plateau", "key": "less_than"}),
    ("stop:\n  epochs: 2", "stop: {}", 9, "job.no_stop_rule", {}),
    ("stop:\n  epochs: 2", "stop: soon", 9, "file.wrong_type", {"key": "stop", "value": "'soon'"}),
    ("{zoo: mlp}", "{zoo: mlp, args: {x: [1, 2001-01-01]}}", 1, "file.wrong_type", {"key": "model.args.x[1]"}),
    ("{zoo: mlp}", "{hf: config.json, task: causal_lm}", 1, "model.file_missing", {"path": re.compile("config.json$")}),
    ("{zoo: mlp}", "./net.py:make", 1, "job.no_such_file", {"file": re.compile(r"net\.py$")}),
    ("{zoo: mlp}", "{zoo: mlp, factory: 'a:b'}", 1, "model.source_ambiguous", {"place": "model"}),
    ("metrics: [accuracy]", "metrics: 3", 4, "file.wrong_type", {"key": "metrics", "value": 3}),
]


@pytest.mark.parametrize(("old", "new", "line", "code", "fields"), MISTAKES)
def test_each_mistake_is_named_with_its_line_and_its_remedy(
    job_file: Path, old: str, new: str, line: int | None, code: str, fields: dict[str, Any]
) -> None:
    job_file.write_text(changed(old, new))
    with raises(JobError, code, **fields) as caught:
        Job.load(job_file)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith("job.yaml: " if line is None else f"job.yaml, line {line}: ")


@pytest.mark.parametrize(
    ("key", "home"),
    [
        ("accumulate: 4", "gradient_accumulation_steps"),
        ("batch_size: 4", "global_batch"),
        ("epochs: 4", "stop"),
        ("steps: 4", "stop"),
        ("lr: 4", "optimizer"),
        ("warmup_steps: 4", "schedule"),
        ("every_steps: 4", "checkpoint"),
    ],
)
def test_a_key_that_other_tools_have_is_told_its_home_here(job_file: Path, key: str, home: str) -> None:
    (found,) = complaints(job_file, f"{key}\n{GOOD}")
    assert (found.code, found.fields["place"]) == ("file.unknown_key", "job.yaml, line 1")
    assert f'"{home}"' in found.fields["hint"]


def test_a_key_in_the_wrong_part_is_told_the_right_one(job_file: Path) -> None:
    first, second = complaints(job_file, changed("  lr: 1e-3", "  warmup_steps: 5\n  seed: 3"))
    assert [problem.code for problem in (first, second)] == ["file.unknown_key"] * 2
    assert [problem.fields["place"] for problem in (first, second)] == ["job.yaml, line 7", "job.yaml, line 8"]
    assert '"schedule"' in first.fields["hint"]
    assert '"' not in second.fields["hint"], "the top of the job has no name"


def test_all_mistakes_are_listed_at_once_in_the_order_of_the_file(job_file: Path) -> None:
    found = complaints(job_file, "strop: 3\n" + changed("global_batch: 64", "seed: -1").replace("lr: 1e-3", "lr: 0"))
    assert [problem.fields["place"] for problem in found] == [
        "job.yaml",
        "job.yaml, line 1",
        "job.yaml, line 8",
        "job.yaml, line 9",
    ]


def test_a_metric_that_is_never_measured_cannot_stop_a_run(job_file: Path) -> None:
    job_file.write_text(changed("  epochs: 2", "  metric_above: {acuracy: 0.9}"))
    with raises(JobError, "job.metric_unmeasured", place="job.yaml", key="stop.metric_above", metric="acuracy"):
        Job.load(job_file)


NO_JOBS: list[tuple[str, str, dict[str, Any]]] = [
    ("", "file.empty", {}),
    ("# nothing\n", "file.empty", {}),
    ("- model\n", "file.not_a_mapping", {"line": 1}),
    ("mlp\n", "file.not_a_mapping", {"line": 1}),
    ("model: mlp\n  data: digits\n", "file.not_yaml", {"place": ", line 2, column 7"}),
    ("model: [mlp\n", "file.not_yaml", {"place": ", line 2, column 1"}),
    ("model: !!python/name:os.system\n", "file.not_yaml", {"place": ", line 1, column 8"}),
    ("a: 1\n---\nb: 2\n", "file.not_yaml", {"place": ", line 2, column 1"}),
    ("a: \x01\n", "file.not_yaml_value", {}),
    ("a: 2001-99-99\n", "file.not_yaml_value", {}),
    ("model: mlp\nstop: {epochs: 1, epochs: 2}\n", "file.key_repeated", {"line": 2, "key": "epochs", "first": 2}),
    (GOOD + "data: digits\n", "file.key_repeated", {"line": 11, "key": "data", "first": 2}),
]


@pytest.mark.parametrize(("text", "code", "fields"), NO_JOBS)
def test_what_is_no_job_at_all_is_said_so(job_file: Path, text: str, code: str, fields: dict[str, Any]) -> None:
    job_file.write_text(text)
    with raises(JobError, code, file="job.yaml", **fields):
        Job.load(job_file)


def test_a_file_that_cannot_be_read_is_said_so(job_file: Path) -> None:
    with raises(JobError, "file.absent", file="job.yaml"):
        Job.load(job_file)
    with raises(JobError, "file.is_a_folder", kind="job"):
        Job.load(job_file.resolve().parent)
    job_file.write_bytes(b"model: \xff\xfe")
    with raises(JobError, "file.not_utf8", file="job.yaml", start=7, byte=0xFF):
        Job.load(job_file)


def test_merged_keys_keep_their_lines_and_their_order(job_file: Path) -> None:
    text = "optimizer: &o {name: sgd, lr: bad}\n" + changed(
        "optimizer:\n  name: adamw\n  lr: 1e-3", "schedule:\n  <<: {name: cosine}\n  final: 7"
    )
    found = complaints(job_file, text)
    assert [problem.fields["place"] for problem in found] == ["job.yaml, line 1", "job.yaml, line 8"]


def test_paths_count_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("class Net: ...\n")
    file = tmp_path / "job.yaml"
    file.write_text(changed("{zoo: mlp}", "net.py:Net").replace("data: digits", "data: {kind: cifar10, path: cifar}"))
    job = Job.load(file)
    assert job.model.factory == f"{tmp_path}/net.py:Net"
    assert job.data.path == tmp_path / "cifar"  # type: ignore[union-attr]


def test_in_python_the_same_mistakes_have_the_same_codes() -> None:
    with raises(JobError, "file.wrong_type", key="global_batch", value="'abc'") as caught:
        Job(**yaml.safe_load(GOOD) | {"optimiser": "sgd", "global_batch": "abc"})
    assert_problem(caught.value, "file.unknown_key", key="optimiser", hint=re.compile('"optimizer"'))


class Net:
    """Stands for a user's model; only its name is needed here."""


def test_a_class_of_ones_own_stands_for_its_import_path() -> None:
    values = yaml.safe_load(GOOD)
    job = Job(**values | {"model": {"factory": Net, "args": {"width": 3}}, "data": Net, "loss": Net})
    path = f"{Net.__module__}:Net"
    assert (job.model.factory, job.model.args, job.loss.name) == (path, {"width": 3}, path)
    assert job.data.factory == path  # type: ignore[union-attr]


def test_what_other_ranks_cannot_import_is_refused() -> None:
    class Local: ...

    for model, name in ((lambda: None, re.compile("<lambda>$")), (Local, re.compile("Local$"))):
        with raises(JobError, "job.local_object", place="model", name=name):
            Job(**yaml.safe_load(GOOD) | {"model": model})


def test_a_function_of_the_running_script_is_found_again_from_its_file(tmp_path: Path) -> None:
    script = tmp_path / "train_it.py"
    script.write_text(
        "from paceline.job.spec import load_object\n"
        "from paceline.job.job import Job\n"
        "def net(): ...\n"
        "if __name__ == '__main__':\n"
        "    job = Job(model=net, data='digits', loss='mse', optimizer='sgd', global_batch=4, stop={'steps': 1})\n"
        "    assert load_object(job.model.factory) is net\n"
        "    print(job.to_yaml())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"] == {"factory": f"{script}:net"}


_positive = st.floats(1e-12, 1e12)
_names = st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"]), min_size=1, max_size=3)
_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_args = st.dictionaries(
    st.sampled_from(["a", "1e3", "yes", "<<", "=", " "]),
    _plain | st.sampled_from(["1e3", "1e-3", "-.5E+1", "no", "~"]),
    max_size=3,
)
_optimizers = st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("sgd"), "lr": _positive, "momentum": st.just(0.9), "nesterov": st.booleans()}
    ),
    st.fixed_dictionaries(
        {"name": st.sampled_from(["adam", "lamb"])}, optional={"betas": st.just([0.8, 0.9]), "eps": _positive}
    ),
    st.sampled_from(["adamw", "lars"]),
)
_data = st.one_of(
    st.just("digits"),
    st.fixed_dictionaries({"kind": st.just("text"), "path": st.lists(st.sampled_from(["a", "b c", "/d"]), min_size=1)}),
    st.fixed_dictionaries({"kind": st.just("synthetic"), "shape": st.lists(st.integers(1, 9), max_size=3)}),
)
_schedules = st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("cosine"), "final": st.floats(0, 1)}, optional={"warmup_steps": st.integers(0, 99)}
    ),
    st.fixed_dictionaries(
        {"name": st.just("step"), "milestones": st.lists(st.integers(1, 99), min_size=1, max_size=3)}
    ),
)
_jobs = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["mlp", "pkg.mod:make"]) | st.fixed_dictionaries({"zoo": _names, "args": _args}),
        "data": _data,
        "loss": st.fixed_dictionaries({"name": st.just("mse"), "args": _args}),
        "optimizer": _optimizers,
        "global_batch": st.integers(1, 10**6),
        "stop": st.fixed_dictionaries(
            {"steps": st.integers(1, 10**9)}, optional={"seconds": _positive, "loss_below": st.floats(-1e9, 1e9)}
        ),
    },
    optional={
        "schedule": _schedules,
        "clip_norm": _positive,
        "seed": st.integers(0, 2**31 - 1),
        "name": st.sampled_from(["1e5", "no", "a-b"]),
    },
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=_jobs)
def test_a_job_that_is_written_and_read_again_is_the_same(tmp_path: Path, values: dict[str, Any]) -> None:
    job = Job(**values)
    file = tmp_path / "written.yaml"
    file.write_text(job.to_yaml(), encoding="utf-8")
    assert Job.load(file) == job
