"""Checks of a job's `args` before they are used, so that mistakes are named clearly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from paceline.errors import JobError
from paceline.messages import wrong_value
from paceline.nearest import nearest


def checked_args(what: str, built_in: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """`args` in the types that a built-in declares for its keywords; `what` names it, e.g. `model gpt`.

    Raises:
        JobError: unknown arguments (the nearest is named) and wrong values, all of them.
    """
    parameters = inspect.signature(built_in, eval_str=True).parameters
    checked, wrong = {}, []
    for key, value in args.items():
        if key not in parameters:
            hint = nearest(key, parameters) if parameters else "It takes none."
            wrong.append(f'{what} has no argument "{key}". {hint}')
            continue
        try:
            checked[key] = TypeAdapter(parameters[key].annotation).validate_python(value)
        except ValidationError as error:
            wrong.append(f"{what}: {key} {wrong_value(error.errors()[0])}")
    if wrong:
        raise JobError("\n".join(wrong))
    return checked


def check_call(path: str, users: Callable[..., Any], *positional: Any, **args: Any) -> None:
    """Check that a user's function or class takes these arguments.

    Raises:
        JobError: it does not; shows its signature.
    """
    try:
        signature = inspect.signature(users)
    except ValueError:  # some classes written in C do not tell
        return
    try:
        signature.bind(*positional, **args)
    except TypeError as error:
        raise JobError(
            f"{path}{signature} does not fit the job's args ({', '.join(args) or 'none'}): {error}"
        ) from None
