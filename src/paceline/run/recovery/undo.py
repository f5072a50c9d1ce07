"""Undoing a step that was broken off: what a forward pass changes besides gradients."""

from __future__ import annotations

import operator
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.planning.model.recorder import has_max_norm

_NONE = -2  # no step: none comes after it


class StepUndo:
    """Remembers what forward passes change of a model before each step. On CPUs.

    That is buffers and random states, and parameters that are not trained, such as those of a momentum encoder: which
    of these a step writes is known after the first one, and from then on they are copied, too.
    """

    def __init__(self, model: nn.Module) -> None:
        # forward may write them in place, or put others there
        self._places = [(m._buffers, name) for m in model.modules() for name in m._buffers]
        # rows of embeddings with `max_norm` are shortened alike when the step is repeated
        tables = {module.weight for module in model.modules() if has_max_norm(module)}
        self._parameters = {name: p for name, p in model.named_parameters() if p not in tables}
        self._written: dict[str, Tensor] = {}  # parameters that are copied, too
        self._held: list[Tensor | None] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._step = _NONE
        self._versions: dict[str, int] = {}
        self._random: tuple[Tensor, Any, Any]

    def remember(self, step: int) -> None:
        """Note the state of this moment after `step`, before the next batch is read."""
        if step == self._step + 1:
            changed = self._changed()
            self._written |= {name: p for name, p in changed.items() if not p.requires_grad}
        self._step, self._versions = step, {name: p._version for name, p in self._parameters.items()}
        self._held = [buffers[name] for buffers, name in self._places]
        tensors = [*(buffer for buffer in self._held if buffer is not None), *self._written.values()]
        if len(tensors) == len(self._copied) and all(map(operator.is_, tensors, self._copied)):
            if tensors:
                torch._foreach_copy_(self._copies, [tensor.detach() for tensor in tensors])
        else:
            self._copied, self._copies = tensors, [tensor.detach().clone() for tensor in tensors]
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def undo(self, step: int) -> None:
        """Go back to the state after `step`, from the next one that was broken off.

        Raises:
            JobError: that one has written a parameter of which there is no copy.
        """
        if self._step != step:
            return
        self._step = _NONE
        if lost := self._changed().keys() - self._written.keys():
            raise _cannot_undo(min(lost), step + 1) from None
        for (buffers, name), buffer in zip(self._places, self._held, strict=True):
            buffers[name] = buffer
        with torch.no_grad():
            for tensor, copy in zip(self._copied, self._copies, strict=True):
                tensor.copy_(copy)
        torch_state, python_state, numpy_state = self._random
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)

    def _changed(self) -> dict[str, Tensor]:
        """Parameters that were written since the state was noted."""
        return {name: p for name, p in self._parameters.items() if p._version != self._versions[name]}


def _cannot_undo(name: str, step: int) -> JobError:
    error = JobError(
        f"a rank was lost in step {step}, and the others cannot repeat it: the model's forward pass has already "
        f"written parameter {name!r}. The run goes on from its newest checkpoint (--restarts 1, or --resume)."
    )
    error.may_pass = True
    return error
