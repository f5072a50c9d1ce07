"""`paceline chaos job.yaml`: train under random faults, and check paceline's guarantees."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import Command, SetKeys, load_job, not_at_a_url

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline_lab.chaos.session import Found, Session

_WIDTH = 150  # minimum width of the table, in characters


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML): what to train.")],
    changes: SetKeys = None,
    faults: Annotated[
        str | None,
        typer.Option(
            help="Kinds of faults: kill, stop, oom, partition, cut, slow, disk-full, corrupt, clock, store.",
            show_default="all that can be made here",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the schedule of faults.")] = 1,
    minutes: Annotated[float, typer.Option(min=0.05, help="Length of the undisturbed run in minutes.")] = 5.0,
    ranks: Annotated[int, typer.Option(min=1, help="Number of replicas on this machine, each with one rank.")] = 3,
    emulate: Annotated[
        int, typer.Option(min=0, max=250, help="Number of emulated hosts, with one replica on each; needs root.")
    ] = 0,
    plan: Annotated[
        str | None, typer.Option(help="Plan, instead of one replica per rank.", show_default="dp=N")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of steps of the run, instead of --minutes.", show_default="as --minutes says"),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of faults.", show_default="one for every 10 s")
    ] = None,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Schedule of faults to play, as an earlier run has written it.")
    ] = None,
    tries: Annotated[
        int, typer.Option(min=0, help="Largest number of runs to shorten a failing schedule; 0 leaves it as it is.")
    ] = 16,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for the runs.", show_default="chaos/JOB")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Train a job under random faults, and check paceline's guarantees.

    The run ends. Its losses match those of an undisturbed run. Every sample is used once per epoch. No checkpoint is
    lost, and nothing is left behind. Memory, processes, file descriptors, threads and files do not grow over a minute.

    Exit code 1: a guarantee was violated. The schedule is then reduced to a shortest one that still violates it.
    """
    from paceline.console import Console
    from paceline.elastic.failure import sigterm_as_exit
    from paceline_lab.chaos.faults import kinds_in, possible_kinds
    from paceline_lab.chaos.schedule import Schedule
    from paceline_lab.chaos.session import Session

    what = load_job(str(not_at_a_url(job)), changes)
    given = Schedule.read(schedule) if schedule else None
    hosts = given.hosts if given else emulate
    where = out or Path("chaos") / what.name
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    session = Session(what, hosts, where, console.print)
    with sigterm_as_exit():
        if given is None:
            kinds = kinds_in(faults) if faults else possible_kinds(hosts)
            text = plan or f"dp={hosts or ranks}"
            given = session.drawn(kinds, seed, minutes, text, steps, count)
        found = session.tried(given, f"seed-{given.seed}")
        show(found, Console(highlight=False, markup=False))
        if not found.held:
            words = [str(job), *(f"--set={change}" for change in changes or ())]
            _shrink(session, found, tries, shlex.join(words), where)
    if as_json:
        import json

        typer.echo(json.dumps(found.details))
    if not found.held:
        raise typer.Exit(1)


def _shrink(session: Session, found: Found, tries: int, job: str, where: Path) -> None:
    """Search for a shorter schedule that still violates a guarantee, and print it."""
    given, shortest = found.schedule, found.schedule
    file = where / f"seed-{given.seed}" / "schedule.json"
    if tries and len(given.faults) > 1:
        shortest, file = session.shrunk(found, tries), where / f"shortest-{given.seed}.json"
        shortest.write(file)
    typer.echo(f"shortest     {len(shortest.faults)} of {len(given.faults)} faults still break it:")
    for fault in shortest.faults:
        typer.echo(f"             {fault}, at {fault.at:.0%} of the steps")
    typer.echo(f"again        paceline chaos {job} --schedule {file}")


def show(found: Found, console: Console) -> None:
    """Print the faults of a run, and whether each guarantee held."""
    console.width = max(console.width, _WIDTH)
    console.print(_table(found))
    for fault in found.played.not_made:
        console.print(f"not made: {fault}; the run gave no occasion for it")
    resumed = sum(bool(end.code) for end in found.played.ends)
    console.print(f"commands that ended with an error, and were resumed: {resumed}")
    console.print(found.reference.why)
    for course in found.played.grown:
        console.print(str(course))
    for invariant in found.invariants:
        console.print(f"{'held  ' if invariant.held else 'BROKEN'}  {invariant.name}")
        for text in invariant.broken:
            console.print(f"        {text}")


def _table(found: Found) -> Table:
    from rich.table import Table

    table = Table(
        "step",
        "fault",
        "named after",
        "gap",
        "steps lost",
        "healed after",
        "losses differ by",
        box=None,
        pad_edge=False,
    )
    for row in found.rows:
        table.add_row(
            str(row.step),
            row.fault,
            _seconds(row.named_s),
            _seconds(row.gap_s),
            str(row.steps_lost),
            _seconds(row.healed_s),
            "–" if row.losses_differ is None else f"{row.losses_differ:.2g}",
        )
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


COMMAND = Command(command, "Measure", "paceline chaos examples/digits.yaml --faults kill,stop --minutes 1")
