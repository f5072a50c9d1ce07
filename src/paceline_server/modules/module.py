"""Modules and optimizers whose parameters are in another process, with autograd."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline_server.modules.host import Answer, HasReference, Host, Named, Reference, host_of, path_of, sent_to
from paceline_server.modules.served_module import ForwardCall, HasAnchor
from paceline_server.modules.turns import Turns, threads, waiting
from paceline_server.values import tensors_of, with_tensors

_PIECE_BYTES = 2**26  # maximum bytes of module state in one call
_STATE_TRIES = 5
_graphs = itertools.count()  # numbers for the forward passes of this process


def module(
    host: str | Host, factory: Named, *args: Any, name: str | None = None, seed: int | None = None, **kwargs: Any
) -> RemoteModule:
    """Make a module in another process with `factory(*args, **kwargs)`, and return a local stand-in.

    Args:
        host: name of a connection (`remote.connect`).
        factory: a function or class that the serving process serves, or its import path.
        name: name of a shared module. The first client makes the module, and other clients get the same module.
        seed: seed for the initial weights (as after `torch.manual_seed(seed)`) and for the random numbers of forward
            passes, independent of other work in the serving process. Without a seed, the module uses the process's
            generator.

    Raises:
        RemoteError: the other process does not serve the factory, or the factory raised or returned no module.
    """
    at = host_of(host)
    what = path_of(factory)
    made = at.call("make", "make", what, *sent_to(at, (args, kwargs)), name, seed, True, what=what)
    number, training, state = made
    return RemoteModule(Reference(at, number, what), training, state)


class PendingOutput:
    """Output of a pending forward pass.

    Args:
        anchor: tensor that represents the module's parameters in autograd; None if no graph is needed.
        inputs: the inputs that need a gradient.
    """

    def __init__(self, forward: ForwardPass, anchor: Tensor | None, inputs: list[Tensor], device: torch.device) -> None:
        self._forward, self._anchor, self._inputs, self._device = forward, anchor, inputs, device

    def result(self) -> Any:
        """Wait for the output, which is attached to the autograd graph. Call this only once."""
        result, differentiable = self._forward.result()
        outputs = tensors_of(result)
        if self._anchor is not None and differentiable:
            outputs = list(_Remote.apply(self._forward, outputs, differentiable, self._anchor, *self._inputs))
        return with_tensors(result, [output.to(self._device) for output in outputs])


class RemoteModule(nn.Module, HasReference, HasAnchor):
    """Local stand-in for a module in another process.

    Calls run in the other process, and autograd works through these calls. Gradients of the module's parameters stay in
    that process, and `remote.optimizer` applies them. The module has no parameters in this process, so local optimizers
    and data parallelism ignore it. Each call carries the mode (`train`, `eval`), autocast and `no_grad`. `state_dict`
    and `load_state_dict` access the remote parameters and buffers.
    """

    def __init__(self, reference: Reference, training: bool, state: dict[str, tuple[list[int], int]]) -> None:
        super().__init__()
        self.reference = reference
        self.anchor = torch.zeros((), requires_grad=True)
        self.training, self._state = training, state  # shape and bytes of each entry

    @property
    def host(self) -> Host:
        """Connection to the process that holds the module."""
        return self.reference.host

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the remote module's forward pass.

        Raises:
            RemoteError: the forward pass raised.
            DeadlineError: the forward pass did not end in time.
        """
        return self.begin(*args, **kwargs).result()

    def begin(self, *args: Any, **kwargs: Any) -> PendingOutput:
        """Send a forward pass. `result()` of the returned object waits for the output.

        Forward passes of one module run in the order sent.
        """
        given = tensors_of((args, kwargs))
        graphs = torch.is_grad_enabled()
        needs = [n for n, tensor in enumerate(given) if graphs and tensor.requires_grad]
        args, kwargs = sent_to(self.host, with_tensors((args, kwargs), [tensor.detach() for tensor in given]))
        device = given[0].device if given else torch.device("cpu")
        how = ForwardCall(next(_graphs), current_context(), self.training, graphs, _autocast(device), tuple(needs))
        answer = self.reference.ask("forward", how, args, kwargs, what="the forward pass")
        forward = ForwardPass(self.reference, how.graph, answer)
        return PendingOutput(forward, self.anchor if graphs else None, [given[n] for n in needs], device)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another public method of the module, without gradients."""
        return self.reference.call(method, *args, **kwargs)

    def extra_repr(self) -> str:
        """Return the factory and host, for `print`."""
        return f"{self.reference.what} on {self.host.name}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._fetch_state().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        missing_keys += [prefix + name for name in self._state if name not in given]
        unexpected_keys += [prefix + name for name in given if name not in self._state]
        fitting = {}
        for name, (shape, _) in self._state.items():
            if name in given and list(given[name].shape) != list(shape):
                error_msgs.append(f"size mismatch for {prefix}{name}: {list(given[name].shape)} is not {list(shape)}")
            elif name in given:
                fitting[name] = given[name].detach()
        if not error_msgs and not (strict and (missing_keys or unexpected_keys)):
            for names in self._pieces(fitting):
                self.reference.ask("load", {name: fitting[name] for name in names}).result()

    def _fetch_state(self) -> dict[str, Tensor]:
        for _ in range(_STATE_TRIES):
            state: dict[str, Tensor] = {}
            versions = set()
            for names in self._pieces(self._state):
                version, piece = self.reference.ask("state", names).result()
                versions.add(version)
                state |= piece
            if len(versions) <= 1:
                return state
        raise PacelineError(
            "remote.state_moving",
            "{reference!r} is updated faster than its state can be read. Pause its optimizers.",
            reference=self.reference,
        )

    def _pieces(self, names: Iterable[str]) -> list[list[str]]:
        """Divide names into groups, each with a limited number of bytes."""
        groups: list[list[str]] = []
        size = _PIECE_BYTES
        for name in names:
            size += self._state[name][1]
            if size > _PIECE_BYTES:
                groups.append([])
                size = self._state[name][1]
            groups[-1].append(name)
        return groups

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = torch.zeros(1)
        if fn(probe).dtype != probe.dtype:
            raise PacelineError(
                "remote.not_convertible",
                "{reference!r} cannot be converted by this process. Create it with that dtype in its factory, or "
                "run it under autocast.",
                reference=self.reference,
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise an error, because only the serving process can change which parameters are trained."""
        raise PacelineError(
            "remote.requires_grad",
            "{reference!r}: the factory in the other process decides which parameters are trained. To keep them "
            "fixed, do not create an optimizer for it.",
            reference=self.reference,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise PacelineError(
            "remote.not_copyable",
            "{reference!r} cannot be copied. Create another one with remote.module.",
            reference=self.reference,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PacelineError(
            "remote.not_picklable", "{reference!r} cannot be pickled. Save its state_dict().", reference=self.reference
        )


def _autocast(device: torch.device) -> str | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


_current: ContextVar[str] = ContextVar("context", default="")


@contextmanager
def context() -> Iterator[str]:
    """Collect gradients of this thread's forward passes separately from other contexts.

    A backward pass adds gradients to the context of its forward pass. `step` applies the gradients of the context in
    which it is called. Without a context, all forward passes of a process share one default context, as with `.grad`.
    """
    token = _current.set(secrets.token_hex(8))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def current_context() -> str:
    """Return the name of this thread's context."""
    return _current.get()


T = TypeVar("T")


def microbatches(step: Callable[[Any], T], batches: Iterable[Any], *, in_flight: int = 4) -> list[T]:
    """Run `step(batch)` for each microbatch, several at a time, and return the results.

    `step` runs the forward and backward pass of one microbatch. Stages on several hosts work on different microbatches
    at the same time, like a pipeline without a schedule. In this process, only one microbatch computes at a time. When
    this microbatch waits for a host, the earliest microbatch that is ready continues. Gradients are summed in order of
    arrival, so the rounding differs from run to run. The first error is raised after all microbatches in progress have
    ended.

    Args:
        step: e.g. `lambda b: (loss(second(first(b.x)), b.y) / count).backward()`.
        in_flight: maximum number of microbatches in progress. Each microbatch keeps its activations in memory.
    """
    if in_flight < 1:
        raise PacelineError(
            "remote.in_flight_invalid",
            "in_flight={in_flight} must be at least 1",
            in_flight=in_flight,
        )
    grad = torch.is_grad_enabled()

    turns = Turns()

    def run(number: int, batch: Any) -> T:
        with turns.taken(number), torch.set_grad_enabled(grad):  # each thread has its own autocast state
            return step(batch)

    with threads(in_flight) as pool:
        futures = [pool.submit(copy_context().run, run, number, batch) for number, batch in enumerate(batches)]
        with waiting():
            _, running = wait(futures, return_when=FIRST_EXCEPTION)
            for future in running:
                future.cancel()
            wait(futures)
    return [future.result() for future in futures if not future.cancelled()]


class ForwardPass:
    """Forward pass that was sent to the other process.

    The remote graph is freed when no backward pass through it is possible any more.
    """

    def __init__(self, module: Reference, graph: int, answer: Answer) -> None:
        self.module, self.graph, self._answer = module, graph, answer
        self.kept = True

    def result(self) -> tuple[Any, list[int]]:
        """Return the outputs, and the positions of the output tensors that accept gradients."""
        result, differentiable = self._answer.result()
        self.kept = bool(differentiable)
        return result, differentiable

    def begin_backward(self, gradients: list[Tensor | None], *, accumulate: bool, keep: bool) -> Answer:
        """Send the gradients of the outputs; the answer contains the gradients of the inputs."""
        self.kept = keep
        return self.module.ask("backward", self.graph, gradients, accumulate, keep, what="the backward pass")

    def __del__(self) -> None:
        if self.kept:
            self.module.host.release("of", self.module.token, (self.module.token, "free"), self.graph)


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
                "remote.create_graph",
                "{what}: create_graph=True cannot go through a remote module, whose graph is in another process. "
                "Compute second derivatives within one process.",
                what=forward.module.what,
            )
        _ = ctx.saved_tensors  # raises torch's own error if a backward pass without retain_graph has already run
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        answer = forward.begin_backward(list(gradients), accumulate=_is_wanted(ctx.edge.node), keep=keep)
        inputs = ctx.needs_input_grad[4:]
        if not inputs:  # other hosts compute at the same time, and the backward pass ends when all hosts have finished
            torch.autograd.Variable._execution_engine.queue_callback(answer.result)
            return None, None, None, None
        return None, None, None, None, *answer.result()


def _is_wanted(node: Any) -> bool:
    """Return True if this backward pass accumulates gradients in parameters.

    `loss.backward()` accumulates gradients, and `torch.autograd.grad` does not.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf requested by torch.autograd.grad, such as a module nested in a served module
        return True


def optimizer(
    modules: RemoteModule | Sequence[RemoteModule],
    make: str | Callable[..., Any],
    *,
    together: int = 1,
    name: str | None = None,
    **settings: Any,
) -> RemoteOptimizer:
    """Make an optimizer for the parameters of remote modules, with one part on each host.

    Args:
        make: "sgd", "adam", "adamw", "adagrad", "rmsprop", "sparse_adam", or an import path that the hosts serve.
        together: number of clients that share these modules and step together with the sum of their gradients, as in
            data parallelism. All clients pass the same `name`.
        settings: settings of the optimizer, such as `lr`.

    Raises:
        RemoteError: a host does not serve the optimizer, or creating the optimizer raised an error.
        PacelineError: there are no modules, or `together` is greater than one without a `name`.
    """
    chosen = [modules] if isinstance(modules, RemoteModule) else list(modules)
    if not chosen:
        raise PacelineError("remote.no_modules", "an optimizer needs at least one remote module")
    if together < 1 or (together > 1 and name is None):
        raise PacelineError(
            "remote.together_invalid",
            "together={together}: this must be the number of clients that step together. With more than one "
            'client, all of them need the same name for the optimizer, e.g. name="tables".',
            together=together,
        )
    path = make if isinstance(make, str) else path_of(make)
    parts = []
    for host in dict.fromkeys(module.host for module in chosen):
        numbers = [module.reference.number for module in chosen if module.host is host]
        made = host.call("optimizer", "make", numbers, path, settings, together, name, what=path)
        parts.append(Reference(host, made, f"optimizer {path}"))
    return RemoteOptimizer(parts)


class RemoteOptimizer:
    """Optimizer that steps parameters in the processes that hold them.

    `step` applies the gradients of this process in the current context. Each gradient is applied once, even if a
    connection is lost in the meantime, and is then removed, as with `zero_grad`.
    """

    def __init__(self, parts: list[Reference]) -> None:
        self._parts = parts

    def step(self, *, scale: float = 1.0, deadline_s: float | None = None) -> None:
        """Take one step on every host concurrently.

        Args:
            scale: factor for the gradients, e.g. to clip their norm.
            deadline_s: deadline of the step. With `together`, the other clients must call `step` within this time.

        Raises:
            RemoteError: the optimizer raised an error, or not all clients called `step` in time. In the second case,
                the gradients are kept.
            DeadlineError: a host did not answer in time.
        """
        if not math.isfinite(scale):
            raise PacelineError(
                "remote.scale_invalid", "step(scale={scale}): scale must be a finite number", scale=scale
            )
        answers = []
        for part in self._parts:
            patience_s = deadline_s or part.host.deadline_s
            given = (current_context(), float(scale), patience_s)
            answers.append(part.ask("step", *given, deadline_s=patience_s + _SLACK_S))
        for answer in answers:
            answer.result()

    def zero_grad(self) -> None:
        """Remove the gradients of this context without a step."""
        self._ask("zero_grad", current_context())

    def gradient_norm(self) -> float:
        """Return the L2 norm of this process's gradients in this context, over all hosts.

        The gradients of other clients (`together`) are not included.
        """
        return math.sqrt(sum(self._ask("squared_norm", current_context())))

    def set(self, **settings: Any) -> None:
        """Change settings, such as the learning rate."""
        self._ask("set", settings)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the optimizer's state, by host."""
        return self._ask("state")

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            PacelineError: the state was saved with a different number of hosts.
        """
        if len(states) != len(self._parts):
            raise PacelineError(
                "remote.state_of_other_hosts",
                "the state belongs to modules on {saved} hosts, but these modules are on {here} hosts",
                saved=len(states),
                here=len(self._parts),
            )
        for part, state in zip(self._parts, states, strict=True):
            part.ask("load", state).result()

    def _ask(self, function: str, *args: Any) -> list[Any]:
        answers = [part.ask(function, *args) for part in self._parts]
        return [answer.result() for answer in answers]


_SLACK_S = 5.0  # extra time for the answer after the remote deadline
