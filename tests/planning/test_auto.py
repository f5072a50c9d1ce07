"""The plan of a user who named none: wrong here, and a plain `train` leaves cores idle, or does not start."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.errors import PlanError
from paceline.planning.check.check_plan import auto_plan, check_plan
from paceline.planning.plan import Plan
from planner_jobs import job_on_digits

job = partial(job_on_digits, model="mlp", global_batch=64)


def cores(number: int) -> Cluster:
    return Cluster(hosts=(Host(name="a", cores=number, memory_bytes=2**30),))


def gpus(number: int) -> Cluster:
    devices = tuple(Device(index=i, name="T4", memory_bytes=2**34) for i in range(number))
    return Cluster(hosts=(Host(name="a", cores=32, memory_bytes=2**30, gpus=devices),))


@pytest.mark.parametrize(
    ("cluster", "global_batch", "dp"),
    [
        (cores(1), 64, 1),
        (cores(2), 64, 2),
        (cores(32), 64, 8),
        (cores(4), 3, 3),
        (gpus(1), 64, 1),
        (gpus(16), 64, 16),
        (gpus(16), 1, 1),
    ],
)
def test_every_device_is_used_as_far_as_the_batch_goes(cluster: Cluster, global_batch: int, dp: int) -> None:
    assert auto_plan(job(global_batch=global_batch), cluster) == Plan(dp=dp)


def test_cores_beyond_the_ranks_become_threads() -> None:
    assert auto_plan(job(), cores(32)).threads_for(cores(32).hosts[0], 8) == 4


def test_weights_say_how_many_replicas_there_are() -> None:
    assert auto_plan(job(partition={"weights": [2, 1, 1]}), cores(8)) == Plan(dp=3)


def test_weights_that_no_device_is_left_for_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"3 weights, one for each rank, and this cluster has 2 devices. Ask for --plan \"dp=3\""
    ):
        auto_plan(job(partition={"weights": [2, 1, 1]}), cores(2))


@given(st.integers(1, 64), st.integers(1, 32), st.booleans())
def test_the_plan_always_runs(number: int, global_batch: int, with_gpus: bool) -> None:
    cluster, work = gpus(number) if with_gpus else cores(number), job(global_batch=global_batch)
    assert check_plan(auto_plan(work, cluster), work, cluster) == []
