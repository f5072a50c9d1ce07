"""Contexts: accumulations of gradients of one client that do not mix."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[str] = ContextVar("context", default="")


@contextmanager
def context() -> Iterator[str]:
    """Keep the gradients of forward passes within apart from all others, in this thread.

    A backward pass adds to the context of its forward pass, and `step` applies those of the context that it is called
    in. Without one, all forward passes of a process are of one context, as with `.grad`.
    """
    token = _current.set(secrets.token_hex(8))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def current_context() -> str:
    """Name of the context that this thread is in."""
    return _current.get()
