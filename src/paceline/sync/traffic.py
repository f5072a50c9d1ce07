"""Bytes that a rule has sent, with and without compression, and compression's error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


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

    def become(self, parts: Iterable[Traffic]) -> None:
        """Take over the sums of several parts."""
        parts = list(parts)
        for field in fields(self):
            setattr(self, field.name, sum(getattr(part, field.name) for part in parts))

    @property
    def relative_error(self) -> float:
        """L2 norm of the error relative to the data's; 0 if nothing was compressed."""
        return (self.error_square / self.signal_square) ** 0.5 if self.signal_square > 0 else 0.0
