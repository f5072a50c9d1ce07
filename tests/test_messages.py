"""Every error has a literal code and template, and messages.txt shows all of them.

`python tests/test_messages.py --write` writes messages.txt.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from string import Formatter
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent.parent / "src"
MESSAGES = Path(__file__).with_name("messages.txt")
CODE = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
PROBLEMS = {"Problem", "PlanProblem", "InvalidValue"}


class Site(NamedTuple):
    """A place that makes an error or a problem of one."""

    place: str
    kind: str
    call: ast.Call

    @property
    def literals(self) -> tuple[str, str] | None:
        """Its code and template, if both are literals."""
        first = [
            arg.value for arg in self.call.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
        return (first[0], first[1]) if len(first) == 2 and CODE.fullmatch(first[0]) else None

    @property
    def keywords(self) -> set[str] | None:
        """Names of its keywords; None if some come from a mapping."""
        names = {keyword.arg for keyword in self.call.keywords}
        return None if None in names else {name for name in names if name is not None}


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def sites() -> list[Site]:
    """Return every place in the source."""
    own, known = _error_classes()
    makers = (known - own) | PROBLEMS
    return [
        Site(f"{path.relative_to(SOURCE)}:{node.lineno}", name, node)
        for path, tree in TREES.items()
        if path.name != "errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ((name := _name(node)) in makers or _is_by_value(node))
    ]


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _is_by_value(call: ast.Call) -> bool:
    """True for a call of a class that is a value, and for a constructor of an error class."""
    first = call.args[0] if call.args else None
    coded = isinstance(first, ast.Constant) and isinstance(first.value, str) and CODE.fullmatch(first.value) is not None
    return coded and len(call.args) == 2 and _name(call) in ("error", "__init__")


def _error_classes() -> tuple[set[str], set[str]]:
    """Names of the error classes with a constructor of their own, and of all error classes."""
    classes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {c.name: {base.id for base in c.bases if isinstance(base, ast.Name)} for c in classes}
    known = {"PacelineError"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    own = {c.name for c in classes if c.name in known for f in c.body if getattr(f, "name", "") == "__init__"}
    return own - {"PacelineError"}, known


SITES = sites()


def messages() -> str:
    """Return every code with its classes and its template, sorted by code."""
    kinds, templates = defaultdict(set), {}
    for site in SITES:
        if site.literals is not None:
            code, template = site.literals
            templates[code] = template
            kinds[code].add(site.kind)
    names = {code: ", ".join(sorted(kinds[code] - {"error", "__init__"})) or "PacelineError" for code in templates}
    return "\n".join(
        f"{code}  {names[code]}\n" + "".join(f"    {line}\n" for line in templates[code].split("\n"))
        for code in sorted(templates)
    )


def test_every_error_has_a_literal_code_and_template() -> None:
    wrong = [f"{site.place}: {ast.unparse(site.call)[:100]}" for site in SITES if site.literals is None]
    assert not wrong, "\n".join(wrong)


def test_validators_raise_values_with_codes() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any("_validator" in ast.unparse(d) for d in function.decorator_list)
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise ValueError")
    ]
    assert not wrong, f"raise InvalidValue instead: {', '.join(wrong)}"


def test_a_code_has_one_template() -> None:
    by_code = defaultdict(set)
    for site in SITES:
        if site.literals is not None:
            by_code[site.literals[0]].add(site.literals[1])
    wrong = [f"{code}:\n  " + "\n  ".join(sorted(texts)) for code, texts in sorted(by_code.items()) if len(texts) > 1]
    assert not wrong, "\n".join(wrong)


def test_every_field_is_given_and_shown() -> None:
    from paceline import errors

    wrong = []
    for site in SITES:
        if site.literals is None or site.keywords is None:
            continue
        if site.kind == "PlanProblem":  # some fields are for programs, and some come later
            continue
        shown = {name for _, name, _, _ in Formatter().parse(site.literals[1]) if name is not None}
        kind = getattr(errors, site.kind, errors.PacelineError)
        attributes = set(getattr(kind, "keywords", ()))
        if shown - site.keywords or site.keywords - shown - attributes:
            wrong.append(f"{site.place}: shows {sorted(shown)}, is given {sorted(site.keywords)}")
    assert not wrong, "\n".join(wrong)


def test_the_messages_are_those_of_the_source() -> None:
    if MESSAGES.read_text(encoding="utf-8") != messages():
        pytest.fail("tests/messages.txt is out of date: run `python tests/test_messages.py --write` and read its diff")


if __name__ == "__main__" and "--write" in sys.argv:
    MESSAGES.write_text(messages(), encoding="utf-8")
