"""Pipeline stages from `torch.export`, for models that pass tensors around module outputs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import Pipe, SplitPoint
from torch.distributed.pipelining._IR import MultiUseParameterConfig, annotate_split_points
from torch.export import ExportedProgram
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.job.loss_items import first_line
from paceline.split.forward_trace import TensorShape
from paceline.split.layout import replace_tensors
from paceline.split.record_forward import Call, quiet
from paceline.split.stages import Stage, copied, drop_buffers

# torch.export appends this suffix to the name of a module for its second and later calls
_CALL = re.compile(r"@\d+(?=\.|$)")


@dataclass
class StageGraph:
    """The computation of one stage for one batch shape, as a graph of torch.export.

    Attributes:
        received, sent: the tensors that the stage receives and sends.
        names: for each name of a parameter or buffer in the graph, its name in the model. If a module is called twice,
            the graph has several names for one parameter.
    """

    graph: nn.Module
    names: dict[str, str]
    node: fx.Node
    inputs: list[fx.Node]
    incoming: list[fx.Node]
    outgoing: list[fx.Node]
    results: list[fx.Node]
    received: list[TensorShape]
    sent: list[TensorShape]
    output: Callable[[Sequence[Any]], Any]
    trace: None = None

    def calls_module_of(self, parameter: str) -> bool:
        """Return False, because a graph calls no modules."""
        return False

    def parameters(self) -> set[str]:
        """Return the parameters that the stage uses.

        A tied parameter may have any of its names.
        """
        return {self.names[name] for name, _ in self.graph.named_parameters(remove_duplicate=False)}

    def buffers(self) -> set[str]:
        """Return the buffers that the stage reads or changes."""
        return {self.names[name] for name, _ in self.graph.named_buffers(remove_duplicate=False) if name in self.names}

    def run(
        self, batch: Batch, received: Sequence[Tensor], tensors: Mapping[str, Tensor] | None = None
    ) -> dict[fx.Node, Any]:
        """Run the stage; return the values of all nodes that are known afterwards."""
        given = zip((*self.incoming, *self.inputs), (*received, *_tensors(batch)), strict=True)
        known: dict[fx.Node, Any] = dict(given)
        args = fx.node.map_arg(self.node.args, lambda node: known[node])
        made = self.graph(*args) if tensors is None else torch.func.functional_call(self.graph, dict(tensors), args)
        known[self.node] = made
        known |= {user: made[user.args[1]] for user in self.node.users if user.target is operator.getitem}
        return known


def exported(model: nn.Module, cuts: Sequence[str], batch: Batch, call: Call, device: torch.device) -> list[StageGraph]:
    """Trace a model with `torch.export`, and split it before each module of `cuts`.

    The graphs are valid only for this batch shape and for the model's current mode (train or eval).

    Raises:
        PlanError: the model cannot be traced, for example because its control flow depends on data.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: Tensor) -> Tensor:
        with fakes:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    output, without_memory = _Output(), copied(model)
    replace_tensors(without_memory, lambda p: nn.Parameter(fake(p), requires_grad=p.requires_grad), fake)
    flat = _Flat(without_memory, call, batch, output)
    try:
        with quiet():
            annotate_split_points(flat, {f"model.{c}": SplitPoint.BEGINNING for c in cuts})
            program = torch.export.export(flat, tuple(fake(t) for t in _tensors(batch)))
            inline_no_grad(program)
            pipe = Pipe._from_traced(flat, program, MultiUseParameterConfig.REPLICATE)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            "plan.not_exportable",
            "pp: torch.export cannot trace the model ({reason}). Control flow that depends on data (an `if` on a "
            "tensor's value, .item()) cannot be traced. Write it with torch.where, or train without pp (fsdp "
            "divides any model).",
            reason=first_line(error),
        ) from error
    nodes = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    if len(nodes) != len(cuts) + 1:
        raise PlanError(
            "plan.stages_found",
            "pp: with the cuts {cuts}, torch.export finds {found} stages, not {wanted}. Cut at modules that are "
            "called exactly once.",
            found=len(nodes),
            cuts=",".join(cuts),
            wanted=len(cuts) + 1,
        )
    stage_graphs = _stage_graphs(pipe.split_gm, nodes, output, set(_named_tensors(model)))
    try:
        _infer_shapes(
            stage_graphs, tree_map(fake, tuple(batch.values()) if isinstance(batch, Mapping) else tuple(batch))
        )
    except Exception as error:
        raise PlanError(
            "plan.stages_not_runnable",
            "pp: the stages that torch.export creates from the model cannot be run ({reason}). Use other cuts "
            "(cut=), or train without pp (fsdp divides any model).",
            reason=first_line(error),
        ) from error
    return stage_graphs


class ExportedStage(Stage):
    """A stage that runs a `StageGraph` with parameters of `module`, which may be sharded.

    Such a stage has no blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        i: int,
        stage_graphs: Sequence[StageGraph],
        graph_of: Callable[[Batch], StageGraph],
        device: torch.device,
        own: set[str],
    ) -> None:
        super().__init__(model, own, device, is_last=i == len(stage_graphs) - 1)
        self._graph_of = graph_of
        buffers = [stage_graph.buffers() for stage_graph in stage_graphs]
        drop_buffers(self.module, set().union(*buffers) - buffers[i], device)
        self.module.__dict__["forward"] = self._forward

    def _compute(self, received: tuple[Tensor, ...], batch: Batch) -> Any:
        stage_graph = self._graph_of(batch)
        tensors = _named_tensors(self.module)
        if missing := sorted(set(stage_graph.names.values()) - tensors.keys()):
            raise PlanError(
                "plan.stage_reads_other",
                "pp: for a batch of another shape this stage needs {missing}, which belongs to another stage. Give "
                "all batches the same shape, or train without pp.",
                missing=missing[0],
            )
        known = stage_graph.run(batch, received, {name: tensors[own] for name, own in stage_graph.names.items()})
        if self._is_last:
            return stage_graph.output([known[node] for node in stage_graph.results])
        return [known[node] for node in stage_graph.outgoing]


class _Output:
    """The structure of a model's output.

    The structure is stored outside of the traced module, because torch.export resets the module's attributes.
    """

    def __init__(self) -> None:
        self._spec: TreeSpec | None = None
        self._leaves: list[Any] = []  # None for each tensor

    def tensors(self, output: Any) -> tuple[Tensor, ...]:
        leaves, self._spec = tree_flatten(output)
        self._leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def of(self, tensors: Sequence[Any]) -> Any:
        assert self._spec is not None
        rest = iter(tensors)
        return tree_unflatten([next(rest) if leaf is None else leaf[0] for leaf in self._leaves], self._spec)


class _Flat(nn.Module):
    """Wrapper of a model with tensors as inputs and outputs, instead of batches and objects."""

    def __init__(self, model: nn.Module, call: Call, batch: Batch, output: _Output) -> None:
        super().__init__()
        self.model = model
        keys = list(batch) if isinstance(batch, Mapping) else None
        self._run = lambda model, tensors: output.tensors(
            call(model, tensors if keys is None else dict(zip(keys, tensors, strict=True)))
        )

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._run(self.model, tensors)


def _stage_graphs(
    split_gm: fx.GraphModule, nodes: Sequence[fx.Node], structure: _Output, known: set[str]
) -> list[StageGraph]:
    order = {node: i for i, node in enumerate(nodes)}
    inputs = [node for node in split_gm.graph.nodes if node.op == "placeholder"]
    [output] = [node for node in split_gm.graph.nodes if node.op == "output"]
    results = list(output.all_input_nodes)
    made: dict[fx.Node, int] = dict(order)
    made |= {node: order[node.args[0]] for node in split_gm.graph.nodes if node.target is operator.getitem}

    def needed_until(node: fx.Node) -> int:
        return max((len(nodes) if user is output else order.get(user, -1) for user in node.users), default=-1)

    crossing = [[n for n, i in made.items() if i < k <= needed_until(n)] for k in range(len(nodes) + 1)]
    graphs = [split_gm.get_submodule(str(node.target)) for node in nodes]
    return [
        StageGraph(
            graph, _model_names(graph, known), node, inputs, crossing[k], crossing[k + 1], results, [], [], structure.of
        )
        for k, (graph, node) in enumerate(zip(graphs, nodes, strict=True))
    ]


def _model_names(graph: nn.Module, known: set[str]) -> dict[str, str]:
    """Map a graph's parameters and buffers to the model's names.

    Constants of the graph have no name in the model.
    """
    plain = ((name, name.removeprefix("model.")) for name in _named_tensors(graph))
    own = ((name, first if first in known else _CALL.sub("", first)) for name, first in plain)
    return {name: first for name, first in own if first in known}


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))


def _infer_shapes(stage_graphs: Sequence[StageGraph], batch: tuple[Tensor, ...]) -> None:
    carried: list[Tensor] = []
    shapes: list[TensorShape] = []
    for stage_graph in stage_graphs:
        stage_graph.received = shapes
        known = stage_graph.run(batch, carried)
        carried = [known[node] for node in stage_graph.outgoing]
        stage_graph.sent = shapes = [TensorShape.of(t) for t in carried]


def _tensors(batch: Batch) -> list[Tensor]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def inline_no_grad(program: ExportedProgram) -> None:
    """Inline the operations of every region that enables or disables gradients.

    In a region without gradients, the operands are detached.

    Raises:
        PlanError: a region without gradients contains a region with gradients.
    """
    graph = program.graph
    for node in [n for n in graph.nodes if n.target is torch.ops.higher_order.wrap_with_set_grad_enabled]:
        enabled, region, *operands = node.args
        body: fx.GraphModule = getattr(program.graph_module, str(region.target))
        if any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in body.graph.nodes):
            raise PlanError(
                "plan.grad_mode_switched",
                "pp: torch.export cannot divide a model that enables gradients or autocast within torch.no_grad. "
                "Use .detach() instead of torch.no_grad, or train without pp (fsdp divides any model).",
            )
        results = _copied(graph, node, body.graph, operands, detach=not enabled)
        for user in list(node.users):
            assert user.target is operator.getitem, "torch.export gives a region's results one by one"
            made = results[user.args[1]]
            program.graph_signature.replace_all_uses(user.name, made.name)
            user.replace_all_uses_with(made)
            graph.erase_node(user)
        graph.erase_node(node)
        if not region.users:
            graph.erase_node(region)
    program.graph_module.recompile()


def _copied(graph: fx.Graph, before: fx.Node, body: fx.Graph, operands: list[Any], *, detach: bool) -> list[Any]:
    """Copy the operations of `body` into `graph` and return the region's results."""
    inputs = [n for n in body.nodes if n.op == "placeholder"]
    first = next((n for n in body.nodes if n.op == "call_function"), before)
    known: dict[fx.Node, Any] = {}
    with graph.inserting_before(before):
        for inner, operand in zip(inputs, operands, strict=True):
            known[inner] = operand
            if detach and isinstance(operand, fx.Node):
                known[inner] = graph.call_function(torch.ops.aten.detach.default, (operand,))
                known[inner].meta = operand.meta | {
                    k: first.meta[k] for k in ("nn_module_stack", "stack_trace") if k in first.meta
                }
        for inner in body.nodes:
            if inner.op not in ("placeholder", "output"):
                known[inner] = graph.node_copy(inner, lambda n: known[n])
    whole = dict(zip(inputs, operands, strict=True))
    [output] = [n for n in body.nodes if n.op == "output"]
    # Operands that a region returns unchanged, or changes in place, are not detached.
    return [whole.get(_as_changed(n), known[n]) if isinstance(n, fx.Node) else n for n in output.args[0]]


def _as_changed(node: fx.Node) -> fx.Node:
    """Return the tensor that an operation changed in place and returned, or else the node."""
    while isinstance(node.target, torch._ops.OpOverload) and isinstance(node.args[0] if node.args else None, fx.Node):
        schema = node.target._schema
        returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
        changed = schema.arguments[0].alias_info
        if returned is None or changed is None or not changed.is_write or returned.before_set != changed.before_set:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node
