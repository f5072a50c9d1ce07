"""Options that the commands of `paceline plan` share, and their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.command import in_a_folder, load_job, not_at_a_url
from paceline.errors import ClusterError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.planning.calibrate import Calibration
    from paceline.planning.explain.training_run import Conditions, Goal
    from paceline.planning.explain.which_cluster import Offers
    from paceline.planning.machines import Adjustment, Basis

_AMOUNT, _FAILURES, _POWER = "How much to train", "Failures and preemptions", "Energy"

JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML): what to train.", callback=not_at_a_url)]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME",
        help='Cluster to plan for: a YAML file, or a name such as "64x8xH100-SXM, 400gbit, 2.5/h".',
        show_default="this machine",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure",
        help="Measure this machine, which takes some seconds, or use the figures of the catalogue.",
    ),
]
CalibrateOn = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibrate-on",
        metavar="PATH",
        help="Measured runs that correct the prediction: a table (CSV), a run directory, a log of Megatron-LM or "
        "torchtitan; may be repeated.",
    ),
]
PageFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.html", help="Write a page with pictures.", callback=in_a_folder),
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON that has every figure.")]


def _number(*names: str, metavar: str = "X", least: float | None = 0, panel: str | None = None, about: str) -> Any:
    return typer.Option(*names, min=least, metavar=metavar, help=about, rich_help_panel=panel)


Price = Annotated[float | None, _number(about="Price of a device for an hour, in any currency.")]
Tokens = Annotated[
    str | None, _number(metavar="N", least=None, panel=_AMOUNT, about="Number of tokens to train on, e.g. 15T.")
]
Samples = Annotated[
    str | None, _number(metavar="N", least=None, panel=_AMOUNT, about="Number of samples to train on, e.g. 300M.")
]
LossToReach = Annotated[
    float | None,
    _number("--loss", least=None, panel=_AMOUNT, about="Loss to reach, in nats per token, by published scaling laws."),
]
FailureRate = Annotated[
    float | None,
    _number("--failures-per-host-day", panel=_FAILURES, about="Failures of a host in a day, e.g. 0.004."),
]
Preemptions = Annotated[
    float | None,
    _number("--preemptions-per-host-day", panel=_FAILURES, about="Preemptions of a spot host in a day."),
]
SpotPrice = Annotated[float | None, _number(panel=_FAILURES, about="Price of a device for an hour on a spot host.")]
StragglerSigma = Annotated[
    str | None,
    _number(
        metavar="X|RUN",
        least=None,
        panel=_FAILURES,
        about="Standard deviation of a rank's step time relative to its mean, or a run to measure it from.",
    ),
]
Pue = Annotated[
    float | None,
    _number(least=1, panel=_POWER, about="Power of the data centre divided by the power of its machines."),
]
Carbon = Annotated[float | None, _number(metavar="G/KWH", panel=_POWER, about="Grams of CO₂ for a kWh of electricity.")]


class Setting(NamedTuple):
    """Job and machines to plan for."""

    job: Job
    cluster: Cluster
    calibration: Basis | None


def setting(
    job: Path,
    changes: list[str] | None,
    cluster: str | None,
    calibrate_on: Sequence[Path] | None,
    *,
    measure: bool,
    price: float | None = None,
    failures: float | None = None,
) -> tuple[Setting, Console]:
    """Load the job and the cluster; measure this machine or read measured runs.

    The console for the output is returned as well.
    """
    what = load_job(str(job), changes)  # before heavy imports, so that a mistake is reported at once
    from paceline.cli.plan_screen import fitted
    from paceline.console import Console

    console = fitted(Console())
    where, here = cluster_of(cluster, price, failures)
    calibration: Basis | None = factors_of(calibrate_on, where, console)
    if here and measure and calibration is None:
        calibration = measure_machine(what, where, console)
    return Setting(what, where, calibration), console


def cluster_of(text: str | None, price: float | None, failures: float | None = None) -> tuple[Cluster, bool]:
    """Return the cluster, and True if it is this machine or emulated on it."""
    from paceline.planning import arguments

    where = arguments.cluster_of(text)
    given = {"price_per_hour": price, "failures_per_host_day": failures}
    where = where.model_copy(update={key: value for key, value in given.items() if value is not None})
    return where, text is None or where.emulate is not None


def factors_of(paths: Sequence[Path] | None, cluster: Cluster | None, console: Console) -> Adjustment | None:
    """Return correction factors from measured runs, and print the files read; None without runs."""
    from rich.text import Text

    from paceline.console import Console
    from paceline.run.tuning.calibrate import calibrate_on

    if not paths:
        return None
    with Console(stderr=True).status("predicting the measured runs"):
        lines: list[str] = []
        found = calibrate_on(paths, cluster=cluster, say=lines.append)
    for line in lines:
        console.print(Text(line, style="dim"))
    return found


def measure_machine(job: Job, cluster: Cluster, console: Console) -> Calibration | None:
    """Return measurements of the machine; None, with a printed reason, if that fails."""
    from rich.text import Text

    from paceline.console import Console
    from paceline.errors import PacelineError
    from paceline.run.tuning.calibrate import calibrate

    def say(line: str) -> None:
        console.print(Text(line, style="dim"))

    try:
        with Console(stderr=True).status("measuring this machine"):
            return calibrate(job, cluster, say)
    except PacelineError as error:
        say(f"not measured: {str(error).splitlines()[0]}; the catalogue stands in, which may be several times off")
        return None


def goal_of(tokens: str | None, samples: str | None, loss: float | None) -> Goal:
    """Return the amount of training that the options specify."""
    from paceline.planning.explain.training_run import Goal, read_amount

    return Goal(
        None if tokens is None else read_amount(tokens), None if samples is None else read_amount(samples), loss
    )


def conditions_of(
    spot_price: float | None,
    preemptions: float | None,
    straggler_sigma: str | None,
    pue: float | None,
    carbon: float | None,
) -> Conditions:
    """Return the conditions of a training run that the options specify."""
    from paceline.planning.explain.training_run import Conditions

    return Conditions(spot_price, preemptions, _sigma(straggler_sigma), pue, carbon)


def _sigma(text: str | None) -> float:
    """Return the given number, or the value measured in the given run directory."""
    if text is None:
        return 0.0
    try:
        sigma = float(text)
    except ValueError:
        from paceline.run.record.run import Run
        from paceline.run.record.slow_ranks import step_time_sigma

        return step_time_sigma(Run(text))
    if not 0 <= sigma < math.inf:
        raise typer.BadParameter("a number of at least 0, such as 0.02", param_hint="--straggler-sigma")
    return sigma


def offers_of(catalogue: Path | None, cluster: Cluster | None) -> Offers:
    """Return the offers in a file, the example offers, or a named cluster's hosts."""
    from paceline.planning.explain.which_cluster import EXAMPLES, Offer, Offers, read_offers

    if catalogue is not None:
        return read_offers(catalogue)
    if cluster is None:
        return read_offers(EXAMPLES)
    if cluster.catalogue is None or cluster.price_per_hour is None:
        raise ClusterError(
            "cluster.no_price",
            "{cluster} has no price, or is not from the catalogue of hardware: name it as in --cluster "
            '"16x8xH100-SXM, 2.5/h", or list offers with --catalogue FILE',
            cluster=cluster.name,
        )
    from paceline.cluster.named import read_name

    named = read_name(cluster.catalogue)
    host = f"{named.per_host}x{named.device.name}, {named.rate_gbps:g}gbit/host"
    offer = Offer(cluster=host, price=cluster.price_per_hour, hosts=named.hosts, name=named.device.name)
    return Offers(offers=(offer,))
