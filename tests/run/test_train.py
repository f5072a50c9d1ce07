"""`paceline.train`: the same training under our launcher, under torchrun and from a script.

And what is told when it cannot begin.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from commands import ended, events, losses, started, write_job
from paceline.cluster.discover import discover
from paceline.elastic.leadership import RunLock
from paceline.errors import LaunchError, PlanError, RunError
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run
from paceline.run.train import choice_of, train
from refusals import raises

SCRIPT = """
import paceline
from torch import nn

def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

def run() -> None:
    job = paceline.Job(
        model=net, data={"kind": "synthetic", "samples": 48, "shape": [1, 28, 28]}, loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.1}, global_batch=16, stop={"steps": 4},
    )
    record = paceline.train(job, plan="dp=1", run="run")
    print(record.reason, len(record.losses))
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "job.yaml")


def test_torchrun_trains_the_same_as_our_launcher(job: Path, tmp_path: Path) -> None:
    with started(
        "torchrun",
        "--nproc-per-node",
        2,
        "-m",
        "paceline",
        "train",
        job,
        "--run-dir",
        "under_torchrun",
        folder=tmp_path,
    ) as process:
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("stopped      steps: 6 done") == 1, "one rank speaks for all"

    console = Console(quiet=True)
    here = train(job, plan="dp=2", run=tmp_path / "here", console=console)
    assert here.reason == "steps: 6 done"
    assert losses(tmp_path / "under_torchrun") == losses(tmp_path / "here")

    more = Job.load(job).model_dump(mode="json") | {"stop": {"steps": 9}}
    train(Job(**more), plan="dp=2", run=tmp_path / "under_torchrun", resume=True, console=console)
    assert [event["step"] for event in events(tmp_path / "under_torchrun", "resume")] == [6]
    assert sorted(losses(tmp_path / "under_torchrun")) == list(range(1, 10))


@pytest.mark.slow
def test_a_rank_of_torchrun_that_raises_is_told_first_and_named_in_torchruns_own_report(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch import nn\n\n\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            raise ValueError('the mask has the wrong shape')\n"
        "        return super().forward(x)\n\n\n"
        "def net():\n"
        "    return Net(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    job = write_job(
        tmp_path / "job.yaml", model="mine.py:net", data={"kind": "synthetic", "samples": 48, "shape": [1, 28, 28]}
    )
    with started("torchrun", "--nproc-per-node", 2, "-m", "paceline", "train", job, folder=tmp_path) as process:
        outcome = ended(process)
    assert outcome.code == 1
    errors = outcome.err[outcome.err.index("paceline: ") :]
    assert errors.startswith("paceline: rank 1 (host ")
    assert "raised: ValueError: the mask has the wrong shape\n" in errors
    assert f"{tmp_path / 'mine.py'}, line 8" in errors, "where it was raised"
    assert "_call_impl" not in errors, "no frames on the screen"
    assert "in forward" in (tmp_path / "cache" / "paceline" / "traceback" / "rank-1.txt").read_text()
    report = errors[errors.index("Root Cause") :]
    assert "rank      : 1 " in report
    assert "raised: ValueError: the mask has the wrong shape" in report


@pytest.mark.slow
def test_a_script_trains_what_it_defines_and_is_told_of_a_missing_guard(tmp_path: Path) -> None:
    (tmp_path / "guarded.py").write_text(f'{SCRIPT}\nif __name__ == "__main__":\n    run()\n')
    with started("python", "guarded.py", folder=tmp_path) as process:
        outcome = ended(process)
    assert outcome.out == "steps: 4 done 4\n", outcome.err

    (tmp_path / "open.py").write_text(f"{SCRIPT.replace('run=' + chr(34), 'run=' + chr(34) + 'open_')}\nrun()\n")
    with started("python", "open.py", folder=tmp_path) as process:
        outcome = ended(process)
    assert outcome.code == 1
    assert outcome.says('Put the call under `if __name__ == "__main__":`')


def test_an_unknown_plan_is_refused_with_every_reason(job: Path) -> None:
    loaded = Job.load(job)
    assert choice_of(loaded, discover(), "dp=1 precision=bf16").plan == Plan(dp=1, precision="bf16")
    with pytest.raises(PlanError) as caught:
        choice_of(loaded, discover(), "dp=4096 memory_format=channels_last")
    assert len(str(caught.value).splitlines()) == 4, (
        "devices, the batch, a model without images, and the nearest plan that works"
    )


def test_a_rank_that_imports_a_script_does_not_train_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_STATUS", "somewhere")
    with raises(LaunchError, "launch.train_in_import"):
        train(job)


def test_a_job_that_failed_before_its_first_step_is_mended_and_tried_in_the_same_directory(tmp_path: Path) -> None:
    console = Console(quiet=True)
    wrong = write_job(tmp_path / "job.yaml", data={"kind": "arrays", "path": "nowhere.npz"})
    with raises(LaunchError, "data.unreadable"):
        train(wrong, plan="dp=1", run=tmp_path / "run", console=console)
    mended = write_job(tmp_path / "job.yaml")
    assert train(mended, plan="dp=1", run=tmp_path / "run", console=console).reason == "steps: 6 done"


def test_a_second_training_in_a_live_run_is_refused_before_anything_of_it_changes(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path / "job.yaml"))
    run = Run.create(tmp_path / "run", job, discover(), Plan(dp=1)).path
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with RunLock(run):
        with raises(RunError, "run.in_use"):
            train(job, run=run, resume=True, plan="dp=2", console=Console(quiet=True))
        assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "lock"} == before
        (run / "job.yaml").unlink()
        with raises(RunError, "run.in_use"):
            train(job, run=run, console=Console(quiet=True))
        assert not (run / "job.yaml").exists()
