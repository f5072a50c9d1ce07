"""No file of the packages imports another in a circle, not even by imports within functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"


def modules() -> dict[str, Path]:
    """Files by the names that import them."""
    names = {path: ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(node: ast.AST) -> Iterator[str]:
    """Names that a file imports when it runs; imports for the type checker alone are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from imports(child)


def imported(known: dict[str, Path], name: str) -> set[str]:
    """The modules that a module imports, itself left out."""
    found = {n if n in known else n.rpartition(".")[0] for n in imports(ast.parse(known[name].read_text()))}
    return found & known.keys() - {name}


def test_imports_have_no_circle() -> None:
    known = modules()
    assert len(known) > 300
    try:
        TopologicalSorter({name: imported(known, name) for name in known}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
