"""Muon for matrices of hidden layers and AdamW for other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.job.parameters import matrix_shape
from paceline.job.zoo.optimizers import StepOptimizer

Orthogonalize = Callable[[Tensor], Tensor]


class Matrices(Protocol):
    """Ranks that divide the work on matrices, of which each rank may hold a part."""

    def orthogonalized(
        self, parameters: Sequence[Tensor], updates: Sequence[Tensor], orthogonalize: Sequence[Orthogonalize]
    ) -> list[Tensor]:
        """Apply functions to whole matrices, and return this rank's parts of the results.

        Args:
            parameters: the parameters whose updates these are, the same on all ranks that hold them.
            updates: this rank's part of each update, in bfloat16.
            orthogonalize: for each update, a function of a whole matrix of shape (rows, columns).
        """
        ...

    def full_shape(self, parameter: Tensor) -> Sequence[int]:
        """Return the shape of the whole parameter."""
        ...


class Muon(StepOptimizer):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) beside AdamW.

    A step on a float32 or float64 matrix has the same bits as a step of `torch.optim.Muon`, whose Newton-Schulz
    iteration is used. In a stack of experts (3-D), each expert is a matrix. The filters of a convolution are a matrix
    of shape (output channels, rest).

    Momentum and weights are updated elementwise, so ranks can hold parts of them. Only the update that is
    orthogonalized is needed whole. The iteration is in bfloat16, so the parts are exchanged in bfloat16 without loss.
    A step changes neither weights nor state before the exchange is complete, so a step that was interrupted in the
    exchange can be repeated.

    Args:
        parameters: groups; `matrices` is True in groups that Muon updates and False in groups of AdamW.
        adjust_lr_fn: scale of the learning rate for the shape of a matrix, as in `torch.optim.Muon`.
        betas: decay rates of AdamW's moments.

    Attributes:
        ranks: the ranks that divide the work on matrices; None if this rank orthogonalizes all of them.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        matrices: bool = True,
    ) -> None:
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps}
        both = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        # a group without parameters, which stands for the groups of AdamW
        self._adamw = torch.optim.AdamW([{"params": []}], betas=betas, **both)  # type: ignore[arg-type]
        torch.optim.Muon([{"params": []}], adjust_lr_fn=adjust_lr_fn, **muon, **both)  # type: ignore[arg-type] # checks
        own = {**muon, "adjust_lr_fn": adjust_lr_fn, "matrices": matrices}
        self.ranks: Matrices | None = None
        super().__init__(parameters, {**self._adamw.defaults, **own})

    def update(self) -> None:
        """See `StepOptimizer.update`."""
        self._step_matrices([group for group in self.param_groups if group["matrices"]])
        others = [group for group in self.param_groups if not group["matrices"]]
        if others:
            self._adamw.param_groups, self._adamw.state = others, self.state
            self._adamw.step()

    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        stepped = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        for p, _ in stepped:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        updates = [self._update(p, group).bfloat16() for p, group in stepped]
        functions = [_orthogonalizer(group) for _, group in stepped]
        if self.ranks is None:
            found = [_of_each_matrix(orthogonalize, u) for orthogonalize, u in zip(functions, updates, strict=True)]
        else:
            found = self.ranks.orthogonalized([p for p, _ in stepped], updates, functions)
        for (p, group), direction in zip(stepped, found, strict=True):
            self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            rows, columns = matrix_shape(p.shape if self.ranks is None else self.ranks.full_shape(p))
            p.add_(direction, alpha=-group["lr"] * _scale(group["adjust_lr_fn"], rows, columns))

    def _update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the momentum of this step without changing the state."""
        assert p.grad is not None
        moved = self.state[p]["momentum_buffer"].lerp(p.grad, 1 - group["momentum"])
        return p.grad.lerp(moved, group["momentum"]) if group["nesterov"] else moved


def _of_each_matrix(orthogonalize: Orthogonalize, update: Tensor) -> Tensor:
    if update.dim() == 3:
        return torch.stack([orthogonalize(matrix) for matrix in update])
    return orthogonalize(update.flatten(1)).view_as(update)


def _orthogonalizer(group: dict[str, Any]) -> Orthogonalize:
    options = {key: group[key] for key in ("ns_coefficients", "eps", "ns_steps")}

    def orthogonalize(matrix: Tensor) -> Tensor:
        """Let torch's Muon step from zero, with rate 1 and without momentum or decay."""
        wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T  # the rate of wide matrices is not scaled
        start = nn.Parameter(torch.zeros_like(wide))
        start.grad = wide
        torch.optim.Muon([start], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
        found = start.detach().neg_()
        return found if wide is matrix else found.T

    return orthogonalize


def _scale(name: str | None, rows: int, columns: int) -> float:
    """Return the factor of the learning rate that `torch.optim.Muon` uses for a shape."""
    if name == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1, rows / columns))
