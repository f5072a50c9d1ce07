"""A process that serves modules, objects and functions to the other processes of a run."""

from __future__ import annotations

import inspect
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError, RemoteError
from paceline.job.spec import import_path_of, load_object, resolve_import_path
from paceline.text import nearest
from paceline.wire.key import RunKey, own_key
from paceline_server.modules.held import HeldObjects, Lane, Leases
from paceline_server.modules.host import place_of
from paceline_server.modules.served_module import ForwardCall, ServedModule, ServedOptimizer
from paceline_server.service import Caller, Limits, Service
from paceline_server.talk import quick
from paceline_server.values import Held, mapped

THREADS = 32
GRACE_S = 30.0


def serve(
    what: Iterable[str | Callable[..., Any]],
    where: tuple[str, int] | str | Path | socket.socket,
    key: RunKey | None = None,
    *,
    threads: int = THREADS,
    grace_s: float = GRACE_S,
    limits: Limits | None = None,
) -> Serving:
    """Serve functions and classes to clients of the run, in threads of this process.

    Clients make modules and objects by them, and call them; they can name nothing else. What they make lives as long as
    somebody holds it.

    Args:
        what: import paths (`pkg.mod:name`, `file.py:name`), or functions and classes themselves. Clients name each by
            that path.
        where: address and port (0: any), `"address:port"`, or the path of a Unix socket in a private folder.
        key: of the run; the one handed to this process where none is given.
        threads: calls that may run at a time.
        grace_s: seconds after which what a client holds is let go when it cannot be reached.
        limits: on what one client may send and have under way.

    Raises:
        JobError: an import path leads nowhere.
        ChannelError: it cannot listen there.
    """
    allowed = {path: load_object(resolved) for path, resolved in map(_path_of, what)}
    if not allowed:
        raise PacelineError("there is nothing to serve: name what clients may use by its import path, pkg.mod:name")
    limits = limits or Limits(calls_at_once=max(1, threads // 2))
    return Serving(allowed, place_of(where), key or own_key(), threads, grace_s, limits)


class Serving:
    """A service of modules and objects. A context manager, which ends it.

    Args:
        allowed: what clients may name, by import path.
        threads: one of them stays free of clients whose steps wait for one another.
        grace_s: seconds that a client whose connection was lost has to come back.

    Attributes:
        address: where clients reach it.
    """

    def __init__(
        self,
        allowed: Mapping[str, Any],
        where: tuple[str, int] | Path | socket.socket,
        key: RunKey | None,
        threads: int,
        grace_s: float,
        limits: Limits,
    ) -> None:
        self._allowed, self._most_together = allowed, threads - 1
        self._held = HeldObjects()
        self._process = secrets.token_hex(8)
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._lock = threading.Lock()
        self._leases = Leases(grace_s, self._forget)
        # those that change anything run once, in the order of their lane
        once = (
            self.make, self.attach, self.release, self.call, self.method, self.forward, self.backward, self.free,
            self.state, self.load, self.optimizer, self.step, self.of_optimizer,
        )  # fmt: skip
        functions = {function.__name__: self._once(function) for function in once}
        functions |= {"hello": self.hello, "leave": self.leave, "skip": self.skip, "stream": self.stream}
        try:
            self._service = Service(where, key, functions, threads=threads, limits=limits, on_leave=self._leases.left)
        except BaseException:
            self._leases.close()
            raise
        self.address = self._service.address

    @property
    def unauthenticated(self) -> int:
        """Number of connections that were turned away."""
        return self._service.unauthenticated

    @property
    def objects(self) -> int:
        """Number of objects that are held."""
        return len(self._held)

    def close(self) -> None:
        """End the service; calls under way get an error."""
        self._leases.close()
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.end()
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Functions by the names that calls carry

    @quick
    def hello(self, caller: Caller) -> tuple[str, bool]:
        """Name of this process, and True if the client was here before."""
        return self._process, self._leases.came(caller)

    def leave(self, caller: Caller) -> None:
        """Forget a client, as it wishes."""
        self._leases.forget(caller.identity)

    def skip(self, caller: Caller, lane: str, numbers: list[int]) -> None:
        """Wait no more for calls that a client has given up."""
        self._lane(caller, lane).skip(numbers)

    def make(
        self, caller: Caller, path: str, args: Any, kwargs: Any, name: str | None, seed: int | None, module: bool
    ) -> dict[str, Any]:
        """Make an object by what `path` names; for a module, also describe it."""
        factory = self._named(path)

        def made() -> Any:
            with torch.random.fork_rng(enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                what = factory(*self._received(caller, args), **self._received(caller, kwargs))
            if not isinstance(what, nn.Module):
                return what
            return ServedModule(what, None if seed is None else torch.Generator().manual_seed(seed))

        recipe = f"{path}, arguments {args!r} {kwargs!r}" if name is not None else path
        number, lease = self._held.make(caller.identity, recipe[:1000], name, made)
        answer = {"object": number, "lease": lease}
        if module:
            answer |= self._about(caller, number, path)
        return answer

    def attach(self, caller: Caller, number: str) -> dict[str, Any]:
        """Have a client hold an object that another one has told it of."""
        return {"object": number, "lease": self._held.attach(caller.identity, number)}

    def release(self, caller: Caller, leases: list[str]) -> None:
        """End leases."""
        self._held.release(caller.identity, leases)

    def call(self, caller: Caller, path: str, args: Any, kwargs: Any) -> Any:
        """Call a function by its import path."""
        return self._sent(self._named(path)(*self._received(caller, args), **self._received(caller, kwargs)))

    def method(self, caller: Caller, number: str, name: str, args: Any, kwargs: Any) -> Any:
        """Call a public method of an object."""
        method = self._method(caller, number, name)
        return self._sent(method(*self._received(caller, args), **self._received(caller, kwargs)))

    def stream(self, caller: Caller, path: str, number: str | None, args: Any, kwargs: Any) -> Iterator[Any]:
        """Results of a function, or of the method `path` of an object, as they come."""
        function = self._named(path) if number is None else self._method(caller, number, path)
        for result in function(*self._received(caller, args), **self._received(caller, kwargs)):
            yield self._sent(result)

    def forward(self, caller: Caller, number: str, how: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        """Run a module's forward pass."""
        graph, context, training, gradients, autocast, needs = how
        asked = ForwardCall(graph, context, training, gradients, autocast, tuple(needs))
        module = self._module(caller, number)
        args, kwargs = self._received(caller, args), self._received(caller, kwargs)
        return module.forward(caller.identity, asked, args, kwargs)

    def backward(
        self, caller: Caller, number: str, graph: int, gradients: list[Tensor | None], accumulate: bool, keep: bool
    ) -> list[Tensor | None]:
        """Run the backward pass of a forward pass."""
        module = self._module(caller, number)
        return module.backward(caller.identity, graph, gradients, accumulate=accumulate, keep=keep)

    def free(self, caller: Caller, number: str, graphs: list[int]) -> None:
        """Free graphs of a module."""
        self._module(caller, number).release(caller.identity, graphs)

    def state(self, caller: Caller, number: str, names: list[str]) -> tuple[int, dict[str, Tensor]]:
        """Part of a module's state."""
        return self._module(caller, number).state(names)

    def load(self, caller: Caller, number: str, state: dict[str, Tensor]) -> None:
        """Load part of a module's state."""
        self._module(caller, number).load(state)

    def optimizer(
        self, caller: Caller, numbers: list[str], path: str, settings: dict[str, Any], together: int, name: str | None
    ) -> dict[str, Any]:
        """Make an optimizer over modules."""
        make = OPTIMIZERS.get(path) or self._named(path, OPTIMIZERS)
        if together > self._most_together:
            raise RemoteError(
                f"together={together}, and the threads here are enough for {self._most_together} clients that wait for "
                f"one another; serve with threads={together + 1} or more"
            )
        modules = [self._module(caller, number) for number in numbers]
        recipe = f"{path} {settings!r} over {', '.join(numbers)}, together={together}"
        number, lease = self._held.make(
            caller.identity, recipe, name, lambda: ServedOptimizer(modules, make, settings, together)
        )
        return {"object": number, "lease": lease}

    def step(self, caller: Caller, number: str, context: str, scale: float, deadline_s: float) -> None:
        """Step an optimizer."""
        self._optimizer(caller, number).step(caller.identity, caller.name, context, scale, deadline_s)

    def of_optimizer(self, caller: Caller, number: str, what: str, value: Any) -> Any:
        """Everything else that is asked of an optimizer."""
        optimizer = self._optimizer(caller, number)
        match what:
            case "set":
                return optimizer.set(value)
            case "squared_norm":
                return optimizer.squared_norm((caller.identity, value))
            case "zero_grad":
                return optimizer.zero_grad((caller.identity, value))
            case "state":
                return optimizer.state()
            case "load":
                return optimizer.load(value)
        raise RemoteError(f"nothing of an optimizer is called {what!r}")

    def _once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(caller: Caller, lane: str, number: int, floor: int, *args: Any) -> Any:
            return self._lane(caller, lane).run(number, floor, lambda: function(caller, *args))

        return run

    def _lane(self, caller: Caller, lane: str) -> Lane:
        with self._lock:
            return self._lanes.setdefault((caller.identity, lane), Lane())

    def _forget(self, client: str) -> None:
        with self._lock:
            lanes = [self._lanes.pop(key) for key in list(self._lanes) if key[0] == client]
        for lane in lanes:
            lane.end()
        for what in self._held.all():
            if isinstance(what, ServedModule):
                what.leave(client)
        self._held.leave(client)

    def _named(self, path: str, more: Mapping[str, Any] = {}) -> Any:
        if path not in self._allowed:
            raise RemoteError(f'"{path}" is not served here. {nearest(path, [*self._allowed, *more])}')
        return self._allowed[path]

    def _method(self, caller: Caller, number: str, name: str) -> Callable[..., Any]:
        what = self._held.get(caller.identity, number)
        what = what.module if isinstance(what, ServedModule) else what
        if name.startswith("_") or not inspect.isfunction(inspect.getattr_static(type(what), name, None)):
            raise RemoteError(f"{name!r} is no public method of {type(what).__name__}")
        method: Callable[..., Any] = getattr(what, name)
        return method

    def _module(self, caller: Caller, number: str) -> ServedModule:
        what = self._held.get(caller.identity, number)
        if not isinstance(what, ServedModule):
            raise RemoteError(f"object {number} is a {type(what).__name__}, and no module")
        return what

    def _optimizer(self, caller: Caller, number: str) -> ServedOptimizer:
        what = self._held.get(caller.identity, number)
        if not isinstance(what, ServedOptimizer):
            raise RemoteError(f"object {number} is a {type(what).__name__}, and no optimizer")
        return what

    def _about(self, caller: Caller, number: str, path: str) -> dict[str, Any]:
        what = self._held.get(caller.identity, number)
        if not isinstance(what, ServedModule):
            raise RemoteError(f"{path} made a {type(what).__name__}, and no nn.Module; `remote.create` is for others")
        return {
            "training": what.module.training,
            "state": {name: (list(t.shape), str(t.dtype), t.nbytes) for name, t in what.module.state_dict().items()},
            "parameters": [name for name, _ in what.module.named_parameters()],
        }

    def _received(self, caller: Caller, value: Any) -> Any:
        """Arguments with the objects that they name."""

        def found(leaf: Any) -> Any:
            if not isinstance(leaf, Held):
                return leaf
            what = self._held.get(caller.identity, leaf.number)
            return what.module if isinstance(what, ServedModule) else what

        return mapped(found, value)

    def _sent(self, value: Any) -> Any:
        """Results without graphs: gradients go through modules alone."""
        return mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sparse_adam": torch.optim.SparseAdam,
}


def _path_of(what: str | Callable[..., Any]) -> tuple[str, str]:
    path = what if isinstance(what, str) else import_path_of(what)
    try:
        return path, resolve_import_path(path, None)
    except ValueError as error:
        raise PacelineError(str(error)) from error
