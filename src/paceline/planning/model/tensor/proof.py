"""Verification of tensor-parallel regions: a second trace, on the shapes of a rank's part.

The divided model must do the same operations as the whole one. A region that fails the check stays replicated, and so
do the same layers in all other blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.job.batch import Batch
from paceline.planning.limits import undivided_heads
from paceline.planning.model.recording.graph import Graph, Node, Shapes, Unfollowable
from paceline.planning.model.recording.record import Call, record_graph
from paceline.planning.model.tensor.regions import EXCHANGES, Boundaries, Region, find_boundaries, find_regions
from paceline.planning.model.tensor.rules import CREATIONS, Label, is_row
from paceline.planning.model.tensor.shape_rewriter import Rewrites, ShapeRewriter, install
from paceline.planning.model.tensor.shared_heads import rows_of_heads

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
    """Regions that may be divided, and reasons for the layers that may not.

    `graph` is None for a model that cannot be traced.
    """

    graph: Graph | None
    regions: list[Region] = field(default_factory=list)
    labels: dict[int, Label] = field(default_factory=dict)
    boundaries: Boundaries = field(default_factory=Boundaries)
    rewrites: Rewrites = field(default_factory=dict)
    why_whole: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
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
        """Labels of parameters that every rank holds whole and uses a part of, by name."""
        return {} if self.graph is None else rows_of_heads(self.graph, self.labels)


@dataclass
class Survey:
    """Regions of a model for any number of ranks, not yet verified.

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
        return Survey(None, notes=[f"the model cannot be traced without data ({text}): it stays whole"])
    notes = [
        f"{path} depends on its data, so it stays whole on every rank ({why})" for path, why in graph.opaque.items()
    ]
    return Survey(graph, found.regions, found.why_whole, notes)


def prove(model: nn.Module, ranks: int, example: Batch, call: Call, surveyed: Survey | None = None) -> Proof:
    """Find everything that can be divided over `ranks` ranks. `refused` has reasons if attention heads cannot.

    Args:
        surveyed: the model's survey, if there is one already.
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
                    f"its size {sizes} is not a multiple of tp={ranks}; tp={_listed(region.degrees)} divide it",
                )
        _keep_proven(proof, _alike(fitting), model, ranks, example, call)
        for node in found.graph.nodes:
            if node.op == "linear" and found.graph.values[node.inputs[1]].name in proof.boundaries.parameters:
                proof.why_whole[node.path] = "every rank uses all of its outputs, for its own part of the next layers"
    return proof


def refusals(regions: list[Region], ranks: int) -> list[str]:
    """Reasons against a degree, one for each number of heads that it does not divide."""
    bad: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Region]] = {}
    for region in regions:
        if region.attention and not region.divides(ranks):
            shared = tuple(sorted({heads.heads for heads in region.shared}))
            fits = all(n % ranks == 0 for n in region.heads) and all(heads.fits(ranks) for heads in region.shared)
            bad.setdefault(
                (tuple(sorted(region.sizes if fits or not region.heads else region.heads)), shared), []
            ).append(region)
    reasons = []
    for (heads, shared), of in bad.items():
        where = _common(of[0].columns) + (f" and {len(of) - 1} more" if of[1:] else "")
        keys = {f"heads of keys and values in {where}": shared}
        reasons.append(f"tp={ranks} {undivided_heads({f'heads in {where}': heads}, ranks, keys if shared else {})}")
    return reasons


def _listed(degrees: list[int]) -> str:
    return ", ".join(map(str, degrees[:8])) + (", …" if len(degrees) > 8 else "")


def _common(paths: list[str]) -> str:
    return paths[0].rpartition(".")[0] or paths[0]


def _hints(model: nn.Module) -> dict[str, str]:
    """Parallel styles that Hugging Face's own plan gives to this model's layers."""
    plan = getattr(model, "_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    styles = {pattern: style for name, style in plan.items() for pattern in (name, f"{prefix}.{name}")}
    return {path: styles[p] for path, _ in model.named_modules() if (p := re.sub(r"\d+", "*", path)) in styles}


def _alike(regions: list[Region]) -> list[list[Region]]:
    """Groups of the same layers in different blocks, which are kept or dropped together."""
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
    """Keep the groups of regions that pass the second trace. All are tried at once, and if that fails one by one."""
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
    """Trace the model with a rank's shapes, and add the regions if that succeeds. It must do what the rules predict.

    Raises:
        Unfollowable: it does not.
    """
    graph = proof.graph
    assert graph is not None
    labels = {value: label for region in regions for value, label in region.labels_over(ranks).items()}
    boundaries = find_boundaries(graph, labels)
    rewrites = retraced(graph, labels, shapes_of(graph, labels, ranks), model, ranks, example, call)
    proof.regions, proof.labels, proof.boundaries, proof.rewrites = regions, labels, boundaries, rewrites


def shapes_of(graph: Graph, labels: dict[int, Label], ranks: int) -> Shapes:
    """Shapes of a rank's parts of the divided parameters."""
    named = {v: graph.values[v] for v in labels if graph.values[v].kind == "parameter"}
    return {value.name: labels[v].local(value.shape, ranks) for v, value in named.items()}


def retraced(
    graph: Graph, labels: dict[int, Label], shapes: Shapes, model: nn.Module, ranks: int, example: Batch, call: Call
) -> Rewrites:
    """Rewrites of code with which the model does on a rank's part what `labels` predict.

    Raises:
        Unfollowable: there are none.
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
    """Compare a trace of the divided model with that of the whole one.

    Operations that only change the layout are not compared: a mistake in them shows in the shapes of the operations
    that read them.

    Raises:
        Unfollowable: an operation is missing, new or another one, or has another shape than `labels` predict.
    """
    full, own = _computing(graph), _computing(again)
    for a, b in zip(full, own, strict=False):
        # partial sums, before they are joined and perhaps cut along the tokens
        whole = a.outputs if is_row(a, labels) else ()
        predicted = [
            labels[v].local(graph.values[v].shape, ranks) if v in labels and v not in whole else graph.values[v].shape
            for v in (*a.inputs, *a.outputs)
        ]
        found = [again.values[v].shape for v in (*b.inputs, *b.outputs)]
        if (a.name, a.path, _numbers(a)) != (b.name, b.path, _numbers(b)) or predicted != found:
            raise Unfollowable(
                f"{a.name} in {a.path or 'the model'} does not work on a rank's part as it does on the whole"
            )
    if len(full) != len(own):
        raise Unfollowable("the divided model does not do the same operations as the whole one")


def _computing(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.name not in _LAYOUT_ONLY and node.op not in EXCHANGES]


def _numbers(node: Node) -> list[Any]:
    """Numbers among a node's arguments, which must be the same on a rank's part.

    A scale, for instance, may be computed from a shape. Attention needs no permission for groups of heads where a rank
    has a single one.
    """
    if node.name in _TAKES_SIZES:
        return []
    named = {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}
    return [leaf for leaf in tree_leaves((node.args, named)) if isinstance(leaf, (int, float))]
