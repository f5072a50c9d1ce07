"""The hint for an unknown name: the most likely one, or all known ones."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable

# known names of the field that look like other names but mean something else
_MEAN_OTHER_THINGS = {"radam", "nadam", "qadam", "adamp", "adan", "adamax", "asgd", "rmse", "mape"}
_PRECISIONS = {"fp64", "fp32", "fp16", "bf16", "fp8"}
_OPPOSITES = {
    ("above", "below"),
    ("before", "after"),
    ("first", "last"),
    ("max", "min"),
    ("less", "more"),
    ("train", "held"),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean "adamw"?`, or `Known: adam, sgd.` where nothing known is like `name`."""
    names = list(known)
    if meant := closest(name, names):
        return f'Did you mean "{meant}"?'
    return f"Known: {', '.join(names[:24])}{', …' if len(names) > 24 else '.'}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that `name` misspells, if there is one; case is ignored.

    A name with another meaning is not a misspelling: `fp16` is not `fp64`, `metric_below` is not `metric_above`, and
    `radam` is not `adam`.
    """
    by_lower_case = {n.lower(): n for n in known}
    given = name.lower()
    close = difflib.get_close_matches(given, by_lower_case, n=3)
    return next((by_lower_case[one] for one in close if _is_misspelled(given, one)), None)


def _is_misspelled(given: str, meant: str) -> bool:
    """True if a few letters differ, and none of them changes the meaning."""
    numbers = re.findall(r"[0-9]+", given)
    if given in _MEAN_OTHER_THINGS or (numbers and meant in _PRECISIONS):
        return False
    for word, other in itertools.product(re.split("[_-]", given), re.split("[_-]", meant)):
        if (word, other) in _OPPOSITES or (other, word) in _OPPOSITES:
            return False
    return True
