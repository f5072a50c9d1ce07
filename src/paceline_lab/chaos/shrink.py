"""Delta debugging: the shortest part of a schedule that still fails (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], most_tries: int = 32) -> list[T]:
    """A part of `items` that fails, and without any one item does not.

    Args:
        items: they fail together.
        fails: plays a part; not called for one again, nor for none at all.
        most_tries: calls of `fails`, after which the shortest so far is returned.
    """
    failing = list(range(len(items)))
    seen: dict[tuple[int, ...], bool] = {}

    def still_fails(part: list[int]) -> bool:
        key = tuple(part)
        if not part or (key not in seen and len(seen) >= most_tries):
            return False
        if key not in seen:
            seen[key] = fails([items[i] for i in part])
        return seen[key]

    pieces = 2
    while len(failing) > 1:
        size = -(-len(failing) // pieces)
        parts = [failing[i : i + size] for i in range(0, len(failing), size)]
        rests = [[i for i in failing if i not in part] for part in parts]
        found = next((part for part in (*parts, *rests) if len(part) < len(failing) and still_fails(part)), None)
        if found is not None:
            failing, pieces = found, 2 if found in parts else max(pieces - 1, 2)
        elif size == 1:
            break
        else:
            pieces = min(2 * pieces, len(failing))
    return [items[i] for i in failing]
