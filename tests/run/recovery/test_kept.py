"""Parts of a model that a rank keeps between two generations: steps that were broken off are taken alone, or again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.elastic.membership import StepBoundary
from paceline.engine.engine import RankEngine
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.recovery.kept import KeptModel, KeptPart, common_start
from paceline.wire.status import GenerationOver
from ranks import Ranks
from small_jobs import small_job

STEPS, BROKEN_STEP = 8, 5  # no step before which replicas are compared: others would wait


def parts_after(job: Job, plan: str, broken: Mapping[int, str]) -> list[Tensor]:
    """This rank's part after some steps, of which one is broken off on some ranks, in these places."""
    kept = KeptPart()
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    with joined(deadline_s=30, transport="shm") as group:
        engine = kept.engine(job, Plan.parse(plan), data, group, begins=True)
        train(engine, BROKEN_STEP - 1)
        kept.undo.remember(engine.step_count)
        if group.rank in broken:
            breaks_off(engine, broken[group.rank])
        try:
            train(engine, BROKEN_STEP)
        except GenerationOver:
            kept.broken_off(engine)
        kept.keep(engine)
        start = common_start(group, boundary(engine, kept), replica_size=2)
        engine.close()
        engine = kept.engine(job, replace(Plan.parse(plan), cut=start.boundary.cut), data, group, begins=False)
        kept.restore(engine, group, start)
        assert engine.step_count == start.boundary.step == BROKEN_STEP - (len(broken) == group.size)
        assert engine.updates == engine.step_count, "all ranks compare replicas before the same updates"
        train(engine, STEPS)
        parts = [p.detach().clone() for p in engine.named_parameters().values()]
        engine.close()
    return parts


def train(engine: RankEngine, steps: int) -> None:
    """Take the steps of the first generation up to this one."""
    engine.updates = engine.step_count
    engine.loader.load_state_dict(engine.loader.state_dict() | {"step": engine.step_count, "reader": None})
    for batch in engine.loader:
        engine.step(batch)
        if engine.step_count == steps:
            return


def breaks_off(engine: RankEngine, place: str) -> None:
    """Have the next step end as if a rank were lost: when gradients are summed, or before the update."""

    def is_lost(*_: object, **__: object) -> Any:
        raise GenerationOver("test.planted", "a rank is lost")

    if place == "sums":
        engine.reduction.scale = is_lost  # type: ignore[method-assign]
    else:
        engine.guard.check = is_lost  # type: ignore[method-assign]


def boundary(engine: RankEngine, kept: KeptPart) -> StepBoundary:
    pipeline = engine.split.pipeline if engine.split is not None else None
    return StepBoundary(
        step=engine.step_count,
        generation=0,
        ready=0 if kept.ready else -1,
        outcome=None if engine.outcome is None else asdict(engine.outcome),
        cut="" if pipeline is None else pipeline.cut,
    )


@pytest.mark.parametrize(
    "plan",
    ["dp=2 fsdp=2", *(pytest.param(p, marks=pytest.mark.slow) for p in ("dp=2 tp=2", "dp=2 pp=2 microbatches=2"))],
)
@pytest.mark.parametrize(
    "broken",
    [
        {1: "sums"},
        pytest.param({1: "sums", 2: "update"}, marks=pytest.mark.slow),
        pytest.param({0: "update", 1: "sums", 2: "sums", 3: "update"}, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_was_broken_off_on_some_ranks_is_taken_by_them_too_and_once(
    ranks: Ranks, plan: str, broken: dict[int, str]
) -> None:
    job = small_job(clip_norm=0.05, optimizer={"name": "adamw", "lr": 0.01})
    for disturbed, undisturbed in zip(
        ranks(4, parts_after, job, plan, broken), ranks(4, parts_after, job, plan, {}), strict=True
    ):
        assert all(map(torch.equal, disturbed, undisturbed))


def test_a_whole_model_stays_the_same_from_generation_to_generation_whatever_it_is_in_a_condition() -> None:
    job, plan = small_job(model={"factory": "small_jobs:WithoutLength"}), Plan()
    data = job.data.build(input_shape=None, seed=job.seed)
    kept = KeptModel()
    first = kept.engine(job, plan, data, Group(), begins=True)
    assert not first.model
    train(first, 3)
    trained = [parameter.detach().clone() for parameter in first.model.parameters()]
    first.close()
    second = kept.engine(job, plan, data, Group(), begins=False)
    assert second.model is first.model
    assert all(map(torch.equal, second.model.parameters(), trained))
    second.close()


def test_a_whole_model_that_is_built_late_is_drawn_with_the_seed_of_the_job() -> None:
    """What is no parameter, as a projection that is drawn once, nobody hands over."""
    job, plan = small_job(), Plan()
    torch.manual_seed(1234)
    late = KeptModel().build(job, plan)
    torch.manual_seed(4321)
    assert all(map(torch.equal, late.parameters(), KeptModel().build(job, plan).parameters()))
