"""A process that serves modules, objects and functions to the other processes of a run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.errors import PacelineError
from paceline.job.spec import import_path_of, load_object, resolve_import_path
from paceline.wire.key import RunKey, own_key
from paceline_server.modules.host import place_of
from paceline_server.modules.served import Served
from paceline_server.service import Limits, Service

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
    return Serving(
        allowed,
        place_of(where),
        key or own_key(),
        threads,
        grace_s,
        limits or Limits(calls_at_once=max(1, threads // 2)),
    )


class Serving:
    """A service of modules and objects. A context manager, which ends it.

    Attributes:
        address: where clients reach it.
    """

    def __init__(
        self,
        allowed: dict[str, Any],
        where: tuple[str, int] | Path | socket.socket,
        key: RunKey | None,
        threads: int,
        grace_s: float,
        limits: Limits,
    ) -> None:
        self._served = Served(allowed, most_together=threads - 1, grace_s=grace_s)
        try:
            self._service = Service(
                where, key, self._served.functions(), threads=threads, limits=limits, on_leave=self._served.leases.left
            )
        except BaseException:
            self._served.close()
            raise
        self.address = self._service.address

    @property
    def unauthenticated(self) -> int:
        """Number of connections that were turned away."""
        return self._service.unauthenticated

    @property
    def objects(self) -> int:
        """Number of objects that are held."""
        return len(self._served.objects)

    def close(self) -> None:
        """End the service; calls under way get an error."""
        self._served.close()
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _path_of(what: str | Callable[..., Any]) -> tuple[str, str]:
    """A path as clients name it, and as it is loaded here."""
    path = what if isinstance(what, str) else import_path_of(what)
    try:
        return path, resolve_import_path(path, None)
    except ValueError as error:
        raise PacelineError(str(error)) from error
