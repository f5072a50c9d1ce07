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

    A plain function `loss(output, target) -> Tensor` (a mean over the samples) is also a loss.

    A batch is computed in parts, by ranks and microbatches. Before the first update, the engine compares the loss of a
    few samples with the losses of their parts, and refuses a loss that differs from its declaration. Optional
    attributes declare the loss:
    - `items(target) -> int | Tensor`: how many items the mean is over (e.g. labels that are not ignored, or the sum of
      their weights); without it, the samples. torch's own losses need none.
    - `reduction = "sum"`: the loss is a sum over the samples, not a mean.
    - `whole_batch = True`: the loss compares samples of a batch with each other (contrastive losses), so it is computed
      from the outputs of all data-parallel ranks.
    - `known_mean = True`, set by the class of the loss itself: the mean is as declared, and 0 without items, so the
      engine neither tests it nor searches for parts without items.
    - `divides_classes = True`: a cross-entropy with `weight` and `label_smoothing`, which tensor parallelism computes
      from logits that stay divided over the classes.
    - `probabilities(output) -> Tensor`: conversion of outputs to probabilities, for metrics of
      `torchmetrics.classification` and for predictions. Built-in losses and torch's own need none.
    - `check(output, target, where, samples)`: raise a DataError for a target on the host that cannot be compared with
      the output; called before a loss on a GPU, where such a target would end the process.
    """

    def __call__(self, output: Any, target: Any) -> Tensor: ...


class Metric(Protocol):
    """A validation measure of one of two kinds.

    - Most metrics are a ratio of two sums: a call returns `(total, count)` of one batch, and `result` gets both sums
      over all batches and replicas. The total is a number, or a tensor of one shape for all batches.
    - With the attribute `gathers = True` (R², AUC, F1), a call returns two tensors `(predictions, targets)` with one
      row per sample of the batch. `result` gets the rows of the whole validation set, on the CPU of every rank, in
      another order than in the data set. The limit is 1 GiB in total, so return only what `result` needs.

    The attribute `higher_is_better` (True or False) determines the better of two values, for stopping and for keeping
    the best checkpoint. Built-in metrics and most of torchmetrics have it.
    """

    name: str

    def __call__(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return `(total, count)`, or the rows `(predictions, targets)`, of one batch."""

    def result(self, total: Any, count: Any) -> float:
        """Compute the value from the sums, or the rows, of all batches and replicas."""


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
    """The loss of a job: a name, an import path, or either with arguments.

    For example `loss: cross_entropy`, `loss: SmoothL1Loss`, `loss: pkg.mod:function`, or `{name: cross_entropy, args:
    {weight: [1.0, 3.0]}}`.

    Built in: `cross_entropy` (classes, tokens; label -100 is ignored), `mse`, `mae`, `bce` (with logits), `contrastive`
    (NT-Xent), `model` (the model computes its own loss, as Hugging Face models do if they get labels), and every loss
    class of `torch.nn` that compares an output with a target.
    """

    @property
    def is_over_whole_batch(self) -> bool:
        """True if the loss compares samples of a batch: `contrastive`, or `whole_batch = True`."""
        return self.name == "contrastive" or (":" in self.name and bool(getattr(self.build(), "whole_batch", False)))

    @property
    def is_over_whole_sequences(self) -> bool:
        """True if the loss is a mean over samples of any length (`KLDivLoss`, batchmean)."""
        return self.args.get("reduction") == "batchmean" and bool(getattr(self.build(), "whole_sequences", False))

    def build(self) -> Loss:
        """Build the loss as a callable.

        Raises:
            JobError: the name is unknown (the message names the nearest), or the loss rejects the arguments.
        """
        from paceline.job.zoo.losses import build_loss

        return build_loss(self)


def build_metrics(specs: Sequence[MetricSpec | str], loss: Loss | None = None) -> list[Metric]:
    """Build the metrics by name, from `paceline.job.zoo.metrics` or an import path.

    Given the job's loss, the first metric is that loss, by the name `loss`.

    Raises:
        JobError: a name is unknown (the message names the nearest), or two metrics have one name.
    """
    from paceline.job.loss_items import LossMetric
    from paceline.job.zoo.metrics import build_metric

    named = [MetricSpec(name=spec) if isinstance(spec, str) else spec for spec in specs]
    built = [build_metric(spec.name, spec.args, loss) for spec in named if spec.name != "loss"]
    names = [metric.name for metric in built]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise JobError(
            "metric.twice",
            "two metrics of the job have the name {name}. Leave one of them out, or name your own class for one of "
            "them.",
            name=twice,
        )
    return [*([LossMetric(loss)] if loss else []), *built]
