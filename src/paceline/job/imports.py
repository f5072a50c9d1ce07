"""Import paths: `pkg.mod:name`, or `file.py:name` for code that is in no package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import JobError


def load_object(path: str) -> Any:
    """The object that `pkg.mod:name` or `/abs/file.py:name` names.

    The current directory counts as a place to import from, as it does for `python -m`.

    Raises:
        JobError: no such module, file or name, or the module raised while it was imported.
    """
    module_name, _, name = path.rpartition(":")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except Exception as error:
        raise JobError(f"{path}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        known = ", ".join(sorted(k for k in vars(module) if not k.startswith("_"))[:12])
        raise JobError(f"{path}: {module_name!r} has no {name!r}. It has: {known}") from None


def resolve_import_path(path: str, context: Mapping[str, Any] | None) -> str:
    """Make the file of `file.py:name` absolute, from the folder of the job file (`context["base"]`) or the current one."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"{path!r} is no import path; write pkg.mod:name or file.py:name")
    if not module.endswith(".py"):
        return path
    file = ((context or {}).get("base", Path.cwd()) / Path(module).expanduser()).resolve()
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    return f"{file}:{name}"


def _import_module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _load_file(file: Path) -> Any:
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", "") or "").resolve() == file:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # workers of a DataLoader find it again under this name
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module
