"""Prediction with one thing changed, behind all advice on a job and a cluster.

A change of the job or of the cluster alters which plans can run, so the best one is searched anew. A change of speeds,
or of one plan's keys, does not: known plans are predicted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.cluster.catalogue import LinkSpec
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.errors import ClusterError, PacelineError
from paceline.job.job import Job
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.layout import Layout, Prediction
from paceline.planning.plan import Plan
from paceline.planning.predict import Layouts, priced
from paceline.planning.search.result import Candidate, SearchResult
from paceline.planning.search.search import search
from paceline.units import count

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


T = TypeVar("T")


class Case(NamedTuple):
    """Case that a plan is asked for.

    Attributes:
        plans: known plans, of which the fastest is taken; () to search all plans.
    """

    job: Job
    cluster: Cluster
    calibration: Basis | None = None
    plans: tuple[tuple[Plan, Layout], ...] = ()


class Outcome(NamedTuple):
    """Best plan of a case; None with the error if nothing can be predicted."""

    best: Candidate | None
    error: PacelineError | None = None

    @property
    def why(self) -> str:
        """The error's first line."""
        return str(self.error).splitlines()[0] if self.error else ""


Change = Callable[[Case], Case]


def what_if(case: Case, change: Change) -> Outcome:
    """The best plan of a case with one thing changed."""
    try:
        changed = change(case)
        if not changed.plans:
            return Outcome(search(changed.job, changed.cluster, top=1, calibration=changed.calibration).best[0])
    except PacelineError as error:
        return Outcome(None, error)
    again = (
        Candidate(plan, layout, priced(estimate(layout), changed.job, changed.cluster, plan, layout))
        for plan, layout in changed.plans
    )
    return Outcome(min(again, key=lambda one: (not one.prediction.fits, one.prediction.step_time_s)))


# Changes


def memory(times: float) -> Change:
    """Change of the memory of all devices and hosts, by a factor."""

    def grown(host: Host) -> Host:
        gpus = tuple(gpu.model_copy(update={"memory_bytes": int(gpu.memory_bytes * times)}) for gpu in host.gpus)
        return host.model_copy(update={"gpus": gpus, "memory_bytes": int(host.memory_bytes * times)})

    return lambda case: case._replace(
        cluster=case.cluster.model_copy(update={"hosts": tuple(map(grown, case.cluster.hosts))}), plans=()
    )


def devices(times: float) -> Change:
    """Change of the number of devices, by a factor."""

    def change(case: Case) -> Case:
        resized = with_devices(case.cluster, times)
        if resized is None:
            known = "no link to another host is known; name a cluster to see (docs/plan.md)"
            raise ClusterError(known if _alike(case.cluster) else "the hosts are not alike")
        return case._replace(cluster=resized, plans=())

    return change


def hosts_added(number: int) -> Change:
    """Change of the number of hosts by a difference, which may be negative."""

    def change(case: Case) -> Case:
        now = len(case.cluster.hosts)
        if now + number < 1:
            raise ClusterError(f"{count(now, 'host')} cannot be {-number} fewer")
        return devices((now + number) / now)(case)

    return change


def batch(global_batch: int) -> Change:
    """Change of the global batch."""
    return lambda case: case._replace(job=case.job.model_copy(update={"global_batch": global_batch}), plans=())


def layouts(change: Callable[[Layout], Layout]) -> Change:
    """Change of the known plans as numbers for the cost model."""
    return lambda case: case._replace(plans=tuple((plan, change(layout)) for plan, layout in case.plans))


def keys(**values: Any) -> Change:
    """Change of keys of the known plans."""

    def change(case: Case) -> Case:
        plans = ((replace(plan, **values), layout) for plan, layout in case.plans)
        return case._replace(
            plans=tuple((plan, Layouts(case.job, layout.machines).of(plan, layout.threads)) for plan, layout in plans)
        )

    return change


def links_between(times: float) -> Change:
    """Change of the bandwidth between hosts, by a factor."""
    return layouts(lambda on: replace(on, machines=replace(on.machines, between=_faster(on.machines.between, times))))


def links_inside(times: float) -> Change:
    """Change of the bandwidth inside hosts, by a factor."""

    def faster(layout: Layout) -> Layout:
        device = layout.machines.device
        return replace(
            layout, machines=replace(layout.machines, device=replace(device, inside=_faster(device.inside, times)))
        )

    return layouts(faster)


def _faster(link: LinkSpec, times: float) -> LinkSpec:
    return replace(link, bandwidth=times * link.bandwidth)


def with_devices(cluster: Cluster, times: float) -> Cluster | None:
    """Copy of the cluster with `times` the devices.

    None if that is not a whole number, if hosts differ, or if another host would be needed and no link to it is known.
    """
    hosts = round(len(cluster.hosts) * times, 9)  # (n + 1) / n of n hosts is n + 1
    if not _alike(cluster):
        return None
    if hosts < 1:
        return _part_of_a_host(cluster, hosts)
    if not float(hosts).is_integer() or (hosts > len(cluster.hosts) and not _linked(cluster.hosts[0])):
        return None
    first = cluster.hosts[0]
    more = tuple(
        first.model_copy(update={"name": f"{first.name}+{i}"}) for i in range(1, int(hosts) - len(cluster.hosts) + 1)
    )
    return _of_hosts(cluster, (*cluster.hosts, *more)[: int(hosts)])


def _alike(cluster: Cluster) -> bool:
    """True if all hosts are equal, so that one more can be added."""
    emulate = cluster.emulate
    limits = len({*zip(emulate.rates_bps, emulate.cores, strict=True)}) if emulate else 1
    return (
        limits == 1
        and len({(len(host.devices), host.cpu, tuple(gpu.name for gpu in host.gpus)) for host in cluster.hosts}) == 1
    )


def _part_of_a_host(cluster: Cluster, part: float) -> Cluster | None:
    host = cluster.hosts[0]
    devices = len(host.devices) * part
    if devices < 1 or not devices.is_integer():
        return None
    if host.gpus:
        smaller = host.model_copy(update={"gpus": host.gpus[: int(devices)]})
    else:
        cores = {
            "cores": int(devices),
            "affinity": host.affinity[: int(devices)],
            "memory_bytes": int(host.memory_bytes * part),
        }
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


_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4, 8)


@dataclass(frozen=True)
class ScaledPlan:
    """The job, global batch included, on another number of devices (strong scaling).

    Attributes:
        plan, prediction: the best there; None if none fits.
        speedup: relative to the fewest devices on which any plan fits.
        efficiency: speedup over the ratio of devices.
        why: reason why none fits.
    """

    devices: int
    plan: Plan | None = None
    prediction: Prediction | None = None
    speedup: float | None = None
    efficiency: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The point as plain JSON values."""
        return {
            "devices": self.devices,
            "plan": str(self.plan) if self.plan else None,
            "step_time_s": self.prediction.step_time_s if self.prediction else None,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "why": self.why,
        }


def scaling(
    job: Job, cluster: Cluster, found: SearchResult, calibration: Basis | None = None
) -> tuple[ScaledPlan, ...]:
    """Points from an eighth of the devices to eight times as many. Clusters whose links are unknown are left out."""
    points: list[ScaledPlan] = []
    for on, outcome in best_on(Case(job, cluster, calibration), _FACTORS, found):
        best, count = outcome.best, on.devices
        points.append(
            _compared(points, count, best.plan, best.prediction) if best else ScaledPlan(count, why=outcome.why)
        )
    return tuple(points)


def best_on(
    case: Case, factors: Iterable[float], found: SearchResult | None = None
) -> Iterator[tuple[Cluster, Outcome]]:
    """Clusters with multiples of the devices, and the best plan on each.

    Factors that make no cluster are left out.

    Args:
        found: result of a search on the cluster itself, where there is one.
    """
    for factor in factors:
        resized = with_devices(case.cluster, factor)
        if factor == 1 and found is not None:
            yield case.cluster, Outcome(found.fastest)
        elif factor == 1 or resized is not None:
            on = case.cluster if factor == 1 or resized is None else resized
            yield on, what_if(case._replace(cluster=on), lambda same: same)


def _compared(before: list[ScaledPlan], devices: int, plan: Plan, prediction: Prediction) -> ScaledPlan:
    first = next((point for point in before if point.prediction is not None), None)
    if first is None or first.prediction is None:
        return ScaledPlan(devices, plan, prediction, 1.0, 1.0)
    speedup = first.prediction.step_time_s / prediction.step_time_s
    return ScaledPlan(devices, plan, prediction, speedup, speedup * first.devices / devices)
