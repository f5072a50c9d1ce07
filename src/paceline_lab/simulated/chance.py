"""Random draws of a simulated training: slowest ranks, failures, and the error of scaling.

Everything is drawn from a seeded generator, so that the same command gives the same intervals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.planning.cost import constants
from paceline.planning.cost.failures import FailureCosts
from paceline.stats import Interval

if TYPE_CHECKING:
    from paceline_lab.simulated.published import HeldAgainst

Floats = NDArray[np.float64]
LOW, HIGH = 0.1, 0.9  # quantiles of an 80 % interval
_LEVELS = 600
_MOST_LIVES = 5_000  # of one simulated training


@dataclass(frozen=True)
class Jitter:
    """Distribution of a rank's step times, relative to their mean.

    Normal with the standard deviation `sigma`, or that of measured steps.

    Attributes:
        measured: ascending, relative to their mean; () for a normal distribution.
        words: where it is from, for people.
    """

    sigma: float = 0.0
    measured: tuple[float, ...] = ()
    words: str = ""

    @classmethod
    def of(cls, ratios: Sequence[float], words: str) -> Jitter:
        """The distribution of measured step times, relative to their mean."""
        values = np.asarray(ratios, float)
        return cls(float(values.std(ddof=1)), tuple(sorted(map(float, values))), words)

    def slowest(self, ranks: int, shape: tuple[int, ...], random: np.random.Generator) -> Floats:
        """Draws of the slowest of so many ranks' times.

        In a step the others wait for it. Ranks are independent of each other. The largest of N draws is the U^(1/N)
        quantile, for U uniform. Of measured steps none is slower than the slowest that was measured.
        """
        levels = random.random(shape) ** (1 / ranks)
        if self.measured:
            return np.quantile(self.measured, levels)
        if not self.sigma:
            return np.ones(shape)
        quantile = NormalDist(1.0, self.sigma).inv_cdf
        below, above = np.logspace(-15, math.log10(0.5), _LEVELS), 1 - np.logspace(math.log10(0.5), -15, _LEVELS)[1:]
        table = np.concatenate((below, above))  # dense at both ends
        return np.interp(levels, table, [quantile(float(level)) for level in table])


@dataclass(frozen=True)
class ScaleError:
    """Error of predicted scaling, by what published runs lose beyond it.

    In logarithms of measured over predicted efficiency, per root of the doublings of devices. Sources count alike,
    and of a source its curves.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, held: Sequence[HeldAgainst]) -> ScaleError:
        """The error of some published curves."""
        curves = Counter(one.curve.source for one in held)
        pairs = sorted((one.excess, 1 / curves[one.curve.source] / len(curves)) for one in held)
        return cls(tuple(value for value, _ in pairs), tuple(weight for _, weight in pairs))

    def quantile(self, level: float) -> float:
        """Quantile between the curves."""
        weights = np.asarray(self.weights)
        return float(np.interp(level, np.cumsum(weights) - weights / 2, self.values))

    def draw(self, draws: int, random: np.random.Generator) -> Floats:
        """Errors drawn from it."""
        weights = np.asarray(self.weights)
        return np.interp(random.random(draws), np.cumsum(weights) - weights / 2, self.values)


def drawn_goodput(
    costs: FailureCosts, interval_s: float, wall_s: float, draws: int, random: np.random.Generator
) -> Floats:
    """Goodput of trainings that take so long, each with failures at random.

    Lives of a run are exponential, as in `FailureCosts`, which has the mean over a long time; here is what one training
    may see. Where nothing recovers in place, a life counts the intervals whose checkpoints were written in it.

    Args:
        interval_s: seconds of steps between checkpoints.
        wall_s: wall-clock seconds of a training.
    """
    wall_s = min(wall_s, _MOST_LIVES * costs.between_s)
    expected = wall_s / costs.between_s
    lives = random.exponential(costs.between_s, (draws, math.ceil(expected + 6 * math.sqrt(expected) + 6)))
    gap_s = costs.failure_s if costs.goes_on else 0.0
    ends = np.cumsum(lives + gap_s, axis=1)
    ended = ends <= wall_s
    begins = ends - lives - gap_s
    running = np.minimum(lives, np.maximum(wall_s - begins, 0.0))  # of each life within the training
    stalled_s = costs.stalled_s(interval_s)
    share = interval_s / (interval_s + stalled_s)
    if costs.goes_on:
        share *= 1.0 if costs.in_place else 1 - constants.STATE_SHARE
        useful = share * running
    else:
        begun_s = np.full(lives.shape[1], costs.restart_s)
        begun_s[0] = 0.0  # the first life begins without a restart
        trained = np.maximum(running - begun_s, 0.0)
        kept = np.floor(np.maximum(trained - costs.write_s, 0.0) / (interval_s + stalled_s)) * interval_s
        useful = np.where(ended, kept, share * trained)  # a life that goes on loses nothing
    goodput: Floats = np.minimum(useful.sum(axis=1) / wall_s, 1.0)
    return goodput


def interval_of(draws: Floats, middle: float) -> Interval:
    """The 80 % interval of draws around a value, which is inside."""
    low, high = (float(value) for value in np.quantile(draws, (LOW, HIGH)))
    return Interval(min(low, middle), middle, max(high, middle))
