"""Which losses of a system are compared with those of one process, and with which process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.job.job import Job
from paceline_lab.systems import scripts
from paceline_lab.systems.compare import Compare
from paceline_lab.systems.compared import TakenRun, summary
from paceline_lab.systems.proof import Proof, Reference, References
from paceline_lab.systems.system import JOB, Steps, Task
from paceline_lab.systems.work import Work

HERE = str(Path(__file__).resolve())
CALM = [2.0, 1.5, 1.2, 1.1]


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def job(**changes: Any) -> Job:
    data = {"kind": "synthetic", "samples": 64, "shape": [3], "classes": 2, "held_out": 0}
    base = {"model": f"{HERE}:normalising", "data": data, "loss": "cross_entropy", "optimizer": "sgd"}
    return Job.model_validate(base | {"global_batch": 8, "stop": {"steps": 6}} | changes)


def losses(folder: Path, **changes: Any) -> list[float]:
    """Losses of one process in this one."""
    folder.mkdir()
    (folder / JOB).write_text(job().to_yaml())
    Task(**{"ranks": 1, "hosts": 1, "steps": 6} | changes).write(folder)
    work = Work(folder)
    scripts.reference(work)
    work.write()
    return Steps.of_ranks(folder, 1).losses


def references(course: list[float], disturbed: list[float]) -> tuple[References, list[Reference]]:
    asked: list[Reference] = []

    def take(wanted: Reference) -> list[float]:
        asked.append(wanted)
        return disturbed if wanted.disturbed else course

    return References(take), asked


def test_losses_that_agree_are_compared_in_every_step_with_one_run_of_a_process() -> None:
    found, asked = references(CALM, CALM)
    for _ in range(2):
        proof = found.prove([loss * (1 + 1e-6) for loss in CALM], None, 2)
        assert proof.same
        assert proof.steps is None
    assert asked == [Reference(parts=2)]


def test_other_losses_are_told_where_rounding_moves_none() -> None:
    found, _ = references(CALM, [loss * (1 + 1e-7) for loss in CALM])
    proof = found.prove([2.0, 1.5, 1.3, 1.1], None, 1)
    assert not proof.same
    assert str(proof) == "OTHER losses, by up to 8.3%"


def test_losses_are_compared_up_to_where_rounding_alone_moves_them() -> None:
    chaotic = [2.0, 1.5, 1.2 * (1 + 3e-4), 4.0]
    found, asked = references(CALM, chaotic)
    proof = found.prove([2.0, 1.5, 1.2, 0.1], None, 1)
    assert proof == Proof(0.0, 2)
    assert "in the first 2 steps" in str(proof)
    assert asked[1:] == [Reference(disturbed=True)]
    other = found.prove([2.0, 1.6, 1.2, 1.1], None, 1)
    assert not other.same, "what differs before rounding does is another computation"
    assert not found.prove([math.nan, *CALM[1:]], None, 1).same


@pytest.mark.parametrize("calm", [0, 1])
def test_what_rounding_moves_before_an_update_shows_proves_nothing(calm: int) -> None:
    found, _ = references(CALM, [*CALM[:calm], *(2 * loss for loss in CALM[calm:])])
    proof = found.prove([*CALM[:calm], *(1.5 * loss for loss in CALM[calm:])], None, 1)
    assert proof.is_open
    assert not proof.same
    assert "is open" in str(proof)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8), st.integers(0, 7), st.floats(1.01, 3))
def test_a_loss_that_is_wrong_where_rounding_is_calm_is_never_the_same(
    course: list[float], place: int, factor: float
) -> None:
    place %= len(course)
    disturbed = [*course[: place + 1], *(2 * loss for loss in course[place + 1 :])]
    wrong = [*course[:place], course[place] * factor, *course[place + 1 :]]
    assert not references(course, disturbed)[0].prove(wrong, None, 1).same


def test_weights_a_rounding_apart_move_the_losses_a_little(tmp_path: Path) -> None:
    course, disturbed = losses(tmp_path / "course"), losses(tmp_path / "disturbed", disturbed=True)
    assert course == losses(tmp_path / "again")
    assert course != disturbed
    assert disturbed == pytest.approx(course, rel=1e-5)


def test_each_way_is_compared_with_a_process_that_normalises_as_it_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    compare = Compare(job(), None, ["ddp"], plans=["dp=1"], steps=6, tuned=False, out=tmp_path / "out", say=print)
    ways = {way.key: way for way in compare.ways}
    ways["paceline-1"] = replace(ways["paceline-1"], settings={"plan": "dp=2 microbatches=2"})
    compare.ways = list(ways.values())
    parts = {key: compare.parts(way) for key, way in ways.items()}
    assert parts["plain"] == 1
    assert parts["ddp"] == compare.ranks
    assert parts["paceline-1"] == 4
    whole, halves = losses(tmp_path / "whole"), losses(tmp_path / "halves", parts=2)
    assert whole != pytest.approx(halves, rel=1e-3)
    for key in ways:
        compare.proofs[key] = Proof(0.0, 3 if key == "ddp" else None)
        compare.runs[key] = [TakenRun(key, 0, 0.1, 1.0, 1, None, None, [1.0], [0.1])]
    rounding, norms = summary(compare).notes
    assert rounding.endswith("so those of 3 steps were compared of PyTorch DDP, as documented.")
    assert "Over 2 samples: paceline" in norms
    assert "Over 8 samples: PyTorch, one process" in norms
