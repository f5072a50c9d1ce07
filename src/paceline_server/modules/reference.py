"""Objects in another process: each lives as long as somebody holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from paceline.errors import PacelineError
from paceline.job.spec import import_path_of
from paceline_server.modules.host import Host, host_of
from paceline_server.modules.tensors import Held, mapped

Named = str | Callable[..., Any]  # an import path as the serving process was told it, or what it leads to


class Reference:
    """An object in another process, which this process holds.

    It ends there when nobody holds it any more: when every reference to it was released, was deleted, or is of a
    process that could not be reached for longer than the serving process's grace time. As an argument of a call to the
    same host it stands for the object.

    Attributes:
        token: by which another process can hold the object, too, with `remote.attach`.
    """

    def __init__(self, host: Host, made: dict[str, Any], what: str) -> None:
        self.host, self.token, self.what = host, str(made["object"]), what
        self._lease: str | None = made["lease"]

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a public method of the object. Calls of one object run in the order sent."""
        return self.begin(method, *args, **kwargs).result()

    def begin(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Send a call of a method, and wait for it by the answer's `result()`."""
        given = sent_to(self.host, (args, kwargs))
        return self.host.begin("method", self.token, self.number, method, *given, what=f"{self.what}.{method}")

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Results of a method that is a generator, as they come."""
        given = sent_to(self.host, (args, kwargs))
        stream: Iterator[Any] = self.host.stream(method, self.number, *given)
        return stream

    @property
    def number(self) -> str:
        """The object's number there.

        Raises:
            PacelineError: it was released.
        """
        if self._lease is None:
            raise PacelineError(f"{self.what} on {self.host.name} was released by this process")
        return self.token

    def release(self) -> None:
        """Let go of the object; it cannot be used through this reference any more."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self.host.release("release", "release", (), lease)

    def __del__(self) -> None:
        if getattr(self, "_lease", None) is not None:
            self.release()

    def __repr__(self) -> str:
        return f"<{self.what} on {self.host.name}>"


class HasReference:
    """Stands for an object in another process, as a remote module does."""

    reference: Reference


def create(host: str | Host, factory: Named, *args: Any, name: str | None = None, **kwargs: Any) -> Reference:
    """Make an object in another process.

    Args:
        factory: a function or class that the serving process was told to serve.
        name: under which clients share one object: the first makes it, the others get it, too.

    Raises:
        RemoteError: it is not served there, or raised.
    """
    at = host_of(host)
    what = path_of(factory)
    made = at.call("make", "make", what, *sent_to(at, (args, kwargs)), name, None, False, what=what)
    return Reference(at, made, what)


def attach(host: str | Host, token: str) -> Reference:
    """Hold an object that another process holds, by its `token`.

    Raises:
        RemoteError: it has ended.
    """
    at = host_of(host)
    return Reference(at, at.call("attach", "make", token), "object")


def call(host: str | Host, function: Named, *args: Any, **kwargs: Any) -> Any:
    """The result of a function in another process, without gradients.

    Calls of different functions run at the same time, where threads of this process make them.

    Raises:
        RemoteError: it is not served there, or raised.
    """
    at, what = host_of(host), path_of(function)
    return at.call("call", f"call {what}", what, *sent_to(at, (args, kwargs)), what=what)


def stream(host: str | Host, function: Named, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Results of a generator function in another process, as they come.

    Raises:
        RemoteError: it is not served there, or raised.
        ChannelError: the connection was lost; a stream is not begun again.
    """
    at = host_of(host)
    results: Iterator[Any] = at.stream(path_of(function), None, *sent_to(at, (args, kwargs)))
    return results


def sent_to(host: Host, value: Any) -> Any:
    """Arguments of a call, with numbers in the places of objects of that host.

    Raises:
        PacelineError: an object is of another host.
    """

    def sent(leaf: Any) -> Any:
        reference = leaf.reference if isinstance(leaf, HasReference) else leaf
        if isinstance(reference, Reference):
            if reference.host is not host:
                raise PacelineError(f"{reference!r} cannot be an argument of a call to {host.name}")
            return Held(reference.number)
        if isinstance(leaf, nn.Module):
            raise PacelineError(
                f"a {type(leaf).__name__} of this process cannot be an argument of a call to {host.name}: arguments "
                "are tensors, numbers, strings, lists, dicts, data classes and remote objects"
            )
        return leaf

    return mapped(sent, value)


def path_of(factory: Named) -> str:
    """The import path of what is to be called."""
    return factory if isinstance(factory, str) else import_path_of(factory)
