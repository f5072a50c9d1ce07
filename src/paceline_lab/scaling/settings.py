"""Settings of a benchmark: one job on 1 and N devices, and other plans.

N devices have the same global batch (strong scaling) or the same batch per device (weak scaling).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import EvaluateSpec, Job
from paceline.job.stop import StopSpec
from paceline.planning.check.check_plan import check_plan
from paceline.planning.plan import Plan, on_devices, spelled_out
from paceline.report.advice import named
from paceline.run.preflight import refuse_what_cannot_divide
from paceline.units import count
from paceline_lab.scaling.result import AUTO, Scaling

DEFAULT_STEPS = 60  # of a run that is not trained to a target
ONE = "1-device"


@dataclass(frozen=True)
class Setting:
    """One way to run the job. `steps`: how many; None trains until the job's own stop rule. `key` names its runs."""

    key: str
    label: str
    plan: Plan
    devices: int
    scaling: Scaling
    global_batch: int
    steps: int | None

    @property
    def title(self) -> str:
        """The label, and that the scaling is weak where it is."""
        return f"{self.label}, weak" if self.scaling == "weak" else self.label

    def job(self, job: Job) -> Job:
        """The job as this setting runs it.

        A weak one has another global batch at an unchanged learning rate: it measures speed only. Runs that are made to
        be timed are logged to no tracker.
        """
        changes: dict[str, object] = {"global_batch": self.global_batch, "trackers": ()}
        if self.steps is not None:
            changes |= {"stop": StopSpec(steps=self.steps), "evaluate": EvaluateSpec(every_steps=self.steps)}
        return job.model_copy(update=changes)


def target_of(job: Job) -> str | None:
    """The loss or metrics of the job's stop rule as text; None without any."""
    rules = [] if job.stop.loss_below is None else [f"loss < {job.stop.loss_below:g}"]
    return " or ".join([*rules, *(f"{name} > {value:g}" for name, value in job.stop.metric_above.items())]) or None


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
    """List the settings of the fixed layout, strong and weak, and of other plans.

    Args:
        auto: the plan that `auto` chose. It gets its own setting, unless the layout already has this plan or the plan
            uses a number of devices that was not requested. The fixed layout is this plan with `dp=N` and, without
            GPUs, one thread per device.
        plans: settings of their own, run as `paceline train --plan` would.
        devices: the values of N; None is 1 and all. One device is always measured, for every speedup is against it.
        steps: of every run; None trains to the job's target, or 60 steps where it names none.
        weak: whether to measure weak scaling.

    Raises:
        PlanError: a plan cannot run the job on the cluster, or a number of devices is none. Lists every reason.
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
    if reasons := list(dict.fromkeys(_reasons_against(chosen, job, cluster))):
        raise PlanError("\n".join(reasons))
    for setting in chosen:
        refuse_what_cannot_divide(setting.job(job), setting.plan, cluster)
    return chosen


def _device_counts(job: Job, cluster: Cluster, base: Plan, devices: Sequence[int] | None) -> list[int]:
    if devices is None:
        every = cluster.devices
        most = every if not check_plan(on_devices(base, every, cluster), job, cluster) else base.ranks
        return sorted({1, most})
    if not devices:
        raise PlanError("no number of devices is given; the numbers of devices are separated by commas, e.g. 1,2")
    if wrong := [n for n in devices if n < 1]:
        raise PlanError(f"a number of devices is at least 1, not {wrong[0]}")
    return sorted({1, *devices})


def _of_plan(plan: Plan | str, label: str, job: Job, cluster: Cluster, steps: int | None) -> Setting:
    """A plan as `paceline train` runs it. Without GPUs, its number of devices is its total number of threads."""
    parsed = spelled_out(Plan.parse(plan) if isinstance(plan, str) else plan, cluster)
    devices = parsed.ranks * (1 if cluster.has_accelerators else parsed.threads)
    key = re.sub(r"[^a-z0-9]+", "-", str(parsed))
    return Setting(
        key, f"{label}{named(parsed)}" if label else str(parsed), parsed, devices, "strong", job.global_batch, steps
    )


def _reasons_against(settings: list[Setting], job: Job, cluster: Cluster) -> Iterator[str]:
    for setting in settings:
        yield from check_plan(setting.plan, setting.job(job), cluster)


def _key(devices: int) -> str:
    return count(devices, "device").replace(" ", "-")
