"""`paceline federate serve`, `join` and `edge`: federated training with real clients; `flower`: by Flower's."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import Command
from paceline.cli.train import last
from paceline.cli.where import EXIT_CODES, JobFile
from paceline_federated.cli import federate
from paceline_federated.cli.federate import summary

if TYPE_CHECKING:
    from paceline.job.job import Job
    from paceline.wire.key import RunKey
    from paceline_federated.real.join import Joining

app = federate.app
_PORT = 29530
_SERVE = "Example: paceline federate serve examples/federated.yaml --listen 0.0.0.0:29530"
_JOIN = "Example: paceline federate join server.example.org:29530 --data my_images"
_FLOWER = "Example: paceline federate flower examples/federated.yaml app"
_EDGE = "Example: paceline federate edge server.example.org:29530 --listen 0.0.0.0:29530 --clients 20"
Listen = Annotated[str, typer.Option("--listen", metavar="ADDRESS:PORT", help="Where clients connect to.")]
Address = Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="Where the server listens.")]
Name = Annotated[
    str | None, typer.Option("--name", help="Name of this client, as the server shows it.", show_default="the host's")
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="Where this client's identity is kept.", show_default="~/.paceline/clients/NAME"
    ),
]
OwnJob = Annotated[
    Path | None, typer.Option("--job", metavar="FILE", help="This client's own copy of the job, whose code it trusts.")
]
Number = Annotated[int | None, typer.Option("--number", min=0, help="Place to take.", show_default="a free one")]
Patience = Annotated[float, typer.Option("--patience", min=1, help="Seconds to try to reach a lost server again.")]


@app.command("serve", epilog=_SERVE)
def serve(
    job: JobFile,
    listen: Listen = f"127.0.0.1:{_PORT}",
    run: Annotated[
        str | None, typer.Option("--run", metavar="DIR", help="Directory of the run.", show_default="runs/JOB-TIME")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --run, or else with the newest run of this job.")
    ] = False,
    patience: Annotated[float, typer.Option("--patience", min=1, help="Seconds to wait for missing clients.")] = 600.0,
) -> None:
    """Train with clients that connect to this server, each with data of its own."""
    from paceline.job.job import Job
    from paceline.printable import printable
    from paceline_federated.real.serve import serve as served
    from paceline_federated.record import directory_of

    what = Job.load(job)
    key, where = _key(), _address(listen)
    path = directory_of(what, run, resume=resume)
    record = served(what, path, where, key, resume=resume, patience_s=patience, say=_say)
    typer.echo(printable(summary(record, "serve")))
    end = last(record, "end")
    if end["interrupted"]:
        raise typer.Exit(EXIT_CODES.get(end["reason"], 1))


@app.command("join", epilog=_JOIN)
def join(
    server: Address,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="PATH", help="This client's samples, instead of the job's data.path."),
    ] = None,
    name: Name = None,
    state: State = None,
    job: OwnJob = None,
    number: Number = None,
    patience: Patience = 300.0,
) -> None:
    """Take part in federated training with data that stays here."""
    from paceline_federated.real.join import join as joined
    from paceline_federated.real.kept import ClientFolder

    joining = _joining(server, name, number, patience)
    own = _own_job(job)
    with ClientFolder(_folder(state, joining.name)) as folder:
        reason = joined(joining, folder, data, own, _say)
    typer.echo(f"ended        {reason}")


@app.command("edge", epilog=_EDGE)
def edge(
    server: Address,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Clients of this edge.")],
    listen: Listen = f"127.0.0.1:{_PORT + 1}",
    name: Name = None,
    state: State = None,
    job: OwnJob = None,
    number: Number = None,
    patience: Patience = 300.0,
) -> None:
    """Gather the updates of some clients, and be one client of the server above."""
    from paceline_federated.real.edge import edge as gathered
    from paceline_federated.real.kept import ClientFolder

    joining = _joining(server, name, number, patience)
    own = _own_job(job)
    with ClientFolder(_folder(state, joining.name)) as folder:
        reason = gathered(joining, folder, _address(listen), clients, own, _say)
    typer.echo(f"ended        {reason}")


@app.command("flower", epilog=_FLOWER)
def flower(job: JobFile, folder: Annotated[Path, typer.Argument(help="Of the app; it is made.")]) -> None:
    """Write the job as a Flower app, for `flwr run`."""
    from paceline.job.job import Job
    from paceline.printable import printable
    from paceline_federated.flower.export import write_app
    from paceline_federated.section import federate_spec

    what = Job.load(job)
    for named in write_app(what, folder):
        _say(f"every host needs {named}, which the job names")
    typer.echo(printable(f"written      {folder}; paceline has to be installed beside Flower"))
    nodes = f"num-supernodes={federate_spec(what).clients}"
    typer.echo(printable(f"simulate it  flwr run {folder} local --federation-config {nodes} --stream"))


def _joining(server: str, name: str | None, number: int | None, patience_s: float) -> Joining:
    from paceline_federated.real.join import Joining

    return Joining(_address(server), _key(), name or socket.gethostname(), number, patience_s)


def _own_job(file: Path | None) -> Job | None:
    from paceline.job.job import Job

    return None if file is None else Job.load(file)


def _folder(state: Path | None, name: str) -> Path:
    from paceline.files import home_folder, private_folder

    if state is not None:
        return state
    folder = home_folder() / "clients"
    private_folder(folder)
    return folder / name.replace("/", "_")


def _address(text: str) -> tuple[str, int]:
    from paceline.errors import LaunchError

    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 2**16:
        raise LaunchError(f"{text!r} is no address and port, as in 192.168.1.20:{_PORT}")
    return host.strip("[]"), int(port)


def _key() -> RunKey:
    from paceline.wire.key import default_key_file, own_key, read_key

    return own_key() or read_key(default_key_file())


def _say(line: str) -> None:
    from paceline.printable import printable

    typer.echo(f"paceline: {printable(line)}", err=True)


COMMAND = Command(app, "Federate")
