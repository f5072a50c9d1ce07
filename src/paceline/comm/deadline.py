"""Errors of failed waits: the call, the waiting time, and the ranks that are missing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.address import host_identity
from paceline.errors import SyncError


def failed_wait(
    what: str, rank: int, waited_s: float, deadline_s: float, missing: list[int] | None, error: RuntimeError
) -> SyncError:
    """The error of rank `rank`, whose wait in `what` ended with torch's `error`.

    `missing` is from `missing_ranks`.
    """
    if missing is None:
        who = "some rank did not come, or a connection failed"
    else:
        who = f"ranks {missing} did not come" if missing else "every rank came, but a connection failed"
    first_line = str(error).splitlines()[0].partition(". This is typically")[0] if str(error) else type(error).__name__
    return SyncError(
        f"rank {rank} waited {waited_s:.1f} s in {what} and {who} (deadline {deadline_s:g} s). Look for the first "
        f"error of those ranks; if they are only slow, raise deadline_s. Transport: {first_line}"
    )


def register(store: Store | None, rank: int) -> None:
    """Publish this rank's process id, so that others can see later whether it has died."""
    if store is not None:
        store.set(f"process/{rank}", f"{_processes()} {os.getpid()}")


def _processes() -> str:
    """An identity that is equal for processes that see each other's process ids.

    Containers of a host may each count their own.
    """
    return f"{host_identity()}@{os.readlink('/proc/self/ns/pid') if os.path.exists('/proc/self/ns/pid') else ''}"


def missing_ranks(store: Store | None, rank: int, size: int, failure: int, patience_s: float = 2.0) -> list[int] | None:
    """The ranks that do not report their failure number `failure`.

    None if there is no store to ask, or it does not answer. Ranks of this host that have ended are not waited for, the
    others for `patience_s`.
    """
    if store is None:
        return None
    found: list[list[int]] = []
    # In a thread: where the link to the store's host is what failed, its calls last as long as the deadline that has
    # just passed.
    asking = threading.Thread(target=lambda: found.append(_ask(store, rank, size, failure, patience_s)), daemon=True)
    asking.start()
    asking.join(patience_s + 1.0)
    return found[0] if found else None


def _ask(store: Store, rank: int, size: int, failure: int, patience_s: float) -> list[int]:
    key = f"waiting/{failure}/"
    missing = [r for r in range(size) if r != rank]
    try:
        store.set(f"{key}{rank}", "here")
        until = time.monotonic() + patience_s
        while True:
            missing = [r for r in missing if not store.check([f"{key}{r}"])]
            if all(_has_ended(store, r) for r in missing) or time.monotonic() > until:
                return missing
            time.sleep(0.02)
    except RuntimeError:  # the store went down with the rank that served it
        return [0] if rank else []


def _has_ended(store: Store, rank: int) -> bool:
    """True if a rank is known as a process of this host that has ended."""
    if not store.check([f"process/{rank}"]):
        return False
    host, _, pid = store.get(f"process/{rank}").decode().rpartition(" ")
    if host != _processes():
        return False
    try:
        # dead, and its parent has not looked yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
