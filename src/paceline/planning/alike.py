"""Measured runs that are like a plan: what their errors say of its prediction.

A Gaussian process (Rasmussen and Williams, 2006, chapter 2) over a few properties of a run, for each framework.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.planning.cost.layout import Layout

Floats = NDArray[np.float64]

# Standard deviations of logarithms: of what runs that are alike have in common beside their factor, and of each around
# that, of which one in some is far off (Student's t of so many degrees of freedom)
COMMON, OWN, DEGREES = 0.10, 0.05, 4.0
# Doublings by which two runs differ to have e^-½ of it in common: of a microbatch's tokens and of ranks of tp, which
# make the shapes of products; of a sample's FLOPs; of stages, microbatches and ranks. Round values near those with
# which set-aside rows, each left out in turn, are predicted best by the others of their table
SHAPES, WORK, OTHERS = 0.6, 1.0, 4.0
_ROUNDS = 15


@dataclass(frozen=True, eq=False)
class Alike:
    """Errors of measured runs, to be asked for those of others.

    Attributes:
        places: of the runs, `_place` of each.
        frameworks: of the runs.
        left: of each run, the logarithm that the other runs do not explain.
    """

    places: Floats
    frameworks: tuple[str, ...]
    weights: Floats
    left: tuple[float, ...]

    def log(self, layout: Layout) -> float:
        """Logarithm of measured / predicted that is expected of a run beside its factor."""
        return float(_common([_place(layout)], [layout.framework.name], self.places, self.frameworks)[0] @ self.weights)


def alike(layouts: Sequence[Layout], logs: Sequence[float]) -> Alike:
    """Errors of measured runs, as those that are like them share these.

    Args:
        logs: logarithms of measured / predicted that factors leave. Only differences between runs of a framework count.
    """
    places, frameworks = np.array([_place(one) for one in layouts]), tuple(one.framework.name for one in layouts)
    by_framework: dict[str, list[float]] = defaultdict(list)
    for name, log in zip(frameworks, logs, strict=True):
        by_framework[name].append(log)
    errors = np.array([log - median(by_framework[name]) for name, log in zip(frameworks, logs, strict=True)])
    common, trust = _common(places, frameworks, places, frameworks), np.ones(len(errors))
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(common + np.diag(OWN**2 / trust))
        weights = inverse @ errors
        trust = (DEGREES + 1) / (DEGREES + ((errors - common @ weights) / OWN) ** 2)
    left = weights / np.diag(inverse)  # of each run, predicted by the others (the book's section 5.4.2)
    return Alike(places, frameworks, weights, tuple(left.tolist()))


def _common(places: ArrayLike, names: Sequence[str], others: ArrayLike, other_names: Sequence[str]) -> Floats:
    """Covariances of each of some runs with each of others."""
    apart = (np.asarray(places)[:, None] - np.asarray(others)) ** 2
    same = np.asarray(names)[:, None] == np.asarray(other_names)
    return np.asarray(COMMON**2 * np.exp(-0.5 * apart.sum(axis=-1)) * same)


def _place(layout: Layout) -> tuple[float, ...]:
    """Properties of a run, in lengths over which errors change."""
    shapes = log2(layout.samples * max(layout.trace.tokens, 1)), log2(layout.tp)
    others = log2(layout.pp), log2(layout.microbatches), log2(layout.ranks)
    return (
        *(value / SHAPES for value in shapes),
        log2(max(layout.trace.flops, 1.0)) / WORK,
        *(value / OTHERS for value in others),
    )
