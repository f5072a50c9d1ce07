"""Measurements of this machine and published measurements, as the basis of simulations."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from paceline.cluster.catalogue import Accelerator
from paceline.errors import PacelineError, PlanError, RunError
from paceline.job.job import Job
from paceline.planning.cost import constants
from paceline.planning.cost.estimate import FailureCosts, predict_layout
from paceline.planning.machines import machines, own_adjustment
from paceline.planning.model.graph import ModelTrace
from paceline.planning.tables.layouts import Row, row_of
from paceline.run.record.run import Run
from paceline.run.record.slow_ranks import step_time_ratios
from paceline.run.tuning.calibrate import read_runs
from paceline.stats import Interval
from paceline.units import count, digits, rate, seconds
from paceline.yaml_file import FileKind, read_yaml
from paceline_lab.scaling.result import MeasuredSetting, Report, Scaling
from paceline_lab.scaling.summary import REPORT

if TYPE_CHECKING:
    from paceline.data.loader import Loader
    from paceline.planning.machines import Adjustment


_READ_S = 0.5  # seconds for which the reading speed is measured


@dataclass(frozen=True)
class MeasuredHere:
    """Benchmark of the job that was measured on this machine.

    Attributes:
        device: name of the measured devices in the catalogue; "" if no run is usable for calibration.
        factors: calibration factors from the benchmark's runs; None if no run is usable.
    """

    report: Report
    device: str
    factors: Adjustment | None

    @classmethod
    def load(cls, folder: Path, job: Job) -> MeasuredHere | None:
        """Load the benchmark in a directory; return None if there is no benchmark.

        Raises:
            RunError: the benchmark measured another job, or its report cannot be read.
        """
        if not (folder / REPORT).is_file():
            return None
        report = Report.load(folder / REPORT)
        if report.job != job.name:
            raise RunError(
                "bench.of_other_job",
                "{folder} has a benchmark of {found}, not of {job}. Name another directory with --out.",
                folder=folder,
                found=report.job,
                job=job.name,
            )
        unused = cls(report, "", None)
        runs = tuple(folder / run for setting in report.settings for run in setting.runs if (folder / run).is_dir())
        try:
            rows = read_runs(runs).rows
            factors = own_adjustment(rows) if rows else None
            return cls(report, machines(Run(runs[0]).cluster).device.name, factors) if factors else unused
        except PacelineError:
            return unused

    @property
    def one(self) -> MeasuredSetting | None:
        """Result of the setting on one device; None if it was not measured."""
        return next((setting for setting in self.report.settings if setting.devices == 1), None)

    def factors_for(self, device: str) -> Adjustment | None:
        """Return the calibration factors if the measured device is the simulated device, otherwise None."""
        return self.factors if device == self.device else None

    def line(self, device: str) -> str:
        """Describe what was measured here, and whether it applies to a simulated device."""
        one = self.one
        what = f"{one.plan} takes {seconds(one.step_time_s)} a step" if one else "nothing on one device"
        measured = f"measured here ({self.report.cluster}): {what}"
        if factors := self.factors_for(device):
            runs = count(len(factors.errors), "run")
            return f"{measured}. {device} is what is simulated, too, so {runs} of it correct the step times"
        return f"{measured}. That says nothing of {device}, and nothing of the curve rests on it"


def measured_jitter(runs: Sequence[Path]) -> Jitter:
    """Return the distribution of the ranks' step times in measured runs.

    Raises:
        RunError: no run has enough measured steps.
    """
    ratios = [ratio for run in runs for rank in step_time_ratios(Run(run)) for ratio in rank]
    return Jitter.of(ratios, f"measured in {', '.join(run.name for run in runs)}")


@dataclass(frozen=True)
class ReadingSpeed:
    """Speed at which one process of this machine reads the job's samples.

    Attributes:
        samples_per_s: samples per second; None if unknown.
        why: reason why the speed is unknown.
    """

    samples_per_s: float | None
    why: str = ""

    def line(self, samples_per_s: float, devices: int, hosts: int) -> str:
        """Compare the reading speed that a simulated host needs with the speed measured here.

        Args:
            samples_per_s: throughput of the whole simulated cluster.
        """
        each = samples_per_s / hosts
        if self.samples_per_s is None:
            return f"whether samples are read fast enough is not known: {self.why}"
        busy = each / self.samples_per_s
        need = f"each host has to read {rate(each)}; here one process reads {rate(self.samples_per_s)}"
        ranks = devices / hosts
        if busy <= ranks:
            return f"{need}, so that loading would not limit it if the hosts' cores are like these"
        return f"{need}: {count(round(busy + 0.5), 'core')} like those here would only read, or loading limits it"


def reading_speed(job: Job) -> ReadingSpeed:
    """Measure for half a second how fast one process reads samples of the job's data."""
    if job.model.transformer is not None:
        return ReadingSpeed(None, "the job names no data, only dimensions")
    from paceline.data.loader import Loader
    from paceline.job.partition import Partition, PartitionSpec

    try:
        data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
        if data.synthetic:
            return ReadingSpeed(None, "its data is synthetic")
        samples = len(data.train)  # type: ignore[arg-type]
        batch = min(job.global_batch, samples)
        all_of_it = Partition(
            PartitionSpec(), samples=samples, global_batch=batch, seed=job.seed, replica=0, replicas=1
        )
        return ReadingSpeed(_read_for(Loader(data.train, all_of_it), batch))
    except (PacelineError, OSError, TypeError) as error:
        return ReadingSpeed(None, str(error).splitlines()[0])


def _read_for(loader: Loader, batch: int) -> float:
    read, started = 0, time.perf_counter()
    while True:
        for _ in loader:
            read += batch
            if (taken_s := time.perf_counter() - started) > _READ_S:
                return read / taken_s


Floats = NDArray[np.float64]
LOW, HIGH = 0.1, 0.9  # ends of an 80 % interval, as quantiles
_LEVELS = 600
_MOST_LIVES = 5_000  # maximum expected number of failures of one simulated training


@dataclass(frozen=True)
class Jitter:
    """Distribution of a rank's step times, relative to their mean.

    Attributes:
        sigma: standard deviation of the step times.
        measured: measured step times relative to their mean, ascending; empty for a normal distribution.
        words: short text on the source of the distribution.
    """

    sigma: float = 0.0
    measured: tuple[float, ...] = ()
    words: str = ""

    @classmethod
    def of(cls, ratios: Sequence[float], words: str) -> Jitter:
        """Build the distribution from measured step times that were divided by their mean."""
        values = np.asarray(ratios, float)
        return cls(float(values.std(ddof=1)), tuple(sorted(map(float, values))), words)

    def slowest(self, ranks: int, shape: tuple[int, ...], random: np.random.Generator) -> Floats:
        """Draw the step time of the slowest of `ranks` ranks, relative to the mean.

        In every step, all ranks wait for the slowest rank. Step times of different ranks are assumed to be independent.
        So the largest of N times is the U^(1/N) quantile of the distribution, with U uniform in [0, 1]. With measured
        step times, no draw exceeds the largest measured time.
        """
        levels = random.random(shape) ** (1 / ranks)
        if self.measured:
            return np.quantile(self.measured, levels)
        if not self.sigma:
            return np.ones(shape)
        quantile = NormalDist(1.0, self.sigma).inv_cdf
        below, above = np.logspace(-15, math.log10(0.5), _LEVELS), 1 - np.logspace(math.log10(0.5), -15, _LEVELS)[1:]
        table = np.concatenate((below, above))  # quantile levels, dense near 0 and 1
        return np.interp(levels, table, [quantile(float(level)) for level in table])


@dataclass(frozen=True)
class ScaleError:
    """Distribution of the error of predicted scaling, estimated from published runs.

    The error is log(measured efficiency / predicted efficiency), divided by the square root of the number of times that
    the device count doubles. All sources have equal weight, and the curves of one source share its weight.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, held: Sequence[HeldAgainst]) -> ScaleError:
        """Estimate the distribution from published curves and their predictions."""
        curves = Counter(one.curve.source for one in held)
        pairs = sorted((one.excess, 1 / curves[one.curve.source] / len(curves)) for one in held)
        return cls(tuple(value for value, _ in pairs), tuple(weight for _, weight in pairs))

    def quantile(self, level: float) -> float:
        """Return a quantile of the error, interpolated between the curves."""
        weights = np.asarray(self.weights)
        return float(np.interp(level, np.cumsum(weights) - weights / 2, self.values))

    def draw(self, draws: int, random: np.random.Generator) -> Floats:
        """Draw random errors from the distribution."""
        weights = np.asarray(self.weights)
        return np.interp(random.random(draws), np.cumsum(weights) - weights / 2, self.values)


def drawn_goodput(
    costs: FailureCosts, interval_s: float, wall_s: float, draws: int, random: np.random.Generator
) -> Floats:
    """Draw the goodput of random trainings of a given length, each with random failures.

    The times between failures are exponentially distributed, as in `FailureCosts`, which computes the mean over a long
    time. This function draws the results of single trainings. If a failure destroys state in memory, only steps before
    the last written checkpoint count as useful.

    Args:
        interval_s: seconds of training steps between two checkpoints.
        wall_s: wall-clock seconds of each training.
    """
    wall_s = min(wall_s, _MOST_LIVES * costs.between_s)
    expected = wall_s / costs.between_s
    lives = random.exponential(costs.between_s, (draws, math.ceil(expected + 6 * math.sqrt(expected) + 6)))
    gap_s = costs.failure_s if costs.goes_on else 0.0
    ends = np.cumsum(lives + gap_s, axis=1)
    ended = ends <= wall_s
    begins = ends - lives - gap_s
    # seconds between failures that lie within the training
    running = np.minimum(lives, np.maximum(wall_s - begins, 0.0))
    stalled_s = costs.stalled_s(interval_s)
    share = interval_s / (interval_s + stalled_s)
    if costs.goes_on:
        share *= 1.0 if costs.in_place else 1 - constants.STATE_SHARE
        useful = share * running
    else:
        begun_s = np.full(lives.shape[1], costs.restart_s)
        begun_s[0] = 0.0  # the training starts without a restart
        trained = np.maximum(running - begun_s, 0.0)
        kept = np.floor(np.maximum(trained - costs.write_s, 0.0) / (interval_s + stalled_s)) * interval_s
        useful = np.where(ended, kept, share * trained)  # no steps are lost after the last failure
    goodput: Floats = np.minimum(useful.sum(axis=1) / wall_s, 1.0)
    return goodput


def interval_of(draws: Floats, middle: float) -> Interval:
    """Return the 80 % interval of random draws, widened to include `middle`."""
    low, high = (float(value) for value in np.quantile(draws, (LOW, HIGH)))
    return Interval(min(low, middle), middle, max(high, middle))


FILE = Path(__file__).with_name("published_curves.yaml")
Kind = Literal["images", "language"]
_KIND = FileKind("list of published curves", "curves", "`curves: []`", PlanError)
# distance added for another device, and for another generation; a factor of ten in work per sample adds 1
_OTHER_DEVICE, _OTHER_GENERATION = 1.0, 1.0


class PublishedCurve(BaseModel):
    """Published measurements of one training on several device counts.

    Attributes:
        run: values that all points share, by column name of a table of runs.
        points: values of each point that differ from other points, by column name of a table of runs.
        scaling: `strong` if the global batch is constant, `weak` if it grows with the number of devices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    title: str
    kind: Kind
    scaling: Scaling
    source: str
    url: str
    run: dict[str, str | float]
    points: tuple[dict[str, str | float], ...] = Field(min_length=2)

    @property
    def cells(self) -> list[dict[str, str]]:
        """Values of each point as text, by column name of a table of runs."""
        return [{name: _text(value) for name, value in (self.run | point).items()} for point in self.points]

    @property
    def rows(self) -> list[Row]:
        """Points as measured runs."""
        cells = self.cells
        return [row_of(self.id, at, own, cells) for at, own in enumerate(cells, start=1)]

    @property
    def devices(self) -> list[int]:
        """Number of devices of each point, in ascending order."""
        return [int(point["n_gpus"]) for point in self.points]


@dataclass(frozen=True)
class HeldAgainst:
    """Published curve, and the cost model's prediction for the same plans and machines.

    Attributes:
        efficiency: measured work per device and second, relative to the first point.
        predicted: predicted work per device and second without calibration, relative to the first point.
        seconds: measured seconds per step.
        predicted_s: predicted seconds per step.
    """

    curve: PublishedCurve
    rows: tuple[Row, ...]
    efficiency: tuple[float, ...]
    predicted: tuple[float, ...]
    seconds: tuple[float, ...]
    predicted_s: tuple[float, ...]

    @property
    def excess(self) -> float:
        """Error of the predicted efficiency at the last point, as defined by `ScaleError`.

        Dividing by the square root of the doublings gives the smallest error on held-out curves
        (`benchmarks/scale_published.py`).
        """
        return math.log(self.efficiency[-1] / self.predicted[-1]) / math.sqrt(self.doublings(len(self.rows) - 1))

    def doublings(self, at: int) -> float:
        """Return how often the device count doubles from the first point to point `at`."""
        return math.log2(self.curve.devices[at] / self.curve.devices[0])


@cache
def published_curves() -> tuple[PublishedCurve, ...]:
    """Return all published curves, in the order of their file."""
    values, _ = read_yaml(FILE, _KIND)
    return tuple(PublishedCurve.model_validate(curve) for curve in values["curves"])


@cache
def held_against() -> tuple[HeldAgainst, ...]:
    """Return all published curves with their predictions.

    The first call takes a few tenths of a second; later calls return the cached result.
    """
    return tuple(map(_held_against, published_curves()))


def _held_against(curve: PublishedCurve) -> HeldAgainst:
    rows = curve.rows
    measured = [row.seconds or math.nan for row in rows]
    predicted = [predict_layout(row.layout).step_time_s for row in rows]
    return HeldAgainst(
        curve,
        tuple(rows),
        tuple(_efficiencies(rows, measured)),
        tuple(_efficiencies(rows, predicted)),
        tuple(measured),
        tuple(predicted),
    )


def _efficiencies(rows: Sequence[Row], seconds: Sequence[float]) -> list[float]:
    """Return the FLOPs per device and second of each point, relative to the first point.

    FLOPs are compared instead of samples, since the model grows with the device count in some curves.
    """
    rates = [
        row.layout.trace.flops * row.layout.global_batch / row.layout.ranks / s
        for row, s in zip(rows, seconds, strict=True)
    ]
    return [rate / rates[0] for rate in rates]


@dataclass(frozen=True)
class Likeness:
    """Similarity of a published curve to a simulated curve.

    Attributes:
        distance: 0 for the same device and the same work per sample; larger for less similar curves.
        differences: short texts on how the published curve differs.
    """

    held: HeldAgainst
    distance: float
    differences: tuple[str, ...]


def kind_of(trace: ModelTrace) -> Kind | None:
    """Return `images` for a convolutional model, `language` for sequences of tokens, otherwise None."""
    if any(gemm.read for block in trace.blocks for gemm in block.gemms):
        return "images"
    return "language" if trace.tokens > 1 else None


def alike(trace: ModelTrace, device: Accelerator, scaling: Scaling, most: int = 4) -> list[Likeness]:
    """Return published curves of the same kind of model and of scaling, most similar first.

    A second curve of a source is chosen only if every source already has a curve, so that several systems are shown.

    Args:
        most: maximum number of curves.
    """
    same = [h for h in held_against() if h.curve.kind == kind_of(trace) and h.curve.scaling == scaling]
    found = sorted((_likeness(held, trace, device) for held in same), key=lambda one: one.distance)
    first: dict[str, Likeness] = {}
    for one in found:
        first.setdefault(one.held.curve.source, one)
    chosen = [*first.values(), *(one for one in found if one not in first.values())][:most]
    return sorted(chosen, key=lambda one: one.distance)


def _likeness(held: HeldAgainst, trace: ModelTrace, device: Accelerator) -> Likeness:
    first = held.rows[0].layout
    theirs, distance, differences = first.machines.device, 0.0, []
    if theirs.name != device.name:
        distance += _OTHER_DEVICE + (_OTHER_GENERATION if theirs.generation != device.generation else 0.0)
        differences.append(f"{theirs.name} instead of {device.name}")
    times = first.trace.flops / max(trace.flops, 1.0)
    if not 0.5 < times < 2:
        ratio = f"{digits(times)} times" if times > 1 else f"1/{digits(1 / times)} of"
        differences.append(f"{ratio} the work of a sample")
    system = held.curve.run.get("framework", "another system")
    return Likeness(held, distance + abs(math.log10(max(times, 1e-9))), (*differences, f"by {system}"))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and value == round(value, 4) else str(value)
