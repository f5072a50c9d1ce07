"""The hint for an unknown name: the most likely one, or all known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean "adamw"?`, or `Known: adam, sgd.` where nothing known is like `name`."""
    names = list(known)
    if meant := closest(name, names):
        return f'Did you mean "{meant}"?'
    return f"Known: {', '.join(names[:24])}{', …' if len(names) > 24 else '.'}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to `name`, if any is similar; case is ignored."""
    by_lower_case = {n.lower(): n for n in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return by_lower_case[close[0]] if close else None
