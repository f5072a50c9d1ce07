"""The simple predictor that the cost model has to beat: 19 fitted numbers and no constant of a framework or table.

FLOPs at a fitted utilisation per family of devices, memory-bound terms, launches, exposed communication at the links'
bandwidth, and the formula of the pipeline's bubble. It is given what any tool must know: the layout of a row,
data-sheet figures, and sums over the model's trace. It is fitted, left out and calibrated by the same runs as the cost
model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from paceline.cluster.catalogue import Accelerator
from paceline.planning.cost.compute import family_of, peak_flops
from paceline.planning.cost.layout import Layout
from paceline.planning.machines import Adjustment, regression
from published_rows import Row, source

# name: assumed value, and spread of its logarithm
PRIOR = {
    "u_VOLTA": (0.60, 0.2),
    "u_AMPERE": (0.68, 0.2),
    "u_HOPPER": (0.58, 0.2),
    "u_BLACKWELL": (0.58, 0.2),
    "u_TPU": (0.62, 0.2),
    "u_CDNA": (0.50, 0.2),
    "u_OTHER": (0.50, 0.3),
    # share that products below 16 bits reach of their peak, and wide ones, relative to 16-bit products; convolutions
    "low": (0.80, 0.2),
    "wide": (1.0, 0.2),
    "convolution": (0.7, 0.3),
    # products whose least dimension is this reach half of the utilisation; attention's speed relative to products
    "half": (300.0, 0.6),
    "attention": (0.6, 0.3),
    # passes over elements of other kernels and of stored scores; seconds of a launch
    "vector": (1.3, 0.4),
    "scores": (1.0, 0.4),
    "launch": (6e-6, 0.5),
    # share of the links' rates, inside and between hosts; share of compute that hides gradients; latency
    "inside": (0.65, 0.3),
    "between": (0.55, 0.4),
    "hide": (0.6, 0.3),
    "latency": (4e-5, 0.5),
}
NAMES = tuple(PRIOR)
ASSUMED = {name: value for name, (value, _) in PRIOR.items()}
SPREADS = {name: spread for name, (_, spread) in PRIOR.items()}
RUN_SPREAD = 0.08


class Facts:
    """Sums over a row's layout; `seconds` with given constants is then a few multiplications."""

    def __init__(self, layout: Layout) -> None:
        trace, device = layout.trace, layout.machines.device
        self.family = "u_" + family_of(device)
        self.count, self.pp, self.chunks = layout.microbatches, layout.pp, layout.chunks
        self.fills = layout.schedule in ("zero-bubble", "dualpipe")
        layers = [block for block in trace.blocks if block.kind not in ("embedding", "head")]
        share, samples = 1 / (layout.tp * layout.pp * layout.cp), layout.samples
        again = layout.remat_share if layout.remat == "block" else 0.15 if layout.remat == "selective" else 0.0
        self.passes = (2 if layout.lora else 3) + again
        attention = sum(gemm.flops for block in trace.blocks for gemm in block.gemms if gemm.batch)
        head = sum(gemm.flops for block in trace.blocks if block.kind == "head" for gemm in block.gemms)
        products = trace.flops - attention
        self.low_flops = (products - head) * samples * share if layout.products else 0.0
        self.flops = (head if layout.products else products) * samples * share
        self.attention_flops = attention * samples * share
        self.peak = peak_flops(device, layout.precision)
        self.low_peak = peak_flops(device, layout.products or layout.precision)
        self.wide = layout.precision in ("fp32", "tf32", "fp64")
        self.convolution = any(gemm.read for block in trace.blocks for gemm in block.gemms)
        largest = max(
            (gemm for block in layers for gemm in block.gemms if not gemm.batch),
            key=lambda gemm: gemm.flops * gemm.times,
            default=None,
        )
        width = min(largest.n, largest.k) if largest else 1024
        rows = max(samples * trace.tokens / layout.cp, 1.0)
        self.least = 1e9 if self.convolution else max(min(width / layout.tp, rows), 1.0)
        size = min(layout.number_bytes, 4)
        each = samples * size / device.memory_bandwidth
        outside = sum(block.outside for block in trace.blocks) * (1 if layout.sequence else layout.tp)
        self.moved = (sum(block.inside for block in trace.blocks) + outside) * share * each
        self.scores = 0.0 if layout.framework.flash else sum(block.scores for block in trace.blocks) * share * each
        queued = not layout.framework.graphs and device.kind != "tpu"
        self.kernels = sum(block.kernels for block in trace.blocks) / layout.pp if queued else 0.0
        self._communicates(layout, device, len(layers) / layout.pp, again, size)

    def _communicates(self, layout: Layout, device: Accelerator, here: float, again: float, size: int) -> None:
        samples, machines, blocks = layout.samples, layout.machines, layout.trace.blocks

        def rate(group: int, apart: int) -> float:
            if group * apart <= machines.per_host:
                return device.inside.bandwidth
            near = max(machines.per_host // apart, 1)
            return min(machines.between.bandwidth * min(near, group), device.inside.bandwidth)

        hidden = max((block.boundary for block in blocks if block.kind != "head"), default=0.0)
        hidden *= samples / layout.cp * size
        self.tp_out = layout.tp > machines.per_host
        calls = 4 + 2 * again
        self.tp_calls = calls * here if layout.tp > 1 else 0.0
        self.tp_s = self.tp_calls * hidden * 2 * (layout.tp - 1) / layout.tp / rate(layout.tp, 1)
        experts = max(layout.expert_ranks or layout.ep, 1)
        self.ep_out = experts > machines.per_host
        routed = sum(block.routed for block in blocks) * samples * size / layout.cp / layout.pp / layout.tp
        ep_link = machines.between if self.ep_out else device.inside
        self.ep_s = calls * routed * (experts - 1) / experts / ep_link.bandwidth
        self.cp_out = layout.tp * layout.cp > machines.per_host
        keys = sum(block.keys for block in blocks) * samples * size / layout.pp / layout.tp
        cp_link = machines.between if self.cp_out else device.inside
        self.cp_s = 3 * keys * (layout.cp - 1) / layout.cp / cp_link.bandwidth
        dense = sum(block.matrices + block.vectors for block in blocks) / layout.tp / layout.pp
        own = dense + sum(block.experts for block in blocks) / layout.pp / max(layout.expert_parts, 1)
        trained = 0.0 if layout.lora else own
        data = layout.data_ranks
        self.dp_out = layout.tp * data > machines.per_host
        each = rate(data, layout.tp * layout.cp)
        each /= max(machines.oversubscription, 1) if self.dp_out else 1
        gathers = layout.fsdp > 1 and layout.zero == 3
        weights = 2 * layout.microbatches * layout.gathered_bytes
        sent = own * weights + trained * layout.sync_bytes if gathers else trained * (layout.sync_bytes + 2)
        self.dp_s = sent / each if data > 1 else 0.0
        self.beside = 1.0 if gathers else 1.0 / layout.microbatches
        shards = data if layout.zero_dp or layout.fsdp > 1 else 1
        state = layout.parameter_bytes + layout.gradient_bytes + 2 * layout.optimizer_bytes
        self.update = trained * state / shards / device.memory_bandwidth

    def seconds(self, values: Mapping[str, float]) -> float:
        """Predict a step's time."""
        reached = values[self.family] * self.least / (self.least + values["half"])
        reached *= values["convolution"] if self.convolution else 1.0
        if self.wide:
            reached = min(reached * values["wide"], 0.95)
        products = self.flops / (self.peak * reached) + self.low_flops / (self.low_peak * reached * values["low"])
        attention = self.attention_flops / (self.peak * reached * values["attention"])
        device: float = self.passes * (products + attention + values["vector"] * self.moved)
        device += 3 * values["scores"] * self.scores
        one = (device**4 + (self.passes * self.kernels * values["launch"]) ** 4) ** 0.25

        def share(out: bool) -> float:
            return values["between" if out else "inside"]

        one += self.tp_s / share(self.tp_out) + self.tp_calls * values["latency"] * (2 if self.tp_out else 1)
        one += self.ep_s / share(self.ep_out) + max(self.cp_s / share(self.cp_out) - attention * self.passes, 0.0)
        bubble = (self.pp - 1) / (self.chunks * self.count) * (1 / 3 if self.fills else 1)
        work = self.count * one * (1 + bubble)
        data = self.dp_s / share(self.dp_out)
        return float(work + max(data - values["hide"] * self.beside * work, 0.1 * data) + self.update + 1e-3)


_facts: dict[int, tuple[Layout, Facts]] = {}


def seconds(layout: Layout, values: Mapping[str, float]) -> float:
    """Predict the step time of a layout with given constants."""
    if id(layout) not in _facts:
        _facts[id(layout)] = (layout, Facts(layout))
    return _facts[id(layout)][1].seconds(values)


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Return the constants with the least robust error of logarithms, near to what is assumed."""
    logs = np.array([math.log(row.seconds or 1.0) for row in rows])
    tables = [row.table for row in rows]
    weights = np.array([tables.count(table) ** -0.2 for table in tables])

    def values(place: np.ndarray) -> dict[str, float]:
        return {name: ASSUMED[name] * math.exp(x * SPREADS[name]) for name, x in zip(NAMES, place, strict=True)}

    def residuals(place: np.ndarray) -> np.ndarray:
        own = values(place)
        errors = (np.array([math.log(seconds(row.layout, own)) for row in rows]) - logs) / RUN_SPREAD
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft * weights, place])

    return values(least_squares(residuals, np.zeros(len(NAMES)), diff_step=1e-2, max_nfev=15).x)


def without_each(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the constants fitted without each source, by its name."""
    sources = dict.fromkeys(source(row.table) for row in rows)
    return {name: fit([row for row in rows if source(row.table) != name]) for name in sources}


def calibrated(rows: Sequence[Row], values: Mapping[str, float]) -> tuple[Mapping[str, float], Adjustment]:
    """Return the constants and factors that measured runs move, as the cost model's are moved."""
    found = regression([row for row in rows if row.seconds], values, SPREADS, seconds)
    return found.constants or values, found
