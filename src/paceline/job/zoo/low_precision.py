"""Adam and AdamW with moments in 16 or 8 bits (`optimizer.state` in a job).

torchao's own 8-bit Adam divides a rank's shard into blocks, so its results depend on the plan. Here, the codes are
torchao's, but the blocks are parts of rows. A shard of rows, or of whole blocks of columns, therefore has the same
moments as the undivided parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.job.quantize import QUANTIZED_TOGETHER as BLOCK
from paceline.job.quantize import quantized_row_bytes
from paceline.job.zoo.optimizers import StepOptimizer
from paceline.job.zoo.quantized import library

_AT_ONCE = 2**20  # elements that are updated at a time, because their moments are fp32 during the update


class LowPrecisionAdam(StepOptimizer):
    """Adam (arXiv:1412.6980) or AdamW (arXiv:1711.05101) with moments in low precision.

    Updates are computed in fp32, or in fp64 for such parameters. Moments in `bf16` are rounded stochastically,
    without bias, because the second moment changes by less than the resolution of bf16. The random bits depend only on
    the value and the step, so they are the same under every plan. Moments in `int8` have dynamic 8-bit codes
    and one fp32 scale per 64 elements of a row (Dettmers et al., 2021, arXiv:2110.02861); parameters with fewer than
    two dimensions keep moments in their own type.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        state: Literal["bf16", "int8"],
        decoupled: bool,
    ) -> None:
        if state == "int8":
            _codes(signed=True)  # so that a missing library is reported at once
        self.in_bits, self.decoupled = state, decoupled
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self) -> None:
        """See `StepOptimizer.update`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without converting its types, unlike torch's optimizers."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = {
                key: value.to(parameters[number].device) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = self._zeros(parameter), self._zeros(parameter)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"].item()), group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        if not parameter.dim():
            parameter, gradient, first, second = (t.view(1) for t in (parameter, gradient, first, second))
        dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
        each = max(1, _AT_ONCE * len(parameter) // max(parameter.numel(), 1))
        for start in range(0, len(parameter), each):
            own, grad, m, v = (tensor[start : start + each] for tensor in (parameter, gradient, first, second))
            weight, change = own.to(dtype), grad.to(dtype)
            if not self.decoupled:
                change = change + group["weight_decay"] * weight
            mean = _read(m, own.shape, dtype, signed=True).lerp_(change, 1 - beta1)
            square = _read(v, own.shape, dtype, signed=False).mul_(beta2).addcmul_(change, change, value=1 - beta2)
            _write(m, mean, step, signed=True)
            _write(v, square, step, signed=False)
            if self.decoupled:
                weight = weight * (1 - group["lr"] * group["weight_decay"])
            scale = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
            own.copy_(weight.addcdiv(mean, scale, value=-group["lr"] / (1 - beta1**step)))

    def _zeros(self, parameter: Tensor) -> Tensor:
        if self.in_bits == "bf16":
            return torch.zeros_like(parameter, dtype=torch.bfloat16)
        if parameter.dim() < 2:
            return torch.zeros_like(parameter)
        shape = (*parameter.shape[:-1], quantized_row_bytes("int8", parameter.shape[-1]))
        # with a scale of 0, every code decodes to zero
        return torch.zeros(shape, dtype=torch.uint8, device=parameter.device)


def _read(held: Tensor, shape: torch.Size, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """Return moments as new tensors of type `dtype`."""
    if held.dtype != torch.uint8:
        return held.to(dtype, copy=True)
    blocks = -(-shape[-1] // BLOCK)
    codes, scales = held.split([blocks * BLOCK, blocks * 4], dim=-1)
    values = library("torchao.optim.quant_utils").dequant_with_qmap(
        codes, _codes(signed=signed).to(held.device), scales.contiguous().view(torch.float32).view(-1)
    )
    found: Tensor = values[..., : shape[-1]].to(dtype)
    return found.contiguous()


def _write(held: Tensor, values: Tensor, step: int, *, signed: bool) -> None:
    """Store moments in the type of `held`."""
    if held.dtype == torch.bfloat16:
        held.copy_(_rounded(values.float(), step))
    elif held.dtype == torch.uint8:
        functions = library("torchao.optim.quant_utils")
        padded = F.pad(values.float(), (0, -values.shape[-1] % BLOCK))
        scaled, scales = functions.scale_tensor(padded.contiguous(), BLOCK)
        codes = functions.quantize_8bit_with_qmap(scaled, _codes(signed=signed).to(held.device))
        bytes_of_scales = scales.view(*values.shape[:-1], -1).view(torch.uint8)
        held.copy_(torch.cat([codes, bytes_of_scales], -1))
    else:
        held.copy_(values)


def _rounded(values: Tensor, step: int) -> Tensor:
    """Round float32 to bfloat16 stochastically, without bias."""
    bits = values.contiguous().view(torch.int32)
    mixed = bits ^ (step * 0x9E3779B1 & 0x7FFFFFFF)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 0x2C1B3C6D), (12, 0x297A2D39)):
        # a logical shift, as in hashes of unsigned numbers
        mixed = (mixed ^ (mixed >> shift & (1 << 32 - shift) - 1)) * factor
    drawn = (mixed >> 16) & 0xFFFF
    found = ((bits + drawn) & ~0xFFFF).view(torch.float32)
    return torch.where(values.isfinite(), found, values).to(torch.bfloat16)


@cache
def _codes(*, signed: bool) -> Tensor:
    """Return the values of the 256 codes."""
    functions = library("torchao.optim.quant_utils")
    return torch.tensor(functions.create_dynamic_map(signed=signed), dtype=torch.float32)
