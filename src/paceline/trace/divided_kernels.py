"""Kernels that work on a rank's part under tensor parallelism.

Shoeybi et al., 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.trace.graph import Divided
from paceline.trace.seen import Kernel, Seen
from paceline.trace.tensor.degrees import DividedWeights


@dataclass
class DividedKernels:
    """Tensor parallelism of a forward pass, with kernels by their index.

    Attributes:
        how: division of kernels with products.
        inside: kernels that work on a rank's part of the elements.
        storages: storages that hold a rank's part only.
        reductions: number of collectives, by part of the model.
    """

    how: dict[int, Divided] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)
    reductions: Counter[int] = field(default_factory=Counter)


def divided_kernels(seen: Seen, weights: DividedWeights, *, keeps_logits: bool) -> DividedKernels:
    """Division of a forward pass's kernels: from the columns of a region to its rows.

    Args:
        keeps_logits: True if the loss works on a rank's part of the logits.
    """
    found = DividedKernels()
    joined = weights.gathered - weights.logits if keeps_logits else weights.gathered
    for index, kernel in enumerate(seen.kernels):
        weight = kernel.products[0].weight if kernel.products else ""
        if weight in weights.rows:
            found.how[index] = "k"
        elif weight in weights.columns or weight in weights.gathered:
            found.how[index] = "n"
        elif found.storages.intersection(kernel.reads):
            found.inside.add(index)
            if kernel.products:
                found.how[index] = "batch"
        found.reductions[kernel.part] += (
            weight in weights.rows or weight in weights.gathered or _looks_up(seen, kernel) in weights.tables
        )
        if index in found.inside or (found.how.get(index) == "n" and weight not in joined):
            found.storages.update(kernel.writes)
    return found


def _looks_up(seen: Seen, kernel: Kernel) -> str:
    """The parameter in which a kernel looks up rows, or ""."""
    if kernel.name != "embedding":
        return ""
    return next((name for read in kernel.reads if (name := seen.name_of(read))), "")
