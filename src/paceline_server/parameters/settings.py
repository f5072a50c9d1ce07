"""Settings of a parameter server: tensors, their optimizers, and how late a push may be.

Plain data, the same for all servers and clients of a run, which compare its digest when they meet.
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
    """One tensor under its name.

    Attributes:
        sparse: its rows (along dimension 0) are pulled and pushed alone, and only rows that a push names are stepped.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    sparse: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ServerRefused(
                "server.dtype_unsupported",
                "{name} is {dtype}; a server steps {dtypes}",
                name=self.name,
                dtype=self.dtype,
                dtypes=list(_DTYPES),
            )
        if not self.name or any(size < 0 for size in self.shape) or (self.sparse and not self.shape):
            raise ServerRefused(
                "server.tensor_invalid",
                "a tensor needs a name and a shape, and rows if it is sparse; got {found}",
                found=self,
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
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
    """Settings that clients and servers of one model have in common.

    Attributes:
        optimizer, schedule: keys of the job's `optimizer` and `schedule`. For deltas it is the outer optimizer:
            `{"name": "sgd", "lr": 1.0}` adds them as they are.
        total_steps: the length of a schedule that decays to the end.
        staleness: number of global batches by which a ticket may run ahead of the applied ones; inf: no client waits.
        staleness_aware: divide the learning rate of a push that is tau steps old by max(1, tau); with tickets by
            max(1, tau / pieces), because a global batch takes `pieces` steps.
        pieces: number of tickets of one global batch; None: the server deals none, and takes pushes as they come.
        compress: codec of the dense gradients that clients push; `none` sends them uncoded.
        most_members: largest number of clients that are members at one time.
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
            yield "name at least one tensor, and each once"
        if not self.staleness >= 0 or self.staleness % 1 > 0:
            yield f"staleness is 0, a number of global batches, or inf, not {self.staleness}"
        if self.pieces is not None and self.pieces < 1:
            yield "there is at least 1 piece in a global batch"
        if self.pieces is None and self.staleness < math.inf:
            yield "a staleness is counted in tickets: set pieces"

    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer's settings, checked. Raises ServerRefused."""
        return _read(OptimizerSpec, self.optimizer)

    def schedule_spec(self) -> ScheduleSpec:
        """The schedule's settings, checked. Raises ServerRefused."""
        return _read(ScheduleSpec, self.schedule or {})

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model and its optimizer; a client with another one is refused."""
        return _hash([[asdict(tensor) for tensor in self.tensors], self.optimizer])

    @cached_property
    def digest(self) -> str:
        """Hash of everything here, to be compared by both ends."""
        return _hash(asdict(self))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dict).encode()).hexdigest()


class Slice(NamedTuple):
    """Rows of a tensor that one server owns."""

    name: str
    first: int
    stop: int

    def cut(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor that the server owns."""
        return tensor[self.first : self.stop] if tensor.dim() else tensor


def slices_of(settings: ServerSettings, servers: int) -> list[list[Slice]]:
    """Slices that each server owns: contiguous rows, of about equally many bytes.

    A tensor is cut along dimension 0 at a server's boundary. Optimizers that scale by the norm of a whole tensor (LARS,
    LAMB) get whole tensors.

    Raises:
        ServerRefused: there are more servers than rows to own.
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
            "{servers} servers cannot share {rows} rows of tensors. Use fewer.",
            servers=servers,
            rows=len(units),
        )
    owned, at = [], 0
    for count in contiguous([cost for *_, cost in units], servers):
        owned.append(_joined([Slice(*unit[:3]) for unit in units[at : at + count]]))
        at += count
    return owned


def _units(spec: TensorSpec, servers: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Runs of rows that stay together: 64 for each server are fine enough."""
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
