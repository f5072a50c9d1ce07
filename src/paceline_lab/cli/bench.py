"""`paceline bench job.yaml`: measure scaling, compare systems, or simulate other machines."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.command import EXIT_CODES, ClusterFile, Command, Hosts, JobFile, start_on

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline_lab.simulated.measured_here import Jitter

_SIMULATED = "Machines that are not here"
_OF_SIMULATED = dict.fromkeys(
    ("failures_per_host_day", "straggler_sigma", "calibrate_on", "seed"), "it goes with --simulate"
)
# By what is measured: the options that have no effect, and why.
_WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "simulate": dict.fromkeys(
        ("systems", "kill_rank", "cluster", "hosts", "devices", "plans", "repeat", "steps"),
        "nothing is run with --simulate, so it has no effect",
    ),
    "systems": _OF_SIMULATED
    | {
        "devices": "--systems compares on all devices, and on one",
        "hosts": "systems are compared on this machine, or on hosts that it emulates (--cluster)",
    },
    "": _OF_SIMULATED | {"kill_rank": "it goes with --systems"},
}


def command(
    context: typer.Context,
    job: JobFile,
    cluster: ClusterFile = None,
    hosts: Hosts = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="How many devices to compare, e.g. 1,2,4. One is always measured: it is what a speedup is against.",
            show_default="1 and all",
        ),
    ] = None,
    plans: Annotated[
        str | None, typer.Option(help='More settings, each a plan, e.g. "dp=2 fused=on; dp=1 threads=2".')
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Measure these systems on the same job instead: all, or e.g. ddp,fsdp,horovod,tf-mirrored.",
            show_default="paceline alone",
        ),
    ] = None,
    kill_rank: Annotated[
        bool, typer.Option("--kill-rank", help="With --systems: run each once more with a rank killed half-way.")
    ] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of every setting; fewer than 3 claim no difference.")] = 5,
    steps: Annotated[
        int | None,
        typer.Option(min=6, help="Steps of every run.", show_default="to the target that the job names, else 60"),
    ] = None,
    weak: Annotated[
        bool | None,
        typer.Option(
            "--weak/--no-weak",
            help="Measure N devices also with N times the global batch. With --systems: compare at that batch instead.",
            show_default="--weak; with --systems --no-weak",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL",
            help="Directory of the benchmark, or its URL; one that was interrupted goes on.",
            show_default="bench/JOB-TIME",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON: figures and environment.")
    ] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help='Predict the curves up to clusters that are not here, e.g. 1024xH100 or "64x8xH100-SXM, 400gbit; '
            '256xTPU-v5p". Nothing is trained.',
            rich_help_panel=_SIMULATED,
        ),
    ] = None,
    failures_per_host_day: Annotated[
        float | None,
        typer.Option(
            "--failures-per-host-day",
            min=0,
            metavar="X",
            help="Failures of a host in a day; 0 for none.",
            show_default="as published of Llama 3",
            rich_help_panel=_SIMULATED,
        ),
    ] = None,
    straggler_sigma: Annotated[
        str | None,
        typer.Option(
            metavar="X|RUN",
            help="Draw the slowest rank of each step: standard deviation of a rank's step time, relative to it, or a "
            "run that has the times.",
            rich_help_panel=_SIMULATED,
        ),
    ] = None,
    calibrate_on: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibrate-on",
            metavar="PATH",
            help="Measured runs of such machines that correct the prediction: a table (CSV), a run directory, a log.",
            rich_help_panel=_SIMULATED,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.", rich_help_panel=_SIMULATED)] = 0,
) -> None:
    """Measure how a job scales on 1 and N devices, and say what limits it.

    Runs are interleaved. With --simulate, predict that for machines that are not here.
    """
    _refuse_what_has_no_effect(context)
    start_on(hosts, cluster)
    from paceline.job.job import Job

    # A mistake in the file is told before all else is imported.
    what = Job.load(job)
    line = shlex.join(["paceline", *sys.argv[1:]])
    if simulate is not None:
        jitter = _jitter(straggler_sigma)
        _simulate(
            what, simulate, line, out, failures_per_host_day, jitter, calibrate_on, seed, weak is not False, as_json
        )
        return
    from paceline.cli.command import to_run_on

    asked = _Asked(what, to_run_on(cluster), _plans(plans), repeat, steps, out, line)
    if systems is not None:
        measured = _compare(asked, systems, weak=bool(weak), kill=kill_rank)
    else:
        measured = _scale(asked, _numbers(devices), weak=weak is not False)
    if measured.stopped_by:
        go_on = line if out else f"{line} --out {shlex.quote(str(measured.path))}"
        typer.echo(f"stopped  {measured.stopped_by}; what is measured is kept. Go on: {go_on}")
    if as_json and measured.figures is not None:
        typer.echo(json.dumps({"figures": measured.figures, "environment": measured.environment}))
    if measured.stopped_by:
        raise typer.Exit(EXIT_CODES.get(measured.stopped_by, 1))
    if measured.failed:
        from paceline.errors import RunError

        raise RunError(measured.failed)


class _Asked(NamedTuple):
    """Options that all kinds of benchmark share. `line`: the command, as it was typed."""

    job: Job
    cluster: Cluster | None
    plans: list[str]
    repeat: int
    steps: int | None
    out: str | None
    line: str


class _Measured(NamedTuple):
    """Outcome of a benchmark, which is shown. `failed`: what could not be measured, in words."""

    path: Path
    stopped_by: str | None
    figures: dict[str, float] | None
    environment: dict[str, Any]
    failed: str


def _scale(asked: _Asked, devices: list[int] | None, *, weak: bool) -> _Measured:
    """Measure a job on 1 and N devices, and show it."""
    from paceline.console import Console
    from paceline_lab.report.bench_view import write_bench_page
    from paceline_lab.scaling.protocol import Benchmark
    from paceline_lab.scaling.summary import kept_at
    from paceline_lab.scaling.table import figures, show

    job, cluster, plans, repeat, steps, out, line = asked
    with kept_at(out, partial(typer.echo, err=True)) as folder:
        benchmark = Benchmark(
            job,
            plans,
            cluster=cluster,
            devices=devices,
            repeat=repeat,
            steps=steps,
            weak=weak,
            out=folder,
            command=line,
        )
        report = benchmark.run()
        page = None if report is None else write_bench_page(report, benchmark.path)
    if report is not None:
        show(report, Console())
        typer.echo(f"report   {page}")
    failed = (
        f"{title} could not be measured: {error.partition(chr(10))[0]}" for title, error in benchmark.failures.items()
    )
    found, known = (None, {}) if report is None else (figures(report), report.environment)
    return _Measured(benchmark.path, benchmark.stopped_by, found, known, "\n".join(failed))


def _compare(asked: _Asked, systems: str, *, weak: bool, kill: bool) -> _Measured:
    """Measure the job under other systems, show what was found, and write the page."""
    from paceline.console import Console
    from paceline_lab.report.systems_view import write_systems_page
    from paceline_lab.scaling.summary import kept_at
    from paceline_lab.systems.compare import Compare
    from paceline_lab.systems.compared import figures, show
    from paceline_lab.systems.system import SYSTEMS

    names = [name.strip() for name in systems.split(",") if name.strip()]
    names = SYSTEMS.names if names == ["all"] else names
    job, cluster, plans, repeat, steps, out, line = asked
    say = partial(typer.echo, err=True)
    with kept_at(out, say) as folder:
        path = folder or _new_folder(f"{job.name}-systems")
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
            command=line,
        )
        found = compare.run()
        page = None if found is None else write_systems_page(found, path)
    if found is None:
        reasons = "\n".join(compare.left_out.values())
        return _Measured(path, compare.stopped_by, None, {}, f"no run of paceline succeeded:\n{reasons}")
    show(found, Console())
    typer.echo(f"report    {page}")
    return _Measured(path, compare.stopped_by, figures(found), found.environment, "")


def _simulate(
    job: Job,
    names: str,
    line: str,
    out: str | None,
    failures: float | None,
    jitter: Jitter | None,
    calibrate_on: Sequence[Path] | None,
    seed: int,
    weak: bool,
    as_json: bool,
) -> None:
    """Simulate the job on every named cluster; show it, and write its page.

    Raises:
        PacelineError: a name is wrong, the job fits nowhere, or nothing can be written.
    """
    from paceline.cluster.cluster import cluster_from
    from paceline.cluster.named import cluster_names
    from paceline.console import Console
    from paceline.run.tuning.calibrate import calibrate_on as factors_of
    from paceline.storage.url import is_url
    from paceline_lab.report.simulated_view import write_simulated_page
    from paceline_lab.simulated.curve import Chances
    from paceline_lab.simulated.measured_here import MeasuredHere, reading_speed
    from paceline_lab.simulated.simulation import show, simulate

    if is_url(out):
        raise typer.BadParameter("a simulation is written to a directory, not to a URL", param_hint="--out")
    clusters = [(name, cluster_from(name)) for name in cluster_names(names)]
    chances = Chances.published(failures, jitter, seed)
    folder = _new_folder(job.name) if out is None else Path(out)
    here, simulations = MeasuredHere.load(folder, job), []
    with Console(stderr=True).status("searching the best plan for every number of devices"):
        reading = reading_speed(job)
        for name, cluster in clusters:
            factors = (
                factors_of(calibrate_on, cluster=cluster, say=partial(typer.echo, err=True)) if calibrate_on else None
            )
            simulations.append(
                simulate(job, cluster, name, chances, weak=weak, calibration=factors, here=here, reading=reading)
            )
    for simulation in simulations:
        show(simulation, Console())
    typer.echo(f"\npage     {write_simulated_page(simulations, line, folder)}")
    if as_json:
        typer.echo(json.dumps({"simulations": [simulation.to_json() for simulation in simulations]}))


def _new_folder(name: str) -> Path:
    from paceline_lab.scaling.protocol import BENCHES

    return BENCHES / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _refuse_what_has_no_effect(context: typer.Context) -> None:
    """Refuse options that belong to another way of measuring."""
    given = [
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    mode = "simulate" if "simulate" in given else "systems" if "systems" in given else ""
    for name in given:
        if why := _WITHOUT_EFFECT[mode].get(name):
            raise typer.BadParameter(f"{why}; leave it out", param_hint=f"--{name.replace('_', '-')}")


def _plans(text: str | None) -> list[str]:
    return [plan.strip() for plan in (text or "").split(";") if plan.strip()]


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,2", param_hint="--devices")
    return [int(word) for word in words]


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


COMMAND = Command(command, "Measure", "paceline bench examples/digits.yaml --devices 1,2 --repeat 3", starts_ranks=True)
