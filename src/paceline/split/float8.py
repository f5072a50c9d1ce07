"""Linear layers whose matrix products are in float8 (`precision: fp8`), by torchao.

Each tensor has one scale, which is computed anew from its largest element (torchao's recipe `tensorwise`). Weights and
gradients keep their type, and everything else is computed as in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.device import DEVICE_VARIABLE, has_fp8, is_accelerator
from paceline.errors import PlanError
from paceline.job.parameters import float8_layers
from paceline.job.zoo.quantized import library
from paceline.planning.limits import no_float8_layers

library("torchao.float8")  # raises JobError without torchao

from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: E402
from torchao.float8.float8_linear import Float8Linear as TorchaoLinear  # noqa: E402

_MARK = "float8_attributes"  # attribute of marked layers: the names of the attributes that the conversion adds


class Float8Linear(TorchaoLinear):
    """A linear layer with products in float8; its parameters are those of `nn.Linear`.

    Attributes:
        in_float8: False while `without_float8` is in effect.
    """

    in_float8 = True

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in float8, and return the result in the type of autocast."""
        # torchao reads only the autocast type of CUDA
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        # an empty tensor has no largest element
        if not Float8Linear.in_float8 or not input.numel():
            return F.linear(input, self.weight, self.bias)
        result: Tensor = super().forward(input)
        return result


def mark(model: nn.Module, device: torch.device) -> str:
    """Mark the layers of an undivided model that multiply in float8, and describe them.

    Raises:
        PlanError: the model has no such layer.
    """
    restore(model)  # an engine that failed may have left converted layers
    found = float8_layers(model)
    if not found:
        raise PlanError.of_problems([no_float8_layers()])
    for layer in found.values():
        vars(layer).setdefault(_MARK, ())
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    emulated = "" if is_accelerator(device) else ". The CPU emulates float8, which is slower than bf16"
    return f"fp8: {len(found)} of {linear} linear layers multiply in float8, all other layers in bf16{emulated}"


def convert(modules: Iterable[nn.Module], device: torch.device) -> Float8LinearConfig:
    """Convert the marked layers in place; on the CPU, the products are emulated.

    The layers remain the same objects with the same parameters.

    Returns:
        The configuration of the layers, for `restore`.

    Raises:
        PlanError: the device does not multiply in float8.
    """
    emulates = not is_accelerator(device)
    if not emulates and not has_fp8(device):
        raise PlanError(
            "plan.no_fp8",
            "precision=fp8: this device ({type}) does not multiply in float8. Use precision=bf16, or set "
            "{variable}=cpu to emulate float8 on the CPU.",
            type=device.type,
            variable=DEVICE_VARIABLE,
        )
    # the kernels need a multiple of 16 tokens
    config = Float8LinearConfig(emulate=emulates, pad_inner_dim=not emulates)
    usual = nn.Linear(16, 16, device="meta")
    converted = vars(convert_to_float8_training(usual, config=config))
    added = {key: converted[key] for key in converted.keys() - vars(usual).keys()}
    for layer in [layer for module in modules for layer in module.modules() if vars(layer).get(_MARK) == ()]:
        vars(layer).update(added, **{_MARK: tuple(added)})
        layer.__class__ = Float8Linear
    return config


def restore(model: nn.Module, of: Float8LinearConfig | None = None) -> None:
    """Turn the converted layers of an undivided model into ordinary linear layers again.

    Args:
        of: result of a `convert`, whose layers are restored; by default, all layers are.
    """
    for layer in model.modules():
        if type(layer) is Float8Linear and (of is None or layer.config is of):
            for key in (*getattr(layer, _MARK), _MARK):
                delattr(layer, key)
            layer.__class__ = nn.Linear  # type: ignore[assignment]


@contextmanager
def without_float8() -> Iterator[None]:
    """Within this context, converted layers of this process multiply like ordinary linear layers.

    The scales of float8 depend on all samples of a batch, so a change of one sample changes the results of the others.
    """
    Float8Linear.in_float8 = False
    try:
        yield
    finally:
        Float8Linear.in_float8 = True
