"""Functions, parameters and modules in other processes of the run.

Read `service` (serves functions), `client` (calls them), then `values` (arguments and results). `modules` is built on
them; users see it by the names of this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_server.modules.host import connect
    from paceline_server.modules.module import context, microbatches, module
    from paceline_server.modules.optimizer import optimizer
    from paceline_server.modules.reference import attach, call, create, stream
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
    "attach": "paceline_server.modules.reference",
    "call": "paceline_server.modules.reference",
    "connect": "paceline_server.modules.host",
    "context": "paceline_server.modules.module",
    "create": "paceline_server.modules.reference",
    "microbatches": "paceline_server.modules.module",
    "module": "paceline_server.modules.module",
    "optimizer": "paceline_server.modules.optimizer",
    "sendable": "paceline_server.values",
    "serve": "paceline_server.modules.serve",
    "stream": "paceline_server.modules.reference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline_server' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
