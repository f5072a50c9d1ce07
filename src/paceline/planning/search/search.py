"""Search for the fastest legal plans of a job on a cluster.

A row is a combination of degrees and a number of microbatches. Rows are processed in the order of their lower bounds.
Each row is expanded to its variants, and each variant to the factorisations of its data-parallel ranks into dp × fsdp.
Only plans whose lower bound is below the best time so far are expanded. All omitted plans are therefore slower, and the
result equals that of an exhaustive search. The result depends only on the arguments, because the search has no time
limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.arguments import AnyCluster, AnyJob, cluster_of, job_of
from paceline.planning.cost.estimate import predict_layout, use_corrections
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.measured import calibration_of
from paceline.planning.cost.memory import host_fits, memory, usable_bytes
from paceline.planning.machines import factor_of, machines
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import DEGREES, REMATS, Plan, Remat
from paceline.planning.prediction import Layouts, priced
from paceline.planning.search.bounds import Bounds, Floats, MeasuredBounds, RankCost, ShardConfig, smallest
from paceline.planning.search.result import (
    Candidate,
    RejectionCounts,
    SearchResult,
    nothing_fits,
    preferred,
    why_it_loses,
    why_it_wins,
)
from paceline.planning.search.space import PIPELINES, Ints, Space, divisors, numbered

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


def search(
    job: Job, cluster: Cluster, *, top: int = 10, calibration: Basis | None = None, base: Plan | None = None
) -> SearchResult:
    """Find the valid plans with the shortest predicted step time that fit the memory.

    Args:
        top: number of plans to return, each with different degrees.
        calibration: measurements of the cluster, or factors of measured runs; None uses only the catalogue.
        base: plan with the values of keys that the search does not vary, such as precision, sync and compress; `Plan()`
            by default.

    Raises:
        JobError: the model cannot be built.
        ClusterError: a device is not in the catalogue, and nothing was measured.
        PlanError: no plan works; the message states what is missing.
    """
    started = time.perf_counter()
    base = base or Plan()
    layouts = Layouts(job, machines(cluster, calibration))
    space = Space(job, cluster, base, layouts.trace)
    solver = BranchAndBound(space, layouts, top)
    gap = solver.run()
    # offload is the slowest way to save memory, so it is tried only if no other plan works
    for keys in _OFFLOADS if cluster.has_accelerators else ():
        if solver.found or any(getattr(base, key) for key in keys):
            break
        offloaded = Space(job, cluster, replace(base, **dict[str, Any](dict.fromkeys(keys, True))), layouts.trace)
        again = BranchAndBound(offloaded, layouts, top)
        gap = again.run()
        space, solver = (offloaded, again) if again.found else (space, solver)
    if not solver.found:
        raise nothing_fits(space, solver.rejections, solver.layout)
    # measured runs may distinguish plans that the cost model does not
    told = [(c, priced(c.prediction, job, cluster, c.plan, c.layout)) for c in solver.found.values()]
    told = sorted(told, key=lambda one: (one[1].step_time_s, str(one[0].plan)))[:top]
    chosen = preferred([replace(c, prediction=prediction) for c, prediction in told])
    told = sorted(told, key=lambda one: one[0].plan != chosen.plan)  # stable sort: the others stay in order of time
    winner, usual = told[0][0], factor_of(told[0][0].layout)
    whys = [why_it_wins(winner), *(why_it_loses(c, winner, factor_of(c.layout) / usual) for c, _ in told[1:])]
    best = [replace(c, prediction=prediction, why=why) for (c, prediction), why in zip(told, whys, strict=True)]
    found = SearchResult(
        best=tuple(best),
        excluded=solver.rejections.excluded(space),
        considered=solver.considered,
        gap=gap,
        evaluated=solver.evaluated,
        pruned=solver.considered - solver.evaluated - solver.rejections.plans,
    )
    return replace(found, seconds=time.perf_counter() - started)


def plan(job: AnyJob, *, cluster: AnyCluster | None = None, calibration: Basis | None = None) -> Plan:
    """Find the best plan for a job on a cluster by prediction, without running anything.

    If predictions cannot distinguish several plans, the simplest one is returned: the plan with the fewest moving
    parts, then with the fewest ranks, then with the most free memory.

    Args:
        job: a `Job`, its YAML file, or the file's URL.
        cluster: a `Cluster`, its file, or a name such as `64x8xH100-SXM, 400gbit`; None selects this machine.
        calibration: measurements of the machines, or factors of measured runs (`paceline.calibrate_on`); None uses the
            catalogue's figures.

    Raises:
        JobError: the job cannot be read, or its model cannot be built.
        ClusterError: the cluster cannot be read, or one of its devices is not in the catalogue.
        PlanError: no plan can run the job on the cluster; the message states the reason and a possible change.

    Example:
        >>> paceline.plan("job.yaml", cluster="2x8xH100-SXM, 400gbit")
    """
    return search(job_of(job), cluster_of(cluster), calibration=calibration).best[0].plan


# rows that are expanded together, most promising first; the number doubles each time, up to a block
_FIRST_BLOCK, _BLOCK = 64, 4096
# plans slower than this, relative to the best, are not searched for the list
_LISTED = 1.1
# number of predictions after which the search looks only for the best plan, no longer for the list
_LIST_EVALUATIONS = 300
# further plans that are tried if the list is too short
_FILL = 150
# plan keys that are tried in turn if no plan works without them
_OFFLOADS = (("offload_activations",), ("offload",), ("offload", "offload_activations"))
_OFFLOADED = "this time does not include the transfers of state between host memory and devices (offload)"
# number of predicted plans that ends the search; the gap then bounds how far the result may be from the best
_MOST_EVALUATIONS = 8000
# the same on a calibrated machine, whose pipelines are simulated; with fewer plans, all of them are tried
_MOST_MEASURED = 2000


class Choice(NamedTuple):
    """One plan of the search space, as a row, a variant and a sharding.

    Attributes:
        pipeline: index in `PIPELINES`.
        remat: index in `REMATS`.
    """

    row: int
    pipeline: int
    remat: int
    sequence: int
    fsdp: int
    zero: int


@dataclass
class PlanTable:
    """Table of plans or partial plans, with one array per column."""

    row: Ints
    pipeline: Ints  # index in `PIPELINES`
    remat: Ints  # index in `REMATS`
    sequence: Ints
    cost: Ints  # index of the rank cost
    bound_s: Floats
    fsdp: Ints
    zero: Ints

    def __len__(self) -> int:
        return len(self.row)

    def at(self, places: Any) -> PlanTable:
        """Return the rows at the given positions."""
        return PlanTable(*[getattr(self, name)[places] for name in self.__dataclass_fields__])

    def choice(self, i: int) -> Choice:
        """Return the plan at a position."""
        return Choice(*[int(getattr(self, name)[i]) for name in Choice._fields])

    @classmethod
    def joined(cls, tables: list[PlanTable]) -> PlanTable:
        """Concatenate several tables."""
        return cls(*[np.concatenate([getattr(part, name) for part in tables]) for name in cls.__dataclass_fields__])


class BranchAndBound:
    """Branch-and-bound search for the best plans.

    Attributes:
        found: best plan so far for each set of degrees.
        rejections: numbers of rejected plans.
        considered: number of plans in the search space.
        evaluated: number of plans that were predicted in full.
    """

    def __init__(self, space: Space, layouts: Layouts, top: int) -> None:
        self.space, self.layouts, self.top = space, layouts, top
        self.found: dict[tuple[int, ...], Candidate] = {}
        self.evaluated = 0
        # plans that take longer than this are of no interest
        self.limit = float("inf")
        self.layout = layouts.of(space.base)
        measured = calibration_of(self.layout) is not None
        self.bounds = (MeasuredBounds if measured else Bounds)(self.layout, self._trace_at)
        self.considered = int(space.plans_per_row.sum())
        self.rejections = RejectionCounts(self.bounds.capacity)
        self.most = _MOST_MEASURED if measured else _MOST_EVALUATIONS
        self.everything = measured and self.considered <= self.most
        self._rank_costs: dict[ShardConfig, int] = {}
        self._costs: list[RankCost] = []
        self._fits: dict[tuple[int, ...], bool] = {}
        self._seen: set[Choice] = set()
        self._filling = False
        self._last_s = float("inf")  # of the last plan on the list

    def run(self) -> float:
        """Run the search, and return the gap (`SearchResult.gap`)."""
        use_corrections(self.layout)  # bounds hold only with the constants of the predictions
        gap = self._through_all(self.most)
        # if the list is short, add the most promising of the much slower plans
        if len(self.found) < self.top:
            # all were counted already
            rejections, self.rejections = self.rejections, RejectionCounts(self.rejections.capacity)
            self._filling, self.limit = True, float("inf")
            self._through_all(self.evaluated + _FILL)
            self.rejections = rejections
        return gap

    def _through_all(self, most: int) -> float:
        """Expand rows in the order of their lower bounds, and return the gap.

        The loop ends when no remaining row can be among the best, or after `most` predictions.
        """
        least = self.least_s_of_rows
        order = np.argsort(least, kind="stable")
        first, size = 0, _FIRST_BLOCK
        while first < len(order) and least[order[first]] < self.limit:
            unseen_s = self._search(order[first : first + size], most)
            first, size = first + size, min(2 * size, _BLOCK)
            if unseen_s is not None:
                return self._gap(min([unseen_s, *least[order[first : first + 1]]]))
        return 0.0

    def _gap(self, unseen_s: float) -> float:
        best = min((one.prediction.step_time_s for one in self.found.values()), default=0.0)
        return max(0.0, 1 - unseen_s / best) if best else 1.0

    @cached_property
    def least_s_of_rows(self) -> Floats:
        """Lower bound on the step time of each row over all variants, in seconds."""
        every = np.arange(len(self.space.rows["tp"]))
        found = self._row_s(every, sequence=False, remat="none")
        divided = every[self.space.allows(every, True, "none")]
        found[divided] = np.minimum(found[divided], self._row_s(divided, sequence=True, remat="none"))
        return found

    def _row_s(self, rows: Ints, sequence: bool, remat: Remat) -> Floats:
        return np.asarray(self.bounds.least_s(self._at(rows), sequence, remat) * self._bubbles[rows])

    @cached_property
    def _bubbles(self) -> Floats:
        """Lower bound on a pipeline's ratio of step time to compute time, for each row."""
        rows, every = self.space.rows, np.arange(len(self.space.rows["tp"]))
        least = np.full(len(every), np.inf)
        for pipeline in PIPELINES:
            works = every[self.space.runs(every, pipeline)]
            least[works] = np.minimum(least[works], self.bounds.passes(self._at(works), pipeline)[0])
        return np.asarray(least * rows["pp"] / rows["microbatches"])

    def _search(self, rows: Ints, most: int) -> float | None:
        """Try all plans of these rows that may be among the best.

        Returns the smallest bound of an untried plan, or None if all were tried.
        """
        plans = self.plans_of(rows)
        plans = plans.at(np.argsort(plans.bound_s, kind="stable"))
        for i in range(len(plans)):
            if plans.bound_s[i] >= self.limit:
                return None
            if self.evaluated >= most:
                return float(plans.bound_s[i])
            choice = plans.choice(i)
            if choice not in self._seen:
                self._seen.add(choice)
                for settings in self.space.settings(choice.row):
                    self._evaluate(choice, settings)
        return None

    def plans_of(self, rows: Ints) -> PlanTable:
        """Return all plans of these rows that may be best, with their bounds."""
        return self._with_dp_fsdp(self._variants(rows))

    def _variants(self, rows: Ints) -> PlanTable:
        """Return the variants of these rows (pipeline, remat and sequence) that may be among the best."""
        tables = [self._variants_of(rows, sequence, remat) for sequence in (0, 1) for remat in range(len(REMATS))]
        return PlanTable.joined([part for some in tables for part in some])

    def _variants_of(self, rows: Ints, sequence: int, remat: int) -> list[PlanTable]:
        space, bounds = self.space, self.bounds
        rows = rows[space.allows(rows, bool(sequence), REMATS[remat])]
        least = self._row_s(rows, bool(sequence), REMATS[remat])
        rows, least = rows[least < self.limit], least[least < self.limit]
        fits = self.may_fit(rows, 0, sequence, remat)
        pipelines = sum(space.runs(rows[~fits], pipeline).astype(np.int64) for pipeline in PIPELINES)
        self.rejections.out_of_memory += int(np.sum(pipelines * space.factorisations[rows[~fits]]))
        rows, least = rows[fits], least[fits]
        cost = self._rank_costs_of(rows, bool(sequence), REMATS[remat])
        costs, table = self._costs_at(cost), self._at(rows)
        uneven = bounds.unevenness_s(costs, table["pp"], table["microbatches"])
        found = []
        for number, pipeline in enumerate(PIPELINES):
            some = np.flatnonzero(space.runs(rows, pipeline))
            work, hops = bounds.passes(self._at(rows[some]), pipeline)
            even = costs["seconds"][some] * work + costs["hop_s"][some] * hops
            times = np.maximum(even + uneven[some], least[some])
            may = times < self.limit
            if number:
                may[may] = self.may_fit(rows[some[may]], number, sequence, remat)
            some, times = some[may], times[may]
            ones = np.ones(len(some), np.int64)
            same = (number * ones, remat * ones, sequence * ones)
            found.append(PlanTable(rows[some], *same, cost[some], times, ones, 3 * ones))
        return found

    def may_fit(self, rows: Ints, pipeline: int, sequence: int, remat: int) -> NDArray[np.bool_]:
        """Return a mask of the rows that may fit the memory with this variant.

        Microbatches of one sample need the least memory. This case is therefore checked first, once for all rows with
        the same degrees.
        """

        def layout(row: int) -> Layout:
            tp, pp = int(self.space.rows["tp"][row]), int(self.space.rows["pp"][row])
            trace, cut = self.bounds.easier(tp, pp, PIPELINES[pipeline].chunks(pp))
            return self.layout_of(Choice(row, pipeline, remat, sequence, 1, 3), trace=trace, cut=cut)

        table = self._at(rows)
        degrees = (table[name] for name in ("tp", "cp", "ep", "pp", "shared"))
        keys, place = numbered(*degrees, (table["microbatches"] > 1).astype(np.int64))
        for key, first in zip(keys, np.unique(place, return_index=True)[1].tolist(), strict=True):
            if (*key, pipeline, remat, sequence) not in self._fits:
                found = self.bounds.fits(smallest(layout(int(rows[first]))))
                self._fits[(*key, pipeline, remat, sequence)] = found
        fits = np.array([self._fits[(*key, pipeline, remat, sequence)] for key in keys], np.bool_)[place]
        fits[fits] = [self.bounds.fits(layout(row)) for row in rows[fits].tolist()]
        return fits

    def _with_dp_fsdp(self, variants: PlanTable) -> PlanTable:
        """Expand variants to all factorisations of the data-parallel ranks into dp × fsdp, with each `zero`.

        Only plans that may be among the best are kept.
        """
        several, place = np.unique(self.space.rows["shared"][variants.row], return_inverse=True)
        ways = [
            np.array(
                [(fsdp, zero) for fsdp in divisors(int(n)) for zero in ((3, 2, 1) if fsdp > 1 else (3,))], np.int64
            )
            for n in several
        ]
        counts = np.array([len(some) for some in ways], np.int64)[place]
        plans = variants.at(np.repeat(np.arange(len(variants)), counts))
        if len(place):
            plans.fsdp, plans.zero = np.concatenate([ways[i] for i in place]).T
        # in a pipeline, the stages stay gathered during a step
        plans = plans.at((plans.zero == 3) | (self.space.rows["pp"][plans.row] == 1))
        may = np.ones(len(plans), np.bool_)
        for refused, refusal in self.space.shards_refused(plans.row, plans.pipeline):
            refused &= plans.fsdp > 1
            self.rejections.refuse(*refusal, int(refused.sum()))
            may &= ~refused
        plans = plans.at(may)
        costs, rows = self._costs_at(plans.cost), self._at(plans.row)
        plans.bound_s = plans.bound_s + self.bounds.beside_s(costs, rows, plans.fsdp, plans.zero)
        return plans.at(plans.bound_s < self.limit)

    def _evaluate(self, choice: Choice, settings: dict[str, Any]) -> None:
        """Predict a plan if it is valid and fits the memory."""
        layout = self.layout_of(choice, **settings)
        fits = self.bounds.fits(smallest(layout)) and self.bounds.fits(layout)
        if not fits or sum(memory(layout).values()) > usable_bytes(layout) or not host_fits(layout):
            self.rejections.out_of_memory += 1
        elif (refusal := self.space.legal.refusal(self.values_of(choice) | settings)) is not None:
            self.rejections.refuse(*refusal)
        else:
            self._keep(self.values_of(choice) | settings, layout)

    def values_of(self, choice: Choice) -> dict[str, Any]:
        """Return the keys and values of a plan."""
        rows, pipeline = self.space.rows, PIPELINES[choice.pipeline]
        return {
            **{name: int(rows[name][choice.row]) for name in ("tp", "cp", "ep", "pp", "microbatches")},
            "dp": int(rows["shared"][choice.row]) // choice.fsdp,
            "fsdp": choice.fsdp,
            "zero": choice.zero,
            "schedule": pipeline.schedule,
            "virtual": pipeline.virtual,
            "remat": REMATS[choice.remat],
            "sequence": bool(choice.sequence),
        }

    def layout_of(self, choice: Choice, **changed: Any) -> Layout:
        """Return a plan as numbers for the cost model, with changed values."""
        values = self.values_of(choice)
        del values["virtual"]
        values["trace"] = self._trace_at(values["tp"])
        values["chunks"] = PIPELINES[choice.pipeline].chunks(values["pp"])
        values["samples"] = float(self.space.rows["samples"][choice.row])
        changed["threads"] = changed.get("threads") or int(self.space.rows["threads"][choice.row])
        return self.layout.changed(**values | changed)

    def _trace_at(self, tp: int) -> ModelTrace:
        return self.layouts.trace_at(self.layout.precision, tp)

    def _keep(self, values: dict[str, Any], layout: Layout) -> None:
        self.evaluated += 1
        prediction = predict_layout(layout)
        key = tuple(values[name] for name in DEGREES)
        known = self.found.get(key)
        if prediction.step_time_s < self._last_s and (
            known is None or prediction.step_time_s < known.prediction.step_time_s
        ):
            plan = replace(self.space.base, **values)
            if (refusal := self.space.legal.out_of_memory(plan)) is not None:
                self.rejections.refuse(*refusal)
                return
            notes = (*prediction.notes, *((_OFFLOADED,) if layout.offload else ()))
            self.found[key] = Candidate(plan, layout, replace(prediction, fits=True, notes=notes))
        self._limit()

    def _limit(self) -> None:
        """Update the step time above which plans are not searched.

        After many predictions, only plans faster than the best plan are searched. Before that, slightly slower plans
        are searched for the list as well.
        """
        times = sorted(one.prediction.step_time_s for one in self.found.values())
        self._last_s = times[self.top - 1] if len(times) >= self.top else float("inf")
        if self.everything:
            return
        if self._filling or not times:
            self.limit = self._last_s
        else:
            self.limit = min(self._last_s, times[0] * _LISTED) if self.evaluated < _LIST_EVALUATIONS else times[0]

    def _at(self, rows: Ints) -> dict[str, NDArray[Any]]:
        return {key: column[rows] for key, column in self.space.rows.items()}

    def _rank_costs_of(self, rows: Ints, sequence: bool, remat: str) -> Ints:
        table = self._at(rows)
        sizes = table.pop("size")
        keys, place = numbered(table["tp"], table["cp"], table["ep"], table["threads"], sizes)
        samples = dict(zip(sizes.tolist(), table["samples"].tolist(), strict=True))
        found = []
        for tp, cp, ep, threads, size in keys:
            config = ShardConfig(tp, cp, ep, sequence, remat, samples[size], threads)
            if config not in self._rank_costs:
                self._rank_costs[config] = len(self._costs)
                self._costs.append(self.bounds.rank_cost(config))
            found.append(self._rank_costs[config])
        return np.array(found, np.int64)[place] if keys else np.zeros(0, np.int64)

    def _costs_at(self, costs: Ints) -> dict[str, Floats]:
        several, place = np.unique(costs, return_inverse=True)
        columns = np.array([self._costs[i] for i in several], np.float64).reshape(-1, len(RankCost._fields)).T
        return {name: column[place] for name, column in zip(RankCost._fields, columns, strict=True)}
