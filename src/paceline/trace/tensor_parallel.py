"""Products that tensor parallelism divides, found by data flow (Shoeybi et al., 2019, arXiv:1909.08053).

A pair begins with matrices divided by columns, whose results are used only element-wise and in attention, head by head, and ends in
one divided by rows. Unclear parts stay replicated. `split/tensor/division.py` verifies the same on the model itself before it divides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from paceline.trace.graph import Divided
from paceline.trace.seen import Kernel

# number of elements from which on a matrix outside of pairs is divided, and its results gathered
LARGE = 1 << 20
_NONE = frozenset[int]()


@dataclass
class Split:
    """Tensor parallelism of a model, with kernels by their index.

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


def split_of(kernels: Sequence[Kernel], whole: Collection[str], heads: Collection[int], large: Collection[str]) -> Split:
    """Division of a model's kernels.

    Args:
        whole: names of parameters that always stay replicated.
        heads: indices of the products that make a vocabulary's logits, whose loss works on a rank's part of them.
        large: names of parameters that are divided alone if they are in no pair.
    """
    flow, found = _Flow(kernels, whole, set(heads)), Split()
    for row, columns in flow.rows.items():
        if not columns & flow.refused and not flow.leaks(columns):
            found.how.update(dict.fromkeys(columns, "n"))
            found.how[row] = "k"
            found.reductions[kernels[row].part] += 1
    for head in heads:
        found.how[head] = "n"
        found.reductions[kernels[head].part] += 1
    divided = {column for column, how in found.how.items() if how == "n"}
    for index, columns in enumerate(flow.of):
        if columns & divided and index not in found.how:
            found.inside.add(index)
            if kernels[index].products:
                found.how[index] = "batch"
        if index in divided or index in found.inside:
            found.storages.update(kernels[index].writes)
    for index, kernel in enumerate(kernels):
        if index not in found.how and kernel.products and kernel.products[0].weight in large:
            found.how[index] = "n"
            found.reductions[kernel.part] += 1
    return found


@dataclass(frozen=True)
class _Spread:
    """Origin of a tensor: its columns. `crossed` is True if attention has changed the meaning of its last dimension."""

    columns: frozenset[int] = _NONE
    crossed: bool = False


class _Flow:
    """One pass over the kernels, from columns to the rows that end them.

    Attributes:
        of: for each kernel, the columns whose elements it works on.
        rows: for each product that can be divided by rows, the columns that it ends.
        refused: columns whose elements an operation needs together.
    """

    def __init__(self, kernels: Sequence[Kernel], whole: Collection[str], heads: set[int]) -> None:
        self.kernels, self.whole, self.heads = kernels, whole, heads
        self.of: list[frozenset[int]] = []
        self.rows: dict[int, frozenset[int]] = {}
        self.refused: set[int] = set()
        self._spread: dict[int, _Spread] = {}
        # storages of per-head values whose layout is unknown
        self._picked: set[int] = set()
        # kernels that work on each column's elements
        self._consumers: dict[int, list[int]] = defaultdict(list)
        for index, kernel in enumerate(kernels):
            self._pass(index, kernel)

    def leaks(self, columns: frozenset[int]) -> bool:
        """True if something besides rows needs the columns' results. They would have to be gathered for it."""
        wanted: set[int] = set()
        for index in sorted({i for column in columns for i in (column, *self._consumers[column])}, reverse=True):
            kernel = self.kernels[index]
            if index not in self.rows and not wanted.intersection(kernel.writes):
                return True
            wanted.update(kernel.reads)
        return False

    def _pass(self, index: int, kernel: Kernel) -> None:
        given = [self._spread[storage] for storage in kernel.reads if storage in self._spread]
        columns = _NONE.union(*(spread.columns for spread in given))
        crossed = any(spread.crossed for spread in given)
        product = kernel.products[0] if kernel.products else None
        made = _Spread()
        if kernel.picks or (not columns and self._picked.intersection(kernel.reads)):
            self._picked.update(kernel.writes)
        if product is None or not product.weight:
            if self._needs_whole(kernel, columns, crossed):
                self.refused |= columns - self.heads
            made = _Spread(columns, crossed or product is not None)
        elif product.weight in self.whole:
            self.refused |= columns
        elif columns and not columns & self.refused and any(self._width(column) >= product.k for column in columns):
            self.rows[index] = columns
        else:
            self.refused |= columns
            made = _Spread(frozenset((index,)))
        self._note(index, kernel, columns, made)

    def _needs_whole(self, kernel: Kernel, columns: frozenset[int], crossed: bool) -> bool:
        """True if the kernel mixes values of different TP ranks.

        That is a full-width reduction or an indivisible addition; per-head norms do not.
        """
        if kernel.name == "baddbmm" or self._picked.intersection(kernel.reads):
            return True
        if crossed or not kernel.width:
            return False
        return any(kernel.width == self._width(column) or self._width(column) % kernel.width for column in columns)

    def _note(self, index: int, kernel: Kernel, columns: frozenset[int], made: _Spread) -> None:
        self.of.append(columns)
        for column in columns:
            self._consumers[column].append(index)
        for storage in kernel.writes:
            if made.columns:
                self._spread[storage] = made
            else:
                self._spread.pop(storage, None)

    def _width(self, column: int) -> int:
        return self.kernels[column].products[0].n
