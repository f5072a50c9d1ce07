"""Models too large for a cluster: missing memory, and clusters that would be enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from paceline.cluster.catalogue.hardware import CATALOGUE
from paceline.partition import contiguous
from paceline.planning.axes import DEGREES
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.memory import memory, usable_bytes
from paceline.planning.machines import machine_count, on_other_devices, resized, shape
from paceline.planning.model.graph import ModelTrace
from paceline.units import size

_MOST_HOSTS = 2**14
_MOST_CP = 64
_MOST_TP = 64


class SmallestMemory(NamedTuple):
    """The plan that comes nearest to fitting on given machines.

    Attributes:
        needed: bytes of its fullest rank.
        room: bytes of the rank's device.
    """

    needed: float
    room: float
    layout: Layout

    @property
    def fits(self) -> bool:
        """True if the plan fits."""
        return self.needed <= self.room


def smallest_that_works(layout: Layout, global_batch: int) -> str:
    """Message on a model that does not fit, or "" if it does.

    It names the missing memory and the smallest sufficient cluster.

    Args:
        layout: of any plan of the job on the machines: its trace, machines, precision and bytes of state are used, not
            its degrees.
        global_batch: samples of a step; a plan cannot have more data-parallel ranks.
    """
    here = least(layout, global_batch)
    if here.fits:
        return ""
    machines = layout.machines
    has = "its part of the host's memory is" if machines.device.is_core else f"{_a(machines.device.name)} has"
    said = (
        f"At least {size(here.needed)} on each device, with {words(here.layout)}, and {has} {size(here.room)} to give: "
        f"{size(here.needed - here.room)} are missing."
    )
    more, larger = _more_hosts(layout, global_batch), _larger_device(layout, global_batch)
    enough = [_on(found) for found in (more, larger) if found.fits]
    if enough:
        return f"{said} It fits on {', or on '.join(enough)}."
    what, most = max(memory(more.layout).items(), key=lambda item: item[1])
    return (
        f"{said} More such hosts do not help: {what} alone would still take {size(most)}. Shorter samples or "
        "smaller layers would."
    )


def least(layout: Layout, global_batch: int) -> SmallestMemory:
    """The plan on the layout's machines whose fullest rank needs the least of its device.

    Only plans that shard everything are tried.
    """
    options = (
        SmallestMemory(sum(memory(option).values()), usable_bytes(option), option)
        for option in _frugal(layout, global_batch)
    )
    return min(options, key=lambda option: option.needed / option.room)


def words(layout: Layout) -> str:
    """The degrees of a layout as a plan's words."""
    degrees = [f"{axis}={n}" for axis in DEGREES if (n := getattr(layout, axis)) > 1]
    remat = [] if layout.remat == "none" else [f"remat={layout.remat}"]
    return " ".join([*degrees, *remat]) or "dp=1"


def _frugal(layout: Layout, global_batch: int) -> Iterator[Layout]:
    """Plans with all state sharded and all blocks recomputed, one sample per microbatch.

    Degrees are powers of two, with as many ranks as are useful.
    """
    machines, trace = layout.machines, layout.trace
    layers = max((count for _, count in trace.runs), default=1)
    cores = _powers(machines.per_host) if machines.device.is_core else [1]
    # a rank alone on a host has all of its memory
    for idle in cores:
        devices = machines.devices // idle
        for tp in _powers(min(devices, _MOST_TP)):
            for pp in _powers(min(devices // tp, layers)):
                for cp in _powers(min(devices // tp // pp, trace.tokens, _MOST_CP)):
                    if _divides(trace, tp, cp):
                        yield _sharded(layout, tp, pp, cp, devices // (tp * pp * cp), global_batch)


def _sharded(layout: Layout, tp: int, pp: int, cp: int, left: int, global_batch: int) -> Layout:
    fsdp = max(n for n in range(1, min(left, global_batch) + 1) if global_batch % n == 0)
    blocks = len(layout.trace.blocks)
    return replace(
        layout,
        dp=1,
        fsdp=fsdp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=1,
        zero=3,
        samples=1.0,
        microbatches=global_batch // fsdp,
        schedule="1f1b",
        chunks=1,
        remat="block",
        sequence=tp > 1,
        cut=contiguous([1] * blocks, pp),
    )


def _divides(trace: ModelTrace, tp: int, cp: int) -> bool:
    """True if tp divides the heads and anything at all, and cp divides the tokens."""
    if tp == 1:
        return trace.tokens % cp == 0
    gemms = [gemm for block, _ in trace.runs for gemm in block.gemms if gemm.divided != "none"]
    return (
        bool(gemms)
        and trace.tokens % cp == 0
        and all(gemm.batch % tp == 0 for gemm in gemms if gemm.divided == "batch")
    )


def _more_hosts(layout: Layout, global_batch: int) -> SmallestMemory:
    """Fit on the smallest sufficient number of the same hosts, found by bisection.

    If no number is enough, on very many of them.
    """

    def on(hosts: int) -> SmallestMemory:
        return least(replace(layout, machines=resized(layout.machines, hosts)), global_batch)

    low = machine_count(layout.machines)
    high = 2 * low
    while not (found := on(high)).fits and high < _MOST_HOSTS:
        low, high = high, 2 * high
    while found.fits and high - low > 1:
        middle = (low + high) // 2
        fewer = on(middle)
        low, high, found = (low, middle, fewer) if fewer.fits else (middle, high, found)
    return found


def _larger_device(layout: Layout, global_batch: int) -> SmallestMemory:
    """Fit on as many devices of the smallest sufficient kind in the catalogue.

    If none is sufficient, on the largest.
    """
    machines = layout.machines
    own, kind = machines.memory_bytes or machines.device.memory_bytes, machines.device.kind
    alike = [device for device in CATALOGUE.values() if device.kind == kind and not device.is_core]
    larger = [device for device in alike if device.memory_bytes > own]
    found = least(layout, global_batch)
    for device in sorted(larger, key=lambda device: device.memory_bytes):
        found = least(replace(layout, machines=on_other_devices(machines, device)), global_batch)
        if found.fits:
            break
    return found


def _on(found: SmallestMemory) -> str:
    """The cluster as `--cluster` takes it, and the plan."""
    return f"{shape(found.layout.machines)} with {words(found.layout)} ({size(found.needed)} of {size(found.room)})"


def _powers(most: int) -> list[int]:
    return [2**i for i in range(max(most, 1).bit_length())]


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "AEFHILMNORSX" else f"a {name}"
