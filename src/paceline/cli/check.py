"""`paceline check job.yaml`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.where import ClusterFile, Hosts, JobFile, start_on

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.run.parity.check import LargestDifference, Parity

EXAMPLE = 'paceline check examples/gpt_text.yaml --plan "fsdp=2 tp=2"'
_NAMED = 10  # parameters, where parity fails
CANNOT_TELL = 3  # the exit code


def command(
    job: JobFile,
    plan: Annotated[
        str | None, typer.Option(help='The plan to check, e.g. "dp=2 tp=2"; auto is what train would choose.')
    ] = None,
    cluster: ClusterFile = None,
    hosts: Hosts = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--all", metavar="RANKS", min=1, help="Check every plan of up to this many ranks that can run the job."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 5,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry", help="Start nothing: dry-run one rank of the plan without memory, for any number of ranks."
        ),
    ] = False,
) -> None:
    """Compare a plan with one process in float64, step by step.

    Compared are losses, gradients, parameters and buffers.

    Exit code 1: they differ.

    Exit code 3: undecided, as rounding or random numbers could hide a mistake.
    """
    start_on(hosts, cluster)
    if not dry:
        from paceline.elastic.forkserver import warm_up

        warm_up()  # it imports torch while this process imports what is left and reads the job
    from paceline.cli.where import to_run_on
    from paceline.console import Console
    from paceline.job.job import Job

    if (plan is None) == (every is None):
        raise typer.BadParameter('name a plan with --plan "…", or --all RANKS', param_hint="--plan")
    if dry and plan is None:
        raise typer.BadParameter("--dry runs one plan: name it with --plan", param_hint="--dry")
    console, what = Console(soft_wrap=True, highlight=False), Job.load(job)
    where = to_run_on(cluster)
    if plan == "auto":
        plan = _chosen(what, where, console)
    if every is not None:
        code = _all(what, where, every, steps, console)
    elif dry:
        code = int(not _dry_run(what, str(plan), console))
    else:
        code = _one(what, where, str(plan), steps, console)
    if code:
        raise typer.Exit(code)


def _chosen(job: Job, cluster: Cluster | None, console: Console) -> str:
    from paceline.cluster.discover import to_run_on
    from paceline.run.tuning.auto import choose

    return str(choose(job, to_run_on(cluster), lambda line: console.print(line, markup=False)).plan)


def _one(job: Job, cluster: Cluster | None, text: str, steps: int, console: Console) -> int:
    from paceline.run.parity.check import check

    parity = check(job, text, cluster, steps=steps)
    _show(parity, console)
    return {"holds": 0, "differs": 1, "cannot tell": CANNOT_TELL}[parity.verdict]


def _dry_run(job: Job, text: str, console: Console) -> bool:
    from paceline.cli.dry import show_dry_run

    return show_dry_run(job, text, console)


def _show(parity: Parity, console: Console) -> None:
    from rich.table import Table

    from paceline.cli.dry import together

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
