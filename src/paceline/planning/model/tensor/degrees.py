"""Weights that tensor parallelism divides at each degree, for the planner.

Found as the split finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from torch import nn

from paceline.job.batch import Batch
from paceline.planning.model.recording.layers import is_embedding
from paceline.planning.model.recording.record import Call
from paceline.planning.model.tensor.proof import Proof, prove, refusals, survey
from paceline.planning.model.tensor.unpaired import find_unpaired, owners_of

_NONE = frozenset[str]()


@dataclass(frozen=True)
class DividedWeights:
    """Names of the parameters that tensor parallelism divides.

    Attributes:
        columns, rows: those of regions; the rows end a region.
        gathered: weights of unpaired linear layers, whose outputs are gathered.
        logits: of these, weights of output heads, which a cross-entropy loss takes without gathering.
        tables: weights of embeddings, divided along the vocabulary.
    """

    columns: frozenset[str] = _NONE
    rows: frozenset[str] = _NONE
    gathered: frozenset[str] = _NONE
    logits: frozenset[str] = _NONE
    tables: frozenset[str] = _NONE

    @property
    def matrices(self) -> frozenset[str]:
        """Names of all of them."""
        return self.columns | self.rows | self.gathered | self.tables


class TensorDegrees:
    """Divided weights of a model by the number of ranks of tp.

    A model that cannot be traced has none. Raises nothing: errors of the model's code are those of a trace.

    Args:
        model: parameters on the meta device or real; they are not read. It is kept.
        example: a batch as the engine gives it to `call`, of real or meta tensors.
    """

    def __init__(self, model: nn.Module, example: Batch, call: Call) -> None:
        self._model, self._example, self._call = model, example, call
        self._survey = survey(model, example, call)
        # by the regions that a degree divides, and their heads that it copies: what was verified at one degree holds at
        # others
        self._proofs: dict[frozenset[tuple[int, frozenset[int]]], Proof] = {}

    @property
    def least(self) -> int:
        """The smallest degree above 1 that divides all heads, or any region.

        2 without either.
        """
        regions = self._survey.regions
        heads = [set(region.degrees) for region in regions if region.attention]
        working = reduce(set.intersection, heads) if heads else {n for region in regions for n in region.degrees}
        return min(working - {1}, default=2)

    def refusals(self, ranks: int) -> list[str]:
        """Reasons for which the split would refuse a number of ranks."""
        return refusals(self._survey.regions, ranks)

    def at(self, ranks: int) -> DividedWeights:
        """The weights that are divided over `ranks` ranks; none if the split would refuse."""
        regions = self._survey.regions
        if refusals(regions, ranks):
            return DividedWeights()
        fitting = frozenset(
            (i, frozenset(heads.heads for heads in region.shared if heads.heads % ranks))
            for i, region in enumerate(regions)
            if region.divides(ranks)
        )
        if fitting not in self._proofs:
            self._proofs[fitting] = prove(self._model, ranks, self._example, self._call, self._survey)
        return self._weights(self._proofs[fitting], ranks)

    def _weights(self, proof: Proof, ranks: int) -> DividedWeights:
        unpaired, owners = find_unpaired(self._model, proof, ranks), owners_of(self._model)
        paths = {id(module): path for path, module in self._model.named_modules()}
        ends = {path for region in proof.regions for path in region.rows}
        rows = frozenset(name for name in proof.divided if any(paths[id(module)] in ends for module, _ in owners[name]))
        tables = {name for name, layers in unpaired.divided.items() if any(self._is_table(path) for path in layers)}
        gathered = {
            name for name, layers in unpaired.divided.items() if not all(self._is_table(path) for path in layers)
        }
        logits = {name for name, layers in unpaired.divided.items() if unpaired.heads & set(layers)}
        return DividedWeights(frozenset(proof.divided - rows), rows, *map(frozenset, (gathered, logits, tables)))

    def _is_table(self, path: str) -> bool:
        return is_embedding(self._model.get_submodule(path))
