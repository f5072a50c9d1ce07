"""The forward pass as torch.compile makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.plans.choices import Compile
from paceline.plans.limits import no_cuda_graphs
from paceline.split.compile_cache import keep_compiled_code_private


def compiled(model: nn.Module, how: Compile, device: torch.device) -> Callable[..., Any]:
    """The model's forward pass, compiled where `how` says so.

    Raises:
        PlanError: torch cannot compile it here (raised by the first call); says what to do.
    """
    if how == "off":
        return model
    if how == "reduce-overhead" and device.type != "cuda":
        raise PlanError(f"compile=reduce-overhead {no_cuda_graphs('this rank')}")
    # heavy
    from torch._inductor.exc import InductorError

    keep_compiled_code_private()
    made: Callable[..., Any] = torch.compile(model, mode=None if how == "on" else how)

    def forward(*args: Any, **keywords: Any) -> Any:
        try:
            return made(*args, **keywords)
        except InductorError as error:
            what = str(error).strip().partition("\n")[0]
            raise PlanError(
                f"compile={how}: torch cannot compile the model here: {what}. It needs a C++ compiler and "
                "Python's headers "
                "(on Debian and Ubuntu: apt install g++ python3-dev); or leave compile out."
            ) from error

    return forward
