"""`torch.no_grad` regions of a `torch.export` graph, inlined so that pipelining can split it.

torch keeps such a region as a subgraph, and cannot call it from within a module's graph once the model is split.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from paceline.errors import PlanError


def inline_no_grad(program: ExportedProgram) -> None:
    """Replace every region by its operations, on detached operands where it has no gradients.

    Raises:
        PlanError: a region without gradients contains one with gradients.
    """
    graph = program.graph
    for node in [n for n in graph.nodes if n.target is torch.ops.higher_order.wrap_with_set_grad_enabled]:
        enabled, region, *operands = node.args
        body: fx.GraphModule = getattr(program.graph_module, str(region.target))
        if any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in body.graph.nodes):
            raise PlanError(
                "pp: torch.export cannot divide a model that switches gradients on, or autocast, within "
                "torch.no_grad: use "
                ".detach() instead of torch.no_grad there, or train without pp (fsdp divides any model)."
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
    # Operands that a region returns as they are, or changed in place, keep their earlier gradients.
    return [whole.get(_as_changed(n), known[n]) if isinstance(n, fx.Node) else n for n in output.args[0]]


def _as_changed(node: fx.Node) -> fx.Node:
    """The tensor that an operation changed in place and returned, or the node itself otherwise."""
    while isinstance(node.target, torch._ops.OpOverload) and isinstance(node.args[0] if node.args else None, fx.Node):
        schema = node.target._schema
        returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
        changed = schema.arguments[0].alias_info
        if returned is None or changed is None or not changed.is_write or returned.before_set != changed.before_set:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node
