"""What is trained on simulated accelerators has the numbers of the CPU, whatever the order of the streams.

The table of cases is that of `benchmarks/simulated.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import simulated_cases
import simulated_mutations as mutations
import simulated_sets as sets
import simulated_steps
from ranks import Ranks
from simulated.environment import Simulated
from simulated_mistakes import MISTAKES

PARTS = 12  # of the whole table, each a test


@pytest.fixture(autouse=True)
def _extensions() -> Iterator[None]:
    with simulated_cases.extensions():
        yield


def not_right(cases: Any) -> list[str]:
    device = sets.device_variables()
    results = sets.simulated(cases, sets.references(cases, device), device)
    assert len(results) == len(cases)
    return [f"{r.case.name} is {r.verdict}: {r.why}" for r in results if r.verdict != "right"]


def trained(cases: list[Any], folder: Path) -> list[Any]:
    """What ranks make of the cases, by number."""
    from simulated_ranks import Request, run_cases

    return run_cases(Request(cases, folder), lambda _: None)


@pytest.mark.timeout(300)
def test_the_telling_cases_are_right(ranks: Ranks, simulated: Simulated, tmp_path: Path) -> None:
    cases = simulated_cases.quick_table()
    references = list(dict.fromkeys(case.reference for case in cases))
    assert len(cases) == 5
    assert {case.ranks for case in cases} == {2}
    assert not any(case.draws for case in cases), "the reference is the CPU"
    expected = dict(zip(references, ranks(2, trained, references, tmp_path / "cpu", backend="shm")[0], strict=True))
    found = simulated.ranks(2, trained, cases, tmp_path / "simulated")[0]
    results = [sets.judged(case, outcome, expected[case.reference]) for case, outcome in zip(cases, found, strict=True)]
    assert [f"{r.case.name}: {r.why}" for r in results if r.verdict != "right"] == []


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_is_right(part: int) -> None:
    cases = simulated_cases.table()
    assert len(cases) >= 150
    # neighbours have the same number of devices, and the orders of a training stand side by side
    assert not not_right(cases[len(cases) * part // PARTS : len(cases) * (part + 1) // PARTS])


def test_every_planted_mistake_still_has_its_place() -> None:
    assert len(MISTAKES) == 40
    for mistake in MISTAKES:
        assert mutations.planted(mistake)
        assert mutations.cases_of(mistake)


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.timeout(600)
def test_a_checkpoint_that_is_written_too_early_is_seen() -> None:
    [mistake] = [m for m in MISTAKES if m.name == "a checkpoint is written before it is copied"]
    [tried] = mutations.try_all([mistake])
    assert tried.seen is not None


@pytest.mark.needs_compiler
@pytest.mark.timeout(300)
@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_step_waits_for_the_device_or_launches_many_kernels_beyond_the_plain_one(clips: bool) -> None:
    found = simulated_steps.counts_of_a_step(sets.device_variables(), clips=clips)
    for name, counts in found.items():
        assert counts.waits <= 1, (name, counts.lines)
        assert counts.waits_before_update == counts.idle_waits == counts.eager_waits == 0, (name, counts.lines)
        # `engine.update` keeps a copy of the loss, because the loop may change its own
        most = 3 if "update" in name else 2
        assert counts.launches - found["plain"].launches <= most, name


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.timeout(300)
def test_no_step_of_two_ranks_waits_for_the_device() -> None:
    for name, counts in simulated_steps.counts_of_a_step(sets.device_variables(), ranks=2).items():
        assert counts.waits <= 1, (name, counts.lines)
        assert counts.waits_before_update == counts.idle_waits == counts.eager_waits == 0, (name, counts.lines)
