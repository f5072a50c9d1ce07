"""Calibration: measured times and memory of a job on this machine, kept in a cache.

A calibration contains the inputs of the CPU cost model that cannot be derived from shapes. They are the time of each
part of the model at several microbatch sizes, the overhead of each kind of split, the time of each collective over each
transport, and the memory of a rank's process without a model. Times are measured both for one rank alone and while
other ranks use the remaining cores. Measuring takes a few seconds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from paceline.cluster.host import Host
from paceline.files import cache_folder
from paceline.job.job import Job
from paceline.planning import history as cache
from paceline.units import percent

Axis = Literal["none", "dp", "fsdp", "tp", "pp"]
AXES: tuple[Axis, ...] = ("none", "dp", "fsdp", "tp", "pp")
# version of the file's format
FORMAT = 2
OLDEST_S = 30 * 86400.0
# largest relative change of the machine's speed since the measurement
MOST_CHANGE = 0.2
_REFERENCE_S, _REFERENCE_BYTES = 0.2, 2**20
_WORK = (
    "model",
    "adapter",
    "quantize",
    "data",
    "loss",
    "optimizer",
    "global_batch",
    "clip_norm",
    "batch_norm",
    "nonfinite",
)


@dataclass(frozen=True)
class PassTiming:
    """Times of one forward and backward pass of the undivided model on one rank.

    Each time is the median of several runs.

    Attributes:
        ranks: number of ranks that ran the same pass at the same time, each with `threads` threads.
        samples: number of samples in the microbatch.
        forward_s, backward_s: seconds for each segment of the model; the last segment includes the loss.
        peak_bytes: peak memory of the passes without the parameters: gradients, activations and kernel workspaces.
    """

    ranks: int
    threads: int
    precision: str
    remat: str
    samples: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the forward and backward pass together."""
        return sum(self.forward_s) + sum(self.backward_s)


@dataclass(frozen=True)
class CalibrationPoint:
    """Measured steps of the engine with the model divided along one axis.

    The ranks communicate through shared memory. Each time is the median for one part of a step, in seconds.

    Attributes:
        axis: the axis along which the model is divided; `none` means that one rank alone uses all cores.
        ranks: ranks along the axis.
        samples: number of samples in a microbatch.
        microbatches: number of microbatches of each data-parallel rank in a step.
        compute_s: compute time, averaged over the ranks, including the collectives inside the passes.
        comm_s: remaining time of the step, including the time spent waiting for slower ranks.
        peak_bytes: peak memory of the rank whose peak is the lowest; memory left over from earlier work inflates the
            other peaks.
    """

    axis: Axis
    ranks: int
    precision: str
    samples: int
    microbatches: int
    data_s: float
    compute_s: float
    bubble_s: float
    comm_s: float
    optimizer_s: float
    peak_bytes: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.data_s + self.compute_s + self.bubble_s + self.comm_s + self.optimizer_s


@dataclass(frozen=True)
class Collective:
    """Measured times of one collective over one transport, by buffer size.

    Each size is the number of bytes in the larger of a rank's input and output buffers. Sizes ascend.

    Attributes:
        name: `all_reduce`, `all_gather`, `reduce_scatter` or `send_receive` (one way).
        cpu_s: CPU seconds that all threads of one rank use in one call, for each size.
    """

    transport: str
    name: str
    ranks: int
    sizes: tuple[int, ...]
    times_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def time_s(self, size_bytes: float) -> float:
        """Return the interpolated time of one call, in seconds."""
        return interpolated(self.sizes, self.times_s, size_bytes)

    def busy_s(self, size_bytes: float) -> float:
        """Return the interpolated CPU time of one call, in seconds."""
        return interpolated(self.sizes, self.cpu_s, size_bytes)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements that the ranks of a calibration make. Times are in seconds, sizes in bytes.

    Attributes:
        parameters: number of the model's parameters.
        segments: for each segment of the model, in the order of a forward pass, the name of its first module; the first
            name is "".
        optimizer_s: time of one optimizer step on the whole model while every rank performs one: `fused` if available,
            and `plain` if the steps of `points` are not fused.
        baseline_bytes: memory of a rank's process after it loads torch and the data, but before it builds a model.
        notes: one sentence for each failed measurement.
    """

    parameters: int
    segments: tuple[str, ...]
    timings: tuple[PassTiming, ...]
    points: tuple[CalibrationPoint, ...] = ()
    collectives: tuple[Collective, ...] = ()
    optimizer_s: Mapping[str, float] = field(default_factory=dict)
    baseline_bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Calibration(Measurements):
    """Measurements of a job on a machine.

    Attributes:
        key: cache key, which depends on the job and on the number of cores (`key_of`).
        machine: the CPU's name, the number of cores, and the versions of torch and paceline; a change of any of them
            invalidates the calibration.
        created: creation time, in seconds since 1970.
        reference_s: time of a small fixed computation, in seconds; the computation is repeated later to detect a change
            of the machine's speed.
        cores, ranks: number of cores of the machine, and number of ranks that were measured together.
    """

    key: str
    machine: Mapping[str, str]
    created: float
    reference_s: float
    cores: int
    ranks: int
    global_batch: int
    seconds: float = 0.0

    def __hash__(self) -> int:
        return hash((self.key, self.created))

    def to_json(self) -> str:
        """Return the calibration as JSON text for `from_json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Parse the JSON text that `to_json` returns.

        Raises:
            ValueError: the text is not a calibration, or its format is from another version.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError("it has the format of a different version")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise ValueError(f"it is not a calibration ({error.error_count()} of its values are wrong)") from error

    @cached_property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that were measured, in the order of measurement."""
        return tuple(dict.fromkeys(timing.precision for timing in self.timings))

    def nearest_precision(self, precision: str) -> str:
        """Return `precision` if it was measured, else the first measured precision."""
        return precision if precision in self.precisions else self.precisions[0]

    @cached_property
    def _by_kind(self) -> dict[tuple[int, str, str], list[PassTiming]]:
        found: dict[tuple[int, str, str], list[PassTiming]] = {}
        for timing in sorted(self.timings, key=lambda p: p.samples):
            found.setdefault((timing.ranks, timing.precision, timing.remat), []).append(timing)
        return found

    def timings_of(self, ranks: int, precision: str, remat: str = "none") -> list[PassTiming]:
        """Return the pass timings for the measured number of ranks nearest to `ranks`.

        The timings are sorted by ascending number of samples.
        """
        measured = sorted(
            {n for n, p, r in self._by_kind if p == precision and r == remat}, key=lambda n: (abs(n - ranks), -n)
        )
        return self._by_kind[measured[0], precision, remat] if measured else []

    def points_of(self, axis: str, precision: str) -> list[CalibrationPoint]:
        """Return the calibration points of an axis in this precision.

        If there are none, the points in all precisions are returned.
        """
        found = [point for point in self.points if point.axis == axis]
        return [point for point in found if point.precision == precision] or found

    def collective(self, transport: str, name: str) -> Collective | None:
        """Return the measured times of a collective, or None if it was not measured."""
        return next((c for c in self.collectives if c.transport == transport and c.name == name), None)


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly between points with ascending `xs`.

    Beyond the last point, the last segment is extrapolated, but the result is never below the last value. Before the
    first point, the result is at least half of the first value.
    """
    if len(xs) == 1:
        return ys[0] * x / xs[0] if x > xs[0] else ys[0]
    i = next((i for i in range(1, len(xs)) if x <= xs[i]), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    value = ys[i - 1] + slope * (x - xs[i - 1])
    return max(value, ys[-1]) if x > xs[-1] else max(value, 0.5 * ys[0], 0.0)


# Cache


def key_of(job: Job, host: Host) -> str:
    """Return the cache key for a job on a host.

    The key depends on everything that affects timing, except age, versions and speed. `why_stale` checks these when a
    file is read.
    """
    facts = cache.work_facts(job, _WORK) | {"cores": host.cores, "physical": host.physical_cores}
    return f"{job.name}-{cache.short_hash(facts)}"


def transport_note(transport: str, error: str) -> str:
    """Return a note that says that the transport of an installed package failed during calibration."""
    return f"transport={transport}: {error}"


def failed_transport(note: str) -> str | None:
    """Return the transport named in a `transport_note`, or None for any other note."""
    start, _, rest = note.partition("=")
    return rest.partition(":")[0] if start == "transport" else None


def cache_file(key: str) -> Path:
    """Return the path of the cache file for this key."""
    return cache_folder() / "calibration" / f"{key}.json"


def machine_of(host: Host) -> dict[str, str]:
    """Return the properties of the machine that a calibration depends on."""
    return {"cpu": host.cpu, "cores": str(host.cores), "torch": version("torch"), "paceline": version("paceline")}


def reference_time_s() -> float:
    """Measure the shortest time of a small fixed computation, in seconds.

    The computation is repeated for a fifth of a second. The shortest time is used because other load can only increase
    it.
    """
    data, best, until = bytes(_REFERENCE_BYTES), float("inf"), time.perf_counter() + _REFERENCE_S
    while (started := time.perf_counter()) < until:
        hashlib.sha256(data).digest()
        best = min(best, time.perf_counter() - started)
    return best


def why_stale(found: Calibration, host: Host, *, reference_s: float, now: float | None = None) -> str | None:
    """Return the reason why a calibration is out of date, or None."""
    for name, value in machine_of(host).items():
        before = found.machine.get(name)
        if before != value:
            return f"it was measured with {name} {before}, and this is {value}"
    age_s = (time.time() if now is None else now) - found.created
    if age_s > OLDEST_S:
        return f"it is {age_s / 86400:.0f} days old"
    if abs(reference_s / found.reference_s - 1) > MOST_CHANGE:
        faster = "slower" if reference_s > found.reference_s else "faster"
        ratio = max(reference_s / found.reference_s, found.reference_s / reference_s)
        return f"this machine is {percent(ratio - 1, 0)} {faster} than it was then"
    return None


def kept(key: str, host: Host, *, reference_s: float) -> tuple[Calibration | None, str | None]:
    """Return the cached calibration, and the reason why it is invalid.

    One of the two is None; both are None if nothing is cached.
    """
    file = cache_file(key)
    if not file.is_file():
        return None, None
    try:
        found = Calibration.from_json(file.read_text())
    except (OSError, ValueError) as error:
        return None, f"{file} cannot be read: {error}"
    reason = why_stale(found, host, reference_s=reference_s)
    return (found, None) if reason is None else (None, f"the calibration in {file} is stale: {reason}")


def keep(found: Calibration, busy: float = 0.0) -> str:
    """Write a calibration to the user's cache, as `cache.keep` does."""
    return cache.keep(cache_file(found.key), found.to_json(), busy=busy)
