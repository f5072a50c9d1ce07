"""Import of torch's compiler on first use instead of by every optimizer.

torch's optimizers import `torch._dynamo` to exclude functions from compilation (torch/optim/optimizer.py,
torch/_compile.py). The import takes as long as `import torch`, and ranks without compilation do not need it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo.config"  # a module that imports the compiler itself
_NAME = "torch._dynamo"


def defer_compiler() -> None:
    """Make `import torch._dynamo` import a stand-in in this process, unless the compiler is imported.

    The stand-in has the functions that eager optimizers call. Any other use imports the compiler, which replaces the
    stand-in.
    """
    if _NAME not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _TraceRules:
    """Stand-in for `torch._dynamo.trace_rules`, whose cache `init_process_group` clears."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Do nothing, because the stand-in has no cache."""


class _StandIn(ModuleType):
    """Stand-in for `torch._dynamo` until the compiler is used.

    Attributes:
        disabled: functions that the compiler must skip, each with True if their callees must be skipped as well.
    """

    trace_rules = _TraceRules

    def __init__(self, name: str, file: str | None) -> None:
        super().__init__(name)
        # Requested by code that inspects all modules, such as `inspect`.
        self.__file__ = file
        self.disabled: list[tuple[Any, bool]] = []

    def graph_break(self, msg: str = "") -> None:
        """Break the graph with the compiler; do nothing before the compiler is imported."""
        if not self._waits():
            self._compiler().graph_break(msg)

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **more: Any) -> Any:
        """Return `fn` itself to `torch._disable_dynamo` before the compiler is imported.

        The caller stores the result in an attribute of `fn`, which is replaced when the compiler is imported.
        """
        if wrapping or more or fn is None or not self._waits():
            return self._compiler().disable(fn, recursive, wrapping=wrapping, **more)
        self.disabled.append((fn, recursive))
        return fn

    def __getattr__(self, name: str) -> Any:
        # `__path__` is requested when a module of the compiler is imported, and while this stand-in is created.
        if name.startswith("__") and (name != "__path__" or _NAME not in sys.modules):
            raise AttributeError(name)
        return getattr(self._compiler(), name)

    def _waits(self) -> bool:
        return sys.modules.get(_NAME) is self

    def _compiler(self) -> Any:
        if self._waits():
            # The finder is inactive while a stand-in is being replaced.
            del sys.modules[_NAME]
            compiler: Any = importlib.import_module(_NAME)
            for fn, recursive in self.disabled:
                fn.__dynamo_disable = compiler.disable(fn, recursive, wrapping=False)
        return sys.modules[_NAME]


class _Finder(MetaPathFinder, Loader):
    """Import finder for the stand-in, and for modules of the compiler that are already loaded.

    Without this finder, Python would load such a module a second time once the path of its package is known.
    """

    def __init__(self) -> None:
        self.made = False

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for the compiler's first import, or for a loaded compiler module."""
        there = name.startswith(f"{_NAME}.") and name in sys.modules
        return ModuleSpec(name, self) if there or (name == _NAME and not self.made) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in, or the loaded module after saving its spec."""
        if spec.name != _NAME:
            spec.loader_state = sys.modules[spec.name].__spec__
            return sys.modules[spec.name]
        self.made = True
        real = PathFinder.find_spec(_NAME, sys.modules["torch"].__path__)
        return _StandIn(_NAME, real.origin if real else None)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of a module that was already loaded."""
        spec = module.__spec__
        if spec is not None and spec.loader is self and spec.loader_state is not None:
            module.__spec__ = spec.loader_state
