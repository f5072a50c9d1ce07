"""The option --hosts is taken out of the command line that every host gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import in_a_process
from paceline.cli.command import _without_hosts


@pytest.mark.parametrize("option", [["--hosts", "a,b"], ["--hosts=a,b"]])
def test_every_host_gets_the_command_without_the_list_of_hosts(option: list[str]) -> None:
    assert _without_hosts(["train", "job.yaml", *option, "--plan", "dp=2"]) == ["train", "job.yaml", "--plan", "dp=2"]


def test_an_allocation_of_slurm_without_srun_is_told_of_srun(tmp_path: Path) -> None:
    outcome = in_a_process("train", "none.yaml", folder=tmp_path, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="2")
    assert "note: this allocation of Slurm has 2 nodes; only this one is used" in outcome.err
