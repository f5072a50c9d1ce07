"""Generations of a run, and waits that end when their generation does.

A generation begins when a rank is lost or joins. Whoever announces generations (`elastic/membership.py`) is not known
here: a rank's `elastic/membership.py` says with `watch_generation` how to see that one is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.errors import ClusterError, SyncError

_LOOK_S = 0.002
# from the moment at which a rank sees a dead peer to that at which the launcher has told of the next generation
_ANNOUNCED_WITHIN_S = 2.0
_WAITED = "_paceline_waited"  # attribute of an error for which that was waited in vain

_is_over: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Generation:
    """One generation of a run.

    `members` are the numbers of its processes, ascending; a member's rank is its place among them.
    """

    number: int
    members: tuple[int, ...]

    def rank_of(self, member: int) -> int:
        """Rank of a process in this generation's group."""
        return self.members.index(member)


def next_number(current: int, wanted: int, own: int) -> int | None:
    """Number of the generation to enter after generation `own`; None while there is none.

    A wanted one is entered by those who agreed to leave the current one for it. Who joins enters it when they are all
    there, and it is the current one: until then they may end the run.
    """
    newest = current if own < 0 else max(current, wanted)
    return newest if newest > own else None


class GenerationOver(SyncError):
    """A wait was broken off, since the ranks meet again in the next generation."""


@contextmanager
def watch_generation(is_over: Callable[[], bool]) -> Iterator[None]:
    """Context in which waits for other ranks end with `GenerationOver` once `is_over` is true."""
    global _is_over
    before, _is_over = _is_over, is_over
    try:
        yield
    finally:
        _is_over = before


def generations_are_watched() -> bool:
    """True if this process takes part in a run whose generations may end."""
    return _is_over is not None


def generation_is_over() -> bool:
    """True if waits for the ranks of this generation are in vain."""
    return _is_over is not None and _is_over()


def ends_generation(error: BaseException) -> bool:
    """True if an error only tells that the generation is over.

    A lost peer may be seen before the generation's end is announced, which is waited for a moment.
    """
    if isinstance(error, GenerationOver):
        return True
    if _is_over is None or not _is_of_other_ranks(error) or getattr(error, _WAITED, False):
        return False
    until = time.monotonic() + _ANNOUNCED_WITHIN_S
    while not _is_over():
        if time.monotonic() > until:
            setattr(error, _WAITED, True)
            return False
        time.sleep(_LOOK_S)
    return True


def _is_of_other_ranks(error: BaseException) -> bool:
    """True for errors of waits for other ranks, or of memory of theirs.

    Those are ours, and torch's `DistError`.
    """
    return isinstance(error, (SyncError, ClusterError)) or any(
        kind.__name__ == "DistError" for kind in type(error).__mro__
    )
