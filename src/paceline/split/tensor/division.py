"""Tensor parallelism for any module: matrices divided over ranks that compute on the same samples.

What is divided is found in a trace of the model, not in a list of architectures (`tensor_trace`, `tensor_regions`), and proven: the divided
model is traced again, and has to do the same operations on exactly the shapes of a rank's part. Where that fails, layers stay whole, or
gather their outputs if they are large. So results are right for every model; only speed and memory differ.

Dropout inside a divided region draws other masks on each rank, elsewhere the same ones (`tensor_dropout`).

On GPUs nothing differs but the process group; asynchronous TP (matrix products that overlap with the collectives) is inductor's to make
out of the functional collectives in a compiled graph, and has not been run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from paceline.comm import Group
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.split.parts import Parts
from paceline.split.tensor.dropout import draw_apart
from paceline.split.tensor.layers import (
    TOKENS,
    HeadSwitch,
    column_forward,
    copy,
    gather,
    gather_addends,
    reduce,
    reduce_scatter,
    row_forward,
    take,
)
from paceline.split.tensor.proof import Proof, extend, prove
from paceline.split.tensor.sequence import convert_arguments, convert_result, places_of
from paceline.split.tensor.shape_rewriter import install
from paceline.split.tensor.trace import Call, Entry, Graph, is_transposed
from paceline.split.tensor.unpaired import divide_lone, owners_of, shard


@dataclass
class TensorReport:
    """What became of every layer with a matrix.

    Attributes:
        done: path of a module -> `column`, `row`, `vocabulary` or `gathered`, and for whom it is: a sentence.
        whole: path of a linear layer or embedding that every rank holds in full -> why.
        notes: what is worth knowing about the model as a whole.
        vocabulary_head: the switch of the output head, if its output is the model's own and is divided over the vocabulary.
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
    """Divide the matrices of a model over the ranks of `tp`, in place. Every rank calls this; nothing is communicated yet.

    Args:
        parts: what the rank holds of each parameter so far; what is divided is noted.
        example: a batch as the engine gives it to `call`, of real or meta tensors.
        call: how the engine calls the model with a batch.
        sequence: also divide the activations between the matrices, along the tokens, in the trunk of blocks.
        vocabulary: also divide embeddings and the output head, along the vocabulary.

    Raises:
        PlanError: heads that do not divide, with the degrees that work; `sequence` where there is no such trunk or tokens do not divide.
    """
    if tp.size == 1:
        return TensorReport()
    proof = prove(model, tp.size, example, call)
    if proof.refused:
        raise PlanError("\n".join(proof.refused))
    report = TensorReport(whole=dict(proof.why_whole), notes=proof.notes)
    if sequence:
        extend(proof, model, tp.size, example, call)
        report.notes.append(f"between the matrices, {proof.stream} divides the tokens")
    _divide_regions(model, parts, tp, proof, report)
    _join_regions(model, tp, proof)
    if proof.graph is not None:
        graph, labels = (proof.graph, proof.labels) if proof.stream is None else (proof.stream.graph, proof.stream.labels)
        draw_apart(model, graph, labels, tp.rank)
    lone = divide_lone(model, parts, tp, proof, vocabulary=vocabulary)
    report.done |= lone.done
    report.whole = {path: why for path, why in (lone.whole | report.whole).items() if path not in lone.done}
    report.vocabulary_head = lone.head
    if not report.done:
        report.notes.append(f"nothing can be divided: all {tp.size} ranks of tp compute the same, so use dp or fsdp instead")
    return report


def _divide_regions(model: nn.Module, parts: Parts, tp: Group, proof: Proof, report: TensorReport) -> None:
    """Give every parameter of the regions its part, and change the code that names full sizes."""
    if proof.graph is None:
        return
    owners = owners_of(model)
    for v, label in proof.labels.items():
        value = proof.graph.values[v]
        if value.kind == "parameter":
            shard(parts, owners, value.name, tp, label.dim, label.sections)
    install(model, proof.edits, tp.size)
    for region in proof.regions:
        for paths, style in ((region.columns, "column"), (region.rows, "row")):
            for path in paths:
                from_plan = ", as in the model's own tp_plan" if proof.hints.get(path, "").startswith(style[:3]) else ""
                report.done[path] = f"{style}{from_plan}"
    for path in {path for region in proof.regions for path in region.columns}:
        module = model.get_submodule(path)
        if is_transposed(module):
            module.forward = column_forward(module)
    for name in proof.stream.parameters if proof.stream is not None else proof.boundaries.parameters:
        parts[name].summed.add("tp")


def _join_regions(model: nn.Module, tp: Group, proof: Proof) -> None:
    """Put the exchanges at the ends of the regions: copies where whole tensors enter, sums behind row-parallel layers."""
    if proof.graph is None:
        return
    stream = proof.stream
    for entry, value in proof.boundaries.copies:
        if stream is not None and (entry.path, value) in stream.gathers:
            convert: Callable[[Tensor], Tensor] = partial(gather_addends, group=tp)
        else:
            convert = partial(copy, group=tp, fresh=_fresh(proof.graph, entry, value))
        convert_arguments(model.get_submodule(entry.path), places_of(entry, value), convert)
    for path in {path for region in proof.regions for path in region.rows}:
        module = model.get_submodule(path)
        join = partial(reduce_scatter if stream is not None and path in stream.scatters else reduce, group=tp)
        module.forward = row_forward(module, join)
    for path in stream.results if stream is not None else proof.boundaries.results:
        convert_result(model.get_submodule(path), partial(copy, group=tp))
    if stream is not None:
        for entry, value in stream.more_copies:
            convert_arguments(model.get_submodule(entry.path), places_of(entry, value), partial(copy, group=tp))
        for island in stream.islands:
            module = model.get_submodule(island.entry.path)
            for value in island.enters:
                convert_arguments(module, places_of(island.entry, value), partial(gather, group=tp, dim=TOKENS))
            convert_result(module, partial(take, group=tp))
        for run in stream.runs:
            convert_arguments(model.get_submodule(run.first.path), places_of(run.first, run.enters), partial(take, group=tp))
            convert_result(model.get_submodule(run.last.path), partial(gather, group=tp, dim=TOKENS))


def _fresh(graph: Graph, entry: Entry, value: int) -> bool:
    """Whether only matrix products read the value inside, so that its gradients are theirs alone."""
    inside = [graph.nodes[n] for n, _ in graph.values[value].uses if entry.start <= n < entry.stop]
    return all(node.name == "linear" and isinstance(node.op, str) for node in inside)
