"""Every example trains from a copy of its folder that is not a checkout.

What a newcomer tries first works, and learns.
"""

from __future__ import annotations

import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from _pytest.mark import ParameterSet

from commands import BIN, ended, in_a_process, started
from forked import Forked
from paceline.errors import DataError
from paceline.job.data import Text
from paceline.job.job import Job
from paceline.job.stop import StopSpec
from paceline.planning.check.plan_errors import plan_errors
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, train_as_rank, train_here

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS_A_DOWNLOAD = "cifar10.yaml"
LONG = {"bert_text.yaml", "gpt_text.yaml", "large_batch.yaml"}  # the models are trained by others as well
STEPS = 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the examples."""
    return shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))


def shortened(file: Path, steps: int) -> Job:
    """The job of an example, but for fewer steps and, where it has much text, less of it."""
    job = Job.load(file)
    less = job.data.model_copy(update={"limit": 2000}) if isinstance(job.data, Text) else job.data
    return job.model_copy(update={"stop": StopSpec(steps=steps), "data": less})


def examples() -> list[ParameterSet]:
    """Files of all examples."""
    names = sorted({file.name for file in EXAMPLES.glob("*.yaml")} - {NEEDS_A_DOWNLOAD})
    return [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in names]


@pytest.mark.parametrize("name", examples())
def test_every_example_learns(name: str, folder: Path, tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", shortened(folder / name, STEPS))
    assert len(run.losses) == STEPS
    assert all(map(math.isfinite, run.losses))
    assert fmean(run.losses[-5:]) < fmean(run.losses[:5])
    assert all(math.isfinite(value) for value in run.metrics.values())
    assert {"loss", *(metric.name for metric in run.job.metrics)} == run.metrics.keys()


RECIPES = sorted(
    str(file.relative_to(EXAMPLES)) for kind in ("finetune", "pretrain") for file in (EXAMPLES / kind).glob("*.yaml")
)


LARGE = "finetune/llama_8b.yaml"  # has no data, and is too large to train here


def plans_named_in(file: Path) -> set[str]:
    """The plans in the comments of a recipe."""
    return set(re.findall(r'--plan "([^"]+)"', file.read_text()))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples with the small model, which is not pretrained here."""
    ignored = shutil.ignore_patterns("__pycache__", "runs", "small")
    folder = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("recipes") / "examples", ignore=ignored)
    runpy.run_path(str(folder / "finetune" / "make_small.py"))["make"](folder / "finetune" / "small", steps=0)
    return folder


@pytest.mark.parametrize("name", [name for name in RECIPES if name != LARGE])
def test_every_recipe_learns(name: str, small: Path, tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", shortened(small / name, STEPS))
    assert len(run.losses) == STEPS
    assert all(map(math.isfinite, run.losses))
    assert fmean(run.losses[-3:]) < fmean(run.losses[:3])


@pytest.mark.parametrize("name", RECIPES)
def test_the_plans_that_a_recipe_names_run_on_eight_gpus(name: str, small: Path) -> None:
    file = small / name
    own = yaml.safe_load(file.read_text())
    # a plan for an 8B model is checked with the recipe's adapters
    large = {key: own[key] for key in ("adapter", "quantize") if key in own} | {"global_batch": 512}
    job = Job.load(small / LARGE, set=large) if "8B" in file.read_text() else Job.load(file)
    plans = plans_named_in(file)
    assert plans
    for plan in plans:
        assert [problem.code for problem in plan_errors(job, plan, cluster="1x8xH100-SXM")] == [], plan


def test_the_dry_run_of_the_large_recipe_says_what_a_rank_holds(tmp_path: Path) -> None:
    (plan,) = plans_named_in(EXAMPLES / LARGE)
    checked = in_a_process("check", EXAMPLES / LARGE, "--dry-run", "--plan", plan, folder=tmp_path)
    assert checked.code == 0, checked.err
    assert "Warning" not in checked.err


def test_the_demo_has_the_same_loss_curve_on_one_and_on_two_ranks(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    job = shortened(folder / "digits.yaml", 20)
    alone = train_here(tmp_path / "alone", job)
    run = new_run(tmp_path / "two", job, plan="dp=2")
    ranks(2, train_as_rank, run.path)
    assert run.losses == pytest.approx(alone.losses, rel=1e-4)
    assert run.metrics == pytest.approx(alone.metrics, rel=1e-4)


def test_the_cifar10_example_says_where_it_looks_for_its_data(folder: Path) -> None:
    job = Job.load(folder / NEEDS_A_DOWNLOAD)
    with raises(DataError, "data.unreadable", place=folder / "cifar-10-batches-bin"):
        job.data.build(input_shape=job.model.input_shape(), seed=job.seed)


def test_the_cifar10_example_trains_on_files_of_that_format(folder: Path, tmp_path: Path) -> None:
    records = np.random.default_rng(0).integers(0, 256, (300, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    (folder / "cifar-10-batches-bin").mkdir()
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        records.tofile(folder / "cifar-10-batches-bin" / name)
    run = train_here(tmp_path / "run", shortened(folder / NEEDS_A_DOWNLOAD, 2))
    assert all(map(math.isfinite, run.losses))
    assert {"loss", "accuracy", "top5"} == run.metrics.keys()


@pytest.mark.slow
def test_a_loop_of_ones_own_prints_the_same_losses_alone_and_under_torchrun(folder: Path) -> None:
    with started("python", "own_loop.py", folder=folder) as process:
        alone = ended(process)
    with started("torchrun", "--nproc-per-node", 2, "own_loop.py", folder=folder) as process:
        two = ended(process)
    assert alone.code == two.code == 0, alone.err + two.err
    losses = [float(line.split()[-1]) for line in alone.out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 3
    # five digits are printed
    assert [float(line.split()[-1]) for line in two.out.splitlines()] == pytest.approx(losses, rel=1e-3)


def curve_of(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"(?:loss|reward a step) (-?[\d.]+)", text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [("recommendation.py", ("--steps", "60", "--items", "200")), ("actors.py", ("--updates", "10", "--actors", "1"))],
)
def test_examples_of_remote_modules_learn(script: str, options: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, str(folder / "remote" / script), *options]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert shown.returncode == 0, shown.stderr
    curve = curve_of(shown.stdout)
    assert (curve[-1] > curve[0]) if script == "actors.py" else (curve[-1] < curve[0])
    assert "/s" in shown.stdout.splitlines()[-1]


def test_a_model_that_is_placed_by_hand_learns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example runs in this process; its servers are forked instead of started anew."""

    def forked(command: list[str], **settings: Any) -> Forked:
        return Forked([str(BIN / "paceline"), *command[3:]], text=True, **settings)

    file = folder / "remote" / "by_hand.py"
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.setattr("serving_processes.subprocess", SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL))
    monkeypatch.setattr("sys.argv", [str(file), "--steps", "20", "--width", "32"])
    runpy.run_path(str(file), run_name="__main__")
    monkeypatch.delitem(sys.modules, "serving_processes")
    lines = capsys.readouterr().out
    assert curve_of(lines)[-1] < curve_of(lines)[0]
    assert "/s" in lines.splitlines()[-1]
