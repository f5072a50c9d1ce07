"""Which plans are measured, and when nothing is.

A wrong answer costs every short run more than it saves, or a long one its best plan.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.planning.predict import modelled
from paceline.planning.shortlist import (
    MOST_PLANS,
    WORTH_S,
    Forecast,
    certain,
    share_to_spend,
    shortlist,
    startable,
    steps_per_epoch,
    why_not_measured,
)

HERE = Cluster(hosts=(Host(name="a", cores=4, memory_bytes=2**34),))
DEFAULT = Plan(dp=4)
TWO_CORES = Cluster(hosts=(Host(name="a", cpu="AMD EPYC", cores=2, memory_bytes=2**34),))


def job(**changes: Any) -> Job:
    common = {
        "model": "mlp",
        "data": "digits",
        "loss": "cross_entropy",
        "optimizer": "sgd",
        "global_batch": 64,
        "stop": {"epochs": 9},
    }
    return Job(**(common | changes))


def forecasts(*rows: tuple[str, float], **changes: Any) -> list[Forecast]:
    return [Forecast(plan, seconds, seconds, **changes) for plan, seconds in rows]


def names(listed: list[Forecast]) -> list[str]:
    return [forecast.plan for forecast in listed]


def test_the_default_comes_first_then_the_best_of_other_degrees() -> None:
    found = forecasts(
        ("fsdp=4", 0.7),
        ("fsdp=4 zero=2", 0.71),
        ("dp=4", 1.0),
        ("tp=4", 0.9),
        ("dp=1", 1.2),
        ("pp=4 microbatches=8", 0.8),
    )
    assert names(shortlist(job(), HERE, DEFAULT, found)) == ["dp=4", "fsdp=4", "pp=4 microbatches=8", "dp=1"]


def test_what_is_predicted_much_slower_is_not_measured() -> None:
    found = forecasts(("dp=4", 1.0), ("tp=4", 1.4), ("fsdp=4", 1.6), calibrated=True)
    assert names(shortlist(job(), HERE, DEFAULT, found)) == ["dp=4", "tp=4"]


def test_a_default_without_memory_is_not_what_measuring_begins_with() -> None:
    found = [*forecasts(("dp=4", 1.0), fits=False), *forecasts(("fsdp=4", 1.4), ("tp=4", 1.5))]
    assert names(shortlist(job(), HERE, DEFAULT, found)) == ["fsdp=4", "tp=4"]


@pytest.mark.parametrize(
    "plan", ["dp=4 precision=bf16", "dp=4 sync=local:8", "dp=4 compress=int8", "dp=4 sync=diloco:50"]
)
def test_what_computes_something_else_is_never_chosen(plan: str) -> None:
    assert names(shortlist(job(), HERE, DEFAULT, forecasts(("dp=4", 1.0), (plan, 0.1)))) == ["dp=4"]


plans = st.sampled_from(
    ["dp=4", "dp=2", "dp=1", "fsdp=4", "tp=4", "tp=2", "pp=2 microbatches=4", "dp=2 tp=2", "dp=2 remat=block"]
)
rows = st.dictionaries(plans, st.floats(0.001, 10), min_size=1)


@given(rows, st.booleans())
def test_the_list_is_short_of_different_plans_and_has_the_predicted_best(
    times: dict[str, float], calibrated: bool
) -> None:
    listed = shortlist(job(), HERE, DEFAULT, forecasts(*times.items(), calibrated=calibrated))
    assert 1 <= len(listed) <= MOST_PLANS
    assert len(set(names(listed))) == len(listed)
    assert min(times.values()) in [forecast.step_s for forecast in listed]
    assert (listed[0].plan == "dp=4") == ("dp=4" in times)
    ranks, together = startable(listed)
    for forecast in together:
        plan = Plan.parse(forecast.plan)
        assert plan.ranks <= ranks
        assert not plan.splits or plan.ranks in (1, ranks), (
            "one that divides the model has all ranks of the trial, or one"
        )


def test_a_short_run_is_not_measured_unless_it_saves_more_than_that_takes() -> None:
    alike, better = (
        forecasts(("dp=4", 1.0), ("fsdp=4", 0.9)),
        forecasts(("dp=4", 1.0), ("fsdp=4", 0.3), calibrated=True),
    )
    assert "it runs for 30 s at most by prediction" in str(why_not_measured(alike, 30.0, 0.0))
    assert why_not_measured(better, 30.0, 0.0) is None
    assert why_not_measured(better, 5.0, 0.0) is not None
    assert why_not_measured(alike, WORTH_S, 0.0) is None
    assert why_not_measured(alike, None, 0.0) is None, "nobody knows how long the run is"


def test_a_short_run_that_is_started_again_and_again_is_measured_in_the_end() -> None:
    assert why_not_measured(forecasts(("dp=4", 1.0)), 10.0, 40.0) is not None
    assert why_not_measured(forecasts(("dp=4", 1.0)), 10.0, 55.0) is None
    assert share_to_spend(forecasts(("dp=4", 1.0)), 10.0, 50.0) == pytest.approx(0.6), (
        "of this run, and a tenth of all of them"
    )


def test_unmeasured_only_a_certain_gain_leaves_the_default() -> None:
    assert certain([]) is None
    for calibrated, step_s, taken in (
        (True, 0.9, "dp=4"),
        (True, 0.8, "fsdp=4"),
        (False, 0.8, "dp=4"),
        (False, 0.4, "fsdp=4"),
    ):
        found = certain(forecasts(("dp=4", 1.0), ("fsdp=4", step_s), calibrated=calibrated))
        assert found is not None
        assert found.plan == taken


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        ("digits", 23),
        ({"kind": "synthetic", "samples": 128, "held_out": 0}, 2),
        ({"kind": "synthetic", "samples": 128, "held_out": 0, "limit": 64}, 1),
        ({"kind": "text", "path": "."}, 0),
    ],
)
def test_how_many_steps_an_epoch_has_is_known_without_the_data_where_the_job_says_it(data: Any, steps: int) -> None:
    assert steps_per_epoch(job(data=data)) == steps


@pytest.mark.parametrize(("all_cores_s", "plan"), [(0.9, "threads=1"), (0.7, "dp=1")])
def test_one_rank_takes_one_core_unless_the_others_save_a_fifth(all_cores_s: float, plan: str) -> None:
    found = forecasts(("dp=4", 1.1), ("dp=1", all_cores_s), ("threads=1", 1.0))
    assert names(shortlist(job(), HERE, DEFAULT, found)) == ["dp=4", plan]


@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        ({"model": {"zoo": "mlp", "args": {"hidden": 8}}, "global_batch": 16}, "threads=1"),
        ({"model": {"zoo": "mlp", "args": {"hidden": 16}}, "global_batch": 32}, "threads=1"),
        ({"model": "cifar_cnn", "global_batch": 64}, "dp=2"),
        ({"model": {"zoo": "mlp", "args": {"hidden": 1024}}, "global_batch": 128}, "dp=2"),
    ],
)
def test_a_step_that_is_shorter_than_a_meeting_of_ranks_is_left_to_one_core(changes: dict[str, Any], plan: str) -> None:
    """Two ranks would take more than twice as long, and a second thread would only wait for other work."""
    times = {
        text: modelled(job(**changes), TWO_CORES, Plan.parse(text)).step_time_s
        for text in ("dp=2", "dp=1", "threads=1")
    }
    found = [Forecast(text, step_s, step_s) for text, step_s in times.items()]
    best = certain(shortlist(job(**changes), TWO_CORES, Plan(dp=2), found))
    assert best is not None
    assert best.plan == plan
