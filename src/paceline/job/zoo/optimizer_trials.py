"""Short trials of an optimizer, which reveal its state and the scope of its updates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.own_random import kept_random

# The update of an element depends on the element's own history, the whole parameter, all parameters, or random numbers.
Scope = Literal["element", "parameter", "model", "random"]
Build = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

_SIZES = (2, 3, 5, 7, 11)  # different sizes, so that the shape of a state tensor shows the dimensions of the parameter
_STEPS = 4
_TOLERANCE = 1e-12  # relative tolerance in float64, because elementwise updates may differ in the last digit


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state.

    Attributes:
        dims: dimensions of the parameter that occur in the tensor's shape.
        factor: number of elements for each element of the dimensions `dims`.
        element_bytes: size of an element in bytes; 0 if the tensor has the parameter's type.
    """

    dims: tuple[int, ...]
    factor: int
    element_bytes: int

    def bytes(self, shape: Sequence[int], element_bytes: int) -> int:
        """Return the tensor's size in bytes for a parameter of `shape` with elements of `element_bytes`."""
        return math.prod(shape[dim] for dim in self.dims) * self.factor * (self.element_bytes or element_bytes)


class StateTried(NamedTuple):
    """State that an optimizer keeps for a parameter with a certain number of dimensions.

    Attributes:
        tensors: the state tensors.
        refused: why the optimizer rejects such a parameter; "" if it accepts the parameter.
    """

    tensors: tuple[StateTensor, ...]
    refused: str


def state_of(build: Build, dims: int) -> StateTried:
    """Return the state that an optimizer has after one step on a `dims`-dimensional parameter.

    Raises:
        JobError: `dims` is 2 and the optimizer cannot take a step on a matrix.
    """
    shape = (_SIZES * (1 + dims // len(_SIZES)))[:dims]
    parameter = nn.Parameter(torch.ones(shape))
    with kept_random():
        try:
            optimizer = build([parameter])
            parameter.grad = torch.full(shape, 0.5)
            _step(optimizer)
        except Exception as error:
            if dims == 2:
                raise _refused(error) from error
            return StateTried((), _first_line(error))
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    return StateTried(tuple(_described(value, shape, parameter.dtype) for value in kept), "")


def _described(value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> StateTensor:
    element_bytes = 0 if value.dtype == dtype and value.dim() else value.element_size()
    if value.shape == shape:
        return StateTensor(tuple(range(len(shape))), 1, element_bytes)
    dims = tuple(shape.index(size) for size in value.shape if size in shape)
    factor = math.prod(size for size in value.shape if size not in shape)
    return StateTensor(dims, factor, element_bytes)


def scope_of(build: Build) -> Scope:
    """Determine the scope of an update from steps on matrices and on their halves.

    The gradients of the halves differ by a factor of 100, which reveals updates that use norms, means or maxima over
    the matrix.

    Raises:
        JobError: the optimizer cannot take a step on matrices with dense gradients.
    """
    with kept_random():
        try:
            together = _stepped(build, _whole, seed=1)
        except Exception as error:
            raise _refused(error) from error
        if not _alike(together, _stepped(build, _whole, seed=2)):
            return "random"
        if not _alike(together, _stepped(build, _apart, seed=1)):
            return "model"
        divisions = (partial(_halves, dim=0), partial(_halves, dim=1))
        try:
            divided = all(_alike(together, _stepped(build, division, seed=1)) for division in divisions)
        except Exception:  # noqa: BLE001 - an optimizer that does not take parts of a matrix
            divided = False
        return "element" if divided else "parameter"


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without the hooks that are installed for all optimizers of the process."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


Division = Callable[[list[Tensor]], list[list[Tensor]]]


def _whole(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [tensors]


def _apart(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[tensor] for tensor in tensors]


def _halves(tensors: list[Tensor], dim: int) -> list[list[Tensor]]:
    halves = [tensor.chunk(2, dim) for tensor in tensors]
    return [[half[index] for half in halves] for index in range(2)]


def _stepped(build: Build, division: Division, seed: int) -> list[list[Tensor]]:
    """Return the parameters after some steps.

    Each part of the division has its own optimizer.
    """
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    start = [draw(4, 6), draw(6, 4)]
    scale = torch.tensor([1.0, 1.0, 0.01, 0.01], dtype=torch.float64)
    gradients = [[draw(4, 6) * scale.view(4, 1), draw(6, 4) * 3 * scale] for _ in range(_STEPS)]
    torch.manual_seed(seed)
    ranks = [[nn.Parameter(part.clone()) for part in parts] for parts in division(start)]
    optimizers = [build(parameters) for parameters in ranks]
    for step in gradients:
        for parameters, parts, optimizer in zip(ranks, division(step), optimizers, strict=True):
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.clone()
            _step(optimizer)
    # still divided; `_alike` compares them with another division
    return [[p.detach() for p in parameters] for parameters in ranks]


def _alike(whole: list[list[Tensor]], divided: list[list[Tensor]]) -> bool:
    """Return True if the whole parameters and the divided parameters have equal values."""
    expected = next(parts for parts in (d(whole[0]) for d in _DIVISIONS) if _shapes(parts) == _shapes(divided))
    pairs = zip((t for part in expected for t in part), (t for part in divided for t in part), strict=True)
    return all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) for a, b in pairs)


_DIVISIONS: tuple[Division, ...] = (_whole, _apart, partial(_halves, dim=0), partial(_halves, dim=1))


def _shapes(parts: list[list[Tensor]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(tensor.shape) for tensor in part] for part in parts]


def check_step(name: str, optimizer: type[torch.optim.Optimizer]) -> None:
    """Raise an error for an optimizer whose step needs a closure.

    Raises:
        JobError: the optimizer needs a closure, like L-BFGS.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            "optimizer.needs_closure",
            "optimizer {name} computes the loss several times in a step through a closure, which a job cannot "
            "provide. Use another optimizer, or use paceline.setup in your own loop, which supports closures.",
            name=name,
        )


def _refused(error: Exception) -> JobError:
    return (
        error
        if isinstance(error, JobError)
        else JobError("optimizer.takes_no_step", "the optimizer cannot take a step: {error}", error=_first_line(error))
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
