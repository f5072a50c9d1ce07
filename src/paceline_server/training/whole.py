"""Whole tensors of a worker whose ranks have parts of the model.

Servers own whole tensors, so the workers of one run may divide the model differently. The first rank of a worker
connects to the servers. The other ranks send it their parts, and receive their parts of pulled tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.split.layout import Part, ShardLayout, local

_HOST = torch.device("cpu")


class _Held(NamedTuple):
    """Part of a tensor on one rank. `first` is True if no lower rank has the same part."""

    name: str
    layout: ShardLayout
    dtype: torch.dtype
    first: bool


class Whole:
    """Collector of parts on the worker's first rank, which also distributes its tensors.

    All ranks of the worker must call each method.

    Args:
        group: the worker's ranks.
        parameters: the parameters that this rank trains.
        parts: this rank's part of each parameter.

    Attributes:
        divides: True if there is more than one rank.
        shapes: shapes of all tensors of the worker.
        dtypes: dtypes of all tensors of the worker.
    """

    def __init__(self, group: Group, parameters: Mapping[str, Tensor], parts: Mapping[str, Part]) -> None:
        self.group, self.divides = group, group.size > 1
        own = {n: [parts[n].layout.full, parts[n].layout.kept, _name(p.dtype)] for n, p in parameters.items()}
        self._held: list[list[_Held]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        known: set[tuple[str, ShardLayout]] = set()
        for told in group.gather_json(own):
            held = []
            for name, (full, kept, dtype) in told.items():
                layout = ShardLayout(tuple(full), tuple(tuple(map(tuple, intervals)) for intervals in kept))
                held.append(_Held(name, layout, getattr(torch, dtype), (name, layout) not in known))
                known.add((name, layout))
                self.shapes[name], self.dtypes[name] = layout.full, held[-1].dtype
            self._held.append(held)

    def gather(self, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Gather whole tensors from the ranks' parts; only the first rank returns them.

        The result omits tensors without any part. Missing parts of other tensors are zeros.
        """
        rank = self.group.rank
        if not self.divides:
            return {name: part.detach() for name, part in parts.items() if part is not None}
        if rank:
            held = [one for one in self._held[rank] if one.first]
            if held:
                here = torch.tensor([parts.get(one.name) is not None for one in held], dtype=torch.uint8)
                flat = self._flat(held, (self._part(parts.get(one.name), one) for one in held))
                self.group.exchange([(0, here.to(self.group.device)), *((0, tensor) for tensor in flat)], [])
            return {}
        whole: dict[str, Tensor] = {}
        for one in self._held[0]:
            if (part := parts.get(one.name)) is not None:
                self._put(whole, one, local(part.detach()))
        for source in range(1, self.group.size):
            held = [one for one in self._held[source] if one.first]
            if held:
                self._receive(whole, source, held)
        return whole

    def spread(self, whole: Mapping[str, Tensor], into: Mapping[str, Tensor], names: Iterable[str] = ()) -> None:
        """Copy the first rank's whole tensors into each rank's parts.

        Args:
            names: names of the tensors, the same on all ranks; by default all tensors.
        """
        wanted = set(names) or self.shapes.keys()
        held = [[one for one in of_rank if one.name in wanted] for of_rank in self._held]
        if self.group.rank:
            own = held[self.group.rank]
            flat = [torch.empty(n, dtype=dtype, device=self.group.device) for dtype, n in _sizes(own).items()]
            if own:
                self.group.exchange([], [(0, tensor) for tensor in flat])
            for one, part in self._cut(own, flat):
                local(into[one.name].detach()).copy_(part)
            return
        for to in range(1, self.group.size):
            if held[to]:
                flat = self._flat(held[to], (one.layout.take(whole[one.name]) for one in held[to]))
                self.group.exchange([(to, tensor) for tensor in flat], [])
        for one in held[0]:
            local(into[one.name].detach()).copy_(one.layout.take(whole[one.name]))

    def share(self, value: Any) -> Any:
        """Broadcast a JSON value from the first rank."""
        if not self.divides:
            return value
        return self.group.gather_json(value if self.group.rank == 0 else None)[0]

    def _receive(self, whole: dict[str, Tensor], source: int, held: list[_Held]) -> None:
        device = self.group.device
        here = torch.empty(len(held), dtype=torch.uint8, device=device)
        flat = [torch.empty(n, dtype=dtype, device=device) for dtype, n in _sizes(held).items()]
        self.group.exchange([], [(source, here), *((source, tensor) for tensor in flat)])
        there = dict(zip((one.name for one in held), here.tolist(), strict=True))
        for one, part in self._cut(held, flat):
            if there[one.name]:
                self._put(whole, one, part)

    def _put(self, whole: dict[str, Tensor], one: _Held, part: Tensor) -> None:
        if one.name not in whole:
            whole[one.name] = torch.zeros(one.layout.full, dtype=one.dtype, device=_HOST)
        one.layout.put(part, whole[one.name])

    def _part(self, part: Tensor | None, one: _Held) -> Tensor:
        return torch.zeros(one.layout.shape, dtype=one.dtype) if part is None else local(part.detach())

    def _flat(self, held: list[_Held], parts: Iterable[Tensor]) -> list[Tensor]:
        rows: dict[torch.dtype, list[Tensor]] = {}
        for one, part in zip(held, parts, strict=True):
            rows.setdefault(one.dtype, []).append(part.reshape(-1).to(self.group.device, one.dtype))
        return [torch.cat(rows[dtype]) for dtype in _sizes(held)]

    def _cut(self, held: list[_Held], flat: list[Tensor]) -> Iterable[tuple[_Held, Tensor]]:
        at = dict.fromkeys(_sizes(held), 0)
        rows = dict(zip(at, flat, strict=True))
        for one in held:
            start, at[one.dtype] = at[one.dtype], at[one.dtype] + one.layout.numel
            yield one, rows[one.dtype][start : at[one.dtype]].view(one.layout.shape)


def _sizes(held: list[_Held]) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for one in held:
        sizes[one.dtype] = sizes.get(one.dtype, 0) + one.layout.numel
    return sizes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
