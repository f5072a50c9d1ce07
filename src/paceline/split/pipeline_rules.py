"""What the arithmetic of a pipeline allows: microbatches, stages and cut points."""

from __future__ import annotations

from collections.abc import Sequence


def fitting_microbatches(shares: Sequence[int], wanted: int) -> int:
    """The largest number of microbatches up to `wanted` that divides what every reader has of a batch, so that all are equal."""
    some = [n for n in shares if n] or [1]
    return next(m for m in range(wanted, 0, -1) if not any(n % m for n in some))


def reasons_against_cut(names: Sequence[str], stages: int, each: str) -> list[str]:
    """What is wrong with the number of cut points; `each` says how many stages there are."""
    found = []
    if len(names) != stages - 1:
        found.append(f"{each}, so cut names the {stages - 1} modules that begin the second and later ones; it names {len(names)}")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        found.append(f"cut names {', '.join(twice)} twice; every stage begins elsewhere")
    return found


def interleaves(ranks: int, microbatches: int) -> bool:
    """Whether interleaved 1F1B can deal the microbatches into equal rounds of at least one for every rank, or all in one."""
    return microbatches % max(1, microbatches // ranks) == 0
