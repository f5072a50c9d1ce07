"""Construction of a job's trace: its model's work on one sample, block by block.

The model runs forward once on tensors that have shapes and no values. A model whose code needs values runs forward on a
few invented samples, if it is small; of one that is large as well, only the parameters are known, and the remainder is
estimated from them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from paceline.errors import JobError
from paceline.job.job import Job
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.model_info import model_info, without_memory

if TYPE_CHECKING:
    from torch import nn

    from paceline.planning.model.forward_pass import Pass
    from paceline.planning.model.graph import Seen
    from paceline.planning.model.tensor.degrees import DividedWeights, TensorDegrees

# samples of a trace without values; work that does not grow with the samples counts a fourth for each
SAMPLES = 4
# samples of a trace with values; batch norms need more than one
REAL_SAMPLES = 2
# parameters of a model that may be built and run to be traced; of its products with tokens, 200 times as many
MOST_REAL = 100_000_000
# by what the model depends on, as JSON
_MODELS: dict[str, TracedModel] = {}


def trace(job: Job, precision: str | None = None, tp: int | None = None) -> ModelTrace:
    """The trace of a job's model with the job's loss, cached per process.

    The cache key is the model, the shape of the data, the kind of precision, and the weights that `tp` divides.

    Args:
        precision: `bf16` traces the casts of autocast as well, and counts in two-byte elements: four-byte results count
            twice. The others count alike, in elements of their own size. None: as `fp32`.
        tp: the degree of tensor parallelism that the blocks' division is for; None: the smallest that works.

    Raises:
        JobError: the model cannot be built, or its code fails on the job's samples; names the module.
        DataError: a sample has to be read, and cannot be.
    """
    if job.model.transformer is not None:
        from paceline.planning.model.transformer import transformer

        return transformer(job.model.transformer, tp or 1)
    return _traced(job).trace(precision == "bf16", tp)


def undivided_attention(job: Job, tp: int) -> str | None:
    """Reason why attention of a job's model cannot be divided over `tp` ranks.

    It is found by tracing the model. One named by its dimensions has none, as it has no code. Raises as `trace` does.
    """
    return None if job.model.transformer is not None else _traced(job).undivided_attention(tp)


def _traced(job: Job) -> TracedModel:
    return _MODELS.setdefault(job.model_dump_json(include={"model", "data", "loss"}), TracedModel(job))


class TracedModel:
    """Traces of one job's model, by precision and degree of tensor parallelism.

    Each pass is made once, and equal traces are one.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._passes: dict[bool, Seen | ModelTrace] = {}
        self._traces: dict[tuple[bool, DividedWeights], ModelTrace] = {}

    def trace(self, autocast: bool, tp: int | None) -> ModelTrace:
        """The trace as tensor parallelism over `tp` ranks divides it. Raises as the function `trace` does."""
        if autocast not in self._passes:
            self._passes[autocast] = _observed(self._job, autocast)
        seen = self._passes[autocast]
        # estimated from the parameters alone
        if isinstance(seen, ModelTrace):
            return seen
        key = autocast, self._degrees.at(self._degrees.least if tp is None else tp)
        if key not in self._traces:
            from paceline.planning.model.block_graphs import assembled

            self._traces[key] = assembled(seen, model_info(self._job.model), self._job.loss.name, key[1])
        return self._traces[key]

    def undivided_attention(self, tp: int) -> str | None:
        """Reason why attention cannot be divided over `tp` ranks. Raises as the function `trace` does."""
        return next((reason.removeprefix(f"tp={tp} ") for reason in self._degrees.refusals(tp)), None)

    @cached_property
    def _degrees(self) -> TensorDegrees:
        """Tensor-parallel degrees' weights, by the split's own search on a model without memory."""
        from paceline.job.loss_items import call
        from paceline.own_random import kept_random
        from paceline.planning.model.forward_pass import batch_of
        from paceline.planning.model.tensor.degrees import TensorDegrees

        loss = self._job.loss.build()
        with kept_random():
            model = without_memory(self._job.model)
            return TensorDegrees(
                model, batch_of(self._job, SAMPLES), lambda model, batch: call(model, batch, loss=loss)
            )


def _observed(job: Job, autocast: bool) -> Seen | ModelTrace:
    """Observations of the model's forward pass, or an estimate.

    The estimate is from its parameters, where it cannot be run.
    """
    from paceline.own_random import kept_random
    from paceline.planning.model.block_graphs import estimated
    from paceline.planning.model.forward_pass import tokens_of

    found = model_info(job.model)
    with kept_random():
        forward = _forward(job, autocast)
        tokens = tokens_of(forward.batch)
        if forward.error is not None and found.numel <= MOST_REAL / max(1.0, tokens / 200):
            forward = _forward_with_values(job, autocast)
            if forward.error is not None:
                raise JobError(_described(forward.error, forward)) from forward.error
    if forward.error is None:
        return forward.seen
    if not _needs_values(forward.error, forward):
        raise JobError(_described(forward.error, forward)) from forward.error
    why = (
        f"{forward.module_of(forward.error)} cannot be followed without the values of tensors "
        f"({type(forward.error).__name__})"
    )
    return estimated(found, tokens, why)


def _forward(job: Job, autocast: bool) -> Pass:
    """Forward pass on the meta device. Under autocast, which meta lacks, on fake tensors of the CPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from paceline.planning.model.forward_pass import Pass, batch_of, go_forward
    from paceline.planning.model.recording.model_state import without_logs

    batch = batch_of(job, SAMPLES)
    model = without_memory(job.model)
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return Pass(model, batch, SAMPLES, autocast, error=NotImplementedError("its code reads values while it builds"))
    if not autocast:
        with torch.device("meta"):
            return go_forward(Pass(model, batch, SAMPLES, autocast), job)
    with without_logs(), FakeTensorMode(allow_non_fake_inputs=True) as without_values:
        model = _of_the_cpu(model)
        batch = batch_of(job, SAMPLES, device="cpu")
        del without_values
        return go_forward(Pass(model, batch, SAMPLES, autocast), job)


def _of_the_cpu(model: nn.Module) -> nn.Module:
    """Move a meta model to fake tensors of the CPU; tied tensors stay tied."""
    import torch

    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    made[id(tensor)] = (
                        torch.nn.Parameter(empty, tensor.requires_grad) if own is module._parameters else empty
                    )
                if tensor is not None:
                    own[name] = made[id(tensor)]  # type: ignore[assignment]
    return model


def _forward_with_values(job: Job, autocast: bool) -> Pass:
    from paceline.planning.model.forward_pass import Pass, batch_of, go_forward, with_values

    return go_forward(Pass(job.model.build(), with_values(batch_of(job, REAL_SAMPLES)), REAL_SAMPLES, autocast), job)


def _needs_values(error: Exception, forward: Pass) -> bool:
    """True if the lack of values, and not the model's code, is likely at fault."""
    return isinstance(error, NotImplementedError) or bool(forward.seen.asked) or "meta" in str(error).lower()


def _described(error: Exception, forward: Pass) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{forward.module_of(error)} fails on the job's samples: {type(error).__name__}: {first}"
