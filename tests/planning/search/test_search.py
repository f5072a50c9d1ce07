"""The search finds what looking at every plan finds, and says how far it looked."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host, Link
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.partition import PartitionSpec
from paceline.planning.axes import REMATS, SCHEDULES
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.memory import usable_bytes
from paceline.planning.machines import machines
from paceline.planning.plan import Plan
from paceline.planning.predict import Layouts, predict
from paceline.planning.search.result import SearchResult, preferred
from paceline.planning.search.search import BranchAndBound, search
from paceline.planning.search.space import Space

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
    values = {"data": "synthetic", "loss": "cross_entropy", "optimizer": "adamw", "stop": {"steps": 100}}
    return Job(model={"transformer": sizes}, global_batch=batch, precision="bf16", **values)


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
    predicted = [(layout, estimate(layout)) for plan in every_plan(job, cluster) for layout in [layouts.of(plan)]]
    times = [
        prediction.step_time_s for layout, prediction in predicted if prediction.memory_bytes <= usable_bytes(layout)
    ]
    found = searched(job, cluster)
    if found is None:
        assert not times
        return
    if not times:
        assert all(candidate.plan.offload for candidate in found.best)
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
    assert len({degrees(candidate.plan) for candidate in found.best}) == len(found.best)
    for candidate in found.best:
        assert reasons_against(candidate.plan, job, cluster) == []
        assert candidate.prediction.fits
        assert predict(job, cluster, candidate.plan).step_time_s == pytest.approx(
            candidate.prediction.step_time_s, rel=1e-9
        )


def degrees(plan: Plan) -> tuple[int, ...]:
    return plan.dp, plan.fsdp, plan.tp, plan.pp, plan.cp, plan.ep


@pytest.mark.parametrize("sizes", [{"layers": 7, "vocab": 50000}, {"layers": 8, "experts": 4}])
def test_what_a_plan_takes_at_least_is_never_more_than_is_predicted(sizes: dict[str, int]) -> None:
    job, cluster = gpt(batch=24, **sizes), gpus(2, 4, gbps=10)
    layouts = Layouts(job, machines(cluster))
    space = Space(job, cluster, Plan(), layouts.trace)
    solver = BranchAndBound(space, layouts, top=10)
    plans = solver._with_dp_fsdp(solver._variants(np.arange(0, len(space.rows["tp"]), 5)))
    for i in range(0, len(plans), 41):
        choice = plans.choice(i)
        plan = Plan(**solver._values(choice))
        predicted = estimate(layouts.of(plan)).step_time_s
        assert plans.bound_s[i] <= predicted * (1 + 1e-9), str(plan)
        assert solver._least_s[choice.row] <= predicted * (1 + 1e-9), str(plan)


def test_all_plans_are_counted_once() -> None:
    found = search(gpt(), gpus(1, 2))
    assert (
        found.considered == len(every_plan(gpt(), gpus(1, 2))) == found.evaluated + found.pruned + out_of_memory(found)
    )


def out_of_memory(found: SearchResult) -> int:
    return sum(excluded.plans for excluded in found.excluded)


@pytest.mark.slow
def test_an_answer_needs_no_torch() -> None:
    script = (
        "import sys\nfrom paceline.job.job import Job\nfrom paceline.cluster.named import named_cluster\n"
        "from paceline.planning.search.search import search\n"
        "job = Job.load('examples/plan/llama_70b.yaml')\n"
        "print(search(job, named_cluster('2x8xH200, 400gbit')).best[0].plan, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.endswith(" False\n"), done.stdout + done.stderr


def test_a_small_job_is_not_spread_over_devices_that_only_talk() -> None:
    found = search(gpt(batch=4, hidden=64, heads=4, layers=2, seq=32, vocab=128), gpus(2, 2, gbps=0.1))
    assert found.best[0].plan.ranks <= 2  # those of one host


def test_what_cannot_work_is_told_with_the_reason() -> None:
    found = search(gpt(batch=6), gpus(1, 8, memory_gb=3))
    reasons = {excluded.what.partition("=")[0]: excluded.reason for excluded in found.excluded}
    assert "8" in reasons["tp"] or "tp" not in reasons
    assert "no mixture of experts" in reasons["ep"]
    assert "4 repeated blocks" in reasons["pp"]
    assert "deals evenly to 1, 2, 3, 6 data-parallel ranks" in reasons["dp × fsdp × ep"]


def test_plans_that_need_more_than_there_is_are_told_with_how_much() -> None:
    found = search(gpt(layers=6, hidden=1536, heads=4), gpus(1, 2, memory_gb=3.2))
    (memory,) = (excluded for excluded in found.excluded if excluded.what == "memory")
    assert memory.plans > 0
    assert "on a device that has 3.1 GiB to give" in memory.reason


def test_the_others_say_which_part_of_theirs_makes_them_slower() -> None:
    found = search(gpt(batch=8, layers=8, hidden=2048, heads=8), gpus(2, 2, gbps=1), top=6)
    assert "% computing" in found.best[0].why
    slower = [one for one in found.best[1:] if one.prediction.step_time_s > 1.05 * found.best[0].prediction.step_time_s]
    assert slower
    assert all(one.why.startswith("+") for one in slower)


def test_a_model_that_fits_nowhere_is_told_what_is_missing() -> None:
    with pytest.raises(PlanError, match=r"fits on .* under no plan.*GiB are missing"):
        search(gpt(layers=48, hidden=4096, heads=32), gpus(1, 1, memory_gb=16))


def test_more_weights_than_devices_are_told() -> None:
    job = gpt(batch=8).model_copy(update={"partition": PartitionSpec(weights=(1.0, 1.0, 2.0))})
    with pytest.raises(PlanError, match="3 weights"):
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
    with pytest.raises(PlanError, match="no more than 1 block of the model can be predicted apart"):
        predict(job, gpus(1, 4), "pp=2 microbatches=2")
