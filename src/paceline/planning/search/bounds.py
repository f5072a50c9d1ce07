"""Lower bounds on the time and memory of plans, from the cost model.

A bound is the cost model's prediction for an easier plan, which never exceeds the prediction for the plan itself. In
the easier plan, all stages take equal time, and the model is smaller with its whole state sharded. The time of
collectives is bounded with ranks that either compute nothing or compute long enough to hide the collectives. This file
repeats no formula of the cost model, so it does not change with the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cached_property
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.planning.cost.estimate import beside_passes_s
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.measured import added_by, calibration_of, passes_of
from paceline.planning.cost.memory import memory, usable_bytes
from paceline.planning.cost.stages import StageCost, hop_s, pipeline_s, stages
from paceline.planning.model.graph import BlockTrace, ModelTrace
from paceline.planning.plan import Remat
from paceline.planning.search.space import Ints, Pipeline, divisors, numbered

Floats = NDArray[np.float64]
# samples of a microbatch, large enough that matrix products reach their peak
_ENDLESS = 2.0**16
# Enough blocks that the traffic of a single one is negligible, enough parameters that latencies of blocks are
# negligible, too, and enough seconds of computing to hide all of this traffic
_BLOCKS, _PARAMETERS, _FOREVER = 1e10, 1e30, 1e45
# shares of a stage's time that its forward pass may take
_FORWARD = (1 / 4, 1 / 3, 1 / 2)


class ShardConfig(NamedTuple):
    """Parameters that determine the time of a microbatch on one rank."""

    tp: int
    cp: int
    ep: int
    sequence: bool
    remat: str
    samples: float
    threads: int


class RankCost(NamedTuple):
    """Cost of one microbatch through all blocks on one rank, without pipeline stages.

    Attributes:
        seconds: time of the forward and backward passes, in seconds.
        layer_s: time of both passes through a single layer, in seconds.
        dense: parameters per second of compute time, in the block with the lowest value.
        hop_s: time to send the microbatch to the next stage, in seconds.
    """

    seconds: float
    layer_s: float
    dense: float
    hop_s: float


class Bounds:
    """Lower bounds for the plans of one job on one cluster.

    Args:
        layout: layout of any plan of the job, for the values that all plans share.
        trace_at: function that returns the model's trace for a number of tp ranks.
    """

    def __init__(self, layout: Layout, trace_at: Callable[[int], ModelTrace]) -> None:
        self.layout = replace(layout, dp=1, fsdp=1, tp=1, pp=1, cp=1, ep=1, microbatches=1, chunks=1, cut=())
        counts = _kinds(layout.trace)
        self._kinds, self._counts = list(counts), list(counts.values())
        self.layers = max(self._counts)
        self._trace_at, self._each = trace_at, dict[int, ModelTrace]()
        self._rank_costs: dict[ShardConfig, RankCost] = {}
        self._fits: dict[tuple[Any, ...], bool] = {}
        self._easier: dict[tuple[int, int, int], tuple[ModelTrace, tuple[int, ...]]] = {}
        self._passes: dict[tuple[Pipeline, int], list[tuple[float, float]]] = {}
        self._beside: dict[tuple[int, ...], Floats] = {}

    @cached_property
    def capacity(self) -> float:
        """Memory that a plan may use on one device or CPU core, in bytes."""
        return usable_bytes(replace(self.layout, dp=self.layout.machines.devices))

    def rank_cost(self, config: ShardConfig) -> RankCost:
        """Return the rank cost of a shard config. The result is cached."""
        if config not in self._rank_costs:
            self._rank_costs[config] = self._computed(config)
        return self._rank_costs[config]

    def least_s(self, rows: Mapping[str, NDArray[Any]], sequence: bool, remat: Remat) -> Floats:
        """Return a lower bound on the time of a step for each row, in seconds.

        The bound uses the time per sample of very large microbatches.
        """
        keys, place = numbered(rows["tp"], rows["cp"], rows["ep"], rows["threads"])
        rates = [
            self.rank_cost(ShardConfig(tp, cp, ep, sequence, remat, _ENDLESS, threads)).seconds / _ENDLESS
            for tp, cp, ep, threads in keys
        ]
        return np.asarray(np.array(rates, np.float64)[place] * rows["samples"] * rows["microbatches"] / rows["pp"])

    def fits(self, layout: Layout) -> bool:
        """True if a layout fits the memory under some sharding over its data-parallel ranks."""
        shared = layout.dp * layout.fsdp
        degrees = layout.tp, layout.cp, layout.ep, layout.pp, shared, layout.microbatches, bool(layout.cut)
        key = (*degrees, layout.schedule, layout.chunks, layout.remat, layout.sequence)
        if key not in self._fits:
            usable = usable_bytes(layout)
            held = memory(layout.changed(dp=1, fsdp=shared, zero=3))
            whole = shared * (held["parameters"] + held["optimizer"])
            # with very few blocks, what `zero` leaves whole is less than the blocks that are gathered at once
            others = [(shared, 2), (shared, 1)] if layout.pp == 1 and shared > 1 else []
            others += [(1, 3)] if shared > 1 and whole <= usable else []
            self._fits[key] = sum(held.values()) <= usable or any(
                sum(memory(layout.changed(dp=shared // fsdp, fsdp=fsdp, zero=zero)).values()) <= usable
                for fsdp, zero in others
            )
        return self._fits[key]

    def easier(self, tp: int, pp: int, chunks: int) -> tuple[ModelTrace, tuple[int, ...]]:
        """Return a smaller model, and its cut into stages, as a lower bound on memory.

        Each stage has as many of the smallest layers as the smallest stage of an even cut. The last stage, which has
        the fewest microbatches in flight, has either the head or the additional layers of the fullest ranks, whichever
        is larger. With one stage, or more stages than layers, the result is the model itself.
        """
        if (tp, pp, chunks) not in self._easier:
            repeated = [i for i, count in enumerate(self._counts) if count > 1] or [self._counts.index(self.layers)]
            blocks, each = self._trace_at(tp).blocks, sum(self._counts[i] for i in repeated) // (pp * chunks)
            small = _smallest_of([self._each_at(tp).blocks[i] for i in repeated])
            layer = self._each_at(tp).blocks[self._counts.index(self.layers)]
            fuller = (layer,) * (-(-self.layers // pp) - each * (chunks - 1))
            last = max((blocks[-1],), fuller, key=lambda some: sum(block.parameters for block in some))
            whole = self._trace_at(tp)
            few = (*(small,) * (each * (pp * chunks - 1)), *last)
            smaller = ModelTrace(few, tokens=whole.tokens, plain_head=whole.plain_head)
            cut = (*(each,) * (pp * chunks - 1), len(last))
            self._easier[tp, pp, chunks] = (smaller, cut) if pp > 1 and each else (self._trace_at(tp), ())
        return self._easier[tp, pp, chunks]

    def passes(self, rows: Mapping[str, NDArray[Any]], pipeline: Pipeline) -> tuple[Floats, Floats]:
        """Return the numbers of microbatches and hops on the critical path of equal stages.

        Both numbers grow linearly with the number of microbatches.
        """
        several, place = np.unique(rows["pp"], return_inverse=True)
        keys = [(pipeline, pp) for pp in several.tolist()]
        self._passes |= {key: _passes(*key) for key in keys if key not in self._passes}
        first, more = np.moveaxis(np.array([self._passes[key] for key in keys]).reshape(-1, 2, 2)[place], 1, 0)
        work, hops = (first + (rows["microbatches"] - 1)[:, None] * (more - first)).T
        return work, hops

    def unevenness_s(self, costs: Mapping[str, Floats], pp: Ints, microbatches: Ints) -> Floats:
        """Return the additional time of a step because layers cannot be divided between stages.

        At least one rank has the mean number of layers, rounded up.
        """
        fullest = costs["layer_s"] * np.ceil(self.layers / pp)
        return np.asarray((microbatches - 1) * np.maximum(fullest - costs["seconds"] / pp, 0.0), np.float64)

    def beside_s(self, costs: Mapping[str, Floats], rows: Mapping[str, NDArray[Any]], fsdp: Ints, zero: Ints) -> Floats:
        """Return a lower bound on the update and the exposed collectives, in seconds."""
        apart = rows["tp"] * rows["cp"] * rows["ep"]
        keys, place = numbered(apart, rows["pp"], fsdp, rows["shared"] // fsdp, zero)
        if not keys:
            return np.zeros(0)
        for key in keys:
            if key not in self._beside:
                self._beside[key] = self._beside_by(*key)
        first, more = np.moveaxis(np.array([self._beside[key] for key in keys])[place], 1, 0)
        busy, hidden, endless = np.moveaxis(first + (rows["microbatches"] - 1)[:, None, None] * (more - first), 1, 0)
        seconds = costs["seconds"] / rows["pp"]
        parameters = (seconds * costs["dense"])[:, None]
        return np.asarray(np.maximum(busy * parameters + hidden * seconds[:, None], endless * parameters).sum(1))

    def _beside_by(self, apart: int, pp: int, fsdp: int, dp: int, zero: int) -> Floats:
        """Return coefficients of the fsdp, dp and update times for one and two microbatches.

        There are three coefficients: the seconds per parameter without compute, the change per second of compute, and
        the seconds per parameter if compute hides as much as possible.
        """
        # all of them as tp ranks, which share no weights
        layout = replace(self.layout, tp=apart, pp=pp, fsdp=fsdp, dp=dp, zero=zero)
        found = []
        for count in (1, 2):
            plan = replace(layout, microbatches=count)

            def seconds(passes_s: float, plan: Layout = plan) -> Floats:
                slow = StageCost(passes_s, passes_s, parameters=_PARAMETERS, blocks=_BLOCKS)
                return np.array(beside_passes_s(plan, slow))

            alone = seconds(0.0)
            little = max(1e-6 * float(alone.max()), 1e-9)
            endless = seconds(_FOREVER) / _PARAMETERS
            hidden = np.minimum((seconds(little) - alone) / little, 0.0)
            found.append([alone / _PARAMETERS, hidden, endless])
        return np.array(found) * (1 - 1e-6)

    def _computed(self, config: ShardConfig) -> RankCost:
        each = self._each_at(config.tp)
        layout = replace(self.layout, **config._asdict(), trace=each, cut=(1,) * len(self._counts))
        costs = stages(layout)
        total = StageCost(*[sum(map(mul, values, self._counts)) for values in zip(*costs, strict=True)])
        dense = [cost.parameters / seconds for cost in costs if (seconds := cost.forward + cost.backward) > 0]
        layer = costs[self._counts.index(self.layers)]
        return RankCost(
            total.forward + total.backward,
            layer.forward + layer.backward,
            min(dense, default=0.0),
            hop_s(replace(layout, pp=2)),
        )

    def _each_at(self, tp: int) -> ModelTrace:
        """Return a trace with one block of each kind, divided for `tp` ranks."""
        if tp not in self._each:
            blocks, there = self.layout.trace.blocks, self._trace_at(tp).blocks
            self._each[tp] = ModelTrace(tuple(there[blocks.index(kind)] for kind in self._kinds))
        return self._each[tp]


def _passes(pipeline: Pipeline, pp: int) -> list[tuple[float, float]]:
    """Return the lengths of the critical path with one and with two microbatches."""
    stage, none = 1 / (pp * pipeline.chunks(pp)), [0.0] * (pp * pipeline.chunks(pp))
    splits = [([part * stage] * len(none), [(1 - part) * stage] * len(none)) for part in _FORWARD]
    return [
        (
            min(pipeline_s(*split, count, 0.0, pp, pipeline.schedule) for split in splits),
            pipeline_s(none, none, count, 1.0, pp, pipeline.schedule),
        )
        for count in (1, 2)
    ]


def smallest(layout: Layout) -> Layout:
    """Return the layout with one sample per microbatch, which needs the least memory.

    A layout with a single microbatch is returned unchanged.
    """
    if layout.microbatches == 1:
        return layout
    return layout.changed(samples=1.0, microbatches=round(layout.samples * layout.microbatches))


def _smallest_of(blocks: list[BlockTrace]) -> BlockTrace:
    """Return a block that needs no more memory than any of the given blocks."""
    if len(blocks) == 1:
        return blocks[0]
    names = [field.name for field in fields(BlockTrace) if type(getattr(blocks[0], field.name)) in (int, float)]
    least = {name: min(getattr(block, name) for block in blocks) for name in names}
    return replace(blocks[0], gemms=(), trained=all(block.trained for block in blocks), **least)


def _kinds(trace: ModelTrace) -> dict[BlockTrace, int]:
    counts: dict[BlockTrace, int] = {}
    for block, count in trace.runs:
        counts[block] = counts.get(block, 0) + count
    return counts


class MeasuredBounds(Bounds):
    """Lower bounds for the plans of one job on a calibrated machine.

    Times are bounded with measured times, and memory as in the base class.
    """

    def least_s(self, rows: Mapping[str, NDArray[Any]], sequence: bool, remat: Remat) -> Floats:
        """Return a lower bound on the time of a step for each row, in seconds."""
        names = ("tp", "cp", "ep", "pp", "shared", "size")
        keys, place = numbered(*(rows[name] for name in names))
        samples = dict(zip(rows["size"].tolist(), rows["samples"].tolist(), strict=True))
        each = np.array(
            [self._microbatch_s(tp, cp, ep, pp, shared, samples[size], remat) for tp, cp, ep, pp, shared, size in keys]
        )
        return np.asarray(each[place] * rows["microbatches"]) if len(keys) else np.zeros(0)

    def rank_cost(self, config: ShardConfig) -> RankCost:
        """Return a rank cost of zero, because `least_s` already contains the measured times."""
        return RankCost(0.0, 0.0, 0.0, 0.0)

    def _microbatch_s(self, tp: int, cp: int, ep: int, pp: int, shared: int, samples: float, remat: Remat) -> float:
        trace = self._trace_at(tp)
        layout = replace(self.layout, trace=trace, tp=tp, cp=cp, ep=ep, pp=pp, dp=shared, samples=samples, remat=remat)
        found = calibration_of(layout)
        assert found is not None, "these bounds are for calibrated machines"
        passes = passes_of(layout, found)
        some = [added_by(one, found) for one in _shared_over(layout, shared)]
        share = min(one.share for one in some)
        # with another `zero`, fsdp's part of the overhead may be smaller
        each_s = min(one.each_s for one in some) if shared == 1 else min(0.0, *(one.each_s for one in some))
        return share * (passes.seconds + passes.again_s) / pp + each_s


def _shared_over(layout: Layout, shared: int) -> list[Layout]:
    factors = divisors(shared)
    some = {1, shared, factors[len(factors) // 2]}
    return [replace(layout, dp=shared // fsdp, fsdp=fsdp) for fsdp in some]
