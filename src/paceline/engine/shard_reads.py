"""Reads of sharded parameters outside of the model's forward pass, for instance by a penalty.

The forward pass of a divided model handles shards correctly. Other code, such as a penalty in the loss, would compute
a value from one shard only, and its gradient may be wrong too. Such reads are refused before they reach an update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from paceline.engine.no_gradient import graph_nodes
from paceline.errors import PlanError
from paceline.planning.model.recorder import tensors_in
from paceline.split.apply import Split


class ShardReads(TorchFunctionMode):
    """Refusal of reads of shards.

    Used as a context, it checks all operations that run in it. `check` checks the autograd graph of a loss.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split
        self._names: dict[Tensor, str] = {p: name for name, p in split.divided.items()}
        self._depth = 0
        self._started = 0
        # intervals of autograd's sequence numbers, which count the nodes that a thread creates
        self._forwards: deque[tuple[int, int]] = deque(maxlen=10_000)
        self._differentiated = False
        # a pipeline stage has its own parameters, and calls the loss within its forward pass
        for module in self._modules() if split.pipeline is None else ():
            split.on_close(module.register_forward_pre_hook(self._enter, prepend=True).remove)
            split.on_close(module.register_forward_hook(self._leave, always_call=True).remove)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Refuse an operation outside of the model that makes a tensor from a shard."""
        kwargs = kwargs or {}
        read = None if self._depth else next(filter(None, map(self._shard, _parameters(args, kwargs))), None)
        if read is None:
            return func(*args, **kwargs)
        try:
            made = func(*args, **kwargs)
        except RuntimeError as error:  # for instance, a shard and a whole copy have different shapes
            raise self._refusal(read) from error
        if tensors_in(made):
            raise self._refusal(read)
        return made

    def check(self, loss: Tensor, *, everywhere: bool) -> None:
        """Refuse a loss whose graph reads shards outside of the model's forward pass.

        Args:
            everywhere: also check the nodes of the model's forward passes, for reads of fsdp's shards, and the nodes
                from which their inputs were computed. This takes longer.

        Raises:
            PlanError: the loss reads a shard; the message names the parameter.
        """
        for node in graph_nodes(loss, (lambda n: True) if everywhere else lambda n: not self._by_model(n)):
            for below, _ in node.next_functions:
                parameter = getattr(below, "variable", None)
                if parameter is None or (read := self._shard(parameter)) is None:
                    continue
                # a gradient of the model's output is also computed from shards
                if isinstance(parameter, DTensor) or not (self._differentiated or self._by_model(node)):
                    raise self._refusal(read)

    def _modules(self) -> Iterator[nn.Module]:
        """Return the model and its layers with shards, which a loop may call directly."""
        for module in self._split.modules:
            yield module
            # hooks on layers would break the graph of a compiled block
            for layer in module.modules() if self._split.plan.compile == "off" else ():
                if layer is not module and any(map(self._is_part, layer.parameters(recurse=False))):
                    yield layer

    def _shard(self, parameter: Tensor) -> str | None:
        """Describe a parameter that this rank holds only in part; None if it is whole."""
        split = self._split
        if split.pipeline is not None:
            # the undivided model has no memory; the stages have parameters of their own
            return "parameters of the model" if parameter.is_meta else None
        if parameter not in self._names and split.fully is not None:
            # while fsdp holds gathered parameters, the modules' parameters are other objects
            self._names |= {p: name for module in split.modules for name, p in module.named_parameters()}
        divided = isinstance(parameter, DTensor) or self._is_part(parameter)
        return f"the parameter {self._names[parameter]}" if divided and parameter in self._names else None

    def _is_part(self, parameter: Tensor) -> bool:
        """True if tp or ep divide a parameter or its gradient over ranks."""
        if parameter not in self._names:
            return False
        part = self._split.parts[self._names[parameter]]
        return "tp" in part.sharded | part.summed or "ep" in part.sharded

    def _by_model(self, node: Any) -> bool:
        number = node._sequence_nr()
        newest = next((interval for interval in reversed(self._forwards) if interval[0] <= number), None)
        return newest is not None and number < newest[1]

    def _enter(self, *_: Any) -> None:
        if not self._depth:
            self._started = _next_number()
        self._depth += 1

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        stop = _next_number()
        if self._depth or stop == self._started:
            return
        self._forwards.append((self._started, stop))
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._differentiate)

    def _differentiate(self, _: Any) -> None:
        # gradients are only enabled in a backward pass with create_graph
        self._differentiated |= torch.is_grad_enabled()

    def _refusal(self, read: str) -> PlanError:
        plan, ranks = self._split.plan, self._split.mesh.world.size
        within = "" if plan.ep > 1 else ", or compute this in the model's forward pass and return it with the output"
        only_fsdp = plan.fsdp > 1 and plan.zero == 3 and {plan.tp, plan.ep, plan.pp} == {1}
        whole = replace(plan, zero=2) if only_fsdp else f"dp={ranks} or fsdp={ranks} zero=2"
        return PlanError(
            f"plan {plan}: the loss reads {read} outside of the model's forward pass. There this rank holds only a "
            f"part, so the loss or its gradient would be wrong. Use {whole}{within}. For an L2 penalty you can also "
            "set the optimizer's weight_decay"
        )


def _next_number() -> int:
    """Sequence number of the next node that this thread adds to a graph."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _parameters(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    """Parameters among the arguments of an operation, lists of tensors included."""
    for value in chain(args, kwargs.values()):
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, nn.Parameter):
                yield leaf
