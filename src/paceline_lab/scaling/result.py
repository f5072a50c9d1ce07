"""Settings and results of a benchmark as plain values, which are stored in `report.json`.

A benchmark runs one job on 1 and on N devices, and with other plans. Strong scaling keeps the global batch constant.
Weak scaling keeps the batch per device constant.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.cluster.cluster import Cluster
from paceline.device import CPU
from paceline.errors import PlanError, PlanProblem, RunError, proposal
from paceline.files import read_text
from paceline.job.job import EvaluateSpec, Job
from paceline.job.stop import StopSpec
from paceline.planning.arguments import plan_of
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.plan import Plan, on_devices, spelled_out
from paceline.planning.shortlist import Trial
from paceline.report.advice import named
from paceline.run.dry_run import refuse_what_cannot_divide
from paceline.run.record.memory import MemoryTable
from paceline.stats import Interval
from paceline.units import count, rate

Scaling = Literal["strong", "weak"]
AUTO = "auto: "  # label prefix of the setting whose plan `auto` chose


@dataclass(frozen=True)
class RankUse:
    """Time and resources that one rank uses in a step, as medians over all repeats.

    Warm-up steps are not included.

    Attributes:
        parts_s: seconds of each part of a step, by name in `paceline.engine.meter.PARTS`. The sum is the step time.
        figures: measured values by their name in `paceline.report.figures.RANK_FIGURES`.
    """

    parts_s: dict[str, float]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """Loss curve of one run. Each point has a step, the elapsed seconds and the total samples."""

    steps: list[int]
    seconds: list[float]
    samples: list[int]
    losses: list[float | None]


@dataclass(frozen=True)
class MeasuredSetting:
    """Result of one setting of a benchmark, over all its repeats.

    Attributes:
        label: label for tables and legends, such as `2 devices`, or the plan if several plans use the same number of
            devices.
        scaling: `strong` uses the job's global batch. `weak` multiplies the global batch by the number of devices. One
            device is the baseline of both.
        global_batch: samples per optimizer step.
        step_time_s: step time after warm-up, as the median and interval of the repeats' median step times.
        throughput: samples per second, computed as global batch / step time.
        training_time_s: seconds from the first step until the stop rule ends the run; None if the number of steps is
            fixed.
        time_to_target_s: seconds until the job's target is reached; None if a repeat did not reach the target.
        speedup: time on one device / time on N devices; None for one device. Weak scaling compares times per sample.
        is_speedup: True if the compared times differ significantly, that is, if their intervals do not overlap.
        efficiency: speedup divided by the number of devices.
        energy_joules: energy that all ranks together use per step; None if the machine does not report energy.
        runs: paths of the run directories, relative to the benchmark's directory.
        pairs: speedup of each repeat compared with the one-device run of the same round.
        final_loss: mean training loss of the last steps, as the median over the repeats; None if a loss was not finite.
        mfu: model FLOPs utilization, as the median over the repeats; None if the peak of the devices is unknown.
        rounds_s: step time in each round, in seconds; None for a round without a run of this setting.
        memory: predicted and measured memory of the rank with the largest peak; None if no rank recorded its memory.
    """

    label: str
    plan: str
    devices: int
    scaling: Scaling
    global_batch: int
    step_time_s: Interval
    throughput: Interval
    training_time_s: Interval | None = None
    time_to_target_s: Interval | None = None
    speedup: Interval | None = None
    is_speedup: bool = False
    efficiency: Interval | None = None
    energy_joules: float | None = None
    tokens_per_sample: float | None = None
    ranks: list[RankUse] = field(default_factory=list)
    curve: Curve | None = None
    runs: list[str] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)
    final_loss: float | None = None
    mfu: float | None = None
    rounds_s: list[float | None] = field(default_factory=list)
    memory: MemoryTable | None = None

    @property
    def title(self) -> str:
        """The label, with a note if the scaling is weak."""
        return f"{self.label}, weak" if self.scaling == "weak" and self.devices > 1 else self.label

    @property
    def fixed(self) -> bool:
        """True for N devices in the fixed layout, False for any other plan."""
        return self.label in (count(self.devices, "device"), count(self.devices, "core"))


@dataclass(frozen=True)
class Report:
    """Report of a benchmark of one job on one machine.

    Attributes:
        settings: results by plan, device count and scaling, in the requested order; the one-device setting is first.
        limits: sentences on the speedup and on what limits the scaling.
        warnings: reasons why the figures are less certain, such as other load on the machine or few repeats.
        tried: plans and tunable settings that `auto` predicted or measured; empty if `auto` tried none.
        reason: sentence that explains why `auto` chose its plan.
        complete: True if all repeats of all settings were measured.
        auto: plan that `auto` chose, spelled as in the settings; empty if an older file lacks this field.
        auto_as_told: plan that `auto` chose, as `paceline train` prints it, without keys that have their default value.
        kind: torch's device type, which is `cpu` for CPU cores; None if an older file lacks this field.
    """

    job: str
    command: str
    cluster: str
    created: str
    repeats: int
    steps: int | None
    target: str | None
    settings: list[MeasuredSetting]
    limits: list[str]
    warnings: list[str]
    environment: dict[str, Any]
    tried: list[Trial] = field(default_factory=list)
    reason: str = ""
    complete: bool = True
    synthetic: bool = False
    kind: str | None = None
    auto: str = ""
    auto_as_told: str = ""

    def __repr__(self) -> str:
        """Return the job, the machine, and the median throughput of every setting."""
        speeds = ", ".join(f"{s.title} {rate(s.throughput.middle)}" for s in self.settings)
        return f"<Report of {self.job} on {self.cluster}: {speeds}>"

    def _repr_html_(self) -> str:
        """Return a bar chart and a table of all settings as HTML for notebooks."""
        from paceline_lab.report.notebook import report_html

        return report_html(self)

    @property
    def of_auto(self) -> MeasuredSetting | None:
        """Setting with the plan that `auto` chose; None if this plan was not measured."""
        return next((s for s in self.settings if s.plan == self.auto and s.scaling == "strong"), None)

    @property
    def on_cores(self) -> bool:
        """True if the ranks had no accelerators; a device is then a CPU core."""
        if self.kind is not None:
            return self.kind == CPU
        return not any(rank.figures.get("gpu_memory_bytes") for setting in self.settings for rank in setting.ranks)

    def to_json(self) -> str:
        """Return the report as JSON text, which `load` can read from a file."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def load(cls, file: Path) -> Report:
        """Read a report from a JSON file.

        Raises:
            RunError: the file is missing or is not a report.
        """
        try:
            return msgspec.convert(json.loads(read_text(file)), cls)
        except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
            raise RunError(
                "bench.report_unreadable",
                "{file} cannot be read as a benchmark's report: {error}",
                file=file,
                error=error,
            ) from error


DEFAULT_STEPS = 60  # number of steps of a run that has no target
ONE = "1-device"


@dataclass(frozen=True)
class Setting:
    """One combination of plan, device count and batch with which a benchmark runs the job.

    Attributes:
        key: identifier of the setting in the records of its runs.
        steps: number of steps of each run; None trains until the job's stop rule ends the run.
    """

    key: str
    label: str
    plan: Plan
    devices: int
    scaling: Scaling
    global_batch: int
    steps: int | None

    @property
    def title(self) -> str:
        """The label, with a note if the scaling is weak."""
        return f"{self.label}, weak" if self.scaling == "weak" else self.label

    def job(self, job: Job) -> Job:
        """Return the job with the global batch and the steps of this setting.

        Weak scaling does not change the learning rate, since it measures speed only. Benchmark runs are not logged to
        trackers.
        """
        changes: dict[str, object] = {"global_batch": self.global_batch, "trackers": ()}
        if self.steps is not None:
            changes |= {"stop": StopSpec(steps=self.steps), "evaluate": EvaluateSpec(every_steps=self.steps)}
        return job.model_copy(update=changes)


def target_of(job: Job) -> str | None:
    """Return the job's target losses and metrics as text; None if there are none."""
    rules = [] if job.stop.loss_below is None else [f"loss < {job.stop.loss_below:g}"]
    rules += [f"{name} > {value:g}" for name, value in job.stop.metric_above.items()]
    rules += [f"{name} < {value:g}" for name, value in job.stop.metric_below.items()]
    return " or ".join(rules) or None


def settings_for(
    job: Job,
    cluster: Cluster,
    auto: Plan,
    *,
    plans: Sequence[Plan | str] = (),
    devices: Sequence[int] | None,
    steps: int | None,
    weak: bool,
) -> list[Setting]:
    """List a benchmark's settings: the fixed layout on each device count, and other plans.

    Args:
        auto: plan that `auto` chose. The fixed layout is this plan with `dp=N` and, on CPUs, one thread per device. The
            plan gets its own setting if it differs from the fixed layout and, unless `devices` is None, uses one of
            these numbers of devices.
        plans: additional plans, each of which gets its own setting and runs as with `paceline train --plan`.
        devices: device counts N to measure. None measures one device and all devices. One device is always measured,
            since every speedup is relative to one device.
        steps: number of steps of each run. None trains to the job's target, or for 60 steps if the job has no target.
        weak: whether to measure weak scaling.

    Raises:
        PlanError: a plan cannot run the job on the cluster, or a number of devices is invalid. The error lists all
            reasons.
    """
    counts = _device_counts(job, cluster, auto, devices)
    if steps is None and target_of(job) is None:
        steps = DEFAULT_STEPS
    chosen = [
        Setting(_key(n), count(n, "device"), on_devices(auto, n, cluster), n, "strong", job.global_batch, steps)
        for n in counts
    ]
    of_auto = _of_plan(auto, AUTO, job, cluster, steps)
    others = [of_auto] if devices is None or of_auto.devices in counts else []
    for setting in (*others, *(_of_plan(plan, "", job, cluster, steps) for plan in plans)):
        if setting.plan not in [s.plan for s in chosen]:
            chosen.append(setting)
    if weak:
        chosen += [
            Setting(
                f"{_key(n)}-weak",
                count(n, "device"),
                on_devices(auto, n, cluster),
                n,
                "weak",
                job.global_batch * n,
                steps or DEFAULT_STEPS,
            )
            for n in counts
            if n > 1
        ]
    if problems := list(dict.fromkeys(_problems_of(chosen, job, cluster))):
        raise PlanError.of_problems(problems)
    for setting in chosen:
        refuse_what_cannot_divide(setting.job(job), setting.plan, cluster)
    return chosen


def _device_counts(job: Job, cluster: Cluster, base: Plan, devices: Sequence[int] | None) -> list[int]:
    if devices is None:
        every = cluster.devices
        most = every if not plan_errors(job, on_devices(base, every, cluster), cluster=cluster) else base.ranks
        return sorted({1, most})
    if not devices:
        raise PlanError(
            "bench.no_devices",
            "no number of devices is given. Separate the numbers of devices by commas, e.g. 1,2.",
        )
    if wrong := [n for n in devices if n < 1]:
        raise PlanError(
            "bench.devices_invalid", "the number of devices must be at least 1, not {number}", number=wrong[0]
        )
    return sorted({1, *devices})


def _of_plan(plan: Plan | str, label: str, job: Job, cluster: Cluster, steps: int | None) -> Setting:
    """Return the setting that runs a plan in the same way as `paceline train`.

    On CPUs, the number of devices of this setting is the total number of threads of all ranks.
    """
    parsed = spelled_out(plan_of(plan, job), cluster)
    devices = parsed.ranks * (1 if cluster.has_accelerators else parsed.threads)
    key = re.sub(r"[^a-z0-9]+", "-", str(parsed))
    return Setting(
        key, f"{label}{named(parsed)}" if label else str(parsed), parsed, devices, "strong", job.global_batch, steps
    )


def _problems_of(settings: list[Setting], job: Job, cluster: Cluster) -> Iterator[PlanProblem]:
    for setting in settings:
        yield from (found := plan_errors(setting.job(job), setting.plan, cluster=cluster))
        if found.nearest is not None:
            yield proposal(found.nearest)


def _key(devices: int) -> str:
    return count(devices, "device").replace(" ", "-")
