"""Tensors that a server owns, their optimizers and versions, and checks of pushes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import ServerRefused
from paceline_server.parameters.settings import ServerSettings, Slice, TensorSpec


class Rows(NamedTuple):
    """Rows of a tensor. `rows` has their row numbers within the server's slice."""

    rows: Tensor
    values: Tensor


Gradient = Tensor | Rows


class Parameters:
    """Tensors of one server, and their optimizers.

    Attributes:
        version: number of steps taken. A tensor that changed in step v has version v.
        ready: True once the tensors have their initial values.
    """

    def __init__(self, settings: ServerSettings, owned: Sequence[Slice]) -> None:
        specs = {spec.name: spec for spec in settings.tensors}
        self.version, self.ready = 0, False
        self.specs = {piece.name: _part(specs[piece.name], piece) for piece in owned}
        self.tensors = {
            name: nn.Parameter(torch.zeros(spec.shape, dtype=spec.torch_dtype)) for name, spec in self.specs.items()
        }
        self.versions = dict.fromkeys(self.specs, 0)
        self.row_versions = {name: torch.zeros(spec.rows, dtype=torch.int64) for name, spec in self._sparse()}
        self._optimizer = _Optimizer(settings, self.specs)
        self._snapshots: dict[str, tuple[int, Tensor]] = {}

    def initialize(self, values: Mapping[str, Tensor]) -> None:
        """Set the initial values, or the values of a checkpoint."""
        with torch.no_grad():
            for name, value in values.items():
                self.tensors[name].copy_(value)
                self._changed(name, None)
        self.ready = True

    def step(self, gradients: Mapping[str, Gradient], lr_factor: float = 1.0) -> None:
        """Take an optimizer step. Tensors without a gradient do not change."""
        self.version += 1
        if gradients:
            self._optimizer.step(self.tensors, gradients, lr_factor)
        for name, gradient in gradients.items():
            self._changed(name, gradient.rows if isinstance(gradient, Rows) else None)

    def snapshot(self, name: str) -> Tensor:
        """Return a copy of a tensor that later steps do not change.

        All pulls of one version share one copy.
        """
        version = self.versions[name]
        kept = self._snapshots.get(name)
        if kept is None or kept[0] != version:
            self._snapshots[name] = kept = (version, self.tensors[name].detach().clone())
        return kept[1]

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Return copies of some rows."""
        return self.tensors[name].detach().index_select(0, rows)

    def changed_since(self, version: int) -> list[str]:
        """List the dense tensors that changed after a version (-1 for all)."""
        return [name for name, spec in self.specs.items() if not spec.sparse and self.versions[name] > version]

    def rows_since(self, name: str, version: int) -> Tensor:
        """Return the numbers of the rows of a sparse tensor that changed after a version."""
        return torch.nonzero(self.row_versions[name] > version).flatten()

    def state(self) -> dict[str, Any]:
        """Return a copy of the complete state, by name."""
        return {
            "version": self.version,
            "ready": self.ready,
            "tensors": {name: tensor.detach().clone() for name, tensor in self.tensors.items()},
            "versions": dict(self.versions),
            "row_versions": {name: versions.clone() for name, versions in self.row_versions.items()},
            "optimizer": self._optimizer.state(),
            "steps": self._optimizer.steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. Raises ServerRefused if the tensors differ."""
        theirs = {name: tuple(tensor.shape) for name, tensor in state["tensors"].items()}
        if theirs != {name: spec.shape for name, spec in self.specs.items()}:
            raise ServerRefused(
                "server.state_of_other_tensors",
                "the state and this server have different tensors. Use the settings with which the state was saved.",
            )
        self.initialize(state["tensors"])
        self.version, self.ready, self.versions = state["version"], state["ready"], dict(state["versions"])
        self.row_versions = {name: versions.clone() for name, versions in state["row_versions"].items()}
        self._optimizer.load(state["optimizer"], state["steps"])
        self._snapshots.clear()

    def _sparse(self) -> list[tuple[str, TensorSpec]]:
        return [(name, spec) for name, spec in self.specs.items() if spec.sparse]

    def _changed(self, name: str, rows: Tensor | None) -> None:
        self.versions[name] = self.version
        if name in self.row_versions:
            if rows is None:
                self.row_versions[name].fill_(self.version)
            else:
                self.row_versions[name][rows] = self.version


class _Optimizer:
    """Optimizer of the tensors that this server owns.

    The state is stored by tensor name. To step only some rows of a tensor, these rows and their state are copied out,
    stepped with a torch optimizer, and copied back.
    """

    def __init__(self, settings: ServerSettings, specs: Mapping[str, TensorSpec]) -> None:
        self._specs, self._schedule = specs, settings.schedule_spec()
        self._optimizer_spec, self._total_steps = settings.optimizer_spec(), settings.total_steps
        self.steps = 0
        self._state: dict[str, dict[str, Any]] = {name: {} for name in specs}
        self._optimizer = self._optimizer_spec.build([nn.Parameter(torch.zeros(1))])

    def step(self, tensors: Mapping[str, nn.Parameter], gradients: Mapping[str, Gradient], lr_factor: float) -> None:
        """Take a step for the tensors that have gradients."""
        stepped = []
        for name, gradient in gradients.items():
            tensor = tensors[name]
            rows = gradient.rows if isinstance(gradient, Rows) else None
            part = tensor if rows is None else nn.Parameter(tensor.detach().index_select(0, rows))
            part.grad = gradient.values if isinstance(gradient, Rows) else gradient
            stepped.append((name, rows, part))
        optimizer, (settings,) = self._optimizer, self._optimizer.param_groups
        settings["params"] = [part for *_, part in stepped]
        settings["lr"] = self._optimizer_spec.lr * self._rate() * lr_factor
        optimizer.state.clear()
        for name, rows, part in stepped:
            if self._state[name]:
                optimizer.state[part] = self._taken_out(name, rows)
        optimizer.step()
        for name, rows, part in stepped:
            self._put_back(name, rows, optimizer.state[part])
            if rows is not None:
                tensors[name].detach().index_copy_(0, rows, part.detach())
            part.grad = None
        self.steps += 1

    def state(self) -> dict[str, dict[str, Any]]:
        """Return a copy of the optimizer's state, by name."""
        return {name: {key: _copy(value) for key, value in state.items()} for name, state in self._state.items()}

    def load(self, state: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        """Restore a state that `state` returned."""
        self.steps = steps
        self._state = {name: {key: _copy(value) for key, value in state[name].items()} for name in self._specs}

    def _rate(self) -> float:
        return self._schedule.factor_at(self.steps, self._total_steps)

    def _taken_out(self, name: str, rows: Tensor | None) -> dict[str, Any]:
        state = self._state[name]
        if rows is None:
            return state
        return {
            key: value.index_select(0, rows) if self._has_rows(name, value) else value for key, value in state.items()
        }

    def _put_back(self, name: str, rows: Tensor | None, state: Mapping[str, Any]) -> None:
        if rows is None:
            self._state[name] = dict(state)
            return
        whole = self._state[name]
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape[:1] != rows.shape or not value.dim():
                whole[key] = value
            else:
                if key not in whole:
                    whole[key] = value.new_zeros(self._specs[name].shape)
                whole[key].index_copy_(0, rows, value)

    def _has_rows(self, name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and tuple(value.shape) == self._specs[name].shape


def _part(spec: TensorSpec, piece: Slice) -> TensorSpec:
    shape = (piece.stop - piece.first, *spec.shape[1:]) if spec.shape else ()
    return TensorSpec(spec.name, shape, spec.dtype, spec.sparse)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def must_fit(gradients: Mapping[str, Gradient], specs: Mapping[str, TensorSpec], client: str) -> None:
    """Refuse a push whose names, shapes, dtypes, row numbers or values are wrong.

    Raises:
        ServerRefused: the push is invalid; the message names the tensor and the expected value.
    """
    if not gradients:
        raise ServerRefused(
            "server.empty_push", "{client} sent an empty push. Push at least one tensor.", client=client
        )
    for name, gradient in gradients.items():
        spec = specs.get(name)
        if spec is None:
            raise ServerRefused(
                "server.tensor_unowned",
                "{client} pushed {tensor!r}, which this server does not own; it owns {owned}",
                client=client,
                tensor=name,
                owned=_some(specs),
            )
        values = gradient.values if isinstance(gradient, Rows) else gradient
        if isinstance(gradient, Rows):
            _rows_must_fit(gradient, spec, client)
        elif tuple(values.shape) != spec.shape:
            raise ServerRefused(
                "server.shape_differs",
                "{client} pushed {tensor} with shape {shape} instead of {expected}",
                client=client,
                tensor=name,
                shape=tuple(values.shape),
                expected=spec.shape,
            )
        if values.dtype != spec.torch_dtype:
            raise ServerRefused(
                "server.dtype_differs",
                "{client} pushed {tensor} as {dtype} instead of {expected}",
                client=client,
                tensor=name,
                dtype=values.dtype,
                expected=spec.torch_dtype,
            )
        if not is_finite(values):
            raise ServerRefused(
                "server.push_not_finite",
                "{client} pushed NaN or Inf in {tensor}, so the whole push was rejected. Check its loss and its "
                "data, and do not push a gradient that is not finite.",
                client=client,
                tensor=name,
            )


def is_finite(values: Tensor) -> bool:
    """Return True if no value is NaN or Inf, in one pass over the memory."""
    total = values.sum(dtype=torch.float64)  # NaN and Inf propagate; finite values have a finite sum
    return math.isfinite(total.item()) or bool(torch.isfinite(values).all())


def rows_must_be_owned(rows: Tensor, spec: TensorSpec, client: str) -> None:
    """Refuse row numbers that are out of range. Raises ServerRefused."""
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ServerRefused(
            "server.rows_type",
            "{client} sent row numbers of {tensor} as {dtype} of shape {shape}. Use a one-dimensional int64 tensor.",
            client=client,
            tensor=spec.name,
            dtype=rows.dtype,
            shape=tuple(rows.shape),
        )
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < spec.rows:
        raise ServerRefused(
            "server.row_out_of_range",
            "{client} requested row {row} of {tensor}, which has only {rows} rows on this server",
            client=client,
            row=int(rows.max()),
            tensor=spec.name,
            rows=spec.rows,
        )


def negated(gradients: Mapping[str, Gradient]) -> dict[str, Gradient]:
    """Return a copy of the push with the opposite sign."""
    return {name: Rows(g.rows, -g.values) if isinstance(g, Rows) else -g for name, g in gradients.items()}


def once_each(gradients: Mapping[str, Gradient]) -> dict[str, Gradient]:
    """Return a push that contains every row once, with the values of repeated rows summed."""
    return {name: _summed_rows(g) if isinstance(g, Rows) else g for name, g in gradients.items()}


def _summed_rows(part: Rows) -> Rows:
    unique, at = torch.unique(part.rows, return_inverse=True)
    if len(unique) == len(part.rows):
        return part
    values = part.values.new_zeros((len(unique), *part.values.shape[1:])).index_add_(0, at, part.values)
    return Rows(unique, values)


def _rows_must_fit(gradient: Rows, spec: TensorSpec, client: str) -> None:
    if not spec.sparse:
        raise ServerRefused(
            "server.rows_of_dense_pushed",
            "{client} pushed rows of {tensor}, which is dense. Push the whole tensor, or set sparse=True.",
            client=client,
            tensor=spec.name,
        )
    rows_must_be_owned(gradient.rows, spec, client)
    expected = (len(gradient.rows), *spec.shape[1:])
    if tuple(gradient.values.shape) != expected:
        raise ServerRefused(
            "server.rows_shape",
            "{client} pushed rows of {tensor} of shape {shape}, not {expected}",
            client=client,
            tensor=spec.name,
            shape=tuple(gradient.values.shape),
            expected=expected,
        )


def _some(specs: Mapping[str, TensorSpec]) -> str:
    names = list(specs)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
