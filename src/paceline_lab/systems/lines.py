"""Lines that a system changes in a plain PyTorch script, counted."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from paceline_lab.systems import plain


def changed_lines(script: Path | None) -> int | None:
    """Lines of a script's functions that the plain one has not; None without a script."""
    if script is None:
        return None
    before, after = _code(Path(plain.__file__)), _code(script)
    same = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(end - begin for kind, _, _, begin, end in same.get_opcodes() if kind in ("insert", "replace"))


def _code(script: Path) -> list[str]:
    """Lines of a file's functions, without blank lines and docstrings."""
    found = []
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:]
            found += ast.unparse(node).splitlines()
    return found
