"""Sums over clients: every one of them gets the sum of what all gave. Nothing is kept, and nothing is replicated.

The tensors are added in the order of the clients' indices, so that the sum is the same in every run, and all get the
same bits. A sum belongs to a space, the newest of which counts: who waits in an older one is told.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import DeadlineError, ServerRefused
from paceline_server.parameters.parameters import Gradient, Rows
from paceline_server.parameters.settings import Combine, TensorSpec

_MOST_MEMBERS = 2**16
_MOST_UNDER_WAY = 4096  # sums of one space


class Place(NamedTuple):
    """Name of a sum within its space: a step has one for each bucket."""

    number: int
    bucket: int


class Sums:
    """Sums under way. Threads of the callers do the work, and wait."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._space = ""
        self._order = -1
        self._under_way: dict[Place, _Sum] = {}

    def add(
        self, space: tuple[int, str], place: Place, index: int, members: int, tensor: Tensor, wait_s: float
    ) -> Tensor:
        """Give a tensor, and wait for the sum.

        Args:
            space: its number and its name; one of a higher number ends all before it.

        Raises:
            ServerRefused: the space is over, or the tensor does not fit those of the others.
            DeadlineError: some have given nothing in time; it names their indices. Ask again with the same tensor.
        """
        until = time.monotonic() + wait_s
        with self._turn:
            self._enter(space)
            if place not in self._under_way:
                if not 0 < members <= _MOST_MEMBERS or len(self._under_way) >= _MOST_UNDER_WAY:
                    raise ServerRefused(
                        f"a sum over {members} clients, beside {len(self._under_way)} others, is too much"
                    )
                self._under_way[place] = _Sum(members)
            held = self._under_way[place]
            held.take(index, members, tensor)
            if held.missing == []:
                self._turn.notify_all()
            while held.missing and self._under_way.get(place) is held:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(
                        f"no tensor from clients {held.missing[:8]} for sum {place.number}.{place.bucket}"
                    )
                self._turn.wait(left_s)
            if held.missing:
                raise ServerRefused(f"the sums of {space[1]!r} are over: {self._space!r} has begun")
            assert held.total is not None
            self._forget_before(place)
            return held.total

    def _enter(self, space: tuple[int, str]) -> None:
        order, name = space
        if order < self._order or (order == self._order and name != self._space):
            raise ServerRefused(f"the sums of {name!r} are over: {self._space!r} has begun")
        if order > self._order:
            self._order, self._space = order, name
            self._under_way.clear()
            self._turn.notify_all()

    def _forget_before(self, place: Place) -> None:
        """Drop sums of two steps ago: members of a step have those of the last."""
        for old in [p for p in self._under_way if p.number < place.number - 1]:
            del self._under_way[old]


class _Sum:
    """One sum: those that came are added as soon as all of lower index have."""

    def __init__(self, members: int) -> None:
        self.members, self.total = members, None
        self._next = 0  # index that is added next
        self._waiting: dict[int, Tensor] = {}

    total: Tensor | None

    @property
    def missing(self) -> list[int]:
        """Indices that have not come."""
        return [index for index in range(self._next, self.members) if index not in self._waiting]

    def take(self, index: int, members: int, tensor: Tensor) -> None:
        """Take the tensor of one client, whose memory is the sum's from here on. Once more is the same as once."""
        if members != self.members or not 0 <= index < members:
            raise ServerRefused(f"client {index} of {members} gave a tensor for a sum over {self.members} clients")
        if index < self._next or index in self._waiting:
            return
        first = self.total if self.total is not None else next(iter(self._waiting.values()), tensor)
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ServerRefused(
                f"client {index} gave {tuple(tensor.shape)} {tensor.dtype} for a sum of {tuple(first.shape)} "
                f"{first.dtype}"
            )
        self._waiting[index] = tensor
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self.total = ready if self.total is None else self.total.add_(ready)
            self._next += 1


def must_fit(gradients: Mapping[str, Gradient], specs: Mapping[str, TensorSpec], client: str) -> None:
    """Refuse a push whose names, shapes, dtypes, row numbers or values are wrong.

    Raises:
        ServerRefused: it says which tensor, and what is expected.
    """
    if not gradients:
        raise ServerRefused(f"{client} pushed nothing: name at least one tensor")
    for name, gradient in gradients.items():
        spec = specs.get(name)
        if spec is None:
            raise ServerRefused(f"{client} pushed {name!r}, which this server does not own; it owns {_some(specs)}")
        values = gradient.values if isinstance(gradient, Rows) else gradient
        if isinstance(gradient, Rows):
            _rows_must_fit(gradient, spec, client)
        elif tuple(values.shape) != spec.shape:
            raise ServerRefused(f"{client} pushed {name} with shape {tuple(values.shape)} instead of {spec.shape}")
        if values.dtype != spec.torch_dtype:
            raise ServerRefused(f"{client} pushed {name} as {values.dtype} instead of {spec.torch_dtype}")
        if not is_finite(values):
            raise ServerRefused(
                f"{client} pushed NaN or Inf in {name}: nothing of the push was applied. Look at its loss and its "
                "data, and push no step whose gradient is not finite"
            )


def is_finite(values: Tensor) -> bool:
    """True if no value is NaN or Inf; one pass over the memory."""
    total = values.sum(dtype=torch.float64)  # NaN and Inf stay; finite values of any of our dtypes have a finite sum
    return math.isfinite(total.item()) or bool(torch.isfinite(values).all())


def rows_must_be_owned(rows: Tensor, spec: TensorSpec, client: str) -> None:
    """Refuse row numbers that are none. Raises ServerRefused."""
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ServerRefused(
            f"{client} named rows of {spec.name} by {rows.dtype} of shape {tuple(rows.shape)}: use int64, 1-D"
        )
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < spec.rows:
        raise ServerRefused(f"{client} named row {int(rows.max())} of {spec.name}, which has {spec.rows} rows here")


def bounded(gradients: Mapping[str, Gradient], bound: float) -> dict[str, Gradient] | None:
    """The push scaled to the bound; None where its L2 norm is not above it."""
    tensors = [g.values if isinstance(g, Rows) else g for g in gradients.values()]
    norm = math.hypot(*(float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors))
    return scaled(gradients, bound / norm) if norm > bound else None


def scaled(gradients: Mapping[str, Gradient], factor: float) -> dict[str, Gradient]:
    """The push times a number, in memory of its own."""
    return {
        name: Rows(g.rows, g.values * factor) if isinstance(g, Rows) else g * factor for name, g in gradients.items()
    }


def once_each(gradients: Mapping[str, Gradient]) -> dict[str, Gradient]:
    """A push with every row named once, the values of repeated ones added."""
    return {name: _summed_rows([g]) if isinstance(g, Rows) else g for name, g in gradients.items()}


class Sum:
    """Sum of pushes.

    The memory of a push stays as it is, for it may still be on its way to a replica.

    Attributes:
        count: pushes in it.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, Gradient] = {}
        self.count = 0
        self._own: set[str] = set()  # names whose memory is the sum's, and can be added to

    def add(self, gradients: Mapping[str, Gradient]) -> None:
        """Add a push."""
        self.count += 1
        for name, gradient in gradients.items():
            if name in self.gradients:
                self.gradients[name] = self._added(name, self.gradients[name], gradient)
                self._own.add(name)
            else:
                self.gradients[name] = gradient

    def _added(self, name: str, held: Gradient, gradient: Gradient) -> Gradient:
        if isinstance(held, Rows) and isinstance(gradient, Rows):
            return _summed_rows([held, gradient])
        if isinstance(held, Tensor) and isinstance(gradient, Tensor):
            return held.add_(gradient) if name in self._own else held + gradient
        rows, dense = (held, gradient) if isinstance(held, Rows) else (gradient, held)
        assert isinstance(rows, Rows)
        assert isinstance(dense, Tensor)
        return dense.index_add(0, rows.rows, rows.values)


def combined(pushes: Sequence[Mapping[str, Gradient]], how: Combine, trim: float) -> dict[str, Gradient]:
    """The gradient of a round, from its members' pushes in the order of their names.

    A trimmed mean and a median are of each element, over the members that pushed it.
    """
    if how in ("sum", "mean"):
        total = Sum()
        for push in pushes:
            total.add(push)
        return total.gradients if how == "sum" else scaled(total.gradients, 1 / len(pushes))
    names = {name: None for push in pushes for name in push}
    return {name: _robust([push[name] for push in pushes if name in push], how, trim) for name in names}


def _robust(gradients: Sequence[Gradient], how: Combine, trim: float) -> Tensor:
    if any(isinstance(gradient, Rows) for gradient in gradients):
        raise ServerRefused(f"combine={how} is of whole tensors: few members push the same sparse row. Use sum or mean")
    ordered = torch.stack([g for g in gradients if isinstance(g, Tensor)]).sort(dim=0).values
    count = len(gradients)
    left_out = (count - 1) // 2 if how == "median" else int(count * trim)
    return ordered[left_out : count - left_out].mean(dim=0)


def _summed_rows(parts: Sequence[Rows]) -> Rows:
    rows, values = torch.cat([part.rows for part in parts]), torch.cat([part.values for part in parts])
    unique, at = torch.unique(rows, return_inverse=True)
    if len(unique) == len(rows) and len(parts) == 1:
        return parts[0]
    return Rows(unique, values.new_zeros((len(unique), *values.shape[1:])).index_add_(0, at, values))


def _rows_must_fit(gradient: Rows, spec: TensorSpec, client: str) -> None:
    if not spec.sparse:
        raise ServerRefused(f"{client} pushed rows of {spec.name}, which is dense: push all of it, or set sparse=True")
    rows_must_be_owned(gradient.rows, spec, client)
    expected = (len(gradient.rows), *spec.shape[1:])
    if tuple(gradient.values.shape) != expected:
        raise ServerRefused(
            f"{client} pushed rows of {spec.name} of shape {tuple(gradient.values.shape)}, not {expected}"
        )


def _some(specs: Mapping[str, TensorSpec]) -> str:
    names = list(specs)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
