"""Waits on a word of shared memory: Linux's futex(2), and the memory fence it needs."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading

_SYS_FUTEX = 202  # x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_one_lock = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def unsupported() -> str | None:
    """The reason why this machine cannot use shared memory, or None.

    Flags and data are plain stores, which other cores must see in their order. x86-64 promises that; other processors
    would need barriers that Python cannot give.
    """
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create (Linux 3.17 has)"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs the memory order of x86-64, and this is {platform.machine()}"
    return None


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep until woken at `address`, or until the time is over.

    Returns at once if the word is not `expected`.
    """
    seconds = int(timeout_s)
    timespec = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    # ctypes gives up the GIL around the call.
    result = _syscall(
        _SYS_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(timespec), None, 0
    )
    if result < 0 and (error := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(error, f"futex wait: {os.strerror(error)}")


def wake(address: int) -> None:
    """Wake all who wait at `address`, in whatever process."""
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _WAKE, ctypes.c_uint32(_EVERYBODY), None, None, 0)


def fence() -> None:
    """Order earlier stores before later loads, which x86-64 does only at a locked instruction."""
    with _one_lock:
        return
