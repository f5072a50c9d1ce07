"""Page of `paceline links`: bandwidth over message size for each collective and transport.

Both axes are logarithmic. The charts also show the limit of the hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from paceline import units
from paceline.comm.measure.calls import BUS_FACTORS, CollectiveSpeed
from paceline.comm.measure.limit import Limit
from paceline.comm.measure.links import Curve, TransportMeasurement, caveats, curves, message_size
from paceline.report.charts import GREY, SERIES, Axis, Dash, Figure, Points
from paceline.report.figures import Definition
from paceline.report.page import Card, Cell, Chart, Row, write_page

DEFINITIONS: Mapping[str, Definition] = {
    "call_time": Definition(
        "time", "Median of the slowest rank over the calls in a quarter of a second, after a warm-up. Tensors are fp32."
    ),
    "algorithm_bandwidth": Definition("algorithm bandwidth", "Size / time, as nccl-tests define it."),
    "bus_bandwidth": Definition(
        "bus bandwidth",
        "Data that a rank’s link carries in each direction per second, as nccl-tests define it: algorithm bandwidth × "
        "2 (n − 1) / n over n ranks for an all-reduce, × (n − 1) / n for an all-gather, a reduce-scatter and an "
        "all-to-all, × 1 for a broadcast and a message.",
    ),
    "link_limit": Definition(
        "limit",
        "The bus bandwidth that no algorithm can exceed on this hardware. It follows from two measurements of the same "
        "run: memory copies between processes of a host, and TCP streams between hosts.",
    ),
    "share_of_limit": Definition("of the limit", "Shortest time that the limit allows / measured time."),
    "latency": Definition("latency", "Half of the round-trip time of the smallest message between two ranks."),
    "checked": Definition(
        "checked", "Every collective’s result was compared with the exact result, before and after it was timed."
    ),
}
_TITLES = {
    "all_reduce": "All-reduce",
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "broadcast": "Broadcast",
    "all_to_all": "All-to-all",
    "send_receive": "Send and receive",
}
_SIZES = {
    "all_reduce": "Size: each rank’s tensor.",
    "all_gather": "Size: the gathered tensor.",
    "reduce_scatter": "Size: each rank’s input.",
    "broadcast": "Size: the tensor.",
    "all_to_all": "Size: each rank’s input.",
    "send_receive": "Size: the message. The time is half of the round trip.",
}
_DASHES: dict[str, Dash] = {
    "flat": "solid",
    "ring": "dash",
    "hierarchical": "dashdot",
    "auto": "dashdot",
}
# ticks of a logarithmic axis of bytes per second
_DECADES = {
    n * scale: f"{n} {unit}" for scale, unit in ((1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")) for n in (1, 10, 100)
}
_SYMBOLS = ("circle", "square", "triangle", "diamond", "cross")


def write_links_page(
    measured: Sequence[TransportMeasurement], cluster: str, command: str, environment: Mapping[str, Any], file: Path
) -> Path:
    """Write the page about link bandwidth.

    Raises:
        RunError: the file cannot be written.
    """
    limit = Limit.best([m.limit for m in measured])
    speeds = [s for m in measured for s in m.speeds]
    transports = list(dict.fromkeys(s.transport for s in measured))
    wrong = [f"{s.label}, {message_size(s.size_bytes)}: {s.wrong} numbers are wrong" for s in speeds if s.wrong]
    view = {
        "cluster": cluster,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "ranks": len(limit.hosts),
        "hosts": len(set(limit.hosts)),
        "transports": transports,
        "speeds": speeds,
        "wrong": wrong,
        "verdict": _verdict(speeds, limit),
        "cards": _cards(speeds, transports),
        "warnings": [*map(Markup("<b>{}</b>").format, wrong), *caveats(measured, limit)],
        "limits": _limits(limit),
        "sections": [
            _section(name, curves(measured, name), transports, limit)
            for name in dict.fromkeys(s.collective for s in speeds)
        ],
    }
    facts = {"machine": cluster, "command": command}
    return write_page(file, "links.html.j2", facts=facts, environment=environment, definitions=DEFINITIONS, view=view)


def _best(speeds: Sequence[CollectiveSpeed]) -> CollectiveSpeed:
    return max(speeds, key=lambda s: (s.collective == "all_reduce", s.bus_bandwidth))


def _verdict(speeds: Sequence[CollectiveSpeed], limit: Limit) -> str:
    best = _best(speeds)
    share = limit.share(best)
    of = f", {units.percent(share)} of what the hardware allows" if share is not None else ""
    what = f"{_TITLES[best.collective]} of {message_size(best.size_bytes)} over {best.transport}{_by(best.algorithm)}"
    return f"{what}: {units.bandwidth(best.bus_bandwidth)} of bus bandwidth{of}."


def _cards(speeds: Sequence[CollectiveSpeed], transports: Sequence[str]) -> list[Card]:
    cards = []
    for transport in transports:
        own = [s for s in speeds if s.transport == transport]
        if messages := [s for s in own if s.collective == "send_receive"]:
            least = min(messages, key=lambda s: s.size_bytes)
            cards.append(Card("latency", units.seconds(least.time_s), f"{transport}, {message_size(least.size_bytes)}"))
        best = _best(own)
        what = f"{transport}, {_TITLES[best.collective].lower()}{_by(best.algorithm)}, {message_size(best.size_bytes)}"
        cards.append(Card("bus_bandwidth", units.bandwidth(best.bus_bandwidth), what))
    return cards


def _limits(limit: Limit) -> list[tuple[str, str]]:
    """Describe the measured limits of the hardware, or explain why they are missing."""
    found = []
    if limit.stream is not None and limit.latency_s is not None:
        stream = f"{units.bandwidth(limit.stream)}, the slowest of all streams at once"
        found.append(("TCP stream between hosts, each way", stream))
        found.append(("half a round trip between hosts", f"{units.seconds(limit.latency_s)}, one byte over TCP"))
    if limit.copies:
        size, (together, alone) = max(limit.copies.items())
        rates = f"{units.bandwidth(together)} each if all ranks copy, {units.bandwidth(alone)} if one copies"
        found.append((f"copy between processes, {message_size(size)}", rates))
    return found + [("not measured", why) for why in limit.why_not]


def _section(name: str, found: Sequence[Curve], transports: Sequence[str], limit: Limit) -> dict[str, Any]:
    """Return the section about one collective: its curves, and all figures by message size."""

    def share(speed: CollectiveSpeed) -> Cell:
        known = limit.share(speed)
        return "not measured" if known is None else units.percent(known)

    cells: dict[str, Callable[[CollectiveSpeed], Cell]] = {
        "call_time": lambda speed: units.seconds(speed.time_s),
        "algorithm_bandwidth": lambda speed: units.bandwidth(speed.algorithm_bandwidth),
        "bus_bandwidth": lambda speed: units.bandwidth(speed.bus_bandwidth),
        "share_of_limit": share,
    }
    sizes = sorted({size for curve in found for size in curve.speeds})
    rows = [
        Row(term, [cell(s) if (s := curve.speeds.get(size)) else "left out" for size in sizes], _named(curve))
        for term, cell in cells.items()
        for curve in found
    ]
    in_words = [
        f"{_named(c)}: up to {units.bandwidth(max(s.bus_bandwidth for s in c.speeds.values()))}." for c in found
    ]
    label = " ".join([f"{_TITLES[name]}: bus bandwidth over size, against the limit.", *in_words])
    return {
        "name": name,
        "about": _SIZES[name],
        "chart": Chart(name, _figure(name, sizes, found, transports, limit), label, _TITLES[name]),
        "sizes": [str(message_size(size)) for size in sizes],
        "rows": rows,
    }


def _figure(name: str, sizes: Sequence[int], found: Sequence[Curve], transports: Sequence[str], limit: Limit) -> Figure:
    ticks = [(size, str(message_size(size))) for size in sizes]
    figure = Figure(
        Axis("size", log=True, ticks=ticks, grid=False), Axis("bus bandwidth", log=True, ticks=list(_DECADES.items()))
    )
    by = "transport" if len(transports) > 1 else "algorithm"
    colours = transports if by == "transport" else [curve.algorithm for curve in found]
    for curve in found:
        speeds = curve.speeds.values()
        about = [
            f"{_named(curve)}\n{message_size(s.size_bytes)}: {units.bandwidth(s.bus_bandwidth)}, "
            f"{units.seconds(s.time_s)}"
            for s in speeds
        ]
        figure.traces.append(
            Points(
                _named(curve),
                list(curve.speeds),
                [s.bus_bandwidth for s in speeds],
                SERIES[colours.index(getattr(curve, by)) % len(SERIES)],
                dash=_DASHES.get(curve.algorithm, "solid"),
                marks=7,
                symbol=_SYMBOLS[colours.index(getattr(curve, by)) % len(_SYMBOLS)],
                hints=about,
            )
        )
    least_s = [limit.least_s(name, size) for size in sizes]
    factor = BUS_FACTORS[name](len(limit.hosts))
    allowed = [None if s is None else size / s * factor for size, s in zip(sizes, least_s, strict=True)]
    if any(allowed):
        texts = ["" if y is None else f"limit\n{units.bandwidth(y)}" for y in allowed]
        figure.traces.append(Points("limit", list(sizes), allowed, GREY, dash="dash", hints=texts))
    return figure


def _named(curve: Curve) -> str:
    return curve.transport if curve.algorithm == "flat" else f"{curve.transport}, {curve.algorithm}"


def _by(algorithm: str) -> str:
    return "" if algorithm == "flat" else f" ({algorithm})"
