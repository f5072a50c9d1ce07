"""Changes that would help: searches with more memory, faster links, a larger batch, more devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.cluster.cluster import Cluster, Host
from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.planner.cost.estimate import estimate
from paceline.planner.cost.layout import Layout, Machines
from paceline.planner.cost.memory import capacity_bytes
from paceline.planner.cost.prediction import Prediction
from paceline.planner.search.result import Candidate, SearchResult
from paceline.plans.plan import Plan
from paceline.units import bandwidth, count, size

if TYPE_CHECKING:
    from paceline.planner.calibrate import Calibration

T = TypeVar("T")
# relative gain below which a change does not help: the model is not more exact
WORTH = 0.005


@dataclass(frozen=True)
class Change:
    """One possible change, and the prediction with it.

    Attributes:
        what: a phrase, such as `twice the memory`.
        value: its new value, such as `160 GB`.
        gain: relative gain of throughput; None if it could not be predicted.
        plan: the best plan then.
        prediction: of that plan.
        but: its cost beside money, or why nothing is predicted.
    """

    what: str
    value: str = ""
    gain: float | None = None
    plan: Plan | None = None
    prediction: Prediction | None = None
    but: str = ""

    @property
    def helps(self) -> bool:
        """True if the gain is large enough to count."""
        return self.gain is not None and self.gain >= WORTH

    def to_json(self) -> dict[str, Any]:
        """The change as plain JSON values."""
        found = self.prediction
        return {
            "what": self.what,
            "value": self.value,
            "gain": self.gain,
            "helps": self.helps,
            "plan": str(self.plan) if self.plan else None,
            "step_time_s": found.step_time_s if found else None,
            "throughput": found.throughput if found else None,
            "but": self.but,
        }


def changes_of(job: Job, cluster: Cluster, found: SearchResult, calibration: Calibration | None = None) -> tuple[Change, ...]:
    """Every change by itself, the most helpful first, unpredictable ones last."""
    return tuple(sorted(_changes(job, cluster, found, calibration), key=lambda change: -(-1.0 if change.gain is None else change.gain)))


def _changes(job: Job, cluster: Cluster, found: SearchResult, calibration: Calibration | None) -> Iterator[Change]:
    best = found.best[0]
    on = best.layout.machines
    room = capacity_bytes(best.layout)
    more = Change("twice the memory of a device", str(size(2 * room)))
    yield _searched(more, job, with_memory(cluster, 2), best, calibration, no_worse=True)
    yield _more_devices(job, cluster, best, calibration)
    batch = Change("twice the global batch", f"{2 * job.global_batch:,}", but="another training: see --batch-advice")
    yield _searched(batch, with_batch(job, 2 * job.global_batch), cluster, best, calibration)
    if on.hosts > 1:
        faster = Change("links between hosts twice as fast", f"{2 * on.between.bandwidth * 8 / 1e9:,.4g} Gbit/s for each device")
        yield _predicted(faster, found, _between)
    if on.per_host > 1 and on.device.kind != "cpu":
        faster = Change("links inside a host twice as fast", str(bandwidth(2 * on.device.inside.bandwidth)))
        yield _predicted(faster, found, _inside)


def _more_devices(job: Job, cluster: Cluster, best: Candidate, calibration: Calibration | None) -> Change:
    grown = with_devices(cluster, 2)
    if grown is None:
        why = "no link to another host is known; name a cluster to see (docs/plan.md)" if _alike(cluster) else "the hosts are not alike"
        return Change("twice the devices", but=f"not predicted: {why}")
    change = Change("twice the devices", f"{2 * best.layout.machines.devices:,}", but="twice the price an hour")
    return _searched(change, job, grown, best, calibration)


# Changes that need another search


def _searched(
    change: Change, job: Job, cluster: Cluster, best: Candidate, calibration: Calibration | None, *, no_worse: bool = False
) -> Change:
    """Predict a change with the best plan of another job or cluster. With `no_worse`, today's plan could still run, as fast as now."""
    from paceline.planner.search.search import search

    try:
        then = search(job, cluster, top=1, calibration=calibration).best[0]
    except PacelineError as error:
        return replace(change, but=f"not predicted: {str(error).splitlines()[0]}")
    gain = then.prediction.throughput / best.prediction.throughput - 1
    if no_worse and gain < 0:
        then, gain = best, 0.0
    return replace(change, gain=gain, plan=then.plan, prediction=then.prediction)


def with_memory(cluster: Cluster, times: int) -> Cluster:
    """Copy of the cluster with `times` the memory of devices and hosts."""

    def grown(host: Host) -> Host:
        gpus = tuple(gpu.model_copy(update={"memory_bytes": gpu.memory_bytes * times}) for gpu in host.gpus)
        return host.model_copy(update={"gpus": gpus, "memory_bytes": host.memory_bytes * times})

    return cluster.model_copy(update={"hosts": tuple(map(grown, cluster.hosts))})


def with_batch(job: Job, global_batch: int) -> Job:
    """Copy of the job with another global batch."""
    return job.model_copy(update={"global_batch": global_batch})


def with_devices(cluster: Cluster, times: float) -> Cluster | None:
    """Copy of the cluster with `times` the devices.

    None if that is no whole number, if hosts differ, or if another host would be needed and no link to it is known.
    """
    hosts = len(cluster.hosts) * times
    if not _alike(cluster):
        return None
    if hosts < 1:
        return _part_of_a_host(cluster, hosts)
    if not float(hosts).is_integer() or (hosts > len(cluster.hosts) and not _linked(cluster.hosts[0])):
        return None
    first = cluster.hosts[0]
    more = tuple(first.model_copy(update={"name": f"{first.name}+{i}"}) for i in range(1, int(hosts) - len(cluster.hosts) + 1))
    return _of_hosts(cluster, (*cluster.hosts, *more)[: int(hosts)])


def _alike(cluster: Cluster) -> bool:
    """True if all hosts are equal, so that one more can be added."""
    emulate = cluster.emulate
    limits = len({*zip(emulate.rates_bps, emulate.cores, strict=True)}) if emulate else 1
    return limits == 1 and len({(len(host.devices), host.cpu, tuple(gpu.name for gpu in host.gpus)) for host in cluster.hosts}) == 1


def _part_of_a_host(cluster: Cluster, part: float) -> Cluster | None:
    host = cluster.hosts[0]
    devices = len(host.devices) * part
    if devices < 1 or not devices.is_integer():
        return None
    if host.gpus:
        smaller = host.model_copy(update={"gpus": host.gpus[: int(devices)]})
    else:
        cores = {"cores": int(devices), "affinity": host.affinity[: int(devices)], "memory_bytes": int(host.memory_bytes * part)}
        smaller = host.model_copy(update=cores)
    return _of_hosts(cluster, (smaller,))


def _of_hosts(cluster: Cluster, hosts: tuple[Host, ...]) -> Cluster:
    devices = sum(len(host.devices) for host in hosts)
    name, emulate = count(devices, "device"), cluster.emulate
    if emulate:
        limits = {"rate": _first(emulate.rate), "cpu": _first(emulate.cpu)}
        emulate = emulate.model_copy(update={"hosts": len(hosts), **limits})
    return cluster.model_copy(update={"name": name, "hosts": hosts, "emulate": emulate, "catalogue": None})


def _first(limit: T | tuple[T, ...]) -> T:
    return limit[0] if isinstance(limit, tuple) else limit


def _linked(host: Host) -> bool:
    """True if the link to another host is known: stated, or usual for such devices."""
    return bool(host.gpus) or any(link.kind == "ethernet" and link.bandwidth_gbps for link in host.links)


# Predicted again: a link changes the times of plans, not which of them can run


def _predicted(change: Change, found: SearchResult, faster: Callable[[Machines], Machines]) -> Change:
    """Predict a change with the best of the plans found, on the changed machines."""

    def then(layout: Layout) -> Prediction:
        return estimate(replace(layout, machines=faster(layout.machines)))

    plan, prediction = min(((c.plan, then(c.layout)) for c in found.best), key=lambda entry: entry[1].step_time_s)
    return replace(change, gain=prediction.throughput / found.best[0].prediction.throughput - 1, plan=plan, prediction=prediction)


def _between(machines: Machines) -> Machines:
    return replace(machines, between=replace(machines.between, bandwidth=2 * machines.between.bandwidth))


def _inside(machines: Machines) -> Machines:
    inside = replace(machines.device.inside, bandwidth=2 * machines.device.inside.bandwidth)
    return replace(machines, device=replace(machines.device, inside=inside))
