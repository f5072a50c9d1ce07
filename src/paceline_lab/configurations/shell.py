"""Arguments in a shell script that launches a training, with its variables and arrays."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#[^\n]*")
_ASSIGNED = re.compile(
    r"(?ms)^[ \t]*(?:export[ \t]+|local[ \t]+)?(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?:"
    r"\((?P<list>.*?)\)[ \t]*$|\"(?P<double>(?:[^\"\\]|\\.)*)\"|'(?P<single>[^']*)'|"
    r"(?P<plain>(?:\$\(\([^)]*\)+|[^\s;])*))"
)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>[^}]*))?\}|(?P<plain>\w+))")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}
_NUMBER = re.compile(r"-(?:\d|\.\d)")


def arguments(text: str) -> tuple[dict[str, Any], list[str]]:
    """Flags of a script with their values, and sentences on what was not evaluated.

    A flag without a value is True; one with several has a list. Names are written with underscores.
    """
    plain = _COMMENT.sub("", text).replace("\\\n", " ")
    variables: dict[str, str] = {}
    for match in _ASSIGNED.finditer(plain):
        raw = next(
            part for part in (match["list"], match["double"], match["single"], match["plain"]) if part is not None
        )
        value = raw if match["single"] is not None else expanded(raw, variables)
        variables[match["name"]] = f"{variables.get(match['name'], '')} {value}" if match["more"] else value
    commands = [line for line in _ASSIGNED.sub("", plain).splitlines() if "--" in line or "$" in line]
    words = " ".join(expanded(line, variables) for line in commands if ".py" in line or "torchrun" in line)
    if "--" not in words:
        words = " ".join([*variables.values(), *(expanded(line, variables) for line in commands)])
    flags = _flags(words)
    notes = []
    if re.search(r"(?m)^\s*(?:if|case|elif)\b", plain):
        notes.append("conditions of the script are not evaluated: the arguments of all branches are read")
    if unresolved := sorted(set(re.findall(r"\$\{?(\w+)", words))):
        notes.append(f"not set in the script: {', '.join(unresolved)}")
    return {name: value for name, value in flags.items() if "$" not in str(value)}, notes


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with variables and arithmetic replaced, as far as they are known."""

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["plain"]
        if name in variables:
            return variables[name]
        default = match["default"]
        return match[0] if default is None else expanded(default.strip("\"'"), variables)

    text = _VARIABLE.sub(value, text)
    return _ARITHMETIC.sub(lambda match: _computed(match[1], variables) or match[0], text)


def _computed(text: str, variables: Mapping[str, str]) -> str | None:
    """Value of a sum or product of whole numbers and variables, or None."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return of(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError(text)

    try:
        return str(of(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None


def _flags(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError:  # an unpaired quote
        words = text.replace('"', " ").replace("'", " ").split()
    words = [part for word in words for part in (word.split() if word.startswith("--") else [word])]
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value if equals else True
        elif word.endswith(".py") or (word.startswith("-") and not _NUMBER.match(word)):
            name = ""  # the script that is launched, or a short option
        elif name:
            before = flags[name]
            flags[name] = word if before is True else [*before, word] if isinstance(before, list) else [before, word]
    return flags
