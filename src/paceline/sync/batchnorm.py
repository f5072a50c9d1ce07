"""Batch normalisation over the global batch: a layer sees the same mean and variance at any number of replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import Group


def synchronise(model: nn.Module, dp: Group) -> nn.Module:
    """Make every batch-norm layer of `model` use the statistics of all replicas.

    On CUDA with torch's fused `SyncBatchNorm`; on the CPU, which that does not support, with `GlobalBatchNorm`.
    Parameters and buffers keep their names and identity, so optimizers and checkpoints do not notice.
    """
    if dp.size == 1:
        return model
    if dp.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, dp.backend)
        return converted
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        return GlobalBatchNorm(model, dp)
    for name, child in model.named_children():
        setattr(model, name, synchronise(child, dp))
    return model


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any layer normalises over the batch."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Drop-in for BatchNorm1d/2d/3d: (N, C, …) to the same shape, mean and variance over the N of all replicas.

    Two differentiable all-reduces per forward pass (counts with sums, then squared deviations), so the variance does not
    lose digits to cancellation and autograd derives the exact backward pass.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, dp: Group) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers(recurse=False):
            setattr(self, name, buffer)
        self.train(layer.training)
        self.dp = dp

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:  # replicas may measure different numbers of batches, so nothing is exchanged
            own_statistics = self.running_mean is None
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own_statistics, 0.0, self.eps)
        axes = [d for d in range(x.dim()) if d != 1]
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        sums = torch.cat([wide.sum(axes), wide.new_full((1,), x.numel() / x.shape[1])])
        sums = _SumOverReplicas.apply(sums, self.dp)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - self._broadcastable(mean, x)
        variance = _SumOverReplicas.apply(centred.square().sum(axes), self.dp) / count
        self._track(mean.detach(), variance.detach(), count)
        y = centred * self._broadcastable(torch.rsqrt(variance + self.eps), x)
        if self.affine:
            y = y * self._broadcastable(self.weight, x) + self._broadcastable(self.bias, x)
        return y.to(x.dtype)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * count / (count - 1).clamp(min=1)).to(self.running_var.dtype), share)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any (N, C, …) is accepted, as the replaced layer checked its own."""

    @staticmethod
    def _broadcastable(vector: Tensor, x: Tensor) -> Tensor:
        return vector.view(1, -1, *([1] * (x.dim() - 2)))


class _SumOverReplicas(torch.autograd.Function):
    """The sum over the replicas. Each replica's loss depends on the sum, so the gradient is the sum of their gradients."""

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
