"""`paceline bench job.yaml --simulate NAMES`: options, and what they do."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline_lab.simulated.curve import Chances
    from paceline_lab.simulated.measured_here import Jitter
    from paceline_lab.simulated.simulation import Simulation

_SIMULATED = "Machines that are not here"

Simulate = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help='Predict the curves up to clusters that are not here, e.g. 1024xH100 or "64x8xH100-SXM, 400gbit; '
        '256xTPU-v5p". Nothing is trained.',
        rich_help_panel=_SIMULATED,
    ),
]
Failures = Annotated[
    float | None,
    typer.Option(
        "--failures-per-host-day",
        min=0,
        metavar="X",
        help="Failures of a host in a day; 0 for none.",
        show_default="as published of Llama 3",
        rich_help_panel=_SIMULATED,
    ),
]
StragglerSigma = Annotated[
    str | None,
    typer.Option(
        metavar="X|RUN",
        help="Draw the slowest rank of each step: standard deviation of a rank's step time, relative to it, or a run "
        "that has the times.",
        rich_help_panel=_SIMULATED,
    ),
]
CalibrateOn = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibrate-on",
        metavar="PATH",
        help="Measured runs of such machines that correct the prediction: a table (CSV), a run directory, a log.",
        rich_help_panel=_SIMULATED,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.", rich_help_panel=_SIMULATED)]
_OF_MEASURED = ("systems", "kill_rank", "cluster", "hosts", "devices", "plans", "repeat", "steps")
_OF_SIMULATED = ("failures_per_host_day", "straggler_sigma", "calibrate_on", "seed")


def refuse_what_has_no_effect(context: typer.Context, *, simulated: bool) -> None:
    """Refuse options of measuring where a cluster is simulated, and the other way round."""
    for name in _OF_MEASURED if simulated else _OF_SIMULATED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            why = "nothing is run with --simulate, so it has no effect" if simulated else "it goes with --simulate"
            raise typer.BadParameter(f"{why}; leave it out", param_hint=f"--{name.replace('_', '-')}")


def simulate(
    job: Job,
    names: str,
    *,
    weak: bool,
    out: str | None,
    failures: float | None,
    straggler_sigma: str | None,
    calibrate_on: Sequence[Path] | None,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate the job on every named cluster; show it, and write its page.

    Raises:
        PacelineError: a name is wrong, the job fits nowhere, or nothing can be written.
    """
    from paceline.cluster.cluster import named_cluster
    from paceline.cluster.named import cluster_names
    from paceline.console import Console
    from paceline.storage.url import is_url
    from paceline_lab.report.simulated_view import write_simulated_page
    from paceline_lab.scaling.protocol import BENCHES
    from paceline_lab.simulated.curve import Chances
    from paceline_lab.simulated.simulation import show

    if is_url(out):
        raise typer.BadParameter("a simulation is written to a directory, not to a URL", param_hint="--out")
    clusters = [(name, named_cluster(name)) for name in cluster_names(names)]
    chances = Chances.published(failures, _jitter(straggler_sigma), seed)
    line = shlex.join(["paceline", *sys.argv[1:]])
    folder = BENCHES / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}" if out is None else Path(out)
    simulations = _simulations(job, clusters, chances, folder, calibrate_on, weak=weak)
    for simulation in simulations:
        show(simulation, Console())
    page = write_simulated_page(simulations, line, folder)
    typer.echo(f"\npage     {page}")
    if as_json:
        typer.echo(json.dumps({"simulations": [simulation.to_json() for simulation in simulations]}))


def _simulations(
    job: Job,
    clusters: Sequence[tuple[str, Cluster]],
    chances: Chances,
    folder: Path,
    calibrate_on: Sequence[Path] | None,
    *,
    weak: bool,
) -> list[Simulation]:
    from paceline.console import Console
    from paceline.run.tuning.calibrate import calibrate_on as factors_of
    from paceline_lab.simulated.measured_here import MeasuredHere, reading_speed
    from paceline_lab.simulated.simulation import simulate as simulated

    here = MeasuredHere.load(folder, job)
    found = []
    with Console(stderr=True).status("searching the best plan for every number of devices"):
        reading = reading_speed(job)
        for name, cluster in clusters:
            factors = factors_of(calibrate_on, cluster, partial(typer.echo, err=True)) if calibrate_on else None
            found.append(
                simulated(job, cluster, name, chances, weak=weak, calibration=factors, here=here, reading=reading)
            )
    return found


def _jitter(text: str | None) -> Jitter | None:
    """Distribution of step times: normal with a given deviation, or that of a run's steps."""
    from paceline_lab.simulated.measured_here import Jitter, measured_jitter

    if text is None:
        return None
    try:
        sigma = float(text)
    except ValueError:
        return measured_jitter([Path(text)])
    if not 0 <= sigma < 1:
        raise typer.BadParameter("a number of at least 0 and below 1, such as 0.02", param_hint="--straggler-sigma")
    return Jitter(sigma, words=f"normal with a standard deviation of {sigma:g}, as given")
