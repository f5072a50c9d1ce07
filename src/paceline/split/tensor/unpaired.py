"""Unpaired layers: embeddings sharded along the vocabulary, output heads and large layers with gathered outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from paceline.comm import Group
from paceline.split.parts import Parts, shard_parameter
from paceline.split.tensor.layers import HeadSwitch, gathered_forward, vocabulary_forward
from paceline.split.tensor.proof import Proof
from paceline.split.tensor.trace import Graph, Node, is_embedding, is_linear, is_transposed, weighted

# number of elements from which on an unpaired layer is worth a gather of its outputs
LARGE = 1 << 20


@dataclass
class Unpaired:
    """Result of `divide_unpaired`.

    Attributes:
        done: path of a layer -> the division that was made.
        whole: path of a layer -> reason why it stays replicated.
        head: the switch of the output head.
    """

    done: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    head: HeadSwitch | None = None


def divide_unpaired(model: nn.Module, parts: Parts, tp: Group, proof: Proof, *, vocabulary: bool) -> Unpaired:
    """Divide large layers outside of all regions. With `vocabulary`, embeddings and output heads of any size are divided, too."""
    owners, report = owners_of(model), Unpaired()
    paths = {id(module): path for path, module in model.named_modules()}
    heads = _heads(proof.graph)
    vocabularies = {rows for _, rows in heads.values()}
    for name, places in owners.items():
        layers = [module for module, attribute in places if attribute == "weight" and (is_linear(module) or is_embedding(module))]
        if "tp" in parts[name].sharded or not layers:
            continue
        rows, layer_paths = _rows(layers[0]), [paths[id(module)] for module in layers]
        words = any(path in heads for path in layer_paths) or any(is_embedding(module) for module in layers)
        why = None if vocabulary or not words else "the vocabulary is not to be divided"
        if why is None and weighted(layers[0]).weight.numel() < LARGE and not (words and rows in vocabularies):
            why = "small, and no part of a pair"
        why = why or _reason_against(proof, owners, name, layer_paths, layers, tp.size)
        if why is not None:
            report.whole |= dict.fromkeys(layer_paths, why)
            continue
        shard(parts, owners, name, tp, 1 if is_transposed(layers[0]) else 0, (rows,))
        for module, path in zip(layers, layer_paths, strict=True):
            _divide_layer(module, path, parts, owners, tp, report, head=path in heads and heads[path][0])
    return report


def _rows(module: nn.Module) -> int:
    return weighted(module).weight.shape[1 if is_transposed(module) else 0]


def _divide_layer(module: nn.Module, path: str, parts: Parts, owners: Owners, tp: Group, report: Unpaired, *, head: bool) -> None:
    """Let an embedding or linear layer compute with its part of the rows."""
    own = _rows(module)
    if is_embedding(module):
        module.forward = vocabulary_forward(module, tp, own)
        report.done[path] = "vocabulary: each rank looks up the tokens of its rows"
        return
    bias = _bias(owners, module)
    if bias is not None and "tp" not in parts[bias].sharded:
        shard(parts, owners, bias, tp, 0, (own * tp.size,))
    switch = HeadSwitch(tp.rank * own, (tp.rank + 1) * own) if head else None
    if switch is not None:
        report.head = switch
    module.forward = gathered_forward(module, tp, switch)
    report.done[path] = "gathered: column-parallel, its outputs put together"


def _bias(owners: Owners, module: nn.Module) -> str | None:
    return next((name for name, places in owners.items() if any(m is module and a == "bias" for m, a in places)), None)


def _reason_against(proof: Proof, owners: Owners, name: str, layer_paths: list[str], layers: list[nn.Module], ranks: int) -> str | None:
    """Reason why a matrix cannot be divided along its rows with gathered outputs, or None."""
    rows, graph, sequence = _rows(layers[0]), proof.graph, proof.sequence
    if rows % ranks:
        return f"its {rows} rows are no multiple of tp={ranks}; a size of {-(-rows // ranks) * ranks} would be"
    if graph is None:
        return "the model cannot be traced, so other code may read it"
    if len({is_transposed(module) for module in layers}) > 1:
        return "it is tied to a layer that holds it transposed"
    if not _uses(graph, name):
        return "the example does not use it"
    for parameter in {name, *(_bias(owners, module) for module in layers)} - {None}:
        if any(node.op not in ("linear", "embedding") or node.path not in layer_paths for node in _uses(graph, str(parameter))):
            return "it is read by other code than its own layer"
    if sequence is not None and sequence.inside & set(layer_paths):
        return "it works on this rank's tokens only"
    if name in (sequence.parameters if sequence is not None else proof.boundaries.parameters):
        return "its gradients are partial sums, other ones on each rank"
    return None


def _uses(graph: Graph, parameter: str) -> list[Node]:
    """The operations that read a parameter."""
    number = next((v for v, value in enumerate(graph.values) if value.kind == "parameter" and value.name == parameter), None)
    return [] if number is None else [graph.nodes[n] for n, _ in graph.values[number].uses]


def _heads(graph: Graph | None) -> dict[str, tuple[bool, int]]:
    """Output heads: linear layers that make the model's output, as wide as an embedding's rows.

    Each path has (True if nothing else reads the output, width).
    """
    if graph is None:
        return {}
    rows = {graph.values[node.inputs[1]].shape[0] for node in graph.nodes if node.op == "embedding"}
    found = {}
    for node in graph.nodes:
        out = graph.values[node.outputs[0]] if node.outputs else None
        if node.op == "linear" and out is not None and out.shape[-1] in rows and node.outputs[0] in graph.outputs:
            found[node.path] = (node.outputs[0] == graph.logits and not out.uses, out.shape[-1])
    return found


Owners = dict[str, list[tuple[nn.Module, str]]]


def owners_of(model: nn.Module) -> Owners:
    """Modules and attribute names that hold each parameter, by its first name. There are several if it is tied."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners: Owners = {}
    for module in model.modules():
        for attribute, p in module._parameters.items():
            if p is not None:
                owners.setdefault(names[id(p)], []).append((module, attribute))
    return owners


def shard(parts: Parts, owners: Owners, name: str, tp: Group, dim: int, sections: Iterable[int]) -> None:
    """Shard a parameter in every module that holds it."""
    module, attribute = owners[name][0]
    shard_parameter(module, attribute, parts[name], axis="tp", dim=dim, index=tp.rank, of=tp.size, sections=tuple(sections))
    own = getattr(module, attribute)
    for other, its_attribute in owners[name][1:]:
        setattr(other, its_attribute, own)
