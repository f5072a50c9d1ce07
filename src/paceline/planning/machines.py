"""Conversion of clusters for the cost model, and correction factors from measured runs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd
from statistics import NormalDist, median
from typing import TYPE_CHECKING, TypeAlias

from paceline.cluster.catalogue import CATALOGUE, Accelerator, LinkSpec
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.cluster.named import domains, known, nearest_to
from paceline.errors import ClusterError
from paceline.planning.cost.layout import Interval, Layout, Machines, Prediction
from paceline.planning.cost.measured import calibration_of
from paceline.planning.cost.memory import SPREAD as SPREAD_OF_MEMORY
from paceline.units import count

if TYPE_CHECKING:
    from paceline.planning.calibrate import Calibration
    from paceline.planning.shortlist import Alike
    from paceline.planning.tables.layouts import Row


# latency of a small message between CPUs of two hosts
_TCP_S = 5e-5
_ARM = ("neoverse", "graviton", "cortex", "ampere", "apple", "arm")
# processor names of which all current models have AVX-512
_WIDE = ("xeon", "epyc 9", "epyc-genoa", "epyc-turin", "avx512")


def machines(cluster: Cluster, calibration: Basis | None = None) -> Machines:
    """Convert a cluster to `Machines` for the cost model.

    Devices are looked up in the catalogue by name. The slowest device represents all devices; `speeds` contains the
    relative speeds of the hosts if they differ. On CPUs, each core is a device. The devices of a host share its link.
    Hosts that form one domain, such as an NVL72, count as one host. A calibration takes precedence over the catalogue.

    Raises:
        ClusterError: a GPU is not in the catalogue; the error suggests similar names.
    """
    hosts = list(cluster.hosts_in_use)
    alike = {_likeness(host): host for host in hosts}
    found = {likeness: _device(host) for likeness, host in alike.items()}
    quotas = _quotas(cluster, hosts)
    devices = [_slowed(found[_likeness(host)], quota) for host, quota in zip(hosts, quotas, strict=True)]
    slowest = min(devices, key=_speed)
    memory_bytes = min(device.memory_bytes for host in alike.values() for device in host.devices)
    host_memory_bytes = min(host.memory_bytes // len(host.devices) for host in alike.values())
    uneven = max(map(_speed, devices)) > 1.01 * _speed(slowest)
    each = _usual(len(host.devices) for host in hosts)
    count, per_host = domains(slowest, len(hosts), each)
    speeds = [_speed(device) / _speed(slowest) for device in devices]
    oversubscription, beyond = _oversubscription(hosts)
    return Machines(
        device=replace(slowest, memory_bytes=memory_bytes, host_memory_bytes=host_memory_bytes),
        hosts=count,
        per_host=per_host,
        between=_between(cluster, hosts, slowest),
        speeds=_of_domains(speeds, count) if uneven else (),
        memory_bytes=memory_bytes,
        price_per_hour=cluster.price_per_hour,
        calibration=None if isinstance(calibration, Adjustment) else calibration,
        adjustment=calibration if isinstance(calibration, Adjustment) else None,
        oversubscription=oversubscription,
        oversubscribed_beyond=max(1, beyond * each // per_host),
    )


def resized(machines: Machines, count: int) -> Machines:
    """Return a copy of a cluster with `count` machines.

    A machine runs one operating system. A domain such as an NVL72 has several machines.
    """
    each = _of_a_machine(machines)
    hosts, per_host = domains(machines.device, count, each)
    return replace(machines, hosts=hosts, per_host=per_host, speeds=())


def machine_count(machines: Machines) -> int:
    """Return the number of machines, each of which runs one operating system.

    It is the number of hosts, unless a host stands for a domain of several machines.
    """
    return machines.devices // _of_a_machine(machines)


def shape(machines: Machines) -> str:
    """Return the cluster's name without links, such as `8x8xH100-SXM`, which `--cluster` accepts."""
    return f"{machine_count(machines)}x{_of_a_machine(machines)}x{machines.device.name}"


def on_other_devices(machines: Machines, device: Accelerator) -> Machines:
    """Return a copy of a cluster with the same number of devices of another kind.

    A job may use all memory of the new devices. If the old devices form domains, the new machines have the default size
    for the new kind.
    """
    changed = replace(machines, device=device, memory_bytes=None)
    if not machines.device.machine:
        return changed
    each = gcd(machines.devices, device.machine or device.per_host)
    hosts, per_host = domains(device, machines.devices // each, each)
    return replace(changed, hosts=hosts, per_host=per_host, speeds=())


def _of_a_machine(machines: Machines) -> int:
    each = machines.device.machine
    return each if each and machines.per_host > each and machines.devices % each == 0 else machines.per_host


def _of_domains(speeds: list[float], count: int) -> tuple[float, ...]:
    hosts = len(speeds)
    return tuple(min(speeds[i * hosts // count : -(-(i + 1) * hosts // count)]) for i in range(count))


def _oversubscription(hosts: list[Host]) -> tuple[float, int]:
    """Return the largest oversubscription of any host's link.

    The second value is the number of hosts beyond which this oversubscription applies.
    """
    found = [
        (link.oversubscription, link.oversubscribed_beyond)
        for host in hosts
        for link in host.links
        if link.kind in NETWORK and link.oversubscription > 1
    ]
    return max(found, default=(1.0, 1))


def _likeness(host: Host) -> tuple[object, ...]:
    return host.gpus or (host.cpu, host.cpu_bf16, host.cores, host.memory_bytes)


def _device(host: Host) -> Accelerator:
    if not host.gpus:
        return _core(host)
    return min((_accelerator(name) for name in {gpu.name for gpu in host.gpus}), key=_speed)


def _accelerator(name: str) -> Accelerator:
    if (found := known(name)) is None:
        raise ClusterError(
            "cluster.not_predictable",
            'no plan can be predicted for "{name}": its peak FLOP/s, memory bandwidth and links are not known.\nIt '
            "is not in the catalogue of hardware. {hint} Your own catalogue entry gives these figures: "
            "docs/how-to/add_a_device.md. `paceline train` and `bench` do not need it.",
            name=name,
            hint=nearest_to(name),
        )
    return found


def _speed(device: Accelerator) -> float:
    return device.peak_flops["fp32" if device.is_core else "bf16"]


def _slowed(device: Accelerator, part: float) -> Accelerator:
    if part == 1.0:
        return device
    return replace(device, peak_flops={precision: peak * part for precision, peak in device.peak_flops.items()})


def _usual(counts: Iterable[int]) -> int:
    by_count = Counter(counts)
    return max(by_count, key=lambda count: (by_count[count], count))


def _core(host: Host) -> Accelerator:
    """Return the catalogue entry for one core, chosen by the CPU's name.

    If cores are hyper-threads, the speed is divided accordingly.
    """
    name = host.cpu.lower()
    if name.startswith("cpu") and host.cpu in CATALOGUE:
        return CATALOGUE[host.cpu]
    if any(word in name for word in _ARM):
        found = CATALOGUE["CPU-NEON"]
    elif host.cpu_bf16:
        found = CATALOGUE["CPU-AVX512-BF16"]
    else:
        found = CATALOGUE["CPU-AVX512" if any(word in name for word in _WIDE) else "CPU-AVX2"]
    return _slowed(found, host.physical_cores / host.cores)


NETWORK = ("ethernet", "measured")  # kinds of links between hosts


def _quotas(cluster: Cluster, hosts: list[Host]) -> list[float]:
    limits = cluster.emulate.cores if cluster.emulate else (None,) * len(hosts)
    return [1.0 if limit is None else min(1.0, limit / host.cores) for limit, host in zip(limits, hosts, strict=True)]


def _between(cluster: Cluster, hosts: list[Host], device: Accelerator) -> LinkSpec:
    """Return one device's share of the slowest host's link.

    If no host states a link, the result is the link from the catalogue.
    """
    latency_s = _TCP_S if device.is_core else device.network.latency_s
    delay_s = (cluster.emulate.delay_ms or 0.0) / 1000 if cluster.emulate else 0.0
    shares = []
    for host in hosts:
        rates = [link.bandwidth_gbps for link in host.links if link.kind in NETWORK and link.bandwidth_gbps]
        if rates:
            shares.append((max(rates), max(rates) * 1e9 / 8 / len(host.devices)))
    if not shares:
        return replace(device.network, latency_s=latency_s + delay_s)
    gbps, share = min(shares, key=lambda pair: pair[1])
    return LinkSpec(f"network, {gbps:g} Gbit/s a host", share, latency_s + delay_s)


# measurements made before a prediction: parts of a job on the machines, or whole runs of any job
Basis: TypeAlias = "Calibration | Adjustment"

# Assumed standard deviations of logarithms: of the factor of all runs, of a framework and of a device relative to it,
# and of a run around its factor. Runs may be outliers (Student's t with this number of degrees of freedom)
FACTOR_SPREADS, RUN_SPREAD, DEGREES = (0.12, 0.08, 0.05, 0.05), 0.14, 4.0
# Prior standard deviations of log(measured / predicted), and the number of runs that the prior counts for: with a
# factor, and without one (`benchmarks/published.py`, rows that were not used in fitting)
SPREAD, COLD_SPREAD, SPREAD_RUNS = 0.075, 0.145, 3.0
# The same for CPU cores that were not measured. The catalogue does not know their overhead per step, and steps of small
# models took up to 5.3 times as long as predicted. The 80 % interval reaches to 5 times the prediction.
CORES_SPREAD = 1.0
# The same if parts of the job were measured on the machine: nine in ten of 53 plans on two cores were less than
# 16.2 % off (`benchmarks/planner_local.py`, docs/results/planner.md), which is 1.645 such deviations
MEASURED_SPREAD = 0.1
# The same for the ratio of two plans of one job on the same machines: most of an error is common to them
RATIO_SPREAD = 0.04
COVERED = 0.8  # share of measured times inside of an interval

_ROUNDS = 5
_KINDS = 3  # length of the longest keys, which distinguish software, hardware and precision

Key = tuple[str, ...]


@dataclass(frozen=True)
class Adjustment:
    """Correction factors from measured runs. Without measured runs, predictions stay unchanged.

    Attributes:
        logs: logarithm of measured / predicted for each kind of run. A kind is all runs `()`, a framework, a framework
            on a device, or these with a precision.
        errors: logarithms of measured / predicted that remain after these factors.
        near: model of errors that similar runs share, as an additional correction; None for no such correction.
        memory_logs: logarithms of measured / predicted peak memory.
    """

    logs: dict[Key, float] = field(default_factory=dict)
    errors: tuple[float, ...] = ()
    near: Alike | None = None
    memory_logs: tuple[float, ...] = ()

    @property
    def memory_factor(self) -> float:
        """Factor on predicted memory.

        A prior keeps it near 1 for few runs.
        """
        return math.exp(self._memory_log)

    @property
    def memory_spread(self) -> float:
        """Standard deviation of the logarithm of a corrected prediction of memory."""
        squares = SPREAD_RUNS * SPREAD_OF_MEMORY**2 + sum((log - self._memory_log) ** 2 for log in self.memory_logs)
        return math.sqrt(squares / (SPREAD_RUNS + len(self.memory_logs)))

    @property
    def _memory_log(self) -> float:
        return sum(self.memory_logs) / (len(self.memory_logs) + 1)

    def factor(self, layout: Layout) -> float:
        """Return the factor by which the predicted step time of a layout is multiplied."""
        return self.factor_of_kind(layout) * math.exp(self.near.log(layout) if self.near else 0.0)

    def factor_of_kind(self, layout: Layout) -> float:
        """Return the factor for the framework, device and precision of a layout."""
        return math.exp(_log_of_kind(layout, self.logs))

    def interval(self, layout: Layout, step_time_s: float) -> Interval:
        """Return the 80 % interval of a corrected step time."""
        found = len(self.errors)
        wide = student_quantile((1 + COVERED) / 2, SPREAD_RUNS + found) * self._spread_of(layout)
        return _around(step_time_s, wide, self._rests_on(layout) if found else "the cost model alone")

    def _spread_of(self, layout: Layout) -> float:
        """Return the standard deviation of a prediction's logarithm.

        It is larger if no runs of the layout's framework, device or precision are known.
        """
        if not self.errors:
            return CORES_SPREAD if layout.machines.device.is_core else self.spread
        unseen = [FACTOR_SPREADS[len(key)] for key in _keys(layout) if key not in self.logs]
        return max(self.spread, min(COLD_SPREAD, math.hypot(self.spread, *unseen)))

    def _rests_on(self, layout: Layout) -> str:
        kinds, own = [key for key in self.logs if len(key) == _KINDS], _keys(layout)[-1]
        alike = "of other software, hardware or precision"
        if own in kinds:
            alike = "of this software and hardware" + (" and of others" if len(kinds) > 1 else "")
        return f"{count(len(self.errors), 'measured run')} {alike}"

    @property
    def spread(self) -> float:
        """Standard deviation of `errors`, combined with a prior."""
        assumed = SPREAD if self.errors else COLD_SPREAD
        squares = SPREAD_RUNS * assumed**2 + sum(error**2 for error in self.errors)
        return math.sqrt(squares / (SPREAD_RUNS + len(self.errors)))


def adjustment(runs: Iterable[Row], predicted_s: Callable[[Layout], float], *, rounds: int = _ROUNDS) -> Adjustment:
    """Fit correction factors, and errors that similar runs share, to measured runs.

    The factors of frameworks and devices with few runs stay close to the factor of all runs.

    Args:
        rounds: number of times that the factors and the shared errors are fitted in turn; 0 fits only the factors.
    """
    from paceline.planning.shortlist import alike  # delay the import of numpy, which takes a while
    from paceline.planning.tables.row_memory import memory_ratio

    runs = list(runs)
    memory_logs = tuple(math.log(memory_ratio(row)) for row in runs if row.memory_gib)
    pairs = [(row.layout, math.log(row.seconds / predicted_s(row.layout))) for row in runs if row.seconds]
    if not pairs:
        return Adjustment(memory_logs=memory_logs)
    layouts, logs, near = [layout for layout, _ in pairs], _factors(pairs), None
    for _ in range(rounds):
        near = alike(layouts, [log - _log_of_kind(layout, logs) for layout, log in pairs])
        logs = _factors([(layout, log - near.log(layout)) for layout, log in pairs])
    left = near.left if near else [log - _log_of_kind(layout, logs) for layout, log in pairs]
    return Adjustment(logs, tuple(_left(pairs, left)), near, memory_logs)


def own_adjustment(runs: Iterable[Row], predicted_s: Callable[[Layout], float]) -> Adjustment:
    """Fit one factor to the runs of one job on one machine.

    The factor is used for predictions on more such machines.

    The factor is the median ratio of measured to predicted times. No prior is used.
    """
    pairs = [(row.layout, math.log(row.seconds / predicted_s(row.layout))) for row in runs if row.seconds]
    if not pairs:
        return Adjustment()
    middle = median(log for _, log in pairs)
    logs = {key: middle for layout, _ in pairs for key in _keys(layout)}
    return Adjustment(logs, tuple(_left(pairs, [log - middle for _, log in pairs])))


def _factors(pairs: Sequence[tuple[Layout, float]]) -> dict[Key, float]:
    by_key: dict[Key, list[float]] = defaultdict(list)
    parents: dict[Key, Key] = {}
    for layout, log in pairs:
        for parent, key in pairwise([(), *_keys(layout)]):
            by_key[key].append(log)
            parents[key] = parent
    logs: dict[Key, float] = {}
    for key in sorted(by_key, key=len):
        above = logs[parents[key]] if key else 0.0
        alone = bool(key) and len(by_key[key]) == len(by_key[parents[key]])
        logs[key] = above if alone else _likeliest(by_key[key], above, FACTOR_SPREADS[len(key)])
    return logs


def adjusted(prediction: Prediction, layout: Layout) -> Prediction:
    """Multiply a prediction by the factor of measured runs, and add the 80 % interval.

    The interval is based on the measured runs, on a calibration of the machine, or on the cost model alone.
    """
    found, seconds = layout.machines.adjustment or Adjustment(), prediction.step_time_s
    if calibration_of(layout) is not None:
        wide = NormalDist().inv_cdf((1 + COVERED) / 2) * MEASURED_SPREAD
        return replace(prediction, interval=_around(seconds, wide, "measurements of the job on this machine"))
    factor = factor_of(layout)
    prediction = prediction.times(factor)
    if found.errors:
        corrected = f"corrected by {count(len(found.errors), 'measured run')}: times {factor:.2f}"
        prediction = replace(prediction, notes=(*prediction.notes, corrected))
    return replace(prediction, interval=found.interval(layout, prediction.step_time_s))


def factor_of(layout: Layout) -> float:
    """Return the correction factor for predictions of a layout; 1 without measured runs."""
    found = layout.machines.adjustment
    return 1.0 if found is None else found.factor(layout)


def equal_ratio() -> float:
    """Return the largest ratio of two predicted times that is not a clear difference.

    Up to this ratio, the 80 % interval of the ratio includes 1.
    """
    return math.exp(NormalDist().inv_cdf((1 + COVERED) / 2) * RATIO_SPREAD)


def student_quantile(probability: float, degrees: float) -> float:
    """Return a quantile of Student's t distribution, computed with the Cornish-Fisher expansion.

    Source: Abramowitz and Stegun, 26.7.5. For probabilities up to 0.9 and at least 3 degrees of freedom, the error is
    below 0.1 %.
    """
    z = NormalDist().inv_cdf(probability)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def _around(seconds: float, wide: float, rests_on: str) -> Interval:
    return Interval(seconds / math.exp(wide), seconds * math.exp(wide), rests_on)


def _likeliest(logs: Sequence[float], around: float, spread: float) -> float:
    """Return the most likely logarithm of a factor, given `logs` and a prior.

    The estimate is robust to outliers, because the errors are assumed to follow Student's t distribution.
    """

    def unlikely(value: float) -> float:
        far = sum(math.log1p(((log - value) / RUN_SPREAD) ** 2 / DEGREES) for log in logs)
        return (DEGREES + 1) / 2 * far + ((value - around) / spread) ** 2 / 2

    starts = [around, median(logs), *logs]
    best = min(starts, key=unlikely)
    step = spread
    while step > 1e-4:
        nearer = min((best - step, best, best + step), key=unlikely)
        step = step if nearer != best else step / 2
        best = nearer
    return best


def _left(pairs: Sequence[tuple[Layout, float]], logs: Sequence[float]) -> Iterable[float]:
    """Return the remaining errors as for runs that were not fitted.

    Each error is enlarged, because a run reduces its own error by its influence on the factor.
    """
    counts: dict[Key, int] = defaultdict(int)
    for layout, _ in pairs:
        counts[_keys(layout)[-1]] += 1
    for (layout, _), log in zip(pairs, logs, strict=True):
        count = counts[_keys(layout)[-1]]
        yield log * math.sqrt((count + 1) / count)


def _log_of_kind(layout: Layout, logs: dict[Key, float]) -> float:
    return next((logs[key] for key in reversed(_keys(layout)) if key in logs), 0.0)


def _keys(layout: Layout) -> list[Key]:
    """Return the kinds to which a run belongs, from general to specific.

    The first kind is all runs. The last is the runs with the same framework, device and precision.
    """
    framework, device = layout.framework.name, layout.machines.device.name
    return [(), (framework,), (framework, device), (framework, device, layout.products or layout.precision)]
