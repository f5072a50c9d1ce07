"""`paceline chaos` on real runs: faults are made, promises held, and what breaks one is found and shrunk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Outcome, ended, paceline, started, write_job
from paceline_lab.chaos.schedule import Schedule

WHAT = Path(__file__).parents[2] / "faults" / "what_goes_wrong.py"
DEADLINE_S = 600.0
SKIPS = """
import os, sys
sys.path.insert(0, {folder!r})
from what_goes_wrong import Points

class Wrong(Points):
    '''Reads sample 5 where it should read 6, in a rank that has been started again.'''

    def __init__(self, **arguments):
        super().__init__(**arguments)
        witness, rank = os.environ.get("PACELINE_WITNESS"), os.environ.get("RANK")
        born = os.path.join(witness or ".", f"born-{{rank}}")
        self.again = rank is not None and os.path.exists(born)
        if witness and rank:
            open(born, "w").close()

    def __getitem__(self, index):
        return super().__getitem__(5 if index == 6 and self.again else index)
"""


def job_in(folder: Path, **data: object) -> Path:
    args = {"kind": "dataset", "factory": f"{WHAT}:Points", "held_out": 0.15}
    args |= {"args": {"sleep_s": 0.003, "samples": 112}, **data}
    return write_job(folder / "job.yaml", name="chaotic", model={"factory": f"{WHAT}:net"}, data=args)


def chaos(job: Path, *options: object, expect: int = 0) -> Outcome:
    """Run the command; its screen, and the last run's `chaos.json`."""
    with started("paceline", "chaos", job, *options, folder=job.parent) as process:
        outcome = ended(process, DEADLINE_S)
    assert outcome.code == expect, outcome.out + outcome.err
    return outcome


@pytest.mark.slow
def test_ranks_are_killed_and_stopped_and_every_promise_is_held(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    outcome = chaos(job, "--faults", "kill,stop", "--steps", 200, "--count", 4, "--seed", 2, "--json")
    found = json.loads(outcome.out.splitlines()[-1])
    assert found["held"]
    assert len(found["faults"]) == 4
    assert {fault["kind"] for fault in found["schedule"]["faults"]} == {"kill", "stop"}
    assert all(row["named_s"] is not None for row in found["faults"] if row["fault"].startswith("kill"))
    kept = json.loads((tmp_path / "chaos" / "chaotic" / "seed-2" / "chaos.json").read_text())
    assert kept == found


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_full_disk_and_changed_bits_and_little_memory_break_no_promise(tmp_path: Path) -> None:
    outcome = chaos(job_in(tmp_path), "--faults", "disk-full,corrupt,oom,slow", "--steps", 200, "--count", 5)
    assert outcome.says("held    the run ends", "held    no checkpoint lost", "held    nothing left behind")


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_links_of_emulated_hosts_are_cut_and_hosts_parted(tmp_path: Path) -> None:
    outcome = chaos(job_in(tmp_path), "--emulate", 3, "--faults", "cut,partition,slow", "--steps", 200, "--count", 3)
    assert outcome.says("held    the run ends", "held    losses are those of an undisturbed run")


@pytest.mark.slow
def test_a_sample_that_is_skipped_after_a_loss_is_found_and_the_schedule_shrinks_to_one(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(SKIPS.format(folder=str(WHAT.parent)))
    job = job_in(tmp_path, factory=f"{tmp_path / 'wrong.py'}:Wrong")
    outcome = chaos(job, "--faults", "kill,stop", "--steps", 120, "--count", 4, "--seed", 4, expect=1)
    assert outcome.says("BROKEN  losses are those of an undisturbed run", "shortest     1 of 4 faults still break it")
    file = tmp_path / "chaos" / "chaotic" / "shortest-4.json"
    assert outcome.says(f"again        paceline chaos {job} --schedule chaos/chaotic/shortest-4.json")
    assert len(Schedule.read(file).faults) == 1


def test_what_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    outcome = paceline("chaos", job, "--faults", "kill,clock,cut", folder=tmp_path)
    assert outcome.code == 1
    assert outcome.says(
        "these faults cannot be injected on this machine", "clock: Linux has one wall clock", "cut: it needs the links"
    )
    assert not list((tmp_path / "chaos").glob("*/undisturbed*"))
