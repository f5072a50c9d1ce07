"""Output of `paceline check --dry`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.errors import BatchError, PlanError
from paceline.planning.axes import AXES
from paceline.units import count, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.job.job import Job
    from paceline.run.dry_run.dry_run import DryRun


_WIDTH = 120  # of the table, at least: a pipeline of ranks divided along four more axes
_LEGEND = (
    "peak: the most at once in a step, with activations, gathered weights and buffers, but without what kernels take "
    "inside. sent: by each rank in a step, along each axis."
)


def show_dry_run(job: Job, text: str, console: Console) -> bool:
    """Run a plan dry and show what was found; returns True if it can run."""
    from paceline.planning.plan import Plan
    from paceline.run.dry_run.dry_run import run_dry

    plan = Plan.parse(text)
    try:
        with console.status("importing torch") as status:
            found = run_dry(job, plan, say=status.update)
    except (PlanError, BatchError) as error:
        for line in str(error).splitlines():
            console.print(line, markup=False)
        console.print(f"plan {plan} cannot run", style="red")
        return False
    _show(found, console)
    return True


def _show(found: DryRun, console: Console) -> None:
    for line in together(line for stage in found.stages for line in stage.report):
        console.print(f"  {line}", markup=False, style="dim")
    console.width = max(console.width, _WIDTH)
    console.print(_table(found))
    console.print(_LEGEND, style="dim")
    for note in dict.fromkeys((*found.notes, *_looks(found))):
        console.print(f"note: {note}", markup=False)
    plan, state = found.plan, max(stage.state.total for stage in found.stages)
    if reasons := [stage.stopped_by for stage in found.stages if stage.stopped_by]:
        console.print(
            f"plan {plan} divides the model; a dry run cannot take its step to the end: {reasons[0]}", markup=False
        )
        return
    console.print(
        f"plan {plan} can run: {count(plan.ranks, 'rank')}, {size(state)} of state per rank, "
        f"found by a dry run of {found.seconds:.0f} s with {size(found.memory_bytes)}",
        markup=False,
    )


def together(lines: Iterable[str]) -> list[str]:
    """Lines that differ in module numbers only, merged into one with their count.

    Blocks of a model are usually divided in the same way.
    """
    counts: dict[str, tuple[str, int]] = {}
    for line in dict.fromkeys(lines):
        name, colon, what = line.partition(":")
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name) + colon + what
        counts[pattern] = line, counts.get(pattern, (line, 0))[1] + 1
    return [
        line if count == 1 else pattern.replace(":", f" ({count} of them):", 1)
        for pattern, (line, count) in counts.items()
    ]


def _table(found: DryRun) -> Table:
    from rich.table import Table

    axes = [axis for axis in reversed(AXES) if any(axis in stage.sent_bytes for stage in found.stages)]
    piped = len(found.stages) > 1
    table = Table(
        *(["stage"] if piped else []), "parameters", "gradients", "optimizer", "peak", box=None, pad_edge=False
    )
    for axis in axes:
        table.add_column(f"sent: {axis}")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for stage in found.stages:
        first = [str(stage.stage + 1)] if piped else []
        sizes = (*stage.state, stage.peak_bytes, *(stage.sent_bytes.get(axis, 0) for axis in axes))
        table.add_row(*first, *(str(size(size_bytes)) for size_bytes in sizes))
    return table


def _looks(found: DryRun) -> list[str]:
    asked = sorted({kind for stage in found.stages for kind in stage.asked})
    if asked:
        return [f"the code of {', '.join(asked)} looks at values of tensors, and was told “no” or 1 in place of them"]
    return []
