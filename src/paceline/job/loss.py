"""The loss that a job minimises and the metrics that it reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field, ValidationInfo, field_validator

from paceline.errors import JobError
from paceline.job.spec import Args, Spec, resolve_import_path

if TYPE_CHECKING:
    from torch import Tensor


class Loss(Protocol):
    """The loss function that the engine calls.

    A plain function `loss(output, target) -> Tensor` that returns a mean over the samples is also a loss.

    The engine divides a batch into parts: one for each rank and microbatch. Before the first update, the engine
    compares the loss of a few samples with the losses of their parts. The engine rejects a loss whose values contradict
    its declaration. These optional attributes declare the loss:
    - `items(target) -> int | Tensor`: the number of items in the mean, e.g. the number of labels that are not ignored,
      or the sum of their weights. Without this attribute, the items are the samples. torch's own losses do not need it.
    - `reduction = "sum"`: the loss is a sum over the samples, not a mean.
    - `whole_batch = True`: the loss compares the samples of a batch with each other, as contrastive losses do. Such a
      loss is computed from the outputs of all data-parallel ranks.
    - `known_mean = True`, set by the class of the loss and not inherited: the loss is known to follow its declaration,
      and its mean is 0 for a part without items. The engine then skips the comparison and the search for parts without
      items.
    - `divides_classes = True`: the loss is a cross-entropy with the attributes `weight` and `label_smoothing`. Tensor
      parallelism computes it from logits that stay divided over the classes.
    - `probabilities(output) -> Tensor`: conversion of outputs to probabilities, for metrics of
      `torchmetrics.classification` and for predictions. The built-in losses and torch's own losses do not need it.
    - `check(output, target, where, samples)`: a function that raises a DataError if a target in host memory cannot be
      compared with the output. The engine calls this function before a loss on a GPU, where an invalid target would end
      the process.
    """

    def __call__(self, output: Any, target: Any) -> Tensor: ...


# with `chunk: auto`, whole logits of a microbatch may take this many bytes
WHOLE_LOGITS_BYTES = 64 * 2**20


def chunk_rows(rows: int, number_bytes: int) -> int:
    """Return the default number of rows of logits in a chunk.

    Logits with 16 bits are also converted to 32 bits, so their chunks are smaller.
    """
    return min(max(-(-rows // (24 if number_bytes < 4 else 8)), 64), 2048)


class Metric(Protocol):
    """A measure of the model on the validation set, of one of two kinds.

    - Most metrics are a ratio of two sums: a call returns `(total, count)` of one batch, and `result` gets both sums
      over all batches and replicas. The total is a number, or a tensor with the same shape for all batches.
    - With the attribute `gathers = True` (R², AUC, F1), a call returns two tensors `(predictions, targets)` with one
      row per sample of the batch. `result` gets the rows of the whole validation set, on the CPU of every rank; their
      order differs from the order of the data set. All rows together may have at most 1 GiB, so return only values that
      `result` needs.

    The attribute `higher_is_better` states whether the larger of two values is the better one. Stop rules and the
    choice of the best checkpoint use this attribute. The built-in metrics and most metrics of torchmetrics define it.
    """

    name: str

    def __call__(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return `(total, count)` of one batch, or the rows `(predictions, targets)` of the batch."""

    def result(self, total: Any, count: Any) -> float:
        """Compute the metric from the sums or rows of all batches and replicas."""


class _NamedSpec(Spec):
    """A name or an import path, optionally with arguments."""

    short: ClassVar[str | None] = "name"
    name: str
    args: Args = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _resolve_file(cls, value: str, info: ValidationInfo) -> str:
        return resolve_import_path(value, info.context) if ":" in value else value


class MetricSpec(_NamedSpec):
    """A metric of a job: its name or import path, and its arguments."""


class LossSpec(_NamedSpec):
    """The loss of a job: a name or an import path, optionally with arguments.

    For example `loss: cross_entropy`, `loss: SmoothL1Loss`, `loss: pkg.mod:function`, or `{name: cross_entropy, args:
    {weight: [1.0, 3.0]}}`.

    The built-in losses are `cross_entropy` (classes, tokens; label -100 is ignored), `mse`, `mae`, `bce` (with logits),
    `contrastive` (NT-Xent), `dpo` (pairs of preferences), `model` (the model computes its own loss, like Hugging Face
    models that get labels), and every loss class of `torch.nn` that compares an output with a target.
    """

    @property
    def is_over_whole_batch(self) -> bool:
        """True if the loss compares samples of a batch: `contrastive`, or `whole_batch = True`."""
        return self.name == "contrastive" or (":" in self.name and bool(getattr(self.build(), "whole_batch", False)))

    @property
    def is_over_whole_sequences(self) -> bool:
        """True if the loss is a mean over whole sequences.

        Such losses are `dpo`, and `KLDivLoss` with the reduction `batchmean`.
        """
        if self.name == "dpo":
            return True
        return self.args.get("reduction") == "batchmean" and bool(getattr(self.build(), "whole_sequences", False))

    @property
    def chunk(self) -> int | None:
        """Number of tokens in a chunk of logits; 0 for `auto`, None for whole logits."""
        chunk = self.args.get("chunk", "auto") if self.name == "cross_entropy" else "off"
        return 0 if chunk == "auto" else chunk if isinstance(chunk, int) and chunk else None

    def with_whole_logits(self) -> LossSpec:
        """Return this loss, computed from whole logits."""
        return self.model_copy(update={"args": {**self.args, "chunk": "off"}}) if self.name == "cross_entropy" else self

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the model with its weights before training (`dpo`)."""
        return self.name == "dpo"

    def build(self) -> Loss:
        """Build the loss as a callable.

        Raises:
            JobError: the name is unknown (the message names the nearest), or the loss rejects the arguments.
        """
        from paceline.job.zoo.losses import build_loss

        return build_loss(self)


def build_metrics(specs: Sequence[MetricSpec | str], loss: Loss | None = None) -> list[Metric]:
    """Build the metrics by name, from `paceline.job.zoo.metrics` or an import path.

    If `loss` is given, the first metric is this loss, with the name `loss`.

    Raises:
        JobError: a name is unknown (the message names the nearest), or two metrics have the same name.
    """
    from paceline.job.loss_items import LossMetric
    from paceline.job.zoo.metrics import build_metric

    named = [MetricSpec(name=spec) if isinstance(spec, str) else spec for spec in specs]
    built = [build_metric(spec.name, spec.args, loss) for spec in named if spec.name != "loss"]
    names = [metric.name for metric in built]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise JobError(
            "metric.twice",
            "two metrics of the job have the name {name}. Remove one of them, or replace one with your own class of "
            "another name.",
            name=twice,
        )
    return [*([LossMetric(loss)] if loss else []), *built]
