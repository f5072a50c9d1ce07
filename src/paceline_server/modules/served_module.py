"""Served modules, which many clients use concurrently, and their optimizers."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.errors import RemoteError
from paceline_server.service import Caller
from paceline_server.values import sendable, tensors_of, with_tensors

MOST_GRAPHS = 4096  # maximum number of a client's forward passes that wait for their backward pass


class HasAnchor:
    """Module with remote parameters.

    Autograd reaches these parameters through the module's anchor, a tensor that requires grad.
    """

    anchor: Tensor


Context = tuple[str, str]  # identity of a client, and its name for one set of accumulated gradients


@sendable
@dataclass(frozen=True)
class ForwardCall:
    """Settings of one forward pass."""

    graph: int  # number by which the backward pass refers to this forward pass
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
    """Module that a process serves, with its graphs and its gradients by context.

    `torch.autograd.grad` computes gradients, which are summed per context and never in `.grad`. Therefore the passes of
    several clients do not mix. An optimizer step does not write to weights that a graph uses, but replaces the
    parameters (`make_writable`). A backward pass therefore uses the weights of its forward pass.
    """

    CALLED: ClassVar = {"forward", "backward", "free", "state", "load"}  # functions for clients

    def __init__(self, module: nn.Module, seeds: torch.Generator | None) -> None:
        self.module, self._seeds = module, seeds
        self.lock = threading.RLock()  # held by forward passes, steps, and access to the state
        self._books = threading.Lock()  # guards graphs and gradients; a hanging forward pass does not hold this lock
        self.version = 0  # number of steps and loads that changed parameters or buffers
        self.optimizers: weakref.WeakSet[ServedOptimizer] = weakref.WeakSet()
        self._training = module.training
        self._graphs: dict[tuple[str, int], _Graph] = {}
        self._gradients: dict[Context, dict[str, Tensor]] = {}
        self._own: dict[Context, set[str]] = {}  # names of sums that share memory with no other tensor

    def forward(self, caller: Caller, how: ForwardCall, args: Any, kwargs: Any) -> tuple[Any, list[int]]:
        """Return the detached outputs, and the positions of outputs that accept gradients."""
        given = tensors_of((args, kwargs))
        device = self._device()
        inputs = [tensor.to(device).requires_grad_(position in how.needs) for position, tensor in enumerate(given)]
        args, kwargs = with_tensors((args, kwargs), inputs)
        autocast = torch.autocast(device.type, getattr(torch, how.autocast)) if how.autocast else nullcontext()
        with self.lock, drawing_from(self._seeds), torch.set_grad_enabled(how.gradients), autocast:
            self._set_mode(how.training)
            result = self.module(*args, **kwargs)
            outputs = tensors_of(result)
            differentiable = [position for position, output in enumerate(outputs) if output.requires_grad]
            if differentiable:
                self._keep(caller.identity, how, [inputs[position] for position in how.needs], outputs)
        return with_tensors(result, [output.detach() for output in outputs]), differentiable

    def backward(
        self, caller: Caller, number: int, gradients: list[Tensor | None], accumulate: bool, keep: bool
    ) -> list[Tensor | None]:
        """Compute the gradients of the inputs that need gradients.

        Gradients of parameters are added to the graph's context.

        Args:
            number: number of the forward pass.
            gradients: gradients of all output tensors; None for a tensor without gradient.
            accumulate: True to also compute the gradients of parameters.
            keep: True to keep the graph for another backward pass.
        """
        graph = self._graphs.get((caller.identity, number))
        if graph is None:
            raise RemoteError(
                "remote.graph_freed",
                "the graph of this forward pass has been freed: a backward pass without retain_graph used the "
                "graph, or its client was disconnected for longer than the grace time",
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
                self._graphs.pop((caller.identity, number), None)
        of_inputs, of_parameters = found[: len(graph.inputs)], found[len(graph.inputs) :]
        named = zip(trained, of_parameters, strict=False)
        self.add_gradients(graph.context, {name: gradient for (name, _), gradient in named if gradient is not None})
        return list(of_inputs)

    def free(self, caller: Caller, *graphs: int) -> None:
        """Free graphs of a client that no backward pass will use."""
        for number in graphs:
            self._graphs.pop((caller.identity, number), None)

    def take_gradients(self, context: Context) -> dict[str, Tensor]:
        """Remove the gradients of a context, and return them by parameter name."""
        with self._books:
            self._own.pop(context, None)
            return self._gradients.pop(context, {})

    def add_gradients(self, context: Context, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients to the existing gradients of a context."""
        with self._books:
            sums, own = self._gradients.setdefault(context, {}), self._own.setdefault(context, set())
            for name, gradient in gradients.items():
                if name in own and sums[name].layout == gradient.layout:
                    sums[name].add_(gradient)
                elif name in sums:  # the first gradient may share memory with another tensor
                    sums[name] = sums[name] + gradient
                    own.add(name)
                else:
                    sums[name] = gradient

    def squared_norm(self, context: Context) -> float:
        """Return the sum of squares of a context's gradients."""
        with self._books:
            return sum(map(_squares, self._gradients.get(context, {}).values()))

    def leave(self, client: str) -> None:
        """Forget the graphs and gradients of a client."""
        with self._books:
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != client}
            self._gradients = {context: sums for context, sums in self._gradients.items() if context[0] != client}
            self._own = {context: own for context, own in self._own.items() if context[0] != client}

    def make_writable(self) -> None:
        """Replace parameters that a graph may use with writable copies.

        An embedding lookup saves its indices but not its table, so the table is not copied.
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

    def state(self, caller: Caller, names: list[str]) -> tuple[int, dict[str, Tensor]]:
        """Return the module's version, and copies of some entries of its state."""
        with self.lock:
            state = self.module.state_dict()
            return self.version, {name: state[name].detach().cpu().clone() for name in names}

    def load(self, caller: Caller, state: Mapping[str, Tensor]) -> None:
        """Load some entries of the module's state."""
        with self.lock:
            self.version += 1
            self.make_writable()
            self.module.load_state_dict(dict(state), strict=False)

    def _keep(self, client: str, how: ForwardCall, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if sum(1 for holder, _ in self._graphs if holder == client) >= MOST_GRAPHS:
            raise RemoteError(
                "remote.too_many_graphs",
                "{limit:,} forward passes of this client are waiting for their backward pass. Run passes without "
                "gradients under torch.no_grad().",
                limit=MOST_GRAPHS,
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


def _squares(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(values.double().square().sum())


Gradients = list[dict[str, Tensor]]  # by module, then by parameter


class ServedOptimizer:
    """Optimizer for the parameters of served modules.

    Args:
        make: torch optimizer class, or a function that makes an optimizer for parameters.
        together: number of clients whose gradients are summed in one step. Each client calls `step` once per step.
    """

    CALLED: ClassVar = {"step", "set", "squared_norm", "zero_grad", "state", "load"}  # by clients

    def __init__(
        self,
        modules: list[ServedModule],
        make: Callable[..., torch.optim.Optimizer],
        settings: Mapping[str, Any],
        together: int,
    ) -> None:
        self.modules, self.together = modules, together
        parameters = [each for module in modules for each in module.module.parameters() if each.requires_grad]
        if not parameters:
            raise RemoteError(
                "remote.no_parameters",
                "these modules have no trainable parameters: requires_grad is False for all parameters",
            )
        self.optimizer = make(parameters, **settings)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise RemoteError(
                "remote.not_an_optimizer",
                "the optimizer factory returned a {class_name}, not a torch.optim.Optimizer",
                class_name=type(self.optimizer).__name__,
            )
        for module in modules:
            module.optimizers.add(self)
        self._lock = threading.RLock()
        self._rounds = threading.Condition()
        self._arrived: dict[str, tuple[str, Gradients, float]] = {}  # by client: name, gradients and scale
        self._round, self._problem = 0, ""

    def step(self, caller: Caller, context: str, scale: float, deadline_s: float) -> None:
        """Apply the gradients of a context once, multiplied by `scale`, and remove them.

        With `together`, apply the sum over `together` clients as soon as all of these clients have called `step`.

        Raises:
            RemoteError: some clients did not call `step` in time. The context keeps its gradients.
        """
        client = caller.identity
        key = (client, context)
        gradients = [module.take_gradients(key) for module in self.modules]
        if self.together == 1:
            self._apply([(gradients, scale)])
            return
        with self._rounds:
            if client in self._arrived:
                self._give_back(key, gradients)
                raise RemoteError(
                    "remote.step_repeated", "this client has already requested this step in another thread or context"
                )
            self._arrived[client] = (caller.name, gradients, scale)
            mine = self._round
            if len(self._arrived) == self.together:
                self._end_round()
            elif not self._rounds.wait_for(lambda: self._round != mine, deadline_s):
                here = ", ".join(sorted(name or "unnamed" for name, _, _ in self._arrived.values()))
                del self._arrived[client]
                self._give_back(key, gradients)
                raise RemoteError(
                    "remote.step_deadline",
                    "{together} clients must step together, but within {deadline_s:g} s only these arrived: {here}",
                    together=self.together,
                    deadline_s=deadline_s,
                    here=here,
                )
            if self._problem:
                raise RemoteError("remote.step_failed", "{reason}", reason=self._problem)

    def set(self, caller: Caller, settings: Mapping[str, Any]) -> None:
        """Change settings of all groups, e.g. the learning rate."""
        with self._lock:
            for group in self.optimizer.param_groups:
                if unknown := [name for name in settings if name not in group or name == "params"]:
                    known = ", ".join(name for name in group if name != "params")
                    raise RemoteError(
                        "remote.setting_unknown",
                        "the optimizer has no setting {name!r}. Known: {known}",
                        name=unknown[0],
                        known=known,
                    )
                group.update(settings)

    def squared_norm(self, caller: Caller, context: str) -> float:
        """Return the sum of squares of a context's gradients for this optimizer's parameters."""
        return sum(module.squared_norm((caller.identity, context)) for module in self.modules)

    def zero_grad(self, caller: Caller, context: str) -> None:
        """Remove the gradients of a context."""
        for module in self.modules:
            module.take_gradients((caller.identity, context))

    def state(self, caller: Caller) -> dict[str, Any]:
        """Return the optimizer's `state_dict` on the CPU."""
        with self._lock:
            return dict(self.optimizer.state_dict())

    def load(self, caller: Caller, state: dict[str, Any]) -> None:
        """Load a state that `state` returned."""
        with self._lock:
            self.optimizer.load_state_dict(state)

    def follow(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace old parameters with new parameters, which take over the optimizer state."""
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
        state = self.optimizer.state
        for old, parameter in new.items():
            if old in state:
                state[parameter] = state.pop(old)

    def _end_round(self) -> None:
        arrived = sorted(self._arrived.items(), key=lambda item: (item[1][0], item[0]))
        self._arrived, self._problem = {}, ""
        try:
            self._apply([(gradients, scale) for _, (_, gradients, scale) in arrived])
        except Exception as error:  # noqa: BLE001 - every client of the round gets it
            self._problem = f"the step failed: {type(error).__name__}: {error}"
        self._round += 1
        self._rounds.notify_all()

    def _apply(self, given: list[tuple[Gradients, float]]) -> None:
        with self._lock, ExitStack() as stack:
            for module in sorted(self.modules, key=id):  # all optimizers take the locks in the same order
                stack.enter_context(module.lock)
                module.make_writable()
            for position, module in enumerate(self.modules):
                for name, parameter in module.module.named_parameters():
                    parts = [
                        gradients[position][name] * scale if scale != 1.0 else gradients[position][name]
                        for gradients, scale in given
                        if name in gradients[position]
                    ]
                    parameter.grad = functools.reduce(torch.add, parts) if parts else None
            try:
                self.optimizer.step()
            finally:
                for module in self.modules:
                    module.version += 1
                    module.module.zero_grad()

    def _give_back(self, context: Context, gradients: Gradients) -> None:
        for module, given in zip(self.modules, gradients, strict=True):
            module.add_gradients(context, given)


_passes = threading.Condition()
_under_way = {"ordinary": 0, "alone": 0}  # forward passes of this process


@contextmanager
def drawing_from(seeds: torch.Generator | None) -> Iterator[None]:
    """Draw random numbers from a module's own stream; without one, from the process's stream.

    All threads of a process share torch's default generator. While a module draws from its own stream, no other forward
    pass runs, so the stream depends only on the passes of this module.
    """
    kind = "ordinary" if seeds is None else "alone"
    with _passes:
        _passes.wait_for(lambda: not _under_way["alone"] and (seeds is None or not _under_way["ordinary"]))
        _under_way[kind] += 1
    try:
        if seeds is None:
            yield
        else:
            with _seeded(int(torch.randint(2**62, (), generator=seeds))):
                yield
    finally:
        with _passes:
            _under_way[kind] -= 1
            _passes.notify_all()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators within this context, and restore their states on exit."""
    if torch.accelerator.is_available():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
        return
    # `torch.manual_seed` also stores seeds for absent devices, which takes longer than a small forward pass
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
