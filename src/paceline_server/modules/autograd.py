"""Forward passes in another process as nodes of this process's autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline_server.modules.host import Answer, Host
from paceline_server.modules.tensors import tensors_of, with_tensors


class ForwardPass:
    """A forward pass that was sent. Its graph is freed there when nothing here can go back through it."""

    def __init__(self, host: Host, module: str, what: str, number: int, answer: Answer) -> None:
        self.host, self.module, self.what, self.number, self._answer = host, module, what, number, answer
        self.kept = True

    def result(self) -> tuple[Any, list[int]]:
        """Outputs, and positions of the tensors among them that gradients may be given for."""
        result, differentiable = self._answer.result()
        self.kept = bool(differentiable)
        return result, differentiable

    def begin_backward(self, gradients: list[Tensor | None], *, accumulate: bool, keep: bool) -> Answer:
        """Send the gradients of the outputs; the answer is those of the inputs."""
        self.kept = keep
        what = f"the backward pass of {self.what}"
        return self.host.begin(
            "backward", self.module, self.module, self.number, gradients, accumulate, keep, what=what
        )

    def __del__(self) -> None:
        if self.kept:
            self.host.release("free", self.module, (self.module,), self.number)


def attach(forward: ForwardPass, anchor: Tensor | None, inputs: list[Tensor]) -> Any:
    """Outputs of a forward pass, as functions of its inputs.

    Args:
        anchor: stands for the module's parameters; None where no graph is wanted.
        inputs: those that need a gradient.
    """
    result, differentiable = forward.result()
    outputs = tensors_of(result)
    if anchor is None or not differentiable:
        return result
    joined = _Remote.apply(forward, outputs, differentiable, anchor, *inputs)
    return with_tensors(result, list(joined))


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: ForwardPass, outputs: list[Tensor], differentiable: list[int], anchor: Tensor, *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pass_, ctx.edge = forward, torch.autograd.graph.get_gradient_edge(anchor)
        ctx.save_for_backward(anchor)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for n, o in enumerate(outputs) if n not in differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        forward: ForwardPass = ctx.pass_
        if torch.is_grad_enabled():
            raise PacelineError(
                f"{forward.what}: create_graph=True cannot go through a remote module, whose graph is in another "
                "process. Compute what needs second derivatives on one side."
            )
        _ = ctx.saved_tensors  # raises torch's own error where a backward pass without retain_graph has run
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        answer = forward.begin_backward(list(gradients), accumulate=_is_wanted(ctx.edge.node), keep=keep)
        inputs = ctx.needs_input_grad[4:]
        if not inputs:  # other hosts compute meanwhile; the backward pass ends when all have
            torch.autograd.Variable._execution_engine.queue_callback(answer.result)
            return None, None, None, None
        return None, None, None, None, *answer.result()


def _is_wanted(node: Any) -> bool:
    """True if this backward pass adds to parameters, as `loss.backward()` does and `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for: a server's, of a module within its module
        return True
