"""Text that others wrote, as it may be shown on a terminal."""

from __future__ import annotations

import re

# Control characters but for tab and line feed (a carriage return may hide what stands before it), and those that
# reorder or hide text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters escaped, e.g. `\x1b[2J`.

    No input can steer a terminal then.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
