"""Numbers as they stand in sentences and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Not options such as --devices, nor names of classes and files.
_DEVICE = re.compile(r"""(?<!=")(?<!=')(?<![-\w.#/=])([Dd])evice(s?)(?!-(?!seconds)|[\w=])""")


def percent(share: float, digits: int = 0) -> str:
    """`0.76` as `76 %`."""
    return f"{100 * share:.{digits}f} %"


def count(number: int, noun: str) -> str:
    """`1 run`, `5 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def size(size_bytes: float | None) -> str:
    """`1.2 MB`; `?` where it is not known."""
    if size_bytes is None:
        return "?"
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} GB"


def clock(seconds: float) -> str:
    """`1:05`"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def on_cores(text: str) -> str:
    """A text for people about a machine without GPUs, whose devices are cores."""
    return _DEVICE.sub(lambda found: ("C" if found[1] == "D" else "c") + f"ore{found[2]}", text)
