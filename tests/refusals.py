"""Assertions on errors: their code and fields, never their wording."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import pytest
from pydantic import ValidationError

from paceline.errors import Problem

E = TypeVar("E", bound=BaseException)


class raises(Generic[E]):
    """Context that must end with an error of a class, a code and fields.

    One of the error's problems must have the code and all of the fields. A pydantic error has the problems of its
    validators. A field is compared as text if it is not equal; a `Path` stands for itself and all that is below it;
    `re.compile(…)` must be found in the field's text.
    """

    def __init__(self, kind: type[E], code: str, /, **fields: Any) -> None:
        self._code, self._fields = code, fields
        self._raises = pytest.raises(kind)

    def __enter__(self) -> pytest.ExceptionInfo[E]:
        self._caught = self._raises.__enter__()
        return self._caught

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        caught = self._raises.__exit__(kind, error, trace)
        if caught and error is not None:
            assert_problem(error, self._code, **self._fields)
        return caught


def assert_problem(error: BaseException, code: str, /, **fields: Any) -> Problem:
    """Assert that one of the problems of an error has a code and fields; return it."""
    problems = _problems(error)
    found = [problem for problem in problems if problem.code == code]
    assert found, f"code {code} expected, got {', '.join(p.code for p in problems) or 'none'}: {error}"
    matching = [p for p in found if all(name in p.fields and _agrees(p.fields[name], fields[name]) for name in fields)]
    assert matching, f"{code} with {fields} expected, got {[problem.fields for problem in found]}"
    return matching[0]


def _problems(error: BaseException) -> list[Problem]:
    if isinstance(error, ValidationError):
        causes = [details.get("ctx", {}).get("error") for details in error.errors()]
        return [problem for cause in causes for problem in getattr(cause, "problems", ())]
    return list(getattr(error, "problems", ()))


def _agrees(found: object, expected: object) -> bool:
    if isinstance(expected, re.Pattern):
        return expected.search(str(found)) is not None
    if isinstance(expected, Path):
        return Path(str(found)).is_relative_to(expected)
    return found == expected or str(found) == str(expected)
