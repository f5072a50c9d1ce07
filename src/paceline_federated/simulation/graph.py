"""Traced functions: plain tensor operations for inputs of fixed shapes, without those that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.own_random import kept_random

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_SHAPED = (_aten.expand.default, _aten.view.default, _aten._unsafe_view.default)
# Functions and methods that parse their arguments faster than the operators that a trace is made of.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.bmm.default: torch.bmm,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.neg.default: torch.neg,
    _aten.relu.default: torch.relu,
    _aten.tanh.default: torch.tanh,
    _aten.exp.default: torch.exp,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.gather.default: torch.gather,
    _aten.scatter_add.default: torch.scatter_add,
    _aten.mean.dim: torch.mean,
    _aten.sum.dim_IntList: torch.sum,
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
}
_METHODS = {_aten.view.default: "view", _aten.expand.default: "expand", _aten.new_zeros.default: "new_zeros"}
_SCALED = (_aten.mul.Scalar, _aten.mul.Tensor, _aten.div.Scalar)


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The function for inputs of these shapes, as operations that are called one after another.

    A function that `torch.func` has transformed is called several times as fast so.
    """
    with kept_random():
        graph = make_fx(function)(*inputs)
    for node in list(graph.graph.nodes):
        if (same := _unchanged(node)) is not None:
            node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()
    _keep_constants(graph)
    for node in graph.graph.nodes:
        if node.op == "call_function" and not node.kwargs:
            if node.target in _METHODS:
                node.op, node.target = "call_method", _METHODS[node.target]
            else:
                node.target = _FUNCTIONS.get(node.target, node.target)
    graph.recompile()
    forward: Callable[..., Any] = graph.forward
    return forward


def _unchanged(node: Node) -> Node | None:
    """Argument of a node that is equal to its result; None without one."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    first = node.args[0]
    if node.target in _SAME:
        return first
    if node.target in _SHAPED:
        before, after = first.meta.get("tensor_meta"), node.meta.get("tensor_meta")
        return first if before is not None and after is not None and before.shape == after.shape else None
    if node.target in _SCALED and len(node.args) == 2 and type(node.args[1]) is int and node.args[1] == 1:
        before, after = first.meta.get("tensor_meta"), node.meta.get("tensor_meta")
        return first if before is not None and after is not None and before.dtype == after.dtype else None
    if node.target is _aten.transpose.int and first.target is _aten.transpose.int and first.args[1:] == node.args[1:]:
        return first.args[0] if isinstance(first.args[0], Node) else None
    return None


def _keep_constants(graph: GraphModule) -> None:
    """Make tensors of one number once, instead of at every call."""
    for number, node in enumerate(list(graph.graph.nodes)):
        if node.op == "call_function" and node.target is _aten.scalar_tensor.default:
            name = f"_constant{number}"
            graph.register_buffer(name, _aten.scalar_tensor.default(*node.args, **node.kwargs))
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
            graph.graph.erase_node(node)
