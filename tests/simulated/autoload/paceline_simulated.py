"""Entry point by which torch loads the simulated accelerator.

The package is found by its place: a script's own folder, where torch would look first, may hold another `simulated`.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGE = Path(__file__).parents[1] / "__init__.py"


def load_if_asked() -> bool:
    package = sys.modules.get("simulated")
    if package is None or package.__file__ != str(_PACKAGE):
        spec = spec_from_file_location("simulated", _PACKAGE)
        assert spec is not None
        assert spec.loader is not None
        package = sys.modules["simulated"] = module_from_spec(spec)
        spec.loader.exec_module(package)
    return bool(package.load_if_asked())
