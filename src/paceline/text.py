"""Text for users: hints for unknown names, lists, and safe display of untrusted text."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence

# known names of the field that resemble other names but have another meaning
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
    """Return `Did you mean "adamw"?`, or `Known: adam, sgd.` if no name is similar."""
    names = list(known)
    if meant := closest(name, names):
        return f'Did you mean "{meant}"?'
    return f"Known: {', '.join(names[:24])}{', …' if len(names) > 24 else '.'}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that `name` misspells, if there is one; case is ignored.

    A name with another meaning is not a misspelling: `fp16` is not `fp64`, `metric_below` is not `metric_above`, and
    `radam` is not `adam`.
    """
    by_lower_case = {n.lower(): n for n in reversed(list(known))}  # of names that differ only in case, the first one
    given = name.lower()
    close = difflib.get_close_matches(given, by_lower_case, n=3)
    return next((by_lower_case[one] for one in close if _is_misspelled(given, one)), None)


def _is_misspelled(given: str, meant: str) -> bool:
    """Return True if a few letters differ and none of them changes the meaning."""
    numbers = re.findall(r"[0-9]+", given)
    if (given in _MEAN_OTHER_THINGS and given != meant) or (numbers and meant in _PRECISIONS):
        return False
    for word, other in itertools.product(re.split("[_-]", given), re.split("[_-]", meant)):
        if (word, other) in _OPPOSITES or (other, word) in _OPPOSITES:
            return False
    return True


# Control characters except tab and line feed (a carriage return may hide the text before it), and characters that
# reorder or hide text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return the text with control characters escaped, e.g. `\x1b[2J`.

    The text then cannot control a terminal.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


# Excludes options such as --devices, and names of classes and files.
_DEVICE = re.compile(r"""(?<!=")(?<!=')(?<![-\w.#/=])([Dd])evice(s?)(?!-(?!seconds)|[\w=])""")


def listed(words: Sequence[str]) -> str:
    """Join items to `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def on_cores(text: str) -> str:
    """Replace `device` with `core` in a text about a machine without GPUs."""
    return _DEVICE.sub(lambda found: ("C" if found[1] == "D" else "c") + f"ore{found[2]}", text)
