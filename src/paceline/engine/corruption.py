"""Silent corruption: the rank whose values differ from the majority's, named and healed."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.comm import Group
from paceline.errors import SyncError
from paceline.split.layout import local
from paceline.sync.start import broadcast_tensors

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

MOST = 2  # times that a rank is healed; the next time ends the run


@dataclass
class Corruption:
    """Heals ranks that hold other values than most of those that should hold the same.

    Attributes:
        found: details of each, for the record of the run.
        members: number of each rank's process, by which it is named and counted; None: the ranks themselves.
        times: the process that was healed, for each time in the run.
    """

    engine: Engine
    found: list[dict[str, Any]] = field(default_factory=list)
    members: Sequence[int] | None = None
    times: list[int] = field(default_factory=list)

    def heal(self, group: Group, named: Mapping[str, Tensor], digests: Mapping[str, int]) -> bool:
        """Copy the majority's state to the other ranks; False if there is no majority.

        Every rank of the group calls it.

        Args:
            named: parameters and buffers that the ranks should hold alike; their optimizer state is copied, too.
            digests: of those that differ between ranks.

        Raises:
            SyncError: it is the same rank again, for the last time.
        """
        own = [self._member(), socket.gethostname(), dict(digests)]
        everyones = group.gather_json(own)
        votes = Counter(tuple(held.values()) for _, _, held in everyones)
        majority, count = votes.most_common(1)[0]
        if 2 * count <= group.size:
            return False
        source = next(i for i, (_, _, held) in enumerate(everyones) if tuple(held.values()) == majority)
        right = everyones[source][2]
        for rank, host, held in everyones:
            if wrong := [name for name in held if held[name] != right[name]]:
                self._note(rank, host, wrong, everyones[source][0])
        broadcast_tensors(group, [*named.values(), *self._optimizer_state(named)], source)
        return True

    def tell_all(self) -> None:
        """Have every rank know what ranks of other groups found. Every rank calls it."""
        known = {(d["step"], d["rank"]): d for found in self.engine.group.gather_json(self.found) for d in found}
        self.found = list(known.values())

    def _member(self) -> int:
        rank = self.engine.group.rank
        return rank if self.members is None else self.members[rank]

    def _note(self, rank: int, host: str, wrong: list[str], source: int) -> None:
        step = self.engine.step_count + 1
        self.times.append(rank)
        times = self.times.count(rank)
        if times > MOST:
            raise SyncError(
                f"step {step}: rank {rank} (host {host}) holds other values of {wrong[0]!r} than most ranks, for the "
                f"{times}rd time. Nothing was updated. Check the memory of that host, or train without it; "
                "or look for code that writes into parameters or buffers on one rank only."
            )
        self.found.append(
            {
                "step": step,
                "rank": rank,
                "host": host,
                "tensors": wrong[:5],
                "more": len(wrong[5:]),
                "healed_from": source,
                "times": times,
            }
        )

    def _optimizer_state(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        state = self.engine.optimizer.state
        parameters = {name: p for name, p in self.engine.named_parameters().items() if name in named}
        kept = [value for p in parameters.values() for _, value in sorted(state.get(p, {}).items())]
        return [local(value).detach() for value in kept if isinstance(value, Tensor)]
