"""State of all servers as one, as checkpoints keep it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline_server.parameters.settings import ServerSettings, Slice, slices_of


class TrainedState(NamedTuple):
    """Whole parameters, and the optimizer's state of each, by the parameters' names."""

    values: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]


def of_servers(state: Mapping[str, Any], settings: ServerSettings) -> TrainedState:
    """The state of all servers together.

    Args:
        state: of a `ServerClient`.
    """
    values: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    owned = slices_of(settings, len(state["parts"]))
    for spec in settings.tensors():
        parts = [
            (piece, part)
            for pieces, part in zip(owned, state["parts"], strict=True)
            for piece in pieces
            if piece.name == spec.name
        ]
        whole = torch.empty(spec.shape, dtype=spec.torch_dtype)
        for piece, part in parts:
            _cut(whole, piece).copy_(part["tensors"][spec.name])
        values[spec.name] = whole
        of_parts = [(piece, part["optimizer"].get(spec.name, {})) for piece, part in parts]
        optimizer[spec.name] = {
            key: _together(whole, [(piece, values[key]) for piece, values in of_parts]) for key in of_parts[0][1]
        }
    return TrainedState(values, optimizer)


def for_servers(trained: TrainedState, settings: ServerSettings, servers: int, batches: int) -> dict[str, Any]:
    """State for `ServerClient.load_state`, after so many global batches."""
    pushes = batches * (settings.pieces or 1)
    specs = {spec.name: spec for spec in settings.tensors()}
    parts = []
    for pieces in slices_of(settings, servers):
        state = {
            piece.name: {
                key: _part_of(trained.values[piece.name], value, piece)
                for key, value in trained.optimizer.get(piece.name, {}).items()
            }
            for piece in pieces
        }
        parts.append(
            {
                "version": pushes,
                "ready": True,
                "tensors": {piece.name: _cut(trained.values[piece.name].detach(), piece).cpu() for piece in pieces},
                "versions": {piece.name: pushes for piece in pieces},
                "row_versions": {
                    piece.name: torch.full((piece.stop - piece.first,), pushes)
                    for piece in pieces
                    if specs[piece.name].sparse
                },
                "optimizer": state,
                "steps": {piece.name: pushes for piece in pieces},
            }
        )
    return {"parts": parts, "batches": batches}


def _together(whole: Tensor, parts: list[tuple[Slice, Any]]) -> Any:
    """One value of an optimizer's state, whole; the first server's where none is divided."""
    piece, first = parts[0]
    if not isinstance(first, Tensor) or first.shape != _cut(whole, piece).shape:
        return first
    together = torch.empty_like(whole, dtype=first.dtype)
    for piece, value in parts:
        _cut(together, piece).copy_(value)
    return together


def _part_of(whole: Tensor, value: Any, piece: Slice) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (_cut(value, piece) if value.shape == whole.shape else value).detach().cpu().clone()


def _cut(tensor: Tensor, piece: Slice) -> Tensor:
    """The rows that a server owns."""
    return tensor[piece.first : piece.stop] if tensor.dim() else tensor
