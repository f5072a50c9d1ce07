"""Cross-entropy that the output head computes in chunks, without whole logits.

Start with `find_head`. Within `ChunkedHead.training`, the head returns the loss instead of its logits. The weight is
read inside the head's own forward pass, so FSDP gathers it and tensor parallelism divides it as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo as _not_compiled  # imports the compiler only when called
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.comm import Group
from paceline.engine.guard import LossScale
from paceline.errors import DataError, JobError
from paceline.job.batch import Batch
from paceline.job.loss import WHOLE_LOGITS_BYTES, Loss, Metric, chunk_rows
from paceline.job.loss_items import IGNORED, check_labels, classes_on_dim_1, logits_of
from paceline.planning.model.record import Call, record_graph
from paceline.planning.model.recorder import is_linear, is_transposed, weighted
from paceline.split.cross_entropy import ClassLoss, chunked_cross_entropy, divides_classes
from paceline.split.tensor_layers import copy
from paceline.units import size

# the logits of fewer classes stay below WHOLE_LOGITS_BYTES with usual numbers of tokens, so no head is searched for
_CLASSES = 4096


class Head:
    """The output head of an undivided model, found by a trace.

    Attributes:
        path: path of the layer whose output is exactly the model's logits; None without such a layer.
        reason: why there is no such layer; "" if there is one.
        note: what a run reports about the loss.
    """

    def __init__(self, path: str | None, reason: str = "", note: str = "") -> None:
        self.path, self.reason, self.note = path, reason, note


def may_chunk(model: nn.Module, loss: Loss) -> bool:
    """Return True if the loss allows chunks and the model may need them."""
    chunk = getattr(loss, "chunk", "off") if divides_classes(loss) else "off"
    return chunk != "off" and (chunk != "auto" or _most_classes(model) >= _CLASSES)


def find_head(
    model: nn.Module, loss: Loss, example: Batch, call: Call, *, labels: int, number_bytes: int, tp: int = 1
) -> Head | None:
    """Find the layer that can compute the loss; None if whole logits are wanted.

    Args:
        labels: number of labels of one microbatch on one rank.
        number_bytes: bytes of one logit.
        tp: number of ranks that divide the classes.

    Raises:
        JobError: the loss requires chunks, but the model's head cannot compute them; the message has the reason.
    """
    chunk, whole = getattr(loss, "chunk", "off"), labels * _most_classes(model) * number_bytes / tp
    if chunk == "auto" and whole <= WHOLE_LOGITS_BYTES:
        return None
    head = _traced(model, example, call)
    if head.path is None:
        refuse_unless_auto(loss, head.reason)
        head.note = f"the loss is computed from whole logits ({size(whole)} in each microbatch): {head.reason}"
        return head
    rows = f"{chunk} rows" if chunk != "auto" else "a fraction of the rows"
    head.note = f"the loss is computed by {head.path} in chunks of {rows}, instead of whole logits of {size(whole)}"
    return head


def refuse_unless_auto(loss: Loss, reason: str) -> None:
    """Raise an error if the job sets the number of rows in a chunk."""
    chunk = getattr(loss, "chunk", "off")
    if isinstance(chunk, int):
        raise JobError(
            "loss.chunk_impossible",
            "loss cross_entropy: chunk: {chunk} is not possible, because {reason}. Use chunk: auto, which computes "
            "whole logits for such a model.",
            chunk=chunk,
            reason=reason,
        )


def _most_classes(model: nn.Module) -> int:
    return max((_classes(module) for module in model.modules() if is_linear(module)), default=0)


def _classes(module: nn.Module) -> int:
    weight = getattr(weighted(module), "weight", None)
    return int(weight.shape[1 if is_transposed(module) else 0]) if isinstance(weight, Tensor) else 0


def _traced(model: nn.Module, example: Batch, call: Call) -> Head:
    try:
        graph = record_graph(model, example, call)
    except Exception as error:  # noqa: BLE001 - any error of the user's model
        return Head(None, f"the model cannot be traced ({type(error).__name__})")
    if graph.logits is None:
        return Head(None, "the model returns no logits")
    logits = graph.values[graph.logits]
    node = graph.nodes[logits.producer] if logits.producer >= 0 else None
    if node is None or node.op != "linear":
        return Head(None, "the logits are not the output of a linear layer")
    if logits.uses or graph.outputs.count(graph.logits) > 1:
        return Head(None, f"the model reads the logits of {node.path} itself")
    if sum(other.path == node.path for other in graph.nodes if other.op == "linear") > 1:
        return Head(None, f"the model calls {node.path} several times")
    if len(logits.shape) not in (2, 3):
        return Head(None, f"the logits have the shape {list(logits.shape)}")
    weight = weighted(model.get_submodule(node.path)).weight
    if not isinstance(weight, Tensor) or is_traceable_wrapper_subclass(weight):
        return Head(None, f"the weight of {node.path} is a {type(weight).__name__}")
    if any(_hooks(module) for module in path_of(model, node.path)):
        return Head(None, f"a hook reads the output of {node.path} or its gradient")
    return Head(node.path)


def path_of(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules from the model to its submodule `path`."""
    names = path.split(".") if path else []
    return [model.get_submodule(".".join(names[:i])) for i in range(len(names) + 1)]


def _hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._backward_hooks) + len(module._backward_pre_hooks)


class ChunkedHead:
    """The output head of this rank's model, which computes the loss or metrics in chunks.

    Attributes:
        target: labels of the microbatch that comes next.
        skips: True if the batch has ignored labels, whose rows are left out.
        totals: what the last forward pass within `measuring` computed: `(total, count)` of each metric.
    """

    def __init__(
        self, model: nn.Module, path: str, loss: ClassLoss, tp: Group | None, loss_scale: LossScale | None
    ) -> None:
        self.loss, self._tp, self._loss_scale = loss, tp, loss_scale
        self._modules = path_of(model, path)
        self.module = self._modules[-1]
        self.classes = _classes(self.module) * (tp.size if tp is not None else 1)
        self.target: Tensor | None = None
        self.skips = False
        self.totals: list[tuple[float, float]] = []
        self._metrics: Sequence[Metric] = ()
        self._made: Tensor | None = None
        self._forward: Callable[..., Tensor] = self.module.forward
        self._hooks = self._hook_counts()

    @contextmanager
    def training(self, target: Tensor | None = None) -> Iterator[None]:
        """Return a context in which the head returns the mean loss of `target`."""
        self.target = target
        # a hook that the user registered later gets whole logits
        if self._hook_counts() != self._hooks:
            yield
            return
        with self._replaced(self._loss_of):
            yield

    @contextmanager
    def measuring(self, target: Tensor, metrics: Sequence[Metric]) -> Iterator[None]:
        """Return a context in which the head adds up metrics of `target` in `totals`."""
        self.target, self._metrics = target, metrics
        with self._replaced(self._measured):
            yield

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Return a context in which the head returns its input."""
        with self._replaced(_passed):
            yield

    def taken(self, output: Any) -> Tensor | None:
        """Return what the head has computed instead of logits; None if the output has logits.

        Raises:
            JobError: the model has changed the head's result.
        """
        made, self._made = self._made, None
        if made is None:
            return None
        found = logits_of(output)
        # the storage and not its address, because a dry run has tensors without memory
        same = found.untyped_storage()._cdata == made.untyped_storage()._cdata
        if not same or found._version != made._version:
            raise JobError(
                "loss.logits_changed",
                "the model changes the logits of its output head, but did not change them when it was traced. Set "
                "loss: {{name: cross_entropy, args: {{chunk: off}}}} to compute the loss from whole logits.",
            )
        return found.reshape(())

    def check(self, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check labels in host memory (`check_labels`), and look for ignored ones."""
        self.skips = False
        if target.device.type == "cpu" and not target.is_floating_point():
            check_labels(target, self.classes, where, samples)
            self.skips = active_fake_mode() is None and bool((target == IGNORED).any())

    @contextmanager
    def _replaced(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        attributes, before = self.module.__dict__, self.module.__dict__.get("forward")
        self._forward, self._made = self.module.forward, None
        attributes["forward"] = forward
        try:
            yield
        finally:
            del attributes["forward"]
            if before is not None:
                attributes["forward"] = before
            self.target = None

    def _hook_counts(self) -> list[int]:
        return [_hooks(module) for module in self._modules]

    @_not_compiled
    def _loss_of(self, input: Tensor) -> Tensor:
        loss, layer, labels = self.loss, weighted(self.module), self._labels(input)
        if loss.weight is not None:
            loss.weight = loss.weight.to(input.device)
        if self._tp is not None:
            input = copy(input, self._tp, fresh=True)
        chunk: Any = getattr(loss, "chunk", "auto")
        # as many dimensions as logits, because models read the shape
        self._made = chunked_cross_entropy(
            input,
            layer.weight,
            layer.bias,
            labels,
            chunk=None if chunk == "auto" else chunk,
            tp=self._tp,
            label_smoothing=loss.label_smoothing,
            class_weight=loss.weight,
            loss_scale=self._loss_scale.value if self._loss_scale is not None else 1.0,
            transposed=is_transposed(self.module),
            skips=self.skips,
        )
        return self._made

    @_not_compiled
    def _measured(self, input: Tensor) -> Tensor:
        labels, inputs = self._labels(input).flatten(), input.flatten(0, -2)
        count = chunk_rows(len(labels), max(input.dtype.itemsize, 4))
        sums = [[0.0, 0.0] for _ in self._metrics]
        for start in range(0, len(labels), count):
            logits = self._forward(inputs[start : start + count])
            for held, metric in zip(sums, self._metrics, strict=True):
                for i, value in enumerate(metric(logits, labels[start : start + count])):
                    held[i] += float(value)
        self.totals = [(total, items) for total, items in sums]
        self._made = input.new_zeros([1] * input.dim())
        return self._made

    def _labels(self, input: Tensor) -> Tensor:
        """Return the labels of the head's input.

        Raises:
            DataError: the labels are not integers, or do not fit the input's shape.
        """
        assert self.target is not None
        # takes no memory, because all elements are the same number
        logits = input.new_empty(()).expand(*input.shape[:-1], self.classes)
        _, labels = classes_on_dim_1(logits, self.target)
        if len(labels) != input.shape[:-1].numel():
            raise DataError(
                "loss.one_label_each",
                "the model returned {found}, but the loss needs one label per sample or token",
                found=f"logits {list(logits.shape)} for labels {list(self.target.shape)}",
            )
        return labels.view(input.shape[:-1])


def _passed(input: Tensor) -> Tensor:
    return input


class ChunkedLoss:
    """The loss of a training step whose head computes it."""

    def __init__(self, head: ChunkedHead, loss: Loss) -> None:
        self.head, self.loss = head, loss

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss that the head has computed, or compute it from whole logits."""
        made = self.head.taken(output)
        return self.loss(output, target) if made is None else made

    def items(self, target: Tensor) -> Tensor:
        """Return the number of items in the mean."""
        return self.head.loss.items(target)

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check the labels (`check_labels`)."""
        self.head.check(target, where, samples)
