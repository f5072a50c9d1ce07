"""`paceline train job.yaml`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.command import EXIT_CODES, ClusterFile, Hosts, JobFile, SetKeys, load_job, start_on

if TYPE_CHECKING:
    from paceline.run.record.run import Run


def command(
    job: JobFile,
    plan: Annotated[
        str, typer.Option(help='Plan, e.g. "dp=2 precision=bf16", or auto to find the fastest one.')
    ] = "auto",
    changes: SetKeys = None,
    cluster: ClusterFile = None,
    hosts: Hosts = None,
    spares: Annotated[
        int,
        typer.Option(
            min=0, help="Number of --hosts to leave out, unhealthy ones first; healthy ones replace lost hosts."
        ),
    ] = 0,
    health: Annotated[
        bool, typer.Option("--health", help="Check the devices and links before the first step, which takes seconds.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            "--run-dir",  # with Python < 3.12.8, torchrun mistakes --run for an abbreviation of one of its own options
            metavar="DIR|URL",
            help="Directory or URL of the run, e.g. s3://bucket/run; under torchrun say --run-dir.",
            show_default="runs/JOB-TIME",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue --run, or else the newest run of this job.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="Number of restarts from the newest checkpoint allowed in an hour.")
    ] = 0,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port at which the ranks meet.", show_default="a free one")
    ] = None,
) -> None:
    """Train a job on this machine, on several hosts, or under torchrun."""
    if hosts and spares:
        load_job(job, changes)  # a mistake in the file is reported before the check of the hosts
    start_on(hosts, cluster, spares)
    from paceline.cluster.launch_engines import is_rank
    from paceline.elastic.forkserver import warm_up
    from paceline.rank_environment import own_rank

    if not is_rank():
        warm_up()  # the forkserver imports torch while this process imports the other modules and reads the job
    try:
        # A mistake in the file is reported before the other imports.
        what = load_job(job, changes)
        from paceline.cli.command import to_run_on
        from paceline.run.train import train

        where = to_run_on(cluster)
        record = train(what, plan, cluster=where, run=run, resume=resume, restarts=restarts, port=port, health=health)
    except Exception as error:
        if is_rank():
            from paceline.run.process import fail

            fail(error)
        raise
    from paceline.text import printable

    if own_rank() != 0:  # under torchrun, only rank 0 prints
        return
    typer.echo(printable(summary(record)))
    end = last(record, "end")
    if end["interrupted"]:
        raise typer.Exit(EXIT_CODES.get(end["reason"], 1))


def summary(run: Run) -> str:
    """Return the result, speed, stop reason and directory of a run as text."""
    from paceline.run.record.goodput import goodput
    from paceline.run.record.run import lost_samples
    from paceline.run.record.utilization import utilization
    from paceline.units import percent

    steps, end = run.steps(), last(run, "end")
    synthetic = " (synthetic data)" if last(run, "start", "resume")["synthetic"] else ""
    lines = [f"stopped      {end['reason']}"]
    if run.metrics:
        lines.append("validation   " + ", ".join(f"{name} {value:.4f}" for name, value in run.metrics.items()))
    if run.test_metrics:
        lines.append("test         " + ", ".join(f"{name} {value:.4f}" for name, value in run.test_metrics.items()))
    if steps and steps[-1]["loss"] is not None:
        lines.append(f"training     loss {steps[-1]['loss']:.4f} after {end['step']} steps")
    lines.append(f"time         {end['elapsed_s']:.1f} s from the first step to the stop rule{synthetic}")
    if (speed := run.speed) is not None:
        overall = speed.overall_if_other
        beside = f"; {overall:,.0f} overall" if overall is not None else ""
        lines.append(
            f"throughput   {speed.throughput:,.0f} samples/s = global batch / median step time{beside}, plan "
            f"{run.plan}{synthetic}"
        )
        if speed.tokens_per_s is not None and speed.padding is not None:
            lines.append(
                f"tokens       {speed.tokens_per_s:,.0f} tokens/s that count; {percent(speed.padding)} of the "
                "positions are padding"
            )
    if (mfu := utilization(run.events(), run.speed)) is not None:
        lines.append(f"mfu          {percent(mfu)} of the devices' peak FLOP/s")
    if lost := lost_samples(steps):
        lines.append(f"data         {lost}{' (rank 0)' if run.plan.ranks > 1 else ''}")
    if (of_run := goodput(run)).disturbed:
        lines.append(f"goodput      {of_run.sentence()}")
    lines.append(f"run          {run.url or run.path}")
    if end["interrupted"]:
        lines.append(f"continue     paceline train {run.path}/job.yaml --run {run.url or run.path} --resume")
    return "\n".join(lines)


def last(run: Run, *kinds: str) -> dict[str, Any]:
    """Return the newest event of one of these types.

    A signal may come after the end, so the end may not be the newest event.
    """
    return next(event for event in reversed(run.events()) if event["event"] in kinds)
