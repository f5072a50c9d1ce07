"""`paceline check job.yaml`: comparison of a plan with one process, or a dry run of the plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import ClusterFile, Hosts, JobFile, SetKeys, load_job, start_on
from paceline.errors import BatchError, PlanError
from paceline.units import count, seconds, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.run.dry_run.dry_run import DryRun
    from paceline.run.parity.check import LargestDifference, Parity


_NAMED = 10  # number of parameters to list if parity fails
_MOST_RANKS = 4  # by default, --all checks plans with at most this number of ranks
CANNOT_TELL = 3  # exit code of an undecided check


def command(
    job: JobFile,
    plan: Annotated[
        str | None,
        typer.Option(help='Plan to check, e.g. "dp=2 tp=2", or auto for the plan that `paceline train` would choose.'),
    ] = None,
    changes: SetKeys = None,
    cluster: ClusterFile = None,
    hosts: Hosts = None,
    every: Annotated[bool, typer.Option("--all", help="Check every plan that can run the job.")] = False,
    max_ranks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --all, check only plans with at most N ranks.", show_default="4"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 5,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Start no ranks: run one rank of a plan of any size on tensors without memory."),
    ] = False,
) -> None:
    """Check that a plan computes the same as one process in every step.

    Losses, gradients, parameters and buffers are compared in float64.

    Exit code 1: the results differ.

    Exit code 3: the check cannot decide, because rounding or random numbers could hide a mistake.
    """
    start_on(hosts, cluster)
    if not dry_run:
        from paceline.elastic.forkserver import warm_up

        warm_up()  # the forkserver imports torch while this process imports the other modules and reads the job
    from paceline.cli.command import to_run_on
    from paceline.console import Console

    if (plan is not None) == every:
        raise typer.BadParameter('name one plan with --plan "…", or check all with --all', param_hint="--plan")
    if dry_run and plan is None:
        raise typer.BadParameter("a dry run takes one plan: name it with --plan", param_hint="--dry-run")
    if max_ranks is not None and not every:
        raise typer.BadParameter("it limits --all, which is not given", param_hint="--max-ranks")
    console, what = Console(soft_wrap=True, highlight=False), load_job(job, changes)
    where = to_run_on(cluster)
    if plan == "auto":
        plan = _chosen(what, where, console)
    if every:
        code = _all(what, where, _MOST_RANKS if max_ranks is None else max_ranks, steps, console)
    elif dry_run:
        code = int(not show_dry_run(what, str(plan), console))
    else:
        code = _one(what, where, str(plan), steps, console)
    if code:
        raise typer.Exit(code)


def _chosen(job: Job, cluster: Cluster | None, console: Console) -> str:
    from paceline.planning.arguments import cluster_to_run_on
    from paceline.run.tuning.auto import choose

    return str(choose(job, cluster_to_run_on(cluster), lambda line: console.print(line, markup=False)).plan)


def _one(job: Job, cluster: Cluster | None, text: str, steps: int, console: Console) -> int:
    from paceline.run.parity.check import check

    parity = check(job, text, cluster=cluster, steps=steps)
    _show(parity, console)
    return {"holds": 0, "differs": 1, "cannot tell": CANNOT_TELL}[parity.verdict]


def _show(parity: Parity, console: Console) -> None:
    from rich.table import Table

    for line in together(parity.report):
        console.print(f"  {line}", markup=False, style="dim")
    limit = parity.tolerance
    has_buffers = any(step.buffer.name for step in parity.steps)
    columns = ["step", "loss", "one process", "loss differs", "gradients", "parameters", *["buffers"] * has_buffers]
    table = Table(*columns, box=None, pad_edge=False)
    for number, step in enumerate(parity.steps, 1):
        differences = (
            _difference(step.loss_difference, limit.loss),
            _difference(step.gradient.difference, limit.gradient),
            _difference(step.parameter.difference, limit.parameter),
            *[_difference(step.buffer.difference, limit.buffer)] * has_buffers,
        )
        table.add_row(str(number), f"{step.loss:.7f}", f"{step.reference_loss:.7f}", *differences)
    console.print(table)
    for kind, worst in ((kind, _worst(parity, kind)) for kind in ("gradient", "parameter", "buffer")):
        if worst.name:
            console.print(f"the {kind} that differs most: {worst.difference:.1e}, {worst.name} on rank {worst.rank}")
    exact = "float64" if parity.reference_precision == "fp64" else "float32, as the model does not run in float64"
    limits = f"{limit.loss:.1e} (loss), {limit.gradient:.1e} (gradients), {limit.parameter:.1e} (parameters)"
    limits += f", {limit.buffer:.1e} (buffers)" * has_buffers + f", relative to one process in {exact}"
    if parity.holds:
        console.print(f"plan {parity.plan}: parity holds within {limits}", style="green")
        return
    if parity.verdict == "cannot tell":
        console.print(
            f"plan {parity.plan}: this check CANNOT TELL: {parity.why_undecided}", markup=False, style="yellow"
        )
        return
    console.print(f"plan {parity.plan}: parity FAILS, beyond {limits}", style="red")
    if parity.plan.inexact:
        console.print(
            f"{parity.plan.inexact} is meant to differ from one process: hold this plan to the loss that it reaches "
            "instead",
            markup=False,
        )
    if parity.first_module is not None:
        console.print(f"the first module whose output differs: {parity.first_module}")
    for name, difference in sorted(parity.parameters.items(), key=lambda entry: -entry[1])[:_NAMED]:
        console.print(f"  gradient of {name}: {_difference(difference, limit.gradient)}")


def _worst(parity: Parity, kind: str) -> LargestDifference:
    found: list[LargestDifference] = [getattr(step, kind) for step in parity.steps]
    return max(found, key=lambda worst: worst.difference)


def _difference(value: float, tolerance: float) -> str:
    return f"[red]{value:.1e}[/red]" if value > tolerance else f"{value:.1e}"


def _all(job: Job, cluster: Cluster | None, most_ranks: int, steps: int, console: Console) -> int:
    from paceline.errors import PlanError
    from paceline.planning.plan import Plan
    from paceline.run.parity.check import check_all

    counts = {"holds": 0, "differs": 0, "cannot tell": 0, "refused": 0, "failed": 0}

    def say(plan: Plan, found: Parity | Exception) -> None:
        if isinstance(found, Exception):
            verdict = "refused" if isinstance(found, PlanError) else "failed"
            counts[verdict] += 1
            console.print(f"{verdict}  {plan}: {str(found).splitlines()[0]}", markup=False)
            return
        counts[found.verdict] += 1
        largest, gradient = found.largest, max((s.gradient for s in found.steps), key=lambda w: w.difference)
        verdict = {"holds": "parity", "differs": "[red]DIFFERS[/red]", "cannot tell": "[yellow]cannot tell[/yellow]"}[
            found.verdict
        ]
        console.print(f"{verdict}  {plan}: loss {largest.loss:.1e}, gradients {largest.gradient:.1e} ({gradient.name})")

    check_all(job, most_ranks, cluster, steps=steps, say=say)
    others = ("differs", "differ"), ("cannot tell", "cannot be told"), ("refused", "are refused"), ("failed", "failed")
    said = [f"{counts[verdict]} {words}" for verdict, words in others if counts[verdict]]
    console.print(", ".join([f"{counts['holds']} plans compute what one process computes", *said]))
    return 1 if counts["differs"] or counts["failed"] else CANNOT_TELL if counts["cannot tell"] else 0


_WIDTH = 120  # minimum width of the table, which fits a pipeline and four more axes
_LEGEND = (
    "peak: the most at once in a step, with activations, gathered weights and buffers, but without what kernels take "
    "inside. sent: by each rank in a step, along each axis."
)


def show_dry_run(job: Job, text: str, console: Console) -> bool:
    """Dry-run a plan and show the results; return True if the plan can run."""
    from paceline.planning.arguments import plan_of
    from paceline.run.dry_run.dry_run import run_dry

    plan = plan_of(text, job)
    try:
        with console.status("importing torch") as status:
            found = run_dry(job, plan, say=status.update)
    except (PlanError, BatchError) as error:
        for line in str(error).splitlines():
            console.print(line, markup=False)
        console.print(f"plan {plan} cannot run", style="red")
        return False
    _show_dry(found, console)
    return True


def _show_dry(found: DryRun, console: Console) -> None:
    for line in together(line for stage in found.stages for line in stage.report):
        console.print(f"  {line}", markup=False, style="dim")
    console.width = max(console.width, _WIDTH)
    console.print(_dry_table(found))
    console.print(_LEGEND, style="dim")
    for note in dict.fromkeys((*found.notes, *_looks(found))):
        console.print(f"note: {note}", markup=False)
    plan, state = found.plan, max(stage.state.total for stage in found.stages)
    if reasons := [stage.stopped_by for stage in found.stages if stage.stopped_by]:
        console.print(
            f"plan {plan} divides the model, but a dry run cannot complete its step: {reasons[0]}", markup=False
        )
        return
    console.print(
        f"plan {plan} can run: {count(plan.ranks, 'rank')}, {size(state)} of state per rank, "
        f"found by a dry run of {seconds(found.seconds)} with {size(found.memory_bytes)}",
        markup=False,
    )


def together(lines: Iterable[str]) -> list[str]:
    """Merge lines that differ only in module numbers into one line with a count.

    The blocks of a model are usually divided in the same way, so they need one line instead of many.
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


def _dry_table(found: DryRun) -> Table:
    from rich.table import Table

    from paceline.planning.plan import AXES

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
        return [f"the code of {', '.join(asked)} reads values of tensors; the dry run returned False or 1 instead"]
    return []
