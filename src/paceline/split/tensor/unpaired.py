"""Unpaired layers divided in place, with gathered outputs.

Embeddings are divided along the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from paceline.comm import Group
from paceline.split.parts import Parts, shard_parameter
from paceline.split.tensor.layers import HeadSwitch, gathered_forward, vocabulary_forward
from paceline.trace.recording.layers import is_embedding, is_transposed
from paceline.trace.tensor.unpaired import Owners, Unpaired, bias_of, owners_of, rows_of


@dataclass
class DividedUnpaired:
    """Result of `divide_unpaired`.

    Attributes:
        done: path of a layer -> the division that was made.
        head: the switch of the output head.
    """

    done: dict[str, str] = field(default_factory=dict)
    head: HeadSwitch | None = None


def divide_unpaired(model: nn.Module, parts: Parts, tp: Group, found: Unpaired) -> DividedUnpaired:
    """Divide the weights of unpaired layers over the ranks of `tp`, in place."""
    owners, report = owners_of(model), DividedUnpaired()
    for name, paths in found.divided.items():
        layers = [model.get_submodule(path) for path in paths]
        shard(parts, owners, name, tp, 1 if is_transposed(layers[0]) else 0, (rows_of(layers[0]),))
        for module, path in zip(layers, paths, strict=True):
            _divide_layer(module, path, parts, owners, tp, report, head=path in found.heads)
    return report


def _divide_layer(
    module: nn.Module, path: str, parts: Parts, owners: Owners, tp: Group, report: DividedUnpaired, *, head: bool
) -> None:
    """Let an embedding or linear layer compute with its part of the rows."""
    own = rows_of(module)
    if is_embedding(module):
        module.forward = vocabulary_forward(module, tp, own)
        report.done[path] = "vocabulary: each rank looks up the tokens of its rows"
        return
    bias = bias_of(owners, module)
    if bias is not None and "tp" not in parts[bias].sharded:
        shard(parts, owners, bias, tp, 0, (own * tp.size,))
    switch = HeadSwitch(tp.rank * own, (tp.rank + 1) * own) if head else None
    if switch is not None:
        report.head = switch
    module.forward = gathered_forward(module, tp, switch)
    report.done[path] = "gathered: column-parallel, its outputs put together"


def shard(parts: Parts, owners: Owners, name: str, tp: Group, dim: int, sections: Iterable[int]) -> None:
    """Shard a parameter in every module that holds it."""
    module, attribute = owners[name][0]
    shard_parameter(
        module, attribute, parts[name], axis="tp", dim=dim, index=tp.rank, of=tp.size, sections=tuple(sections)
    )
    own = getattr(module, attribute)
    for other, its_attribute in owners[name][1:]:
        setattr(other, its_attribute, own)
