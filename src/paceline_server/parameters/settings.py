"""Settings of a parameter server: tensors, their optimizers, and staleness.

All servers and clients of a run have the same settings, and compare digests when they connect.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from paceline.errors import ServerRefused
from paceline.job.optimizer import OptimizerSpec
from paceline.job.schedule import ScheduleSpec
from paceline.partition import contiguous

_Kind = TypeVar("_Kind", OptimizerSpec, ScheduleSpec)
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class TensorSpec:
    """Description of a named tensor.

    Attributes:
        sparse: True if rows (along dimension 0) are pulled and pushed separately. A step then changes only pushed rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    sparse: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ServerRefused(
                "server.dtype_unsupported",
                "{name} is {dtype}, but a server supports only {dtypes}",
                name=self.name,
                dtype=self.dtype,
                dtypes=list(_DTYPES),
            )
        if not self.name or any(size < 0 for size in self.shape) or (self.sparse and not self.shape):
            raise ServerRefused(
                "server.tensor_invalid",
                "a tensor needs a name and a shape, and a number of rows if it is sparse; got {found}",
                found=self,
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def rows(self) -> int:
        """Length of dimension 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def bytes(self) -> int:
        """Memory of the whole tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class ServerSettings:
    """Settings that clients and servers of one model share.

    Attributes:
        optimizer: keys of the job's `optimizer`. For deltas this is the outer optimizer; `{"name": "sgd", "lr": 1.0}`
            adds deltas unchanged.
        schedule: keys of the job's `schedule`.
        total_steps: total number of steps, for a schedule that decays until the last step.
        staleness: number of global batches by which a ticket may run ahead of the applied batches; with inf, clients
            never wait.
        staleness_aware: True to divide the learning rate of a push that is tau steps old by max(1, tau). With tickets,
            the divisor is max(1, tau / pieces), because a global batch takes `pieces` steps.
        pieces: number of tickets per global batch. With None the server deals no tickets, and accepts pushes in order
            of arrival.
        compress: codec of the dense gradients that clients push; `none` sends unencoded gradients.
        most_members: maximum number of members at the same time.
    """

    tensors: tuple[TensorSpec, ...]
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any] | None = None
    total_steps: int | None = None
    staleness: float = math.inf
    staleness_aware: bool = True
    pieces: int | None = None
    compress: str = "none"
    most_members: int = 4096

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ServerRefused(
                "server.settings_invalid", "settings of the parameter server: {problem}", problem=problem
            )
        self.optimizer_spec(), self.schedule_spec()

    def _problems(self) -> Iterator[str]:
        names = [spec.name for spec in self.tensors]
        if not names or len(set(names)) < len(names):
            yield "name at least one tensor, and each tensor only once"
        if not self.staleness >= 0 or self.staleness % 1 > 0:
            yield f"staleness is 0, a number of global batches, or inf, not {self.staleness}"
        if self.pieces is not None and self.pieces < 1:
            yield "there is at least 1 piece in a global batch"
        if self.pieces is None and self.staleness < math.inf:
            yield "a staleness is counted in tickets: set pieces"

    def optimizer_spec(self) -> OptimizerSpec:
        """Validate and return the optimizer's settings. Raises ServerRefused."""
        return _read(OptimizerSpec, self.optimizer)

    def schedule_spec(self) -> ScheduleSpec:
        """Validate and return the schedule's settings. Raises ServerRefused."""
        return _read(ScheduleSpec, self.schedule or {})

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model and its optimizer. The server refuses clients with a different hash."""
        return _hash([[asdict(tensor) for tensor in self.tensors], self.optimizer])

    @cached_property
    def digest(self) -> str:
        """Hash of all settings, which both ends compare."""
        return _hash(asdict(self))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dict).encode()).hexdigest()


class Slice(NamedTuple):
    """Rows of a tensor that one server owns."""

    name: str
    first: int
    stop: int

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the rows of a whole tensor that the server owns."""
        return tensor[self.first : self.stop] if tensor.dim() else tensor


def slices_of(settings: ServerSettings, servers: int) -> list[list[Slice]]:
    """Divide tensors into one slice of contiguous rows per server, of about equal bytes.

    Tensors are divided along dimension 0. For optimizers that scale by the norm of a tensor (LARS, LAMB), tensors are
    not divided.

    Raises:
        ServerRefused: there are more servers than rows.
    """
    whole = settings.optimizer_spec().name in ("lars", "lamb")
    units = [
        (spec.name, first, stop, spec.bytes() * (stop - first) / max(1, spec.rows))
        for spec in settings.tensors
        for first, stop in _units(spec, servers, whole)
    ]
    if servers < 1 or servers > len(units):
        raise ServerRefused(
            "server.too_many_servers",
            "{servers} servers cannot share {rows} rows of tensors. Use fewer servers.",
            servers=servers,
            rows=len(units),
        )
    owned, at = [], 0
    for count in contiguous([cost for *_, cost in units], servers):
        owned.append(_joined([Slice(*unit[:3]) for unit in units[at : at + count]]))
        at += count
    return owned


def _units(spec: TensorSpec, servers: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Divide rows into units that are never split, about 64 per server."""
    step = spec.rows if whole or servers == 1 else max(1, spec.rows // (64 * servers))
    return ((first, min(first + step, spec.rows)) for first in range(0, max(1, spec.rows), max(1, step)))


def _joined(slices: list[Slice]) -> list[Slice]:
    joined: list[Slice] = []
    for piece in slices:
        if joined and joined[-1].name == piece.name:
            joined[-1] = joined[-1]._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return joined


def _read(kind: type[_Kind], keys: Mapping[str, Any]) -> _Kind:
    try:
        return kind.model_validate(dict(keys))
    except ValidationError as error:
        raise ServerRefused(
            "server.settings_refused", "settings of the parameter server: {error}", error=error
        ) from None
