"""The plan that is proposed after memory ran out is near, legal, and fits by prediction."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.arguments import cluster_of
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.cost.memory import by_part
from paceline.planning.fitting import plan_that_fits
from paceline.planning.plan import Plan
from paceline.planning.prediction import modelled

PLAN = Plan(dp=2)


@pytest.fixture
def cluster() -> Cluster:
    return cluster_of("2xH100-SXM")


def job(**changes: Any) -> Job:
    """A GPT by its dimensions, whose activations are as large as its state."""
    values: dict[str, Any] = {
        "name": "gpt",
        "model": {"transformer": {"layers": 8, "hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32000}},
        "data": "synthetic",
        "loss": "cross_entropy",
        "optimizer": "adamw",
        "global_batch": 64,
        "precision": "bf16",
        "stop": {"steps": 10},
    }
    return Job.model_validate(values | changes)


def needs(plan: Plan, of: Job, cluster: Cluster) -> tuple[float, float]:
    """Predicted bytes of activations, and of all other parts without the runtime."""
    held = by_part(modelled(of, cluster, plan).memory)
    return held["activations"], sum(held.values()) - held["activations"] - held["runtime"]


@pytest.mark.parametrize("underestimated", [1.0, 1.5])
def test_a_smaller_microbatch_makes_room_also_for_the_error_of_the_prediction(
    cluster: Cluster, underestimated: float
) -> None:
    activations, others = needs(PLAN, job(), cluster)
    room = others + 0.7 * underestimated * activations
    found = plan_that_fits(job(), PLAN, cluster, activations_bytes=underestimated * activations, room_bytes=room)
    assert found is not None
    assert found == Plan(dp=2, microbatches=found.microbatches)
    activations, others = needs(found, job(), cluster)
    assert others + underestimated * activations < room
    assert not plan_errors(job(), found, cluster=cluster)


def test_a_plan_that_predictions_let_fit_is_not_proposed_again(cluster: Cluster) -> None:
    activations, others = needs(PLAN, job(), cluster)
    found = plan_that_fits(job(), PLAN, cluster, activations_bytes=0, room_bytes=2 * (activations + others))
    assert found is not None
    assert found != PLAN


def test_state_beyond_a_device_is_sharded(cluster: Cluster) -> None:
    little = job(global_batch=2)
    activations, others = needs(PLAN, little, cluster)
    found = plan_that_fits(little, PLAN, cluster, activations_bytes=activations, room_bytes=0.9 * others)
    assert found is not None
    assert found.fsdp == 2


def test_no_plan_is_proposed_if_none_fits(cluster: Cluster) -> None:
    assert plan_that_fits(job(), PLAN, cluster, activations_bytes=0, room_bytes=1e6) is None
