"""Undoing a step that was broken off: what a forward pass changes besides gradients."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.engine import Engine


class StepUndo:
    """Remembers the buffers and random states of one rank before each step. On CPUs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.buffers = list(engine.model.buffers())
        self._saved = [torch.empty_like(buffer) for buffer in self.buffers]
        self._step = -1
        self._random: tuple[Tensor, Any, Any]

    def remember(self) -> None:
        """Note the state of this moment, before the next batch is read."""
        self._step = self.engine.step_count
        if self.buffers:
            torch._foreach_copy_(self._saved, self.buffers)
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def undo(self) -> None:
        """Go back to the state before a step that was broken off."""
        if self._step != self.engine.step_count:
            return
        with torch.no_grad():
            for buffer, saved in zip(self.buffers, self._saved, strict=True):
                buffer.copy_(saved)
        torch_state, python_state, numpy_state = self._random
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
