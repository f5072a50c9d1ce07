"""Batch normalisation over the global batch, independent of the number of replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as _not_compiled  # imports the compiler only at the first call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.overrides import TorchFunctionMode

from paceline.comm import Group
from paceline.device import has_batch_norm_kernels, on_accelerator
from paceline.errors import PlanError

Forward = Callable[..., Any]


def synchronise(model: nn.Module, dp: Group) -> nn.Module:
    """Make every batch-norm layer of `model` use the statistics of all replicas; return the model.

    The layers remain the same objects, with the same hooks, names and tensors. Only their class is replaced with a
    subclass whose forward pass computes `torch.nn.functional.batch_norm` over the replicas. A layer that extends
    BatchNorm keeps its other behaviour.

    Raises:
        PlanError: the statistics of a layer cannot be computed over the replicas; the message names the layer.
    """
    classes: dict[type, type] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, _Global):
            continue
        if isinstance(layer, SyncBatchNorm) and has_batch_norm_kernels(dp.device):
            layer.process_group = dp.backend
        elif dp.size > 1 or isinstance(layer, SyncBatchNorm):
            _refuse(name, layer)
            cls = type(layer)
            layer.__class__ = classes.setdefault(cls, _global_class(cls, dp))
            if (own := layer.__dict__.get("forward")) is not None:  # an attribute that hides the class's method
                layer.__dict__["forward"] = partial(_computed, own, dp)
    return model


def unsynchronise(model: nn.Module) -> None:
    """Restore the original classes of the layers that `synchronise` changed."""
    for layer in model.modules():
        if isinstance(layer, _Global):
            layer.__class__ = layer.plain
            own = layer.__dict__.get("forward")
            if isinstance(own, partial) and own.func is _computed:
                layer.__dict__["forward"] = own.args[0]


def has_batch_norm(model: nn.Module) -> bool:
    """Return True if any layer normalises over the batch."""
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def is_synchronised(model: nn.Module) -> bool:
    """Return True if any layer of `model` uses the statistics of all replicas."""
    return any(isinstance(m, _Global) for m in model.modules())


if TYPE_CHECKING:
    _Layer = _BatchNorm
else:
    _Layer = object


class _Global(_Layer):
    """Mixin for batch-norm layers that uses the statistics of all replicas in training.

    Attributes:
        dp: group of the replicas. A class attribute, because copies of the model (such as averaged weights) must not
            copy the group's connections.
        plain: the layer's original class.
    """

    dp: ClassVar[Group]
    plain: ClassVar[type]

    def forward(self, *args: Any, **keywords: Any) -> Any:
        # torch's SyncBatchNorm does not support CPUs, so its base class computes the forward pass
        forward: Forward = partial(_BatchNorm.forward, self) if self.plain is SyncBatchNorm else super().forward
        return _computed(forward, self.dp, *args, **keywords) if self.training else forward(*args, **keywords)


def _global_class(cls: type, dp: Group) -> type:
    return type(
        cls.__name__,
        (_Global, cls),
        {"dp": dp, "plain": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__},
    )


def _refuse(name: str, layer: _BatchNorm) -> None:
    cls = type(layer)
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise PlanError(
            "plan.batch_norm_lazy",
            'batch_norm: sync: "{name}" is a {class_name} without a first batch, so its size is unknown. Give '
            "the number of channels, or run one batch through the model first.",
            name=name,
            class_name=cls.__name__,
        )
    if isinstance(layer, SyncBatchNorm) and cls.forward is not SyncBatchNorm.forward:
        raise PlanError(
            "plan.batch_norm_of_torch",
            'batch_norm: sync: "{name}" is a {class_name}, which extends torch\'s SyncBatchNorm and therefore works '
            "only on GPUs. Use a class that extends BatchNorm in the model; batch_norm: sync makes its statistics "
            "global.",
            name=name,
            class_name=cls.__name__,
        )


@_not_compiled  # a compiler cannot trace communication between replicas
def _computed(forward: Forward, dp: Group, *args: Any, **keywords: Any) -> Any:
    """Run a layer's own forward pass with batch-norm statistics of all replicas.

    Raises:
        PlanError: the layer did not call torch's batch norm, so its statistics may be local.
    """
    with _OverReplicas(dp) as mode:
        output = forward(*args, **keywords)
    if not mode.used:
        layer = getattr(getattr(forward, "__self__", None), "__class__", None)
        raise PlanError(
            "plan.batch_norm_own_code",
            "batch_norm: sync: {class_name} extends BatchNorm but computes without torch.nn.functional.batch_norm, "
            "so each replica would keep its own statistics. Call this function in the layer's forward method, or use "
            "batch_norm: local.",
            class_name=getattr(layer, "__name__", "a layer"),
        )
    return output


class _OverReplicas(TorchFunctionMode):
    """Mode in which `torch.nn.functional.batch_norm` computes training statistics over all replicas.

    Attributes:
        used: True if `torch.nn.functional.batch_norm` was called.
    """

    def __init__(self, dp: Group) -> None:
        super().__init__()
        self.dp, self.used = dp, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.batch_norm:
            return function(*args, **kwargs)
        self.used = True
        return _batch_norm(self.dp, *args, **kwargs)


def _batch_norm(
    dp: Group,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `torch.nn.functional.batch_norm`, in training with the mean and variance of all replicas.

    On CPUs, a first differentiable all-reduce sums values and counts, and a second all-reduce sums squared deviations.
    The variance therefore has no cancellation error, and autograd derives the exact backward pass. On GPUs, torch's
    fused kernels are used.
    """
    # only shapes are computed, so no communication is needed
    traced = input.is_meta or isinstance(input, torch._subclasses.FakeTensor)
    # torch refuses a single value per channel, which is valid if other replicas have values
    single = input.numel() == input.shape[1]
    if not training or dp.size == 1 or (traced and not single):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if on_accelerator(input) and has_batch_norm_kernels(input.device):
        fused = torch.nn.modules._functions.SyncBatchNorm.apply
        normalised: Tensor = fused(input, weight, bias, running_mean, running_var, eps, momentum, dp.backend, dp.size)
        return normalised
    total: Callable[[Tensor], Tensor] = (lambda x: x) if traced else (lambda x: _SumOverReplicas.apply(x, dp))
    axes = [d for d in range(input.dim()) if d != 1]
    wide = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    sums = torch.cat([wide.sum(axes), wide.new_full((1,), input.numel() / input.shape[1])])
    sums = total(sums)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - _broadcastable(mean, input)
    variance = total(centred.square().sum(axes)) / count
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance.detach() * count / (count - 1).clamp(min=1)).to(running_var.dtype), momentum)
    y = centred * _broadcastable(torch.rsqrt(variance + eps), input)
    if weight is not None:
        y = y * _broadcastable(weight, input)
    if bias is not None:
        y = y + _broadcastable(bias, input)
    return y.to(input.dtype)


def _broadcastable(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *([1] * (x.dim() - 2)))


class _SumOverReplicas(torch.autograd.Function):
    """Differentiable sum over the replicas.

    Each replica's loss depends on the sum, so the gradient is the sum of the replicas' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dp: Group) -> Tensor:
        ctx.dp = dp
        total = x.clone()
        dp.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        ctx.dp.all_reduce(total)
        return total, None
