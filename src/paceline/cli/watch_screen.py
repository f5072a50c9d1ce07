"""Screen of `paceline watch`: one run in detail, or a summary of several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.engine.meter import PARTS
from paceline.report.live_run import Happened, LiveRun, RankNow
from paceline.text import printable
from paceline.units import clock, seconds, size

_BARS = "▁▂▃▄▅▆▇█"
# character and colour for each part of a step; the characters alone are distinct
_LOOKS = {
    "data": ("░", "blue"),
    "compute": ("█", "green"),
    "bubble": ("·", "bright_black"),
    "comm": ("▒", "yellow"),
    "imbalance": ("▓", "red"),
    "optimizer": ("▄", "cyan"),
    "checkpoint": ("▪", "magenta"),
}
_TITLES = ("rank", "step", "step time", "samples", "memory")
_BAR, _CURVE, _FEWEST_RANKS, _OTHER_LINES = 30, 60, 4, 9


def screen(runs: Sequence[LiveRun], height: int, now: float | None = None) -> RenderableType:
    """Render the runs, in the given number of lines if possible."""
    if len(runs) > 1:
        return Group(*(part for run in runs for part in (*_head(run, now), Text(""))), _legend())
    run = runs[0]
    events = list(run.events)[-max((height - _OTHER_LINES) // 3, 3) :]
    ranks = max(height - _OTHER_LINES - len(events), _FEWEST_RANKS)
    return Group(*_head(run, now), Text(""), *_table(run.ranks(), ranks), _legend(), Text(""), *_happened(run, events))


def line(run: LiveRun) -> str:
    """Render one line, for output that is not a terminal."""
    return f"{printable(run.run.path.name)}: {run.recent.sentence()} · {printable(run.state())}"


def _head(run: LiveRun, now: float | None) -> list[Text]:
    where = f"{run.run.path.name} · {run.run.plan} · {run.run.cluster.describe()}"
    since = f", for {clock(max((time.time() if now is None else now) - run.began, 0.0))}" if run.began else ""
    head = Text(printable(where), style="bold", no_wrap=True, overflow="ellipsis")
    told = Text(printable(run.state(now)) + ("" if run.ended else since), style="yellow" if run.late(now) else "")
    return [head, told, Text(run.recent.sentence(), no_wrap=True, overflow="ellipsis"), _curve(run.curve.values)]


def _curve(losses: Sequence[float]) -> Text:
    """Render the loss from the first step to the newest as bars."""
    if len(losses) < 2:
        return Text("loss  none yet")
    width = min(_CURVE, len(losses))
    values = [
        statistics.fmean(losses[at * len(losses) // width : (at + 1) * len(losses) // width]) for at in range(width)
    ]
    least, most = min(values), max(values)
    span = most - least or 1.0
    bars = "".join(_BARS[min(int((value - least) / span * len(_BARS)), len(_BARS) - 1)] for value in values)
    # the numbers come first, because a narrow terminal cuts the bars
    return Text(f"loss  {values[0]:.4g} → {values[-1]:.4g}  {bars}", no_wrap=True, overflow="ellipsis")


def _table(ranks: Sequence[RankNow], most: int) -> Iterator[Text]:
    """Render a table with a row for each rank.

    If the ranks do not fit, only the slowest and the mean are shown. The table is plain text, because rich's tables
    take several times as long to render.
    """
    shown = ranks
    if len(ranks) > most:
        behind = sorted(ranks, key=lambda one: (-one.behind, one.parts["imbalance"], one.rank))[: most - 1]
        shown = sorted(behind, key=lambda one: one.rank)
    rows = [_row(one) for one in shown]
    bars, styles = [one.parts for one in shown], ["yellow" if one.behind else "" for one in shown]
    if len(shown) < len(ranks):
        bars.append({part: statistics.fmean(one.parts[part] for one in ranks) for part in PARTS})
        styles.append("bold")
        median_s = statistics.median(one.step_s for one in ranks)
        samples = f"{sum(one.samples for one in ranks):,}"
        rows.append((f"all {len(ranks)}", "", str(seconds(median_s)), samples, ""))
    widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
    yield _cells(_TITLES, widths, "bold").append("where it goes", style="bold")
    for cells, parts, style in zip(rows, bars, styles, strict=True):
        yield _cells(cells, widths, style).append_text(_bar(parts))


def _row(one: RankNow) -> tuple[str, ...]:
    step = f"{one.step:,}" + (f" (−{one.behind:,})" if one.behind else "")
    memory = "" if one.memory_bytes is None else str(size(one.memory_bytes))
    return str(one.rank), step, str(seconds(one.step_s)), str(one.samples), memory


def _cells(cells: Sequence[str], widths: Sequence[int], style: str) -> Text:
    text = "".join(f"{cell:>{width}}  " for cell, width in zip(cells, widths, strict=True))
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _bar(parts: dict[str, float]) -> Text:
    """Render a step's parts, with lengths in proportion to their shares."""
    bar, ends, drawn = Text(), 0.0, 0
    for part, (glyph, style) in _LOOKS.items():
        ends += parts[part]
        until = round(ends * _BAR)
        bar.append(glyph * (until - drawn), style=style)
        drawn = until
    return bar


def _legend() -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for part, (glyph, style) in _LOOKS.items():
        text.append(f"{glyph} ", style=style)
        text.append(f"{part}  ")
    return text


def _happened(run: LiveRun, events: Sequence[Happened]) -> list[Text]:
    began = run.began or (events[0].time if events else 0.0)
    return [
        Text(
            f"{clock(max(one.time - began, 0.0))}  {printable(one.sentence.splitlines()[0])}",
            style="yellow" if one.trouble else "",
            no_wrap=True,
            overflow="ellipsis",
        )
        for one in events
    ]
