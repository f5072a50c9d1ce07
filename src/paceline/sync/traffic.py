"""Bytes that a rule has sent, with and without compression, and compression's error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from paceline.comm.group import Group


@dataclass
class Traffic:
    """Sums since the start of the run, of one rank.

    Attributes:
        sent_bytes: put on the wire by the rule.
        plain_bytes: what the same exchange would have sent as it is, by an all-reduce in the tensors' own dtype.
        error_square: squared L2 norm of what compression left out of the tensors handed to it (before error feedback
            makes up for it).
        signal_square: squared L2 norm of the tensors handed to it.
    """

    sent_bytes: int = 0
    plain_bytes: int = 0
    error_square: float = 0.0
    signal_square: float = 0.0

    @contextmanager
    def counting(self, group: Group, plain_bytes: int | None = None) -> Iterator[None]:
        """Add what this rank sends over a group within the context; the group counts it.

        Args:
            plain_bytes: see the class; by default as much as is sent, as by an exact sum.
        """
        before = group.sent_bytes
        yield
        sent = group.sent_bytes - before
        self.sent_bytes += sent
        self.plain_bytes += sent if plain_bytes is None else plain_bytes

    def become(self, parts: Iterable[Traffic]) -> None:
        """Take over the sums of several parts."""
        parts = list(parts)
        for field in fields(self):
            setattr(self, field.name, sum(getattr(part, field.name) for part in parts))

    @property
    def relative_error(self) -> float:
        """L2 norm of the error relative to the data's; 0 if nothing was compressed."""
        return (self.error_square / self.signal_square) ** 0.5 if self.signal_square > 0 else 0.0


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each rank of a ring all-reduce of `nbytes` sends: 2 (n - 1) / n of them."""
    return 2 * (ranks - 1) * nbytes // ranks
