"""A process that serves modules, objects and functions to the other processes of a run."""

from __future__ import annotations

import inspect
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidValue, PacelineError, RemoteError
from paceline.job.spec import import_path_of, load_object, resolve_import_path
from paceline.text import nearest
from paceline.wire.key import RunKey, own_key
from paceline_server.client import place_of
from paceline_server.modules.held import Answers, HeldObjects
from paceline_server.modules.served_module import ServedModule, ServedOptimizer
from paceline_server.service import Caller, Limits, Service
from paceline_server.talk import Closing
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
    """Serve functions and classes to clients of the run from threads of this process.

    Clients make modules and objects from these classes and call these functions; everything else is refused. An object
    exists as long as a client holds a reference to it.

    Args:
        what: import paths (`pkg.mod:name`, `file.py:name`), or the functions and classes themselves. Clients refer to
            each function or class by its import path.
        where: address and port (0 for any port), `"address:port"`, or the path of a Unix socket in a private folder.
        key: key of the run; by default the key passed to this process.
        threads: number of calls that may run concurrently.
        grace_s: seconds after which the objects of an unreachable client are released.
        limits: limits for the messages and pending calls of one client.

    Raises:
        JobError: an import path cannot be resolved.
        ChannelError: the service cannot listen at this address.
    """
    allowed = {path: load_object(resolved) for path, resolved in map(_path_of, what)}
    if not allowed:
        raise PacelineError(
            "remote.nothing_to_serve",
            "no name was given, so there is nothing to serve. Name each class or function that clients may use by "
            "its import path, pkg.mod:name.",
        )
    limits = limits or Limits(calls_at_once=max(1, threads // 2))
    return Serving(allowed, place_of(where), key or own_key(), threads, grace_s, limits)


class Serving(Closing):
    """A service of modules and objects, as a context manager.

    Args:
        allowed: functions and classes that clients may use, by import path.
        threads: number of threads. One thread never runs steps that wait for other clients.
        grace_s: seconds within which a client must reconnect after a lost connection.

    Attributes:
        address: address at which clients connect.
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
        self._answers: dict[str, defaultdict[str, Answers]] = {}  # answers by client and lane
        self._lock = threading.Lock()
        # functions with side effects run once per call, in the order of their lane
        once = (self.make, self.attach, self.release, self.call, self.optimizer, self.of)
        functions = {function.__name__: self._once(function) for function in once}
        functions |= {"leave": self.leave, "stream": self.stream}
        self._service = Service(
            where, key, functions, threads=threads, limits=limits, grace_s=grace_s, on_lost=self._forget
        )
        self.address = self._service.address

    @property
    def unauthenticated(self) -> int:
        """Number of refused connections."""
        return self._service.unauthenticated

    @property
    def objects(self) -> int:
        """Number of objects that clients hold."""
        return len(self._held)

    def close(self) -> None:
        """End the service. Pending calls get an error."""
        self._service.close()

    # Functions that clients call by name

    def leave(self, caller: Caller) -> None:
        """Forget a client at its own request."""
        self._service.presence.forget(caller)

    def make(
        self, caller: Caller, path: str, args: Any, kwargs: Any, name: str | None, seed: int | None, module: bool
    ) -> Any:
        """Make an object with the factory at the import path `path`.

        Returns:
            The number of the object. For a module, also its mode, and the shape and bytes of each entry of its state.
        """
        factory = self._named(path)

        def made() -> Any:
            with torch.random.fork_rng(enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                what = factory(*self._received(caller, args), **self._received(caller, kwargs))
            if not isinstance(what, nn.Module):
                if module:
                    raise RemoteError(
                        "remote.factory_not_a_module",
                        "{path} returned a {class_name}, not an nn.Module. Use `remote.create`.",
                        path=path,
                        class_name=type(what).__name__,
                    )
                return what
            return ServedModule(what, None if seed is None else torch.Generator().manual_seed(seed))

        recipe = f"{path}, arguments {args!r} {kwargs!r}" if name is not None else path
        number = self._held.make(caller.identity, recipe[:1000], name, made)
        if not module:
            return number
        made_module = self._module(caller, number).module
        state = {name: (list(t.shape), t.nbytes) for name, t in made_module.state_dict().items()}
        return number, made_module.training, state

    def attach(self, caller: Caller, number: str) -> None:
        """Give a client a reference to the object with this number."""
        self._held.attach(caller.identity, number)

    def release(self, caller: Caller, numbers: list[str]) -> None:
        """Remove one reference of a client to each of these objects."""
        self._held.release(caller.identity, numbers)

    def call(self, caller: Caller, path: str, number: str | None, args: Any, kwargs: Any) -> Any:
        """Call the function with the import path `path`, or the object's public method `path`."""
        function = self._named(path) if number is None else self._method(caller, number, path)
        return self._sent(function(*self._received(caller, args), **self._received(caller, kwargs)))

    def stream(self, caller: Caller, path: str, number: str | None, args: Any, kwargs: Any) -> Iterator[Any]:
        """Call a generator function or method like `call`, and iterate over its results."""
        for result in self.call(caller, path, number, args, kwargs):
            yield self._sent(result)

    def of(self, caller: Caller, number: str, function: str, args: Any) -> Any:
        """Call a function of the `ServedModule` or `ServedOptimizer` itself."""
        what = self._held.get(caller.identity, number)
        if not isinstance(what, ServedModule | ServedOptimizer) or function not in what.CALLED:
            raise RemoteError(
                "remote.no_attribute",
                "object {object} is a {class_name}, which has no {function!r}",
                object=number,
                class_name=type(what).__name__,
                function=function,
            )
        return getattr(what, function)(caller, *self._received(caller, args))

    def optimizer(
        self, caller: Caller, numbers: list[str], path: str, settings: dict[str, Any], together: int, name: str | None
    ) -> str:
        """Make an optimizer for the parameters of modules."""
        make = OPTIMIZERS.get(path) or self._named(path, OPTIMIZERS)
        if together > self._most_together:
            raise RemoteError(
                "remote.too_few_threads",
                "together={together}, but the threads of this service allow only {limit} clients to wait for each "
                "other. Serve with threads={threads} or more.",
                together=together,
                limit=self._most_together,
                threads=together + 1,
            )
        modules = [self._module(caller, number) for number in numbers]
        recipe = f"{path} {settings!r} over {', '.join(numbers)}, together={together}"
        return self._held.make(
            caller.identity, recipe, name, lambda: ServedOptimizer(modules, make, settings, together)
        )

    def _once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(caller: Caller, lane: str, number: int, floor: int, *args: Any) -> Any:
            with self._lock:
                answers = self._answers.setdefault(caller.identity, defaultdict(Answers))[lane]
            return answers.once(number, floor, lambda: function(caller, *args))

        return run

    def _forget(self, caller: Caller) -> None:
        client = caller.identity
        with self._lock:
            self._answers.pop(client, None)
        for what in self._held.all():
            if isinstance(what, ServedModule):
                what.leave(client)
        self._held.leave(client)

    def _named(self, path: str, more: Mapping[str, Any] = {}) -> Any:
        if path not in self._allowed:
            raise RemoteError(
                "remote.not_served",
                '"{path}" is not served here. {hint}',
                path=path,
                hint=nearest(path, [*self._allowed, *more]),
            )
        return self._allowed[path]

    def _method(self, caller: Caller, number: str, name: str) -> Callable[..., Any]:
        what = self._held.get(caller.identity, number)
        what = what.module if isinstance(what, ServedModule) else what
        if name.startswith("_") or not inspect.isfunction(inspect.getattr_static(type(what), name, None)):
            raise RemoteError(
                "remote.method_not_public",
                "{name!r} is not a public method of {class_name}",
                name=name,
                class_name=type(what).__name__,
            )
        method: Callable[..., Any] = getattr(what, name)
        return method

    def _module(self, caller: Caller, number: str) -> ServedModule:
        what = self._held.get(caller.identity, number)
        if not isinstance(what, ServedModule):
            raise RemoteError(
                "remote.not_a_module",
                "object {object} is a {class_name}, not a module",
                object=number,
                class_name=type(what).__name__,
            )
        return what

    def _received(self, caller: Caller, value: Any) -> Any:
        """Replace numbers of objects in the arguments with the objects."""

        def found(leaf: Any) -> Any:
            if not isinstance(leaf, Held):
                return leaf
            what = self._held.get(caller.identity, leaf.number)
            return what.module if isinstance(what, ServedModule) else what

        return mapped(found, value)

    def _sent(self, value: Any) -> Any:
        """Detach results, because gradients flow through modules only."""
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
    except InvalidValue as error:
        raise PacelineError.of_error(error) from error
