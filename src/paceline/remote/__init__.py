"""Functions, parameters and modules in other processes of the run.

Read `service` (what serves functions), `client` (what calls them), then `values` (what they may be given and return);
`modules` is on top of them, and what users see of it are the names here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.remote.modules.context import context
    from paceline.remote.modules.host import connect
    from paceline.remote.modules.microbatches import microbatches
    from paceline.remote.modules.module import module
    from paceline.remote.modules.optimizer import optimizer
    from paceline.remote.modules.reference import attach, call, create, stream
    from paceline.remote.modules.serve import serve
    from paceline.remote.values import sendable

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
    "attach": "paceline.remote.modules.reference",
    "call": "paceline.remote.modules.reference",
    "connect": "paceline.remote.modules.host",
    "context": "paceline.remote.modules.context",
    "create": "paceline.remote.modules.reference",
    "microbatches": "paceline.remote.modules.microbatches",
    "module": "paceline.remote.modules.module",
    "optimizer": "paceline.remote.modules.optimizer",
    "sendable": "paceline.remote.values",
    "serve": "paceline.remote.modules.serve",
    "stream": "paceline.remote.modules.reference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.remote' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
