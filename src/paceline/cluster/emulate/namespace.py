"""Entering a Linux network namespace that has a name, as `ip netns` gives them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import ClusterError

T = TypeVar("T")
NAMED = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """Move the calling thread, with its later threads and processes, into a network namespace.

    Raises:
        ClusterError: there is none of that name, or this process may not enter it.
    """
    try:
        namespace = os.open(NAMED / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(namespace)
    except OSError as error:
        raise ClusterError(
            f"the network namespace {name} cannot be entered: {error.strerror}. It takes root, and `ip netns` "
            "lists those there are."
        ) from error


def inside(name: str, function: Callable[[], T]) -> T:
    """Call a function in a network namespace, which this thread does not enter.

    A socket that it opens stays in that namespace.
    """
    outcome: list[T] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            enter(name)
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            problem.append(error)

    thread = threading.Thread(target=run, name=f"in {name}")
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
    return outcome[0]
