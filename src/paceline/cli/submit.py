"""`paceline submit job.yaml --on SCHEDULER`"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.where import not_at_a_url

if TYPE_CHECKING:
    from paceline.elastic.submit.scheduler import Request, Scheduler, Submission

EXAMPLE = 'paceline submit examples/digits.yaml --on slurm --hosts 4 --plan "dp=4" --dry'


def command(
    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="YAML file that says what to train.", callback=not_at_a_url)
    ],
    on: Annotated[str, typer.Option("--on", metavar="SCHEDULER", help="slurm, ray, kubernetes or sky.")],
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 1,
    plan: Annotated[str, typer.Option(help="How to train, as `paceline train` takes it.")] = "auto",
    run: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="Directory of the run, as the hosts see it.", show_default="runs/NAME"),
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="As `paceline train` takes it.")] = 0,
    limit: Annotated[
        str | None,
        typer.Option("--time", metavar="TIME", help="Time limit, e.g. 1h30m: it saves, queues again and goes on."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of the scheduler's own; docs/submit.md has all."),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Show what would be submitted, and stop.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the log.")] = False,
) -> None:
    """Submit a job to a cluster's scheduler, and follow it to its end.

    Ctrl-C stops following; the run goes on. The exit code is that of the run.
    """
    from paceline.elastic.submit.scheduler import Submission, save
    from paceline.elastic.submit.table import scheduler

    where = scheduler(on)
    request = request_from(where, job, hosts, plan, run, restarts, limit, options or [])
    if dry:
        typer.echo(where.text(request), nl=False)
        return
    submission = Submission(
        name=request.name,
        engine=where.name,
        id=where.submit(request),
        hosts=hosts,
        job=str(request.job),
        run=request.run,
        since=time.time(),
        options=dict(request.options),
    )
    save(submission)
    print(f"submitted {request.name}: {where.name} {submission.id}, run {request.run}", flush=True)
    if not detach:
        follow(where, submission)


def request_from(
    where: Scheduler,
    job: Path,
    hosts: int,
    plan: str,
    run: str | None,
    restarts: int,
    limit: str | None,
    options: list[str],
) -> Request:
    """The request, with everything checked that can be told before a scheduler is asked."""
    from paceline.elastic.submit import scheduler as requests
    from paceline.errors import LaunchError
    from paceline.job.job import Job
    from paceline.planning.plan import Plan

    requests.must_be_hosts(hosts)
    if limit is not None and not where.limits_time:
        raise LaunchError(f"--time {limit}: {where.name} has no time limit; leave it out")
    time_s = requests.time_from(limit) if limit is not None else None
    chosen = requests.options_from(options, where.options, where.name)
    what = Job.load(job)
    if plan != "auto":
        Plan.parse(plan)
    name = requests.name_for(what.name)
    if run is None:
        run = f"/runs/{name}" if "claim" in chosen else str(Path("runs", name).absolute())
    elif "://" not in run:
        run = str(Path(run).absolute())
    return requests.Request(job.absolute(), hosts, name, run, plan, restarts, time_s, chosen)


def follow(where: Scheduler, submission: Submission) -> None:
    """Show the log of a run to its end, and leave with its exit code."""
    from paceline.elastic.submit.scheduler import ended

    try:
        state = where.follow(submission)
    except KeyboardInterrupt:
        print(
            f"\nno longer followed; the run goes on\nfollow again  paceline runs {submission.name}\n"
            f"end it        paceline cancel {submission.name}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if state.ended:
        ended(submission, state.phase, state.exit_code)
    note = f" ({state.note})" if state.note else ""
    print(f"{submission.name} is {state.phase}{note}, exit code {state.exit_code}, run {submission.run}")
    if state.exit_code:
        raise typer.Exit(state.exit_code)
