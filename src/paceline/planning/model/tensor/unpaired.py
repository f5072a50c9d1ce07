"""Unpaired layers: embeddings, output heads and other large layers, divided along their rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from paceline.planning.model.recording.graph import Graph, Node
from paceline.planning.model.recording.layers import is_embedding, is_linear, is_transposed, weighted
from paceline.planning.model.tensor.proof import Proof

# number of elements from which on an unpaired layer is worth a gather of its outputs
LARGE = 1 << 20
# parameter, by its first name -> the modules and attribute names that hold it, several if it is tied
Owners = dict[str, list[tuple[nn.Module, str]]]


@dataclass
class Unpaired:
    """Unpaired layers of a model.

    Attributes:
        divided: name of a weight -> paths of the layers that share it.
        heads: of these layers, those that make the model's logits, which nothing else reads.
        whole: path of a layer -> reason why it stays replicated.
    """

    divided: dict[str, list[str]] = field(default_factory=dict)
    heads: set[str] = field(default_factory=set)
    whole: dict[str, str] = field(default_factory=dict)


def find_unpaired(
    model: nn.Module,
    proof: Proof,
    ranks: int,
    *,
    vocabulary: bool = True,
    partial: Collection[str] | None = None,
    own: Collection[str] = (),
) -> Unpaired:
    """Find large layers outside of all regions.

    With `vocabulary`, embeddings and output heads of any size are divided, too.

    Args:
        partial: names of parameters whose gradients are partial sums; None: those of the proof.
        own: paths of layers that work on a rank's tokens only.
    """
    owners, found, graph = owners_of(model), Unpaired(), proof.graph
    paths = {id(module): path for path, module in model.named_modules()}
    heads = _heads(graph)
    vocabularies = {rows for _, rows in heads.values()}
    for name, places in owners.items():
        layers = [
            module
            for module, attribute in places
            if attribute == "weight" and (is_linear(module) or is_embedding(module))
        ]
        if name in proof.divided or name in proof.used_in_part or not layers:
            continue
        rows, layer_paths = rows_of(layers[0]), [paths[id(module)] for module in layers]
        words = any(path in heads for path in layer_paths) or any(is_embedding(module) for module in layers)
        why = None if vocabulary or not words else "the vocabulary is not to be divided"
        if why is None and weighted(layers[0]).weight.numel() < LARGE and not (words and rows in vocabularies):
            why = "small, and no part of a pair"
        read = {name, *filter(None, (bias_of(owners, module) for module in layers))}
        why = why or _reason_against(graph, name, read, layer_paths, layers, ranks)
        if why is None and set(own) & set(layer_paths):
            why = "it works on this rank's tokens only"
        if why is None and name in (proof.boundaries.parameters if partial is None else partial):
            why = "its gradients are partial sums, other ones on each rank"
        if why is not None:
            found.whole |= dict.fromkeys(layer_paths, why)
            continue
        found.divided[name] = layer_paths
        found.heads |= {path for path in layer_paths if path in heads and heads[path][0]}
    return found


def owners_of(model: nn.Module) -> Owners:
    """Modules and attribute names that hold each parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners: Owners = {}
    for module in model.modules():
        for attribute, p in module._parameters.items():
            if p is not None:
                owners.setdefault(names[id(p)], []).append((module, attribute))
    return owners


def rows_of(module: nn.Module) -> int:
    """Number of a layer's rows: outputs of a linear layer, entries of an embedding."""
    return weighted(module).weight.shape[1 if is_transposed(module) else 0]


def bias_of(owners: Owners, module: nn.Module) -> str | None:
    """Name of a layer's bias, or None."""
    return next((name for name, places in owners.items() if any(m is module and a == "bias" for m, a in places)), None)


def _reason_against(
    graph: Graph | None, name: str, parameters: Collection[str], paths: list[str], layers: list[nn.Module], ranks: int
) -> str | None:
    """Reason why a weight cannot be divided along its rows, or None.

    Its layers have these parameters.
    """
    rows = rows_of(layers[0])
    if rows % ranks:
        return f"its {rows} rows are not a multiple of tp={ranks}; a size of {-(-rows // ranks) * ranks} would be"
    if graph is None:
        return "the model cannot be traced, so other code may read it"
    if len({is_transposed(module) for module in layers}) > 1:
        return "it is tied to a layer that holds it transposed"
    if not _uses(graph, name):
        return "the example does not use it"
    for parameter in parameters:
        if any(node.op not in ("linear", "embedding") or node.path not in paths for node in _uses(graph, parameter)):
            return "it is read by other code than its own layer"
    return None


def _uses(graph: Graph, parameter: str) -> list[Node]:
    """The operations that read a parameter."""
    number = next(
        (v for v, value in enumerate(graph.values) if value.kind == "parameter" and value.name == parameter), None
    )
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
