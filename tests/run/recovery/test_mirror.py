"""Copies of ranks' states in other ranks' memory: what is lost comes back bit for bit, where there is room for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.elastic.membership import StepBoundary
from paceline.engine.engine import RankEngine
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.recovery import mirror as mirrors
from paceline.run.recovery.mirror import Mirror, Need, lack_of
from ranks import Ranks
from small_jobs import small_job

EVERY, STEPS, LOST = 2, 6, 1
GIB = 2**30


def state_of(engine: RankEngine) -> list[Tensor]:
    numbers = [v for state in engine.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return [torch.tensor(engine.step_count), *(p.detach().clone() for p in [*engine.named_parameters().values()])] + [
        number.clone() for number in numbers
    ]


def trained(mirror: Mirror, engine: RankEngine, group: Group, told: list[Any]) -> dict[int, list[Tensor]]:
    """The states at all boundaries of the first steps, with copies of some."""
    mirror.begin(engine, group, lambda event, details: told.append((event, details)))
    states = {}
    mirror.at_boundary(engine, lambda: StepBoundary(step=engine.step_count, acted=engine.step_count))
    for batch in engine.loader:
        engine.step(batch)
        states[engine.step_count] = state_of(engine)
        mirror.at_boundary(engine, lambda: StepBoundary(step=engine.step_count, acted=engine.step_count))
        if engine.step_count == STEPS:
            break
    return states


def goes_back(job: Job, plan: str) -> int:
    """Lose all that one rank has; returns the step that all go back to."""
    mirror, told = Mirror(EVERY), list[Any]()
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    with joined(deadline_s=30, transport="shm") as group:
        engine = mirror.engine(job, Plan.parse(plan), data, group, begins=True)
        states = trained(mirror, engine, group, told)
        mirror.broken_off(engine)
        mirror.end()
        engine.close()
        if group.rank == LOST:
            mirror = Mirror(EVERY)
        start = mirror.start(group, saved=-1)
        assert start is not None
        assert (start.new, start.lost_steps) == ([LOST], STEPS - start.boundary.step)
        engine = mirror.engine(job, Plan.parse(plan), data, group, begins=False)
        mirror.restore(engine, group, start)
        for now, then in zip(state_of(engine), states[start.boundary.step], strict=True):
            assert torch.equal(now, then)
        engine.close()
        assert mirror.start(group, saved=start.boundary.step + 1) is None, "a newer checkpoint is there"
        assert mirror.start(group, saved=-1) is None, "copies were let go"
    assert not told
    return start.boundary.step


def test_what_a_rank_has_lost_comes_back_from_the_copy_that_another_holds(ranks: Ranks) -> None:
    steps = set(ranks(2, goes_back, small_job(), "fsdp=2"))
    assert steps <= {3, 5}, "copied after the first step and every second one; the last one may not have come whole"


def finds_no_room(job: Job) -> list[Any]:
    """Train where one rank finds no memory for copies; returns the events."""
    mirror, told = Mirror(EVERY), list[Any]()
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    with joined(deadline_s=30, transport="shm") as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrors, "lack", lambda _, wanted_bytes: (wanted_bytes, 7))
        engine = mirror.engine(job, Plan.parse("fsdp=2"), data, group, begins=True)
        trained(mirror, engine, group, told)
        mirror.end()
        engine.close()
        assert mirror.start(group, saved=-1) is None
    return told


def test_where_memory_is_short_nothing_is_copied_and_that_is_told_once(ranks: Ranks) -> None:
    for told in ranks(2, finds_no_room, small_job()):
        [(event, details)] = told
        assert event == "not_mirrored"
        assert details["free_bytes"] == 7
        assert details["wanted_bytes"] > 0


def need(machine: str, wanted: int, free: int, own: int = 1, limit: int | None = None) -> Need:
    return Need(machine, wanted * GIB, own * GIB, free * GIB, None if limit is None else limit * GIB)


@pytest.mark.parametrize(
    ("needs", "lacks"),
    [
        ([need("a", 2, 5), need("a", 2, 4)], None),
        ([need("a", 2, 5), need("a", 2, 3)], (4, 3)),
        ([need("a", 2, 3), need("b", 2, 3)], None),
        ([need("a", 2, 3), need("b", 4, 3)], (4, 3)),
        ([need("a", 2, 64, limit=6), need("a", 2, 64, limit=6)], None),
        ([need("a", 2, 64, own=2, limit=6), need("a", 2, 64, limit=6)], (4, 3)),
        ([need("a", 1, 64, own=9, limit=6)], (1, 0)),
    ],
)
def test_ranks_of_one_machine_share_its_memory_and_its_limit(needs: list[Need], lacks: tuple[int, int] | None) -> None:
    assert lack_of(needs) == (None if lacks is None else (lacks[0] * GIB, lacks[1] * GIB))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_a_copy_goes_to_another_host_wherever_no_host_has_more_than_half_of_the_ranks(hosts: list[int]) -> None:
    size = len(hosts)
    pairs = [mirrors.partners(rank, hosts, size) for rank in range(size)]
    assert all(pairs[to][1] == rank != to for rank, (to, _) in enumerate(pairs))
    assert all(pairs[source][0] == rank for rank, (_, source) in enumerate(pairs))
    if 2 * max(map(hosts.count, hosts)) <= size:
        assert all(hosts[rank] != hosts[to] for rank, (to, _) in enumerate(pairs))
