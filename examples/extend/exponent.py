"""A codec: one byte a number, its sign and its power of two."""

from __future__ import annotations

from typing import Any

from paceline.planning.sync_info import CodecInfo

INFO = CodecInfo("exponent:Exponent", lambda sending: 1.0, codes_numbers=True, tried_by_auto="exponent", order=3)


class Exponent:
    """Sign bit and 7 bits of exponent; what rounding leaves out comes with the next step (error feedback)."""

    block = 1

    def __init__(self, coding: Any) -> None:
        """This codec needs none of it: the value in the plan, random numbers, the ranks."""

    def nbytes(self, numel: int) -> int:
        return -(-numel // 8) * 8

    def encode(self, rows: Any, coded: Any) -> None:
        exponents = rows.frexp().exponent.add_(64).clamp_(1, 127).mul_(rows != 0)
        coded[:, : rows.shape[1]].copy_(exponents.add_((rows < 0) * 128))

    def decode(self, coded: Any, rows: Any) -> None:
        codes = coded[:, : rows.shape[1]].int()
        # The middle of the numbers from a half to a whole power of two.
        rows.fill_(0.75).ldexp_((codes & 127) - 64).mul_(codes & 127 > 0).mul_(1 - 2 * (codes >> 7))
