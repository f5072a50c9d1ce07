"""Rows of `experts/plans.csv` as plans, jobs and clusters.

A row's layout is that of the reader of the published tables; the plan says the same in paceline's own terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from paceline.cluster.cluster import Cluster, cluster_from
from paceline.errors import PacelineError
from paceline.job.job import Job, Precision
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.cost.layout import Layout
from paceline.planning.plan import DEGREES, Plan
from paceline.planning.tables.layouts import Row, Skipped, read

TABLE = Path(__file__).parent / "experts" / "plans.csv"
SAME_PRECISION = {"fp16": "bf16", "tf32": "fp32"}  # as fast, as wide


@dataclass(frozen=True)
class Expert:
    """A published run: its plan in paceline's terms, for the job and the cluster.

    Attributes:
        job: with fewer heads of keys and values than ranks of tp, it has one for each: other software holds them on
            all of these ranks, which a plan cannot say.
        unsaid: what the plan has no key for, as text; such parts are compared as numbers only.
    """

    row: Row
    job: Job
    cluster: Cluster
    plan: Plan
    unsaid: tuple[str, ...]

    @property
    def name(self) -> str:
        """The row's short name."""
        return self.row.cells["id"]

    @property
    def reasons(self) -> list[str]:
        """Reasons against the plan: those of `plan_errors`, and stages that the model has too few layers for."""
        layout, blocks = self.row.layout, len(self.row.layout.trace.blocks)
        stages = layout.pp * layout.chunks
        few = [f"{stages} stages of {blocks} blocks"] if stages > blocks else []
        return [*(problem.text for problem in plan_errors(self.job, self.plan, cluster=self.cluster)), *few]


def experts(table: Path = TABLE, names: Iterable[str] = ()) -> tuple[list[Expert], list[Skipped]]:
    """The runs of a table, and the rows that cannot be used yet, with reasons.

    Args:
        names: the rows wanted; all by default.
    """
    rows, skipped = read([table])
    wanted = set(names)
    skipped = [] if wanted else skipped
    found: list[Expert] = []
    for row in rows:
        if wanted and row.cells["id"] not in wanted:
            continue
        try:
            found.append(_expert(row))
        except PacelineError as error:
            skipped.append(Skipped(row.table, row.number, str(error).strip().splitlines()[-1]))
    return found, skipped


def plan_of(layout: Layout) -> tuple[Plan, tuple[str, ...]]:
    """A layout as a plan, and what no key of a plan can say.

    An optimizer state that is sharded over replicas is paceline's `fsdp` with `zero=1`.
    """
    values: dict[str, Any] = {name: getattr(layout, name) for name in DEGREES}
    unsaid: list[str] = []
    values |= {"zero": layout.zero, "remat": layout.remat, "offload": layout.offload}
    values["sequence"] = layout.sequence and layout.tp > 1 and layout.trace.tokens % (layout.tp * layout.cp) == 0
    if layout.sequence and layout.tp > 1 and not values["sequence"]:
        unsaid.append(f"tokens over tp={layout.tp}, which they do not divide into")
    if layout.zero_dp and layout.fsdp == 1:
        values |= {"dp": 1, "fsdp": layout.dp, "zero": 1}
    if layout.pp > 1:
        values |= {"schedule": layout.schedule}
        values |= {"virtual": layout.chunks} if layout.schedule == "interleaved" else {}
    values["microbatches"] = layout.microbatches
    if layout.expert_ranks > 1:
        unsaid.append(f"experts whole on {layout.expert_ranks} ranks of dp and tp")
        key = "fsdp" if values["fsdp"] % layout.expert_ranks == 0 else "dp"
        values |= {key: values[key] // layout.expert_ranks, "ep": layout.expert_ranks}
    if layout.remat == "block" and layout.remat_share < 1:
        unsaid.append(f"remat of {layout.remat_share:.0%} of the layers")
    keys = {field.name for field in fields(Plan)}
    unsaid += [f"{key}={value}" for key, value in values.items() if key not in keys]
    return Plan(**{key: value for key, value in values.items() if key in keys}), tuple(unsaid)


def as_numbers(expert: Expert, said: Layout) -> Layout:
    """The layout of the expert's plan in our software, with the parts that the plan cannot say."""
    theirs = expert.row.layout
    said = replace(said, remat_share=theirs.remat_share, ulysses=theirs.ulysses)
    return said if said.chunks == theirs.chunks else replace(said, chunks=theirs.chunks, cut=())


def _expert(row: Row) -> Expert:
    plan, unsaid = plan_of(row.layout)
    dimensions = yaml.safe_load(row.cells["dimensions"])
    precision = _precision(row)
    if row.layout.products:
        unsaid = (*unsaid, f"products in {row.layout.products}, compared in {precision}")
    return Expert(row, _job(row, dimensions, precision), cluster_from(row.cells["cluster"]), plan, unsaid)


def _precision(row: Row) -> Precision:
    """The precision of a job that comes next to the row's."""
    wanted = SAME_PRECISION.get(row.layout.precision, row.layout.precision)
    return next((precision for precision in get_args(Precision) if precision == wanted), "bf16")


def _job(row: Row, dimensions: Mapping[str, Any], precision: Precision) -> Job:
    return Job(
        name=row.cells["id"],
        model={"transformer": dimensions},
        data="synthetic",
        loss="cross_entropy",
        optimizer={"name": "adamw", "lr": 1e-4},
        global_batch=round(row.layout.global_batch),
        stop={"steps": 1000},
        precision=precision,
    )
