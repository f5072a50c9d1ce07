"""Branch and bound over the space of plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.planner.cost.estimate import estimate
from paceline.planner.cost.layout import Layout
from paceline.planner.cost.measured import calibration_of
from paceline.planner.cost.memory import memory, usable_bytes
from paceline.planner.predict import Layouts
from paceline.planner.search.bounds import Bounds, Floats, MeasuredBounds, RankCost, ShardConfig
from paceline.planner.search.rejected import RejectionCounts
from paceline.planner.search.result import Candidate
from paceline.planner.search.space import Ints, Space, divisors, numbered
from paceline.plans.axes import DEGREES
from paceline.plans.choices import REMATS, SCHEDULES, Remat, stages_per_rank
from paceline.trace.graph import ModelTrace

# rows that are expanded together, most promising first
_FIRST_BLOCK, _BLOCK = 64, 4096
# slower plans, relative to the best, are not searched for the list
_LISTED = 1.1
# predictions after which only a possible best is searched, no longer the list
_LIST_EVALUATIONS = 300
# further plans that are tried if the list is too short
_FILL = 150
_OFFLOADED = "the way of the state to host memory and back (offload) is not in this time"
# number of tried plans that ends the search; the gap then says by how much the best may be missed
_MOST_EVALUATIONS = 8000
# the same on a calibrated machine, whose pipelines are simulated; if there are no more plans, all of them are tried
_MOST_MEASURED = 2000


@dataclass
class PlanTable:
    """Plan table: plans, or partial plans, with one array per column."""

    row: Ints
    schedule: Ints  # of `SCHEDULES`
    remat: Ints  # of `REMATS`
    sequence: Ints
    cost: Ints  # index of the rank cost
    bound_s: Floats
    needed: Floats  # bytes of activations
    fsdp: Ints
    zero: Ints

    def __len__(self) -> int:
        return len(self.row)

    def at(self, places: Any) -> PlanTable:
        """Rows at the given positions."""
        return PlanTable(*[getattr(self, name)[places] for name in self.__dataclass_fields__])

    def key(self, i: int) -> tuple[int, ...]:
        """Identity of the plan at a position."""
        columns = (self.row, self.schedule, self.remat, self.sequence, self.fsdp, self.zero)
        return tuple(int(column[i]) for column in columns)

    @classmethod
    def joined(cls, tables: list[PlanTable]) -> PlanTable:
        """Concatenation of several tables."""
        return cls(*[np.concatenate([getattr(part, name) for part in tables]) for name in cls.__dataclass_fields__])


class BranchAndBound:
    """Branch-and-bound search of the best plans.

    Attributes:
        found: for each set of degrees the best plan so far.
        rejections: counts of excluded plans.
        considered: number of plans in the space.
        evaluated: number of predicted plans.
    """

    def __init__(self, space: Space, layouts: Layouts, top: int) -> None:
        self.space, self.layouts, self.top = space, layouts, top
        self.found: dict[tuple[int, ...], Candidate] = {}
        self.evaluated = 0
        # what takes as long is of no interest any more
        self.limit = float("inf")
        self.layout = layouts.of(space.base)
        measured = calibration_of(self.layout) is not None
        self.bounds = (MeasuredBounds if measured else Bounds)(self.layout, self._trace_at)
        self.considered = int(space.plans_per_row.sum())
        self.rejections = RejectionCounts(self.bounds.capacity)
        self.most = _MOST_MEASURED if measured else _MOST_EVALUATIONS
        self.everything = measured and self.considered <= self.most
        self._rank_costs: list[RankCost] = []
        self._places: dict[ShardConfig, int] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._known_passes: dict[str, Floats] = {}
        self._filling = False
        self._last_s = float("inf")  # of the last one on the list

    def run(self) -> float:
        """Search; returns the gap."""
        gap = self._through_all(self.most)
        # of those that are much slower, the ones that promise most
        if len(self.found) < self.top:
            rejections, self.rejections = self.rejections, RejectionCounts(self.rejections.capacity)  # all were counted
            self._filling, self.limit = True, float("inf")
            self._through_all(len(self._seen) + _FILL)
            self.rejections = rejections
        return gap

    def _through_all(self, most: int) -> float:
        """Expand rows in the order of their bounds, and return the gap.

        It ends when no row can be of interest or `most` plans were tried.
        """
        least = self._least_s
        order = np.argsort(least, kind="stable")
        first, size = 0, _FIRST_BLOCK
        while first < len(order) and least[order[first]] < self.limit:
            unseen_s = self._search(order[first : first + size], most)
            first, size = first + size, _BLOCK
            if unseen_s is not None:
                return self._gap(min([unseen_s, *least[order[first : first + 1]]]))
        return 0.0

    def _gap(self, unseen_s: float) -> float:
        best = min((one.prediction.step_time_s for one in self.found.values()), default=0.0)
        return max(0.0, 1 - unseen_s / best) if best else 1.0

    @cached_property
    def _least_s(self) -> Floats:
        """Least seconds of each row, whatever its variants."""
        every = np.arange(len(self.space.rows["tp"]))
        found = self._row_s(every, sequence=False, remat="none")
        divided = every[self.space.allows(every, True, "none")]
        found[divided] = np.minimum(found[divided], self._row_s(divided, sequence=True, remat="none"))
        return found

    def _row_s(self, rows: Ints, sequence: bool, remat: Remat) -> Floats:
        """Least seconds of these rows."""
        return self.bounds.least_s({key: column[rows] for key, column in self.space.rows.items()}, sequence, remat)

    def _search(self, rows: Ints, most: int) -> float | None:
        """Try all plans of these rows that may be among the best.

        Returns the least bound of untried plans if there were too many, else None.
        """
        plans = self._with_dp_fsdp(self._variants(rows))
        plans = plans.at(np.argsort(plans.bound_s, kind="stable"))
        for i in range(len(plans)):
            if plans.bound_s[i] >= self.limit:
                return None
            if len(self._seen) >= most:
                return float(plans.bound_s[i])
            key = plans.key(i)
            if key not in self._seen:
                self._seen.add(key)
                for knobs in self.space.knobs(key[0]):
                    self._evaluate(key, knobs)
        return None

    def _variants(self, rows: Ints) -> PlanTable:
        """Variants of the rows: schedule, remat and sequence of possible best plans."""
        tables = [self._variants_of(rows, sequence, remat) for sequence in (0, 1) for remat in range(len(REMATS))]
        return PlanTable.joined([part for some in tables for part in some])

    def _variants_of(self, rows: Ints, sequence: int, remat: int) -> list[PlanTable]:
        space, bounds, table = self.space, self.bounds, self.space.rows
        rows = rows[space.allows(rows, bool(sequence), REMATS[remat])]
        least = self._row_s(rows, bool(sequence), REMATS[remat])
        rows, least = rows[least < self.limit], least[least < self.limit]
        cost = self._rank_costs_of(rows, bool(sequence), REMATS[remat])
        hopeful = self._of(cost, "seconds")[0] * table["microbatches"][rows] / table["pp"][rows] < self.limit
        rows, cost, least = rows[hopeful], cost[hopeful], least[hopeful]
        pp, microbatches, shared = (table[key][rows] for key in ("pp", "microbatches", "shared"))
        seconds, parameters, kept, repeated_kept, received, hop = self._of(
            cost, "seconds parameters kept repeated_kept received hop_s"
        )
        uneven = bounds.unevenness_s(seconds, self._of(cost, "repeated_s")[0], pp, microbatches)
        least_state = (
            np.maximum(parameters - bounds.layout.trace.tied, 0.0)
            / pp
            * bounds.state_bytes(np.ones_like(pp), np.ones_like(pp), shared, 3)
        )
        found = []
        for number, schedule in enumerate(SCHEDULES):
            works = space.runs(rows, schedule)
            work, hops = self._passes(rows, works, schedule)
            times = np.maximum(seconds * work + hop * hops + uneven, least)
            held = bounds.activations_bytes(kept, pp, microbatches, schedule)
            first = bounds.first_bytes(repeated_kept, pp, microbatches, schedule)
            held = np.maximum(held, first) + np.where(pp > 1, 2 * microbatches * received, 0.0)
            # gradients appear while activations are freed
            held[(pp == 1) & (microbatches == 1) & (shared == 1)] = 0.0
            out_of_memory = works & (least_state + held > bounds.model_capacity)
            self.rejections.count_out_of_memory(
                (least_state + held)[out_of_memory], space.factorisations[rows[out_of_memory]]
            )
            some = np.flatnonzero(works & ~out_of_memory & (times < self.limit))
            ones = np.ones(len(some), np.int64)
            same = (number * ones, remat * ones, sequence * ones)
            found.append(PlanTable(rows[some], *same, cost[some], times[some], held[some], ones, 3 * ones))
        return found

    def _with_dp_fsdp(self, variants: PlanTable) -> PlanTable:
        """Factorisations of the data-parallel ranks into dp × fsdp that may be best and fit."""
        space, bounds, table = self.space, self.bounds, self.space.rows
        several, place = np.unique(table["shared"][variants.row], return_inverse=True)
        ways = [divisors(int(n)) for n in several]
        counts = np.array([len(some) for some in ways], np.int64)[place]
        plans = variants.at(np.repeat(np.arange(len(variants)), counts))
        plans.fsdp = np.concatenate([np.array(ways[i], np.int64) for i in place]) if len(place) else plans.fsdp
        may = np.ones(len(plans), np.bool_)
        for refused, refusal in space.shares(plans.row, plans.fsdp, plans.schedule):
            self.rejections.refuse(*refusal, int(refused.sum()))
            may &= ~refused
        plans = plans.at(may)
        seconds, backward, dense = self._of(plans.cost, "seconds backward_s dense")
        pp, shared = table["pp"][plans.row], table["shared"][plans.row]
        shard = seconds / pp * dense / plans.fsdp
        plans.bound_s = plans.bound_s + bounds.optimizers_s(shard)
        apart = table["tp"][plans.row] * table["cp"][plans.row] * table["ep"][plans.row] * pp * plans.fsdp
        keys, place = numbered(apart, shared // plans.fsdp)
        sums = np.array([bounds.sum_s_per_byte(*key) for key in keys])[place] if len(keys) else np.zeros(0)
        sent = sums * shard * self.layout.sync_bytes / self.layout.sync_every
        plans.bound_s = plans.bound_s + np.maximum(
            sent - (backward / pp if self.layout.framework.overlaps_gradients else 0.0), 0.0
        )
        return PlanTable.joined([self._fitting(plans, zero) for zero in (3, 2, 1)])

    def _fitting(self, plans: PlanTable, zero: int) -> PlanTable:
        """Plans that may fit with this `zero`."""
        bounds, table = self.bounds, self.space.rows
        pp, microbatches = table["pp"][plans.row], table["microbatches"][plans.row]
        plans = plans.at(slice(None))
        plans.bound_s = plans.bound_s + self._gathered_s(plans, zero)
        meant = np.ones(len(plans), np.bool_) if zero == 3 else (plans.fsdp > 1) & (pp == 1)
        parameters, repeated = self._of(plans.cost, "parameters repeated")
        each = bounds.state_bytes(pp, microbatches, plans.fsdp, zero)
        tied, layer = bounds.layout.trace.tied / table["tp"][plans.row], repeated / bounds.layers
        held = each * np.where(pp > 1, layer * (bounds.layers // pp), parameters - tied) + plans.needed
        held += bounds.gathered_bytes(layer, pp, plans.fsdp, zero)
        out_of_memory = meant & (held > bounds.model_capacity)
        self.rejections.count_out_of_memory(held[out_of_memory], table["knobs"][plans.row[out_of_memory]])
        fitting = plans.at(np.flatnonzero(meant & (held <= bounds.model_capacity) & (plans.bound_s < self.limit)))
        fitting.zero = np.full(len(fitting), zero)
        return fitting

    def _gathered_s(self, plans: PlanTable, zero: int) -> Floats:
        """FSDP all-gather and reduce-scatter time that compute cannot overlap; 0 with a pipeline."""
        bounds, table, layout = self.bounds, self.space.rows, self.layout
        seconds, parameters = self._of(plans.cost, "seconds parameters")
        keys, place = numbered(table["tp"][plans.row] * table["cp"][plans.row] * table["ep"][plans.row], plans.fsdp)
        per_byte = np.array([bounds.sum_s_per_byte(*key) / 2 for key in keys])[place] if len(keys) else np.zeros(0)
        gathers, times = (2, table["microbatches"][plans.row]) if zero == 3 else (1, 1)
        each = gathers * min(layout.parameter_bytes, layout.number_bytes) + layout.sync_bytes
        unhidden: Floats = times * np.maximum(per_byte * parameters * each - seconds, 0.0)
        return np.where(table["pp"][plans.row] == 1, unhidden, 0.0)

    def _evaluate(self, key: tuple[int, ...], knobs: dict[str, Any]) -> None:
        """Predict a plan if it is legal and fits, and keep the best. The best is kept for each set of degrees."""
        row, schedule, remat, sequence, fsdp, zero = key
        values: dict[str, Any] = {
            name: int(self.space.rows[name][row]) for name in ("tp", "cp", "ep", "pp", "microbatches")
        }
        values |= {"dp": int(self.space.rows["shared"][row]) // fsdp, "fsdp": fsdp, "zero": zero}
        values |= {"schedule": SCHEDULES[schedule], "remat": REMATS[remat], "sequence": bool(sequence)}
        if (refusal := self.space.legal.refusal(values | knobs)) is not None:
            self.rejections.refuse(*refusal)
            return
        layout = self._layout(values, knobs, row)
        needed = sum(memory(layout).values())
        if needed > usable_bytes(layout):
            self.rejections.count_out_of_memory(np.array([needed]), np.array([1]))
            return
        self._keep(values | knobs, layout)

    def _trace_at(self, tp: int) -> ModelTrace:
        return self.layouts.trace_at(self.layout.precision, tp)

    def _layout(self, values: dict[str, Any], knobs: dict[str, Any], row: int) -> Layout:
        more: dict[str, Any] = {"threads": knobs.get("threads") or int(self.space.rows["threads"][row])}
        more |= {"transport": knobs["transport"]} if "transport" in knobs else {}
        more["trace"] = self._trace_at(values["tp"])
        chunks = stages_per_rank(values["schedule"]) if values["pp"] > 1 else 1
        return replace(self.layout, **values, samples=float(self.space.rows["samples"][row]), chunks=chunks, **more)

    def _keep(self, values: dict[str, Any], layout: Layout) -> None:
        self.evaluated += 1
        prediction = estimate(layout)
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
        """Update the time limit of interesting plans.

        The list of the best is searched as long as that needs few predictions, and only for little slower plans.
        """
        times = sorted(one.prediction.step_time_s for one in self.found.values())
        self._last_s = times[self.top - 1] if len(times) >= self.top else float("inf")
        if self.everything:
            return
        if self._filling or not times:
            self.limit = self._last_s
        else:
            self.limit = min(self._last_s, times[0] * _LISTED) if self.evaluated < _LIST_EVALUATIONS else times[0]

    def _passes(self, rows: Ints, works: NDArray[np.bool_], schedule: str) -> tuple[Floats, Floats]:
        """Critical-path microbatches and hops of the rows that a schedule can run."""
        keys, place = self._pipelines
        known = self._known_passes.setdefault(schedule, np.full((len(keys), 2), np.nan))
        places = place[rows]
        for i in np.unique(places[works & np.isnan(known[places, 0])]):
            pp, microbatches = keys[i]
            known[i] = self.bounds.passes(pp, microbatches, schedule)
        return known[places, 0], known[places, 1]

    @cached_property
    def _pipelines(self) -> tuple[list[tuple[int, ...]], Ints]:
        return numbered(self.space.rows["pp"], self.space.rows["microbatches"])

    @cached_property
    def _likeness(self) -> Ints:
        """A number for each row, equal if ranks do the same with a microbatch."""
        table = self.space.rows
        return numbered(*(table[key] for key in ("tp", "cp", "ep", "threads", "size")))[1]

    def _rank_costs_of(self, rows: Ints, sequence: bool, remat: str) -> Ints:
        """Index of each row's rank cost."""
        first, place = np.unique(self._likeness[rows], return_index=True, return_inverse=True)[1:]
        return np.array([self._rank_cost(sequence, remat, int(row)) for row in rows[first]], np.int64)[place]

    def _rank_cost(self, sequence: bool, remat: str, row: int) -> int:
        tp, cp, ep, threads = (int(self.space.rows[key][row]) for key in ("tp", "cp", "ep", "threads"))
        config = ShardConfig(tp, cp, ep, sequence, remat, float(self.space.rows["samples"][row]), threads)
        place = self._places.get(config)
        if place is None:
            place = self._places[config] = len(self._rank_costs)
            self._rank_costs.append(self.bounds.rank_cost(config))
        return place

    def _of(self, costs: Ints, names: str) -> list[Floats]:
        """Attributes of the rank costs at these indices."""
        several, place = np.unique(costs, return_inverse=True)
        return [
            np.array([getattr(self._rank_costs[i], name) for i in several], np.float64)[place] for name in names.split()
        ]
