"""Tensor parallelism for any module: matrices sharded over ranks that compute on the same samples.

Regions to divide are found in a trace of the model, not in a list of architectures (`trace/tensor`), and verified: the
divided model is traced again, and has to do the same operations on exactly the shapes of a rank's part. Where that
fails, layers stay replicated, or gather their outputs if they are large. So results are right for every model; only
speed and memory differ.

Dropout inside a divided region draws other masks on each rank, elsewhere the same ones (`dropout`).

On GPUs only the process group differs. Asynchronous TP (matrix products that overlap with the collectives) is left to
inductor, from the functional collectives of a compiled graph, and has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from paceline.comm import Group
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.planning.model.recording.model_state import is_embedding, is_transposed
from paceline.planning.model.recording.record import Call
from paceline.planning.model.recording.recorder import Entry, Graph
from paceline.planning.model.tensor.degrees import (
    Owners,
    Proof,
    Unpaired,
    bias_of,
    find_unpaired,
    owners_of,
    prove,
    rows_of,
)
from paceline.planning.model.tensor.shape_rewriter import install
from paceline.split.layout import Parts, ShardLayout, shard_parameter
from paceline.split.tensor.layers import (
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
from paceline.split.tensor.sequence import SequenceRegion, convert_arguments, convert_result, places_of, prove_sequence


@dataclass
class TensorReport:
    """Result of `shard_tensors` for every layer with a matrix.

    Attributes:
        done: path of a module -> `column`, `row`, `vocabulary` or `gathered`, as a phrase.
        whole: path of a linear layer or embedding that every rank holds in full -> reason.
        notes: sentences about the model as a whole.
        vocabulary_head: the switch of the output head, if its output is the model's own and is divided over the
            vocabulary.
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

    Every rank calls this; nothing is communicated yet.

    Args:
        parts: the part that the rank holds of each parameter so far; updated.
        example: a batch as the engine gives it to `call`, of real or meta tensors.
        call: spans the model on a batch, as the engine does.
        sequence: also divide the activations between the matrices along the tokens, within the repeated blocks.
        vocabulary: also divide embeddings and the output head, along the vocabulary.

    Raises:
        PlanError: heads that cannot be divided, with degrees that can; `sequence` without such blocks, or tokens that
            cannot be divided.
    """
    if tp.size == 1:
        return TensorReport()
    proof = prove(model, tp.size, example, call)
    if proof.refused:
        raise PlanError("\n".join(proof.refused))
    report = TensorReport(whole=dict(proof.why_whole), notes=proof.notes)
    region = prove_sequence(proof, model, tp.size, example, call) if sequence else None
    if region is None:
        unpaired = find_unpaired(model, proof, tp.size, vocabulary=vocabulary)
    else:
        report.notes.append(f"between the matrices, {region} divides the tokens")
        unpaired = find_unpaired(
            model, proof, tp.size, vocabulary=vocabulary, partial=region.parameters, own=region.inside
        )
    _divide_regions(model, parts, tp, proof, region, report)
    _join_regions(model, tp, proof, region)
    if proof.graph is not None:
        graph, labels = (proof.graph, proof.labels) if region is None else (region.graph, region.labels)
        separate_random_streams(model, graph, labels, tp.rank)
    divided = divide_unpaired(model, parts, tp, unpaired)
    report.done |= divided.done
    report.whole = {path: why for path, why in (unpaired.whole | report.whole).items() if path not in divided.done}
    report.vocabulary_head = divided.head
    if not report.done:
        report.notes.append(
            f"nothing can be divided: all {tp.size} ranks of tp compute the same, so use dp or fsdp instead"
        )
    return report


def _divide_regions(
    model: nn.Module, parts: Parts, tp: Group, proof: Proof, sequence: SequenceRegion | None, report: TensorReport
) -> None:
    """Shard every parameter of the regions, and rewrite the code that uses full sizes."""
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
    for path in {path for region in proof.regions for path in region.columns}:
        module = model.get_submodule(path)
        if is_transposed(module):
            module.forward = column_forward(module)
    _use_rows_of_heads(model, parts, owners, tp, proof, report)
    for name in sequence.parameters if sequence is not None else proof.boundaries.parameters:
        parts[name].summed.add("tp")


def _use_rows_of_heads(
    model: nn.Module, parts: Parts, owners: Owners, tp: Group, proof: Proof, report: TensorReport
) -> None:
    """Let projections to heads that several ranks share compute the rows of this rank's heads.

    Every rank holds the whole projection, so that its gradient is a sum over ranks.
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
    """Install the collectives at the ends of the regions.

    Copies where replicated tensors enter, sums behind row-parallel layers.
    """
    if proof.graph is None:
        return
    for entry, value in proof.boundaries.copies:
        if sequence is not None and (entry.path, value) in sequence.gathers:
            convert: Callable[[Tensor], Tensor] = partial(gather_partial, group=tp)
        else:
            convert = partial(copy, group=tp, fresh=_fresh(proof.graph, entry, value))
        convert_arguments(model.get_submodule(entry.path), places_of(entry, value), convert)
    for path in {path for region in proof.regions for path in region.rows}:
        module = model.get_submodule(path)
        join = partial(reduce_scatter if sequence is not None and path in sequence.scatters else reduce, group=tp)
        module.forward = row_forward(module, join)
    for path in sequence.results if sequence is not None else proof.boundaries.results:
        convert_result(model.get_submodule(path), partial(copy, group=tp))
    if sequence is not None:
        for entry, value in sequence.more_copies:
            convert_arguments(model.get_submodule(entry.path), places_of(entry, value), partial(copy, group=tp))
        for full in sequence.full_modules:
            module = model.get_submodule(full.entry.path)
            for value in full.enters:
                convert_arguments(module, places_of(full.entry, value), partial(gather, group=tp, dim=TOKENS))
            convert_result(module, partial(take, group=tp))
        for span in sequence.spans:
            convert_arguments(
                model.get_submodule(span.first.path), places_of(span.first, span.enters), partial(take, group=tp)
            )
            convert_result(model.get_submodule(span.last.path), partial(gather, group=tp, dim=TOKENS))


def _fresh(graph: Graph, entry: Entry, value: int) -> bool:
    """True if only matrix products inside the call read the value. Its gradients are then theirs alone."""
    inside = [graph.nodes[n] for n, _ in graph.values[value].uses if entry.start <= n < entry.stop]
    return all(node.name == "linear" and isinstance(node.op, str) for node in inside)


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
