"""Weights that tensor parallelism divides at each degree.

The planner and the split use the same search.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.errors import PlanProblem
from paceline.job.batch import Batch
from paceline.planning.limits import undivided_heads
from paceline.planning.model.record import Call, record_graph
from paceline.planning.model.recorder import (
    Graph,
    Node,
    Shapes,
    Unfollowable,
    is_embedding,
    is_linear,
    is_transposed,
    weighted,
)
from paceline.planning.model.tensor.regions import (
    EXCHANGES,
    Boundaries,
    Region,
    find_boundaries,
    find_regions,
    rows_of_heads,
)
from paceline.planning.model.tensor.rules import CREATIONS, Label, is_row
from paceline.planning.model.tensor.shape_rewriter import Rewrites, ShapeRewriter, install

_NONE = frozenset[str]()


@dataclass(frozen=True)
class DividedWeights:
    """Names of the parameters that tensor parallelism divides.

    Attributes:
        columns, rows: parameters of the column-parallel and row-parallel layers in regions. A region ends with
            row-parallel layers.
        gathered: weights of unpaired linear layers, whose outputs are gathered.
        logits: weights in `gathered` that belong to output heads. A cross-entropy loss uses their outputs without
            gathering.
        tables: weights of embeddings, which are divided along the vocabulary.
    """

    columns: frozenset[str] = _NONE
    rows: frozenset[str] = _NONE
    gathered: frozenset[str] = _NONE
    logits: frozenset[str] = _NONE
    tables: frozenset[str] = _NONE

    @property
    def matrices(self) -> frozenset[str]:
        """Names of all divided parameters."""
        return self.columns | self.rows | self.gathered | self.tables


class TensorDegrees:
    """Divided weights of a model for each number of tp ranks.

    A model that cannot be traced has no divided weights. Errors in the model's code are not raised here, but by
    `trace`.

    Args:
        model: model to divide. Its parameters are not read, and may be on the meta device.
        example: a batch as the engine passes it to `call`, of real or meta tensors.
    """

    def __init__(self, model: nn.Module, example: Batch, call: Call) -> None:
        self._model, self._example, self._call = model, example, call
        self._survey = survey(model, example, call)
        # maps the regions that a degree divides, and the heads that it copies, to a proof, which also holds for other
        # such degrees
        self._proofs: dict[frozenset[tuple[int, frozenset[int]]], Proof] = {}

    @property
    def least(self) -> int:
        """Smallest degree above 1 that divides all attention heads; without heads, any region.

        It is 2 if there is no such degree.
        """
        regions = self._survey.regions
        heads = [set(region.degrees) for region in regions if region.attention]
        working = reduce(set.intersection, heads) if heads else {n for region in regions for n in region.degrees}
        return min(working - {1}, default=2)

    @property
    def has_plain_head(self) -> bool:
        """True if the model's logits are exactly the output of a linear layer."""
        return any(is_logits for is_logits, _ in _heads(self._survey.graph).values())

    def refusals(self, ranks: int) -> list[PlanProblem]:
        """Return the reasons why the split would refuse this number of ranks."""
        return refusals(self._survey.regions, ranks)

    def at(self, ranks: int) -> DividedWeights:
        """Return the weights that are divided over `ranks` ranks.

        No weights are divided if the split would refuse this number of ranks.
        """
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


# minimum number of elements of an unpaired layer for which gathering its outputs pays off
LARGE = 1 << 20
# maps a parameter's first name to the modules and attribute names that hold it; several if it is tied
Owners = dict[str, list[tuple[nn.Module, str]]]


@dataclass
class Unpaired:
    """Large layers of a model that belong to no region.

    Attributes:
        divided: maps the name of a weight to the paths of the layers that share it.
        heads: paths of the layers that compute the model's logits, if no other operation reads these logits.
        whole: maps the path of a layer to the reason why it stays replicated.
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
    """Find the large layers outside of all regions, and divide those that can be divided.

    With `vocabulary`, embeddings and output heads of any size are divided as well.

    Args:
        partial: names of parameters whose gradients are partial sums; None uses those of the proof.
        own: paths of layers that process only this rank's tokens.
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
        why = None if vocabulary or not words else "dividing the vocabulary is turned off"
        if why is None and weighted(layers[0]).weight.numel() < LARGE and not (words and rows in vocabularies):
            why = "the weight is small and not in a pair of layers that can be divided"
        read = {name, *filter(None, (bias_of(owners, module) for module in layers))}
        why = why or _reason_against(graph, name, read, layer_paths, layers, ranks)
        if why is None and set(own) & set(layer_paths):
            why = "the layer processes only this rank's tokens"
        if why is None and name in (proof.boundaries.parameters if partial is None else partial):
            why = "its gradients are partial sums, which differ between ranks"
        if why is not None:
            found.whole |= dict.fromkeys(layer_paths, why)
            continue
        found.divided[name] = layer_paths
        found.heads |= {path for path in layer_paths if path in heads and heads[path][0]}
    return found


def owners_of(model: nn.Module) -> Owners:
    """Return the modules and attribute names that hold each parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners: Owners = {}
    for module in model.modules():
        for attribute, p in module._parameters.items():
            if p is not None:
                owners.setdefault(names[id(p)], []).append((module, attribute))
    return owners


def rows_of(module: nn.Module) -> int:
    """Return the number of outputs of a linear layer, or of entries in an embedding."""
    return weighted(module).weight.shape[1 if is_transposed(module) else 0]


def bias_of(owners: Owners, module: nn.Module) -> str | None:
    """Return the name of a layer's bias, or None."""
    return next((name for name, places in owners.items() if any(m is module and a == "bias" for m, a in places)), None)


def _reason_against(
    graph: Graph | None, name: str, parameters: Collection[str], paths: list[str], layers: list[nn.Module], ranks: int
) -> str | None:
    """Return the reason why a weight cannot be divided along its rows, or None."""
    rows = rows_of(layers[0])
    if rows % ranks:
        return f"the number of rows, {rows}, is not a multiple of tp={ranks}, but {-(-rows // ranks) * ranks} is"
    if graph is None:
        return "other code may read the weight, because the model cannot be traced"
    if len({is_transposed(module) for module in layers}) > 1:
        return "the weight is tied to a layer that stores the weight transposed"
    if not _uses(graph, name):
        return "the example batch does not use the weight"
    for parameter in parameters:
        if any(node.op not in ("linear", "embedding") or node.path not in paths for node in _uses(graph, parameter)):
            return "code outside of the weight's own layer reads the weight"
    return None


def _uses(graph: Graph, parameter: str) -> list[Node]:
    number = next(
        (v for v, value in enumerate(graph.values) if value.kind == "parameter" and value.name == parameter), None
    )
    return [] if number is None else [graph.nodes[n] for n, _ in graph.values[number].uses]


def _heads(graph: Graph | None) -> dict[str, tuple[bool, int]]:
    """Return the paths of output heads, each with a flag and its width.

    The flag is True if no other operation reads the output.
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


_LAYOUT_ONLY = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "contiguous",
        "clone",
    ),
    *("alias", "detach", "detach_", "to", "_to_copy", "lift_fresh"),
}

_TAKES_SIZES = CREATIONS | {"split", "split_with_sizes", "chunk", "slice", "narrow", "repeat_interleave"}


@dataclass
class Proof:
    """Regions that are verified to be divisible, and the reasons why other layers stay replicated.

    `graph` is None for a model that cannot be traced.
    """

    graph: Graph | None
    regions: list[Region] = field(default_factory=list)
    labels: dict[int, Label] = field(default_factory=dict)
    boundaries: Boundaries = field(default_factory=Boundaries)
    rewrites: Rewrites = field(default_factory=dict)
    why_whole: dict[str, str] = field(default_factory=dict)
    refused: list[PlanProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hints: dict[str, str] = field(default_factory=dict)

    @property
    def divided(self) -> set[str]:
        """Names of the parameters that the regions divide."""
        if self.graph is None:
            return set()
        parameters = {self.graph.values[v].name for v in self.labels if self.graph.values[v].kind == "parameter"}
        return parameters - self.used_in_part.keys()

    @property
    def used_in_part(self) -> dict[str, Label]:
        """Labels of the parameters that every rank holds whole but uses in part."""
        return {} if self.graph is None else rows_of_heads(self.graph, self.labels)


@dataclass
class Survey:
    """Candidate regions of a model for any number of ranks. They are not yet verified.

    `graph` is None for a model that cannot be traced.
    """

    graph: Graph | None
    regions: list[Region] = field(default_factory=list)
    why_whole: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def survey(model: nn.Module, example: Batch, call: Call) -> Survey:
    """Trace a model and find its regions."""
    try:
        graph = record_graph(model, example, call)
        found = find_regions(graph, _hints(model))
    except Exception as error:  # noqa: BLE001 - whatever the model's code raises on tensors without data
        text = " ".join(str(error).split())[:200]
        return Survey(None, notes=[f"the model cannot be traced without data ({text}), so it is not divided"])
    notes = [
        f"{path} depends on the values of its tensors ({why}), so it is not divided"
        for path, why in graph.opaque.items()
    ]
    return Survey(graph, found.regions, found.why_whole, notes)


def prove(model: nn.Module, ranks: int, example: Batch, call: Call, surveyed: Survey | None = None) -> Proof:
    """Find and verify all regions that can be divided over `ranks` ranks.

    `refused` has reasons if attention heads cannot be divided.

    Args:
        surveyed: survey of the model; None creates it.
    """
    found = survey(model, example, call) if surveyed is None else surveyed
    proof = Proof(found.graph, why_whole=dict(found.why_whole), notes=list(found.notes), hints=_hints(model))
    proof.refused = refusals(found.regions, ranks)
    if found.graph is not None and not proof.refused:
        fitting = [region for region in found.regions if region.divides(ranks)]
        for region in found.regions:
            if not region.divides(ranks):
                sizes = " and ".join(str(n) for n in sorted(region.sizes) if n % ranks)
                _leave_whole(
                    proof,
                    region,
                    f"the size {sizes} is not a multiple of tp={ranks}; "
                    f"possible values are tp={_listed(region.degrees)}",
                )
        _keep_proven(proof, _alike(fitting), model, ranks, example, call)
        for node in found.graph.nodes:
            if node.op == "linear" and found.graph.values[node.inputs[1]].name in proof.boundaries.parameters:
                proof.why_whole[node.path] = (
                    "every rank needs all outputs of the layer for its own part of the next layers"
                )
    return proof


def refusals(regions: list[Region], ranks: int) -> list[PlanProblem]:
    """Return a problem for each number of heads that `ranks` ranks cannot divide."""
    bad: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Region]] = {}
    for region in regions:
        if region.attention and not region.divides(ranks):
            shared = tuple(sorted({heads.heads for heads in region.shared}))
            fits = all(n % ranks == 0 for n in region.heads) and all(heads.fits(ranks) for heads in region.shared)
            bad.setdefault(
                (tuple(sorted(region.sizes if fits or not region.heads else region.heads)), shared), []
            ).append(region)
    problems = []
    for (heads, shared), of in bad.items():
        where = _common(of[0].columns) + (f" and {len(of) - 1} more" if of[1:] else "")
        keys = {f"heads of keys and values in {where}": shared}
        if (problem := undivided_heads({f"heads in {where}": heads}, ranks, keys if shared else {})) is not None:
            problems.append(problem)
    return problems


def _listed(degrees: list[int]) -> str:
    return ", ".join(map(str, degrees[:8])) + (", …" if len(degrees) > 8 else "")


def _common(paths: list[str]) -> str:
    return paths[0].rpartition(".")[0] or paths[0]


def _hints(model: nn.Module) -> dict[str, str]:
    """Return the parallel style of each layer according to the model's Hugging Face plan."""
    plan = getattr(model, "_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    styles = {pattern: style for name, style in plan.items() for pattern in (name, f"{prefix}.{name}")}
    return {path: styles[p] for path, _ in model.named_modules() if (p := re.sub(r"\d+", "*", path)) in styles}


def _alike(regions: list[Region]) -> list[list[Region]]:
    """Group the regions of corresponding layers in different blocks. A group is kept or dropped as a whole."""
    groups: dict[str, list[Region]] = {}
    for region in regions:
        groups.setdefault(re.sub(r"\d+", "*", region.columns[0]), []).append(region)
    return list(groups.values())


def _leave_whole(proof: Proof, region: Region, why: str) -> None:
    for path in (*region.columns, *region.rows):
        proof.why_whole[path] = why


def _keep_proven(
    proof: Proof, groups: list[list[Region]], model: nn.Module, ranks: int, example: Batch, call: Call
) -> None:
    """Keep the groups of regions that pass verification.

    All groups are tried at once. If that fails, they are tried one by one.
    """
    together = [region for group in groups for region in group]
    try:
        _verify(proof, together, model, ranks, example, call)
    except Unfollowable:
        for group in groups:
            try:
                _verify(proof, [*proof.regions, *group], model, ranks, example, call)
            except Unfollowable as error:
                for region in group:
                    _leave_whole(proof, region, str(error))


def _verify(proof: Proof, regions: list[Region], model: nn.Module, ranks: int, example: Batch, call: Call) -> None:
    """Trace the model with one rank's shapes, and keep the regions if they match.

    Raises:
        Unfollowable: the trace does not match the rules.
    """
    graph = proof.graph
    assert graph is not None
    labels = {value: label for region in regions for value, label in region.labels_over(ranks).items()}
    boundaries = find_boundaries(graph, labels)
    rewrites = retraced(graph, labels, shapes_of(graph, labels, ranks), model, ranks, example, call)
    proof.regions, proof.labels, proof.boundaries, proof.rewrites = regions, labels, boundaries, rewrites


def shapes_of(graph: Graph, labels: dict[int, Label], ranks: int) -> Shapes:
    """Return the shapes of the parts of divided parameters that one rank holds."""
    named = {v: graph.values[v] for v in labels if graph.values[v].kind == "parameter"}
    return {value.name: labels[v].local(value.shape, ranks) for v, value in named.items()}


def retraced(
    graph: Graph, labels: dict[int, Label], shapes: Shapes, model: nn.Module, ranks: int, example: Batch, call: Call
) -> Rewrites:
    """Return rewrites of the model's code for the division that `labels` describe.

    Raises:
        Unfollowable: no rewrites make the model compute this part.
    """
    rewriter = ShapeRewriter(graph, labels, ranks, model)
    try:
        again = record_graph(model, example, call, shapes, graph.opaque, rewriter)
        if rewriter.rewrites:
            remove = install(model, rewriter.rewrites)
            try:
                again = record_graph(model, example, call, shapes, graph.opaque)
            finally:
                remove()
    except Unfollowable:
        raise
    except Exception as error:
        raise Unfollowable(" ".join(str(error).split())[:200]) from error
    compare(graph, again, labels, ranks)
    return rewriter.rewrites


def compare(graph: Graph, again: Graph, labels: dict[int, Label], ranks: int) -> None:
    """Compare a trace of the divided model with the trace of the whole model.

    Operations that only change the layout are not compared. An error in such an operation appears in the shapes of the
    operations that read its result.

    Raises:
        Unfollowable: an operation is missing, added or replaced, or has a shape that `labels` do not predict.
    """
    full, own = _computing(graph), _computing(again)
    for a, b in zip(full, own, strict=False):
        # partial sums, before they are reduced and perhaps split along the tokens
        whole = a.outputs if is_row(a, labels) else ()
        predicted = [
            labels[v].local(graph.values[v].shape, ranks) if v in labels and v not in whole else graph.values[v].shape
            for v in (*a.inputs, *a.outputs)
        ]
        found = [again.values[v].shape for v in (*b.inputs, *b.outputs)]
        if (a.name, a.path, _numbers(a)) != (b.name, b.path, _numbers(b)) or predicted != found:
            raise Unfollowable(
                f"{a.name} in {a.path or 'the model'} behaves differently on a rank's part than on the whole tensor"
            )
    if len(full) != len(own):
        raise Unfollowable("the divided model does not execute the same operations as the undivided model")


def _computing(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.name not in _LAYOUT_ONLY and node.op not in EXCHANGES]


def _numbers(node: Node) -> list[Any]:
    """Return the numbers among a node's arguments. They must be the same on a rank as in the whole model.

    A changed number means, for example, that a scale was computed from a shape. The flag `enable_gqa` of attention is
    ignored, because a rank with a single key-value head does not need it.
    """
    if node.name in _TAKES_SIZES:
        return []
    named = {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}
    return [leaf for leaf in tree_leaves((node.args, named)) if isinstance(leaf, (int, float))]
