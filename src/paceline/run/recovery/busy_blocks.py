"""Busy times of past steps, in blocks, of which decisions need several in a row.

On a shared machine ranks are slow in turn for a moment, so what is true of one block only is noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]  # one for each of those that are compared

WARM_UP = 5  # steps left out at the start: allocators and caches are slow there
BLOCK, BLOCK_S = 5, 0.5  # steps of a block, and of work
APART_S = 0.01  # of work between two steps that are looked at, so that short steps cost nothing
BLOCKS = 3  # in a row, in each of which a change has to be worth it


class BusyBlocks:
    """The newest blocks of steps, each with the busy times of all that are compared.

    Args:
        left_out: steps before the first one that counts.
        enough: blocks that a decision needs at least.
        kept: newest blocks that are kept.
    """

    def __init__(self, left_out: int = WARM_UP, enough: int = BLOCKS, kept: int = BLOCKS) -> None:
        self._enough = enough
        self._blocks: deque[tuple[int, list[Floats]]] = deque(maxlen=kept)
        self._rows: list[Floats] = []
        self._first, self._worked_s, self._apart_s, self._left_out = 0, 0.0, 0.0, left_out

    def add(self, step: int, busy_s: Sequence[float]) -> bool:
        """Take in a step; True if it ends a block, and there are enough."""
        if self._left_out > 0:
            self._left_out -= 1
            return False
        self._apart_s += max(busy_s)
        if self._apart_s < APART_S:
            return False
        self._first = self._first if self._rows else step
        self._rows.append(np.maximum(busy_s, 1e-9))
        self._worked_s, self._apart_s = self._worked_s + self._apart_s, 0.0
        if len(self._rows) < BLOCK or self._worked_s < BLOCK_S:
            return False
        self._blocks.append((self._first, self._rows))
        self._rows, self._worked_s = [], 0.0
        return len(self._blocks) >= self._enough

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def first_step(self, blocks: int = BLOCKS) -> int:
        """The first step of so many of the newest blocks."""
        return self._blocks[-blocks][0]

    def newest(self, blocks: int = BLOCKS) -> list[Floats]:
        """The times of all steps in so many of the blocks."""
        return [row for _, rows in list(self._blocks)[-blocks:] for row in rows]

    def medians(self, count: int = BLOCKS, each: int = 1) -> list[Floats]:
        """The median times of parts of so many blocks each, which together are the newest."""
        blocks = [rows for _, rows in self._blocks][-count * each :]
        return [medians([row for rows in blocks[at : at + each] for row in rows]) for at in range(0, len(blocks), each)]


def medians(rows: Sequence[Floats]) -> Floats:
    """The median times over steps."""
    found: Floats = np.median(rows, axis=0)
    return found


def errors(rows: Sequence[Floats], times: Floats) -> Floats:
    """Standard errors of the medians, relative to them; `times` are the medians."""
    # 1.4826: of a standard deviation from a median one; 1.2533: of a median from a mean
    found: Floats = 1.4826 * 1.2533 * medians([abs(row - times) for row in rows]) / times / math.sqrt(len(rows))
    return found


def error_of_slowest(rows: Sequence[Floats], times: Floats) -> float:
    """Standard error of the slowest one's median, relative to it; `times` are the medians."""
    return float(errors(rows, times)[int(times.argmax())])
