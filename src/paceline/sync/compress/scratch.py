"""Memory for work in progress, used again by one tensor after the other."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Flat fp32 tensors by purpose, each as large as the largest that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}

    def get(self, purpose: str, numel: int) -> Tensor:
        """`numel` numbers of any value, until the same purpose is asked for again."""
        if purpose not in self.held or self.held[purpose].numel() < numel:
            self.held[purpose] = torch.empty(numel, device=self.device)
        return self.held[purpose][:numel]

    def filled(self, purpose: str, numel: int, numbers: Tensor) -> Tensor:
        """Memory for a purpose, with `numbers` (any dtype) at the beginning and zeros after them."""
        memory = self.get(purpose, numel)
        memory[: len(numbers)].copy_(numbers)
        memory[len(numbers) :].zero_()
        return memory
