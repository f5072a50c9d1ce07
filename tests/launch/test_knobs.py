"""`--plan auto`: what is measured on real ranks, what is kept of it, and what becomes of a trial that fails or could not repay."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import ended, losses, paceline, started, wait_for, write_job
from paceline.cluster.cluster import Cluster, Host
from paceline.cluster.discover import discover
from paceline.job.job import Job
from paceline.job.stop import StopSpec
from paceline.launch.knobs import Choice, choose
from paceline.launch.train import choose_plan
from paceline.plan.auto import auto_plan
from paceline.plan.plan import Plan
from paceline.train.run import Run

CLUSTER = discover()
WITHOUT_BOUND = {"stop": {"loss_below": -1.0}}  # so compiling, which takes long, is not tried
IMAGES = {"kind": "synthetic", "samples": 64, "shape": [3, 8, 8], "held_out": 0}

# A network that is slow or broken by the layout of its input, so that what wins does not hang on the machine.
NETWORK = """
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x):
        channels_last = not x.is_contiguous()
        {body}
        return self.last(self.convolution(x).flatten(1))
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def network(folder: Path, body: str, **changes: Any) -> Job:
    """A job whose model does `body` in its forward pass."""
    (folder / "net.py").write_text(NETWORK.replace("{body}", body))
    return Job.load(write_job(folder / "job.yaml", **({"model": "net.py:Net", "data": IMAGES, **WITHOUT_BOUND} | changes)))


def verdicts(choice: Choice) -> dict[str, str]:
    """What was said of each knob."""
    rows = [re.match(r"  ([a-z_]+=\S+) +(?:.*\) +)?([a-z].*)", line) for line in choice.lines]
    return {row[1]: row[2] for row in rows if row}


def kept(folder: Path) -> list[Path]:
    """The files of what was measured."""
    return list((folder / "cache" / "paceline" / "knobs").glob("*.json"))


@pytest.mark.slow
def test_the_knob_that_helps_is_found_told_kept_and_used_by_the_next_start(tmp_path: Path) -> None:
    slow = "time.sleep(0.0 if channels_last else 0.03)"
    network(tmp_path, slow, stop={"loss_below": 1e9})
    first = paceline("train", "job.yaml", folder=tmp_path)
    assert first.code == 0, first.err
    assert first.says("plan auto: measuring the knobs of this job", "ratio to best before", "the plan to begin with")
    row = next(line for line in first.err.splitlines() if line.startswith("  memory_format=channels_last"))
    assert row.endswith("kept")
    assert re.search(
        r"plan auto: .*memory_format=channels_last.*, whose step takes 0\.\d\d of that of dp=\d+; measured in [\d.]+ s", first.err
    )
    assert "memory_format=channels_last" in re.search(r"^plan (.*) · run", first.err, re.MULTILINE)[1]  # type: ignore[index]
    [run] = (tmp_path / "runs").iterdir()
    assert Run(run).plan.memory_format == "channels_last"
    assert Run(run).plan.precision is None, "the job's precision is kept"

    if kept(tmp_path):  # else the machine was busy with other tests, and the command said so
        again = choose(Job.load(tmp_path / "job.yaml"), CLUSTER)
        assert again.from_cache
        assert again.seconds == 0
        assert again.plan == Run(run).plan
        assert f"as measured before ({kept(tmp_path)[0]}; delete it to measure again)" in again.lines[-1]
        assert verdicts(again)["memory_format=channels_last"] == "kept"
    else:
        assert first.says("not kept, as other work took")


@pytest.mark.slow
def test_what_was_measured_holds_for_the_same_work_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.knobs._MOST_OTHER_WORK", 2.0)  # other tests may be at work beside this one
    job = network(tmp_path, "pass", stop={"steps": 1000})
    assert not choose(job, CLUSTER).from_cache
    [file] = kept(tmp_path)
    renamed = job.model_copy(update={"seed": 5, "deadline_s": 20.0})
    assert choose(renamed, CLUSTER).from_cache
    file.write_text("{ not what was written")
    (tmp_path / "net.py").write_text(NETWORK.replace("{body}", "raise RuntimeError('it is measured again')"))
    again = choose(job, CLUSTER)
    default = auto_plan(job, CLUSTER)
    assert again.lines[-1] == f"the knobs could not be measured (RuntimeError: it is measured again); going on with plan {default}"
    assert again.plan == default
    assert kept(tmp_path) == [file], "an edited model is another one, and a trial that fails leaves nothing"


@pytest.mark.slow
def test_a_knob_that_fails_is_told_and_the_others_are_tried_until_a_second_one_fails(tmp_path: Path) -> None:
    """By an error of one rank, while the others wait for it; then by a death."""
    job = network(
        tmp_path,
        "if channels_last and os.environ['RANK'] == '0': raise ValueError('only rows please')\n"
        "        if os.environ['OMP_NUM_THREADS'] != str(torch.get_num_threads()): os.kill(os.getpid(), signal.SIGKILL)",
    )
    choice = choose(job, CLUSTER)
    found = verdicts(choice)
    assert found["memory_format=channels_last"] == "failed: ValueError: only rows please"
    assert found["fused=on"].startswith(("kept", "not kept"))
    assert choice.plan.memory_format == "contiguous"
    if choice.plan.dp > 1:  # fewer ranks have more threads each
        assert "was killed by SIGKILL" in found[f"dp={choice.plan.dp // 2}"]
        assert found["pin=on"] == "not tried: others failed"
    assert "measured in" in choice.lines[-1]


def test_a_run_of_a_few_steps_starts_no_trial(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path / "job.yaml"))
    choice = choose(job, CLUSTER)
    assert choice.lines == ["plan auto: the knobs are not measured: 6 steps are over before measuring knobs would pay (from 400 steps)"]
    assert choice.plan == auto_plan(job, CLUSTER)
    assert choice.seconds == 0


def test_a_run_that_turns_out_to_be_short_ends_the_trial_after_its_first_plan(tmp_path: Path) -> None:
    """Only the data tells how many steps two epochs have."""
    choice = choose(network(tmp_path, "pass", stop={"epochs": 2}), CLUSTER)
    assert verdicts(choice)["memory_format=channels_last"] == "not tried: the time for measuring was used"
    assert verdicts(choice)["fused=on"] == "not tried: the time for measuring was used"
    assert "no knob that was tried makes it faster" in choice.lines[-1]


@pytest.mark.slow
def test_compiling_is_tried_where_the_run_is_long_enough_for_it(tmp_path: Path) -> None:
    choice = choose(network(tmp_path, "pass", stop={"steps": 10_000_000}), CLUSTER)
    assert verdicts(choice)["compile=on"].startswith(("kept", "not kept", "not tried: torch.compile needs")), choice.lines
    assert verdicts(choice)["compile=reduce-overhead"] == "not tried: replays CUDA graphs, and this machine has no GPU"


def test_a_resumed_run_keeps_its_plan_and_measures_nothing(tmp_path: Path) -> None:
    """So that it goes on bit for bit; unless that plan no longer fits."""
    job = network(tmp_path, "pass")
    before = Run.create(tmp_path / "run", job, CLUSTER, Plan(dp=1, fused=True, memory_format="channels_last"))
    assert choose_plan(job, CLUSTER, "auto", before, pytest.fail) == before.plan
    short = job.model_copy(update={"stop": StopSpec(steps=1)})
    larger = Run.create(tmp_path / "larger", short, CLUSTER, Plan(dp=CLUSTER.devices + 1))
    assert choose_plan(short, CLUSTER, "auto", larger).dp <= CLUSTER.devices


def test_ctrl_c_ends_the_measuring_and_trains_nothing(tmp_path: Path) -> None:
    network(tmp_path, "open('under_way', 'w').close(); time.sleep(0.2)")
    with started("paceline", "train", "job.yaml", folder=tmp_path) as process:
        wait_for((tmp_path / "under_way").exists, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.says("SIGINT: the ranks end.")
    assert "checkpoint" not in outcome.err
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("paceline-*"))


@pytest.mark.slow
def test_more_ranks_than_cores_train_the_same_and_are_told_what_it_costs(tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml")
    ranks = 2 * CLUSTER.devices if CLUSTER.devices <= 8 else 16
    outcome = paceline("train", "job.yaml", "--plan", f"dp={ranks}", "--run", "shared", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    if ranks > CLUSTER.devices:
        assert outcome.says(f"note: plan dp={ranks}: {ranks} ranks share {CLUSTER.devices} cores, 0.50 of a core each")
    assert paceline("train", "job.yaml", "--plan", "dp=1", "--run", "alone", folder=tmp_path).code == 0
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
def test_fewer_ranks_are_measured_beside_all_of_them(tmp_path: Path) -> None:
    """Two of four ranks, as on a machine of four cores: the others wait, and nobody hangs."""
    real = sorted(os.sched_getaffinity(0))
    four = Cluster(hosts=(Host(name="a", cores=4, memory_bytes=2**34, affinity=tuple((real[i % len(real)],) for i in range(4))),))
    choice = choose(network(tmp_path, "pass"), four)
    found = verdicts(choice)
    assert found["dp=2"].startswith(("kept", "not kept")), choice.lines
    assert not any(verdict.startswith("failed") for verdict in found.values()), choice.lines
