"""Calibration: measured times and memory of a job on this machine, and their cache.

A calibration has the inputs that a cost model for CPUs cannot derive from shapes. These are the time of each part of
the model at several microbatch sizes (alone, and while other ranks use the other cores and the memory), the overhead of
each kind of split, the time of each collective over each transport, and the memory of a rank's process without a model.
Measuring takes a few seconds.
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
_WORK = ("model", "freeze", "data", "loss", "optimizer", "global_batch", "clip_norm", "batch_norm", "nonfinite")


@dataclass(frozen=True)
class PassTiming:
    """Times of one forward and backward pass of the undivided model on a rank.

    They are medians of several runs.

    Attributes:
        ranks: number of ranks that computed the same pass at once, each with `threads`.
        samples: samples of the microbatch.
        forward_s, backward_s: seconds by segment; the loss belongs to the last one.
        peak_bytes: peak memory of the passes beyond parameters: gradients, activations, kernels' workspaces.
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
        """Seconds of both passes."""
        return sum(self.forward_s) + sum(self.backward_s)


@dataclass(frozen=True)
class CalibrationPoint:
    """Steps of the engine with the model divided along one axis.

    The ranks communicate by shared memory. Times are medians of a step's parts, in seconds.

    Attributes:
        axis: the divided axis; with `none`, one rank alone has all cores.
        ranks: ranks along the axis.
        samples: samples of a microbatch.
        microbatches: microbatches in a data-parallel rank's part of the batch.
        compute_s: mean over the ranks, including the collectives inside the passes.
        comm_s: the remaining time of the step, including the wait for slower ranks.
        peak_bytes: smallest peak memory of the ranks' processes, because the rank with the smallest peak had the least
            previous work.
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
    """Measured times of a collective over a transport, by size.

    Sizes are bytes of the larger of a rank's buffers, ascending.

    Attributes:
        name: `all_reduce`, `all_gather`, `reduce_scatter` or `send_receive` (one way).
        cpu_s: CPU time of a rank's threads in one call.
    """

    transport: str
    name: str
    ranks: int
    sizes: tuple[int, ...]
    times_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def time_s(self, size_bytes: float) -> float:
        """Return the seconds of a call of any size."""
        return interpolated(self.sizes, self.times_s, size_bytes)

    def busy_s(self, size_bytes: float) -> float:
        """Return the CPU seconds of a call of any size."""
        return interpolated(self.sizes, self.cpu_s, size_bytes)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements by the ranks of a calibration; times in seconds, sizes in bytes.

    Attributes:
        parameters: number of the model's parameters.
        segments: names of the first modules of the parts of the model, in the order of a forward pass; the first is "".
        optimizer_s: time to update the whole model on one rank while the others do the same: `plain`, and `fused` if
            available.
        baseline_bytes: memory of a rank's process with torch and the data, before it has a model.
        notes: sentences about failed measurements.
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
        key: key of the job's work and the machine's shape (`key_of`).
        machine: `cpu`, `cores`, `torch` and `paceline`; a change of any of them invalidates the calibration.
        created: seconds since 1970.
        reference_s: time of a small fixed computation, which shows whether the machine is as fast as before.
        cores, ranks: cores of the machine; ranks that were measured together.
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
        """Return JSON text, which `from_json` reads back to an equal calibration."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Read the text written by `to_json`.

        Raises:
            ValueError: the text is not a calibration, or has another version's format.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError("it has another version's format")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise ValueError(f"it is not a calibration ({error.error_count()} of its values are wrong)") from error

    @cached_property
    def precisions(self) -> tuple[str, ...]:
        """Measured precisions, in order."""
        return tuple(dict.fromkeys(timing.precision for timing in self.timings))

    def nearest_precision(self, precision: str) -> str:
        """Return `precision` if it was measured, else the first measured one."""
        return precision if precision in self.precisions else self.precisions[0]

    @cached_property
    def _by_kind(self) -> dict[tuple[int, str, str], list[PassTiming]]:
        found: dict[tuple[int, str, str], list[PassTiming]] = {}
        for timing in sorted(self.timings, key=lambda p: p.samples):
            found.setdefault((timing.ranks, timing.precision, timing.remat), []).append(timing)
        return found

    def timings_of(self, ranks: int, precision: str, remat: str = "none") -> list[PassTiming]:
        """Return pass timings by ascending samples, measured with the nearest number of ranks."""
        measured = sorted(
            {n for n, p, r in self._by_kind if p == precision and r == remat}, key=lambda n: (abs(n - ranks), -n)
        )
        return self._by_kind[measured[0], precision, remat] if measured else []

    def points_of(self, axis: str, precision: str) -> list[CalibrationPoint]:
        """Return calibration points of an axis in this precision, else in any."""
        found = [point for point in self.points if point.axis == axis]
        return [point for point in found if point.precision == precision] or found

    def collective(self, transport: str, name: str) -> Collective | None:
        """Return the measured times of a collective, or None."""
        return next((c for c in self.collectives if c.transport == transport and c.name == name), None)


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate points linearly, `xs` ascending.

    Beyond the last point its line continues, but never falls below the last value. Before the first point, values are
    at least half of the first value.
    """
    if len(xs) == 1:
        return ys[0] * x / xs[0] if x > xs[0] else ys[0]
    i = next((i for i in range(1, len(xs)) if x <= xs[i]), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    value = ys[i - 1] + slope * (x - xs[i - 1])
    return max(value, ys[-1]) if x > xs[-1] else max(value, 0.5 * ys[0], 0.0)


# Cache


def key_of(job: Job, host: Host) -> str:
    """Return the cache key: the job fields and machine shape that affect timing.

    Age, versions and speed are checked when a file is read (`why_stale`).
    """
    facts = cache.work_facts(job, _WORK) | {"cores": host.cores, "physical": host.physical_cores}
    return f"{job.name}-{cache.short_hash(facts)}"


def transport_note(transport: str, error: str) -> str:
    """Return the note of a calibration in which a package's transport failed."""
    return f"transport={transport}: {error}"


def failed_transport(note: str) -> str | None:
    """Return the transport that a note of a calibration is about; None for other notes."""
    start, _, rest = note.partition("=")
    return rest.partition(":")[0] if start == "transport" else None


def cache_file(key: str) -> Path:
    """Return the file of the calibration with this key."""
    return cache_folder() / "calibration" / f"{key}.json"


def machine_of(host: Host) -> dict[str, str]:
    """Return facts that must not change for a calibration to stay valid."""
    return {"cpu": host.cpu, "cores": str(host.cores), "torch": version("torch"), "paceline": version("paceline")}


def reference_time_s() -> float:
    """Measure the shortest time of a small fixed computation, in seconds.

    It is repeated for a fifth of a second. Other load only ever increases the time.
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
    """Return the cached calibration and None, or None and why a cached one is invalid."""
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
    """Write a calibration to the user's cache; see `cache.keep`."""
    return cache.keep(cache_file(found.key), found.to_json(), busy=busy)
