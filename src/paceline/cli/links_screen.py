"""Screen of `paceline links`: a table per collective.

Columns are sizes; rows are transports and algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from paceline.comm.measure.limit import Limit
from paceline.comm.measure.links import caveats, curves, message_size
from paceline.units import bandwidth, digits, percent, seconds

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.comm.measure.calls import CollectiveSpeed
    from paceline.comm.measure.links import Curve, TransportMeasurement
    from paceline.run.links import LinkResults

_WIDTH = 116
_COLUMNS = 8  # number of size columns in a table
_MEGABYTES_BELOW = 2e10  # bytes per second; faster links are shown in GB/s
_MEANING = (
    "time: the slowest rank's median after a warm-up · algorithm bandwidth: size / time · bus bandwidth: what a rank's "
    "link has to carry, as nccl-tests define it · of the limit: the least time that the limit, measured beside, allows "
    "any algorithm / the time · n: ranks"
)
_SECTIONS = {
    "all_reduce": ("all-reduce", "fp32, sum; bus = algorithm × 2 (n − 1) / n"),
    "all_gather": ("all-gather", "size: of what is gathered; bus = algorithm × (n − 1) / n"),
    "reduce_scatter": ("reduce-scatter", "size: of what is scattered; bus = algorithm × (n − 1) / n"),
    "broadcast": ("broadcast", "bus = algorithm"),
    "all_to_all": ("all-to-all", "size: of what each rank hands out; bus = algorithm × (n − 1) / n"),
    "send_receive": (
        "send and receive",
        "time: half of there and back; at the smallest size the latency; bus = algorithm",
    ),
}


def show(found: LinkResults, where: Cluster, console: Console) -> None:
    """Show all results, then an explanation of the figures."""
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    console.print("[bold]paceline links[/] on", where.describe(), markup=True)
    if not found.measured:
        return
    limit = Limit.best([m.limit for m in found.measured])
    hosts = len(set(limit.hosts))
    console.print(f"{len(limit.hosts)} ranks{f' on {hosts} hosts' if hosts > 1 else ''}, one thread each")
    for line in _limits(limit, _stated(where)):
        console.print(f"limit  {line}", style="cyan", markup=False)
    for collective in dict.fromkeys(s.collective for m in found.measured for s in m.speeds):
        _show_collective(console, collective, found.measured, limit)
    console.print()
    for line in caveats(found.measured, limit):
        console.print(line, style="yellow", markup=False)
    console.print(_MEANING, style="dim", markup=False)
    checked = [s for m in found.measured for s in m.speeds if s.wrong is not None]
    if not any(s.wrong for s in checked):
        console.print(f"results checked in {len(checked)} cases: none wrong", style="green")


def _limits(limit: Limit, stated: str) -> Iterator[str]:
    """Return the limit as text: the largest measured rate of each transport."""
    if limit.stream is not None and limit.latency_s is not None:
        beside = f" (stated {stated})" if stated else ""
        yield (
            f"TCP stream between hosts, each way: {bandwidth(limit.stream)}{beside}; half a round trip "
            f"{seconds(limit.latency_s)}"
        )
    if limit.copies:
        together, alone = limit.copies[max(limit.copies)]
        size = message_size(max(limit.copies))
        yield (
            f"copy between processes of a host, {size}: {bandwidth(together)} each while all do, "
            f"{bandwidth(alone)} while one does"
        )
    yield from limit.why_not


def _stated(where: Cluster) -> str:
    """Return the link rates between hosts that the cluster file states."""
    links = [link for host in where.hosts for link in host.links if link.kind == "ethernet"]
    rates = sorted({link.bandwidth_gbps for link in links if link.bandwidth_gbps})
    return " to ".join(
        f"{rate * 1e3:g} Mbit/s" if rate < 1 else f"{rate:g} Gbit/s" for rate in rates[:: max(1, len(rates) - 1)]
    )


def _show_collective(console: Console, collective: str, measured: Sequence[TransportMeasurement], limit: Limit) -> None:
    title, about = _SECTIONS[collective]
    console.print()
    console.print(Rule(Text.assemble((title, "bold"), f"  {about}"), align="left", style="dim", characters="─"))
    sizes = sorted({s.size_bytes for m in measured for s in m.speeds if s.collective == collective})
    for start in range(0, len(sizes), _COLUMNS):
        console.print(_table(collective, sizes[start : start + _COLUMNS], measured, limit))


def _table(collective: str, sizes: Sequence[int], measured: Sequence[TransportMeasurement], limit: Limit) -> Table:
    """Build a table with blocks of rows: times, both bandwidths, share of the limit.

    Each block has a row for every transport and algorithm.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("")
    table.add_column("")
    for size in sizes:
        table.add_column(str(message_size(size)), justify="right", no_wrap=True)
    found = curves(measured, collective)
    several = len({curve.algorithm for curve in found}) > 1
    fastest = max(s.bus_bandwidth for m in measured for s in m.speeds)
    unit, per = ("MB/s", 1e6) if fastest < _MEGABYTES_BELOW else ("GB/s", 1e9)
    blocks: list[tuple[str, Callable[[CollectiveSpeed], str]]] = [
        ("time", lambda s: str(seconds(s.time_s))),
        (f"algorithm {unit}", lambda s: digits(s.algorithm_bandwidth / per)),
        (f"bus {unit}", lambda s: digits(s.bus_bandwidth / per)),
        ("of the limit", lambda s: _percent(limit.share(s))),
    ]
    for title, text in blocks:
        for number, curve in enumerate(found):
            table.add_row(
                title if number == 0 else "",
                f"{curve.transport} {curve.algorithm}" if several else curve.transport,
                *(_cell(curve, size, text) for size in sizes),
                end_section=number == len(found) - 1 and title != blocks[-1][0],
                style="bold" if title.startswith("bus") else "",
            )
    return table


def _cell(curve: Curve, size_bytes: int, text: Callable[[CollectiveSpeed], str]) -> Text:
    speed = curve.speeds.get(size_bytes)
    if speed is None:
        return Text("left out" if curve.left_out else "", style="dim")
    return Text(f"{speed.wrong} WRONG", style="bold red") if speed.wrong else Text(text(speed))


def _percent(share: float | None) -> str:
    return "" if share is None else "< 1 %" if share < 0.01 else str(percent(share, 0))
