"""The events of a run: their file, their display, and their per-step sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.engine.engine import Engine
from paceline.run.record.callback import Callback, StepInfo
from paceline.run.record.progress import PlainProgress
from paceline.run.record.run import JsonLines, Run
from paceline.run.record.slow_ranks import SlowRanks


class Events(Callback):
    """Writes a run's events on the first rank, and shows them on `progress`.

    Attributes:
        progress: shows the run on a terminal; None where the launcher does.
    """

    def __init__(self, run: Run, progress: PlainProgress | None, *, writes: bool) -> None:
        self.run, self.progress = run, progress
        self.lines = JsonLines(run.path / "events.jsonl", lossy=True) if writes else None

    def __call__(self, event: str, details: dict[str, Any]) -> None:
        """Write an event down."""
        if self.lines is not None:
            self.lines.event(event, details)
        if self.progress is not None:
            self.progress.event({"event": event, **details})

    def on_step(self, info: StepInfo) -> None:
        """Show the step."""
        if self.progress is not None:
            self.progress.step(info.result, info.epoch)

    def missing(self, *files: JsonLines) -> None:
        """Say in the record what is missing from it, once the disk takes lines again."""
        for lines in (*files, self.lines):
            if lines is not None and self.lines is not None and lines.missing and not self.lines.lost:
                lost, lines.missing = lines.missing, 0
                self("lines_lost", {"file": str(lines.path.relative_to(self.run.path)), "lines": lost})

    def close(self) -> None:
        """Close the file."""
        if self.lines is not None:
            self.lines.close()


class Remarks(Callback):
    """Events of every step from the sync rule, the loss and slow ranks."""

    def __init__(
        self, engine: Engine, events: Events, at_even_shares: Callable[[StepInfo], Sequence[float]] = lambda i: i.busy_s
    ) -> None:
        """Make the callback; `at_even_shares` gives what ranks are compared by."""
        self.engine, self.events, self.at_even_shares = engine, events, at_even_shares
        self.slow_ranks = SlowRanks(engine.plan, engine.group.hosts)
        # how many lines of the rule are in the record
        self._told = 0

    def after_step(self, info: StepInfo) -> str | None:
        """See `Callback`."""
        for event, details in self.slow_ranks.step(info.result.step, self.at_even_shares(info)):
            self.events(event, details)
        self.tell()
        return None

    def tell(self) -> None:
        """Record messages of rule and loss, and healed ranks, since the last call."""
        corruption = self.engine.replica_state.corruption
        found, corruption.found = corruption.found, []
        for details in found:
            self.events("corruption", details)
        said = self.engine.messages
        if len(said) > self._told:
            self.events("sync", {"said": said[self._told :]})
            self._told = len(said)
        if news := self.engine.compute.normalization.news():
            self.events("loss", {"said": news})
