"""Marks of served functions: in which thread the service calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
LATER = object()  # result of a trial that would have to wait


def quick(function: F) -> F:
    """Have a function run in the thread that reads its calls. It must never wait."""
    function.__dict__["remote_mark"] = "quick"
    return function


def at_once(function: F, trial: Callable[..., Any]) -> F:
    """Have a trial of a function run in the thread that reads its calls.

    Where the trial would have to wait it does nothing and returns `LATER`; the function itself is called then.
    """
    function.__dict__ |= {"remote_mark": "at once", "remote_trial": trial}
    return function


def in_order(function: F) -> F:
    """Have a client's calls of functions so marked run in order, one at a time."""
    function.__dict__["remote_mark"] = "in order"
    return function
