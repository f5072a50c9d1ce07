"""Conversion of clusters for the cost model, and correction factors from measured runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.cluster.catalogue import CATALOGUE, Accelerator, LinkSpec
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.cluster.named import domains, known, nearest_to
from paceline.errors import ClusterError
from paceline.planning.cost import constants
from paceline.planning.cost.estimate import step_time_s
from paceline.planning.cost.layout import Interval, Layout, Machines, Prediction
from paceline.planning.cost.measured import calibration_of
from paceline.planning.cost.memory import SPREAD as SPREAD_OF_MEMORY
from paceline.units import count

if TYPE_CHECKING:
    from paceline.planning.calibrate import Calibration
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

# Assumed standard deviations of logarithms: of the factor of all runs, of a kind of software, hardware and precision
# relative to it, and of a run around its prediction. Runs may be outliers (Student's t with this number of degrees of
# freedom). The spread of a constant is this multiple of the one assumed before any run (`constants.ASSUMED`), because
# fitted constants are means over many systems. The numbers are rounded from those with the least errors on published
# runs.
FACTOR_SPREAD, KIND_SPREAD, RUN_SPREAD, DEGREES, CONSTANT_SHARE = 0.05, 0.05, 0.12, 4.0, 2.0
# Prior standard deviations of log(measured / predicted), and the number of runs that the prior counts for: with
# measured runs, and without (`benchmarks/published.py`, rows of sources that no constant was fitted to)
SPREAD, COLD_SPREAD, SPREAD_RUNS = 0.12, 0.18, 3.0
# Logarithm of measured / predicted up to which a run widens the interval: 80 % of the runs say little about outliers
OUTLIER = 0.5
# The same for CPU cores that were not measured. The catalogue does not know their overhead per step, and steps of small
# models took up to 5.3 times as long as predicted. The 80 % interval reaches to 5 times the prediction.
CORES_SPREAD = 1.0
# The same if parts of the job were measured on the machine: nine in ten of 53 plans on two cores were less than
# 16.2 % off (`benchmarks/planner_local.py`, docs/results/planner.md), which is 1.645 such deviations
MEASURED_SPREAD = 0.1
# The same for the ratio of two plans of one job on the same machines: most of an error is common to them
RATIO_SPREAD = 0.04
COVERED = 0.8  # share of measured times inside of an interval

_ROUNDS = 2  # linearizations of the cost model
_FARTHEST = 1.25  # farthest that a constant moves, in its spreads
_REWEIGHTED = 20  # rounds of weights for outliers
_STEP = 0.02  # of a constant's logarithm, for derivatives

Key = tuple[str, ...]


@dataclass(frozen=True)
class Adjustment:
    """Corrections from measured runs. Without measured runs, predictions stay unchanged.

    Attributes:
        constants: values of the cost model's fitted constants that measured runs moved.
        logs: logarithm of measured / predicted for each kind of run, with these constants. A kind is all runs on GPUs
            or all runs on cores, or those of a framework, a device and a precision.
        errors: logarithms of measured / predicted that remain.
        memory_logs: logarithms of measured / predicted peak memory.
    """

    constants: dict[str, float] = field(default_factory=dict)
    logs: dict[Key, float] = field(default_factory=dict)
    errors: tuple[float, ...] = ()
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
        """Return the factor by which a prediction with `constants` is multiplied."""
        return math.exp(next((self.logs[key] for key in reversed(_keys(layout)) if key in self.logs), 0.0))

    def interval(self, layout: Layout, step_time_s: float) -> Interval:
        """Return the 80 % interval of a corrected step time."""
        known, seen = (key in self.logs for key in _keys(layout))
        found = len(self.errors) if seen else 0
        wide = student_quantile((1 + COVERED) / 2, SPREAD_RUNS + found) * self._spread_of(layout)
        return _around(step_time_s, wide, self._rests_on(layout) if known else "the cost model alone")

    def _spread_of(self, layout: Layout) -> float:
        """Return the standard deviation of a prediction's logarithm.

        Runs of other software, hardware or precision do not narrow it: on published runs, predictions that were
        corrected by another source's runs were as far off as uncorrected ones.
        """
        known, seen = (key in self.logs for key in _keys(layout))
        if seen:
            return self.spread
        if layout.machines.device.is_core and not known:
            return CORES_SPREAD
        return max(self.spread if known else 0.0, COLD_SPREAD)

    def _rests_on(self, layout: Layout) -> str:
        kinds, own = [key for key in self.logs if len(key) > 1], _keys(layout)[-1]
        alike = "of other software, hardware or precision"
        if own in kinds:
            alike = "of this software and hardware" + (" and of others" if len(kinds) > 1 else "")
        return f"{count(len(self.errors), 'measured run')} {alike}"

    @property
    def spread(self) -> float:
        """Standard deviation of `errors`, combined with a prior."""
        assumed = SPREAD if self.errors else COLD_SPREAD
        squares = SPREAD_RUNS * assumed**2 + sum(min(abs(error), OUTLIER) ** 2 for error in self.errors)
        return math.sqrt(squares / (SPREAD_RUNS + len(self.errors)))


def adjustment(runs: Iterable[Row]) -> Adjustment:
    """Correct the cost model by measured runs.

    The constants of the cost model move towards the runs by ridge regression on the logarithms of step times: each
    constant, the factor of all runs and the factor of each kind have a prior, so that few runs move little. Runs on
    cores and runs on GPUs do not affect each other.
    """
    from paceline.planning.tables.row_memory import memory_ratio

    runs = list(runs)
    rows = [row for row in runs if row.seconds]
    constants.use()  # an earlier prediction may have used moved constants
    moved: dict[str, float] = {}
    logs: dict[Key, float] = {}
    errors: list[float] = []
    for on_cores in (False, True):
        own = [row for row in rows if row.layout.machines.device.is_core == on_cores]
        start = {} if on_cores else {name: constants.fitted(name) for name in constants.ASSUMED}
        found = regression(own, start, {name: each.spread for name, each in constants.ASSUMED.items()}, step_time_s)
        moved, logs, errors = moved | found.constants, logs | found.logs, [*errors, *found.errors]
    return Adjustment(moved, logs, tuple(errors), tuple(math.log(memory_ratio(row)) for row in runs if row.memory_gib))


def regression(
    rows: Sequence[Row],
    start: Mapping[str, float],
    spreads: Mapping[str, float],
    seconds: Callable[[Layout, Mapping[str, float]], float],
) -> Adjustment:
    """Move constants of a model, and factors, towards measured runs of one kind of device.

    Args:
        start: the constants that may move, and their values without these runs.
        spreads: prior standard deviations of the constants' logarithms.
        seconds: function that predicts the step time of a layout with given constants.
    """
    if not rows:
        return Adjustment()
    import numpy as np  # delay the import, which takes a while

    layouts, size = [row.layout for row in rows], len(start)
    measured = np.array([math.log(row.seconds or 1.0) for row in rows])
    own = np.array([CONSTANT_SHARE * spreads[name] for name in start])
    kinds = list(dict.fromkeys(_keys(layout)[-1] for layout in layouts))
    groups = np.array([[FACTOR_SPREAD, *(KIND_SPREAD * (_keys(one)[-1] == kind) for kind in kinds)] for one in layouts])

    def logs_with(values: Mapping[str, float]) -> np.ndarray:
        return np.array([math.log(seconds(layout, values)) for layout in layouts])

    base = logs_with(start)
    slopes = [(logs_with({**start, name: value * math.exp(_STEP)}) - base) / _STEP for name, value in start.items()]
    design = np.hstack([np.reshape(slopes, (size, len(rows))).T * own, groups])
    offset, values = measured - base, dict(start)
    for _ in range(_ROUNDS):
        place, influence = _ridge(design, offset)
        place[:size] = np.clip(place[:size], -_FARTHEST, _FARTHEST)
        values = {name: float(start[name] * math.exp(x)) for name, x in zip(start, place[:size] * own, strict=True)}
        # the cost model is not linear: the next round fits what the linear model gets wrong
        offset = measured - logs_with(values) + design[:, :size] @ place[:size]
    left = measured - logs_with(values)
    place, _ = _ridge(groups, left)
    errors = left - groups @ place
    factor, *each = place * [FACTOR_SPREAD, *[KIND_SPREAD] * len(kinds)]
    logs = {_keys(layouts[0])[0]: float(factor)} | {
        kind: float(factor + own_factor) for kind, own_factor in zip(kinds, each, strict=True)
    }
    enlarged = (float(error / math.sqrt(1 - min(part, 0.75))) for error, part in zip(errors, influence, strict=True))
    return Adjustment(values, logs, tuple(enlarged))


def _ridge(design: Any, offset: Any) -> tuple[Any, Any]:
    """Return the most likely parameters, which have unit priors.

    The second value is the influence of each run on its own error.
    """
    import numpy as np

    weights = np.ones(len(offset))
    for _ in range(_REWEIGHTED):
        weighted = design * (weights / RUN_SPREAD**2)[:, None]
        inverse = np.linalg.inv(np.eye(design.shape[1]) + design.T @ weighted)
        place = inverse @ (weighted.T @ offset)
        errors = (offset - design @ place) / RUN_SPREAD
        weights = (DEGREES + 1) / (DEGREES + errors**2)
    return place, np.einsum("ij,jk,ik->i", design, inverse, weighted)


def own_adjustment(runs: Iterable[Row]) -> Adjustment:
    """Fit one factor to the runs of one job on one machine.

    The factor is used for predictions on more such machines. It is the median ratio of measured to predicted times. No
    prior is used.
    """
    pairs = [(row.layout, math.log(row.seconds / step_time_s(row.layout, {}))) for row in runs if row.seconds]
    if not pairs:
        return Adjustment()
    middle = median(log for _, log in pairs)
    logs = {key: middle for layout, _ in pairs for key in _keys(layout)}
    wider = math.sqrt((len(pairs) + 1) / len(pairs))
    return Adjustment({}, logs, tuple(wider * (log - middle) for _, log in pairs))


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


def _keys(layout: Layout) -> list[Key]:
    """Return the kinds to which a run belongs, from general to specific."""
    device, precision = layout.machines.device, layout.products or layout.precision
    return [
        ("cores" if device.is_core else "GPUs",),
        (layout.framework.name, device.name, precision),
    ]
