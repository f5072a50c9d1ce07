"""`paceline federate simulate` and `paceline federate deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import EXIT_CODES, Command, JobFile

if TYPE_CHECKING:
    from paceline.job.job import Job
    from paceline.run.record.run import Run

_SIMULATE = "paceline federate simulate examples/federated.yaml --clients 1000"
_DEPLOY = "paceline federate deploy examples/federated.yaml app --superlink 192.168.1.20:8000"


def simulate(
    job: JobFile,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of simulated clients, instead of the job's federate.clients.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="DIR", help="Directory of the run.", show_default="runs/JOB-TIME")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue --run, or else the newest run of this job.")
    ] = False,
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="Train clients one by one instead of side by side.")
    ] = False,
) -> None:
    """Train with simulated clients; one process can simulate thousands of clients."""
    from paceline.cli.train import last
    from paceline.job.job import Job
    from paceline.text import printable
    from paceline_federated.record import directory_of
    from paceline_federated.simulation import simulate as simulated

    what = with_clients(Job.load(job), clients)
    path = directory_of(what, run, resume=resume)
    record = simulated(
        what, path, resume=resume, say=lambda line: typer.echo(printable(line), err=True), batched=not in_turn
    )
    typer.echo(printable(summary(record)))
    end = last(record, "end")
    if end["interrupted"]:
        raise typer.Exit(EXIT_CODES.get(end["reason"], 1))


def deploy(
    job: JobFile,
    folder: Annotated[Path, typer.Argument(metavar="APP", help="New folder for the Flower app.")],
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            metavar="NAME|ADDRESS:PORT",
            help="SuperLink to run the app on: a connection of Flower's configuration, or an address.",
            show_default="only write the app",
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(
            "--root-certificates",
            metavar="FILE",
            help="Certificate of the authority that signed the one of ADDRESS:PORT.",
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Connect to ADDRESS:PORT without TLS.")] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="DIR", help="Directory of the run, on the SuperLink's host.", show_default="runs/JOB-TIME"
        ),
    ] = None,
) -> None:
    """Write a Flower app that trains the job, and run it on a SuperLink."""
    from paceline.job.job import Job
    from paceline.run.record.run import Run
    from paceline.text import printable
    from paceline_federated.flower.app import SuperLink, run_app, write_app

    what = Job.load(job)
    for named in write_app(what, folder, run):
        typer.echo(printable(f"paceline: every host needs {named}, which the job names"), err=True)
    typer.echo(printable(f"written      {folder}; paceline has to be installed beside Flower on every host"))
    if superlink is None:
        typer.echo(printable(f"run it       flwr run {folder} --stream"))
        return
    run_app(folder, SuperLink(superlink, root_certificates, insecure))
    if run is not None and run.is_dir():
        typer.echo(printable(summary(Run(run))))


def with_clients(job: Job, clients: int | None) -> Job:
    """Change the job's number of clients, and validate the job again."""
    from paceline.job.job import Job
    from paceline_federated.client import federated

    if clients is None:
        return job
    federated(job)
    values = job.model_dump(mode="json", exclude_defaults=True)
    values["federate"] = {**values.get("federate", {}), "clients": clients}
    return Job.model_validate(values)


def summary(run: Run) -> str:
    """Return the result, cost, stop reason and directory of a federated run as text."""
    from paceline import units
    from paceline.cli.train import last
    from paceline_federated.section import federate_spec

    rounds, end = run.steps(), last(run, "end")
    begun = last(run, "start", "resume")
    lines = [f"stopped      {end['reason']}"]
    if run.metrics:
        lines.append("validation   " + ", ".join(f"{name} {value:.4f}" for name, value in run.metrics.items()))
    if rounds:
        took_s = sum(line["step_s"] for line in rounds)
        lines.append(
            f"rounds       {len(rounds)} in {units.seconds(end['elapsed_s'])}, "
            f"{len(rounds) / took_s if took_s else 0.0:.3g} a second; {begun['clients']} clients, "
            f"rule {begun['federated']}"
        )
        chosen, lost = (sum(line[key] for line in rounds) for key in ("chosen", "dropped"))
        late, refused, clipped = (sum(line[key] for line in rounds) for key in ("late", "refused", "clipped"))
        lines.append(
            f"clients      {chosen} times chosen, {lost} dropped out, {late} late, {refused} refused, {clipped} clipped"
        )
        down, up = (sum(line[key] for line in rounds) for key in ("down_bytes", "up_bytes"))
        lines.append(f"sent         {units.size(down)} to clients, {units.size(up)} by them")
        if "epsilon" in rounds[-1]:
            privacy = federate_spec(run.job).privacy
            assert privacy is not None, "epsilon is told with privacy only"
            lines.append(f"privacy      ε = {rounds[-1]['epsilon']:.3g} at δ = {privacy.delta:g}")
    lines.append(f"run          {run.path}")
    if end["interrupted"]:
        lines.append(f"continue     paceline federate simulate {run.path}/job.yaml --run {run.path} --resume")
    return "\n".join(lines)


COMMAND = Command(
    "Train a job with clients that keep their data to themselves.",
    "Applications",
    _SIMULATE,
    commands={"simulate": Command(simulate, example=_SIMULATE), "deploy": Command(deploy, example=_DEPLOY)},
)
