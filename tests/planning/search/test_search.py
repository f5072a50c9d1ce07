"""The search finds what looking at every plan finds, and says how far it looked."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from handmade_search import candidate, cluster, job
from model_families import LLAMA_70B
from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.host import Device, Host, Link
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.model import Dimensions
from paceline.job.partition import PartitionSpec
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.memory import memory, usable_bytes
from paceline.planning.machines import machines
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.transformer import transformer
from paceline.planning.plan import REMATS, SCHEDULES, Plan
from paceline.planning.prediction import Layouts, estimate
from paceline.planning.search.result import SearchResult, equals, least, moving_parts, preferred, smallest_that_works
from paceline.planning.search.search import BranchAndBound, Choice, plan, search
from paceline.planning.search.space import PIPELINES, Space, divisors
from refusals import raises

ROOT = Path(__file__).parents[3]
SCHEDULE_OR_NONE = {True: SCHEDULES, False: ("1f1b",)}


def gpus(hosts: int, each: int, memory_gb: float = 80, name: str = "H100-SXM", gbps: float = 400) -> Cluster:
    """Hosts with so many GPUs."""
    devices = tuple(Device(index=i, name=name, memory_bytes=int(memory_gb * 2**30)) for i in range(each))
    link = Link(name="eth0", kind="ethernet", bandwidth_gbps=gbps)
    return Cluster(
        hosts=tuple(Host(name=f"h{i}", cores=32, memory_bytes=2**40, gpus=devices, links=(link,)) for i in range(hosts))
    )


def gpt(batch: int = 8, **dimensions: Any) -> Job:
    """A small one by its dimensions."""
    sizes = {"layers": 4, "hidden": 1024, "heads": 8, "seq": 256, "vocab": 4096} | dimensions
    return job(model={"transformer": sizes}, global_batch=batch)


def every_plan(job: Job, cluster: Cluster) -> list[Plan]:
    """All plans that may run, without uneven deals that fewer ranks or microbatches match."""
    devices, batch = cluster.devices, job.global_batch
    plans = []
    for dp, fsdp, tp, pp, cp, ep in product(range(1, devices + 1), repeat=6):
        data_ranks = dp * fsdp * ep
        if (
            data_ranks * tp * pp * cp > devices
            or data_ranks > batch
            or -(-batch // -(-batch // data_ranks)) != data_ranks
        ):
            continue
        share = -(-batch // data_ranks)
        for microbatches in range(1, batch // data_ranks + 1):
            if (pp > 1 and batch % (data_ranks * microbatches)) or -(
                -share // -(-share // microbatches)
            ) != microbatches:
                continue
            for schedule, remat, sequence, zero in product(
                SCHEDULE_OR_NONE[pp > 1],
                REMATS,
                (False, True)[: 1 + (tp > 1)],
                (3, 2, 1) if fsdp > 1 and pp == 1 else (3,),
            ):
                variant: dict[str, Any] = {
                    "schedule": schedule,
                    "remat": remat,
                    "sequence": sequence,
                    "zero": zero,
                    "microbatches": microbatches,
                }
                plans.append(Plan(dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, **variant))
    return [plan for plan in plans if not reasons_against(plan, job, cluster)]


def searched(job: Job, cluster: Cluster) -> SearchResult | None:
    """None where no plan works."""
    try:
        return search(job, cluster)
    except PlanError:
        return None


jobs = st.builds(
    gpt,
    batch=st.sampled_from([2, 6, 8, 12]),
    layers=st.integers(2, 5),
    hidden=st.sampled_from([768, 1536]),
    heads=st.sampled_from([4, 6]),
    kv_heads=st.sampled_from([None, 1, 2]),
    seq=st.sampled_from([96, 1024]),
    vocab=st.sampled_from([1024, 32000]),
    experts=st.sampled_from([0, 0, 2]),
)
clusters = st.builds(
    gpus, st.sampled_from([1, 2]), st.sampled_from([1, 2]), memory_gb=st.sampled_from([2.2, 3.0, 5.0, 80.0])
)


@settings(max_examples=10, suppress_health_check=list(HealthCheck), derandomize=True)
@given(jobs, clusters)
def test_the_best_plan_is_that_of_looking_at_all(job: Job, cluster: Cluster) -> None:
    layouts = Layouts(job, machines(cluster))
    predicted = [(layout, predict_layout(layout)) for plan in every_plan(job, cluster) for layout in [layouts.of(plan)]]
    times = [
        prediction.step_time_s for layout, prediction in predicted if prediction.memory_bytes <= usable_bytes(layout)
    ]
    found = searched(job, cluster)
    if found is None:
        assert not times
        return
    if not times:
        assert all(one.plan.offload or one.plan.offload_activations for one in found.best)
        return
    assert found.fastest.prediction.step_time_s == pytest.approx(min(times), rel=1e-9)
    assert found.gap == 0


@settings(max_examples=10, suppress_health_check=list(HealthCheck), derandomize=True)
@given(jobs, clusters)
def test_every_plan_that_is_proposed_may_run_and_fits(job: Job, cluster: Cluster) -> None:
    found = searched(job, cluster)
    if found is None:
        return
    times = [candidate.prediction.step_time_s for candidate in found.best]
    assert times[1:] == sorted(times[1:])
    assert found.best[0] == preferred(found.best), "the recommended plan comes first"
    assert len({degrees(one.plan) for one in found.best}) == len(found.best)
    for one in found.best:
        assert reasons_against(one.plan, job, cluster) == []
        assert one.prediction.fits
        assert estimate(job, one.plan, cluster=cluster).step_time_s == pytest.approx(
            one.prediction.step_time_s, rel=1e-9
        )


def degrees(plan: Plan) -> tuple[int, ...]:
    return plan.dp, plan.fsdp, plan.tp, plan.pp, plan.cp, plan.ep


def test_all_plans_are_counted_once() -> None:
    found = search(gpt(), gpus(1, 2))
    assert (
        found.considered == len(every_plan(gpt(), gpus(1, 2))) == found.evaluated + found.pruned + out_of_memory(found)
    )


def out_of_memory(found: SearchResult) -> int:
    return sum(excluded.plans for excluded in found.excluded)


def test_a_small_job_is_not_spread_over_devices_that_only_talk() -> None:
    found = search(gpt(batch=4, hidden=64, heads=4, layers=2, seq=32, vocab=128), gpus(2, 2, gbps=0.1))
    assert found.best[0].plan.ranks <= 2  # those of one host


def test_what_cannot_work_is_told_with_the_reason() -> None:
    found = search(gpt(batch=6), gpus(1, 8, memory_gb=3))
    reasons = {excluded.what.partition("=")[0]: excluded.reason for excluded in found.excluded}
    assert "8" in reasons["tp"] or "tp" not in reasons
    assert "no mixture of experts" in reasons["ep"]
    assert "4 repeated blocks" in reasons["pp"]
    assert "can be divided evenly over 1, 2, 3, 6 data-parallel ranks" in reasons["dp × fsdp × ep"]


def test_plans_that_need_more_than_there_is_are_told_with_how_much() -> None:
    found = search(gpt(layers=6, hidden=1536, heads=4), gpus(1, 2, memory_gb=3.2))
    (memory,) = (excluded for excluded in found.excluded if excluded.what == "memory")
    assert memory.plans > 0
    assert "than the 2.79 GiB that are available on a device" in memory.reason


def test_the_others_say_which_part_of_theirs_makes_them_slower() -> None:
    found = search(gpt(batch=8, layers=8, hidden=2048, heads=8), gpus(2, 2, gbps=1), top=6)
    assert "% computing" in found.best[0].why
    slower = [one for one in found.best[1:] if one.prediction.step_time_s > 1.05 * found.best[0].prediction.step_time_s]
    assert slower
    assert all(one.why.startswith("+") for one in slower)


def test_a_model_that_fits_nowhere_is_told_what_is_missing() -> None:
    with raises(PlanError, "plan.no_fit"):
        search(gpt(layers=48, hidden=4096, heads=32), gpus(1, 1, memory_gb=16))


def test_more_weights_than_devices_are_told() -> None:
    job = gpt(batch=8).model_copy(update={"partition": PartitionSpec(weights=(1.0, 1.0, 2.0))})
    with raises(PlanError, "plan.weights_exceed_devices"):
        search(job, gpus(1, 2))
    assert search(job, gpus(1, 4)).best[0].plan.data_ranks == 3


def test_rules_that_change_the_training_are_not_chosen() -> None:
    found = search(gpt(batch=8, layers=2, hidden=2048, heads=8, seq=64), gpus(4, 1, gbps=1), base=Plan())
    assert found.best[0].plan.sync == "allreduce"
    assert found.best[0].plan.compress == "none"


def test_on_cores_fewer_ranks_with_more_threads_are_looked_at() -> None:
    cpus = Cluster(hosts=(Host(name="a", cores=2, memory_bytes=8 * 2**30),))
    job = gpt(batch=4, hidden=64, heads=4, layers=2, seq=32, vocab=128).model_copy(update={"precision": "fp32"})
    found = search(job, cpus)
    by_ranks = {candidate.plan.ranks: candidate.layout.threads for candidate in found.best}
    assert by_ranks[1] in (1, 2)
    assert by_ranks[2] == 1
    assert found.gap == 0


def test_state_goes_to_host_memory_only_where_nothing_else_helps() -> None:
    job = gpt(batch=4, layers=6, hidden=1536, heads=4)
    assert not search(job, gpus(1, 2, memory_gb=5)).best[0].plan.offload
    best = search(job, gpus(1, 2, memory_gb=2.4)).best[0]
    assert best.plan.offload
    assert "offload" in best.prediction.notes[-1]


def test_activations_go_to_host_memory_only_where_they_are_what_does_not_fit() -> None:
    job = gpt(batch=1, layers=48, hidden=256, heads=4, seq=16384)
    assert not search(job, gpus(1, 1, memory_gb=40)).best[0].plan.offload_activations
    best = search(job, gpus(1, 1, memory_gb=2.667)).best[0]
    assert best.plan.offload_activations
    assert not best.plan.offload


class TwoLayers(nn.Module):
    """A model without repeated blocks, which a pipeline can cut and whose parts cannot be predicted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.convolution(x).flatten(1))
        return scores


def test_a_model_without_blocks_is_searched_without_pipelines_and_predicted_with_none() -> None:
    images = {"kind": "synthetic", "samples": 64, "shape": [3, 8, 8], "classes": 10, "held_out": 0}
    model = {"factory": f"{__file__}:TwoLayers"}
    job = Job(model=model, data=images, loss="cross_entropy", optimizer="sgd", global_batch=8, stop={"steps": 1})
    found = search(job, gpus(1, 4), top=20)
    assert found.best
    assert all(candidate.plan.pp == 1 for candidate in found.best)
    with raises(PlanError, "plan.stages_do_not_fit", reason="at most 1 block of the model can be predicted separately"):
        estimate(job, "pp=2 microbatches=2", cluster=gpus(1, 4))


def test_plans_within_the_error_of_predictions_are_equal() -> None:
    fastest, near, far = (
        candidate("dp=8", compute=1.0),
        candidate("fsdp=8", compute=1.045),
        candidate("tp=8", compute=1.07),
    )
    assert equals([fastest, near, far]) == [fastest, near]


def test_of_equal_plans_the_one_with_the_fewest_ranks_is_preferred_to_one_with_more_free_memory() -> None:
    alone, four = candidate("dp=1", memory=2e9, compute=1.0), candidate("dp=4", memory=1e9, compute=0.99)
    assert preferred([four, alone]) is alone


def test_of_equal_plans_the_one_with_the_fewest_moving_parts_then_the_most_free_memory_is_preferred() -> None:
    many = candidate("dp=2 tp=2 pp=2 microbatches=2 remat=block", memory=10e9, compute=1.0)
    full, free = candidate("fsdp=8", memory=70e9, compute=1.01), candidate("dp=4 fsdp=2", memory=30e9, compute=1.02)
    slow = candidate("dp=8", memory=1e9, compute=1.5)
    assert preferred([many, full, free, slow]) is free
    assert [
        moving_parts(Plan.parse(text)) for text in ("dp=8", "fsdp=8", "dp=2 tp=2 pp=2 microbatches=2 remat=block")
    ] == [0, 1, 3]


LARGE = transformer(LLAMA_70B)
SMALL = transformer(Dimensions(layers=4, hidden=256, heads=4, seq=128, vocab=1024))


_GIB = {"MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}


def on(cluster: str, trace: object = LARGE) -> Layout:
    return Layout(trace, machines(cluster_from(cluster)), precision="bf16")  # type: ignore[arg-type]


def test_what_fits_needs_no_words() -> None:
    assert smallest_that_works(on("64x8xH100-SXM"), 1024) == ""
    assert smallest_that_works(on("CPU", SMALL), 8) == ""


@pytest.mark.parametrize("cluster", ["8xH100-SXM", "2x8xA100-SXM-40", "RTX-4090", "4xGB200"])
def test_the_smallest_cluster_named_is_enough_and_one_host_less_is_not(cluster: str) -> None:
    text = smallest_that_works(on(cluster), 1024)
    needed, has, missing = (
        float(size.replace(",", "")) * _GIB[unit] for size, unit in re.findall(r"([\d.,]+) ([MGT]iB)", text)[:3]
    )
    assert missing == pytest.approx(needed - has, rel=0.02, abs=0.1)
    hosts, rest = re.findall(r"It fits on (\d+)x(\S+)", text)[0]
    assert least(on(f"{hosts}x{rest}"), 1024).fits
    assert not least(on(f"{int(hosts) - 1}x{rest}"), 1024).fits


def test_devices_with_more_memory_are_named_where_they_are_enough() -> None:
    text = smallest_that_works(on("2x8xA100-SXM-80"), 1024)
    [other] = re.findall(r"or on (\S+) with", text)
    assert least(on(other), 1024).fits


def test_a_sample_that_is_too_large_for_any_number_of_hosts_is_said_to_be() -> None:
    endless = transformer(Dimensions(layers=4, hidden=8192, heads=64, seq=3**14, vocab=128256))
    assert "More such hosts do not help" in smallest_that_works(on("8xH100-SXM", endless), 8)


def test_readers_are_no_more_than_samples() -> None:
    assert least(on("64x8xH100-SXM"), 2).layout.data_ranks <= 2


def test_a_rank_alone_on_a_host_has_all_of_its_memory() -> None:
    """4 cores with 4 GiB each: four ranks would not fit, one does."""
    found = least(on("4xCPU", transformer(Dimensions(layers=8, hidden=2048, heads=16, seq=512, vocab=32000))), 1)
    assert found.layout.ranks == 1
    assert found.fits
    assert found.room == 16 * 2**30


_TRIED = 40


JOBS = st.builds(
    gpt,
    batch=st.sampled_from([4, 12, 30, 64]),
    layers=st.sampled_from([1, 3, 6, 10, 12]),
    hidden=st.sampled_from([256, 1536, 4096]),
    heads=st.just(8),
    seq=st.sampled_from([96, 512, 4096]),
    vocab=st.sampled_from([512, 50000]),
    experts=st.sampled_from([0, 0, 4]),
    gated=st.booleans(),
    tied=st.booleans(),
)
CLUSTERS = st.builds(
    gpus,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 4]),
    st.sampled_from([3.0, 8.0, 30.0, 80.0]),
    st.sampled_from(["H100-SXM", "A100-SXM-80", "V100-SXM-32", "MI250X"]),
    st.sampled_from([1.0, 25.0, 400.0]),
)


class Mixed(Layouts):
    """Layouts of a model whose first layers are small, as the dense ones of some mixtures are."""

    def __init__(self, job: Job, cluster: Cluster, small: int) -> None:
        self.small = small
        super().__init__(job, machines(cluster))

    def trace_at(self, precision: str, tp: int = 1) -> ModelTrace:
        """The trace with smaller layers, one object for each degree."""
        if (precision, tp) not in self._traces:
            first, layer, *others = super().trace_at(precision, tp).blocks
            names = ("matrices", "vectors", "experts", "kept_inside", "kept_outside", "inside", "outside")
            less = replace(layer, name="small", gemms=layer.gemms[:4], **{n: getattr(layer, n) // 4 for n in names})
            layers = [less if i < self.small else block for i, block in enumerate([layer, *others])]
            self._traces[precision, tp] = ModelTrace((first, *layers), tokens=96)
        return self._traces[precision, tp]


def solver_of(job: Job, cluster: Cluster, small: int = 0) -> tuple[BranchAndBound, Layouts]:
    layouts = Layouts(job, machines(cluster))
    if small and len(layouts.trace.blocks) > small + 3:
        layouts = Mixed(job, cluster, small)
    return BranchAndBound(Space(job, cluster, Plan(), layouts.trace), layouts, top=10), layouts


@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(JOBS, CLUSTERS, st.integers(0, 2**32), st.sampled_from([0, 0, 3]))
@example(gpt(batch=24, layers=7, vocab=50000), gpus(2, 4, gbps=10), 0, 0)
@example(gpt(batch=24, layers=8, experts=4), gpus(2, 4, gbps=10), 0, 0)
def test_no_bound_of_time_is_above_the_prediction(job: Job, cluster: Cluster, seed: int, small: int) -> None:
    solver, layouts = solver_of(job, cluster, small)
    rows = np.arange(len(solver.space.rows["tp"]))
    plans = solver.plans_of(rows)
    for i in Random(seed).sample(range(len(plans)), min(_TRIED, len(plans))):
        choice = plans.choice(i)
        plan = Plan(**solver.values_of(choice))
        predicted = predict_layout(layouts.of(plan)).step_time_s
        assert plans.bound_s[i] <= predicted * (1 + 1e-9), str(plan)
        assert solver.least_s_of_rows[choice.row] <= predicted * (1 + 1e-9), str(plan)


@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(JOBS, CLUSTERS, st.integers(0, 2**32), st.sampled_from([0, 0, 3]))
def test_no_plan_that_fits_is_taken_for_too_large(job: Job, cluster: Cluster, seed: int, small: int) -> None:
    solver, _ = solver_of(job, cluster, small)
    random, space, count = Random(seed), solver.space, len(solver.space.rows["tp"])
    for _ in range(_TRIED if count else 0):
        row = random.randrange(count)
        here = {name: column[row : row + 1] for name, column in space.rows.items()}
        sequence, remat = random.random() < 0.5, random.choice(REMATS)
        runs = [n for n, pipeline in enumerate(PIPELINES) if space.runs(np.array([row]), pipeline)[0]]
        if not runs or not space.allows(np.array([row]), sequence, remat)[0]:
            continue
        pipeline = random.choice(runs)
        fsdp = random.choice(divisors(int(here["shared"][0])))
        zero = random.choice((1, 2, 3)) if fsdp > 1 and here["pp"][0] == 1 else 3
        choice = Choice(row, pipeline, REMATS.index(remat), int(sequence), fsdp, zero)
        layout = solver.layout_of(choice)
        needed = sum(memory(layout).values())
        if needed <= usable_bytes(layout):
            assert solver.may_fit(np.array([row]), pipeline, int(sequence), REMATS.index(remat))[0], str(layout)
            assert solver.may_fit(np.array([row]), 0, int(sequence), REMATS.index(remat))[0], "1f1b needs the least"
            assert solver.bounds.fits(layout), str(layout)


@pytest.mark.parametrize("virtual", [3, 4, 6])
def test_stages_that_get_as_many_layers_each_are_searched(virtual: int) -> None:
    """12 layers on 2 ranks: 2, 3 and 6 stages each; with embedding and head 14, which 2 ranks cannot have 4 of."""
    job, cluster = gpt(8, layers=12, hidden=256, seq=96, vocab=512), gpus(1, 2, gbps=25)
    solver, _ = solver_of(job, cluster)
    pipeline = next(one for one in PIPELINES if one == ("interleaved", virtual))
    rows = np.flatnonzero(solver.space.rows["pp"] == 2)
    assert bool(solver.space.runs(rows, pipeline).any()) == (virtual != 4)


def test_files_and_values_give_the_best_plan_that_the_search_finds_and_it_can_run(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job().to_yaml())
    (tmp_path / "cluster.yaml").write_text(cluster().to_yaml())
    chosen = plan(tmp_path / "job.yaml", cluster=tmp_path / "cluster.yaml")
    assert chosen == plan(job(), cluster=cluster()) == search(job(), cluster(), top=1).best[0].plan
    assert plan_errors(job(), chosen, cluster=cluster()) == []


def test_a_name_stands_for_a_cluster() -> None:
    assert plan(gpt(), cluster="2x8xH100-SXM, 400gbit").ranks <= 16
