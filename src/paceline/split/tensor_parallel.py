"""Tensor parallelism for any module: ranks with the same samples divide its matrices.

A trace of the model, rather than a list of architectures, determines the regions to divide (`planning/model/tensor`).
To verify a division, the divided model is traced again. It must run the same operations on tensors with exactly the
shapes of a rank's shards. Layers that fail this check stay replicated, or gather their outputs if they are large. The
results are therefore correct for every model; only speed and memory differ.

Inside a divided region, dropout draws different masks on each rank. Elsewhere, dropout draws the same masks on all
ranks (`separate_random_streams`).

On GPUs, only the process group differs. inductor could overlap matrix products with the functional collectives of a
compiled graph (asynchronous TP), but this has not been tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.planning.limits import undivided_tokens
from paceline.planning.model.forward_pass import find_blocks
from paceline.planning.model.record import Call
from paceline.planning.model.recorder import (
    Entry,
    Graph,
    Node,
    Unfollowable,
    is_embedding,
    is_transposed,
    unrecorded,
)
from paceline.planning.model.tensor.degrees import (
    Owners,
    Proof,
    Unpaired,
    bias_of,
    find_unpaired,
    owners_of,
    prove,
    retraced,
    rows_of,
    shapes_of,
)
from paceline.planning.model.tensor.regions import EXCHANGES, Boundaries, find_boundaries
from paceline.planning.model.tensor.rules import Label, implied, is_row
from paceline.planning.model.tensor.shape_rewriter import install
from paceline.split.layout import Parts, ShardLayout, shard_parameter
from paceline.split.tensor_layers import (
    TOKENS,
    HeadSwitch,
    column_forward,
    copy,
    gather,
    gather_partial,
    gathered_forward,
    part_forward,
    reduce,
    reduce_scatter,
    row_forward,
    separate_random_streams,
    take,
    vocabulary_forward,
)

Convert = Callable[[Tensor], Tensor]


@dataclass
class TensorReport:
    """Result of `shard_tensors`, which describes the division of every layer with a matrix.

    Attributes:
        done: for each divided module, by path, a phrase with `column`, `row`, `vocabulary` or `gathered`.
        whole: for each linear layer or embedding that every rank holds in full, by path, the reason.
        notes: notes about the model as a whole.
        vocabulary_head: the setting of the output head, if its output is the output of the model and is divided over
            the vocabulary; otherwise None.
    """

    done: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    vocabulary_head: HeadSwitch | None = None

    def __str__(self) -> str:
        lines = [f"{path}: {what}" for path, what in self.done.items()]
        return "\n".join([*lines, *(f"{path}: whole, {why}" for path, why in self.whole.items()), *self.notes])


def shard_tensors(
    model: nn.Module,
    parts: Parts,
    tp: Group,
    example: Batch,
    call: Call,
    *,
    sequence: bool = False,
    vocabulary: bool = True,
) -> TensorReport:
    """Divide the matrices of a model over the ranks of `tp`, in place.

    Every rank must call this function, which does not communicate.

    Args:
        parts: the rank's part of each parameter, which the function updates.
        example: a batch of real or meta tensors, in the format of the engine.
        call: function that runs the model on a batch, like the engine.
        sequence: whether to also divide the activations between matrices, along the tokens, within the repeated blocks.
        vocabulary: whether to also divide the embeddings and the output head, along the vocabulary.

    Raises:
        PlanError: the heads cannot be divided (the message lists possible degrees), or `sequence` is set but the model
            has no repeated blocks or its tokens cannot be divided.
    """
    if tp.size == 1:
        return TensorReport()
    proof = prove(model, tp.size, example, call)
    if proof.refused:
        raise PlanError.of_problems(proof.refused)
    report = TensorReport(whole=dict(proof.why_whole), notes=proof.notes)
    region = prove_sequence(proof, model, tp.size, example, call) if sequence else None
    inside: dict[str, Any] = {}
    if region is not None:
        report.notes.append(f"between the matrices, {region} divides the tokens")
        inside = {"partial": region.parameters, "own": region.inside}
    unpaired = find_unpaired(model, proof, tp.size, vocabulary=vocabulary, **inside)
    _divide_regions(model, parts, tp, proof, region, report)
    _join_regions(model, tp, proof, region)
    if proof.graph is not None:
        graph, labels = (proof.graph, proof.labels) if region is None else (region.graph, region.labels)
        separate_random_streams(model, graph, labels, tp.rank)
    done = _divide_unpaired(model, parts, tp, unpaired, report)
    report.done |= done
    report.whole = {path: why for path, why in (unpaired.whole | report.whole).items() if path not in done}
    if not report.done:
        report.notes.append(
            f"nothing can be divided: all {tp.size} ranks of tp compute the same, so use dp or fsdp instead"
        )
    return report


def _divide_regions(
    model: nn.Module, parts: Parts, tp: Group, proof: Proof, sequence: SequenceRegion | None, report: TensorReport
) -> None:
    """Shard all parameters of the regions, and rewrite code that uses full sizes."""
    if proof.graph is None:
        return
    owners = owners_of(model)
    for v, label in proof.labels.items():
        value = proof.graph.values[v]
        if value.kind == "parameter" and value.name not in proof.used_in_part:
            shard(parts, owners, value.name, tp, label.dim, label.sections)
    install(model, proof.rewrites)
    for region in proof.regions:
        for paths, style in ((region.columns, "column"), (region.rows, "row")):
            for path in paths:
                from_plan = ", as in the model's own tp_plan" if proof.hints.get(path, "").startswith(style[:3]) else ""
                report.done[path] = f"{style}{from_plan}"
    for module in {model.get_submodule(path) for region in proof.regions for path in region.columns}:
        if is_transposed(module):
            module.forward = column_forward(module)
    _use_rows_of_heads(model, parts, owners, tp, proof, report)
    for name in sequence.parameters if sequence is not None else proof.boundaries.parameters:
        parts[name].summed.add("tp")


def _use_rows_of_heads(
    model: nn.Module, parts: Parts, owners: Owners, tp: Group, proof: Proof, report: TensorReport
) -> None:
    """Limit projections to shared heads to the rows of this rank's heads.

    Every rank holds the whole projection, so the gradient of the projection is a partial sum.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    rows: dict[str, dict[str, ShardLayout]] = {}
    for name, label in proof.used_in_part.items():
        parts[name].summed.add("tp")
        of = label.parts(tp.size)
        for module, attribute in owners[name]:
            whole = ShardLayout.whole(getattr(module, attribute).shape)
            own = whole.divide(label.dim, tp.rank // label.copies, of, label.sections)
            rows.setdefault(paths[id(module)], {})[attribute] = own
            report.done[paths[id(module)]] = f"column, one of {of} parts on {label.copies} ranks each"
    for path, kept in rows.items():
        module = model.get_submodule(path)
        module.forward = part_forward(module, kept["weight"], kept.get("bias"))


def _join_regions(model: nn.Module, tp: Group, proof: Proof, sequence: SequenceRegion | None) -> None:
    """Install copies of replicated tensors before regions, and sums after row-parallel layers."""
    if proof.graph is None:
        return
    for entry, value in proof.boundaries.copies:
        if sequence is not None and (entry.path, value) in sequence.gathers:
            convert: Convert = partial(gather_partial, group=tp)
        else:
            convert = partial(copy, group=tp, fresh=_fresh(proof.graph, entry, value), layer=entry.path)
        convert_arguments(model, entry, value, convert)
    for path in {path for region in proof.regions for path in region.rows}:
        module = model.get_submodule(path)
        join = partial(reduce_scatter if sequence is not None and path in sequence.scatters else reduce, group=tp)
        module.forward = row_forward(module, join)
    for path in sequence.results if sequence is not None else proof.boundaries.results:
        convert_result(model.get_submodule(path), partial(copy, group=tp, layer=path))
    if sequence is not None:
        for entry, value in sequence.more_copies:
            convert_arguments(model, entry, value, partial(copy, group=tp, layer=entry.path))
        sequence.exchange(model, partial(gather, group=tp, dim=TOKENS), partial(take, group=tp))


def _fresh(graph: Graph, entry: Entry, value: int) -> bool:
    """Return True if only matrix products in the call read the value.

    In this case, no other code reads the gradients of the value.
    """
    inside = [graph.nodes[n] for n, _ in graph.values[value].uses if entry.start <= n < entry.stop]
    return all(node.name == "linear" and isinstance(node.op, str) for node in inside)


def _divide_unpaired(
    model: nn.Module, parts: Parts, tp: Group, found: Unpaired, report: TensorReport
) -> dict[str, str]:
    """Divide the weights of unpaired layers in place, and return the divisions by path."""
    owners, done = owners_of(model), dict[str, str]()
    for name, paths in found.divided.items():
        layers = [model.get_submodule(path) for path in paths]
        shard(parts, owners, name, tp, 1 if is_transposed(layers[0]) else 0, (rows_of(layers[0]),))
        for module, path in zip(layers, paths, strict=True):
            own = rows_of(module)
            if is_embedding(module):
                module.forward = vocabulary_forward(module, tp, own)
                done[path] = "vocabulary: each rank looks up the tokens of its rows"
                continue
            bias = bias_of(owners, module)
            if bias is not None and "tp" not in parts[bias].sharded:
                shard(parts, owners, bias, tp, 0, (own * tp.size,))
            switch = HeadSwitch(tp.rank * own, (tp.rank + 1) * own) if path in found.heads else None
            report.vocabulary_head = switch or report.vocabulary_head
            module.forward = gathered_forward(module, tp, switch)
            done[path] = "gathered: column-parallel, its outputs put together"
    return done


def shard(parts: Parts, owners: Owners, name: str, tp: Group, dim: int, sections: Iterable[int]) -> None:
    """Shard a parameter in every module that has it."""
    module, attribute = owners[name][0]
    shard_parameter(
        module, attribute, parts[name], axis="tp", dim=dim, index=tp.rank, of=tp.size, sections=tuple(sections)
    )
    own = getattr(module, attribute)
    for other, its_attribute in owners[name][1:]:
        setattr(other, its_attribute, own)


@dataclass
class BlockSpan:
    """A span of consecutive blocks.

    The value `enters` is split before the first block, and the value `leaves` is gathered after the last block.
    """

    first: Entry
    last: Entry
    enters: int
    leaves: int


@dataclass
class FullSequenceModule:
    """A module inside a block that needs all tokens.

    Every rank computes the same values in it.

    The values `enters` are gathered before the module, and the value `leaves` is split after it.
    """

    entry: Entry
    enters: list[int]
    leaves: int


@dataclass
class SequenceRegion:
    """A sequence-parallel region: all values and modules that are divided along the tokens.

    Attributes:
        graph: the trace with the collectives as operations.
        labels: the divisions of all values, both along features and along tokens.
        gathers: (module, value) for each copy that becomes a gather, because the entering value is divided.
        scatters: row-parallel layers whose partial sums are reduce-scattered.
        inside: replicated layers that process the rank's tokens only.
        parameters: names of replicated parameters whose gradients are partial sums.
        more_copies: (call, value) for each replicated tensor that enters the region.
        results: row-parallel layers whose summed output only divided operations read.
    """

    graph: Graph
    labels: dict[int, Label]
    spans: list[BlockSpan]
    full_modules: list[FullSequenceModule]
    gathers: set[tuple[str, int]] = field(default_factory=set)
    scatters: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    more_copies: list[tuple[Entry, int]] = field(default_factory=list)
    results: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return " and ".join(f"{span.first.path} to {span.last.path}" for span in self.spans)

    def exchange(self, model: nn.Module, gather: Convert, cut: Convert) -> list[Any]:
        """Install hooks that gather and split tokens around spans and full-sequence modules."""
        hooks = []
        for full in self.full_modules:
            hooks += [convert_arguments(model, full.entry, value, gather) for value in full.enters]
            hooks.append(convert_result(model.get_submodule(full.entry.path), cut))
        for span in self.spans:
            hooks.append(convert_arguments(model, span.first, span.enters, cut))
            hooks.append(convert_result(model.get_submodule(span.last.path), gather))
        return hooks


def prove_sequence(proof: Proof, model: nn.Module, ranks: int, example: Batch, call: Call) -> SequenceRegion:
    """Divide the tokens with the same verification, and update the proof's rewrites.

    Raises:
        PlanError: the model has no repeated blocks, the tokens cannot be divided, or an operation in the blocks needs
            all tokens of a sequence.
    """
    advice = "Use tp without sequence, or cp for long sequences"
    if proof.graph is None or not proof.regions:
        raise PlanError(
            "plan.sequence_without_matrices",
            "sequence: the plan divides no matrices, so the tokens cannot be divided between them. {advice}",
            advice=advice,
        )
    try:
        region = find_sequence_region(model, proof.graph, proof.labels, proof.boundaries, ranks)
        shapes = shapes_of(proof.graph, proof.labels, ranks)
        with simulated(model, region, ranks):
            proof.rewrites = retraced(region.graph, region.labels, shapes, model, ranks, example, call)
    except Unfollowable as error:
        raise PlanError(
            "plan.sequence_refused",
            "sequence: the tokens cannot be divided over tp={ranks}: {error}. {advice}",
            ranks=ranks,
            error=error,
            advice=advice,
        ) from error
    return region


def find_sequence_region(
    model: nn.Module, graph: Graph, labels: dict[int, Label], boundaries: Boundaries, ranks: int
) -> SequenceRegion:
    """Divide the tokens in every span of the model's blocks.

    Raises:
        Unfollowable: the model has no repeated blocks, or the tokens cannot be divided.
    """
    blocks = find_blocks(model)
    spans = _spans(blocks, graph)
    for span in spans:
        tokens = graph.values[span.enters].shape[TOKENS]
        if reason := undivided_tokens(tokens, "tp", ranks):
            raise Unfollowable(f"it {reason.predicate}")
    # modules that need all tokens, by their names within a block
    whole: set[str] = set()
    while True:
        try:
            return _region(graph, spans, _full_modules(graph, blocks, whole), labels, boundaries)
        except Unfollowable as error:
            inside = next((error.path[len(b) + 1 :] for b in blocks if error.path.startswith(f"{b}.")), "")
            name = inside.partition(".")[0]
            if not name or name in whole:
                raise
            whole.add(name)


def _region(
    graph: Graph,
    spans: list[BlockSpan],
    full_modules: list[FullSequenceModule],
    labels: dict[int, Label],
    boundaries: Boundaries,
) -> SequenceRegion:
    wide = deepcopy(graph)
    placed = _write_exchanges(wide, spans, full_modules, boundaries)
    region = SequenceRegion(wide, dict(labels), spans, full_modules)
    _spread(region, [node.outputs[0] for node in wide.nodes if node.op == "scatter"], regions=labels)
    for span in spans:
        if span.leaves not in region.labels:
            raise Unfollowable(
                f"what {span.last.path} returns does not have the tokens of what {span.first.path} takes"
            )
    if region.labels.keys() & set(wide.outputs):
        raise Unfollowable("a tensor inside the blocks is an output of the model")
    copies = {(p.node.path, p.value): p.node for p in placed if p.node.op == "enter"}
    for node in copies.values():
        label = region.labels.get(node.inputs[0])
        if label is not None and (label.dim, label.outer) != (TOKENS, 1):
            raise Unfollowable(f"{node.path} takes samples and tokens as one dimension", node.path)
    region.gathers = {key for key, node in copies.items() if node.inputs[0] in region.labels}
    region.scatters = {
        node.path for node in wide.nodes if is_row(node, region.labels) and node.outputs[0] in region.labels
    }
    region.inside = {
        n.path for n in wide.nodes if n.op in ("linear", "embedding") and _on_own_tokens(n, region, labels)
    }
    collected = {(p.node.path, p.value) for p in placed if p.node.op == "collect" and p.node.inputs[0] in region.labels}
    for full in full_modules:
        full.enters = [v for v in full.enters if (full.entry.path, v) in collected]
    after = find_boundaries(wide, region.labels)
    region.parameters, region.results = after.parameters, after.results
    made = {p.node.outputs[0] for p in placed}
    region.more_copies = [(entry, value) for entry, value in after.copies if value not in made]
    return region


def _full_modules(graph: Graph, blocks: list[str], names: set[str]) -> list[FullSequenceModule]:
    full_modules = []
    for entry in graph.entries:
        if any(entry.path == f"{block}.{name}" for block in blocks for name in names):
            enters, leaves = _activations(graph, set(entry.arguments.values())), _activations(graph, entry.results)
            if not leaves:
                raise Unfollowable(f"{entry.path} needs all tokens, and returns no (samples, tokens, features)")
            full_modules.append(FullSequenceModule(entry, enters, leaves[0]))
    return full_modules


def _on_own_tokens(node: Node, region: SequenceRegion, regions: dict[int, Label]) -> bool:
    return any(v in region.labels and v not in regions for v in (node.inputs[0], *node.outputs)) and not is_row(
        node, region.labels
    )


def _spans(blocks: list[str], graph: Graph) -> list[BlockSpan]:
    lists: dict[str, list[str]] = {}
    for path in blocks:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    spans = []
    for paths in lists.values():
        entries = [entry for path in paths for entry in graph.entries if entry.path == path]
        if len(entries) != len(paths):
            continue
        enters = _activations(graph, entries[0].arguments.values())
        leaves = _activations(graph, entries[-1].results)
        if enters and leaves:
            spans.append(BlockSpan(entries[0], entries[-1], enters[0], leaves[0]))
    if not spans:
        raise Unfollowable("there are no repeated blocks that take and return (samples, tokens, features)")
    return spans


def _activations(graph: Graph, values: Iterable[int]) -> list[int]:
    return [v for v in values if len(graph.values[v].shape) == 3 and graph.values[v].floating]


@dataclass
class _Placed:
    """A collective in a graph.

    Nodes from `start` to `stop` read the result of the collective instead of `value`.
    """

    value: int
    start: int
    stop: int
    node: Node


def _write_exchanges(
    graph: Graph, spans: list[BlockSpan], full_modules: list[FullSequenceModule], boundaries: Boundaries
) -> list[_Placed]:
    """Append collectives to a graph, and let inner operations read their results.

    Copies are appended first.
    """
    placed: list[_Placed] = []

    def place(op: str, value: int, path: str, start: int, stop: int) -> None:
        there = [p.node for p in placed if start <= p.start and p.stop <= stop and p.node.inputs == [value]]
        node = _exchange(graph, op, value, path, range(start, stop))
        for other in there:
            _read(graph, other, value, node.outputs[0])
        placed.append(_Placed(value, start, stop, node))

    end = len(graph.nodes)
    for entry, value in boundaries.copies:
        place("enter", value, entry.path, entry.start, entry.stop)
    for full in full_modules:
        for value in full.enters:
            place("collect", value, full.entry.path, full.entry.start, full.entry.stop)
        place("scatter", full.leaves, full.entry.path, full.entry.stop, end)
    for span in spans:
        if span.leaves == span.enters:
            raise Unfollowable(f"{span.first.path} returns what it takes")
        place("scatter", span.enters, span.first.path, span.first.start, span.first.stop)
        place("collect", span.leaves, span.last.path, span.last.stop, end)
    for span in spans:
        graph.outputs = [_collected(graph, span) if v == span.leaves else v for v in graph.outputs]
    return placed


def _collected(graph: Graph, span: BlockSpan) -> int:
    return next(node.outputs[0] for node in graph.nodes if node.op == "collect" and node.inputs == [span.leaves])


def _exchange(graph: Graph, op: str, value: int, path: str, inside: range) -> Node:
    """Add an operation on a value.

    The operations `inside` then read the result instead of the value.
    """
    made, number = len(graph.values), len(graph.nodes)
    graph.values.append(replace(graph.values[value], kind="result", name="", producer=number, uses=[]))
    for node in graph.nodes[inside.start : inside.stop]:
        if value in node.inputs:
            if value in node.outputs:
                raise Unfollowable(
                    f"{node.name} in {node.path} changes a tensor in place that other ranks hold parts of", node.path
                )
            _read(graph, node, value, made)
    node = Node(op, (), {}, [value], [made], path)
    graph.nodes.append(node)
    graph.values[value].uses.append((number, 0))
    return node


def _read(graph: Graph, node: Node, value: int, instead: int) -> None:
    number = next(n for n, other in enumerate(graph.nodes) if other is node)
    for slot, v in enumerate(node.inputs):
        if v == value:
            node.inputs[slot] = instead
            graph.values[value].uses.remove((number, slot))
            graph.values[instead].uses.append((number, slot))


def _spread(region: SequenceRegion, seeds: list[int], regions: dict[int, Label]) -> None:
    graph, labels = region.graph, region.labels
    for seed in seeds:
        labels[seed] = Label(TOKENS, 1, (graph.values[seed].shape[TOKENS],))
    queue = list(seeds)
    while queue:
        value = queue.pop()
        entry = graph.values[value]
        for number in {n for n, _ in entry.uses} | ({entry.producer} if entry.producer >= 0 else set()):
            node = graph.nodes[number]
            if node.op in EXCHANGES:
                if (node.op == "scatter" and value in node.inputs) or (node.op != "scatter" and value in node.outputs):
                    raise Unfollowable(f"the tokens are divided where {node.path} needs all of them")
                continue
            if any(v in regions for v in (*node.inputs, *node.outputs)):
                if is_row(node, labels) and value in node.outputs:
                    continue
                raise Unfollowable(f"{node.name} in {node.path} reads divided tokens and divided features", node.path)
            try:
                found = implied(graph, node, labels)
            except Unfollowable as error:
                raise Unfollowable(str(error), node.path) from None
            for other, wanted in found.items():
                if other not in labels:
                    if graph.values[other].kind != "result":
                        raise Unfollowable(
                            f"{node.name} in {node.path} would divide a tensor that is not an activation", node.path
                        )
                    labels[other] = wanted
                    queue.append(other)
                elif labels[other] != wanted:
                    raise Unfollowable(f"{node.name} in {node.path} wants a tensor divided in two ways", node.path)


@contextmanager
def simulated(model: nn.Module, region: SequenceRegion, ranks: int) -> Iterator[None]:
    """Return a context in which traces of the model use the shapes after the collectives."""
    hooks = []

    def scaled(times: int, of: int) -> Convert:
        def change(x: Tensor) -> Tensor:
            with unrecorded():
                return torch.empty((x.shape[0], x.shape[1] * times // of, *x.shape[2:]), dtype=x.dtype, device="meta")

        return change

    gather, cut = scaled(ranks, 1), scaled(1, ranks)
    try:
        for path, value in region.gathers:
            entries = [e for e in region.graph.entries if e.path == path and value in e.arguments.values()]
            hooks += [convert_arguments(model, entry, value, gather) for entry in entries[-1:]]
        hooks += [convert_result(model.get_submodule(path), cut) for path in region.scatters]
        hooks += region.exchange(model, gather, cut)
        yield
    finally:
        for hook in hooks:
            hook.remove()


def convert_arguments(model: nn.Module, entry: Entry, value: int, convert: Convert) -> Any:
    """Convert a value in all arguments of a call that contain it; return the hook."""
    module = model.get_submodule(entry.path)
    places = [place for place, v in entry.arguments.items() if v == value]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            given = args[places[0]] if isinstance(places[0], int) else kwargs[places[0]]
        # without this argument, the sum of its gradients would be lost
        except (IndexError, KeyError):
            raise PlanError(
                "plan.call_changed",
                "tp: {class_name} is called without the argument {argument!r} that was present when the model was "
                "divided. Pass an example of the training batches to shard_tensors.",
                class_name=type(module).__name__,
                argument=places[0],
            ) from None
        if given is None:
            return args, kwargs
        converted = convert(given)
        args = tuple(converted if i in places else x for i, x in enumerate(args))
        return args, kwargs | {p: converted for p in places if isinstance(p, str)}

    return module.register_forward_pre_hook(before, with_kwargs=True)


def convert_result(module: nn.Module, convert: Convert) -> Any:
    """Install a hook that converts the tensor that `module` returns.

    If the module returns a tuple, the first item is converted. The handle of the hook is returned.
    """

    def after(_: nn.Module, __: Any, result: Any) -> Any:
        if isinstance(result, Tensor):
            return convert(result)
        if not isinstance(result, (tuple, list)):
            raise Unfollowable(
                f"{type(module).__name__} returns a {type(result).__name__}, neither a tensor nor a tuple"
            )
        return type(result)((convert(result[0]), *result[1:]))

    # the model's own hooks receive the converted result
    return module.register_forward_hook(after, prepend=True)
