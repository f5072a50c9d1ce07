"""`paceline check --dry`: any machine says of ranks that are not there what each would hold, or why the plan cannot run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import ended, paceline, started, write_job

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_a_plan_of_1024_ranks_is_rehearsed_or_refused(tmp_path: Path) -> None:
    model = {"zoo": "gpt", "args": {"layers": 2, "hidden": 64, "heads": 8, "vocab": 64, "context": 16}}
    data = {"kind": "synthetic", "samples": 256, "shape": [16], "vocab": 64, "held_out": 0}
    file = write_job(tmp_path / "job.yaml", model=model, data=data, optimizer="adamw", global_batch=128)

    outcome = paceline("check", file, "--dry", "--plan", "dp=16 fsdp=8 tp=8", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.says("blocks.*.attention.query_key_value (2 of them): column", "parameters  gradients  optimizer", "sent: tp")
    last = outcome.out.splitlines()[-1]
    assert re.fullmatch(
        r"plan dp=16 fsdp=8 tp=8 can run: 1,024 ranks, [\d.]+ KiB of state per rank, rehearsed in \d+ s with \d+ MiB", last
    ), last

    outcome = paceline("check", file, "--dry", "--plan", "dp=16 fsdp=8 tp=3", folder=tmp_path)
    assert outcome.code == 1
    assert outcome.says("attention heads (8) by 3", "Nearest plan that works: ", "plan dp=16 fsdp=8 tp=3 cannot run")


@pytest.mark.slow
def test_a_llama_of_70_billion_parameters_is_rehearsed_without_memory_for_it(tmp_path: Path) -> None:
    job = EXAMPLES / "large" / "llama_70b.yaml"
    with started("paceline", "check", job, "--dry", "--plan", "dp=16 fsdp=8 tp=8", folder=tmp_path) as process:
        outcome = ended(process, deadline_s=110)
    assert outcome.code == 0, outcome.err
    last = outcome.out.splitlines()[-1]
    found = re.search(r"1,024 ranks, ([\d.]+) GiB of state per rank, rehearsed in \d+ s with ([\d,]+) MiB", last)
    assert found, last
    assert float(found[1]) == pytest.approx(16 * 70.55e9 / 64 / 2**30, rel=0.01), (
        "weights, gradients and two moments of 70.55 billion, a 64th"
    )
