"""Commands that operate runs: `submit`, `cancel`, `scale`, and `key`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import SetKeys, not_at_a_url
from paceline.cli.runs import follow_submitted

if TYPE_CHECKING:
    from paceline.elastic.submit.scheduler import Request, Scheduler


def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML): what to train.", callback=not_at_a_url)],
    on: Annotated[str, typer.Option("--on", metavar="SCHEDULER", help="Scheduler: slurm, ray, kubernetes or sky.")],
    num_hosts: Annotated[int, typer.Option(metavar="N", help="Number of hosts.")] = 1,
    changes: SetKeys = None,
    plan: Annotated[str, typer.Option(help="Plan, as for `paceline train`.")] = "auto",
    run: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL", help="Directory or URL of the run, as the hosts see it.", show_default="runs/NAME"
        ),
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Number of restarts, as for `paceline train`.")] = 0,
    limit: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="TIME", help="Time limit, e.g. 1h30m; at its end the run saves, queues again and goes on."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler-option",
            metavar="NAME=VALUE",
            help="Option of the scheduler, e.g. partition=gpu; may be repeated.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted, and stop.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the log after submitting.")] = False,
) -> None:
    """Submit a job to a cluster's scheduler, and follow its log until the run ends.

    Ctrl-C stops following the log, and the run continues. The command returns the run's exit code.
    """
    from paceline.elastic.submit import scheduler_named
    from paceline.elastic.submit.scheduler import Submission, save

    where = scheduler_named(on)
    request = request_from(where, job, num_hosts, plan, run, restarts, limit, options or [], changes or [])
    if dry_run:
        typer.echo(where.text(request), nl=False)
        return
    submission = Submission(
        name=request.name,
        engine=where.name,
        id=where.submit(request),
        hosts=num_hosts,
        job=str(request.job),
        run=request.run,
        since=time.time(),
        options=dict(request.options),
    )
    save(submission)
    print(f"submitted {request.name}: {where.name} {submission.id}, run {request.run}", flush=True)
    if not detach:
        follow_submitted(where, submission)


def request_from(
    where: Scheduler,
    job: Path,
    hosts: int,
    plan: str,
    run: str | None,
    restarts: int,
    limit: str | None,
    options: list[str],
    changes: list[str],
) -> Request:
    """Run all checks that need no scheduler, and build the request."""
    from paceline.elastic.submit import scheduler as requests
    from paceline.errors import LaunchError
    from paceline.job.job import Job
    from paceline.planning.plan import Plan

    requests.must_be_hosts(hosts)
    if limit is not None and not where.limits_time:
        raise LaunchError(
            "submit.no_time_limit",
            "--time {limit}: {scheduler} does not support a time limit. Leave --time out.",
            limit=limit,
            scheduler=where.name,
        )
    time_s = requests.time_from(limit) if limit is not None else None
    chosen = requests.options_from(options, where.options, where.name)
    what = Job.load(job, set=changes)
    if plan != "auto":
        Plan.parse(plan)
    name = requests.name_for(what.name)
    if run is None:
        run = f"/runs/{name}" if "claim" in chosen else str(Path("runs", name).absolute())
    elif "://" not in run:
        run = str(Path(run).absolute())
    return requests.Request(job.absolute(), hosts, name, run, plan, restarts, time_s, chosen, changes)


def cancel(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a run, as `paceline runs` lists it.")],
) -> None:
    """End a submitted run.

    The run saves a checkpoint if its scheduler leaves enough time.
    """
    from paceline.elastic.submit import scheduler_named
    from paceline.elastic.submit.scheduler import find

    submission = find(name)
    if submission.phase:
        typer.echo(f"{submission.name} has ended already: {submission.phase}")
        return
    scheduler_named(submission.engine).cancel(submission)
    typer.echo(
        f"{submission.name} was told to end; to go on from its checkpoint, submit it with --run {submission.run}"
    )


_WAIT_S = 15.0  # seconds for the launcher to answer


def scale(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run that is training.")],
    by: Annotated[
        str, typer.Argument(metavar="+1|-1", help="Add or remove one replica, or one host on several hosts.")
    ],
) -> None:
    """Add or remove one replica while a run trains.

    The global batch stays the same. A run cannot have more replicas than its plan.
    """
    from paceline.elastic.recovery import ask
    from paceline.errors import RunError
    from paceline.storage.url import is_url
    from paceline.text import printable

    if by not in ("+1", "-1"):
        raise typer.BadParameter(f"{by} is neither +1 nor -1: a run grows or shrinks by one at a time")
    if is_url(run):
        raise RunError(
            "run.no_directory_named",
            "{run} is a URL: name the run's working directory. The run prints its name at the start.",
            run=run,
        )
    holder = _holder(Path(run))
    answer = ask(Path(run), int(by), _WAIT_S)
    if answer is None:
        raise RunError(
            "run.no_answer",
            "{run} is being trained by {holder}, which did not answer within {deadline_s:g} s",
            run=run,
            holder=holder,
            deadline_s=_WAIT_S,
        )
    typer.echo(printable(answer))


def _holder(run: Path) -> str:
    """Describe the process that trains a run of this user.

    Raises:
        RunError: no process trains the run, another user owns it, or the directory is not a run.
    """
    from paceline.elastic.leadership import LOCK, Holder
    from paceline.errors import RunError
    from paceline.files import user_name

    try:
        owner = run.stat().st_uid
        content = (run / LOCK).read_bytes()[:4096] if (run / "job.yaml").is_file() else None
    except FileNotFoundError:
        content, owner = None, os.geteuid()
    except PermissionError:
        raise RunError(
            "run.unknown_owner", "{run} belongs to another user, and only the owner can scale it", run=run
        ) from None
    if owner != os.geteuid():
        raise RunError(
            "run.other_owner",
            "{run} belongs to {owner}, and only the owner can scale it",
            run=run,
            owner=user_name(owner),
        )
    if content is None:
        raise RunError(
            "run.not_scalable",
            "{run} is not a run directory. `paceline scale` needs the directory that `train` prints first.",
            run=run,
        )
    holder = Holder.parse(content)
    if holder is None or holder.is_gone:
        raise RunError(
            "run.not_training", "{run} is not being trained. Continue it with --resume and any --plan.", run=run
        )
    return str(holder)


def key(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="New file, which only you can read.", show_default="~/.paceline/key"),
    ] = None,
) -> None:
    """Make a key for runs on several hosts.

    Copy the key to every host, to ~/.paceline/key or to the file that PACELINE_KEY_FILE names. Any process that has
    the key can join the run.
    """
    from paceline.files import private_folder
    from paceline.wire.key import RunKey, default_key_file, write_key

    key = RunKey.make()
    if file is None:
        file = default_key_file()
        private_folder(file.parent)
    write_key(key, file)
    typer.echo(f"{file}: key {key.fingerprint}")
