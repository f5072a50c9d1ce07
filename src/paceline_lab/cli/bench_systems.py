"""`paceline bench job.yaml --systems …`"""

from __future__ import annotations

import json
import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.command import EXIT_CODES

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job

BENCHES = Path("bench")
_WITHOUT_EFFECT = {
    "devices": "--systems compares on all devices, and on one",
    "hosts": "systems are compared on this machine, or on hosts that it emulates (--cluster)",
}


def refuse_what_has_no_effect(context: typer.Context) -> None:
    """Refuse options of the plain benchmark beside `--systems`."""
    for name, why in _WITHOUT_EFFECT.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"{why}; leave it out", param_hint=f"--{name}")


def compare_systems(
    job: Job,
    cluster: Cluster | None,
    systems: str,
    *,
    plans: list[str],
    repeat: int,
    steps: int | None,
    weak: bool,
    kill: bool,
    out: str | None,
    as_json: bool,
    command: str,
) -> None:
    """Measure the job under other systems, show what was found, and write the page."""
    from paceline.console import Console
    from paceline.errors import RunError
    from paceline_lab.report.systems_view import write_systems_page
    from paceline_lab.scaling.summary import kept_at
    from paceline_lab.systems.compare import Compare
    from paceline_lab.systems.compared import figures, show
    from paceline_lab.systems.system import SYSTEMS

    names = [name.strip() for name in systems.split(",") if name.strip()]
    names = SYSTEMS.names if names == ["all"] else names
    say = partial(typer.echo, err=True)
    with kept_at(out, say) as folder:
        path = folder or BENCHES / f"{job.name}-systems-{time.strftime('%Y%m%d-%H%M%S')}"
        compare = Compare(
            job,
            cluster,
            names,
            plans=plans,
            repeat=repeat,
            steps=steps,
            weak=weak,
            kill=kill,
            out=path,
            say=say,
            command=command,
        )
        found = compare.run()
        page = None if found is None else write_systems_page(found, path)
    if found is not None:
        show(found, Console())
        typer.echo(f"report    {page}")
    if compare.stopped_by:
        go_on = command if out else f"{command} --out {shlex.quote(str(path))}"
        typer.echo(f"stopped   {compare.stopped_by}; what is measured is kept. Go on: {go_on}")
    if found is not None and as_json:
        typer.echo(json.dumps({"figures": figures(found), "environment": found.environment}))
    if compare.stopped_by:
        raise typer.Exit(EXIT_CODES.get(compare.stopped_by, 1))
    if found is None:
        raise RunError("no run of paceline succeeded:\n" + "\n".join(compare.left_out.values()))
