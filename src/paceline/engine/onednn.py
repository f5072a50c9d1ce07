"""Matrix products of float32 on CPUs by oneDNN, for `onednn=on`.

torch's builds for x86 multiply matrices by Intel's MKL, which on AMD's processors leaves AVX-512 unused; oneDNN, which
torch brings for convolutions, uses it. Kernels of `aten::mm` and `aten::addmm` are replaced below autograd, so that
forward and backward of every layer have them. Products of other types, layouts and small sizes go to torch's own.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from paceline.errors import PlanError

LEAST = 2**18  # multiplications of a product: a smaller one is over before the way through Python pays
_library: torch.library.Library | None = None


def use_onednn(on: bool) -> None:
    """Have all matrix products of this process computed by oneDNN, or by torch again.

    Raises:
        PlanError: this build of torch has no oneDNN.
    """
    global _library
    if on == (_library is not None):
        return
    if _library is not None:
        _library._destroy()
        _library = None
        return
    if not has_onednn():
        raise PlanError(f"onednn=on: this build of torch ({torch.__version__}) has no oneDNN: onednn=off.")
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced
        _library.impl("mm", _mm, "CPU", allow_override=True)
        _library.impl("addmm", _addmm, "CPU", allow_override=True)


def has_onednn() -> bool:
    """True if this build of torch has oneDNN's linear layer."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if _is_for_onednn(a, b):
        return _linear(a, b.t(), None)
    product: Tensor = torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    return product


def _addmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    is_bias = c.dim() == 1 and c.dtype is torch.float32 and c.shape[0] == b.shape[1] and c.is_contiguous()
    if beta == 1 and alpha == 1 and is_bias and _is_for_onednn(a, b):
        return _linear(a, b.t(), c)
    out = a.new_empty(a.shape[0], b.shape[1])
    product: Tensor = torch.ops.aten.addmm.out(c, a, b, beta=beta, alpha=alpha, out=out)
    return product


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, bias, "none", [], "")
    return product


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype is torch.float32
        and b.dtype is torch.float32
        and a.dim() == 2 == b.dim()
        and a.shape[1] == b.shape[0]  # else torch's own error is raised
        and a.shape[0] * a.shape[1] * b.shape[1] >= LEAST
        and _is_plain(a)
        and _is_plain(b)
    )


def _is_plain(matrix: Tensor) -> bool:
    """True if rows or columns lie one after the other, without overlap."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)
