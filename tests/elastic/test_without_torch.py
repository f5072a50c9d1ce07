"""What supervises ranks and what carries messages starts without torch."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
for package in ("paceline.elastic", "paceline.wire"):
    package = importlib.import_module(package)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        if "torch" in sys.modules:
            sys.exit(module.name)
"""


def test_no_module_that_supervises_or_carries_messages_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
