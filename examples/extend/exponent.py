"""A codec: one byte a number, its sign and its power of two."""

from paceline.plans.codec_info import CodecInfo

INFO = CodecInfo("exponent:Exponent", sent_bytes=lambda sending: 1.0, codes_numbers=True)


class Exponent:
    """Codec of a sign bit and 7 bits of exponent; what rounding leaves out comes with the next step (error feedback)."""

    block = 1

    def __init__(self, coding) -> None:
        """`coding` has the value in the plan, random numbers, the ranks, …; this codec needs none of it."""

    def nbytes(self, numel: int) -> int:
        return -(-numel // 8) * 8

    def encode(self, rows, coded) -> None:
        exponents = rows.frexp().exponent.add_(64).clamp_(1, 127).mul_(rows != 0)
        coded[:, : rows.shape[1]].copy_(exponents.add_((rows < 0) * 128))

    def decode(self, coded, rows) -> None:
        codes = coded[:, : rows.shape[1]].int()
        exponents = codes & 127
        # The middle of the numbers from a half to a whole power of two.
        rows.fill_(0.75).ldexp_(exponents - 64).mul_(exponents > 0).mul_(1 - 2 * (codes >> 7))
