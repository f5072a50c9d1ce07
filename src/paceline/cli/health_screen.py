"""Screen of `paceline doctor --cluster`: a row per device, the links, and the findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cluster.cluster import Cluster
from paceline.cluster.health import DeviceReading, HealthReport, LinkReading
from paceline.rank_environment import own_rank
from paceline.units import bandwidth, count, flops, percent, seconds, size

_WIDTH = 116
_UNKNOWN = "unknown"


def check_and_show(cluster: Cluster, console: Console, *, as_json: bool) -> bool:
    """Check a cluster, show the report, and return True if it has no problem."""
    from paceline.cluster.discover import environment
    from paceline.run.health import check_cluster

    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    with Console(stderr=True).status(f"checking {count(cluster.devices, 'device')}"):
        checked = check_cluster(cluster)
    if own_rank() != 0:  # under torchrun, only rank 0 prints
        return not checked.report.problems
    console.print("[bold]paceline doctor --cluster[/] on", Text(cluster.describe()))
    show(checked.report, console)
    if as_json:
        about = environment() | {"health": checked.as_json()}
        print(json.dumps({"figures": figures(checked.report), "environment": about}))
    return not checked.report.problems


def show(report: HealthReport, console: Console) -> None:
    """Show the devices, the links, and what to do about the findings."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("device", "product", "of peers", "memory", "clock", "ECC errors", "XIDs", "verdict"):
        table.add_column(name, justify="left" if name in ("device", "verdict") else "right")
    bad = {rank: f for f in reversed(report.findings) if f.code.startswith("device") for rank in f.ranks}
    for device in report.devices:
        finding, seen = bad.get(device.rank), device.counters
        verdict = finding.code.partition(".")[2].replace("_", " ") if finding else "healthy"
        table.add_row(
            device.place,
            str(flops(device.flops)),
            _of_peers(device, report.devices),
            str(size(device.memory_bytes)),
            _UNKNOWN if seen.clock_mhz is None else f"{seen.clock_mhz} MHz",
            _UNKNOWN if seen.ecc_uncorrected is None else str(seen.ecc_uncorrected),
            _UNKNOWN if seen.xids is None else ", ".join(map(str, seen.xids)) or "none",
            Text(verdict, style=("bold red" if finding.level == "problem" else "yellow") if finding else "green"),
        )
    console.print(table)
    hosts = {device.rank: device.host for device in report.devices}
    for what, within in (("within hosts", True), ("between hosts", False)):
        if links := [link for link in report.links if (hosts[link.source] == hosts[link.target]) == within]:
            console.print(f"{count(len(links), 'link')} {what} over {report.transport}: {_links(links)}")
    for finding in report.findings:
        style = "bold red" if finding.level == "problem" else "yellow"
        console.print(Text.assemble((finding.level, style), f"  {finding.text}\n→ {finding.advice}"))
    problems = count(len(report.problems), "problem")
    console.print(Text(f"{problems}, {report.seconds:.1f} s", style="bold red" if report.problems else "bold green"))


def figures(report: HealthReport) -> dict[str, float]:
    """Return the measured numbers by name, with units in the names."""
    found = {"seconds": report.seconds, "problems": float(len(report.problems))}
    for device in report.devices:
        found[f"rank_{device.rank}_product_gflops"] = device.flops / 1e9
    for link in report.links:
        found[f"link_{link.source}_{link.target}_gigabytes_per_s"] = link.bytes_per_s / 1e9
    return found


def _of_peers(device: DeviceReading, devices: Sequence[DeviceReading]) -> str:
    others = [other.product_s for other in devices if other is not device and other.name == device.name]
    return str(percent(median(others) / device.product_s)) if others else "no peers"


def _links(links: Sequence[LinkReading]) -> str:
    rates, latencies_s = [link.bytes_per_s for link in links], [link.latency_s for link in links]
    return (
        f"{bandwidth(median(rates))} and {seconds(median(latencies_s))} (medians); slowest {bandwidth(min(rates))}, "
        f"{seconds(max(latencies_s))}"
    )
