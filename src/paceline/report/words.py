"""Words of sentences and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.planning.plan import Plan

# Not options such as --devices, nor names of classes and files.
_DEVICE = re.compile(r"""(?<!=")(?<!=')(?<![-\w.#/=])([Dd])evice(s?)(?!-(?!seconds)|[\w=])""")


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def on_cores(text: str) -> str:
    """A text for people about a machine without GPUs, whose devices are cores."""
    return _DEVICE.sub(lambda found: ("C" if found[1] == "D" else "c") + f"ore{found[2]}", text)


def named(plan: Plan) -> str:
    """Format a plan; a plan with one rank begins with `dp=1`."""
    text = str(plan)
    return f"dp=1 {text}" if plan.ranks == 1 and text != "dp=1" else text
