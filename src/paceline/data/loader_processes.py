"""DataLoader worker processes of a rank: their start and errors."""

from __future__ import annotations

import multiprocessing.util
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from paceline.errors import LoaderProcessError
from paceline.files import sockets_fit, temporary_folder


@dataclass(frozen=True)
class Workers:
    """Number and arguments of each rank's loader processes.

    If `persistent` is False, the processes end with each epoch, and new processes get the current dataset.
    """

    count: int = 0
    prefetch_factor: int | None = None
    persistent: bool = True
    timeout_s: float = 0.0
    init: Callable[[int], Any] | None = None
    context: Any = None  # multiprocessing's start method

    @property
    def ahead(self) -> int:
        """Number of batches that loader processes read ahead."""
        return self.count * (2 if self.prefetch_factor is None else self.prefetch_factor)


class Begin:
    """The `worker_init_fn` of loader processes.

    It makes `get_worker_info().dataset` the user's dataset, as in a DataLoader, and calls the user's `worker_init_fn`.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        # Ignore the first SIGTERM: a scheduler sends it to every process, but the rank still needs batches for its
        # last step. A second SIGTERM ends this process.
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        info = get_worker_info()
        assert info is not None
        samples: Any = info.dataset
        object.__setattr__(info, "dataset", samples.dataset)  # WorkerInfo rejects plain assignments
        if self.init is not None:
            self.init(worker)


def make_room_for_sockets() -> None:
    """Make multiprocessing put its sockets into a folder with a short path.

    With a long TMPDIR, loader processes cannot send batches, and multiprocessing raises no error.

    Raises:
        LoaderProcessError: no writable folder has a path that is short enough for sockets.
    """
    chosen = tempfile.tempdir
    tempfile.tempdir = temporary_folder("pymp-12345678/listener-12345678")
    try:
        folder = multiprocessing.util.get_temp_dir()  # multiprocessing makes it once; loader processes inherit it
    finally:
        tempfile.tempdir = chosen
    if not sockets_fit(folder):
        raise LoaderProcessError(
            "loader.path_too_long",
            "the path {folder} is too long for the sockets of DataLoader worker processes. Set TMPDIR to a shorter "
            "path.",
            folder=folder,
        )


def failed(
    where: str, workers: Workers, ended: Sequence[tuple[int, int]], error: Exception | None
) -> LoaderProcessError:
    """Return the error that explains why loader processes failed.

    `ended` lists (pid, exit code) of the processes that have ended; `error` is torch's error, if any.
    """
    if ended:
        pid, code = ended[0]
        more = f" (and {len(ended) - 1} more)" if len(ended) > 1 else ""
        advice = "" if code >= 0 else ". Those that were killed often lacked memory: try a smaller num_workers"
        return LoaderProcessError(
            "loader.worker_ended",
            "{where}: a DataLoader worker process (pid {pid}){others} {how}{advice}",
            where=where,
            pid=pid,
            others=more,
            how=_end_of(code),
            advice=advice,
        )
    said = f"{type(error).__name__}: {error}".strip()
    if "timed out" in said:
        return LoaderProcessError(
            "loader.timeout",
            "{where}: the {workers} DataLoader worker processes returned no batch within their timeout of "
            "{timeout_s:g} s. If reading is just slow, raise timeout or num_workers.",
            where=where,
            workers=workers.count,
            timeout_s=workers.timeout_s,
        )
    return LoaderProcessError(
        "loader.workers_failed",
        "{where}: the {workers} DataLoader worker processes failed: {reasons}. Workers are often killed for lack of "
        "memory, so try a smaller num_workers.",
        where=where,
        workers=workers.count,
        reasons=said,
    )


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # real-time signals have no name
        return f"was killed by signal {-code}"
