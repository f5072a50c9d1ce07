"""State of all servers in one engine, as checkpoints keep it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.remote.server.settings import ServerSettings, Slice, slices_of

Parameters = Mapping[str, nn.Parameter]


def take_over(
    state: Mapping[str, Any], settings: ServerSettings, parameters: Parameters, optimizer: torch.optim.Optimizer
) -> None:
    """Put the state of all servers into parameters and optimizer.

    Args:
        state: of a `ServerClient`.
    """
    owned = slices_of(settings, len(state["parts"]))
    for name, parameter in parameters.items():
        parts = [
            (piece, part)
            for pieces, part in zip(owned, state["parts"], strict=True)
            for piece in pieces
            if piece.name == name
        ]
        with torch.no_grad():
            for piece, part in parts:
                _cut(parameter, piece).copy_(part["tensors"][name])
        of_parts = [(piece, part["optimizer"].get(name, {})) for piece, part in parts]
        optimizer.state[parameter] = {
            key: _together(parameter, [(piece, values[key]) for piece, values in of_parts]) for key in of_parts[0][1]
        }


def handed_over(
    settings: ServerSettings, servers: int, parameters: Parameters, optimizer: torch.optim.Optimizer, batches: int
) -> dict[str, Any]:
    """State for `ServerClient.load_state` of parameters and optimizer after so many global batches."""
    pushes = batches * (settings.pieces or 1)
    specs = {spec.name: spec for spec in settings.tensors()}
    parts = []
    for pieces in slices_of(settings, servers):
        state = {
            piece.name: {
                key: _part_of(parameters[piece.name], value, piece)
                for key, value in optimizer.state.get(parameters[piece.name], {}).items()
            }
            for piece in pieces
        }
        parts.append(
            {
                "version": pushes,
                "ready": True,
                "tensors": {piece.name: _cut(parameters[piece.name].detach(), piece).cpu() for piece in pieces},
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


def _together(parameter: Tensor, parts: list[tuple[Slice, Any]]) -> Any:
    """One value of an optimizer's state, whole; the first server's where none is divided."""
    piece, first = parts[0]
    if not isinstance(first, Tensor) or first.shape != _cut(parameter, piece).shape:
        return first
    whole = torch.empty_like(parameter, dtype=first.dtype)
    for piece, value in parts:
        _cut(whole, piece).copy_(value)
    return whole


def _part_of(parameter: Tensor, value: Any, piece: Slice) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (_cut(value, piece) if value.shape == parameter.shape else value).detach().cpu().clone()


def _cut(tensor: Tensor, piece: Slice) -> Tensor:
    """The rows that a server owns."""
    return tensor[piece.first : piece.stop] if tensor.dim() else tensor
