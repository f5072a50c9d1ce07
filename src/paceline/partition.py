"""Partition of a sequence into contiguous parts.

It is used for pipeline stages of a model's blocks, and for fragments of its parameters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

_WHOLE = 2**30  # costs are rounded to multiples of their sum / 2**30, so that parts of equal cost are exactly equal
_Floats = NDArray[np.float64]
_Windows = list[tuple[int, int]]  # for each part, the first and the last element that the next part may begin with


def contiguous(costs: Sequence[float], parts: int, speeds: Sequence[float] | None = None) -> tuple[int, ...]:
    """Cut a sequence into contiguous parts that minimize the time of the slowest part.

    Among equally good cuts, the result has the most even parts (the smallest sum of squared times). The result is
    exact, except that each cost is rounded to 10^-9 of the total cost.

    Args:
        costs: cost of each element, in seconds on a device of speed 1, or in bytes. There are at least `parts` costs.
        speeds: speeds of the parts' devices; None if all are equally fast.

    Returns:
        The number of elements of each part, at least one.

    Raises:
        ValueError: there are more parts than elements.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} elements cannot be cut into {parts} parts")
    if min(costs) == max(costs) and speeds is None:
        least, longer = divmod(count, parts)
        return (least,) * (parts - longer) + (least + 1,) * longer
    whole = float(sum(costs)) or 1.0
    rounded = [round(cost / whole * _WHOLE) for cost in costs]
    until = np.concatenate(([0.0], np.cumsum(rounded)))
    if speeds is None:
        limit, windows = _bounded([int(end) for end in until], parts, max(rounded))
        return _chosen(until, windows, [1.0] * parts, limit)[1]
    windows = [(part, count - parts + part) for part in range(1, parts)] + [(count, count)]
    slowness = [min(speeds) / speed for speed in speeds]
    limit = int(_chosen(until, windows, slowness)[0]) + count
    return _chosen(until, windows, slowness, limit)[1]


def starts(lengths: Sequence[int]) -> list[int]:
    """Return the position of the first element of each part except the first."""
    return list(accumulate(lengths))[:-1]


def _bounded(until: list[int], parts: int, largest: int) -> tuple[int, _Windows]:
    """Find the largest cost of a part in the best cut by bisection.

    Also return the range in which each part may end.
    """
    count = len(until) - 1
    low = max(largest, -(-until[-1] // parts))
    high = min(low + largest, until[-1])  # a full part has room for less than one more element
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _filled(until, parts, middle)[-1] == count else (middle + 1, high)
    low += count  # maximum difference between equal costs after rounding
    lasts, firsts, at = _filled(until, parts, low), [count], count
    for _ in range(parts - 1):
        at = bisect_left(until, until[at] - low)
        firsts.append(at)
    every = range(1, parts + 1)
    return low, [
        (max(first, part), min(last, count - parts + part))
        for part, first, last in zip(every, reversed(firsts), lasts, strict=True)
    ]


def _filled(until: list[int], parts: int, limit: int) -> list[int]:
    """Fill the parts in order up to a limit, and return their ends."""
    ends, at = [], 0
    for _ in range(parts):
        at = bisect_right(until, until[at] + limit, at) - 1
        ends.append(at)
    return ends


def _chosen(
    until: _Floats, windows: _Windows, slowness: Sequence[float], limit: int | None = None
) -> tuple[float, tuple[int, ...]]:
    """Find the best cut by dynamic programming.

    With a time limit, the result has the most even parts; otherwise, the parts with the smallest maximum time.

    Returns:
        The sum of squared times (without a limit, the maximum time), and the number of elements of each part.
    """
    best, start, came = np.zeros(1), 0, []
    for (first, last), slow in zip(windows, slowness, strict=True):
        stop = start + len(best)
        took = (until[first : last + 1] - until[start:stop, None]) * slow
        if stop > first:  # no part is empty
            took[np.arange(start, stop)[:, None] >= np.arange(first, last + 1)] = np.inf
        if limit is None:
            cost = np.maximum(best[:, None], took)
        else:
            took[took > limit] = np.inf
            cost = best[:, None] + took * took
        came.append((start, cost.argmin(axis=0)))
        best, start = cost.min(axis=0), first
    ends = [windows[-1][1]]
    for (first, _), (start, at) in zip(reversed(windows), reversed(came), strict=True):
        ends.append(start + int(at[ends[-1] - first]))
    return float(best[-1]), tuple(late - early for late, early in pairwise(ends))[::-1]
