"""Check that the documents of packed sequences do not influence each other.

If a model ignores `position_ids`, or does not confine attention to documents, each document attends to the documents
before it. Such a run raises no error, and its loss still falls. Before the first update, the model therefore computes
sequences of three artificial documents. The outputs of the middle document must not depend on its neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import active_fake_mode
from torch.overrides import TorchFunctionMode

from paceline.device import widened, widest_float
from paceline.engine.model_loss import evaluating
from paceline.errors import DataError, JobError
from paceline.job.batch import rows
from paceline.job.job import base_precision
from paceline.job.loss_items import IGNORED
from paceline.planning.model.recorder import tensors_within

if TYPE_CHECKING:
    from paceline.engine.compute import Compute

# largest change of an output that counts as rounding, relative to the spread of the outputs
_ROUNDING = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
_SHORTEST = 6  # tokens of the shortest sequence that can hold three documents
_CHANGES = {
    "neighbours": "other tokens in its neighbours change",
    "place": "another place in the sequence changes",
}


class PackedCheck:
    """Check of a model whose data set has the attribute `packed` set to True.

    Attributes:
        remarks: messages to the user that are not recorded yet.
        pending: True if the data set is packed and no check has succeeded yet.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.remarks: list[str] = []
        self.pending = compute.loader.is_packed
        self._prepared = False

    def prepare(self) -> None:
        """Check the model before the first update; every rank must call this first.

        Raises:
            DataError: a sample is not a packed sequence.
            JobError: the outputs of a document change with its neighbours.
        """
        if self.pending and not self._prepared and active_fake_mode() is None:
            self._prepared = True
            self._check()

    def examines(self, step: int) -> bool:
        """Return True if a step checks the model again.

        Attention may have no effect yet, for example if its output projection is initialized with zeros. Such a model
        is checked again before steps 2, 4, 8, …
        """
        return self.pending and not step & (step - 1)

    def look(self, step: int) -> None:
        """Check the model before a step if it is due; every rank must call this."""
        self.prepare()
        if step > 1 and self.examines(step) and active_fake_mode() is None:
            self._check()

    def _check(self) -> None:
        compute, precision = self.compute, base_precision(self.compute.precision)
        trial = _trial(compute.loader.example(1))
        forward = getattr(compute.model, "forward", None)
        if compute.split is None and forward is not None and not _takes_positions(forward):
            raise _refusal("its forward takes no position_ids")
        with _AttentionWatch() as watch:
            changes = self._changes(trial, ("neighbours",), compute.autocast)
        self._refuse(changes, _ROUNDING[precision])
        exact, confined_by = not changes["neighbours"], watch.found
        low = precision in ("bf16", "fp16")
        # Without autocast if possible, because rounding in half precision could hide a small influence.
        autocast = nullcontext if low and not compute.casts else compute.autocast
        limit = _ROUNDING["fp32" if autocast is nullcontext else precision]
        with _without_tf32():
            changes = self._changes(trial, ("neighbours", "place", "own"), autocast)
        own = changes.pop("own")
        self._refuse({"place": changes["place"]}, limit)
        # FSDP2 always computes in half precision, so a small influence may not exceed the usual limit for rounding.
        self._refuse(changes, min(limit, max(2 * own, 4e-3)) if low and compute.casts else limit)
        if own > limit:
            self.pending = False
            equal = "bit-equal" if exact else f"equal up to {max(changes.values()):.0e}"
            self.remarks.append(
                f"packed documents: attention is confined by {confined_by}; the outputs of a document with other "
                f"neighbours are {equal}"
            )

    def _changes(
        self, trial: _Trial, kinds: Sequence[str], autocast: Callable[[], AbstractContextManager[Any]]
    ) -> dict[str, float]:
        """Return the largest change of the middle document's outputs for each kind of change.

        The changes are relative to the spread of the outputs. All ranks return the same numbers.
        """
        compute = self.compute
        found = torch.zeros(len(kinds) + 1, dtype=widest_float(compute.device), device=compute.device)
        # compiled code would have to be compiled again for this check
        eager = nullcontext() if compute.plan.compile == "off" else torch.compiler.set_stance("force_eager")
        with evaluating(compute), eager, autocast():
            before = self._outputs(trial, "first")
            for i, kind in enumerate(kinds):
                for old, new in zip(before, self._outputs(trial, kind), strict=True):
                    found[i] = torch.maximum(found[i], (new - old).abs().max())
            for old in before:
                found[-1] = torch.maximum(found[-1], (old - old.mean() if old.numel() > 1 else old).abs().max())
        compute.group.all_reduce(found, "max")
        *largest, spread = found.tolist()
        shares = [value / (spread or 1.0) for value in largest]
        # NaN counts as no change, because the step itself reports it
        return {kind: share if share > 0 else 0.0 for kind, share in zip(kinds, shares, strict=True)}

    def _outputs(self, trial: _Trial, kind: str) -> list[Tensor]:
        """Return the outputs of the middle document after its first token.

        If no output has the shape (n, tokens, …), the result is the loss of this document, shape (1,). The result is
        [] if another rank has the outputs.
        """
        compute = self.compute
        batch, start = trial.batches[kind]
        repeated = 1 if compute.split is None else rows(compute.split.example)
        # the inputs of a head depend on the same documents as its logits, which may not fit in memory
        with nullcontext() if compute.chunks is None else compute.chunks.passing():
            found = compute.output({key: values.repeat_interleave(repeated, 0) for key, values in batch.items()})
        if found is None:
            return []
        output, placed = found
        kept = [
            widened(t[:1, start + 1 : start + trial.length])
            for t in tensors_within(output)
            if t.is_floating_point() and t.dim() > 1 and t.shape[1] == trial.tokens
        ]
        return kept or [widened(compute.loss(output, compute.normalization.target(placed)).reshape(1))]

    def _refuse(self, changes: Mapping[str, float], limit: float) -> None:
        for kind, change in changes.items():
            if change > limit:
                raise _refusal(f"{_CHANGES[kind]} its outputs by {change:.1g} of their spread")


def _refusal(reason: str) -> JobError:
    return JobError(
        "model.documents_mix",
        "the sequences are packed, but the model does not compute each document as if it were alone: {reason}. "
        "Accept position_ids (n, t) in forward, use them as positions, and confine attention to each document: "
        "`d = (position_ids == 0).cumsum(1)` numbers the documents, and "
        "`attn_mask = (d[:, :, None] == d[:, None]).tril()[:, None]` is a mask for causal attention. Or set "
        "pack: false in the job's data.",
        reason=reason,
    )


def _takes_positions(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters
    return "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@dataclass
class _Trial:
    """Batches of one sequence with three documents.

    Attributes:
        batches: for each kind of change: the batch, and the position at which the middle document begins. "first" is
            the unchanged batch.
        length: number of tokens of the middle document.
        tokens: number of tokens of the sequence.
    """

    batches: dict[str, tuple[dict[str, Tensor], int]]
    length: int
    tokens: int


def _trial(sample: Any) -> _Trial:
    """Create the batches from the tokens of a sample.

    Raises:
        DataError: the sample is not a packed sequence.
    """
    keys = list(sample) if isinstance(sample, Mapping) else []
    if set(keys) != {"input_ids", "position_ids", "labels"} or sample["input_ids"].shape[1] < _SHORTEST:
        raise DataError(
            "data.packed_form",
            "the data set has packed = True, so its samples must be dicts of input_ids, position_ids and labels with "
            "{shortest} tokens or more, but a sample has {found}. Return such samples, or remove the attribute packed.",
            shortest=_SHORTEST,
            found=keys or type(sample).__name__,
        )
    ids: Tensor = sample["input_ids"]
    tokens = ids.shape[1]
    length = start = tokens // 3
    lowest, highest = int(ids.min()), int(ids.max())
    # Replacement tokens stay between the lowest and highest id, which the model's vocabulary contains.
    mirrored = lowest + highest - ids
    others = torch.where(mirrored == ids, lowest if lowest < highest else max(0, lowest - 1) + (not lowest), mirrored)
    kept, shift = ids[:, start : start + length], length // 2

    def batch(neighbours: Tensor, own: Tensor, begin: int) -> tuple[dict[str, Tensor], int]:
        made, stop = neighbours.clone(), begin + length
        made[:, begin:stop] = own
        positions = torch.cat([torch.arange(n) for n in (begin, length, tokens - stop)])
        labels = torch.full_like(ids, IGNORED)
        labels[:, begin : stop - 1] = kept[:, 1:]
        return {"input_ids": made, "position_ids": positions.expand_as(ids).contiguous(), "labels": labels}, begin

    changed = torch.cat([others[:, start : start + 1], kept[:, 1:]], 1)
    batches = {
        "first": batch(ids, kept, start),
        "neighbours": batch(others, kept, start),
        "place": batch(ids, kept, start + shift),
        "own": batch(ids, changed, start),
    }
    return _Trial(batches, length, tokens)


class _AttentionWatch(TorchFunctionMode):
    """Observer of the functions that compute attention.

    Attributes:
        found: phrase that names how attention is confined to documents.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = "the model's own code"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (kwargs.get("attn_mask") is not None or len(args) > 3):
            self.found = "a mask in scaled_dot_product_attention"
        elif "varlen" in str(func):
            self.found = "torch's attention for variable lengths"
        return func(*args, **kwargs)


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
