"""Brief state of a run, read from the ends of its files.

This module reads a few kilobytes per run and imports little, so that many runs can be listed quickly. A damaged
directory, or a directory of another program, gets the state `unreadable` and raises no error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.elastic.leadership import LOCK, Holder
from paceline.files import opened_to_read
from paceline.run.record.progress import NewLines

RunState = Literal["starting", "training", "ended", "interrupted", "failed", "unreadable"]
ENDED: tuple[RunState, ...] = ("ended", "interrupted", "failed", "unreadable")
_TAIL_BYTES, _STEP_BYTES = 2**16, 2**12  # bytes read from the end of the events file and of a rank's steps file
_BEAT_S = 60.0  # a trainer on another host counts as dead after this many seconds without a write
_STATES = ("launch", "start", "resume", "restart", "end")  # events that determine the state of the run


@dataclass(frozen=True)
class RunBrief:
    """Brief state of a run.

    Attributes:
        state: state of the run; `failed` if its process is gone but the run has not ended.
        reason: why the run ended; empty if it has not.
        step: newest step; None before the first.
        loss: training loss of the newest step; None if it was not finite.
        began: Unix time of the last start or resumption, in seconds.
    """

    path: Path
    state: RunState
    reason: str = ""
    step: int | None = None
    loss: float | None = None
    began: float = 0.0

    @property
    def sentence(self) -> str:
        """State and reason as text."""
        return f"{self.state}: {self.reason}" if self.reason else self.state


def brief_of(path: Path) -> RunBrief:
    """Return the brief state of the run in a directory; never raises an error."""
    try:
        return _brief(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return RunBrief(path, "unreadable", getattr(error, "strerror", None) or type(error).__name__, began=_made(path))


def run_directories(folder: Path) -> list[Path]:
    """Return the runs in a folder, or the folder itself if it is a run.

    Never raises an error.
    """
    with suppress(OSError):
        if (folder / "job.yaml").is_file():
            return [folder]
        return [path for path in folder.iterdir() if (path / "job.yaml").is_file()]
    return []


def _brief(path: Path) -> RunBrief:
    with opened_to_read(path / "job.yaml"):
        pass  # raises an error if this user may not read the run
    events = [event for event in _newest(path / "events.jsonl", _TAIL_BYTES) if isinstance(event.get("event"), str)]
    states = [event for event in events if event["event"] in _STATES]
    steps = [line for line in _newest(_steps_file(path), _STEP_BYTES) if _is_number(line.get("step"))]
    newest = steps[-1] if steps else {}
    loss = newest.get("loss")
    last = states[-1] if states else {}
    state: RunState
    if last.get("event") == "end":
        state = "interrupted" if last.get("interrupted") else "ended"
    elif not _is_trained(path):
        state = "failed"
    else:
        began = last.get("event") in ("start", "resume") and newest and newest.get("time", 0) >= last.get("time", 0)
        state = "training" if began else "starting"
    return RunBrief(
        path=path,
        state=state,
        reason=str(last.get("reason", "")) if last.get("event") == "end" else "",
        step=int(newest["step"]) if newest else None,
        loss=loss if _is_number(loss) else None,
        began=_made(path),
    )


def _newest(file: Path, size: int) -> Iterator[dict[str, Any]]:
    lines = NewLines(file)
    lines.skip(size)
    return (line for line in lines if isinstance(line, dict))


def _steps_file(path: Path) -> Path:
    """Return the steps file that was written last; rank 0 may be lost."""
    files = list((path / "steps").glob("rank-*.jsonl"))
    return max(files, key=lambda file: file.stat().st_mtime, default=path / "steps" / "rank-0.jsonl")


def _is_trained(path: Path) -> bool:
    """Return True if the training process seems to be alive."""
    holder = None
    with suppress(OSError), opened_to_read(path / LOCK) as file:
        holder = Holder.parse(file.read(4096))
        if holder is None:
            return False  # the lock was released
    if holder is not None and (holder.runs_here or holder.is_gone):
        return holder.runs_here
    # the run trains on another host, or without a lock (as on Flower), so use the time of the last write
    files = [path / LOCK, path / "events.jsonl", _steps_file(path)]
    return time.time() - max(_changed(file) for file in files) < _BEAT_S


def _changed(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _made(path: Path) -> float:
    """Return the time of the last start, when the run's description was written."""
    return _changed(path / "environment.json") or _changed(path)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
