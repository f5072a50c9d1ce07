"""Lower bounds of a plan's time and memory, which keep the search exact.

A bound is admissible: never above the prediction. Time: the work of a microbatch, evenly over the stages, as often as
it is on the schedule's critical path; one pass of the optimizer; and the part of the gradients' sum that no backward
pass can overlap. Memory: the state and the activations of an average rank, or of the pipeline's first one, which has
the most microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.planner.cost.layout import Layout
from paceline.planner.cost.measured import added_by, calibration_of, passes_of
from paceline.planner.cost.memory import FRAGMENTS, GATHERED_AT_ONCE, RUNTIME_BYTES, memory, usable_bytes
from paceline.planner.cost.pipeline import hop_s, pipeline_s
from paceline.planner.cost.stages import StageCost, stages
from paceline.planner.cost.traffic import all_reduce_s, link_path
from paceline.planner.search.space import Ints, divisors, numbered
from paceline.plans.choices import V_SCHEDULES, Remat, stages_per_rank
from paceline.trace.graph import BlockTrace, ModelTrace

Floats = NDArray[np.float64]
# samples of a microbatch so large that matrix products reach their peak
_ENDLESS = 2.0**16
# fraction of the state that is certain, since stages are not quite even
_CERTAIN = 0.97


class ShardConfig(NamedTuple):
    """Shard config: everything that a rank's work and state inside a stage depend on."""

    tp: int
    cp: int
    ep: int
    sequence: bool
    remat: str
    samples: float
    threads: int


@dataclass(frozen=True)
class RankCost:
    """Rank cost: all blocks on one rank of tp, cp and ep.

    Attributes:
        forward_s, backward_s: seconds of one microbatch; `repeated_s`: both, for the layers.
        parameters: parameters on the rank, of which `repeated` are in layers.
        dense: parameters per second of work: the least of any block.
        kept: bytes of one microbatch for its backward pass, of which `repeated_kept` are in layers.
        received: bytes of one microbatch that are sent to the next stage.
        hop_s: least seconds of sending them.
    """

    forward_s: float
    backward_s: float
    repeated_s: float
    parameters: float
    repeated: float
    dense: float
    kept: float
    repeated_kept: float
    received: float
    hop_s: float

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


class Bounds:
    """Bounds of the plans of one job on one cluster.

    Args:
        layout: of any plan: everything that plans have in common is taken from it.
        trace_at: the model's trace as that many ranks of tp divide it.
    """

    def __init__(self, layout: Layout, trace_at: Callable[[int], ModelTrace]) -> None:
        self.layout = replace(layout, dp=1, fsdp=1, tp=1, pp=1, cp=1, ep=1, microbatches=1, chunks=1, cut=())
        kinds = _kinds(layout.trace)
        self._kinds, self._counts = list(kinds), list(kinds.values())
        self._trace_at, self._each = trace_at, dict[int, ModelTrace]()
        self.layers = max(self._counts)
        self._samples: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}
        self._rank_costs: dict[ShardConfig, RankCost] = {}
        self._passes: dict[tuple[int, int, str], tuple[float, float]] = {}
        self._sums: dict[tuple[int, int], float] = {}

    @cached_property
    def capacity(self) -> float:
        """Bytes of a device that a plan may use; on CPUs those of one core."""
        machines = self.layout.machines
        return usable_bytes(replace(self.layout, dp=machines.devices, fsdp=1, tp=1, pp=1, cp=1, ep=1))

    @cached_property
    def model_capacity(self) -> float:
        """Bytes of a device without its runtime. On CPUs a rank may have the memory of idle cores: infinite."""
        return self.capacity - RUNTIME_BYTES if self.layout.machines.device.is_gpu else float("inf")

    def rank_cost(self, config: ShardConfig) -> RankCost:
        """Rank cost of a shard config, computed once."""
        found = self._rank_costs.get(config)
        if found is None:
            found = self._rank_costs[config] = self._computed(config)
        return found

    def rate_s(self, tp: int, cp: int, ep: int, threads: int, sequence: bool, remat: str) -> float:
        """Seconds per sample of all blocks on one rank, with the best microbatch size."""
        return self.rank_cost(ShardConfig(tp, cp, ep, sequence, remat, _ENDLESS, threads)).seconds / _ENDLESS

    def least_s(self, rows: Mapping[str, NDArray[Any]], sequence: bool, remat: Remat) -> Floats:
        """Least seconds of a step for each row of degrees, with the best microbatch size."""
        keys, place = numbered(rows["tp"], rows["cp"], rows["ep"], rows["threads"])
        rate = np.array([self.rate_s(tp, cp, ep, threads, sequence, remat) for tp, cp, ep, threads in keys])
        return (
            np.asarray(rate[place] * rows["samples"] * rows["microbatches"] / rows["pp"]) if len(keys) else np.zeros(0)
        )

    def passes(self, pp: int, microbatches: int, schedule: str) -> tuple[float, float]:
        """Numbers of microbatches and of hops on the critical path of even stages."""
        key = pp, microbatches, schedule
        found = self._passes.get(key)
        if found is None:
            chunks = stages_per_rank(schedule) if pp > 1 else 1
            even, none = [0.5 / pp / chunks] * (pp * chunks), [0.0] * (pp * chunks)
            work = pipeline_s(even, even, microbatches, 0.0, pp, schedule)
            found = self._passes[key] = work, pipeline_s(none, none, microbatches, 1.0, pp, schedule)
        return found

    def unevenness_s(self, seconds: Floats, repeated_s: Floats, pp: Ints, microbatches: Ints) -> Floats:
        """Additional seconds because layers are whole. Some rank has at least an even number of layers, rounded up."""
        fullest = repeated_s / self.layers * np.ceil(self.layers / pp)
        return np.asarray((microbatches - 1) * np.maximum(fullest - seconds / pp, 0.0), np.float64)

    def optimizers_s(self, parameters: Floats) -> Floats:
        """Seconds in which the optimizer reads state, parameters and gradients and writes the first two."""
        layout = self.layout
        each = 2 * layout.parameter_bytes + layout.gradient_bytes + 2 * layout.optimizer_bytes
        machines = layout.machines
        # one rank may compute with all of them
        cores = machines.per_host if machines.device.is_core else 1
        fastest = machines.device.memory_bandwidth * cores
        seconds: Floats = _CERTAIN * parameters * each / fastest
        return seconds

    def sum_s_per_byte(self, apart: int, dp: int) -> float:
        """Seconds per byte of the gradients' all-reduce, without latency.

        `apart` is the distance between the ranks of neighbouring replicas.
        """
        key = apart, dp
        if key not in self._sums:
            over = link_path(replace(self.layout, fsdp=apart, dp=dp), "dp")
            self._sums[key] = (all_reduce_s(2e9, over) - all_reduce_s(1e9, over)) / 1e9 if dp > 1 else 0.0
        return self._sums[key]

    def state_bytes(self, pp: Ints, microbatches: Ints, fsdp: Ints, zero: int) -> Floats:
        """State bytes per parameter of a rank, between and during steps.

        Gathered tensors that stay during a step are included.
        """
        layout = self.layout
        divided, pipelined = fsdp > 1, pp > 1
        shared = (layout.parameter_bytes + layout.gradient_bytes + layout.optimizer_bytes) / fsdp
        narrow = np.where(divided & (pipelined | (zero < 3)), min(layout.parameter_bytes, layout.number_bytes), 0.0)
        beside = np.where(divided & (microbatches > 1) & (pipelined | (zero == 1)), layout.gradient_bytes, 0.0)
        return np.asarray(np.where(divided & layout.offload, 0.0, shared) + narrow + beside, np.float64)

    def gathered_bytes(self, layer: Floats, pp: Ints, fsdp: Ints, zero: int) -> Floats:
        """Bytes of a layer that fsdp gathers, with its gradients.

        A pipeline's stage has all its parameters whole, which `state_bytes` counts.
        """
        narrow = min(self.layout.parameter_bytes, self.layout.number_bytes)
        whole = (pp > 1) | (zero < 3)
        gathered: Floats = layer * (
            narrow + self.layout.gradient_bytes + np.where(whole, 0.0, GATHERED_AT_ONCE * narrow)
        )
        return np.where(fsdp > 1, (1 + FRAGMENTS) * gathered, 0.0)

    def activations_bytes(self, kept: Floats, pp: Ints, microbatches: Ints, schedule: str) -> Floats:
        """Lower bound on the activation bytes in flight on an average rank."""
        flight = 1.0 * microbatches if schedule == "gpipe" else np.maximum(0.5 * np.minimum(microbatches, pp), 1.0)
        activations: Floats = kept / pp * np.where(pp > 1, flight, 1.0)
        return activations

    def first_bytes(self, repeated_kept: Floats, pp: Ints, microbatches: Ints, schedule: str) -> Floats:
        """Lower bound on the activation bytes in flight on the pipeline's first rank.

        It holds if that has no fewer layers than the smallest stage of an even cut.
        """
        chunks = stages_per_rank(schedule)
        layers = self.layers // (pp * chunks)
        if schedule in V_SCHEDULES:
            flight = np.minimum(microbatches, 2 * pp) + 1
        elif schedule == "interleaved":
            flight = np.minimum(3 * pp - 1, 2 * microbatches)
        else:
            flight = microbatches if schedule == "gpipe" else np.minimum(microbatches, pp)
        activations: Floats = repeated_kept / self.layers * layers * np.where(pp > 1, flight, 1.0)
        return activations

    def _computed(self, config: ShardConfig) -> RankCost:
        layout = replace(self.layout, **config._asdict())
        each = self._each_at(config.tp)
        costs = stages(replace(layout, trace=each, cut=(1,) * len(self._counts)))
        total = StageCost(*[sum(map(mul, values, self._counts)) for values in zip(*costs, strict=True)])
        dense = [cost.parameters / seconds for cost in costs if (seconds := cost.forward + cost.backward) > 0]
        kept, hops = self._per_sample(layout)
        layer, sample = self._counts.index(self.layers), config.samples * layout.number_bytes / config.cp
        return RankCost(
            forward_s=total.forward,
            backward_s=total.backward,
            repeated_s=(costs[layer].forward + costs[layer].backward) * self.layers,
            parameters=total.parameters,
            repeated=costs[layer].parameters * self.layers,
            dense=min(dense, default=0.0),
            kept=sum(map(mul, kept, self._counts)) * config.samples,
            repeated_kept=kept[layer] * self.layers * config.samples,
            received=each.blocks[layer].boundary / (config.tp if config.sequence else 1) * sample,
            hop_s=max(0.0, hops[0] + (hops[1] - hops[0]) * (config.samples - 1)),
        )

    def _each_at(self, tp: int) -> ModelTrace:
        """One block of each kind, as `tp` ranks divide it."""
        if tp not in self._each:
            blocks, there = self.layout.trace.blocks, self._trace_at(tp).blocks
            self._each[tp] = ModelTrace(tuple(there[blocks.index(kind)] for kind in self._kinds))
        return self._each[tp]

    def _per_sample(self, layout: Layout) -> tuple[list[float], list[float]]:
        """Bytes per sample that each block kind saves, and seconds of one and two hops.

        The hops send one and two samples to a stage.
        """
        key = layout.tp, layout.cp, layout.ep, layout.sequence, layout.remat
        found = self._samples.get(key)
        if found is None:
            one = replace(layout, samples=1.0, microbatches=2)
            twice = [
                ModelTrace((block,) * min(count, 2))
                for block, count in zip(self._each_at(layout.tp).blocks, self._counts, strict=True)
            ]
            kept = [
                (1 + FRAGMENTS) * memory(replace(one, trace=trace))["activations"] / len(trace.blocks)
                for trace in twice
            ]
            found = self._samples[key] = kept, [hop_s(replace(layout, pp=2, samples=samples)) for samples in (1.0, 2.0)]
        return found


def _kinds(trace: ModelTrace) -> dict[BlockTrace, int]:
    """The distinct blocks with their counts."""
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
        """Rank cost without times, of which `least_s` has the measured ones."""
        return replace(super().rank_cost(config), forward_s=0.0, backward_s=0.0, repeated_s=0.0, dense=0.0, hop_s=0.0)

    def sum_s_per_byte(self, apart: int, dp: int) -> float:
        """No seconds: what a calibration point's update sent is in its times already."""
        return 0.0

    def _microbatch_s(self, tp: int, cp: int, ep: int, pp: int, shared: int, samples: float, remat: Remat) -> float:
        """Least seconds of a rank's work for one microbatch."""
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
    """Layouts of the kinds of factorisations of data-parallel ranks into dp × fsdp."""
    factors = divisors(shared)
    some = {1, shared, factors[len(factors) // 2]}
    return [replace(layout, dp=shared // fsdp, fsdp=fsdp) for fsdp in some]
