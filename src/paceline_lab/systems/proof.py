"""Losses of one process, with which the first ones of every system are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline_lab.systems.compared import AGREE, difference

# of `AGREE`: up to there a step is compared, for rounding of another size may move it further
_SURE = 0.1


@dataclass(frozen=True)
class Reference:
    """One process that a way to train is compared with.

    Attributes:
        batch: samples of a step; None: the comparison's.
        parts: in which a batch is computed, as by replicas that normalise each its own part.
        disturbed: whether its first weights are a rounding apart, which tells what rounding does to the losses.
    """

    batch: int | None = None
    parts: int = 1
    disturbed: bool = False


@dataclass(frozen=True)
class Proof:
    """Largest relative difference of a way's first losses from those of one process.

    Attributes:
        steps: that were compared; None: all that both took. Later ones are moved by rounding alone. After one step
            no gradient is compared, so it proves nothing.
    """

    apart: float
    steps: int | None = None

    @property
    def same(self) -> bool:
        """True if the way computes what one process computes."""
        return self.apart <= AGREE and not self.is_open

    @property
    def is_open(self) -> bool:
        """True if rounding moves the losses so early that nothing can be told."""
        return self.steps is not None and self.steps < 2

    def __str__(self) -> str:
        if self.is_open:
            return (
                f"losses that differ by up to {self.apart:.1%}, as they may by rounding alone: what it computes is open"
            )
        if not self.same:
            return f"OTHER losses, by up to {self.apart:.1%}"
        if self.steps is None:
            return f"the same losses (to {self.apart:.0e})"
        return (
            f"the same losses (to {self.apart:.0e}) in the first {self.steps} steps; later ones are moved by rounding "
            "alone"
        )


class References:
    """Courses of losses of one process, each taken when it is first asked for.

    Args:
        take: trains as a reference says, and returns its losses.
    """

    def __init__(self, take: Callable[[Reference], list[float]]) -> None:
        self._take = take
        self._taken: dict[Reference, list[float]] = {}

    def prove(self, losses: list[float], batch: int | None, parts: int) -> Proof:
        """Compare losses with those of one process, as far as rounding lets them be compared."""
        wanted = self._losses(Reference(batch, parts))
        apart = difference(losses, wanted)
        if apart <= AGREE:
            return Proof(apart)
        moved = self._losses(Reference(batch, parts, disturbed=True))
        pairs = zip(wanted, moved, strict=True)
        sure = next((n for n, pair in enumerate(pairs) if difference(pair[:1], pair[1:]) > _SURE * AGREE), len(wanted))
        if sure == len(wanted):
            return Proof(apart)
        compared = difference(losses[:sure], wanted[:sure])
        return Proof(apart, sure) if sure < 2 and compared <= AGREE else Proof(compared, sure if sure > 1 else None)

    def _losses(self, reference: Reference) -> list[float]:
        if reference not in self._taken:
            self._taken[reference] = self._take(reference)
        return self._taken[reference]
