"""The part of a model that clients and server share, as one flat tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.nearest import nearest


@dataclass(frozen=True)
class Layout:
    """Places of shared tensors in a flat one: trainable parameters, then floating-point buffers.

    Frozen parameters and buffers of whole numbers are not shared; they stay as the job begins them.

    Attributes:
        names: of the shared tensors, in order.
        shapes: of each.
        trainable: how many of them are parameters.
        personal: names of the parameters that stay at a client.
        dtype: of the flat tensor.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: int
    personal: tuple[str, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module, personal: Sequence[str] = ()) -> Layout:
        """The layout of a model.

        Args:
            personal: patterns of the names of parameters that stay at a client, as in `head.*`.

        Raises:
            JobError: a pattern fits no parameter, or nothing is left to share.
        """
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for pattern in personal:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                raise JobError(
                    f'federate.personal: "{pattern}" fits no trainable parameter of the model. '
                    + nearest(pattern, list(parameters))
                )
        kept = {name for name in parameters if any(fnmatchcase(name, pattern) for pattern in personal)}
        shared = {name: p for name, p in parameters.items() if name not in kept}
        if not shared:
            raise JobError("federate.personal keeps every trainable parameter at the clients; leave some to share")
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        tensors: dict[str, Tensor] = {**shared, **buffers}
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1:
            raise JobError(
                f"federated training needs one floating-point type, and the model has {', '.join(map(str, dtypes))}; "
                "convert it with model.float()"
            )
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        return cls(tuple(tensors), shapes, len(shared), tuple(sorted(kept)), dtypes.pop())

    @property
    def sizes(self) -> list[int]:
        """Numbers in each shared tensor."""
        return [prod(shape) for shape in self.shapes]

    @property
    def parameters(self) -> int:
        """Trainable numbers, which come first."""
        return sum(self.sizes[: self.trainable])

    @property
    def numel(self) -> int:
        """All numbers."""
        return sum(self.sizes)

    def flatten(self, model: nn.Module) -> Tensor:
        """A copy of a model's shared tensors, flat (n,)."""
        held = tensors_of(model)
        return torch.cat([held[name].detach().reshape(-1) for name in self.names])

    @torch.no_grad()
    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Overwrite a model's shared tensors."""
        held = tensors_of(model)
        for name, value in self.named(flat).items():
            held[name].copy_(value)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor (n,), or of rows (k, n), by name, in their shapes."""
        parts = flat.split(self.sizes, dim=-1)
        return {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


def tensors_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters and buffers of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
