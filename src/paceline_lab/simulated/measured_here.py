"""Measurements of this machine, and which of them hold for a simulated one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, RunError
from paceline.job.job import Job
from paceline.planning.cost.estimate import estimate
from paceline.planning.machines import machines, own_adjustment
from paceline.run.record.run import Run
from paceline.run.record.stragglers import step_time_ratios
from paceline.run.tuning.calibrate_on import read_runs
from paceline.units import count, rate, seconds
from paceline_lab.scaling.directory import REPORT
from paceline_lab.scaling.result import MeasuredSetting, Report
from paceline_lab.simulated.chance import Jitter

if TYPE_CHECKING:
    from paceline.data.loader import Loader
    from paceline.planning.machines import Adjustment

_READ_S = 0.5  # of reading samples


@dataclass(frozen=True)
class MeasuredHere:
    """A benchmark of the job that was measured, in its directory.

    Attributes:
        device: name of its devices in the catalogue; "" if they are not in it.
        factors: of its runs; None if none of them can be used, or none is there.
    """

    report: Report
    device: str
    factors: Adjustment | None

    @classmethod
    def load(cls, folder: Path, job: Job) -> MeasuredHere | None:
        """The benchmark in a directory; None if there is none.

        Raises:
            RunError: it is of another job, or cannot be read.
        """
        if not (folder / REPORT).is_file():
            return None
        report = Report.load(folder / REPORT)
        if report.job != job.name:
            raise RunError(f"{folder} has a benchmark of {report.job}, not of {job.name}. Name another one with --out.")
        unused = cls(report, "", None)
        runs = tuple(folder / run for setting in report.settings for run in setting.runs if (folder / run).is_dir())
        try:
            rows = read_runs(runs).rows
            factors = own_adjustment(rows, lambda layout: estimate(layout).step_time_s) if rows else None
            return cls(report, machines(Run(runs[0]).cluster).device.name, factors) if factors else unused
        except PacelineError:
            return unused

    @property
    def one(self) -> MeasuredSetting | None:
        """The job on one device."""
        return next((setting for setting in self.report.settings if setting.devices == 1), None)

    def factors_for(self, device: str) -> Adjustment | None:
        """Factors of its runs for a simulated device; None for another one than was measured."""
        return self.factors if device == self.device else None

    def line(self, device: str) -> str:
        """Sentence on what was measured, and whether it holds for a simulated device."""
        one = self.one
        what = f"{one.plan} takes {seconds(one.step_time_s)} a step" if one else "nothing on one device"
        measured = f"measured here ({self.report.cluster}): {what}"
        if factors := self.factors_for(device):
            runs = count(len(factors.errors), "run")
            return f"{measured}. {device} is what is simulated, too, so {runs} of it correct the step times"
        return f"{measured}. That says nothing of {device}, and nothing of the curve rests on it"


def measured_jitter(runs: Sequence[Path]) -> Jitter:
    """Distribution of ranks' step times in runs.

    Raises:
        RunError: no run has enough steps.
    """
    ratios = [ratio for run in runs for rank in step_time_ratios(Run(run)) for ratio in rank]
    return Jitter.of(ratios, f"measured in {', '.join(run.name for run in runs)}")


@dataclass(frozen=True)
class ReadingSpeed:
    """Samples per second that one process reads here, with nothing else to do.

    Attributes:
        samples_per_s: None if it is not known, for the reason `why`.
    """

    samples_per_s: float | None
    why: str = ""

    def line(self, samples_per_s: float, devices: int, hosts: int) -> str:
        """Sentence on what a simulated host has to read.

        Args:
            samples_per_s: of all devices together, with the whole cluster.
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
    """Speed at which samples of the job's data are read here, in half a second."""
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
