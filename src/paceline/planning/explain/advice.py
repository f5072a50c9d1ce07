"""Advice on what would make a plan faster, based on what-if predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.catalogue import LinkSpec
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.errors import ClusterError, PacelineError
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.partition import contiguous
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.estimate import predict_layout, use_corrections
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.memory import capacity_bytes
from paceline.planning.cost.stages import stages
from paceline.planning.machines import factor_of
from paceline.planning.plan import AXES, DATA_AXES, Plan
from paceline.planning.prediction import Layouts, priced
from paceline.planning.search.result import Candidate, SearchResult, figures
from paceline.planning.search.search import search
from paceline.units import bandwidth, count, percent, size

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


# relative gain below which a change is not reported as helpful, because the cost model is not precise enough
WORTH = 0.005
# fraction of the step that another sync rule, precision or rank order must save to be reported
_LEAST_SAVED = 0.02
INEXACT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"compress": "bf16"}, "gradients travel in 16 bits between replicas: losses differ slightly"),
    ({"compress": "int8"}, "gradients travel in 8 bits between replicas: losses differ"),
    ({"compress": "powersgd:4"}, "replicas reduce an approximation of their gradients: losses differ"),
    ({"sync": "local:8"}, "replicas train independently and average every 8 steps: losses differ"),
    (
        {"sync": "server:staleness=4"},
        "servers apply gradients that are up to 4 batches old, and no worker waits: losses differ",
    ),
    ({"sync": "diloco:30"}, "replicas train independently and synchronize every 30 steps: losses differ"),
)


@dataclass(frozen=True)
class Advice:
    """One possible change, and the best plan after this change.

    Attributes:
        what: the change as a phrase, such as `twice the memory`, or as plan text, such as `sync=local:8`.
        value: the new value, such as `160 GB`.
        gain: relative gain in throughput; None if it could not be predicted.
        best: best plan after the change.
        but: a drawback of the change other than its price, or the reason why there is no prediction.
    """

    what: str
    value: str = ""
    gain: float | None = None
    best: Candidate | None = None
    but: str = ""

    @property
    def helps(self) -> bool:
        """True if the gain is at least `WORTH`."""
        return self.gain is not None and self.gain >= WORTH

    @property
    def saved(self) -> float:
        """Fraction of the step time that the change saves."""
        return 1 - 1 / (1 + self.gain) if self.gain else 0.0

    @property
    def words(self) -> str:
        """The gain as text: `+12.3 %`, `no gain`, or "" if it is unknown."""
        if self.gain is None:
            return ""
        if abs(self.gain) < WORTH:
            return "no gain"
        return f"+{percent(self.gain)}" if self.gain > 0 else f"\N{MINUS SIGN}{percent(-self.gain)}"

    @property
    def change(self) -> str:
        """The change and its new value as text."""
        return f"{self.what}: {self.value}" if self.value else self.what

    @property
    def about(self) -> str:
        """The drawback of the change and, if the change helps, the best plan after it."""
        but = self.but if self.helps or self.gain is None else ""
        return "; ".join(filter(None, (but, f"then {self.best.plan}" if self.best and self.helps else "")))

    def to_json(self) -> dict[str, Any]:
        """Return the advice as a dictionary for JSON."""
        told = {"what": self.what, "value": self.value, "gain": self.gain, "helps": self.helps, "but": self.but}
        return told | figures(self.best)


def other_machines(case: Case, found: SearchResult) -> tuple[Advice, ...]:
    """Return advice on other machines and batches, sorted by gain.

    The largest gain comes first. Changes that could not be predicted come last.
    """
    case = case._replace(plans=tuple((candidate.plan, candidate.layout) for candidate in found.best))
    return tuple(
        sorted(_other_machines(case, found.fastest), key=lambda one: -(-1.0 if one.gain is None else one.gain))
    )


def _other_machines(case: Case, best: Candidate) -> Iterator[Advice]:
    on, batches = best.layout.machines, 2 * case.job.global_batch
    room, rate = (
        size(2 * capacity_bytes(best.layout)),
        f"{2 * on.between.bandwidth * 8 / 1e9:,.4g} Gbit/s for each device",
    )
    changes = [
        (Advice("twice the memory of a device", str(room)), memory(2), True),
        (Advice("twice the devices", f"{2 * on.devices:,}", but="twice the price an hour"), devices(2), True),
        (
            Advice(
                "twice the global batch",
                f"{batches:,}",
                but="a different batch changes the training: see `paceline plan batch`",
            ),
            batch(batches),
            True,
        ),
        (Advice("links between hosts twice as fast", rate), links_between(2), on.hosts > 1),
        (
            Advice("links inside a host twice as fast", str(bandwidth(2 * on.device.inside.bandwidth))),
            links_inside(2),
            on.per_host > 1 and not on.device.is_core,
        ),
    ]
    more, *others = (_predicted(advice, case, change, best) for advice, change, there in changes if there)
    # the current plan could still run, equally fast
    yield replace(more, gain=0.0, best=best) if more.gain is not None and more.gain < 0 else more
    yield from others


def _predicted(advice: Advice, case: Case, change: Change, best: Candidate) -> Advice:
    outcome = what_if(case, change)
    then = outcome.best
    if then is None:
        return replace(advice, but=f"not predicted: {outcome.why}")
    return replace(advice, gain=then.prediction.throughput / best.prediction.throughput - 1, best=then)


def other_trainings(case: Case, best: Candidate) -> tuple[Advice, ...]:
    """Return faster alternatives that change the training, the largest gain first.

    They are only reported, never chosen automatically.

    If the best plan has only one replica, other sync rules are tried with one replica per device.
    """
    found = [
        _predicted(Advice(what, but=but), case._replace(plans=((plan, best.layout),)), change, best)
        for what, but, change, plan in _trainings(case, best)
    ]
    worth = [one for one in found if one.best and one.best.prediction.fits and one.saved >= _LEAST_SAVED]
    return tuple(sorted(worth, key=lambda one: -one.saved))


def _trainings(case: Case, best: Candidate) -> Iterator[tuple[str, str, Change, Plan]]:
    """Yield other sync rules, precisions and rank orders.

    Each item has the text of the change, its drawback, the change itself, and the plan that is changed.
    """
    plan, degrees = best.plan, ""
    if plan.dp == 1 and case.cluster.devices > 1:
        plan = Plan(dp=case.cluster.devices, precision=plan.precision)
        degrees = f"dp={plan.dp} "
    # exact rules differ only in how they reduce; `allreduce` chooses among their algorithms by itself
    for values, but in INEXACT if plan.dp > 1 and not plan.inexact else ():
        if not reasons_against(replace(plan, **values), case.job, case.cluster):
            words = " ".join(f"{key}={value}" for key, value in values.items())
            yield degrees + words, but, keys(**values), plan
    peaks = best.layout.machines.device.peak_flops
    slow = any(device.bf16 is False for host in case.cluster.hosts[:1] for device in host.devices)
    if best.plan.precision_for(case.job) == "fp32" and not slow and peaks.get("bf16", 0.0) > peaks.get("fp32", 0.0):
        but = "products are computed with fewer digits: slightly different losses"
        yield "precision=bf16", but, keys(precision="bf16"), best.plan
    usual = best.layout.order if best.layout.machines.hosts > 1 else ()
    for axis in usual[1:]:
        if getattr(best.layout, axis) > 1:
            order = (axis, *(other for other in usual if other != axis))
            but = "a run's mesh has one order, which would have to change"
            yield f"ranks of {axis} next to each other", but, layouts(partial(replace, order=order)), best.plan


# fraction of the step below which a gain is not reported
_LEAST_GAIN = 0.01
Floats = NDArray[np.float64]


def weights_by_speed(case: Case, best: Candidate) -> tuple[tuple[float, ...] | None, float]:
    """Return batch weights that follow the speeds of the data-parallel ranks.

    The second value is the fraction of the step time that these weights save.

    The speed of a replica is the speed of its slowest rank. The weights are None if all ranks are equally fast, the job
    already has weights, the plan has a pipeline, or the batch is too small for unequal shares.
    """
    layout = best.layout
    if not layout.machines.speeds or case.job.partition.weights is not None or layout.pp > 1 or layout.data_ranks == 1:
        return None, 0.0
    speeds = _speeds(layout, DATA_AXES)
    weights = tuple(float(round(speed / speeds.mean(), 3)) for speed in speeds)
    shares = _shares(case.job, weights)
    if shares.min() < layout.microbatches:
        return None, 0.0
    # samples that take the slowest device as long as they take the last data-parallel rank
    slowest = float((shares / speeds).max())
    then, _ = what_if(_of(case, best), layouts(lambda layout: replace(layout, samples=slowest / layout.microbatches)))
    gain = 1 - then.prediction.step_time_s / best.prediction.step_time_s if then else 0.0
    return (weights, gain) if gain >= _LEAST_GAIN else (None, 0.0)


def cut_by_speed(case: Case, best: Candidate) -> tuple[tuple[str, ...], float]:
    """Return a cut of the pipeline that gives fewer blocks to slow hosts.

    The cut is the name of the first block of every stage but the first.

    The second value is the fraction of the step time that this cut saves. The cut is () if the default cut is as good.
    """
    layout = best.layout
    if layout.pp == 1 or layout.chunks > 1 or not layout.machines.speeds:
        return (), 0.0
    use_corrections(layout)
    speeds = _speeds(layout, ("pp",))
    blocks = [
        cost.forward + cost.backward
        for cost in stages(replace(layout, pp=len(layout.trace.blocks), cut=(1,) * len(layout.trace.blocks)))
    ]
    cut = contiguous(blocks, len(speeds), speeds.tolist())
    before = [cost.forward + cost.backward for cost in stages(layout)]
    ends = np.cumsum(cut)
    after = [sum(blocks[end - count : end]) for count, end in zip(cut, ends, strict=True)]
    saved = layout.microbatches * (_slowest(before, speeds) - _slowest(after, speeds))
    gain = saved * factor_of(layout) / (best.prediction.step_time_s * _slowest(before, speeds) / max(before))
    names = tuple(layout.trace.blocks[end].name for end in ends[:-1])
    named = len(set(names)) == len(names) and all(names)
    if (
        gain < _LEAST_GAIN
        or not named
        or reasons_against(replace(best.plan, cut=",".join(names)), case.job, case.cluster)
    ):
        return (), 0.0
    then, _ = what_if(_of(case, best), layouts(lambda layout: replace(layout, cut=cut)))
    return (names, gain) if then and then.prediction.fits else ((), 0.0)


def _of(case: Case, best: Candidate) -> Case:
    return case._replace(plans=((best.plan, best.layout),))


def _speeds(layout: Layout, axes: tuple[str, ...]) -> Floats:
    """Return the speed of each position along some axes.

    The speed of a position is that of its slowest rank.
    """
    ranks = np.arange(layout.ranks).reshape([getattr(layout, axis) for axis in AXES])
    hosts = np.minimum(ranks // layout.machines.per_host, len(layout.machines.speeds) - 1)
    of_ranks = np.asarray(layout.machines.speeds, np.float64)[hosts]
    others = tuple(i for i, axis in enumerate(AXES) if axis not in axes)
    return np.asarray(of_ranks.min(axis=others).reshape(-1))


def _shares(job: Job, weights: tuple[float, ...]) -> NDArray[np.int64]:
    spec, batch = PartitionSpec(weights=weights), job.global_batch
    return np.array(
        Partition(spec, samples=batch, global_batch=batch, seed=0, replica=0, replicas=len(weights)).shares(0), np.int64
    )


def _slowest(seconds: list[float], speeds: Floats) -> float:
    return float((np.asarray(seconds) / speeds).max())


T = TypeVar("T")


class Case(NamedTuple):
    """Job, cluster and calibration for which the best plan is predicted.

    Attributes:
        plans: known plans, of which the fastest is chosen; () to search all plans.
    """

    job: Job
    cluster: Cluster
    calibration: Basis | None = None
    plans: tuple[tuple[Plan, Layout], ...] = ()


class Outcome(NamedTuple):
    """Best plan of a case, or the error if no plan can be predicted."""

    best: Candidate | None
    error: PacelineError | None = None

    @property
    def why(self) -> str:
        """First line of the error text; "" without an error."""
        return str(self.error).splitlines()[0] if self.error else ""


Change = Callable[[Case], Case]


def what_if(case: Case, change: Change) -> Outcome:
    """Find the best plan of a case after one change."""
    try:
        changed = change(case)
        if not changed.plans:
            return Outcome(search(changed.job, changed.cluster, top=1, calibration=changed.calibration).best[0])
    except PacelineError as error:
        return Outcome(None, error)
    again = (
        Candidate(plan, layout, priced(predict_layout(layout), changed.job, changed.cluster, plan, layout))
        for plan, layout in changed.plans
    )
    return Outcome(min(again, key=lambda one: (not one.prediction.fits, one.prediction.step_time_s)))


# Changes


def memory(times: float) -> Change:
    """Return a change that multiplies the memory of all devices and hosts by a factor."""

    def grown(host: Host) -> Host:
        gpus = tuple(gpu.model_copy(update={"memory_bytes": int(gpu.memory_bytes * times)}) for gpu in host.gpus)
        return host.model_copy(update={"gpus": gpus, "memory_bytes": int(host.memory_bytes * times)})

    return lambda case: case._replace(
        cluster=case.cluster.model_copy(update={"hosts": tuple(map(grown, case.cluster.hosts))}), plans=()
    )


def devices(times: float) -> Change:
    """Return a change that multiplies the number of devices by a factor."""

    def change(case: Case) -> Case:
        resized = with_devices(case.cluster, times)
        if resized is None:
            if not _alike(case.cluster):
                raise ClusterError("explain.hosts_differ", "the hosts have different hardware")
            raise ClusterError(
                "explain.link_unknown",
                "no link to another host is known. Name a cluster for this prediction (docs/how-to/choose_a_plan.md).",
            )
        return case._replace(cluster=resized, plans=())

    return change


def hosts_added(number: int) -> Change:
    """Return a change that adds `number` hosts; a negative number removes hosts."""

    def change(case: Case) -> Case:
        now = len(case.cluster.hosts)
        if now + number < 1:
            raise ClusterError(
                "explain.hosts_negative",
                "the cluster cannot have {number} fewer hosts: it has only {hosts}",
                hosts=count(now, "host"),
                number=-number,
            )
        return devices((now + number) / now)(case)

    return change


def batch(global_batch: int) -> Change:
    """Return a change that sets the global batch."""
    return lambda case: case._replace(job=case.job.model_copy(update={"global_batch": global_batch}), plans=())


def layouts(change: Callable[[Layout], Layout]) -> Change:
    """Return a change that applies a function to the layouts of the known plans."""
    return lambda case: case._replace(plans=tuple((plan, change(layout)) for plan, layout in case.plans))


def keys(**values: Any) -> Change:
    """Return a change that sets keys of the known plans."""

    def change(case: Case) -> Case:
        plans = ((replace(plan, **values), layout) for plan, layout in case.plans)
        return case._replace(
            plans=tuple((plan, Layouts(case.job, layout.machines).of(plan, layout.threads)) for plan, layout in plans)
        )

    return change


def links_between(times: float) -> Change:
    """Return a change that multiplies the bandwidth between hosts by a factor."""
    return layouts(lambda on: replace(on, machines=replace(on.machines, between=_faster(on.machines.between, times))))


def links_inside(times: float) -> Change:
    """Return a change that multiplies the bandwidth inside hosts by a factor."""

    def faster(layout: Layout) -> Layout:
        device = layout.machines.device
        return replace(
            layout, machines=replace(layout.machines, device=replace(device, inside=_faster(device.inside, times)))
        )

    return layouts(faster)


def _faster(link: LinkSpec, times: float) -> LinkSpec:
    return replace(link, bandwidth=times * link.bandwidth)


def with_devices(cluster: Cluster, times: float) -> Cluster | None:
    """Return a copy of the cluster with `times` times as many devices.

    The result is None if the number of devices would not be an integer, if the hosts differ, or if the link to an
    additional host is unknown.
    """
    hosts = round(len(cluster.hosts) * times, 9)  # (n + 1) / n of n hosts must give exactly n + 1
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
    """True if the bandwidth to another host is known.

    The cluster states it, or the catalogue has a default for GPUs.
    """
    return bool(host.gpus) or any(link.kind == "ethernet" and link.bandwidth_gbps for link in host.links)


_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4, 8)


@dataclass(frozen=True)
class ScaledPlan:
    """Prediction for the same job and global batch on another number of devices.

    Attributes:
        best: best plan on this number of devices; None if no plan fits.
        speedup: speedup over the smallest number of devices on which a plan fits.
        efficiency: speedup divided by the ratio of the numbers of devices.
        why: reason why no plan fits.
    """

    devices: int
    best: Candidate | None = None
    speedup: float | None = None
    efficiency: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the point as a dictionary for JSON."""
        told = {"devices": self.devices, "speedup": self.speedup, "efficiency": self.efficiency, "why": self.why}
        return told | figures(self.best)


def scaling(
    job: Job, cluster: Cluster, found: SearchResult, calibration: Basis | None = None
) -> tuple[ScaledPlan, ...]:
    """Predict the scaling of a job to fewer and more devices.

    Numbers of devices for which a link is unknown are left out.
    """
    points: list[ScaledPlan] = []
    first: ScaledPlan | None = None
    for on, outcome in best_on(Case(job, cluster, calibration), _FACTORS, found):
        point = ScaledPlan(on.devices, outcome.best, why=outcome.why)
        if point.best is not None:
            first = first or point
            assert first.best is not None
            speedup = first.best.prediction.step_time_s / point.best.prediction.step_time_s
            point = replace(point, speedup=speedup, efficiency=speedup * first.devices / on.devices)
        points.append(point)
    return tuple(points)


def best_on(
    case: Case, factors: Iterable[float], found: SearchResult | None = None
) -> Iterator[tuple[Cluster, Outcome]]:
    """Yield clusters with multiples of the devices, each with its best plan.

    Factors for which no cluster can be built are skipped.

    Args:
        found: result of a search on the unchanged cluster; None searches again.
    """
    for factor in factors:
        resized = with_devices(case.cluster, factor)
        if factor == 1 and found is not None:
            yield case.cluster, Outcome(found.fastest)
        elif factor == 1 or resized is not None:
            on = case.cluster if factor == 1 or resized is None else resized
            yield on, what_if(case._replace(cluster=on), lambda same: same)
