"""Functions, parameters and modules that live in other processes of the run.

Read `service` (serves functions), `client` (calls functions), then `values` (arguments and results). `modules` builds
on these modules. This package exports the public names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_server.modules.host import attach, call, connect, create, stream
    from paceline_server.modules.module import context, microbatches, module, optimizer
    from paceline_server.modules.serve import serve
    from paceline_server.values import sendable

__all__ = [
    "attach",
    "call",
    "connect",
    "context",
    "create",
    "microbatches",
    "module",
    "optimizer",
    "sendable",
    "serve",
    "stream",
]

_HOMES = {
    "attach": "paceline_server.modules.host",
    "call": "paceline_server.modules.host",
    "connect": "paceline_server.modules.host",
    "context": "paceline_server.modules.module",
    "create": "paceline_server.modules.host",
    "microbatches": "paceline_server.modules.module",
    "module": "paceline_server.modules.module",
    "optimizer": "paceline_server.modules.module",
    "sendable": "paceline_server.values",
    "serve": "paceline_server.modules.serve",
    "stream": "paceline_server.modules.host",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline_server' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
