"""`paceline plan`: the whole answer on the screen, as JSON and as a page, from a name of a cluster.

And what it cannot plan for.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from commands import in_a_process, paceline, parsed
from handmade_search import RARER, cluster, found, job
from paceline.cli import plan_options as command
from paceline.cli.command import to_run_on
from paceline.cli.plan_screen import fitted, show_costs, show_explanation, show_plans
from paceline.cluster.named import HARDWARE
from paceline.errors import ClusterError, LaunchError
from paceline.job.job import Job
from paceline.planning.explain.advice import Advice
from paceline.planning.explain.explain import explain
from paceline.planning.plan import Plan
from paceline.units import large
from refusals import raises

GPT = {"transformer": {"layers": 4, "hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32000}}
NAME = "1x4xA100-SXM-80, 2.5/h"
MEASURED = str(Path(__file__).parents[2] / "benchmarks" / "tables" / "llmfoundry_mpt_h100_given.csv")


def write_job(folder: Path, **changes: Any) -> Path:
    values = {
        "name": "gpt",
        "model": GPT,
        "data": "synthetic",
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 0.001},
        "global_batch": 32,
        "precision": "bf16",
        "stop": {"steps": 100},
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(values | changes))
    return file


def screen(width: int, *, terminal: bool) -> str:
    told = explain(job(), cluster(price_per_hour=2.5), found(), what_would_help=False)
    changes = (Advice("twice the memory", "149 GiB", 0.001), Advice("x", but="not predicted: nobody knows"))
    out = StringIO()
    console = fitted(Console(file=out, width=width, force_terminal=terminal))
    told = replace(told, changes=changes, trainings=(RARER,))
    show_plans(told, console, top=10)
    show_explanation(told, told, console)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_plans_are_listed_on_the_screen_as_json_and_as_a_page_and_no_torch_is_imported(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = None  # to import it is an error from here on\n"
    )
    arguments = ["--cluster", NAME, "--json", "--out", "plan.html", "--top", 4]
    shown = in_a_process("plan", "job.yaml", *arguments, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert shown.code == 0, shown.err
    assert shown.says("optimality gap", "plan.html")
    *lines, last = shown.out.splitlines()
    assert max(map(len, lines)) <= 120
    values = json.loads(last)
    assert 1 <= len(values["candidates"]) <= 4
    assert values["candidates"][0]["plan"] == values["plan"]
    assert Plan.parse(values["plan"]).ranks <= values["devices"] == 4
    assert values["candidates"][0]["cost"] > 0
    assert values["batch_advice"]["now"] == 32
    assert [point["devices"] for point in values["scaling"]] == [1, 2, 4, 8, 16, 32]
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_the_proposed_command_explains_the_same_prediction(tmp_path: Path) -> None:
    file = write_job(tmp_path)
    options = ["--set", "global_batch=16", "--cluster", NAME, "--calibrate-on", MEASURED, "--no-measure"]
    shown = paceline("plan", file, *options, folder=tmp_path)
    assert shown.code == 0, shown.err
    [line] = [line for line in shown.out.splitlines() if line.startswith("explain it")]
    _, *words = shlex.split(line.removeprefix("explain it"))
    proposed, asked = parsed(words), parsed(["plan", str(file), *options])
    for key in ("job", "changes", "cluster", "calibrate_on", "measure"):
        assert proposed[key] == asked[key]


def test_a_list_of_plans_does_not_say_what_would_help(tmp_path: Path) -> None:
    shown = paceline("plan", write_job(tmp_path), "--cluster", NAME, "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    assert "what_would_help" not in json.loads(shown.out.splitlines()[-1])


def test_the_best_plan_or_the_named_one_is_explained(tmp_path: Path) -> None:
    command = ("plan", "explain", write_job(tmp_path), "--cluster", NAME, "--json")
    best = paceline(*command, folder=tmp_path)
    assert best.code == 0, best.err
    assert best.says("where the step goes", "what holds the memory", "what would help most")
    told = json.loads(best.out.splitlines()[-1])
    assert told["plan"] == told["best_plan"]
    assert told["what_would_help"]
    named = paceline(*command, "--plan", "tp=2", folder=tmp_path)
    assert named.code == 0, named.err
    other = json.loads(named.out.splitlines()[-1])
    assert (other["plan"], other["best_plan"]) == ("tp=2", told["plan"])
    assert other["candidates"][0]["step_time_s"] > told["candidates"][0]["step_time_s"]
    assert other["what_would_help"] == told["what_would_help"]


def test_a_plan_that_cannot_run_is_not_explained(tmp_path: Path) -> None:
    refused = paceline("plan", "explain", write_job(tmp_path), "--cluster", NAME, "--plan", "tp=3", folder=tmp_path)
    assert refused.code == 1
    assert "tp=3" in refused.error


def test_the_accepted_batch_is_a_new_job_and_every_change_is_said(tmp_path: Path) -> None:
    file = write_job(tmp_path, global_batch=4)
    before = file.read_text()
    command = ("plan", "batch", file, "--cluster", "1x2xA100-SXM-80", "--out", "out.yaml")
    shown = paceline(*command, "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    assert file.read_text() == before
    accepted = Job.load(tmp_path / "out.yaml")
    assert accepted.global_batch > 4
    assert shown.says(
        f"global_batch was 4, is {accepted.global_batch}",
        "optimizer.lr was 0.001, is",
        "stop.steps was 100, is",
        "wrote out.yaml",
    )
    advice = json.loads(shown.out.splitlines()[-1])
    assert (advice["now"], advice["useful"]) == (4, accepted.global_batch)
    assert paceline(*command, folder=tmp_path).code == 2, "out.yaml exists already"


def test_the_accepted_job_keeps_relative_paths_beside_the_job_alone(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(3, 2)\n")
    data = {"kind": "arrays", "path": "points.npz", "inputs": "x", "target": "y"}
    np.savez(tmp_path / "points.npz", x=np.zeros((4096, 3), np.float32), y=np.arange(4096) % 2)
    write_job(tmp_path, model="net.py:net", data=data, precision="fp32", global_batch=2)
    (tmp_path / "other").mkdir()
    for out in ("out.yaml", "other/out.yaml"):
        shown = paceline("plan", "batch", "job.yaml", "--no-measure", "--out", out, folder=tmp_path)
        assert shown.code == 0, shown.err
        assert Job.load(tmp_path / out).data == Job.load(tmp_path / "job.yaml").data
    assert str(tmp_path) not in (tmp_path / "out.yaml").read_text()


def test_a_job_whose_batch_is_the_useful_one_is_not_written_again(tmp_path: Path) -> None:
    file = write_job(tmp_path, global_batch=4)
    command = ("plan", "batch", "--cluster", "1x2xA100-SXM-80")
    assert paceline(*command, file, "--out", "once.yaml", folder=tmp_path).code == 0
    shown = paceline(*command, "once.yaml", "--out", "twice.yaml", "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    advice = json.loads(shown.out.splitlines()[-1])
    assert advice["now"] == advice["useful"]
    assert not (tmp_path / "twice.yaml").exists()


def test_a_model_too_large_for_every_plan_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    write_job(
        tmp_path, model={"transformer": {"layers": 80, "hidden": 16384, "heads": 128, "seq": 1024, "vocab": 32000}}
    )
    shown = paceline("plan", "job.yaml", "--cluster", "V100-SXM-16", folder=tmp_path)
    assert shown.code == 1
    assert "GiB" in shown.error


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("2x8xH1000", "cluster.name_wrong"),
        ("0x8xH100-SXM", "cluster.name_without_devices"),
        ("absent.yaml", "file.absent"),
    ],
)
def test_a_cluster_that_cannot_be_is_an_error_that_helps(name: str, code: str) -> None:
    with raises(ClusterError, code):
        command.cluster_of(name, None)


def test_a_wrong_name_is_answered_by_near_names_and_the_command_that_lists_all(tmp_path: Path) -> None:
    with raises(ClusterError, "cluster.name_wrong") as wrong:
        command.cluster_of("2x8xH1000", None)
    assert "H100-SXM" in str(wrong.value)
    assert "T4" not in str(wrong.value)
    shown = paceline("plan", "cluster", "--hardware", folder=tmp_path)
    assert shown.code == 0
    assert [line.split()[0] for line in shown.out.splitlines()] == list(HARDWARE.names)


def test_a_cluster_from_the_catalogue_is_refused_where_ranks_would_start(tmp_path: Path) -> None:
    write_job(tmp_path)
    shown = paceline("train", "job.yaml", "--cluster", "2x8xH100-SXM", folder=tmp_path)
    assert shown.code == 1
    assert "[cluster.catalogue_only]" in shown.error
    missing = paceline("train", "job.yaml", "--cluster", "two-hosts", folder=tmp_path)
    assert "[cluster.no_file]" in missing.error
    assert to_run_on(None) is None
    (tmp_path / "cluster.yaml").write_text(cluster().to_yaml())
    assert to_run_on(str(tmp_path / "cluster.yaml")) == cluster()


# The screen


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_screen_keeps_to_the_width_of_the_terminal_and_loses_no_plan(width: int) -> None:
    text = screen(width, terminal=True)
    assert max(map(len, text.splitlines())) <= width
    together = " ".join(text.split())
    for candidate in found().best:
        assert all(word in together for word in str(candidate.plan).split())
        assert all(word in together for word in candidate.why.split())
    assert "no gain" in text
    assert "nobody knows" in together
    assert "sync=local:8" in text


def test_where_it_is_piped_no_line_ends_in_blanks_that_nobody_sees() -> None:
    title = screen(80, terminal=False).splitlines()[0]
    assert title == title.rstrip()


def test_numbers_are_said_as_people_say_them() -> None:
    assert [str(large(n)) for n in (70.6e9, 1.2e6, 4810, 1e12)] == [
        "70.6 billion",
        "1.20 million",
        "4,810",
        "1.00 trillion",
    ]


def test_where_this_machine_cannot_be_measured_the_catalogue_stands_in_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise LaunchError("test.planted", "rank 0 raised: no memory\nTraceback …")

    monkeypatch.setattr("paceline.run.tuning.calibrate.calibrate", fails)
    out = StringIO()
    assert command.measure_machine(job(), cluster(), Console(file=out, width=200)) is None
    assert (
        out.getvalue().strip()
        == "not measured: rank 0 raised: no memory; the catalogue stands in, which may be several times off"
    )


def test_what_failures_cost_is_on_the_screen_where_a_rate_is_given(tmp_path: Path) -> None:
    out = StringIO()
    told = explain(job(), cluster(failures_per_host_day=0.5), found(), what_would_help=False)
    show_costs(told, fitted(Console(file=out)))
    text = " ".join(out.getvalue().split())
    assert "what failures cost 0.5 a day on each of 2 hosts: one in 24.0 h, predicted" in text
    assert "restart, the best interval every" in text
    assert "in place, by the replicas" in text
    assert "assumed: 1.00 GB/s of storage" in text
    assert "what failures cost" not in screen(120, terminal=False)
    assert command.cluster_of(NAME, None, 0.004)[0].failures_per_host_day == 0.004
    refused = paceline(
        "plan", "cost", write_job(tmp_path), "--failures-per-host-day", "-1", folder=tmp_path, columns=200
    )
    assert refused.code == 2


def test_a_price_of_the_command_line_goes_before_that_of_the_cluster() -> None:
    where, here = command.cluster_of(NAME, 4.0)
    assert where.price_per_hour == 4.0
    assert not here
    assert command.cluster_of(NAME, None)[0].price_per_hour == 2.5


# The documentation


def test_every_command_of_the_documentation_is_one() -> None:
    root = Path(__file__).parent.parent.parent
    pages = "\n".join(page.read_text() for page in sorted((root / "docs").rglob("*.md"))).replace("\\\n", " ")
    lines = re.findall(r"^paceline plan (.*examples/\S.*)$", pages, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        values = parsed(["plan", *shlex.split(line, comments=True)])
        Job.load(root / values["job"])
        if values["cluster"] is not None:
            assert command.cluster_of(values["cluster"], None)[0].devices > 1


def test_one_plan_is_recommended_for_a_small_model_that_many_devices_train_no_faster(tmp_path: Path) -> None:
    """JSON and the suggested command name the same plan."""
    (tmp_path / "rows.py").write_text(
        "from torch import nn\n"
        "def network():\n"
        "    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))\n"
    )
    data = {"kind": "synthetic", "samples": 6000, "shape": [16], "classes": 2}
    write_job(
        tmp_path,
        name="energy",
        model={"factory": "rows.py:network"},
        data=data,
        global_batch=64,
        precision="fp32",
        stop={"epochs": 10},
    )
    shown = paceline("plan", "job.yaml", "--cluster", "8xH100-SXM", "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    *lines, last = shown.out.splitlines()
    told = json.loads(last)
    assert told["plan"] == told["candidates"][0]["plan"] == "dp=1", "equally fast, and one device does"
    assert '--plan "dp=1"' in next(line for line in lines if line.startswith("train it"))


def test_a_machine_that_could_not_be_measured_has_a_wide_interval(tmp_path: Path) -> None:
    shown = paceline("plan", write_job(tmp_path), "--no-measure", "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    best = json.loads(shown.out.splitlines()[-1])["candidates"][0]
    low_s, high_s = best["interval_80_s"]
    assert low_s <= best["step_time_s"] / 4 < 4 * best["step_time_s"] <= high_s


def test_torch_does_not_log_a_trace_that_fails_beside_our_error(tmp_path: Path) -> None:
    """In bf16 the pass is traced on tensors without values. If that fails, torch logs a traceback."""
    job = write_job(tmp_path, model={"zoo": "mlp", "args": {"hidden": 8}}, data={"kind": "synthetic", "shape": [7]})
    shown = in_a_process("plan", job, "--cluster", NAME, folder=tmp_path)
    assert shown.code == 1
    assert "fails on the job's samples" in shown.err
    assert "fake_tensor" not in shown.err
    assert "Traceback" not in shown.err
