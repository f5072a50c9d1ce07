"""Log-probabilities of preference pairs under the weights with which training began."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from paceline.job.batch import Batch

if TYPE_CHECKING:
    from paceline.engine.compute import Compute


class Reference:
    """Reference of a loss such as `dpo`: the trained model with its initial weights.

    During a forward pass, the initial weights replace the trained weights. The pass runs in eval mode, through the same
    parts of the model as an evaluation. Only trained weights are copied; a frozen base is shared.

    Args:
        weights: context in which the model has its initial weights.
    """

    def __init__(self, compute: Compute, weights: Callable[[], AbstractContextManager[None]]) -> None:
        self.compute, self.weights = compute, weights

    def of(self, parts: Sequence[Batch]) -> list[AbstractContextManager[None]]:
        """Compute the reference of microbatches.

        Within the context of a microbatch, the loss uses the reference of this microbatch. Every rank that takes part
        in the forward pass of these microbatches must call this method.
        """
        compute, loss = self.compute, cast(Any, self.compute.loss)
        found = []
        with in_eval_mode(compute.model), torch.no_grad(), self.weights(), _no_stale_casts(), compute.autocast():
            for part in parts:
                output = compute.forward_alone(part)
                target = compute.normalization.target(part)
                found.append(None if output is None else loss.log_probabilities(output, target))
        # ranks without an output do not compute the loss
        return [nullcontext() if one is None else loss.against(one) for one in found]

    def of_batch(self, batch: Batch | None) -> AbstractContextManager[None]:
        """Compute the reference of a validation batch; see `of` and `Compute.output`."""
        split = self.compute.split
        if batch is None and (split is None or not split.all_must_compute):
            return nullcontext()
        return self.of([self.compute.placed(batch)])[0]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context in which the model is in eval mode."""
    # a user may keep some layers in eval mode
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _no_stale_casts() -> Iterator[None]:
    """Return a context that shares no weights in low precision with the code around it.

    An evaluation runs in one autocast context, whose cache would otherwise return casts of the replaced weights.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
