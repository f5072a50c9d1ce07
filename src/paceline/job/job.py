"""A job describes *what* to train, but not where and how.

It is read from YAML or made in Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from paceline.errors import InvalidValue, JobError, StorageError
from paceline.job.data import DataSpec
from paceline.job.loss import LossSpec, MetricSpec
from paceline.job.model import ModelSpec
from paceline.job.optimizer import OptimizerSpec
from paceline.job.overrides import Overrides, override
from paceline.job.parameters import Patterns
from paceline.job.partition import PartitionSpec
from paceline.job.schedule import ScheduleSpec
from paceline.job.spec import Args, Spec, import_path_of, read_sections, with_sections
from paceline.job.stop import BestSpec, SpikeSpec, StopSpec
from paceline.storage.url import DATA_VERSIONS, checked_url, is_url, local_path
from paceline.yaml_file import explain

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
_ACCUMULATION = 'Did you mean "gradient_accumulation_steps", at the top of the job?'
_HINTS = {
    "accumulate": _ACCUMULATION,
    "accumulate_steps": _ACCUMULATION,
    "accumulation": _ACCUMULATION,
    "accumulation_steps": _ACCUMULATION,
    "gradient_accumulation": _ACCUMULATION,
    "batch_size": (
        'Did you mean "global_batch", at the top of the job? It counts the samples of an optimizer step over '
        "all replicas."
    ),
}


class EvaluateSpec(Spec):
    """Steps or epochs between evaluations on the validation set (default: every epoch; always at the end)."""

    every_steps: int | None = Field(None, ge=1)
    every_epochs: int = Field(1, ge=1)


class CheckpointSpec(Spec):
    """Interval between checkpoints, and number of newest checkpoints to keep.

    The run is also saved at the end, on SIGINT and on SIGTERM. `every_steps` and `every_seconds` limit the work that a
    failure can lose: a checkpoint that takes long to write begins earlier.
    """

    every_steps: int | None = Field(None, ge=1)
    every_seconds: float = Field(300.0, gt=0)  # used if `every_steps` is not given
    keep: int = Field(3, ge=1)
    # a validation metric: the checkpoint of its best evaluation is also kept
    best: BestSpec | None = None
    # number of consecutive checkpoint failures at which the run ends
    max_failures: int = Field(3, ge=1)
    # steps between states in memory, if the job rewinds or its plan has one divided replica; by default, chosen to cost
    # at most 1 % of the time
    memory_every_steps: int | None = Field(None, ge=1)


class TrackerSpec(Spec):
    """A tracker for the run's numbers: a name, or `{name: mlflow, args: {experiment: digits}}`."""

    short: ClassVar[str | None] = "name"
    name: str
    args: Args = Field(default_factory=dict)


class Job(Spec):
    """A training job: what to train, until when, and on what data.

    `global_batch` and `seed` belong to the job, so all plans do the same work and have the same losses.

    In Python, parts take the same short forms as in YAML, and `model`, `data` and `loss` also take a function or class:
    `Job(model=MyNet, data="digits", loss="cross_entropy", optimizer={"name": "sgd", "lr": 0.1}, global_batch=64,
    stop={"epochs": 3})`.

    Raises:
        JobError: a key or value is wrong. The message names all of them, and the nearest key for a misspelled one.
    """

    model_config = ConfigDict(extra="allow")  # sections of other packages, which `read_sections` checks

    if TYPE_CHECKING:  # the short forms of the parts differ from the types of the fields

        def __init__(self, **values: Any) -> None: ...

    name: str = Field("job", pattern=r"^[A-Za-z0-9._-]+$")
    model: ModelSpec
    freeze: Patterns = ()  # parameters that are not trained
    data: DataSpec
    loss: LossSpec
    metrics: tuple[MetricSpec, ...] = ()
    optimizer: OptimizerSpec
    schedule: ScheduleSpec = ScheduleSpec()
    global_batch: int = Field(ge=1)  # samples per optimizer step, over all replicas
    # microbatches that each data-parallel rank's share is computed in; a plan's `microbatches` overrides it
    gradient_accumulation_steps: int = Field(1, ge=1)
    drop_last: bool = False  # skip the last, smaller batch of an epoch; by default it is weighted exactly
    clip_norm: float | None = Field(None, gt=0)  # largest L2 norm of the whole gradient
    clip_value: float | None = Field(None, gt=0)  # largest absolute value of an element of the gradient
    ema: float | None = Field(None, gt=0, lt=1)  # decay of the average of the weights, which evaluations measure
    batch_norm: Literal["local", "sync"] = "local"  # statistics over a replica's share, or over the global batch
    # buffers that the forward pass writes: the same on all replicas, or each keeps its own
    buffers: Literal["same", "local"] = "same"
    compare_every: int = Field(100, ge=1)  # steps between comparisons of replicas, which find silent corruption
    nonfinite: Literal["stop", "skip", "rewind"] = "stop"  # policy for NaN or Inf in the loss or the gradients
    spike: SpikeSpec = SpikeSpec()
    precision: Precision = "fp32"
    partition: PartitionSpec = PartitionSpec()
    seed: int = Field(0, ge=0, lt=2**31)
    stop: StopSpec
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    trackers: tuple[TrackerSpec, ...] = ()
    deadline_s: float = Field(300.0, gt=0)  # longest time that any rank may keep the others waiting

    def __repr__(self) -> str:
        """Return name, model, data, optimizer, global batch and stop rule; `to_yaml` has everything."""
        model = self.model.zoo or self.model.factory or (self.model.hf and self.model.hf.name) or "transformer"
        optimizer, stop = self.optimizer, self.stop.model_dump(exclude_defaults=True)
        until = ", ".join(f"{key}={value}" for key, value in stop.items())
        what = f"{model.rpartition('/')[2]} on {self.data.kind}, {optimizer.name}"
        return f"<Job {self.name}: {what}, global batch {self.global_batch:,}, until {until}>"

    __str__ = __repr__

    @field_validator("model", "data", "loss", mode="before")
    @classmethod
    def _name_python_objects(cls, value: Any) -> Any:
        """Replace functions and classes, alone or as `factory` or `name`, by their import paths."""
        if isinstance(value, dict):
            return {key: import_path_of(entry) if callable(entry) else entry for key, entry in value.items()}
        return import_path_of(value) if callable(value) else value

    @field_validator("metrics", mode="before")
    @classmethod
    def _list_one_metric(cls, value: Any) -> Any:
        return [value] if isinstance(value, (str, dict)) else value

    @model_validator(mode="after")
    def _freeze_parameters(self) -> Job:
        if self.freeze and self.model.transformer is not None:
            raise InvalidValue(
                "job.freeze_without_code",
                "freeze names parameters of a model, but model.transformer gives only dimensions",
            )
        object.__setattr__(self, "model", self.model.freezing(self.freeze))
        return self

    @model_validator(mode="after")
    def _clip_once(self) -> Job:
        if self.clip_norm is not None and self.clip_value is not None:
            raise InvalidValue(
                "job.two_clips",
                "clip_norm and clip_value both limit the gradient. Set only one of them.",
            )
        return self

    @model_validator(mode="after")
    def _schedule_metric_is_measured(self) -> Job:
        if not self.schedule.follows_metric:
            return self
        if self.data.keeps_no_validation_set and not self.model_extra:
            raise InvalidValue(
                "schedule.metric_without_held_out",
                "schedule ReduceLROnPlateau follows a validation metric, but data.held_out is 0. Hold out a share, "
                "e.g. held_out: 0.1.",
            )
        metric, names = self.schedule.metric, [entry.name for entry in self.metrics]
        if metric not in (None, "loss", *names) and not any(":" in name for name in names):
            raise InvalidValue(
                "schedule.metric_unmeasured",
                "schedule.metric is {metric}, which is not in metrics, so it would never be measured",
                metric=metric,
            )
        return self

    @model_validator(mode="after")
    def _stop_metrics_are_measured(self) -> Job:
        # clients of a federated job may hold out their own samples
        nothing_held_out = self.data.keeps_no_validation_set and not self.model_extra
        best = self.checkpoint.best
        watched = ({best.metric: "checkpoint.best"} if best else {}) | self.stop.watched
        if nothing_held_out and watched:
            raise InvalidValue(
                "job.metric_without_held_out",
                "{key} uses a validation metric, but data.held_out is 0, so no metric is measured. Hold out a "
                "share, e.g. held_out: 0.1, or stop by epochs, steps or loss_below.",
                key=next(iter(watched.values())),
            )
        if nothing_held_out and self.metrics and self.data.test is None:
            named = ", ".join(metric.name for metric in self.metrics)
            raise InvalidValue(
                "job.metrics_without_held_out",
                "metrics lists {names}, but data.held_out is 0, so no validation samples exist. Hold out a share, "
                "e.g. held_out: 0.1, or leave metrics out.",
                names=named,
            )
        unmeasured = set(watched) - {metric.name for metric in self.metrics} - {"loss"}
        # a user's metric has a name only once it is built
        if unmeasured and not any(":" in metric.name for metric in self.metrics):
            name = min(unmeasured)
            raise InvalidValue(
                "job.metric_unmeasured",
                "{key} uses {metric}, which is not in metrics, so it would never be measured",
                key=watched[name],
                metric=name,
            )
        return self

    @model_validator(mode="wrap")  # the last one, so it is outermost
    @classmethod
    def _explain_what_is_wrong(cls, values: Any, validate: ModelWrapValidatorHandler[Job], info: ValidationInfo) -> Job:
        errors: list[ErrorDetails] = []
        if isinstance(values, Mapping):
            values, errors = read_sections(values, cls.model_fields, info.context)
        try:
            job = validate(values)
        except ValidationError as error:
            errors = [*error.errors(include_url=False), *errors]
        if not errors:
            return job
        positions = (info.context or {}).get("positions")
        raise JobError.of_problems(explain(errors, with_sections(cls), positions, name="job", hints=_HINTS))

    @property
    def beyond_plain_steps(self) -> list[str]:
        """Return the keys of this job that only paceline's own training loop supports.

        Parameter servers, federated clients and other systems refuse these keys.
        """
        optimizer, schedule = self.optimizer, self.schedule
        found = {
            f"optimizer.name: {optimizer.name}": not optimizer.has_short_name,
            "optimizer.args": bool(optimizer.args),
            "optimizer.groups": bool(optimizer.groups),
            "optimizer.no_decay": bool(optimizer.no_decay),
            f"schedule.name: {schedule.name}": schedule.by_class,
            "clip_value": self.clip_value is not None,
            "ema": self.ema is not None,
            "precision: fp16": self.precision == "fp16",
            "gradient_accumulation_steps": self.gradient_accumulation_steps > 1,
        }
        return [key for key, used in found.items() if used]

    @property
    def state_tensors(self) -> float:
        """Number of tensors of a parameter's shape and type that are kept with it."""
        return self.optimizer.state_tensors + (self.ema is not None)

    def fetch(self) -> dict[str, str]:
        """Fetch data and weights that a URL names, unless this host has the store's version.

        Returns environment variables with which the ranks on all hosts read exactly these versions.

        Raises:
            DataError: the URL has no files, or they cannot be read or stored; the message names the URL and what to do.
            JobError: the same for weights.
        """
        environment = self.data.fetch()
        if not is_url(self.model.weights):
            return environment
        from paceline.storage.store import fetched, version_of  # fsspec, which few jobs need

        try:
            version = version_of(fetched(self.model.weights))
        except StorageError as error:
            raise JobError("model.weights_invalid", "model.weights: {error}", error=error) from error
        versions = json.loads(environment.get(DATA_VERSIONS, "{}"))
        return {DATA_VERSIONS: json.dumps({**versions, self.model.weights: version})}

    @classmethod
    def load(cls, file: str | Path, *, set: Overrides = ()) -> Job:
        """Read a job from a YAML file or from the URL of one.

        Relative paths start at the file's own folder; in a job from an object store, at the current folder.

        Args:
            set: keys to override before the job is checked: `{"optimizer.lr": 3e-4}`, or texts as after `--set`:
                `["optimizer.lr=3e-4"]`.

        Raises:
            JobError: the file cannot be read, or a key or value is wrong. The message names the line or the override,
                and the nearest key for a misspelled one.
            StorageError: the URL does not exist, or cannot be read.
        """
        from paceline.yaml_file import FileKind, read_yaml

        kind = FileKind("job", "model, data, loss, optimizer, global_batch and stop", "`model: mlp`", JobError)
        base = None
        if is_url(file):
            from paceline.storage.store import fetched

            url = checked_url(file)
            file, base = fetched(url), Path.cwd() if local_path(url) is None else None
        values, in_file = read_yaml(file := Path(file), kind)
        values, positions = override(values, set, with_sections(cls), in_file)
        return cls.model_validate(values, context={"base": base or file.parent.resolve(), "positions": positions})

    def replace(self, changes: Overrides) -> Job:
        """Return a copy of this job with some keys set to other values.

        Args:
            changes: values by dotted keys, as `load` takes them: `{"optimizer.lr": 3e-4, "stop.epochs": 2}`. Relative
                paths start at the current directory.

        Raises:
            JobError: a key or value is wrong. The message names all of them, and the nearest key for a misspelled one.
        """
        values = self.model_dump(mode="json", exclude_defaults=True)
        values, positions = override(values, changes, with_sections(type(self)))
        return type(self).model_validate(values, context={"positions": positions})

    def to_yaml(self) -> str:
        """Return the job as YAML that `Job.load` reads back (defaults omitted, paths absolute)."""
        from paceline.yaml_file import to_yaml

        return to_yaml(self.model_dump(mode="json", exclude_defaults=True))
