"""torch's compiler, imported when it is first used instead of by every optimizer.

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
    """Make `import torch._dynamo` import a stand-in in this process, unless already imported.

    The stand-in has the functions that eager optimizers call. Any other use imports the compiler, which replaces it.
    """
    if _NAME not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _TraceRules:
    """`torch._dynamo.trace_rules` of an unused compiler: `init_process_group` clears its cache."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Do nothing: there is no cache."""


class _StandIn(ModuleType):
    """`torch._dynamo` before the compiler is used.

    Attributes:
        disabled: functions that the compiler must skip, and whether it must also skip the functions they call.
    """

    trace_rules = _TraceRules

    def __init__(self, name: str, file: str | None) -> None:
        super().__init__(name)
        # Requested by code that inspects all modules, such as `inspect`.
        self.__file__ = file
        self.disabled: list[tuple[Any, bool]] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing while nothing is compiled."""
        if not self._waits():
            self._compiler().graph_break(msg)

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **more: Any) -> Any:
        """Return the function to `torch._disable_dynamo`.

        It keeps the function in an attribute that is corrected later.
        """
        if wrapping or more or fn is None or not self._waits():
            return self._compiler().disable(fn, recursive, wrapping=wrapping, **more)
        self.disabled.append((fn, recursive))
        return fn

    def __getattr__(self, name: str) -> Any:
        # The path is requested when a module of the compiler is imported, and while this stand-in is created.
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
    """Finder of the stand-in and of the compiler's modules already loaded.

    Python searches for such a module once the package's path is known, and would load it a second time.
    """

    def __init__(self) -> None:
        self.made = False

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for the compiler's first import, or for a loaded module of it."""
        there = name.startswith(f"{_NAME}.") and name in sys.modules
        return ModuleSpec(name, self) if there or (name == _NAME and not self.made) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in, or the loaded module, which keeps its own spec."""
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
