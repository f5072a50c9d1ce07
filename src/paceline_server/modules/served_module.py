"""A served module: its forward and backward passes for many clients at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import RemoteError
from paceline_server.modules.randomness import RandomState, ordinary_randomness
from paceline_server.modules.tensors import tensors_of, with_tensors

MOST_GRAPHS = 4096  # forward passes of a client whose backward pass has yet to come


class HasAnchor:
    """A module whose parameters are elsewhere. Autograd reaches them by its anchor, a tensor that requires grad."""

    anchor: Tensor


class FollowsParameters(Protocol):
    """An optimizer over parameters that may be replaced."""

    def follow(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Go on with new parameters in the places of old ones."""


Context = tuple[str, str]  # client, and its name for one accumulation of gradients


class ForwardCall(NamedTuple):
    """Settings of one forward pass."""

    graph: int  # number that its backward pass names
    context: str
    training: bool
    gradients: bool
    autocast: str | None  # dtype
    needs: tuple[int, ...]  # positions of the argument tensors that need gradients


@dataclass(eq=False)
class _Graph:
    context: Context
    inputs: list[Tensor]
    outputs: list[Tensor]
    parameters: list[tuple[str, nn.Parameter]]
    anchors: list[Tensor]


class ServedModule:
    """Module with its graphs by client and number, and gradients by context.

    Gradients are returned by `torch.autograd.grad` and added up per context, never in `.grad`: passes of several
    clients do not mix. An optimizer's step leaves the weights that a graph has seen as they are, by new parameters
    (`make_writable`), so that a backward pass sees those of its forward pass.
    """

    def __init__(self, module: nn.Module, random: RandomState | None) -> None:
        self.module, self._random = module, random
        self.lock = threading.RLock()  # forward passes, steps, state
        self._books = threading.Lock()  # graphs and gradients; a forward pass that hangs does not hold it
        self.version = 0  # of parameters and buffers: steps and loads
        self.optimizers: weakref.WeakSet[FollowsParameters] = weakref.WeakSet()
        self._training = module.training
        self._graphs: dict[tuple[str, int], _Graph] = {}
        self._gradients: dict[Context, dict[str, Tensor]] = {}

    def forward(self, client: str, how: ForwardCall, args: Any, kwargs: Any) -> tuple[Any, list[int]]:
        """Outputs without their graph, and positions of those that gradients may be given for."""
        given = tensors_of((args, kwargs))
        device = self._device()
        inputs = [tensor.to(device).requires_grad_(position in how.needs) for position, tensor in enumerate(given)]
        args, kwargs = with_tensors((args, kwargs), inputs)
        with self.lock, self._randomness(), torch.set_grad_enabled(how.gradients), _autocast(device, how.autocast):
            self._set_mode(how.training)
            result = self.module(*args, **kwargs)
            outputs = tensors_of(result)
            differentiable = [position for position, output in enumerate(outputs) if output.requires_grad]
            if differentiable:
                self._keep(client, how, [inputs[position] for position in how.needs], outputs)
        return with_tensors(result, [output.detach() for output in outputs]), differentiable

    def backward(
        self, client: str, number: int, gradients: list[Tensor | None], *, accumulate: bool, keep: bool
    ) -> list[Tensor | None]:
        """Gradients of the inputs that need one.

        Those of the parameters are added to the graph's context.


        Args:
            number: of the forward pass.
            gradients: of all output tensors; None where there is none.
            accumulate: also compute the gradients of parameters.
            keep: the graph, for another backward pass.
        """
        graph = self._graphs.get((client, number))
        if graph is None:
            raise RemoteError(
                "the graph of this forward pass has been freed: a backward pass without retain_graph has run through "
                "it, or its client could not be reached for longer than the grace time"
            )
        trained = graph.parameters if accumulate else []
        anchors = graph.anchors if accumulate else []
        pairs = [(o, g.to(o.device)) for o, g in zip(graph.outputs, gradients, strict=True) if g is not None]
        wanted = [*graph.inputs, *(parameter for _, parameter in trained), *anchors]
        try:
            found: tuple[Tensor | None, ...] = (None,) * len(wanted)
            if pairs and wanted:
                outputs, weights = zip(*pairs, strict=True)
                found = torch.autograd.grad(outputs, wanted, weights, retain_graph=keep, allow_unused=True)
        finally:
            if not keep:
                self._graphs.pop((client, number), None)
        of_inputs, of_parameters = found[: len(graph.inputs)], found[len(graph.inputs) :]
        with self._books:
            sums = self._gradients.setdefault(graph.context, {})
            for (name, _), gradient in zip(trained, of_parameters, strict=False):
                if gradient is not None:
                    sums[name] = sums[name] + gradient if name in sums else gradient
        return list(of_inputs)

    def release(self, client: str, graphs: list[int]) -> None:
        """Free graphs of a client, through which no backward pass will come."""
        for number in graphs:
            self._graphs.pop((client, number), None)

    def take_gradients(self, context: Context) -> dict[str, Tensor]:
        """Gradients of a context by parameter, which has none afterwards."""
        with self._books:
            return self._gradients.pop(context, {})

    def give_back(self, context: Context, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients that were taken, and not applied, to those of the context."""
        with self._books:
            sums = self._gradients.setdefault(context, {})
            for name, gradient in gradients.items():
                sums[name] = sums[name] + gradient if name in sums else gradient

    def squared_norm(self, context: Context) -> float:
        """Sum of squares of a context's gradients."""
        with self._books:
            return sum(map(_squares, self._gradients.get(context, {}).values()))

    def leave(self, client: str) -> None:
        """Forget the graphs and gradients of a client."""
        with self._books:
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != client}
            self._gradients = {context: sums for context, sums in self._gradients.items() if context[0] != client}

    def drop(self, context: Context) -> None:
        """Forget the gradients of a context."""
        with self._books:
            self._gradients.pop(context, None)

    def make_writable(self) -> None:
        """Replace parameters that a graph may have kept by copies, which may be written.

        A lookup in an embedding keeps its indices and not its table, which therefore stays as it is.
        """
        if not self._graphs:
            return
        kept = [
            parameter
            for part in self.module.modules()
            if type(part) is not nn.Embedding or part.max_norm is not None
            for parameter in part.parameters(recurse=False)
        ]
        new = {parameter: nn.Parameter(parameter.detach().clone(), parameter.requires_grad) for parameter in kept}
        for part in self.module.modules():
            for name, parameter in part._parameters.items():
                if parameter in new:
                    part._parameters[name] = new[parameter]
        for optimizer in self.optimizers:
            optimizer.follow(new)

    def state(self, names: list[str]) -> tuple[int, dict[str, Tensor]]:
        """The version, and a copy of these entries of the module's state."""
        with self.lock:
            state = self.module.state_dict()
            return self.version, {name: state[name].detach().cpu().clone() for name in names}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take these entries of a state."""
        with self.lock:
            self.version += 1
            self.make_writable()
            self.module.load_state_dict(dict(state), strict=False)

    def _keep(self, client: str, how: ForwardCall, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if sum(1 for holder, _ in self._graphs if holder == client) >= MOST_GRAPHS:
            raise RemoteError(
                f"{MOST_GRAPHS:,} forward passes of this client wait for their backward pass. Run those that need no "
                "gradients under torch.no_grad()"
            )
        trained = [(name, each) for name, each in self.module.named_parameters() if each.requires_grad]
        anchors = [part.anchor for part in self.module.modules() if isinstance(part, HasAnchor)]
        self._graphs[client, how.graph] = _Graph((client, how.context), inputs, outputs, trained, anchors)

    def _set_mode(self, training: bool) -> None:
        if training != self._training:
            self.module.train(training)
            self._training = training

    def _device(self) -> torch.device:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    def _randomness(self) -> AbstractContextManager[None]:
        return self._random.drawing() if self._random else ordinary_randomness()


def _autocast(device: torch.device, dtype: str | None) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, getattr(torch, dtype)) if dtype else nullcontext()


def _squares(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(values.double().square().sum())
