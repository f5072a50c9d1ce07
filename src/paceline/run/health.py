"""Health check of a cluster before a run, and the choice of hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.health import HealthReport
from paceline.cluster.launch_engines import is_rank
from paceline.elastic.attempt import places_on
from paceline.elastic.forkserver import warm_up
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.elastic.ssh import NamedHost, ssh
from paceline.errors import ClusterError

_START_S = 240.0  # maximum time for the start of the ranks and all attempts
_REACH_S = 30.0  # maximum time for ssh to reach all hosts


@dataclass(frozen=True)
class CheckedCluster:
    """Report of a check, with the number of each rank's host."""

    report: HealthReport
    host_numbers: list[int]

    def as_json(self) -> dict[str, Any]:
        """Return transport, time, readings and findings.

        The `hosts` of a finding are numbers in the order of `--hosts`.
        """
        from pydantic import TypeAdapter

        values: dict[str, Any] = TypeAdapter(HealthReport).dump_python(self.report, mode="json")
        for finding in values["findings"]:
            finding["hosts"] = sorted({self.host_numbers[rank] for rank in finding["ranks"]})
        return values


def check_cluster(cluster: Cluster, ranks: int | None = None) -> CheckedCluster:
    """Check the devices and links of a cluster, with one rank for each device.

    Under torchrun, every rank must call this function, and the ranks check their own devices.

    Args:
        ranks: number of devices to check, in the order of the hosts; None checks all devices.

    Raises:
        ClusterError: the hosts cannot be emulated here.
        LaunchError: a rank could not be started, crashed or hung.
    """
    if not is_rank():
        warm_up()
    from paceline.comm.measure.health import ATTEMPTS, check_on_rank

    if is_rank():
        report = check_on_rank(ATTEMPTS)
        return CheckedCluster(report, [device.host for device in report.devices])
    with places_on(cluster, min(ranks or cluster.devices, cluster.devices)) as places:
        report = run_on_ranks(check_on_rank, ATTEMPTS, places=places, start_deadline_s=_START_S)[0]
        return CheckedCluster(report, [place.number for place in places])


def refuse_unhealthy(report: HealthReport) -> list[str]:
    """Return notes about devices and links that a run may use.

    Raises:
        ClusterError: the report has problems. The text names each device or link, and what to do.
    """
    if report.problems:
        raise ClusterError(
            "health.unhealthy",
            "the health check before the first step found:\n{problems}\nTraining was not started. Run paceline "
            "doctor --cluster for the table, or train without --health.",
            problems="\n".join(f"- {finding.text}. {finding.advice}" for finding in report.problems),
        )
    return [f"{finding.text}. {finding.advice}" for finding in report.findings]


def healthy_hosts(named: Sequence[NamedHost], spares: int) -> tuple[list[NamedHost], list[NamedHost]]:
    """Check the hosts of `--hosts`, and choose the hosts to train on.

    Hosts that cannot be reached or have problems are left out first, then the last ones of the list.

    Returns:
        The hosts to train on, and the healthy spare hosts.

    Raises:
        ClusterError: `spares` leaves no host to train on, the hosts could not be checked, or more hosts than `spares`
            have problems.
    """
    if spares >= len(named):
        raise ClusterError(
            "health.only_spares",
            "--spares {spares} leaves none of the {count} hosts to train on. List more hosts.",
            spares=spares,
            count=len(named),
        )
    bad = _unreachable(named)
    chosen_hosts(named, bad, spares)
    reached = [number for number in range(len(named)) if number not in bad]
    bad |= {reached[number] for number in _unhealthy([str(named[number]) for number in reached])}
    return chosen_hosts(named, bad, spares)


def chosen_hosts(hosts: Sequence[NamedHost], bad: set[int], spares: int) -> tuple[list[NamedHost], list[NamedHost]]:
    """Return the hosts to train on, and the healthy spare hosts.

    The hosts to train on are the first hosts without problems.

    Raises:
        ClusterError: more hosts than `spares` have problems.
    """
    if len(bad) > spares:
        raise ClusterError(
            "health.too_few_spares",
            "{bad} of {count} hosts have problems, but --spares is {spares}: {names}. Repair them, or list more hosts.",
            bad=len(bad),
            count=len(hosts),
            spares=spares,
            names=[str(hosts[number]) for number in sorted(bad)],
        )
    good = [host for number, host in enumerate(hosts) if number not in bad]
    count = len(hosts) - spares
    return good[:count], good[count:]


def _unreachable(hosts: Sequence[NamedHost]) -> set[int]:
    """Return the numbers of hosts that ssh does not reach. ssh prints the reason."""
    tried = {
        number: subprocess.Popen([*ssh(), "--", host.name, "true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for number, host in enumerate(hosts)
        if not host.is_here
    }
    until, found = time.monotonic() + _REACH_S, set()
    for number, process in tried.items():
        try:
            code = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            print(f"paceline: host {hosts[number].name} cannot be reached by ssh", file=sys.stderr, flush=True)
            found.add(number)
    return found


def _unhealthy(hosts: Sequence[str]) -> set[int]:
    """Run `paceline doctor --cluster` on hosts, and return the numbers of those with problems."""
    command = [sys.executable, "-m", "paceline", "doctor", "--cluster", "--json", "--hosts", ",".join(hosts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *screen, last = done.stdout.splitlines() or [""]
    try:
        found = json.loads(last)["environment"]["health"]["findings"]
    except (ValueError, KeyError) as error:
        raise ClusterError(
            "health.not_checked",
            "the hosts could not be checked (exit code {code}); the reason is above. To train without this check, omit "
            "--spares.",
            code=done.returncode,
        ) from error
    print("\n".join(screen), file=sys.stderr, flush=True)
    return {number for finding in found if finding["level"] == "problem" for number in finding["hosts"]}
