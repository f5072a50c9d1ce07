"""The rate of a link as text: `100mbit`."""

from __future__ import annotations

import re

_RATE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kmg])bit(/s)?", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_LEAST, _MOST = 10**4, 4 * 10**11  # what `tc` can shape


def bits_per_s(rate: str) -> int:
    """`100mbit` as 100,000,000. In the words of `tc`: a kbit, mbit or gbit a second is 10³, 10⁶ or 10⁹ bits.

    Raises:
        ValueError: it is not a rate; with what would be one.
    """
    match = _RATE.fullmatch(rate.strip())
    speed = round(float(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if not _LEAST <= speed <= _MOST:
        raise ValueError(
            f"{rate!r} is not a rate such as 25mbit or 1gbit (kbit, mbit, gbit: 10³, 10⁶, 10⁹ bits a "
            "second, 10kbit to 400gbit)"
        )
    return speed
