"""`paceline doctor`"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.command import Hosts, start_on
from paceline.device import ON_CPU
from paceline.units import bandwidth, count, flops, size

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.doctor import Finding
    from paceline.cluster.host import Host
    from paceline.cluster.probe import Probe, ProbedSpeed
    from paceline.comm.measure import calls

_WIDTH = 100
_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}
_RANKS = (2, 8)  # minimum and maximum number of ranks on CPU cores


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON: figures and environment.")
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Only check devices and links, on all hosts: speed, results, memory.")
    ] = False,
    hosts: Hosts = None,
) -> None:
    """Check whether this machine can train, what is missing, and how fast it is.

    Exit code 1: this machine cannot train, or `--cluster` found a slow or faulty device or link.
    """
    if cluster:
        _check_cluster(hosts, as_json=as_json)
        return
    if hosts is not None:
        raise typer.BadParameter("add --cluster to check the devices and links of these hosts", param_hint="--hosts")
    from paceline.cluster.discover import environment
    from paceline.cluster.probe import Probe
    from paceline.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    host, driver, broken = _discovered()
    with Probe(host) as process:
        torch = _torch(console, process)
        sections = _checked(host, driver, torch)
        sections["machine"] = broken + sections["machine"]
        console.print(f"[bold]paceline doctor[/] on {host.name}")
        for title, findings in sections.items():
            _show_findings(console, title, findings)
        everything = [finding for findings in sections.values() for finding in findings]
        problems = [finding for finding in everything if finding.level == "problem"]
        measured = ProbeResults() if isinstance(torch, str) else _measured(console, host, process, problems)
    _show_measured(console, host, measured, busy=any(f.topic == "load" and f.level == "note" for f in everything))
    console.print(_verdict(everything))
    if as_json:
        about = environment() | {
            "doctor": [asdict(finding) for finding in everything],
            "not_measured": measured.failures,
        }
        typer.echo(json.dumps({"figures": measured.figures(), "environment": about}))
    if problems:
        raise typer.Exit(1)


def _check_cluster(hosts: str | None, *, as_json: bool) -> None:
    start_on(hosts)
    from paceline.cli.health_screen import check_and_show
    from paceline.cluster.discover import discover
    from paceline.console import Console
    from paceline.elastic.hosts.hosts import current_hosts
    from paceline.elastic.hosts.over_hosts import over_hosts

    with over_hosts():
        here = current_hosts()
        if not check_and_show(here.cluster if here else discover(), Console(highlight=False), as_json=as_json):
            raise typer.Exit(1)


@dataclass
class ProbeResults:
    """Results of the probe, and reasons for missing measurements."""

    local: list[ProbedSpeed] = field(default_factory=list)
    collectives: list[list[calls.CollectiveSpeed]] = field(default_factory=list)  # one list per launch
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return the measured numbers by name, with units in the names."""
        found = {}
        most = max((s.threads for s in self.local), default=0)
        for s in self.local:
            if s.value is not None:
                where = s.device.replace(":", "") + ("_1_thread" if s.threads == 1 < most else "")
                name = f"{where}_matmul_{s.dtype}_gflops" if s.what == "matmul" else f"{where}_copy_gigabytes_per_s"
                found[name] = s.value / 1e9
        for c in (c for speeds in self.collectives for c in speeds):
            name = f"{c.transport}_all_reduce_{str(size(c.size_bytes)).replace(' ', '')}"
            found |= {f"{name}_us": c.time_s * 1e6, f"{name}_bus_gigabytes_per_s": c.bus_bandwidth / 1e9}
        return found


def _discovered() -> tuple[Host, str | None, list[Finding]]:
    """Return this host and the version of its GPU driver.

    If the driver is broken, the host has only its CPU cores, and a finding describes the problem.
    """
    from paceline.cluster.discover import discover
    from paceline.cluster.doctor import Finding
    from paceline.cluster.machine import find_gpus
    from paceline.errors import ClusterError

    try:
        return discover().hosts[0], find_gpus().driver, []
    except ClusterError as error:
        os.environ |= ON_CPU  # for the rest of this command
        return discover().hosts[0], None, [Finding("problem", "GPU driver", str(error))]


def _torch(console: Console, process: Probe) -> dict[str, Any] | str:
    """Return a description of the installed torch, or the reason why torch cannot be imported."""
    from paceline.errors import ClusterError

    with console.status("importing torch"):
        try:
            return process.torch()
        except ClusterError as error:
            return str(error)


def _checked(host: Host, driver: str | None, torch: Mapping[str, Any] | str) -> dict[str, list[Finding]]:
    from paceline.cluster.doctor import (
        check_capabilities,
        check_data_plane,
        check_load,
        check_machine,
        check_software,
        check_system,
        check_variables,
    )

    can = {} if isinstance(torch, str) else torch["can"]
    return {
        "machine": [*check_machine(host, driver), check_load(host.cores)],
        "software": list(check_software(host, torch)),
        **({f"torch on {host.kind}": list(check_capabilities(can))} if can else {}),
        "system": [*check_system(), check_data_plane(os.environ), *check_variables(os.environ)],
    }


def _measured(console: Console, host: Host, process: Probe, problems: list[Finding]) -> ProbeResults:
    """Take all possible measurements. If a known problem prevents training, no ranks are started."""
    from paceline.errors import PacelineError

    started, measured = time.monotonic(), ProbeResults()
    with console.status("measuring matrix products and memory"):
        try:
            for s in process.speeds():
                measured.local.append(s)
                if s.why_not is not None:
                    measured.failures.append(f"{s.what} {s.dtype} on {s.device}: {s.why_not}")
        except PacelineError as error:
            measured.failures.append(str(error))
    if problems:
        measured.failures.append(f"all-reduces: see the problem with {problems[0].topic} above")
    else:
        _measure_collectives(console, host, measured)
    measured.seconds = time.monotonic() - started
    return measured


def _measure_collectives(console: Console, host: Host, measured: ProbeResults) -> None:
    from paceline.errors import PacelineError

    least, most = _RANKS
    launches: list[tuple[int, dict[str, str]]] = [(max(least, min(host.physical_cores, most)), ON_CPU)]
    if len(host.gpus) > 1:
        launches.append((len(host.gpus), {}))
    for ranks, variables in launches:
        with console.status(f"measuring all-reduces of {ranks} ranks"):
            try:
                found = _collectives(ranks, variables)
            except PacelineError as error:
                measured.failures.append(f"all-reduce of {ranks} ranks: {error}")
                continue
        measured.collectives.append(found.speeds)
        wrong = [f"{s.label} of {s.size_bytes} bytes: {s.wrong} numbers are wrong" for s in found.speeds if s.wrong]
        measured.failures.extend(wrong)
        if found.note is not None:
            measured.failures.append(f"all-reduce of {ranks} ranks over shared memory: {found.note}")


def _collectives(ranks: int, variables: Mapping[str, str]) -> calls.Speeds:
    from paceline.elastic.forkserver import warm_up
    from paceline.elastic.place import on_this_machine
    from paceline.elastic.run_on_ranks import run_on_ranks

    warm_up()
    from paceline.comm.measure.calls import SIZES, measure_all_reduces

    return run_on_ranks(measure_all_reduces, SIZES, places=on_this_machine(ranks), env=variables)[0]


# Output


def _show_findings(console: Console, title: str, findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(width=7)
    table.add_column(width=15)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="cyan")
        table.add_row(Text(finding.level, style=_COLOURS[finding.level]), finding.topic, text)
    console.print(f"\n[bold]{title}[/]")
    console.print(table)


def _show_measured(console: Console, host: Host, measured: ProbeResults, *, busy: bool) -> None:
    console.print(
        f"\n[bold]measured now[/] in {measured.seconds:.1f} s"
        if measured.seconds
        else "\n[bold]nothing was measured[/]"
    )
    if measured.local:
        _show_local(console, host, measured.local)
    for speeds in measured.collectives:
        _show_collectives(console, speeds)
    if measured.collectives:
        _explain(
            console,
            "time: the slowest rank's median, one thread a rank, a sum of fp32; algorithm bandwidth: size / time",
            "bus bandwidth: size / time × 2 (n − 1) / n over n ranks, as in nccl-tests: what a link has to carry",
        )
    for failure in measured.failures:
        console.print(f"not measured: {failure}", style="yellow", markup=False)
    if busy and measured.seconds:
        console.print("measured beside other work, so too low", style="yellow")


def _show_local(console: Console, host: Host, speeds: list[ProbedSpeed]) -> None:
    from rich.table import Table

    from paceline.cluster.probe import copy_bytes

    tasks = sorted(dict.fromkeys((s.what, s.dtype) for s in speeds), key=lambda task: task[0] == "copy")
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    for what, dtype in tasks:
        table.add_column(f"matrix product,\n{dtype}" if what == "matmul" else "copy in\nmemory", justify="right")
    rates = {(s.device, s.threads, s.what, s.dtype): _rate(s) for s in speeds}
    for device, threads in dict.fromkeys((s.device, s.threads) for s in speeds):
        name = device if not threads else f"CPU, {count(threads, 'thread')}"
        table.add_row(name, *(rates.get((device, threads, *task), "") for task in tasks))
    console.print(table)
    _explain(
        console,
        "matrix product: 2 n³ / median time for n × n matrices of 8 ms or more; fp32 without TF32",
        (
            f"copy: bytes read and written / median time, of {size(copy_bytes(host.memory_bytes))} on the CPU, far "
            "beyond its caches"
        ),
    )


def _show_collectives(console: Console, speeds: list[calls.CollectiveSpeed]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"all-reduce,\n{speeds[0].ranks} ranks")
    transports = list(dict.fromkeys(s.transport for s in speeds))
    for transport in transports:
        for name in (f"{transport}\ntime", "algorithm\nGB/s", "bus\nGB/s"):
            table.add_column(name, justify="right", no_wrap=True)
    cells = {(s.transport, s.size_bytes): s for s in speeds}
    for size_bytes in dict.fromkeys(s.size_bytes for s in speeds):
        row = [cells[transport, size_bytes] for transport in transports]
        table.add_row(str(size(size_bytes)), *(text for s in row for text in _bandwidths(s)))
    console.print()
    console.print(table)


def _verdict(findings: list[Finding]) -> str:
    problems, notes = (sum(finding.level == level for finding in findings) for level in ("problem", "note"))
    if problems:
        keep = count(problems, "problem keeps", "problems keep")
        return f"\n[bold red]{keep} paceline from training here[/], {count(notes, 'note')}"
    return f"\n[bold green]paceline can train here[/], {count(notes, 'note')}"


def _explain(console: Console, *definitions: str) -> None:
    for definition in definitions:
        console.print(definition, style="dim", markup=False)


def _rate(s: ProbedSpeed) -> str:
    if s.value is None:
        return "not measured"
    if s.what == "copy":
        return str(bandwidth(s.value))
    return str(flops(s.value))


def _bandwidths(s: calls.CollectiveSpeed) -> tuple[str, str, str]:
    return f"{s.time_s * 1e6:,.0f} µs", f"{s.algorithm_bandwidth / 1e9:.3g}", f"{s.bus_bandwidth / 1e9:.3g}"
