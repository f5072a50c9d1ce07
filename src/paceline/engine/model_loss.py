"""Items that a model's own loss averages over, found with a few samples.

Models call torch's cross-entropy with labels of their batch, and ignore labels with the value -100. The weight of a
microbatch is the number of labels that its loss counts. To count them, the labels are traced back to the batch:
unchanged, shifted by a token, or masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.device import widened, widest_float
from paceline.errors import PlanError
from paceline.job.batch import Batch, rows, split
from paceline.job.job import base_precision
from paceline.job.loss_items import IGNORED, ModelsOwn, Term
from paceline.planning.model.recorder import restored

if TYPE_CHECKING:
    from paceline.engine.compute import Compute


SAMPLES = 4
_TOLERANCE = {"fp64": 1e-6, "fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3}
_REFUSED = 1e-2  # relative difference above which the loss is more than cross-entropy with a small extra term


def examine(compute: Compute) -> list[str]:
    """Find the terms of a model's own loss, and return remarks for the user.

    Every rank must call this function.

    Raises:
        PlanError: the model's loss compares the samples of a batch with each other, and the plan computes the batch in
            microbatches.
    """
    loss = compute.loss
    if compute.plan.cp > 1:  # the split has verified that the loss is the mean over shifted labels
        if isinstance(loss, ModelsOwn):
            loss.terms = (Term("labels", shifted=True, ignored=IGNORED),)
        return []
    example = compute.loader.example(SAMPLES)
    parts = compute.plan.data_ranks * compute.plan.microbatches
    with evaluating(compute), _Watch() as watch:
        whole = _told(compute, _loss_of(compute, example))
        terms = [term for call in watch.calls if (term := _traced(call, example)) is not None]
        terms = _told_terms(compute, list(dict.fromkeys(terms)))
        if isinstance(loss, ModelsOwn):
            loss.terms = tuple(terms)
        if parts == 1 or whole - whole != 0:
            return []
        values = [
            (_told(compute, _loss_of(compute, half)), float(compute.normalization.items(half)))
            for half in split(example, 2)
        ]
    said: list[str] = []
    if len({(term.key, term.shifted) for term in terms if term.ignored is not None}) > 1:
        keys = ", ".join(dict.fromkeys(term.key for term in terms))
        said.append(
            f"the model's loss has means over different labels ({keys}); under plan {compute.plan} its parts "
            "are weighed by the first"
        )
    mean = sum(value * n for value, n in values if n) / (sum(n for _, n in values) or 1.0)
    difference = abs(mean - whole) / (abs(whole) or 1.0)
    if difference != difference or difference <= _TOLERANCE[base_precision(compute.precision)]:
        return said
    found = (
        f"the model's loss of {rows(example)} samples is {whole:.6g}, but the mean over two halves is {mean:.6g} "
        f"(relative difference {difference:.1e}): the loss has terms that compare samples with each other"
    )
    if difference > _REFUSED:
        raise PlanError(
            "plan.loss_of_parts",
            "{found}, but plan {plan} computes a batch in {parts} parts, so the loss would be different. Use one "
            "replica and one microbatch, or compute the loss from the model's outputs in your own function with "
            "`whole_batch = True` (docs/reference/job.md)",
            found=found,
            plan=compute.plan,
            parts=parts,
        )
    said.append(
        f"{found}, as mixtures of experts have to balance their load; under plan {compute.plan}, these terms "
        "are computed for each part separately"
    )
    return said


@contextmanager
def evaluating(compute: Compute) -> Iterator[None]:
    """Return a context with the model in eval mode, without gradients, and restored afterwards."""
    exact: AbstractContextManager[None] = nullcontext()
    if compute.precision == "fp8":
        from paceline.split.float8 import without_float8  # imports torchao

        # a check compares the outputs of a sample within different batches
        exact = without_float8()
    with restored(compute.model), torch.no_grad(), exact:
        compute.model.eval()
        yield


def _loss_of(compute: Compute, batch: Batch) -> float | None:
    with compute.autocast():
        found = compute.output(batch)
        if found is None:
            return None
        output, placed = found
        return float(compute.loss(output, compute.normalization.target(placed)))


def _told(compute: Compute, value: float | None) -> float:
    told = torch.tensor(
        [value or 0.0, float(value is not None)], dtype=widest_float(compute.device), device=compute.device
    )
    compute.group.all_reduce(told)
    total, count = told.tolist()
    return float(total / max(count, 1.0))


def _told_terms(compute: Compute, terms: list[Term]) -> list[Term]:
    told = compute.group.gather_json([[t.key, t.shifted, t.ignored, t.masked] for t in terms])
    return [Term(*found) for found in max(told, key=len)]


class _Watch(TorchFunctionMode):
    """Recorder of the labels that are passed to torch's cross-entropy and NLL loss."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss) and kwargs.get("reduction", "mean") == "mean":
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor) and not target.is_floating_point():
                self.calls.append((target.detach().flatten().cpu(), int(kwargs.get("ignore_index", IGNORED))))
        return func(*args, **kwargs)


def _traced(call: tuple[Tensor, int], batch: Batch) -> Term | None:
    """Find the key of the batch that contains a loss call's labels, or return None."""
    if not isinstance(batch, Mapping):
        return None
    labels, ignored = call
    keys = sorted(
        (k for k, v in batch.items() if isinstance(v, Tensor) and not v.is_floating_point()),
        key=lambda k: k != "labels",
    )
    tokens = batch["input_ids"].shape[1] if "input_ids" in batch and batch["input_ids"].dim() > 1 else None
    for key in keys:
        held: Tensor = batch[key].cpu()
        if tokens is not None and ignored == tokens and held.dim() == 1 and _same(labels, held.clamp(0, tokens)):
            return Term(key, shifted=False, ignored=None)
        if _same(labels, held):
            return Term(key, shifted=False, ignored=ignored)
        if held.dim() > 1 and (
            _same(labels, held[..., 1:]) or _same(labels, F.pad(held, (0, 1), value=ignored)[..., 1:])
        ):
            return Term(key, shifted=True, ignored=ignored)
        mask = batch.get("attention_mask")
        if mask is not None and mask.shape == held.shape and _same(labels, torch.where(mask.cpu() == 1, held, ignored)):
            return Term(key, shifted=False, ignored=ignored, masked=True)
    return None


def _same(labels: Tensor, held: Tensor) -> bool:
    return labels.numel() == held.numel() and torch.equal(labels.long(), held.flatten().long())


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_TO_NARROW = (Tensor.float, Tensor.half, Tensor.bfloat16)


@contextmanager
def nothing_dropped() -> Iterator[None]:
    """Make torch's dropout functions return their input within this context.

    Each rank draws its own dropout masks, so the masks differ between plans.
    """
    before = {name: getattr(F, name) for name in _DROPOUTS}
    for name in _DROPOUTS:
        setattr(F, name, _returned)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def without_dropout(model: nn.Module) -> None:
    """Disable all dropout: of values, paths (stochastic depth) and layers."""
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = "drop" in kind or "stochasticdepth" in kind
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (drops and name in ("p", "prob", "rate"))):
                setattr(module, name, 0.0)


def random_module(compute: Compute, batch: Batch) -> str | None:
    """Return the first module whose output depends on random numbers, or None.

    The module is found by two forward passes over a batch with different random states.

    If only the loss differs between the passes, the result is `the loss`.
    """
    model, found = compute.model, list[dict[str, float]]()
    with suppress(Exception), torch.no_grad():
        for seed in (1, 2):
            with restored(model):
                torch.manual_seed(seed)
                found.append(_sums(compute, batch))
    if len(found) < 2:
        return None  # the model fails on this input; the training steps will report why
    return next((name for name, value in found[0].items() if value == value and found[1].get(name) != value), None)


def _sums(compute: Compute, batch: Batch) -> dict[str, float]:
    sums: dict[str, float] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                sums[name] = sums.get(name, 0.0) + float(widened(first).sum())

        return hook

    hooks = [module.register_forward_hook(note(name or "the model")) for name, module in compute.model.named_modules()]
    try:
        placed = compute.place(batch)
        output = compute.call(placed)
        if not getattr(compute.loss, "whole_batch", False):
            sums["the loss"] = float(compute.step_loss(output, compute.normalization.target(placed)))
    finally:
        for hook in hooks:
            hook.remove()
    return sums


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Return a context in which modules that request float32 or less get float64.

    Examples of such requests are `x.float()`, a new tensor, or a softmax in float32.
    """
    call, depth = nn.Module.__call__, 0

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:  # no hooks either: they are not called if a pipeline stage leaves the model's forward pass early
            with _Wide() if depth == 1 else nullcontext():
                return call(module, *args, **kwargs)
        finally:
            depth -= 1

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def in_float64(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loss that creates float32 tensors, so that it computes in float64."""

    def wide(*args: Any) -> Any:
        with _Wide():
            return loss(*args)

    return wide


class _Wide(TorchFunctionMode):
    """Mode in which floating-point tensors are float64.

    The mode changes tensors that are requested in fewer bits, and operations that mix dtypes.
    """

    def __enter__(self) -> Any:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TO_NARROW:
            return Tensor.double(args[0])
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _NARROW else a for a in args)
        kwargs = {
            name: torch.float64 if isinstance(v, torch.dtype) and v in _NARROW else v for name, v in kwargs.items()
        }
        name = getattr(func, "__name__", "")
        if name == "__get__" or not _is_mixed((*args, *kwargs.values())):
            return func(*args, **kwargs)
        in_place = (name.endswith("_") and not name.endswith("__")) or name in (
            "__setitem__",
            "__iadd__",
            "__isub__",
            "__imul__",
        )
        first = args[:1] if in_place else ()
        args = (*first, *(_double(a) for a in args[len(first) :]))
        return func(*args, **{key: value if key == "out" else _double(value) for key, value in kwargs.items()})


def _is_mixed(values: tuple[Any, ...]) -> bool:
    tensors = [
        t
        for v in values
        for t in (v if isinstance(v, (tuple, list)) else (v,))
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    return len({t.dtype == torch.float64 for t in tensors}) == 2


def _double(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_double(v) for v in value) if not hasattr(value, "_fields") else value
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _returned(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input
