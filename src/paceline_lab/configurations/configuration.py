"""Configuration of another training system, and its conversion to a job and a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from paceline.errors import PlanError
from paceline.job.job import Job, Precision
from paceline.job.model import Dimensions
from paceline.planning.plan import Plan
from paceline.yaml_file import explain

# value of a degree that uses all remaining ranks
REST = -1
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lamb": "lamb"}


@dataclass(frozen=True)
class Configuration:
    """Values that were read from the configuration of another training system.

    Attributes:
        system: name of the training system, such as `Megatron-LM`.
        dimensions: model dimensions that the file contains, by key of `Dimensions`.
        model_name: name of the model, to look up the other dimensions; "" if the file does not name one.
        ranks: number of ranks; None if the file does not state it.
        replicas: number of data-parallel ranks with copies of the same parameters; REST uses all remaining ranks.
        shard: number of data-parallel ranks that shard parameters (ZeRO, FSDP); REST uses all remaining ranks.
        zero: ZeRO stage of the sharding, from 1 to 3.
        virtual: number of pipeline stages on each rank.
        microbatch: samples per microbatch on a data-parallel rank; None if the file does not state it.
        microbatches: number of microbatches per step; None if the file does not state it.
        precision: precision of the computation: `fp32`, `bf16`, `fp16` or `fp8`.
        read: keys that the reader understood, with their values.
        noted: known keys that the prediction ignores, with the assumption that it makes instead.
        unknown: keys that the reader does not know, and that may affect the prediction.
        problems: sentences on combinations of values that the training system refuses or ignores.
    """

    system: str
    dimensions: dict[str, Any]
    model_name: str = ""
    ranks: int | None = None
    replicas: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 3
    sequence: bool = False
    offload: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    remat: str = "none"
    compiled: bool = False
    microbatch: int | None = None
    microbatches: int | None = None
    global_batch: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    steps: int | None = None
    read: tuple[tuple[str, str], ...] = ()
    noted: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class Planned(NamedTuple):
    """Job and plan that are equivalent to a configuration of another system.

    Attributes:
        notes: sentences on how the job and the plan differ from the configuration.
        products: precision of matrix products; "" if it is the job's precision.
    """

    job: Job
    plan: Plan
    notes: tuple[str, ...]
    products: str = ""


def planned(
    configuration: Configuration,
    devices: int,
    name: str,
    known: Callable[[str], Dimensions | dict[str, Any]] | None = None,
) -> Planned:
    """Convert a configuration to a job and a plan.

    Args:
        devices: number of ranks to use if the configuration does not state one.
        name: name of the returned job.
        known: function that returns the dimensions of a model with a given name.

    Raises:
        PlanError: the product of the degrees is not the number of ranks, the batch cannot be divided evenly, or a value
            is missing.
    """
    _positive(configuration)
    ranks = configuration.ranks or devices
    degrees = _degrees(configuration, ranks)
    data = degrees["dp"] * degrees["fsdp"] * degrees["ep"]
    microbatches, global_batch = _batch(configuration, data)
    precision, products, notes = _precision(configuration)
    dimensions = _dimensions(configuration, known)
    optimizer = _OPTIMIZERS.get(configuration.optimizer.lower().removeprefix("fused"), "")
    if not optimizer:
        optimizer = "adamw"
        notes.append(f"optimizer {configuration.optimizer}: predicted as AdamW")
    values = {
        "name": name,
        "model": {"transformer": dimensions},
        "data": "synthetic",
        "loss": "cross_entropy",
        "optimizer": {"name": optimizer, "lr": configuration.learning_rate},
        "global_batch": global_batch,
        "precision": precision,
        "stop": {"steps": configuration.steps or 1000},
    }
    try:
        job = Job.model_validate(values)
    except ValidationError as error:
        problems = explain(error.errors(include_url=False), Job, name="job")
        raise PlanError.of_problems([problem.at("the model of the configuration") for problem in problems]) from None
    return Planned(job, _plan(configuration, degrees, microbatches), tuple(notes), products)


def _positive(configuration: Configuration) -> None:
    for name in ("ranks", "replicas", "shard", "virtual", "microbatch", "microbatches", "global_batch", "steps"):
        value = getattr(configuration, name)
        if value is not None and value < 1 and not (name in ("replicas", "shard") and value == REST):
            raise PlanError(
                "config.degree_too_small",
                "{system}: {name} must be at least 1, not {value}",
                system=configuration.system,
                name=name.replace("_", " "),
                value=value,
            )


def _degrees(configuration: Configuration, ranks: int) -> dict[str, int]:
    """Compute the degree of each parallel axis of the plan.

    Experts are divided among data-parallel ranks, so `ep` must divide the number of data-parallel ranks.
    """
    one = configuration
    of_model = one.tp * one.pp * one.cp
    if ranks % of_model:
        raise PlanError(
            "config.degrees_do_not_divide",
            "{system}: tensor × pipeline × context = {tp} × {pp} × {cp} = {product} does not divide {ranks} ranks",
            system=one.system,
            tp=one.tp,
            pp=one.pp,
            cp=one.cp,
            product=of_model,
            ranks=ranks,
        )
    data = ranks // of_model
    fixed = {"replicas": one.replicas, "shard": one.shard}
    known = 1
    for degree in fixed.values():
        known *= 1 if degree == REST else degree
    left = REST in fixed.values()
    if data % known or (not left and known != data):
        raise PlanError(
            "config.data_ranks_differ",
            "{system}: {ranks} ranks and tensor × pipeline × context = {product} give {data} data-parallel ranks, "
            "but the configuration has {known}{more}",
            system=one.system,
            ranks=ranks,
            product=of_model,
            data=data,
            known=known,
            more=" times what is left" if left else "",
        )
    sizes = {key: data // known if degree == REST else degree for key, degree in fixed.items()}
    if one.ep > 1:
        of_experts = "shard" if sizes["shard"] % one.ep == 0 else "replicas"
        if sizes[of_experts] % one.ep:
            raise PlanError(
                "config.experts_do_not_divide",
                "{system}: expert parallel = {ep} does not divide the {data} data-parallel ranks over which its "
                "experts are divided",
                system=one.system,
                ep=one.ep,
                data=data,
            )
        sizes[of_experts] //= one.ep
    return {"dp": sizes["replicas"], "fsdp": sizes["shard"], "tp": one.tp, "pp": one.pp, "cp": one.cp, "ep": one.ep}


def _batch(configuration: Configuration, data: int) -> tuple[int, int]:
    micro, count, whole = configuration.microbatch, configuration.microbatches, configuration.global_batch
    if whole is None and (micro is None or count is None):
        raise PlanError(
            "config.no_global_batch",
            "the {system} configuration does not contain the global batch: add --global-batch N",
            system=configuration.system,
        )
    if whole is None:
        assert micro is not None
        assert count is not None
        return count, micro * count * data
    if micro is None:
        micro = max(1, whole // (data * (count or 1)))
    if whole % (data * micro) or (count is not None and data * micro * count != whole):
        stated = f"{data} data-parallel ranks × {micro}" + (f" × {count} microbatches" if count else "")
        raise PlanError(
            "config.microbatch",
            "{system}: a global batch of {global_batch} does not match {factors} samples per microbatch",
            system=configuration.system,
            global_batch=whole,
            factors=stated,
        )
    return whole // (data * micro), whole


def _precision(configuration: Configuration) -> tuple[str, str, list[str]]:
    """Return the job's precision, the precision of matrix products ("" if equal), and notes on differences."""
    stated = configuration.precision
    if stated == "fp8":
        return "bf16", stated, ["fp8: matrix products in fp8 with scales of whole tensors, everything else in bf16"]
    if stated in get_args(Precision):
        return stated, "", []
    return "bf16", "", [f"{stated} is predicted as bf16, which is as fast"]


def _dimensions(
    configuration: Configuration, known: Callable[[str], Dimensions | dict[str, Any]] | None
) -> dict[str, Any]:
    stated = {key: value for key, value in configuration.dimensions.items() if value is not None}
    if configuration.model_name and known is not None:
        found = known(configuration.model_name)
        values = found.model_dump(exclude_defaults=True) if isinstance(found, Dimensions) else dict(found)
        return values | stated
    missing = [key for key in ("layers", "hidden", "heads", "seq", "vocab") if key not in stated]
    if missing:
        raise PlanError(
            "config.model_incomplete",
            "the {system} configuration does not contain {missing} of the model. Name the model, as in --model "
            "llama-3.1-8b, or a job with dimensions, as in --model job.yaml.",
            system=configuration.system,
            missing=list(missing),
        )
    return stated


def _plan(configuration: Configuration, degrees: dict[str, int], microbatches: int) -> Plan:
    words = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    words += [f"microbatches={microbatches}"] if microbatches > 1 else []
    if degrees["fsdp"] > 1:
        words += [f"zero={configuration.zero}", *(["offload=on"] if configuration.offload else [])]
    if degrees["tp"] > 1 and configuration.sequence:
        words.append("sequence=on")
    if degrees["pp"] > 1:
        words.append(f"schedule={configuration.schedule}")
        if configuration.schedule == "interleaved" and configuration.virtual != 2:
            words.append(f"virtual={configuration.virtual}")
    if configuration.remat != "none":
        words.append(f"remat={configuration.remat}")
    if configuration.compiled:
        words.append("compile=on")
    return Plan.parse(" ".join(words) or "dp=1")


def with_batch(configuration: Configuration, global_batch: int | None, microbatch: int | None) -> Configuration:
    """Return the configuration with its batch sizes replaced by the given batch sizes."""
    if global_batch is not None:
        kept = configuration.microbatches if configuration.microbatch is None else None
        configuration = replace(configuration, global_batch=global_batch, microbatches=kept)
    if microbatch is not None:
        configuration = replace(configuration, microbatch=microbatch, microbatches=None)
    return configuration


def text_of(file: Path) -> str:
    """Read the text of a configuration file.

    Raises:
        PlanError: the file cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            "config.unreadable",
            "{file} cannot be read: {error}",
            file=file,
            error=getattr(error, "strerror", None) or error,
        ) from None


_DEEPEST = 20
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null", "")


class Keys:
    """Values of a configuration by key, with a record of the keys that were read.

    A name matches the key of the same name, or a key that ends with a dot and the name. An empty string,
    `auto` and `null` count as missing values.
    """

    def __init__(
        self, system: str, values: Mapping[str, Any], quiet: Sequence[str] = (), noted: Mapping[str, str] | None = None
    ) -> None:
        """Store the values of a configuration.

        Args:
            quiet: regular expressions of keys that affect neither speed nor memory.
            noted: assumptions for keys that the prediction ignores, by regular expression of the key.
        """
        self.system, self.values = system, dict(values)
        self.read: dict[str, str] = {}
        self._quiet = [re.compile(pattern) for pattern in quiet]
        self._noted = {re.compile(pattern): about for pattern, about in (noted or {}).items()}

    def given(self, *names: str) -> Any:
        """Return the value of the first name that has one; None if all are missing."""
        for name in names:
            for key in self._matching(name):
                value = self.values[key]
                self.read[key] = "" if value is True else _shown(value)
                if value is None or (isinstance(value, str) and value.strip().lower() in ("auto", "null", "")):
                    continue
                return value
        return None

    def number(self, *names: str) -> int | None:
        """Return the first value as a whole number; None if no name has a value.

        Raises:
            PlanError: the value is not a whole number.
        """
        value = self.given(*names)
        if value is None:
            return None
        try:
            whole = float(str(value))
        except ValueError:
            raise PlanError(
                "config.not_a_number",
                "{system}: {name} should be a number, got {value!r}",
                system=self.system,
                name=names[0],
                value=value,
            ) from None
        if not whole.is_integer():
            raise PlanError(
                "config.not_whole",
                "{system}: {name} should be a whole number, got {value!r}",
                system=self.system,
                name=names[0],
                value=value,
            )
        return int(whole)

    def degree(self, *names: str) -> int:
        """Return the first value as a parallel degree; 1 if no name has a value.

        Raises:
            PlanError: the value is not a whole number of at least 1.
        """
        value = self.number(*names)
        if value is not None and value < 1:
            raise PlanError(
                "config.too_small",
                "{system}: {name} must be at least 1, not {value}",
                system=self.system,
                name=names[0],
                value=value,
            )
        return value or 1

    def real(self, name: str, default: float) -> float:
        """Return a value as a floating-point number.

        Raises:
            PlanError: the value is not a number.
        """
        value = self.given(name)
        try:
            return default if value is None else float(value)
        except (TypeError, ValueError):
            raise PlanError(
                "config.not_a_number",
                "{system}: {name} should be a number, got {value!r}",
                system=self.system,
                name=name,
                value=value,
            ) from None

    def flag(self, *names: str) -> bool:
        """Return the first value as a boolean; False if no name has a value.

        Raises:
            PlanError: the value is neither true nor false.
        """
        value = self.given(*names)
        if isinstance(value, bool) or value is None:
            return bool(value)
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE):
            raise PlanError(
                "config.not_boolean",
                "{system}: {name} should be true or false, got {value!r}",
                system=self.system,
                name=names[0],
                value=value,
            )
        return text in _TRUE

    def text(self, *names: str) -> str:
        """Return the first value as a string; "" if no name has a value."""
        value = self.given(*names)
        return "" if value is None else str(value)

    def configuration(self, problems: Sequence[str] = (), **found: Any) -> Configuration:
        """Build the configuration from its fields and the record of read keys."""
        noted = [(key, about) for key in self._left() for pattern, about in self._noted.items() if _fits(pattern, key)]
        known = {key for key, _ in noted}
        unknown = [
            key for key in self._left() if key not in known and not any(_fits(pattern, key) for pattern in self._quiet)
        ]
        stated = tuple(self.read.items())
        return Configuration(
            self.system, **found, read=stated, noted=tuple(noted), unknown=tuple(unknown), problems=tuple(problems)
        )

    def _left(self) -> Iterator[str]:
        return (key for key in self.values if key not in self.read)

    def _matching(self, name: str) -> list[str]:
        if name in self.values:
            return [name]
        return [key for key in self.values if key.endswith(f".{name}")]


def flattened(values: Any, above: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one mapping with dotted keys. Lists are kept as values.

    Raises:
        PlanError: the mappings are nested too deeply or refer to themselves.
    """
    if not isinstance(values, Mapping):
        return {above: values}
    if above.count(".") > _DEEPEST:
        raise PlanError(
            "config.too_deep",
            "{keys}…: the mappings are nested too deeply for a configuration",
            keys=above[:60],
        )
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{above}.{key}" if above else str(key))
    return flat


def _fits(pattern: re.Pattern[str], key: str) -> bool:
    return bool(pattern.fullmatch(key.rpartition(".")[2]) or pattern.fullmatch(key))


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


class Written(NamedTuple):
    """Configuration of another system that was generated from a plan.

    Attributes:
        text: content of the configuration file.
        suffix: usual suffix of the file name.
        launch: short text on launch options that the file cannot contain; "" if there are none.
    """

    text: str
    suffix: str
    launch: str = ""


def ranks_per_host(ranks: int, per_host: int) -> int:
    """Return the largest number of ranks per host, up to `per_host`, that divides `ranks`."""
    return max(each for each in range(1, min(ranks, per_host) + 1) if ranks % each == 0)


def refuse(system: str, plan: Plan, job: Job, reasons: Mapping[str, bool]) -> None:
    """Refuse a plan that uses features that a system does not support.

    Args:
        reasons: unsupported features, each with True if the plan uses it. Features that only paceline supports are
            always checked.

    Raises:
        PlanError: the plan uses unsupported features; the error names all of them.
    """
    precision, parts = plan.precision_for(job), plan.data_ranks * plan.microbatches
    of_none = {
        f"sync={plan.sync}": plan.sync != "allreduce",
        f"compress={plan.compress}": plan.compress != "none",
        f"precision={precision}": precision not in ("bf16", "fp32"),
        "a share of the batch that is not whole": job.global_batch % parts != 0,
    }
    if cannot := [reason for reason, holds in {**reasons, **of_none}.items() if holds]:
        raise PlanError(
            "config.cannot_express",
            "{system} does not support parts of {plan}: {reasons}",
            system=system,
            plan=plan,
            reasons="; ".join(cannot),
        )


def microbatch_of(plan: Plan, job: Job) -> int:
    """Return the number of samples per microbatch on a data-parallel rank."""
    return job.global_batch // (plan.data_ranks * plan.microbatches)
