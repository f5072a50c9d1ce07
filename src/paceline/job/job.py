"""A job describes *what* to train, but not where or how.

A job is read from YAML or created in Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
from paceline.job.adapter import AdapterSpec
from paceline.job.data import DataSpec
from paceline.job.loss import LossSpec, MetricSpec
from paceline.job.model import ModelSpec
from paceline.job.optimizer import OptimizerSpec
from paceline.job.overrides import Overrides, override
from paceline.job.partition import PartitionSpec
from paceline.job.quantize import Quantize
from paceline.job.schedule import ScheduleSpec
from paceline.job.spec import Args, Spec, import_path_of, read_sections, with_sections
from paceline.job.stop import BestSpec, SpikeSpec, StopSpec
from paceline.storage.url import DATA_VERSIONS, checked_url, is_url, local_path
from paceline.yaml_file import explain

Task = Literal["pretrain", "sft", "dpo"]
# kinds of data of each task, besides those whose samples come from a user's code
_KINDS_OF = {"pretrain": ("tokens", "text", "synthetic"), "sft": ("chat",), "dpo": ("preferences",)}
_ANY_SAMPLES = ("records", "mixture", "dataset", "iterable")
_LOSSES_OF_TOKENS = ("cross_entropy", "model", "CrossEntropyLoss")
Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]
_ACCUMULATION = 'Did you mean "gradient_accumulation_steps", at the top of the job?'
_HINTS = {
    "freeze": "The patterns of frozen parameters belong to the model: `model: {…, freeze: [embed]}`.",
    "tokenizer": "Text with a tokenizer is kind: tokens, which also needs the key context.",
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


def base_precision(precision: str) -> str:
    """Return the precision of everything except the float8 products of `fp8`."""
    return "bf16" if precision == "fp8" else precision


class EvaluateSpec(Spec):
    """Number of steps or epochs between evaluations on the validation set.

    By default, the model is evaluated after every epoch. It is always evaluated at the end of the run.

    A language model also continues the `prompts` at every evaluation, with at most `max_new_tokens` tokens each. The
    texts are in the run's record and on its page.
    """

    every_steps: int | None = Field(None, ge=1)
    every_epochs: int = Field(1, ge=1)
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # with kind: chat, messages of a user
    max_new_tokens: int = Field(64, ge=1)


class CheckpointSpec(Spec):
    """Interval between checkpoints, and number of newest checkpoints to keep.

    The run is also saved at the end, on SIGINT and on SIGTERM. `every_steps` and `every_seconds` limit the work that a
    failure can lose, so a checkpoint that takes long to write begins earlier.
    """

    every_steps: int | None = Field(None, ge=1)
    every_seconds: float = Field(300.0, gt=0)  # used if `every_steps` is not given
    keep: int = Field(3, ge=1)
    # a validation metric; the checkpoint with its best value is also kept
    best: BestSpec | None = None
    # number of consecutive checkpoint failures after which the run ends
    max_failures: int = Field(3, ge=1)
    # steps between copies of the state in memory, which are made if the job rewinds or its plan has one divided
    # replica; the default interval costs at most 1 % of the time
    memory_every_steps: int | None = Field(None, ge=1)


class TrackerSpec(Spec):
    """A tracker that records the run's numbers: a name, or `{name: mlflow, args: {experiment: digits}}`."""

    short: ClassVar[str | None] = "name"
    name: str
    args: Args = Field(default_factory=dict)


class Job(Spec):
    """A training job: the model, the data, the optimizer and the stop rule.

    `global_batch` and `seed` belong to the job, so every plan trains on the same batches. Plans without inexact choices
    have the same losses.

    In Python, sections accept the same short forms as in YAML, and `model`, `data` and `loss` also accept a function or
    class: `Job(model=MyNet, data="digits", loss="cross_entropy", optimizer={"name": "sgd", "lr": 0.1}, global_batch=64,
    stop={"epochs": 3})`.

    Raises:
        JobError: keys or values are wrong. The message lists all, with the nearest key for a misspelled one.
    """

    model_config = ConfigDict(extra="allow")  # keys of sections that other packages define; `read_sections` checks them

    if TYPE_CHECKING:  # the arguments may have short forms, which differ from the types of the fields

        def __init__(self, **values: Any) -> None: ...

    name: str = Field("job", pattern=r"^[A-Za-z0-9._-]+$")
    task: Task | None = None  # gives the loss its default, and refuses data of another task
    model: ModelSpec
    quantize: Quantize | None = None  # hold the frozen linear layers in 8 or 4 bits
    adapter: AdapterSpec | None = None  # train small layers beside the frozen layers of the model
    data: DataSpec
    loss: LossSpec
    metrics: tuple[MetricSpec, ...] = ()
    optimizer: OptimizerSpec
    schedule: ScheduleSpec = ScheduleSpec()
    global_batch: int = Field(ge=1)  # samples of an optimizer step, over all replicas
    # number of microbatches into which each data-parallel rank splits its share of the batch; the plan's `microbatches`
    # overrides this value
    gradient_accumulation_steps: int = Field(1, ge=1)
    drop_last: bool = False  # skip the last batch of an epoch if it is smaller; by default it is weighted by its size
    clip_norm: float | None = Field(None, gt=0)  # largest L2 norm of the whole gradient
    clip_value: float | None = Field(None, gt=0)  # largest absolute value of an element of the gradient
    ema: float | None = Field(None, gt=0, lt=1)  # decay of the weights' moving average, which evaluations use
    batch_norm: Literal["local", "sync"] = "local"  # statistics of a replica's share, or of the global batch
    # buffers that the forward pass writes: equal on all replicas, or each replica keeps its own
    buffers: Literal["same", "local"] = "same"
    compare_every: int = Field(100, ge=1)  # steps between the checks that all replicas are equal
    nonfinite: Literal["stop", "skip", "rewind"] = "stop"  # policy for NaN or Inf in the loss or the gradients
    spike: SpikeSpec = SpikeSpec()
    precision: Precision = "fp32"
    partition: PartitionSpec = PartitionSpec()
    seed: int = Field(0, ge=0, lt=2**31)
    stop: StopSpec
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    trackers: tuple[TrackerSpec, ...] = ()
    deadline_s: float = Field(300.0, gt=0)  # longest time that other ranks wait for a rank

    def __repr__(self) -> str:
        """Summarize name, model, data, optimizer, global batch and stop rule; `to_yaml` returns all keys."""
        model = self.model.zoo or self.model.factory or str(self.model.hf or "transformer")
        optimizer, stop = self.optimizer, self.stop.model_dump(exclude_defaults=True)
        until = ", ".join(f"{key}={value}" for key, value in stop.items())
        what = f"{model.rpartition('/')[2]} on {self.data.kind}, {optimizer.name}"
        return f"<Job {self.name}: {what}, global batch {self.global_batch:,}, until {until}>"

    __str__ = __repr__

    @field_validator("model", "data", "loss", mode="before")
    @classmethod
    def _name_python_objects(cls, value: Any) -> Any:
        """Replace functions and classes with their import paths, also under `factory` or `name`."""
        if isinstance(value, dict):
            return {key: import_path_of(entry) if callable(entry) else entry for key, entry in value.items()}
        return import_path_of(value) if callable(value) else value

    @field_validator("metrics", mode="before")
    @classmethod
    def _list_one_metric(cls, value: Any) -> Any:
        return [value] if isinstance(value, (str, dict)) else value

    @model_validator(mode="before")
    @classmethod
    def _default_loss(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("task") in _KINDS_OF and values.get("loss") is None:
            return {**values, "loss": "dpo" if values["task"] == "dpo" else "cross_entropy"}
        return values

    @model_validator(mode="after")
    def _default_tokenizer(self) -> Job:
        if (place := self.model.hf) is not None:
            object.__setattr__(self, "data", self.data.of_model(place if place.is_dir() else place.parent))
        return self

    @model_validator(mode="after")
    def _fit_the_task(self) -> Job:
        if self.task not in _KINDS_OF:
            return self
        task, kind = self.task, self.data.kind
        if kind not in (*_KINDS_OF[task], *_ANY_SAMPLES):
            raise InvalidValue(
                "job.task_of_other_data",
                "task: {task} needs data of kind {kinds}, but data.kind is {kind}. Change the data, or remove the key "
                "task.",
                task=task,
                kinds=" or ".join(_KINDS_OF[task]),
                kind=kind,
            )
        losses = ("dpo",) if task == "dpo" else _LOSSES_OF_TOKENS
        if self.loss.name not in losses and ":" not in self.loss.name:
            raise InvalidValue(
                "job.task_of_other_loss",
                "task: {task} needs a loss of {of}, but the loss is {loss}. Remove the key loss; the default is "
                "{default}.",
                task=task,
                of="preferences" if task == "dpo" else "tokens",
                loss=self.loss.name,
                default=losses[0],
            )
        of_model = "masked_lm" if self.model.zoo == "bert" else self.model.task
        if of_model not in (None, "causal_lm") and not (task == "pretrain" and of_model == "masked_lm"):
            raise InvalidValue(
                "job.task_of_other_model",
                "task: {task} needs a causal language model, but the task of the model is {of_model}. Set "
                "model.task to causal_lm, or name another model.",
                task=task,
                of_model=of_model,
            )
        return self

    @model_validator(mode="after")
    def _adapt_and_quantize_model(self) -> Job:
        if self.adapter is not None:
            object.__setattr__(self, "model", self.model.adapting(self.adapter))
        if self.quantize is not None and self.adapter is not None and self.adapter.lora.dora:
            raise InvalidValue(
                "adapter.dora_quantized",
                "adapter.lora.dora needs the norms of the rows of the original weights, but quantize: {quantize} "
                "changes the weights. Remove dora or quantize.",
                quantize=self.quantize,
            )
        if self.quantize is not None:
            object.__setattr__(self, "model", self.model.quantizing(self.quantize))
        return self

    @model_validator(mode="after")
    def _shift_once(self) -> Job:
        if self.loss.name == "model" and self.data.is_tokenized:
            raise InvalidValue(
                "job.labels_shifted_twice",
                "the labels of kind: tokens are the next tokens, and with loss: model, the model shifts them again. "
                "Set loss: cross_entropy.",
            )
        return self

    @model_validator(mode="after")
    def _write_samples(self) -> Job:
        if not self.evaluate.prompts:
            return self
        specs = list(getattr(self.data, "sources", {}).values()) or [self.data]
        reason = None
        if self.model.task not in (None, "causal_lm"):
            reason = f"a model for the task {self.model.task} does not continue texts"
        elif not all(spec.kind in ("text", "tokens", "chat") for spec in specs):
            reason = f"data of kind {self.data.kind} has no tokenizer"
        elif any(getattr(spec, "objective", "causal") != "causal" for spec in specs):
            reason = "a model that predicts masked tokens does not continue texts"
        elif self.data.keeps_no_validation_set:
            reason = "data.held_out is 0, so the model is not evaluated"
        if reason is not None:
            raise InvalidValue(
                "job.prompts_impossible",
                "evaluate.prompts needs a language model that is evaluated during training, but {reason}. Remove the "
                "key, and use paceline generate after training.",
                reason=reason,
            )
        return self

    @model_validator(mode="after")
    def _pairs_have_their_loss(self) -> Job:
        if self.loss.name == "dpo" and self.data.kind not in ("preferences", "dataset"):
            raise InvalidValue(
                "job.loss_without_pairs",
                "loss: dpo needs pairs of sequences, but data.kind is {kind}. Use data of kind: preferences.",
                kind=self.data.kind,
            )
        if self.data.kind == "preferences" and self.loss.name != "dpo" and ":" not in self.loss.name:
            raise InvalidValue(
                "job.pairs_without_loss",
                "data of kind: preferences has pairs of sequences, which the loss {loss} cannot compare. Use loss: "
                "dpo.",
                loss=self.loss.name,
            )
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
    def _divide_streams_by_parts(self) -> Job:
        if self.data.kind != "iterable" or (self.partition.kind == "uniform" and self.partition.weights is None):
            return self
        raise InvalidValue(
            "partition.of_stream",
            "partition is {partition}, but the samples of a stream are not known before they are read. Remove the key "
            "partition.",
            partition="weights" if self.partition.weights is not None else self.partition.kind,
        )

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
        # clients of a federated job may hold out samples of their own
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
        # a user's metric has a name only after it is built
        if unmeasured and not any(":" in metric.name for metric in self.metrics):
            name = min(unmeasured)
            raise InvalidValue(
                "job.metric_unmeasured",
                "{key} uses {metric}, which is not in metrics, so it would never be measured",
                key=watched[name],
                metric=name,
            )
        return self

    @model_validator(mode="wrap")  # the last validator is the outermost one
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
        """Return the keys that this job uses and only paceline's own training loop supports.

        Parameter servers, federated clients and other systems reject these keys.
        """
        optimizer, schedule = self.optimizer, self.schedule
        found = {
            f"optimizer.name: {optimizer.name}": not optimizer.has_short_name,
            "optimizer.args": bool(optimizer.args),
            "optimizer.groups": bool(optimizer.groups),
            "optimizer.no_decay": bool(optimizer.no_decay),
            f"schedule.name: {schedule.name}": schedule.by_class,
            "clip_value": self.clip_value is not None,
            "quantize": self.quantize is not None,
            "adapter": self.adapter is not None,
            "ema": self.ema is not None,
            "loss: dpo": self.loss.has_reference,
            "precision: fp16": self.precision == "fp16",
            "gradient_accumulation_steps": self.gradient_accumulation_steps > 1,
            "data.kind: iterable": self.data.kind == "iterable",
            "evaluate.prompts": bool(self.evaluate.prompts),
        }
        return [key for key, used in found.items() if used]

    @property
    def state_tensors(self) -> float:
        """Number of additional tensors with a parameter's shape and type, stored for each parameter.

        These are the optimizer's tensors and the copies of the weights, not the parameter and its gradient.
        """
        return self.optimizer.state_tensors + self.weight_copies

    @property
    def weight_copies(self) -> int:
        """Number of copies of the trained weights: moving average and reference."""
        return (self.ema is not None) + self.loss.has_reference

    def fetch(self) -> dict[str, str]:
        """Download what URLs name: data, the model's folder and weights.

        Nothing is downloaded if this host has the current version.

        The returned environment variables make the ranks on all hosts read exactly the fetched versions.

        Raises:
            DataError: the URL of the data has no files, or the files cannot be read or stored. The message names the
                URL and the remedy.
            JobError: the URL of the model or the weights has no files, or the files cannot be read or stored.
        """
        environment = self.data.fetch()
        versions = json.loads(environment.get(DATA_VERSIONS, "{}"))
        for key, url in (("hf", self.model.hf), ("weights", self.model.weights)):
            if not is_url(url):
                continue
            from paceline.storage.store import fetched, version_of  # imports fsspec, which few jobs need

            try:
                versions[url] = version_of(fetched(url))
            except StorageError as error:
                raise JobError("model.weights_invalid", "model.{key}: {error}", key=key, error=error) from error
        return {DATA_VERSIONS: json.dumps(versions)} if versions else environment

    @classmethod
    def load(cls, file: str | Path, *, set: Overrides = ()) -> Job:
        """Read a job from a YAML file, given as a path or a URL.

        Relative paths in a file are relative to the file's folder. In a job from an object store, they are relative to
        the current folder.

        Args:
            set: keys to override before the job is checked, as a mapping `{"optimizer.lr": 3e-4}` or in the form of the
                option `--set`, `["optimizer.lr=3e-4"]`.

        Raises:
            JobError: the file cannot be read, or a key or value is wrong. The message names the line or the override,
                and the nearest key for a misspelled one.
            StorageError: the object at the URL does not exist or cannot be read.
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
            changes: new values by dotted key, in the form that `load` accepts: `{"optimizer.lr": 3e-4, "stop.epochs":
                2}`. Relative paths are relative to the current directory.

        Raises:
            JobError: keys or values are wrong. The message lists all, with the nearest key for a misspelled one.
        """
        values = self.model_dump(mode="json", exclude_defaults=True)
        values, positions = override(values, changes, with_sections(type(self)))
        return type(self).model_validate(values, context={"positions": positions})

    def to_yaml(self) -> str:
        """Return the job as YAML that `Job.load` reads back (defaults omitted, paths absolute)."""
        from paceline.yaml_file import to_yaml

        return to_yaml(self.model_dump(mode="json", exclude_defaults=True))
