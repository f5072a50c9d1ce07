"""What `auto` tries and what it makes of the times.

A wrong choice here slows every run, or changes what is computed.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Emulate, Host
from paceline.job.job import Job
from paceline.planning.check.plan_errors import auto_plan, plan_errors
from paceline.planning.plan import Plan
from paceline.planning.prediction import modelled
from paceline.planning.shortlist import (
    BUDGET_S,
    LEAST_ROUNDS,
    MOST_PLANS,
    MOST_ROUNDS,
    SHARE_OF_RUN,
    START_S,
    WORTH_S,
    Comparison,
    Forecast,
    PlanChange,
    bases_of,
    budget_s,
    certain,
    longest_run_s,
    plan_changes,
    share_to_spend,
    shortlist,
    startable,
    steps_are_too_few,
    steps_per_epoch,
    why_not_measured,
    why_not_now,
)
from planner_jobs import job_on_digits

job = partial(job_on_digits, model="cifar_cnn", global_batch=64, stop={"epochs": 9})
mlp_job = partial(job, model="mlp")


def cores(number: int, *, bf16: bool | None = True) -> Cluster:
    return Cluster(hosts=(Host(name="a", cores=number, memory_bytes=2**34, cpu_bf16=bf16),))


def gpus(number: int) -> Cluster:
    devices = tuple(Device(index=i, name="H200", memory_bytes=2**37, bf16=True) for i in range(number))
    return Cluster(hosts=(Host(name="a", cores=32, memory_bytes=2**37, gpus=devices),))


def test_products_by_onednn_are_tried_first_where_torchs_own_leave_the_processor_unused() -> None:
    on_amd = Cluster(hosts=(Host(name="a", cores=2, memory_bytes=2**34, cpu="AMD EPYC"),))
    assert next(iter(candidates(job(), on_amd).items())) == ("onednn=on", None)
    without = Cluster(hosts=(on_amd.hosts[0].model_copy(update={"cpu_avx512": False}),))
    assert next(iter(candidates(job(), without))) == "memory_format=channels_last"
    elsewhere = list(candidates(job(), cores(2)))
    assert elsewhere.index("onednn=on") == elsewhere.index("pin=on") + 1
    assert (
        candidates(job(precision="fp64"), cores(2))["onednn=on"]
        == "it affects products in float32, but the job computes in fp64"
    )
    assert candidates(job(), gpus(2))["onednn=on"] is not None, "GPUs have none"


def test_a_loader_process_is_tried_unless_the_job_says_how_many() -> None:
    data = job(data={"kind": "digits", "num_workers": 2})
    assert candidates(data, cores(2))["num_workers=1"] == "the job sets num_workers: 2"
    assert candidates(job(), cores(2))["num_workers=1"] is None
    assert candidates(job(), gpus(2))["num_workers=1"] is None
    of_one_rank = [str(change) for change in plan_changes(job(), cores(4), Plan())]
    assert "threads=3 num_workers=1" in of_one_rank, "it has a core of its own"
    emulated = cores(4).model_copy(update={"emulate": Emulate(hosts=2)})
    assert "threads=1 num_workers=1" in [str(change) for change in plan_changes(job(), emulated, Plan(dp=2))]


def test_the_fused_step_is_tried_only_if_a_run_does_not_take_it_anyway() -> None:
    for optimizer, cluster, tried in (
        ("adamw", cores(4), False),
        ("adamw", gpus(2), False),
        ("sgd", cores(4), True),
        ("sgd", gpus(2), False),
    ):
        changes = [str(change) for change in plan_changes(job(optimizer=optimizer), cluster, Plan())]
        assert ("fused=on" in changes) == tried


def test_one_rank_alone_is_tried_on_one_core() -> None:
    assert Plan(threads=1) in bases_of(job(), cores(4), Plan(dp=2), [], settings=True)
    assert "threads=1" in [str(change) for change in plan_changes(job(), cores(4), Plan())]
    for cluster, plan in ((cores(4), Plan(dp=2)), (cores(4), Plan(threads=1)), (gpus(1), Plan())):
        assert "threads=1" not in [str(change) for change in plan_changes(job(), cluster, plan)]


def test_one_rank_on_one_core_is_tried_on_all_of_them() -> None:
    """Predictions of convolutions on several cores err by more than what they would save."""
    assert "threads=0" in [str(change) for change in plan_changes(job(), cores(4), Plan(threads=1))]
    assert Plan() in bases_of(job(), cores(4), Plan(threads=1), [], settings=True)
    for cluster, plan in ((cores(4), Plan()), (cores(4), Plan(dp=2)), (cores(1), Plan(threads=1)), (gpus(1), Plan())):
        assert "threads=0" not in [str(change) for change in plan_changes(job(), cluster, plan)]


def candidates(work: Job, cluster: Cluster) -> dict[str, str | None]:
    """Every change, with the reason why it is not tried."""
    return {str(change): change.untried for change in plan_changes(work, cluster, auto_plan(work, cluster))}


def test_a_network_for_images_on_cores_has_all_changes_but_those_of_gpus() -> None:
    found = candidates(job(), cores(4))
    assert list(found)[:5] == ["memory_format=channels_last", "fused=on", "dp=2", "dp=1", "pin=on"]
    assert list(found)[-1] == "precision=bf16", "it is only told of, so what may be taken comes first"
    tried = [change for change, untried in found.items() if untried is None]
    assert set(found) - set(tried) <= {"compile=reduce-overhead", "compile=on"}, "compile=on where there is no compiler"
    assert (
        found["compile=reduce-overhead"] == "replays graphs of kernels, but this cluster has no GPU that supports this"
    )


def test_on_gpus_every_one_is_used_and_cores_are_left_alone() -> None:
    found = candidates(job(), gpus(4))
    assert not any(change.startswith("dp=") for change in found)
    assert found["pin=on"] == "its ranks compute on GPUs"
    assert "compile=reduce-overhead" in found


@pytest.mark.parametrize(
    ("changes", "cluster", "change", "reason"),
    [
        (
            {"model": "gpt"},
            cores(2),
            "memory_format=channels_last",
            "is for images, but the model (gpt) has no image input",
        ),
        (
            {"optimizer": "lamb"},
            cores(2),
            "fused=on",
            "needs a fused step of lamb, but torch has fused steps only for sgd, adam, adamw",
        ),
        (
            {"partition": {"weights": [2, 1]}},
            cores(2),
            "dp=1",
            "has 1 replica, but the job's partition has 2 weights, one per replica",
        ),
        ({}, cores(2, bf16=False), "precision=bf16", "this hardware is not known to support bf16 arithmetic"),
        ({}, cores(2, bf16=None), "precision=bf16", "this hardware is not known to support bf16 arithmetic"),
    ],
)
def test_what_cannot_help_is_left_out_with_the_reason(
    changes: dict[str, Any], cluster: Cluster, change: str, reason: str
) -> None:
    found = candidates(job(**changes), cluster)
    assert found[change] is not None
    assert reason in str(found[change])


def test_a_machine_that_cannot_compile_is_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert candidates(job(), cores(2))["compile=on"] == "torch.compile needs a C++ compiler (no-such-compiler)"


works = st.builds(
    job,
    model=st.sampled_from(["cifar_cnn", "gpt", "mlp", "torchvision.models:resnet18"]),
    optimizer=st.sampled_from(["sgd", "adamw", "lamb"]),
    precision=st.sampled_from(["fp32", "bf16", "fp64"]),
    loss=st.sampled_from(["cross_entropy", "contrastive"]),
    global_batch=st.integers(1, 64),
)


@given(works, st.integers(1, 32), st.booleans())
def test_what_is_tried_can_run_and_what_can_be_chosen_keeps_the_precision(
    work: Job, number: int, with_gpus: bool
) -> None:
    cluster = gpus(number) if with_gpus else cores(number)
    default = auto_plan(work, cluster)
    for change in plan_changes(work, cluster, default):
        plan = change.on(default)
        assert plan != default
        assert plan.ranks <= cluster.devices, "ranks never share a core unasked"
        assert change.untried or plan_errors(work, plan, cluster=cluster) == []
        assert change.hint or plan.precision_for(work) == work.precision


times = st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=LEAST_ROUNDS, max_size=MOST_ROUNDS)
FUSED = PlanChange({"fused": True})


def compared(pairs: list[tuple[float, float]]) -> Comparison:
    comparison = Comparison()
    for challenger_s, best_s in pairs:
        comparison.add(challenger_s, best_s)
    return comparison


@given(times)
def test_a_change_is_kept_only_where_it_is_faster_beyond_doubt(pairs: list[tuple[float, float]]) -> None:
    tried = compared(pairs).tried("fused=on")
    assert tried.ratio is not None
    assert (tried.verdict == "kept") == (tried.ratio.high < 0.99)
    assert compared([(b, a) for a, b in pairs]).tried("fused=on").verdict != "kept" or tried.verdict != "kept"


@pytest.mark.parametrize(
    ("challenger_s", "verdict"),
    [(0.5, "kept"), (0.995, "not kept: no difference"), (1.0, "not kept: no difference"), (1.1, "not kept: slower")],
)
def test_a_clear_case_is_decided_at_once(challenger_s: float, verdict: str) -> None:
    comparison = compared([(challenger_s, 1.0)] * LEAST_ROUNDS)
    assert comparison.decided == (challenger_s in (0.5, 1.1))
    assert comparison.tried("fused=on").verdict == verdict


def test_a_row_shows_both_sides_of_its_pairs() -> None:
    """The machine was slower in these rounds than when the best plan was measured before.

    The ratio is of what stands beside it.
    """
    rounds = [(1.0, 2.0)] * (LEAST_ROUNDS - 1) + [(1.1, 2.2)]
    line = compared(rounds).tried("fused=on").line()
    assert re.search(r"  1\.00 s \([01].* to 1.*\) ", line)
    assert re.search(r"0\.50 of 2\.00 s", line)


def test_two_rounds_show_medians_without_an_interval() -> None:
    line = compared([(4.0, 1.0), (5.0, 1.0)]).tried("fused=on").line()
    assert re.search(r"  4\.50 s +4\.50 of 1\.00 s +not kept: slower$", line)


def test_noise_is_no_difference_and_a_hopeless_change_costs_two_rounds() -> None:
    assert compared([(1.0, 1.2), (1.2, 1.0)] * 10).tried("fused=on").verdict == "not kept: no difference"
    assert not compared([(5.0, 1.0)]).decided, "one may be an accident"
    assert compared([(5.0, 1.0)] * 2).decided
    assert compared([(5.0, 1.0)] * 2).tried("fused=on").verdict == "not kept: slower"
    assert compared([(0.1, 1.0)] * 2).tried("fused=on").verdict != "kept", "two rounds are too few to take anything"


def test_a_faster_precision_is_told_of_and_never_taken() -> None:
    [hint] = [change for change in plan_changes(job(), cores(2), Plan(dp=2)) if change.hint]
    assert (
        compared([(0.5, 1.0)] * LEAST_ROUNDS).tried(str(hint), hint=str(hint.hint)).verdict
        == "not taken: the job sets fp32; set precision: bf16 to use bf16"
    )
    assert compared([(1.5, 1.0)] * LEAST_ROUNDS).tried(str(hint), hint=str(hint.hint)).verdict == "not taken: no faster"


def test_measuring_costs_a_small_part_of_the_run() -> None:
    assert budget_s(0.01, None) == budget_s(0.01, 3600) == BUDGET_S
    assert budget_s(0.01, 20) == pytest.approx(20 * SHARE_OF_RUN)
    assert budget_s(2.0, 36_000) > BUDGET_S, "long steps take longer to compare"
    assert budget_s(2.0, 600) + START_S < 0.05 * 600
    assert budget_s(2.0, 600, share=0.5) > budget_s(2.0, 600), "other runs benefit as well"


def test_what_costs_more_than_it_can_bring_is_not_tried() -> None:
    compiling = PlanChange({"compile": "on"}, cost_s=45)
    assert why_not_now(compiling, run_s=7200, left_s=0, comparison_s=1) is None
    assert (
        why_not_now(compiling, run_s=60, left_s=9, comparison_s=1)
        == "it takes about 45 s to start, and the run takes at most 60 s"
    )
    assert "does not limit the duration" in str(why_not_now(compiling, run_s=None, left_s=9, comparison_s=1))
    assert why_not_now(FUSED, run_s=None, left_s=9, comparison_s=1) is None
    assert why_not_now(FUSED, run_s=None, left_s=0.5, comparison_s=1) == "no time was left to measure it"


@pytest.mark.parametrize(
    ("stop", "too_few"),
    [({"steps": 6}, True), ({"steps": 4000}, False), ({"seconds": 5}, True), ({"epochs": 1}, False)],
)
def test_a_run_of_a_few_steps_is_known_to_be_short_without_its_data(stop: dict[str, Any], too_few: bool) -> None:
    assert (steps_are_too_few(job(stop=stop)) is not None) == too_few


def test_the_longest_run_is_what_the_stop_rule_allows() -> None:
    assert longest_run_s(job(stop={"epochs": 2, "seconds": 500}), 0.5, 100) == 100
    assert longest_run_s(job(stop={"epochs": 2, "seconds": 50}), 0.5, 100) == 50
    assert longest_run_s(job(stop={"loss_below": 0.1}), 0.5, 100) is None


HERE = cores(4)
DEFAULT = Plan(dp=4)
TWO_CORES = Cluster(hosts=(Host(name="a", cpu="AMD EPYC", cores=2, memory_bytes=2**34),))


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
    assert names(shortlist(mlp_job(), HERE, DEFAULT, found)) == ["dp=4", "fsdp=4", "pp=4 microbatches=8", "dp=1"]


def test_what_is_predicted_much_slower_is_not_measured() -> None:
    found = forecasts(("dp=4", 1.0), ("tp=4", 1.4), ("fsdp=4", 1.6), calibrated=True)
    assert names(shortlist(mlp_job(), HERE, DEFAULT, found)) == ["dp=4", "tp=4"]


def test_a_default_without_memory_is_not_what_measuring_begins_with() -> None:
    found = [*forecasts(("dp=4", 1.0), fits=False), *forecasts(("fsdp=4", 1.4), ("tp=4", 1.5))]
    assert names(shortlist(mlp_job(), HERE, DEFAULT, found)) == ["fsdp=4", "tp=4"]


@pytest.mark.parametrize(
    "plan", ["dp=4 precision=bf16", "dp=4 sync=local:8", "dp=4 compress=int8", "dp=4 sync=diloco:50"]
)
def test_what_computes_something_else_is_never_chosen(plan: str) -> None:
    assert names(shortlist(mlp_job(), HERE, DEFAULT, forecasts(("dp=4", 1.0), (plan, 0.1)))) == ["dp=4"]


plans = st.sampled_from(
    ["dp=4", "dp=2", "dp=1", "fsdp=4", "tp=4", "tp=2", "pp=2 microbatches=4", "dp=2 tp=2", "dp=2 remat=block"]
)
rows = st.dictionaries(plans, st.floats(0.001, 10), min_size=1)


@given(rows, st.booleans())
def test_the_list_is_short_of_different_plans_and_has_the_predicted_best(
    times: dict[str, float], calibrated: bool
) -> None:
    listed = shortlist(mlp_job(), HERE, DEFAULT, forecasts(*times.items(), calibrated=calibrated))
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
    assert "the predicted duration of the run is at most 30 s" in str(why_not_measured(alike, 30.0, 0.0))
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
    assert steps_per_epoch(mlp_job(data=data)) == steps


@pytest.mark.parametrize(("all_cores_s", "plan"), [(0.9, "threads=1"), (0.7, "dp=1")])
def test_one_rank_takes_one_core_unless_the_others_save_a_fifth(all_cores_s: float, plan: str) -> None:
    found = forecasts(("dp=4", 1.1), ("dp=1", all_cores_s), ("threads=1", 1.0))
    assert names(shortlist(mlp_job(), HERE, DEFAULT, found)) == ["dp=4", plan]


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
        text: modelled(mlp_job(**changes), TWO_CORES, Plan.parse(text)).step_time_s
        for text in ("dp=2", "dp=1", "threads=1")
    }
    found = [Forecast(text, step_s, step_s) for text, step_s in times.items()]
    best = certain(shortlist(mlp_job(**changes), TWO_CORES, Plan(dp=2), found))
    assert best is not None
    assert best.plan == plan
