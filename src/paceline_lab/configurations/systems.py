"""Training systems whose configurations paceline reads and writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from paceline.cluster.cluster import Cluster
from paceline.cluster.named import known
from paceline.errors import InvalidValue, PacelineError, PlanError
from paceline.files import read_text
from paceline.job.job import Job
from paceline.job.known import must_find_model
from paceline.job.model import Dimensions
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.estimate import predict_layout
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
from paceline.planning.prediction import Layouts, layout_of, priced
from paceline.planning.search.result import Candidate, SearchResult, preferred
from paceline.planning.search.search import search
from paceline.planning.tables.layouts import Row
from paceline.run.record.run import WARM_UP_STEPS
from paceline.run.tuning.calibrate import LogReader
from paceline.text import nearest
from paceline.units import percent, seconds, size
from paceline_lab.configurations import accelerate, deepspeed, megatron, torchtitan
from paceline_lab.configurations.configuration import Configuration, Planned, Written, planned, text_of, with_batch

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


class System(NamedTuple):
    """Functions that read and write the configurations of a training system."""

    read: Callable[[Path, str], Configuration]
    write: Callable[[Plan, Job, Dimensions | None, int], Written]


SYSTEMS: Mapping[str, System] = {
    "megatron": System(megatron.read, megatron.write),
    "deepspeed": System(deepspeed.read, deepspeed.write),
    "torchtitan": System(torchtitan.read, torchtitan.write),
    "accelerate": System(accelerate.read, accelerate.write),
}


def system_of(file: Path, text: str) -> str:
    """Detect the system of a configuration file from its suffix and its content.

    Raises:
        PlanError: the file matches no known system, or is not valid YAML.
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
            raise PlanError("config.not_yaml", "{file} is not valid YAML: {error}", file=file, error=error) from None
        keys = set(values) if isinstance(values, dict) else set()
        return "accelerate" if keys & {"distributed_type", "fsdp_config", "compute_environment"} else "megatron"
    if "--" in text:
        return "megatron"
    raise PlanError(
        "config.unknown_format",
        "{file} is not in a known format: a script or arguments of Megatron-LM (.sh, .txt, .yaml), DeepSpeed "
        "(.json), torchtitan (.toml), or Accelerate (.yaml)",
        file=file,
    )


def read_configuration(file: Path) -> Configuration:
    """Read the configuration of another system from a file.

    Raises:
        PlanError: the file cannot be read, matches no known system, or contains a value that is not valid for its key.
    """
    text = text_of(file)
    return SYSTEMS[system_of(file, text)].read(file, text)


def system_named(title: str) -> str:
    """Return the key in `SYSTEMS` for the system title of a configuration, such as `Accelerate, FSDP`."""
    words = title.lower()
    return next((name for name in ("accelerate", "deepspeed", "torchtitan") if words.startswith(name)), "megatron")


def writes(system: str, plan: Plan, job: Job) -> bool:
    """Return True if a plan can be written as a configuration of a system."""
    try:
        write_configuration(system, plan, job, 1)
    except PlanError:
        return False
    return True


def write_configuration(system: str, plan: Plan, job: Job, per_host: int) -> Written:
    """Write a plan as a configuration of another system.

    Raises:
        PlanError: the system is unknown, or does not support the plan; the error lists all reasons.
    """
    if system not in SYSTEMS:
        raise PlanError(
            "config.system_unknown",
            'paceline cannot write a plan for a system "{system}". {hint}',
            system=system,
            hint=nearest(system, SYSTEMS),
        )
    return SYSTEMS[system].write(plan, job, job.model.transformer, per_host)


# smallest relevant difference, as a fraction of the step or of the throughput
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
    """Plan of a configuration with its prediction, and the best plan for the same job.

    Attributes:
        own: plan of the configuration, with its prediction and explanation.
        refused: reasons why paceline would refuse the configuration's plan.
        best: plan that paceline proposes instead; None if there is no such plan.
        nothing: reason why there is no proposed plan; "" if there is one.
        notes: sentences on how the prediction differs from the configuration.
    """

    configuration: Configuration
    own: Explanation
    refused: tuple[str, ...]
    best: Candidate | None
    nothing: str
    notes: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Relative throughput gain of the best plan; 0 if there is no best plan."""
        if self.best is None:
            return 0.0
        return self.best.prediction.throughput / self.own.winner.prediction.throughput - 1

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Plan keys that the best plan changes, with the old value and the new value."""
        if self.best is None:
            return []
        mine, then = self.own.winner.plan, self.best.plan
        pairs = [
            (key, getattr(mine, key, None), getattr(then, key, None)) for key in _KEYS if _matters(key, mine, then)
        ]
        return [(key, _shown(now), _shown(later)) for key, now, later in pairs if now != later]

    @property
    def saved(self) -> list[tuple[str, float]]:
        """Seconds that the best plan saves in each part of a step, largest change first.

        A value is negative if the part takes longer with the best plan.
        """
        if self.best is None:
            return []
        mine, then = self.own.winner.prediction, self.best.prediction
        parts = [(part, mine.breakdown.get(part, 0.0) - then.breakdown.get(part, 0.0)) for part in PARTS]
        told = [(PART_NAMES[part], saved) for part, saved in parts if abs(saved) >= _SMALL * mine.step_time_s]
        return sorted(told, key=lambda entry: -abs(entry[1]))

    @property
    def verdict(self) -> str:
        """Sentence on how much faster the best plan is, or why there is none."""
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
        """Return all values of the explanation as JSON values."""
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
    """Predict the plan of a configuration, and search for a better plan.

    Args:
        calibration: calibration factors from measured runs.

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
        refused=tuple(problem.text for problem in reasons_against(plan, job, cluster)),
        best=best if best is None or best.prediction.throughput > prediction.throughput or not prediction.fits else own,
        nothing=nothing,
        notes=(f"predicted as {framework.name} runs it, the better plan as well", *notes),
    )


def _of_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """Resize the cluster to a number of ranks, if this is possible."""
    part = with_devices(cluster, ranks / cluster.devices) if ranks != cluster.devices else None
    return cluster if part is None else part


def framework_of(configuration: Configuration) -> Framework:
    """Return the cost model's profile of the framework that a configuration belongs to."""
    words = configuration.system.lower()
    if "megatron" in words:
        return MEGATRON_CORE
    if "deepspeed" in words:
        return DEEPSPEED
    if "torchtitan" in words:
        return TORCHTITAN_COMPILED if configuration.compiled else TORCHTITAN
    return FSDP if "fsdp" in words else DDP


def layout_as_configured(configuration: Configuration, planned: Planned, cluster: Cluster) -> Layout:
    """Return the layout of a configuration's plan in the framework that the configuration belongs to."""
    job, plan, _, products = planned
    layout = layout_of(job, _of_ranks(cluster, plan.ranks), plan)
    return _as_run(layout, framework_of(configuration), products)


def _as_run(layout: Layout, framework: Framework, products: str) -> Layout:
    return framework.laid_out(replace(layout, products=products))  # type: ignore[arg-type]


def _predicted(plan: Plan, layout: Layout, planned: Planned, cluster: Cluster, framework: Framework) -> Candidate:
    """Predict a plan in a given framework, with the configuration's precision of matrix products."""
    layout = _as_run(layout, framework, planned.products)
    return Candidate(plan, layout, priced(predict_layout(layout), planned.job, cluster, plan, layout))


def _best(
    planned: Planned, cluster: Cluster, framework: Framework, system: str, calibration: Basis | None
) -> tuple[Candidate | None, str]:
    """Return the best plan that the system supports, or None and the reason."""
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
    """Yield a plan and variants of it that use other sharding, schedule and sequence-parallel options."""
    shards = {"dp": 1, "fsdp": plan.dp * plan.fsdp}
    for sharding in ({}, {**shards, "zero": 1}, {**shards, "zero": 3}):
        for schedule in dict.fromkeys((plan.schedule, "interleaved", "1f1b")) if plan.pp > 1 else (plan.schedule,):
            for sequence in (True, False) if plan.tp > 1 else (False,):
                yield replace(plan, schedule=schedule, sequence=sequence, **sharding)  # type: ignore[arg-type]


def _matters(key: str, mine: Plan, then: Plan) -> bool:
    """Return True if a key has an effect in at least one of two plans."""
    needs = {"zero": "fsdp", "sequence": "tp", "schedule": "pp", "virtual": "pp"}
    return key not in needs or any(getattr(plan, needs[key]) > 1 for plan in (mine, then))


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


_MOST_BYTES = 2**28
# prefix that launchers such as torchrun add to each line of a rank's output
_PREFIX = re.compile(r"(?m)^(?:\[?[a-z]*\d+\]?: ?)+")
_ITERATION = re.compile(r"(?m)^.*elapsed time per iteration \(ms\): ([\d.]+).*$")
_ITS_BATCH = re.compile(r"global batch size: +(\d+)")
_ARGUMENTS = re.compile(r"-+ arguments -+\n(.*?)\n[^\n]*-+ end of arguments -+", re.DOTALL)
_ARGUMENT = re.compile(r"(?m)^.*?\b(\w+) \.+ (\S.*?)\s*$")
_PADDED = re.compile(r"padded vocab \(size: \d+\).*?new size: (\d+)")
# arguments that Megatron-LM prints even if their feature is off, by feature
_ONLY_WITH = {
    "group_query_attention": ("num_query_groups",),
    "multi_latent_attention": ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "num_experts": ("moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep: +\d+ .*?\btps: +([\d,]+(?:\.\d+)?)")
_BATCHES = re.compile(r"local batch size (\d+), global batch size (\d+),.*?sequence length (\d+)")
_MESH = re.compile(r"Building device mesh with parallelism: ([^\n]*)")
_DEGREE = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp)=(\d+)")
_DEVICE = re.compile(r"\b[A-Z]+ capacity: (.+?) with [\d.]+ ?GiB")
_DUMP = re.compile(r"Running with (?:args|configs?): *(?=\{)")


def run_of_log(file: Path, cluster: Cluster | None) -> Row:
    """Parse the log of a Megatron-LM or torchtitan run into a measured run.

    Raises:
        PlanError: the file is not such a log, has no configuration, or names other devices than the cluster.
    """
    try:
        text = _COLOUR.sub("", _PREFIX.sub("", read_text(file, _MOST_BYTES)))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            "log.unreadable", "it cannot be read: {reason}", reason=getattr(error, "strerror", None) or error
        ) from None
    of_megatron, of_torchtitan = _ITERATION.findall(text), _STEP.findall(text)
    if not of_megatron and not of_torchtitan:
        raise PlanError(
            "log.unknown_format",
            "it is not a log of Megatron-LM (lines with elapsed time per iteration (ms)) or torchtitan (lines with "
            "tps)",
        )
    if cluster is None or not cluster.has_accelerators:
        raise PlanError(
            "log.no_machines",
            "a log does not name the machines of its run. Name them with --cluster, such as 8xH100-SXM.",
        )
    if of_megatron:
        return _of_megatron(file, text, cluster)
    return _of_torchtitan(file, text, [float(tps.replace(",", "")) for tps in of_torchtitan], cluster)


# Megatron-LM


def _of_megatron(file: Path, text: str, cluster: Cluster) -> Row:
    lines = [(match[0], float(match[1]) / 1000) for match in _ITERATION.finditer(text)]
    batches = [int(batch[1]) if (batch := _ITS_BATCH.search(line)) else None for line, _ in lines]
    # if the batch size grows during the run, only steps with the last batch size are used
    seconds = [time for (_, time), batch in zip(lines, batches, strict=True) if batch == batches[-1]]
    found = with_batch(_megatron_configuration(file, text), batches[-1], None)
    return _row(file, found, cluster, _typical(seconds))


def _megatron_configuration(file: Path, text: str) -> Configuration:
    """Read the configuration from the log, or from a script with the same name."""
    if found := _ARGUMENTS.search(text):
        return megatron.configured(_printed(found[1], text))
    for ending in (".sh", ".yaml", ".yml"):
        if (beside := file.with_suffix(ending)).is_file():
            return read_configuration(beside)
    raise PlanError(
        "log.no_arguments",
        "it contains no arguments (Megatron-LM prints them first, between lines with dashes). Keep the arguments "
        "in the log, or put the script beside the log as {script}.",
        script=file.with_suffix(".sh").name,
    )


def _printed(arguments: str, text: str) -> dict[str, Any]:
    values = {match[1]: match[2] for match in _ARGUMENT.finditer(arguments) if match[2] != "None"}
    for feature, its in _ONLY_WITH.items():
        if values.get(feature, "False") == "False":
            values = {name: value for name, value in values.items() if name not in its}
    if padded := _PADDED.search(text):
        values["vocab_size"] = padded[1]
    return values


# torchtitan


def _of_torchtitan(file: Path, text: str, rates: Sequence[float], cluster: Cluster) -> Row:
    """Parse a torchtitan log, in which `tps` means tokens per second and device."""
    if (device := _DEVICE.search(text)) and (ran_on := known(device[1])) is not None:
        names = {gpu.name for host in cluster.hosts for gpu in host.gpus}
        named = {entry.name for name in names if (entry := known(name)) is not None}
        if ran_on.name not in named:
            raise PlanError(
                "log.other_device",
                "it ran on {device}, but --cluster has {devices}",
                device=device[1],
                devices=sorted(names),
            )
    found = _torchtitan_configuration(file, text)
    if mesh := _MESH.search(text):
        ranks = 1
        for _, degree in _DEGREE.findall(mesh[1]):
            ranks *= int(degree)
        found = replace(found, ranks=ranks)
    if batches := _BATCHES.search(text):
        found = with_batch(found, int(batches[2]), int(batches[1]) if found.pp == 1 else None)
        found = replace(found, dimensions={**found.dimensions, "seq": int(batches[3])})
    return _row(file, found, cluster, None, 1 / _typical([1 / rate for rate in rates]))


def _torchtitan_configuration(file: Path, text: str) -> Configuration:
    """Read the configuration from the log, or from a TOML file in the same folder."""
    if (dump := _DUMP.search(text)) and (values := _dumped(text, dump.end())).get("training"):
        return torchtitan.configured(values)
    beside = file.with_suffix(".toml")
    others = list(file.parent.glob("*.toml"))
    if beside.is_file() or len(others) == 1:
        return read_configuration(beside if beside.is_file() else others[0])
    raise PlanError(
        "log.no_configuration",
        "it does not contain the configuration. Put the TOML file beside it as {beside}, or train with "
        "--job.print_config.",
        beside=beside.name,
    )


def _dumped(text: str, at: int) -> dict[str, Any]:
    """Parse a configuration printed as JSON or as a Python dict. Return {} if it is neither."""
    try:
        values = json.JSONDecoder().raw_decode(text, at)[0]
    except ValueError:
        try:
            values = ast.literal_eval(text[at : text.find("\n", at)])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            values = {}
    return values if isinstance(values, dict) else {}


# Both


def _row(
    file: Path, found: Configuration, cluster: Cluster, seconds: float | None, tokens_per_s: float | None = None
) -> Row:
    what = planned(found, cluster.devices, "log", _dimensions)
    layout = layout_as_configured(found, what, cluster)
    if tokens_per_s is not None:
        seconds = what.job.global_batch * layout.trace.tokens / tokens_per_s / layout.ranks
    return Row(file.name, 0, {"framework": found.system}, layout, seconds, None, False)


def _dimensions(name: str) -> dict[str, Any]:
    try:
        return dict(must_find_model(name).dimensions)
    except InvalidValue as error:
        raise PlanError.of_error(error) from None


def _typical(seconds: Sequence[float]) -> float:
    """Return the median without warm-up steps. At most a third of all steps is skipped."""
    return median(seconds[min(WARM_UP_STEPS, len(seconds) // 3) :])


READER = LogReader(run_of_log)
