"""The systems whose configurations can be read and written, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from paceline.cluster.cluster import Cluster
from paceline.errors import PacelineError, PlanError
from paceline.job.job import Job
from paceline.job.model import Dimensions
from paceline.nearest import nearest
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.frameworks import (
    DDP,
    DEEPSPEED,
    FSDP,
    MEGATRON_CORE,
    TORCHTITAN,
    TORCHTITAN_COMPILED,
    Framework,
)
from paceline.planning.cost.layout import PART_NAMES, PARTS, Layout
from paceline.planning.explain.advice import with_devices
from paceline.planning.explain.explain import Explanation, explain
from paceline.planning.machines import equal_ratio
from paceline.planning.plan import Plan
from paceline.planning.predict import Layouts, layout_of, priced
from paceline.planning.search.result import Candidate, SearchResult, preferred
from paceline.planning.search.search import search
from paceline.units import percent, seconds, size
from paceline_lab.configurations import accelerate, deepspeed, megatron, torchtitan
from paceline_lab.configurations.configuration import Configuration, Planned, Written, text_of

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


class System(NamedTuple):
    """Reader and writer of a system's configurations."""

    read: Callable[[Path, str], Configuration]
    write: Callable[[Plan, Job, Dimensions | None, int], Written]


SYSTEMS: Mapping[str, System] = {
    "megatron": System(megatron.read, megatron.write),
    "deepspeed": System(deepspeed.read, deepspeed.write),
    "torchtitan": System(torchtitan.read, torchtitan.write),
    "accelerate": System(accelerate.read, accelerate.write),
}


def system_of(file: Path, text: str) -> str:
    """Name of the system that a file belongs to, by its ending and its keys.

    Raises:
        PlanError: it is none of those known.
    """
    ending = file.suffix.lower()
    if ending == ".toml":
        return "torchtitan"
    if ending == ".json":
        return "deepspeed"
    if ending in (".yaml", ".yml"):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"{file} is not valid YAML: {error}") from None
        keys = set(values) if isinstance(values, dict) else set()
        return "accelerate" if keys & {"distributed_type", "fsdp_config", "compute_environment"} else "megatron"
    if "--" in text:
        return "megatron"
    raise PlanError(
        f"{file} is no configuration that is known: a script or arguments of Megatron-LM (.sh, .txt, .yaml), DeepSpeed "
        "(.json), torchtitan (.toml), or Accelerate (.yaml)"
    )


def read_configuration(file: Path) -> Configuration:
    """Read the configuration of another system.

    Raises:
        PlanError: the file cannot be read, is of no known system, or has a value that its key does not take.
    """
    text = text_of(file)
    return SYSTEMS[system_of(file, text)].read(file, text)


def system_named(title: str) -> str:
    """Name in `SYSTEMS` of a configuration's system, such as `Accelerate, FSDP`."""
    words = title.lower()
    return next((name for name in ("accelerate", "deepspeed", "torchtitan") if words.startswith(name)), "megatron")


def writes(system: str, plan: Plan, job: Job) -> bool:
    """True if a system can do what a plan has."""
    try:
        write_configuration(system, plan, job, 1)
    except PlanError:
        return False
    return True


def write_configuration(system: str, plan: Plan, job: Job, per_host: int) -> Written:
    """The plan as a configuration of another system.

    Raises:
        PlanError: the system is not known, or cannot do what the plan has; names everything.
    """
    if system not in SYSTEMS:
        raise PlanError(f'"{system}" is no system that a plan can be written for. {nearest(system, SYSTEMS)}')
    return SYSTEMS[system].write(plan, job, job.model.transformer, per_host)


# fraction of the step below which a part is not told
_SMALL = 0.01
_KEYS = (
    "dp",
    "fsdp",
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "sequence",
    "schedule",
    "virtual",
    "remat",
    "offload",
    "microbatches",
)


@dataclass(frozen=True)
class ConfiguredPlan:
    """A configuration's plan, its prediction, and the best plan for the same job.

    Attributes:
        own: the configuration's plan, explained like any other.
        refused: reasons why paceline would not run that plan.
        best: the plan that paceline proposes; None with the reason in `nothing` if none fits.
        notes: sentences on what is predicted otherwise than stated.
    """

    configuration: Configuration
    own: Explanation
    refused: tuple[str, ...]
    best: Candidate | None
    nothing: str
    notes: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Relative gain of throughput by the best plan; 0 if there is none."""
        if self.best is None:
            return 0.0
        return self.best.prediction.throughput / self.own.winner.prediction.throughput - 1

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Keys in which the best plan differs: name, the configuration's value, the better one."""
        if self.best is None:
            return []
        mine, then = self.own.winner.plan, self.best.plan
        pairs = [
            (key, getattr(mine, key, None), getattr(then, key, None)) for key in _KEYS if _matters(key, mine, then)
        ]
        return [(key, _shown(now), _shown(later)) for key, now, later in pairs if now != later]

    @property
    def saved(self) -> list[tuple[str, float]]:
        """Seconds of the step that the best plan saves, by part, the largest first.

        They are negative where it spends more.
        """
        if self.best is None:
            return []
        mine, then = self.own.winner.prediction, self.best.prediction
        parts = [(part, mine.breakdown.get(part, 0.0) - then.breakdown.get(part, 0.0)) for part in PARTS]
        told = [(PART_NAMES[part], saved) for part, saved in parts if abs(saved) >= _SMALL * mine.step_time_s]
        return sorted(told, key=lambda entry: -abs(entry[1]))

    @property
    def verdict(self) -> str:
        """A sentence on what would be better, if anything."""
        mine = self.own.winner.prediction
        if self.best is None:
            return self.nothing
        room = self.own.capacity_bytes
        if not mine.fits:
            return (
                f"it does not fit: {size(mine.memory_bytes)} on a device with {size(room)}. {self.best.plan} fits, in "
                f"{size(self.best.prediction.memory_bytes)}"
            )
        if self.gain < _SMALL:
            return "nothing better was found: none of the other plans is predicted to be faster by 1 %"
        return (
            f"{self.best.plan} is predicted to be {percent(self.gain)} faster: "
            f"{seconds(self.best.prediction.step_time_s)} a step, {size(self.best.prediction.memory_bytes)}"
            + ("; that is less than predictions can tell apart" if 1 + self.gain <= equal_ratio() else "")
        )

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain JSON values."""
        one = self.configuration
        return {
            "system": one.system,
            "read": dict(one.read),
            "assumed": dict(one.noted),
            "not_understood": list(one.unknown),
            "problems": list(one.problems),
            "refused": list(self.refused),
            "notes": list(self.notes),
            "own": self.own.to_json(),
            "better": str(self.best.plan) if self.best else None,
            "gain": self.gain,
            "changes": [{"key": key, "now": now, "better": better} for key, now, better in self.changes],
            "saved_s": dict(self.saved),
        }


def explain_configuration(
    configuration: Configuration, planned: Planned, cluster: Cluster, calibration: Basis | None = None
) -> ConfiguredPlan:
    """Predict a configuration's plan, and search a better one for the same job.

    Args:
        calibration: factors of measured runs.

    Raises:
        JobError: the model cannot be built.
        ClusterError: a device is not in the catalogue.
        PlanError: the plan cannot be predicted.
    """
    job, plan, notes, _ = planned
    cluster = _of_ranks(cluster, plan.ranks)
    framework = framework_of(configuration)
    own = _predicted(plan, layout_of(job, cluster, plan, calibration), planned, cluster, framework)
    prediction = own.prediction
    best, nothing = _best(planned, cluster, framework, system_named(configuration.system), calibration)
    return ConfiguredPlan(
        configuration=configuration,
        own=explain(job, cluster, SearchResult(best=(own,)), what_would_help=False),
        refused=tuple(reasons_against(plan, job, cluster)),
        best=best if best is None or best.prediction.throughput > prediction.throughput or not prediction.fits else own,
        nothing=nothing,
        notes=(f"predicted as {framework.name} runs it, the better plan as well", *notes),
    )


def _of_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with as many ranks as a configuration is for; unchanged if unknown."""
    part = with_devices(cluster, ranks / cluster.devices) if ranks != cluster.devices else None
    return cluster if part is None else part


def framework_of(configuration: Configuration) -> Framework:
    """The cost model's profile of the software that runs a configuration."""
    words = configuration.system.lower()
    if "megatron" in words:
        return MEGATRON_CORE
    if "deepspeed" in words:
        return DEEPSPEED
    if "torchtitan" in words:
        return TORCHTITAN_COMPILED if configuration.compiled else TORCHTITAN
    return FSDP if "fsdp" in words else DDP


def layout_as_configured(configuration: Configuration, planned: Planned, cluster: Cluster) -> Layout:
    """Layout of a configuration's plan as its software runs it."""
    job, plan, _, products = planned
    layout = layout_of(job, _of_ranks(cluster, plan.ranks), plan)
    return _as_run(layout, framework_of(configuration), products)


def _as_run(layout: Layout, framework: Framework, products: str) -> Layout:
    return framework.laid_out(replace(layout, products=products))  # type: ignore[arg-type]


def _predicted(plan: Plan, layout: Layout, planned: Planned, cluster: Cluster, framework: Framework) -> Candidate:
    """The plan as another framework runs it, with products in the configuration's precision."""
    layout = _as_run(layout, framework, planned.products)
    return Candidate(plan, layout, priced(estimate(layout), planned.job, cluster, plan, layout))


def _best(
    planned: Planned, cluster: Cluster, framework: Framework, system: str, calibration: Basis | None
) -> tuple[Candidate | None, str]:
    """The proposed one of the best plans that the system can run, or why not."""
    job = planned.job
    try:
        best = search(job, cluster, calibration=calibration).best
    except PacelineError as error:
        return None, str(error).splitlines()[0]
    plans = dict.fromkeys(plan for one in best for plan in _likenesses(one.plan) if writes(system, plan, job))
    legal = [plan for plan in plans if not reasons_against(plan, job, cluster)]
    layouts = Layouts(job, best[0].layout.machines)
    found = [_predicted(plan, layouts.of(plan), planned, cluster, framework) for plan in legal]
    fitting = [one for one in found if one.prediction.fits]
    if not fitting:
        return None, f"none of the best plans is one that {system} can run, and that fits as it keeps its state"
    return preferred(fitting), ""


def _likenesses(plan: Plan) -> Iterator[Plan]:
    """A plan, and those like it that systems with fewer choices can run."""
    shards = {"dp": 1, "fsdp": plan.dp * plan.fsdp}
    for sharding in ({}, {**shards, "zero": 1}, {**shards, "zero": 3}):
        for schedule in dict.fromkeys((plan.schedule, "interleaved", "1f1b")) if plan.pp > 1 else (plan.schedule,):
            for sequence in (True, False) if plan.tp > 1 else (False,):
                yield replace(plan, schedule=schedule, sequence=sequence, **sharding)  # type: ignore[arg-type]


def _matters(key: str, mine: Plan, then: Plan) -> bool:
    """True if a key means something in either plan."""
    needs = {"zero": "fsdp", "sequence": "tp", "schedule": "pp", "virtual": "pp"}
    return key not in needs or any(getattr(plan, needs[key]) > 1 for plan in (mine, then))


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
