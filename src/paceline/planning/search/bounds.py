"""Lower bounds of a plan's time and memory, from the cost model's own functions.

A bound is what the model predicts of an easier plan, never above the prediction: blocks without replicas, in stages of
equal time; collectives of a rank that computes nothing, or so long that it hides them; the memory of a smaller model
with all of its state sharded. No formula of the model is repeated here, so none has to be changed with it.
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
# samples of a microbatch so large that matrix products reach their peak
_ENDLESS = 2.0**16
# Blocks so many that one's own traffic does not count, with parameters so many more that latencies of blocks do not,
# and seconds of computing that hide the traffic of all of these
_BLOCKS, _PARAMETERS, _FOREVER = 1e10, 1e30, 1e45
# parts of a stage's time that its forward pass may take
_FORWARD = (1 / 4, 1 / 3, 1 / 2)


class ShardConfig(NamedTuple):
    """Shard config: everything that a microbatch's time on a rank depends on."""

    tp: int
    cp: int
    ep: int
    sequence: bool
    remat: str
    samples: float
    threads: int


class RankCost(NamedTuple):
    """Rank cost: one microbatch through all blocks on one rank of tp, cp and ep.

    Attributes:
        seconds: forward and backward passes; `layer_s`: those of one layer.
        dense: parameters per second of work: the least of any block.
        hop_s: seconds to send it to a next stage.
    """

    seconds: float
    layer_s: float
    dense: float
    hop_s: float


class Bounds:
    """Bounds of the plans of one job on one cluster.

    Args:
        layout: of any plan: everything that plans have in common is taken from it.
        trace_at: the model's trace as that many ranks of tp divide it.
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
        """Bytes of a device that a plan may use; on CPUs those of one core."""
        return usable_bytes(replace(self.layout, dp=self.layout.machines.devices))

    def rank_cost(self, config: ShardConfig) -> RankCost:
        """Rank cost of a shard config, computed once."""
        if config not in self._rank_costs:
            self._rank_costs[config] = self._computed(config)
        return self._rank_costs[config]

    def least_s(self, rows: Mapping[str, NDArray[Any]], sequence: bool, remat: Remat) -> Floats:
        """Least seconds of a step for each row, at the rate of very large microbatches."""
        keys, place = numbered(rows["tp"], rows["cp"], rows["ep"], rows["threads"])
        rates = [
            self.rank_cost(ShardConfig(tp, cp, ep, sequence, remat, _ENDLESS, threads)).seconds / _ENDLESS
            for tp, cp, ep, threads in keys
        ]
        return np.asarray(np.array(rates, np.float64)[place] * rows["samples"] * rows["microbatches"] / rows["pp"])

    def fits(self, layout: Layout) -> bool:
        """True if some way to shard this layout's state fits: all of it, or none."""
        shared = layout.dp * layout.fsdp
        degrees = layout.tp, layout.cp, layout.ep, layout.pp, shared, layout.microbatches, bool(layout.cut)
        key = (*degrees, layout.schedule, layout.chunks, layout.remat, layout.sequence)
        if key not in self._fits:
            usable = usable_bytes(layout)
            held = memory(layout.changed(dp=1, fsdp=shared, zero=3))
            whole = shared * (held["parameters"] + held["optimizer"])
            # what `zero` leaves whole is less than the blocks that are gathered at once where there are very few
            others = [(shared, 2), (shared, 1)] if layout.pp == 1 and shared > 1 else []
            others += [(1, 3)] if shared > 1 and whole <= usable else []
            self._fits[key] = sum(held.values()) <= usable or any(
                sum(memory(layout.changed(dp=shared // fsdp, fsdp=fsdp, zero=zero)).values()) <= usable
                for fsdp, zero in others
            )
        return self._fits[key]

    def easier(self, tp: int, pp: int, chunks: int) -> tuple[ModelTrace, tuple[int, ...]]:
        """A smaller model and its cut, which needs less memory in so many stages.

        Each stage has as many of the smallest layers as the smallest of an even cut. The last, with the fewest
        microbatches in flight, has the head alone, or those layers by which some rank has more, whichever are larger.
        With one stage, or more than layers, it is the model itself.
        """
        if (tp, pp, chunks) not in self._easier:
            repeated = [i for i, count in enumerate(self._counts) if count > 1] or [self._counts.index(self.layers)]
            blocks, each = self._trace_at(tp).blocks, sum(self._counts[i] for i in repeated) // (pp * chunks)
            small = _smallest_of([self._each_at(tp).blocks[i] for i in repeated])
            layer = self._each_at(tp).blocks[self._counts.index(self.layers)]
            fuller = (layer,) * (-(-self.layers // pp) - each * (chunks - 1))
            last = max((blocks[-1],), fuller, key=lambda some: sum(block.parameters for block in some))
            smaller = ModelTrace((*(small,) * (each * (pp * chunks - 1)), *last))
            cut = (*(each,) * (pp * chunks - 1), len(last))
            self._easier[tp, pp, chunks] = (smaller, cut) if pp > 1 and each else (self._trace_at(tp), ())
        return self._easier[tp, pp, chunks]

    def passes(self, rows: Mapping[str, NDArray[Any]], pipeline: Pipeline) -> tuple[Floats, Floats]:
        """Microbatches and hops on the critical path of even stages. Both grow evenly with the microbatches."""
        several, place = np.unique(rows["pp"], return_inverse=True)
        keys = [(pipeline, pp) for pp in several.tolist()]
        self._passes |= {key: _passes(*key) for key in keys if key not in self._passes}
        first, more = np.moveaxis(np.array([self._passes[key] for key in keys]).reshape(-1, 2, 2)[place], 1, 0)
        work, hops = (first + (rows["microbatches"] - 1)[:, None] * (more - first)).T
        return work, hops

    def unevenness_s(self, costs: Mapping[str, Floats], pp: Ints, microbatches: Ints) -> Floats:
        """Additional seconds because layers are whole. Some rank has at least an even number of layers, rounded up."""
        fullest = costs["layer_s"] * np.ceil(self.layers / pp)
        return np.asarray((microbatches - 1) * np.maximum(fullest - costs["seconds"] / pp, 0.0), np.float64)

    def beside_s(self, costs: Mapping[str, Floats], rows: Mapping[str, NDArray[Any]], fsdp: Ints, zero: Ints) -> Floats:
        """Least seconds of the update, and of collectives that compute cannot hide."""
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
        """Seconds of fsdp, dp and update with one microbatch, and with two.

        For each of these: seconds per parameter where nothing is computed; how much less for a second of computing in
        either pass; and seconds per parameter where all is hidden that can be.
        """
        # all of them as ranks of tp, which have no weights in common
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
        """One block of each kind, as `tp` ranks divide it."""
        if tp not in self._each:
            blocks, there = self.layout.trace.blocks, self._trace_at(tp).blocks
            self._each[tp] = ModelTrace(tuple(there[blocks.index(kind)] for kind in self._kinds))
        return self._each[tp]


def _passes(pipeline: Pipeline, pp: int) -> list[tuple[float, float]]:
    """Microbatches and hops on the critical path, with one microbatch and with two."""
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
    """The layout with microbatches of one sample, which need the least memory.

    A single microbatch stays one.
    """
    if layout.microbatches == 1:
        return layout
    return layout.changed(samples=1.0, microbatches=round(layout.samples * layout.microbatches))


def _smallest_of(blocks: list[BlockTrace]) -> BlockTrace:
    """A block that holds and keeps no more than any of these."""
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
    """Bounds of the plans of one job on a calibrated machine. Those of memory are the catalogue's."""

    def least_s(self, rows: Mapping[str, NDArray[Any]], sequence: bool, remat: Remat) -> Floats:
        """Least seconds of a step for each row of degrees."""
        names = ("tp", "cp", "ep", "pp", "shared", "size")
        keys, place = numbered(*(rows[name] for name in names))
        samples = dict(zip(rows["size"].tolist(), rows["samples"].tolist(), strict=True))
        each = np.array(
            [self._microbatch_s(tp, cp, ep, pp, shared, samples[size], remat) for tp, cp, ep, pp, shared, size in keys]
        )
        return np.asarray(each[place] * rows["microbatches"]) if len(keys) else np.zeros(0)

    def rank_cost(self, config: ShardConfig) -> RankCost:
        """No times: those that `least_s` has were measured, with collectives."""
        return RankCost(0.0, 0.0, 0.0, 0.0)

    def _microbatch_s(self, tp: int, cp: int, ep: int, pp: int, shared: int, samples: float, remat: Remat) -> float:
        trace = self._trace_at(tp)
        layout = replace(self.layout, trace=trace, tp=tp, cp=cp, ep=ep, pp=pp, dp=shared, samples=samples, remat=remat)
        found = calibration_of(layout)
        assert found is not None, "these bounds are for calibrated machines"
        passes = passes_of(layout, found)
        some = [added_by(one, found) for one in _shared_over(layout, shared)]
        share = min(one.share for one in some)
        # fsdp's part of the overhead may be smaller with other `zero`
        each_s = min(one.each_s for one in some) if shared == 1 else min(0.0, *(one.each_s for one in some))
        return share * (passes.seconds + passes.again_s) / pp + each_s


def _shared_over(layout: Layout, shared: int) -> list[Layout]:
    factors = divisors(shared)
    some = {1, shared, factors[len(factors) // 2]}
    return [replace(layout, dp=shared // fsdp, fsdp=fsdp) for fsdp in some]
