"""Dynamic loss scale of fp16 training (Micikevicius et al., 2017).

As large as the gradients allow, so that small ones do not vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_GROWTH, _BACKOFF, _GROWS_AFTER = 2.0, 0.5, 2000  # as torch.amp.GradScaler


class LossScale:
    """A factor for the loss; gradients are divided by it before they are used.

    All ranks see the same gradients, so it is the same on all.

    It acts on agreed gradients, wherever they lie; `torch.amp.GradScaler` knows only those of one optimizer.
    """

    def __init__(self, value: float = 2.0**16) -> None:
        self.value, self._good_steps = value, 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss * self.value

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.value)

    def grow(self) -> None:
        """Note an update that was made."""
        self._good_steps += 1
        if self._good_steps % _GROWS_AFTER == 0:
            self.value *= _GROWTH

    def shrink(self) -> str:
        """Note a gradient that overflowed; returns the message about the skipped update."""
        before, self._good_steps = self.value, 0
        self.value *= _BACKOFF
        return (
            f"a gradient overflowed fp16 at a loss scale of {before:g}; the update is left out, and the scale is "
            f"now {self.value:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an earlier scale."""
        self.value, self._good_steps = state["value"], state["good_steps"]
