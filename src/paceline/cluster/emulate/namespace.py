"""Linux network namespaces without a name.

The kernel removes each with its last process and its last descriptor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from paceline.errors import ClusterError

T = TypeVar("T")
ADVICE = "Emulated hosts need CAP_NET_ADMIN and CAP_SYS_ADMIN, as root has; a container needs --privileged."
_CLONE_NEWNET = 0x40000000


@contextmanager
def new_namespace() -> Iterator[int]:
    """A new network namespace, held by a descriptor within the context.

    Raises:
        ClusterError: the kernel refuses.
    """

    def make() -> int:
        call_libc("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    try:
        descriptor = _in_thread(make)
    except OSError as error:
        raise ClusterError(f"a network namespace cannot be made: {error.strerror}. {ADVICE}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_of(descriptor: int) -> str:
    """Path at which other processes, too, find what this one has open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def enter(path: str) -> None:
    """Move the calling thread, with its later threads and processes, into a network namespace.

    Raises:
        ClusterError: its launcher no longer holds it, or this process may not enter it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            call_libc("setns", descriptor, _CLONE_NEWNET)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ClusterError(
            f"the network namespace {path} cannot be entered: {error.strerror}. It takes root, and a launcher that is "
            "still there."
        ) from error


def inside(path: str, function: Callable[[], T]) -> T:
    """Call a function in a network namespace, which this thread does not enter.

    A socket that it opens stays in that namespace, as does a process that it starts.
    """

    def run() -> T:
        enter(path)
        return function()

    return _in_thread(run)


def _in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, which may leave its namespace."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def call_libc(name: str, *arguments: int) -> None:
    """Call a function of libc that Python has from 3.12 on only."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
