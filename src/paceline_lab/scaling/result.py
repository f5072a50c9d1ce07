"""Results of a benchmark as plain values: made here, drawn by `report/`, kept as `report.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.device import CPU
from paceline.errors import RunError
from paceline.files import read_text
from paceline.stats import Interval
from paceline.units import count

Scaling = Literal["strong", "weak"]
AUTO = "auto: "  # prefix of the label of the setting with the plan that `auto` chose


@dataclass(frozen=True)
class RankUse:
    """One rank's use of time and resources in a step: medians over all repeats.

    Only measured steps count.

    Attributes:
        parts_s: seconds of a step by part, the names of `paceline.engine.meter.PARTS`; they sum to the step.
        figures: values of `paceline.report.figures.RANK_FIGURES` by name, of those that were measured.
    """

    parts_s: dict[str, float]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """Losses of one run: at each step, with seconds of training and samples so far."""

    steps: list[int]
    seconds: list[float]
    samples: list[int]
    losses: list[float | None]


@dataclass(frozen=True)
class MeasuredSetting:
    """One way to run the job, over all its repeats.

    Attributes:
        label: for tables and legends, e.g. `1 device`, `2 devices`, or the plan where several have as many devices.
        scaling: `strong` has the job's global batch, `weak` the same batch per device as one device has. One device is
            both.
        global_batch: samples per optimizer step.
        step_time_s: median step time of each repeat, warm-up excluded; their median and interval.
        throughput: samples per second = global batch / step time.
        training_time_s: from the first step to the stop rule.
        time_to_target_s: the same where the job names a target and every repeat reached it.
        speedup: T1 / TN of the same scaling (for weak scaling N * T1 / TN of a step, which has N times the samples);
            None for one device.
        is_speedup: whether the intervals of the compared times do not overlap; else there is no difference to speak of.
        efficiency: speedup / devices.
        energy_joules: per step, all ranks; None where the machine does not tell.
        runs: the run directories, relative to the benchmark's.
        pairs: speedup of each repeat, against the one-device run of the same round.
        final_loss: mean training loss of the last steps, in the median over the repeats; None where it was not finite.
        rounds_s: step time in each round; None if a round has no run of this setting.
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
    rounds_s: list[float | None] = field(default_factory=list)

    @property
    def fixed(self) -> bool:
        """True for N devices in the fixed layout, False for a plan of its own."""
        return self.label in (count(self.devices, "device"), count(self.devices, "core"))


@dataclass(frozen=True)
class Report:
    """A benchmark of one job on one machine.

    Attributes:
        settings: one per plan, device count and scaling, in the order asked for; the one-device setting first.
        limits: two or three sentences: what a reader learns, and what holds the scaling back.
        warnings: what makes the figures less sure (load on the machine, few repeats, an interrupted benchmark).
        knobs: what the automatic plan tried, one line each; empty where the plans were given.
        complete: whether every repeat of every setting was measured.
        auto: the plan that `auto` chose, as written in a setting; empty in files without this field.
        kind: torch's type of the devices (`cpu` for cores); None in files that do not say it.
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
    knobs: list[str] = field(default_factory=list)
    complete: bool = True
    synthetic: bool = False
    kind: str | None = None
    auto: str = ""

    @property
    def of_auto(self) -> MeasuredSetting | None:
        """The setting with the plan that `auto` chose; None if not measured."""
        return next((s for s in self.settings if s.plan == self.auto and s.scaling == "strong"), None)

    @property
    def on_cores(self) -> bool:
        """True if the ranks had no accelerators, so that devices are cores."""
        if self.kind is not None:
            return self.kind == CPU
        return not any(rank.figures.get("gpu_memory_bytes") for setting in self.settings for rank in setting.ranks)

    def to_json(self) -> str:
        """The report as JSON that `load` reads back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def load(cls, file: Path) -> Report:
        """Read a report again.

        Raises:
            RunError: the file is missing or no report.
        """
        try:
            values = json.loads(read_text(file))
            return cls(**(values | {"settings": [_measured(s) for s in values["settings"]]}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{file} cannot be read as a benchmark's report: {error}") from error


def _measured(values: dict[str, Any]) -> MeasuredSetting:
    intervals = {
        name: Interval(**values[name])
        for name in ("step_time_s", "throughput", "training_time_s", "time_to_target_s", "speedup", "efficiency")
        if values.get(name) is not None
    }
    curve = Curve(**values["curve"]) if values.get("curve") else None
    return MeasuredSetting(
        **(values | intervals | {"ranks": [RankUse(**rank) for rank in values["ranks"]], "curve": curve})
    )
