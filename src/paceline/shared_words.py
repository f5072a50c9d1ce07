"""Words of shared memory that announce data: stored and read in order, and waited for.

A process stores data and then a word. Another process reads the word and then the data. This is only correct if no core
reorders these accesses. On x86-64, only a load can overtake an earlier store. arm64 may also reorder other accesses,
unless a fence is between them. Therefore, all words that announce data go through `publish` and `acquiring`. On x86-64,
`acquiring` adds no work.

Python has no fence. libatomic, a library of GCC, exports the function `atomic_thread_fence` of C11, whose guarantee is
section 7.17.4 of the standard: a fence before the store of a word synchronizes with a fence after the load of this
word. Messages over sockets and pipes need no fence, because the kernel locks the queue on both sides.

Both processors store and read an aligned word of 8 bytes in one access.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SEQUENTIALLY_CONSISTENT = 5  # `memory_order_seq_cst` of C11
_one_lock = threading.Lock()


@dataclass(frozen=True)
class MemoryOrder:
    """Order of memory accesses on a processor.

    Attributes:
        fence: orders all earlier accesses before all later accesses.
        in_order: True if only a load can overtake an earlier store.
        why_not: reason why processes cannot announce data in shared memory, or None.
    """

    fence: Callable[[], None]
    in_order: bool
    why_not: str | None = None


def memory_order(machine: str) -> MemoryOrder:
    """Return the memory order of a processor, as named by `platform.machine`."""
    if machine in ("x86_64", "AMD64"):
        return MemoryOrder(_locked_instruction, in_order=True)
    if machine not in ("aarch64", "arm64"):
        why_not = f"it needs the memory order of x86-64 or arm64, and this is {machine}"
        return MemoryOrder(_locked_instruction, in_order=False, why_not=why_not)
    try:
        fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence  # keeps the GIL, which is faster
    except (OSError, AttributeError) as error:
        why_not = f"on arm64, it needs libatomic ({error}; on Debian and Ubuntu: apt install libatomic1)"
        return MemoryOrder(_locked_instruction, in_order=False, why_not=why_not)
    fence.argtypes, fence.restype = [ctypes.c_int], None
    return MemoryOrder(partial(fence, _SEQUENTIALLY_CONSISTENT), in_order=False)


def _locked_instruction() -> None:
    """Execute a locked instruction, which is the fence of x86-64."""
    with _one_lock:
        return


_ORDER = memory_order(platform.machine())

fence = _ORDER.fence

if _ORDER.in_order:

    def publish(words: memoryview, index: int, value: int) -> None:
        """Store a word after all earlier accesses, and before all later accesses."""
        words[index] = value
        with _one_lock:  # same as `_locked_instruction`, without another call
            return

    def acquiring(look: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function that reads a word: all later accesses happen after the function."""
        return look

else:

    def publish(words: memoryview, index: int, value: int) -> None:
        """Store a word after all earlier accesses, and before all later accesses."""
        fence()
        words[index] = value
        fence()

    def acquiring(look: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function that reads a word: all later accesses happen after the function."""

        def looked(*args: P.args, **keywords: P.kwargs) -> R:
            found = look(*args, **keywords)
            fence()
            return found

        return looked


def why_no_shared_memory() -> str | None:
    """Return the reason why this machine cannot use shared memory, or None."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create (Linux 3.17 has)"
    return _ORDER.why_not


SYS_FUTEX = 202 if _ORDER.in_order else 98  # x86-64; arm64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep until woken at `address`, or until the time is over.

    The call returns at once if the word is not `expected`.
    """
    seconds = int(timeout_s)
    timespec = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    # ctypes releases the GIL around the call.
    result = _syscall(
        SYS_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(timespec), None, 0
    )
    if result < 0 and (error := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(error, f"futex wait: {os.strerror(error)}")


def futex_wake(address: int) -> None:
    """Wake all threads that wait at `address`, in any process."""
    _syscall(SYS_FUTEX, ctypes.c_void_p(address), _WAKE, ctypes.c_uint32(_EVERYBODY), None, None, 0)
