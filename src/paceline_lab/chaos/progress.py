"""Progress of a run that another process trains, from its record and status board."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.wire.status import RankStatus, StatusBoard

_TROUBLE = ("lost", "host_lost", "restart", "joins", "checkpoint_failed", "rewind")


class Progress:
    """Newest step, phases and events of a run under way.

    Attributes:
        newest: step that was recorded last; `furthest` is the highest so far.
        news: changes whenever something is heard of the run.
    """

    def __init__(self, run: Path, temporary: Path) -> None:
        self.run, self.temporary = run, temporary
        self.newest = self.furthest = 0
        self.news = 0
        self.trouble_at: list[float] = []
        self._places: dict[Path, int] = {}
        self._command = 0

    def begin(self, command: int) -> None:
        """A new command trains the run; its process id."""
        self._command = command
        self.news += 1

    def read(self) -> None:
        """Take in what was written since the last call."""
        for record in self._new_lines(self.run / "events.jsonl"):
            if record.get("event") in _TROUBLE:
                self.trouble_at.append(float(record["time"]))
        for file in self.run.glob("steps/rank-*.jsonl"):
            for record in self._new_lines(file):
                self.newest = int(record["step"])
                self.furthest = max(self.furthest, self.newest)

    def recovers_since(self, time: float) -> bool:
        """True once the run has told of trouble that came after a time."""
        return any(at >= time for at in self.trouble_at)

    def phases(self) -> set[str]:
        """Phases in which ranks are right now."""
        return {status.phase for status in self._statuses()}

    def pids_of(self, rank: int) -> list[int]:
        """Process ids of a rank, one where its host is this machine."""
        return sorted({status.pid for status in self._statuses() if status.rank == rank})

    def _statuses(self) -> list[RankStatus]:
        """Status of every rank that has one, as each host's board shows it."""
        found: list[RankStatus] = []
        for file in self.temporary.glob("*/status"):
            try:
                board = StatusBoard.at(file)
            except (OSError, ValueError):  # just removed, or not yet of its size
                continue
            found += [status for status in board.read() if status.pid]
            board.close()
        return found

    def _new_lines(self, file: Path) -> list[dict[str, Any]]:
        place = self._places.get(file, 0)
        try:
            with open(file, "rb") as opened:
                opened.seek(place)
                whole, end, _ = opened.read().rpartition(b"\n")
        except OSError:
            return []
        if not end:
            return []
        self._places[file] = place + len(whole) + 1
        self.news += 1
        found = []
        for line in whole.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # cut short by a crash
                continue
        return found
