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

from paceline.errors import JobError
from paceline.job.job import Job
from refusals import raises

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


def complaints(file: Path, text: str) -> list[str]:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as caught:
        Job.load(file)
    return str(caught.value).splitlines()


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


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("optimizer:", "optimiser:", 'job.yaml, line 5: unknown key "optimiser" in the job. Did you mean "optimizer"?'),
        ("  lr: 1e-3", "  lrr: 1e-3", 'job.yaml, line 7: unknown key "lrr" in optimizer. Did you mean "lr"?'),
        ("global_batch: 64", "global_batch: abc", "job.yaml, line 8: global_batch should be a whole number, got 'abc'"),
        ("global_batch: 64", "global_batch: 0", "job.yaml, line 8: global_batch should be at least 1, got 0"),
        ("  lr: 1e-3", "  lr: fast", "job.yaml, line 7: optimizer.lr should be a number, got 'fast'"),
        ("  lr: 1e-3", "  lr: .nan", "job.yaml, line 7: optimizer.lr should be a finite number, got nan"),
        (
            "name: adamw",
            "name: adamv",
            'job.yaml, line 6: optimizer.name: unknown optimizer "adamv". Did you mean "adam',
        ),
        ("data: digits", "data: digitz", 'job.yaml, line 2: data has no kind "digitz". Did you mean "digits"?'),
        (
            "data: digits",
            "data: {path: x}",
            'job.yaml, line 2: data needs the key "kind". Known: digits, cifar10, images, text, arrays, dataset',
        ),
        ("data: digits", "data: {kind: images}", 'job.yaml, line 2: data needs the key "path"'),
        (
            "data: digits",
            "data: {kind: text, path: x, contxt: 3}",
            'job.yaml, line 2: unknown key "contxt" in data. Did you mean "context"?',
        ),
        (
            "data: digits",
            "data: {kind: arrays, path: x, inputs: 3}",
            "job.yaml, line 2: data.inputs should be text or a list, got 3",
        ),
        (
            "data: digits",
            "data: {kind: images, path: x, shape: [3, a, 4]}",
            "job.yaml, line 2: data.shape[1] should be a whole number, got 'a'",
        ),
        (
            "data: digits",
            "data: {kind: images, path: x, shape: [3]}",
            "job.yaml, line 2: data.shape has too few entries",
        ),
        ("global_batch: 64\n", "", 'job.yaml: the job needs the key "global_batch"'),
        ("  epochs: 2", "  plateau: {over: 3}", 'job.yaml, line 10: stop.plateau needs the key "less_than"'),
        ("stop:\n  epochs: 2", "stop: {}", "job.yaml, line 9: stop: at least one of epochs, steps, seconds"),
        (
            "stop:\n  epochs: 2",
            "stop: soon",
            "job.yaml, line 9: stop should be a group of keys with values, got 'soon'",
        ),
        (
            "{zoo: mlp}",
            "{zoo: mlp, args: {x: [1, 2001-01-01]}}",
            "job.yaml, line 1: model.args.x[1] should be text, a number, true, false, null",
        ),
        ("{zoo: mlp}", "{hf: config.json, task: causal_lm}", "job.yaml, line 1: model.hf: no such file: "),
        ("{zoo: mlp}", "./net.py:make", "job.yaml, line 1: model.factory: no such file: "),
        ("{zoo: mlp}", "{zoo: mlp, factory: 'a:b'}", "job.yaml, line 1: model: exactly one of zoo, factory, hf"),
        ("metrics: [accuracy]", "metrics: 3", "job.yaml, line 4: metrics should be a list, got 3"),
    ],
)
def test_each_mistake_is_named_with_its_line_and_its_remedy(job_file: Path, old: str, new: str, complaint: str) -> None:
    (found,) = complaints(job_file, changed(old, new))
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("accumulate: 4", 'Did you mean "gradient_accumulation_steps"'),
        ("batch_size: 4", 'Did you mean "global_batch"'),
        ("epochs: 4", 'It belongs under "stop".'),
        ("steps: 4", 'It belongs under "stop".'),
        ("lr: 4", 'It belongs under "optimizer".'),
        ("warmup_steps: 4", 'It belongs under "schedule".'),
        ("every_steps: 4", 'It belongs under "evaluate" or under "checkpoint".'),
    ],
)
def test_a_key_that_other_tools_have_is_told_its_home_here(job_file: Path, key: str, remedy: str) -> None:
    (found,) = complaints(job_file, f"{key}\n{GOOD}")
    assert found.startswith("job.yaml, line 1: unknown key ")
    assert remedy in found


def test_a_key_in_the_wrong_part_is_told_the_right_one(job_file: Path) -> None:
    found = complaints(job_file, changed("  lr: 1e-3", "  warmup_steps: 5\n  seed: 3"))
    assert found == [
        'job.yaml, line 7: unknown key "warmup_steps" in optimizer. It belongs under "schedule".',
        'job.yaml, line 8: unknown key "seed" in optimizer. It belongs at the top of the job.',
    ]


def test_all_mistakes_are_listed_at_once_in_the_order_of_the_file(job_file: Path) -> None:
    found = complaints(job_file, "strop: 3\n" + changed("global_batch: 64", "seed: -1").replace("lr: 1e-3", "lr: 0"))
    assert [line.split(": ")[0] for line in found] == [
        "job.yaml",
        "job.yaml, line 1",
        "job.yaml, line 8",
        "job.yaml, line 9",
    ]


def test_a_metric_that_is_never_measured_cannot_stop_a_run(job_file: Path) -> None:
    (found,) = complaints(job_file, changed("  epochs: 2", "  metric_above: {acuracy: 0.9}"))
    assert found == "job.yaml: stop.metric_above uses acuracy, which is not in metrics, so it would never be measured"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "job.yaml is empty. A job needs at least"),
        ("# nothing\n", "job.yaml is empty. A job needs at least"),
        ("- model\n", "job.yaml, line 1: a job is a group of keys with values, such as `model: mlp`, not a list"),
        ("mlp\n", "job.yaml, line 1: a job is a group of keys with values, such as `model: mlp`, not a single value"),
        (
            "model: mlp\n  data: digits\n",
            "job.yaml, line 2, column 7: this is not valid YAML: mapping values are not allowed here",
        ),
        ("model: [mlp\n", "job.yaml, line 2, column 1: this is not valid YAML: "),
        (
            "model: !!python/name:os.system\n",
            "job.yaml, line 1, column 8: this is not valid YAML: could not determine a constructor",
        ),
        ("a: 1\n---\nb: 2\n", "job.yaml, line 2, column 1: this is not valid YAML: but found another document"),
        ("a: \x01\n", "job.yaml: this is not valid YAML: unacceptable character"),
        ("a: 2001-99-99\n", "job.yaml: this is not valid YAML: month must be in 1..12"),
        (
            "model: mlp\nstop: {epochs: 1, epochs: 2}\n",
            'job.yaml, line 2: the key "epochs" is there already, in line 2',
        ),
        (GOOD + "data: digits\n", 'job.yaml, line 11: the key "data" is there already, in line 2'),
    ],
)
def test_what_is_no_job_at_all_is_said_so(job_file: Path, text: str, complaint: str) -> None:
    assert complaints(job_file, text)[0].startswith(complaint)


def test_a_file_that_cannot_be_read_is_said_so(job_file: Path) -> None:
    with raises(JobError, "file.absent", file="job.yaml"):
        Job.load(job_file)
    with raises(JobError, "file.is_a_folder", kind="job"):
        Job.load(job_file.resolve().parent)
    job_file.write_bytes(b"model: \xff\xfe")
    with pytest.raises(JobError, match=r"^job\.yaml is not UTF-8 text: byte 7 is 0xff$"):
        Job.load(job_file)


def test_merged_keys_keep_their_lines_and_their_order(job_file: Path) -> None:
    text = "optimizer: &o {name: sgd, lr: bad}\n" + changed(
        "optimizer:\n  name: adamw\n  lr: 1e-3", "schedule:\n  <<: {name: cosine}\n  final: 7"
    )
    found = complaints(job_file, text)
    assert [line.split(",")[1].split(":")[0] for line in found] == [" line 1", " line 8"]


def test_paths_count_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("class Net: ...\n")
    file = tmp_path / "job.yaml"
    file.write_text(changed("{zoo: mlp}", "net.py:Net").replace("data: digits", "data: {kind: cifar10, path: cifar}"))
    job = Job.load(file)
    assert job.model.factory == f"{tmp_path}/net.py:Net"
    assert job.data.path == tmp_path / "cifar"  # type: ignore[union-attr]


def test_in_python_the_same_mistakes_have_the_same_words() -> None:
    with pytest.raises(JobError) as caught:
        Job(**yaml.safe_load(GOOD) | {"optimiser": "sgd", "global_batch": "abc"})
    assert str(caught.value).splitlines() == [
        "global_batch should be a whole number, got 'abc'",
        'unknown key "optimiser" in the job. Did you mean "optimizer"?',
    ]


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
