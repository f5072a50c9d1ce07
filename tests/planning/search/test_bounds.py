"""A bound above the model's prediction would hide the best plan, and nobody would notice."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host, Link
from paceline.job.job import Job
from paceline.planning.axes import REMATS
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.memory import memory, usable_bytes
from paceline.planning.machines import machines
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import Plan
from paceline.planning.predict import Layouts
from paceline.planning.search.search import BranchAndBound, Choice
from paceline.planning.search.space import PIPELINES, Space, divisors

_TRIED = 40


def transformer(batch: int, **sizes: Any) -> Job:
    """A job of a transformer by its dimensions."""
    return Job(
        model={"transformer": sizes},
        data="synthetic",
        loss="cross_entropy",
        optimizer="adamw",
        global_batch=batch,
        precision="bf16",
        stop={"steps": 1},
    )


def hosts(count: int, each: int, name: str, gbps: float, memory_gib: float) -> Cluster:
    """Hosts with equal devices."""
    devices = tuple(Device(index=i, name=name, memory_bytes=int(memory_gib * 2**30)) for i in range(each))
    link = Link(name="eth0", kind="ethernet", bandwidth_gbps=gbps)
    return Cluster(
        hosts=tuple(Host(name=f"h{i}", cores=8, memory_bytes=2**40, gpus=devices, links=(link,)) for i in range(count))
    )


JOBS = st.builds(
    transformer,
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
    hosts,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 4]),
    st.sampled_from(["H100-SXM", "A100-SXM-80", "V100-SXM-32", "MI250X"]),
    st.sampled_from([1.0, 25.0, 400.0]),
    st.sampled_from([3.0, 8.0, 30.0, 80.0]),
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


@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
@given(JOBS, CLUSTERS, st.integers(0, 2**32), st.sampled_from([0, 0, 3]))
def test_no_bound_of_time_is_above_the_prediction(job: Job, cluster: Cluster, seed: int, small: int) -> None:
    solver, layouts = solver_of(job, cluster, small)
    rows = np.arange(len(solver.space.rows["tp"]))
    plans = solver._with_dp_fsdp(solver._variants(rows))
    for i in Random(seed).sample(range(len(plans)), min(_TRIED, len(plans))):
        choice = plans.choice(i)
        plan = Plan(**solver._values(choice))
        predicted = estimate(layouts.of(plan)).step_time_s
        assert plans.bound_s[i] <= predicted * (1 + 1e-9), str(plan)
        assert solver._least_s[choice.row] <= predicted * (1 + 1e-9), str(plan)


@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
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
        layout = solver._layout(choice)
        needed = sum(memory(layout).values())
        if needed <= usable_bytes(layout):
            assert solver._fit(np.array([row]), pipeline, int(sequence), REMATS.index(remat))[0], str(layout)
            assert solver._fit(np.array([row]), 0, int(sequence), REMATS.index(remat))[0], "1f1b needs the least"
            assert solver.bounds.fits(layout), str(layout)


@pytest.mark.parametrize("virtual", [3, 4, 6])
def test_stages_that_get_as_many_layers_each_are_searched(virtual: int) -> None:
    """12 layers on 2 ranks: 2, 3 and 6 stages each; with embedding and head 14, which 2 ranks cannot have 4 of."""
    job, cluster = transformer(8, layers=12, hidden=256, heads=8, seq=96, vocab=512), hosts(1, 2, "H100-SXM", 25, 80)
    solver, _ = solver_of(job, cluster)
    pipeline = next(one for one in PIPELINES if one == ("interleaved", virtual))
    rows = np.flatnonzero(solver.space.rows["pp"] == 2)
    assert bool(solver.space.runs(rows, pipeline).any()) == (virtual != 4)
