"""Comparison of systems as a table on the screen, and as named numbers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.units import count, ratio, seconds, size
from paceline_lab.systems.compared import ComparedWay, Comparison

OURS = "paceline"
WIDTH = 140


def show(found: Comparison, console: Console) -> None:
    """Print what each system is best at, all figures, and what was left out."""
    console.width = console.width if console.is_terminal else WIDTH
    console.print()
    for number, remark in enumerate(found.remarks):
        console.print(Text(remark, style="" if number else "bold"), soft_wrap=True)
    console.print()
    console.print(_table(found))
    for title, reason in found.left_out.items():
        console.print(Text(f"left out  {title}: {reason}", style="yellow"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note      {note}", style="yellow"), soft_wrap=True)
    console.print(
        Text(
            f"\nEach system ran {count(found.repeats, 'time')} for {found.steps} steps with "
            f"{found.places}, in interleaved rounds; medians with 95 % intervals. Times are "
            "other / paceline of neighbouring runs. Lines: changed in a plain script.\n"
            f"{_scaling(found)}\n"
            f"machine   {found.cluster}\nplan      {found.plan}",
            style="dim",
        ),
        soft_wrap=True,
    )


def _scaling(found: Comparison) -> str:
    """The batches behind the speedups."""
    if found.scaling == "strong":
        return (
            f"strong    a global batch of {found.global_batch}; speedup: against one process on one core with the same"
        )
    return (
        f"weak      a global batch of {found.global_batch}, {found.batch_alone} a rank; speedup: of samples a second, "
        f"against one process on one core with a batch of {found.batch_alone}"
    )


def _table(found: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    headings = ["system", "", "step", "times ours", f"{found.scaling} speedup", "first step", "memory", "lines"]
    headings += ["a rank killed"] if any(way.recovery for way in found.ways) else []
    headings += ["on wire"] if any(way.wire_bytes for way in found.ways) else []
    headings += ["to target"] if found.target is not None else []
    for number, heading in enumerate(headings):
        label = number == 1
        table.add_column(heading, justify="left" if number < 2 else "right", overflow="fold", no_wrap=not label)
    for way in sorted(found.ways, key=lambda way: way.step_s.middle):
        cells = _cells(way)
        cells += [way.recovery] if "a rank killed" in headings else []
        cells += [str(size(way.wire_bytes)) if way.wire_bytes else "?"] if "on wire" in headings else []
        cells += [str(seconds(way.to_target_s)) if way.to_target_s else "-"] if "to target" in headings else []
        table.add_row(*cells, style="bold" if way.way == OURS else "" if way.same else "dim")
    return table


def _cells(way: ComparedWay) -> list[str]:
    other = "" if way.same else " (other losses)" if way.exact else " (inexact)"
    return [
        way.title,
        way.label + other,
        str(seconds(way.step_s.middle)),
        "" if way.ratio is None else f"{way.ratio.middle:.2f} ({way.ratio.low:.2f}–{way.ratio.high:.2f})",
        "" if way.speedup is None else str(ratio(way.speedup)),
        str(seconds(way.first_step_s.middle)),
        str(size(way.memory_bytes)),
        "" if way.lines is None else str(way.lines),
    ]


def figures(found: Comparison) -> dict[str, float]:
    """Numbers by name: `step_s_ddp`, `ratio_ddp`, `strong_speedup_ddp`, …; `ratio_to_best` has its interval."""
    named: dict[str, float] = {"systems_run": float(len({way.system for way in found.ways} - {"plain"}))}
    for way in found.ways:
        name = way.way.replace("-", "_")
        named[f"step_s_{name}"] = way.step_s.middle
        if way.ratio is not None:
            named[f"ratio_{name}"] = way.ratio.middle
        for what, value in (("speedup", way.speedup), ("efficiency", way.efficiency)):
            if value is not None:
                named[f"{found.scaling}_{what}_{name}"] = value.middle
        if way.to_target_s is not None:
            named[f"to_target_s_{name}"] = way.to_target_s.middle
    best = next((way for way in found.ways if way.way == found.best_other), None)
    if best is not None and best.ratio is not None:
        named |= {
            "ratio_to_best": best.ratio.middle,
            "ratio_to_best_low": best.ratio.low,
            "ratio_to_best_high": best.ratio.high,
        }
    return named
