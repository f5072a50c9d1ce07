"""`paceline check --dry-run`.

Any machine says of ranks that are not there what each would hold, or why the plan cannot run.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from commands import ended, paceline, started, wait_for, write_job

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_a_plan_of_1024_ranks_is_run_dry_or_refused(tmp_path: Path) -> None:
    model = {"zoo": "gpt", "args": {"layers": 2, "hidden": 64, "heads": 8, "vocab": 64, "context": 16}}
    data = {"kind": "synthetic", "samples": 256, "shape": [16], "vocab": 64, "held_out": 0}
    file = write_job(tmp_path / "job.yaml", model=model, data=data, optimizer="adamw", global_batch=128)

    outcome = paceline("check", file, "--dry-run", "--plan", "dp=16 fsdp=8 tp=8", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.says(
        "blocks.*.attention.query_key_value (2 of them): column", "parameters  gradients  optimizer", "sent: tp"
    )
    last = outcome.out.splitlines()[-1]
    assert re.fullmatch(
        (
            r"plan dp=16 fsdp=8 tp=8 can run: 1,024 ranks, [\d.]+ KiB of state per rank, found by a dry run of [\d.]+ "
            r"s with [\d.,]+ \w+"
        ),
        last,
    ), last

    outcome = paceline("check", file, "--dry-run", "--plan", "dp=16 fsdp=8 tp=3", folder=tmp_path)
    assert outcome.code == 1
    assert outcome.says("attention heads (8) by 3", "Nearest plan that works: ", "plan dp=16 fsdp=8 tp=3 cannot run")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_llama_of_70_billion_parameters_is_run_dry_without_memory_for_it(tmp_path: Path) -> None:
    job = EXAMPLES / "large" / "llama_70b.yaml"
    with started("paceline", "check", job, "--dry-run", "--plan", "dp=16 fsdp=8 tp=8", folder=tmp_path) as process:
        outcome = ended(process, deadline_s=1000)
    assert outcome.code == 0, outcome.err
    last = outcome.out.splitlines()[-1]
    found = re.search(
        r"1,024 ranks, ([\d.]+) GiB of state per rank, found by a dry run of [\d.]+ s with ([\d,]+) MiB", last
    )
    assert found, last
    assert float(found[1]) == pytest.approx(16 * 70.55e9 / 64 / 2**30, rel=0.01), (
        "weights, gradients and two moments of 70.55 billion, a 64th"
    )


def test_ctrl_c_ends_a_check_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom torch import nn\n\n\nclass Slow(nn.Linear):\n    def __init__(self):\n        "
        "super().__init__(6, 3)\n\n"
        "    def forward(self, x):\n        open('under_way', 'w').close()\n        time.sleep(0.2)\n        "
        "return super().forward(x)\n"
    )
    (tmp_path / "job.yaml").write_text(
        "model: slow.py:Slow\ndata: {kind: synthetic, samples: 64, shape: [6], classes: 3}\nloss: cross_entropy\n"
        "optimizer: {name: sgd, lr: 0.1}\nglobal_batch: 8\nstop: {steps: 1}\n"
    )
    with started("paceline", "check", "job.yaml", "--plan", "dp=2", "--steps", "100", folder=tmp_path) as process:
        wait_for((tmp_path / "under_way").exists, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130, outcome.err
    assert "Traceback" not in outcome.err


def test_a_dry_run_wants_one_plan(tmp_path: Path) -> None:
    outcome = paceline("check", "job.yaml", "--dry-run", "--all", folder=tmp_path)
    assert outcome.code == 2
    assert "--dry-run" in outcome.err


def test_a_plan_that_is_meant_to_differ_is_said_to_be(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    outcome = paceline("check", job, "--plan", "dp=2 compress=int8", "--steps", 1, folder=tmp_path)
    assert outcome.code == 1, outcome.err
    assert outcome.says("parity FAILS", "compress=int8 is meant to differ from one process")


@pytest.mark.slow
def test_the_plan_that_train_would_choose_can_be_checked(tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml")
    outcome = paceline("check", "job.yaml", "--plan", "auto", "--steps", 2, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.says("plan auto: dp=", "nothing is measured: a run of 6 steps is too short", "parity holds")


@pytest.mark.slow
def test_a_plan_that_ranks_refuse_is_counted_as_refused_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch.nn.functional as F\n\n\ndef compared(output, target):\n"
        "    return F.cross_entropy(output, target) + (output.mean(0) ** 2).sum()\n"
    )
    write_job(tmp_path / "job.yaml", loss="own.py:compared")
    with started(
        "paceline", "check", "job.yaml", "--all", "--max-ranks", "2", "--steps", "1", folder=tmp_path
    ) as process:
        outcome = ended(process, deadline_s=280)
    assert outcome.code == 0, outcome.out + outcome.err
    assert outcome.says("refused  dp=2: the loss compared is not the mean over its samples", "are refused")
    assert "failed" not in outcome.out


@pytest.mark.slow
def test_what_a_check_cannot_tell_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Noisy(nn.Linear):\n    def __init__(self):\n        "
        "super().__init__(784, 10)\n\n"
        "    def forward(self, x):\n        return super().forward(x.flatten(1) + torch.randn(len(x), 784, "
        "dtype=x.dtype))\n"
    )
    data = {"kind": "synthetic", "samples": 64, "shape": [784], "classes": 10}
    write_job(tmp_path / "job.yaml", model="own.py:Noisy", data=data)
    with started("paceline", "check", "job.yaml", "--plan", "dp=2", "--steps", "1", folder=tmp_path) as process:
        outcome = ended(process, deadline_s=280)
    assert outcome.code == 3, outcome.out + outcome.err
    assert outcome.says("CANNOT TELL: the model draws random numbers")
