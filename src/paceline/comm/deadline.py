"""What is said when a wait for other ranks failed: in what, for how long, and who did not come."""

from __future__ import annotations

import time

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.errors import SyncError


def failed_wait(what: str, rank: int, waited_s: float, deadline_s: float, missing: list[int] | None, error: RuntimeError) -> SyncError:
    """The error of rank `rank`, whose wait in `what` ended with torch's `error`; `missing` is from `missing_ranks`."""
    if missing is None:
        who = "some rank did not come, or a connection failed"
    else:
        who = f"ranks {missing} did not come" if missing else "every rank came, but a connection failed"
    first_line = str(error).splitlines()[0].partition(". This is typically")[0] if str(error) else type(error).__name__
    return SyncError(
        f"rank {rank} waited {waited_s:.1f} s in {what} and {who} (deadline {deadline_s:g} s). Look for the first error of "
        f"those ranks; if they are only slow, raise deadline_s. Transport: {first_line}"
    )


def missing_ranks(store: Store | None, rank: int, size: int, failure: int, patience_s: float = 2.0) -> list[int] | None:
    """The ranks that do not report their failure number `failure` within `patience_s`; None where there is no store to ask."""
    if store is None:
        return None
    key = f"waiting/{failure}/"
    missing = [r for r in range(size) if r != rank]
    try:
        store.set(f"{key}{rank}", "here")
        until = time.monotonic() + patience_s
        while missing and time.monotonic() < until:
            missing = [r for r in missing if not store.check([f"{key}{r}"])]
            time.sleep(0.05)
    except RuntimeError:  # the store went down with the rank that served it
        return [0] if rank else []
    return missing
