"""Measurement of a launch's links: collectives by size, compared with hardware limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline import units
from paceline.comm.allreduce import algorithm_for, close_algorithm
from paceline.comm.backend import joined
from paceline.comm.group import Group
from paceline.comm.measure.calls import CollectiveSpeed, measure_call
from paceline.comm.measure.limit import Limit, measure_limit
from paceline.units import Shown

_LONGEST_S = 1.5  # per call; sizes that would take longer are skipped
_ABOUT = 1.05  # of the limit; within the noise of the measurements


@dataclass(frozen=True)
class LeftOut:
    """Size that was not measured, because one call would have taken too long."""

    collective: str
    algorithm: str
    size_bytes: int


@dataclass(frozen=True)
class TransportMeasurement:
    """Measurements of one launch over one transport.

    `note` is the reason why a faster transport was not used; None if there is no faster one.
    """

    transport: str
    limit: Limit
    speeds: list[CollectiveSpeed]
    left_out: list[LeftOut] = field(default_factory=list)
    note: str | None = None


@dataclass(frozen=True)
class Curve:
    """Speeds by size in bytes of one collective, over one transport, with one algorithm."""

    transport: str
    algorithm: str
    speeds: dict[int, CollectiveSpeed]
    left_out: bool


@dataclass(frozen=True)
class LinksRequest:
    """Request for measurements of collectives of `BUS_FACTORS` at sizes in bytes.

    The all-reduce is measured with each algorithm.
    """

    transport: str
    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]


def measure_on_rank(request: LinksRequest) -> TransportMeasurement:
    """Join the other ranks of the launch, and measure the requested collectives.

    All ranks get the same result.
    """
    with joined(deadline_s=60, transport=request.transport) as group:
        limit = measure_limit(group, request.sizes)
        measured = TransportMeasurement(group.transport.name, limit, [], [], group.transport_note)
        for collective in request.collectives:
            for name in request.algorithms if collective == "all_reduce" else ("flat",):
                _by_size(group, measured, collective, name, sorted(request.sizes))
        group.barrier()
        return measured


def _by_size(group: Group, measured: TransportMeasurement, collective: str, name: str, sizes: Sequence[int]) -> None:
    """Measure in ascending order of size, and skip sizes that would take too long."""
    algorithm = algorithm_for(group, name)[0] if collective == "all_reduce" else group
    before: list[CollectiveSpeed] = []
    for size in sizes:
        if _foreseen_s(before, size, measured.limit.least_s(collective, size) or 0.0) > _LONGEST_S:
            measured.left_out.append(LeftOut(collective, name, size))
        else:
            before.append(measure_call(group, collective, size, algorithm))
    measured.speeds.extend(before)
    close_algorithm(algorithm)


def _foreseen_s(before: Sequence[CollectiveSpeed], size_bytes: int, least_s: float) -> float:
    """Predict the seconds of a call from the two largest sizes so far.

    The prediction is a linear extrapolation, but at least the hardware's lower bound.
    """
    if len(before) < 2:
        return least_s
    one, two = before[-2:]
    per_byte = (two.time_s - one.time_s) / max(1, two.size_bytes - one.size_bytes)
    return max(least_s, two.time_s + per_byte * (size_bytes - two.size_bytes))


def curves(measured: Sequence[TransportMeasurement], collective: str) -> list[Curve]:
    """Return the curves of a collective, in the order of their measurement."""
    return [
        Curve(
            m.transport,
            name,
            {s.size_bytes: s for s in m.speeds if (s.collective, s.algorithm) == (collective, name)},
            any((left.collective, left.algorithm) == (collective, name) for left in m.left_out),
        )
        for m in measured
        for name in dict.fromkeys(s.algorithm for s in m.speeds if s.collective == collective)
    ]


def figures(measured: Sequence[TransportMeasurement]) -> dict[str, float]:
    """Return all measured numbers by name; the names include the units."""
    found: dict[str, float] = {}
    if not measured:
        return found
    limit = Limit.best([m.limit for m in measured])
    if limit.stream is not None and limit.latency_s is not None:
        found |= {"limit_stream_gigabytes_per_s": limit.stream / 1e9, "limit_latency_us": limit.latency_s * 1e6}
    for size, (together, _) in (limit.copies or {}).items():
        found[f"limit_copy_{size_text(size)}_gigabytes_per_s"] = together / 1e9
    for m in measured:
        for s in m.speeds:
            name = "_".join(
                [s.transport, s.collective, *([s.algorithm] if s.algorithm != "flat" else []), size_text(s.size_bytes)]
            )
            found |= {
                f"{name}_us": s.time_s * 1e6,
                f"{name}_algorithm_gigabytes_per_s": s.algorithm_bandwidth / 1e9,
                f"{name}_bus_gigabytes_per_s": s.bus_bandwidth / 1e9,
            }
            if (share := limit.share(s)) is not None:
                found[f"{name}_share_of_limit"] = share
    return found


def caveats(measured: Sequence[TransportMeasurement], limit: Limit) -> Iterator[str]:
    """Describe the caveats of the measurements, one sentence each."""
    if any((limit.share(s) or 0.0) > _ABOUT for m in measured for s in m.speeds):
        yield (
            "more than 100 % of the limit: a shaped link lets a burst through after a pause, or other work slowed "
            "the limit's measurement"
        )
    for m in measured:
        if m.note is not None:
            yield f"{m.transport}: {m.note}"
        by_what: dict[str, list[str]] = {}
        for left in m.left_out:
            what = left.collective.replace("_", "-") + (f" {left.algorithm}" if left.collective == "all_reduce" else "")
            by_what.setdefault(what, []).append(size_text(left.size_bytes))
        if by_what:
            listed = "; ".join(f"{what} {', '.join(sizes)}" for what, sizes in by_what.items())
            yield f"{m.transport}: left out, as one call would take longer than {_LONGEST_S:g} s: {listed}"


def size_text(size_bytes: int) -> str:
    """Return the size as one word, such as `64KiB` or `16MiB`; see `message_size`."""
    return str(message_size(size_bytes)).replace(" ", "")


def message_size(size_bytes: int) -> Shown:
    """Return the size for display, such as `64 KiB` or `16 MiB`.

    A size within 2 % of a power of two is shown as this power of two.
    """
    power = 2 ** round(math.log2(max(size_bytes, 1)))
    return units.size(power if abs(size_bytes - power) < 0.02 * power else size_bytes)
