"""`paceline bench`: measure scaling or loading, compare systems, or simulate other machines."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.command import EXIT_CODES, ClusterFile, Command, Hosts, JobFile, SetKeys, load_job, start_on
from paceline.cli.plan_options import AsJson as EveryFigure
from paceline.cli.plan_options import CalibrateOn, StragglerSigma

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline_lab.simulated.measured_here import Jitter

Plans = Annotated[
    str | None,
    typer.Option(help='More settings to measure, each a plan, e.g. "dp=2 fused=on; dp=1 threads=2".'),
]
Repeat = Annotated[int, typer.Option(min=1, help="Number of runs of each setting; fewer than 3 show no difference.")]
Steps = Annotated[
    int | None,
    typer.Option(min=6, help="Number of steps of each run.", show_default="to the target that the job names, else 60"),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR|URL",
        help="Directory or URL of the benchmark; an interrupted benchmark goes on there.",
        show_default="bench/JOB-TIME",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON: figures and environment.")]


def scaling(
    job: JobFile,
    changes: SetKeys = None,
    cluster: ClusterFile = None,
    hosts: Hosts = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Numbers of devices to measure, e.g. 1,2,4; 1 is always measured, as the base of speedups.",
            show_default="1 and all",
        ),
    ] = None,
    plans: Plans = None,
    weak: Annotated[
        bool, typer.Option("--weak/--no-weak", help="Also measure N devices with N times the global batch.")
    ] = True,
    repeat: Repeat = 5,
    steps: Steps = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure how a job scales on 1 and N devices, and what limits it.

    Runs are interleaved, and every figure has an interval.
    """
    start_on(hosts, cluster)
    asked = _asked(job, changes, cluster, plans, repeat, steps, out)
    _end(_scale(asked, _numbers(devices), weak=weak), asked, as_json=as_json)


def compare(
    job: JobFile,
    changes: SetKeys = None,
    cluster: ClusterFile = None,
    systems: Annotated[
        str, typer.Option(metavar="LIST", help="Systems to compare with, e.g. ddp,fsdp,horovod,tf-mirrored; or all.")
    ] = "ddp,fsdp",
    plans: Plans = None,
    kill_rank: Annotated[
        bool, typer.Option("--kill-rank", help="Run each system once more, and kill a rank half-way.")
    ] = False,
    weak: Annotated[bool, typer.Option("--weak/--no-weak", help="Use N times the global batch on N devices.")] = False,
    repeat: Repeat = 5,
    steps: Steps = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure the same job under paceline and other systems.

    Losses are compared before times. The systems run on this machine, or on hosts that it emulates (--cluster), in
    interleaved runs.
    """
    start_on(None, cluster)
    asked = _asked(job, changes, cluster, plans, repeat, steps, out)
    _end(_compare(asked, systems, weak=weak, kill=kill_rank), asked, as_json=as_json)


def data(
    job: JobFile,
    changes: SetKeys = None,
    num_workers: Annotated[
        str | None,
        typer.Option(
            "--num-workers",
            metavar="LIST",
            help="Numbers of loader processes to measure, e.g. 0,2,4. The job's own number is always measured.",
            show_default="0, 1, 2, 4, … up to the cores",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=3600, help="Duration of measuring each setting, in seconds.")
    ] = 5.0,
    step_ms: Annotated[
        float | None,
        typer.Option("--step-ms", min=0.01, help="Also measure how long a model with this step time waits for data."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a job's loader without the model, and find what limits it.

    One rank reads whole global batches, with several numbers of loader processes. The limits are the speed of the disk
    and of decoding on all cores.
    """
    what = load_job(job, changes)  # before heavy imports, so that a mistake is reported at once
    workers = _numbers(num_workers, "--num-workers")
    from paceline.cluster.discover import environment
    from paceline.console import Console
    from paceline_lab.loading.result import measured, show

    with Console(stderr=True).status("") as status:
        report = measured(
            what, workers, seconds=seconds, step_s=None if step_ms is None else step_ms / 1e3, say=status.update
        )
    show(report, Console(highlight=False))
    if as_json:
        about = environment() | {"loading": report.to_json()}
        typer.echo(json.dumps({"figures": report.figures(), "environment": about}))


def simulate(
    job: JobFile,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help='Clusters to simulate, e.g. 1024xH100 or "64x8xH100-SXM, 400gbit; 256xTPU-v5p".',
        ),
    ],
    changes: SetKeys = None,
    failures_per_host_day: Annotated[
        float | None,
        typer.Option(
            "--failures-per-host-day",
            min=0,
            metavar="X",
            help="Failures of a host in a day; 0 for none.",
            show_default="as published for Llama 3",
            rich_help_panel="Failures and preemptions",
        ),
    ] = None,
    straggler_sigma: StragglerSigma = None,
    calibrate_on: CalibrateOn = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random draws.")] = 0,
    weak: Annotated[bool, typer.Option("--weak/--no-weak", help="Also predict weak scaling.")] = True,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory of the page.", show_default="bench/JOB-TIME")
    ] = None,
    as_json: EveryFigure = False,
) -> None:
    """Predict how a job scales on other machines, without training."""
    what = load_job(job, changes)  # before heavy imports, so that a mistake is reported at once
    line, jitter = shlex.join(["paceline", *sys.argv[1:]]), _jitter(straggler_sigma)
    _simulate(what, cluster, line, out, failures_per_host_day, jitter, calibrate_on, seed, weak, as_json)


def _asked(
    job: str,
    changes: list[str] | None,
    cluster: str | None,
    plans: str | None,
    repeat: int,
    steps: int | None,
    out: str | None,
) -> _Asked:
    what = load_job(job, changes)  # before heavy imports, so that a mistake is reported at once
    from paceline.cli.command import to_run_on

    line = shlex.join(["paceline", *sys.argv[1:]])
    return _Asked(what, to_run_on(cluster), _plans(plans), repeat, steps, out, line)


def _end(measured: _Measured, asked: _Asked, *, as_json: bool) -> None:
    """Print the figures. Exit with an error code if the benchmark failed or was stopped."""
    if measured.stopped_by:
        go_on = asked.line if asked.out else f"{asked.line} --out {shlex.quote(str(measured.path))}"
        typer.echo(f"stopped  {measured.stopped_by}; the finished runs are kept. To continue: {go_on}")
    if as_json and measured.figures is not None:
        typer.echo(json.dumps({"figures": measured.figures, "environment": measured.environment}))
    if measured.stopped_by:
        raise typer.Exit(EXIT_CODES.get(measured.stopped_by, 1))
    if measured.failed:
        from paceline.errors import RunError

        raise RunError("bench.failed", "{reason}", reason=measured.failed)


class _Asked(NamedTuple):
    """Options that `bench scaling` and `bench compare` share.

    Attributes:
        line: command line as the user typed it.
    """

    job: Job
    cluster: Cluster | None
    plans: list[str]
    repeat: int
    steps: int | None
    out: str | None
    line: str


class _Measured(NamedTuple):
    """Outcome of a benchmark.

    Attributes:
        failed: text on the settings or systems that could not be measured; "" if there are none.
    """

    path: Path
    stopped_by: str | None
    figures: dict[str, float] | None
    environment: dict[str, Any]
    failed: str


def _scale(asked: _Asked, devices: list[int] | None, *, weak: bool) -> _Measured:
    """Measure a job on 1 and on N devices, and print the result."""
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
    """Measure the job under several systems, print the result, and write the report page."""
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
    """Simulate the job on each named cluster, print the results, and write the page.

    Raises:
        PacelineError: a cluster name is unknown, no plan fits the job, or the page cannot be written.
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


def _plans(text: str | None) -> list[str]:
    return [plan.strip() for plan in (text or "").split(";") if plan.strip()]


def _numbers(text: str | None, option: str = "--devices") -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,2", param_hint=option)
    return [int(word) for word in words]


def _jitter(text: str | None) -> Jitter | None:
    """Parse a standard deviation or a run directory into a distribution of step times."""
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


_SCALING = "paceline bench scaling examples/digits.yaml --devices 1,2 --repeat 3"
COMMAND = Command(
    "Measure how a job scales or loads its data, compare it with other systems, or simulate other machines.",
    "Measure",
    _SCALING,
    commands={
        "scaling": Command(scaling, example=_SCALING, starts_ranks=True),
        "compare": Command(
            compare, example="paceline bench compare examples/digits.yaml --systems ddp,fsdp", starts_ranks=True
        ),
        "data": Command(data, example="paceline bench data examples/digits.yaml --num-workers 0,2 --step-ms 20"),
        "simulate": Command(
            simulate, example="paceline bench simulate examples/plan/llama_8b.yaml --cluster 1024xH100"
        ),
    },
)
