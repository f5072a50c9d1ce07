"""`paceline bench job.yaml`"""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import EXIT_CODES, ClusterFile, Command, Hosts, JobFile, start_on
from paceline_lab.cli import bench_simulated as of_simulated
from paceline_lab.cli.bench_systems import refuse_what_has_no_effect

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job


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
    simulate: of_simulated.Simulate = None,
    failures_per_host_day: of_simulated.Failures = None,
    straggler_sigma: of_simulated.StragglerSigma = None,
    calibrate_on: of_simulated.CalibrateOn = None,
    seed: of_simulated.Seed = 0,
) -> None:
    """Measure how a job scales on 1 and N devices, and say what limits it.

    Runs are interleaved. With --simulate, predict that for machines that are not here.
    """
    of_simulated.refuse_what_has_no_effect(context, simulated=simulate is not None)
    if systems is not None:
        refuse_what_has_no_effect(context)
    elif kill_rank:
        raise typer.BadParameter("it goes with --systems; leave it out", param_hint="--kill-rank")
    start_on(hosts, cluster)
    from paceline.job.job import Job

    # A mistake in the file is told before all else is imported.
    what = Job.load(job)
    if simulate is not None:
        of_simulated.simulate(
            what,
            simulate,
            weak=weak is not False,
            out=out,
            failures=failures_per_host_day,
            straggler_sigma=straggler_sigma,
            calibrate_on=calibrate_on,
            seed=seed,
            as_json=as_json,
        )
        return
    from paceline.cli.command import to_run_on

    line = shlex.join(["paceline", *sys.argv[1:]])
    where = to_run_on(cluster)
    if systems is not None:
        from paceline_lab.cli.bench_systems import compare_systems

        compare_systems(
            what,
            where,
            systems,
            plans=_plans(plans),
            repeat=repeat,
            steps=steps,
            weak=bool(weak),
            kill=kill_rank,
            out=out,
            as_json=as_json,
            command=line,
        )
        return
    settings = what, where, _plans(plans), _numbers(devices)
    _measure_scaling(settings, repeat=repeat, steps=steps, weak=weak is not False, out=out, as_json=as_json, line=line)


def _measure_scaling(
    settings: tuple[Job, Cluster | None, list[str], list[int] | None],
    *,
    repeat: int,
    steps: int | None,
    weak: bool,
    out: str | None,
    as_json: bool,
    line: str,
) -> None:
    """Measure a job on 1 and N devices, and show it. `line`: the command, as it was typed."""
    from paceline.console import Console
    from paceline.errors import RunError
    from paceline_lab.report.bench_view import write_bench_page
    from paceline_lab.scaling.protocol import Benchmark
    from paceline_lab.scaling.summary import kept_at
    from paceline_lab.scaling.table import figures, show

    with kept_at(out, partial(typer.echo, err=True)) as folder:
        benchmark = Benchmark(*settings, repeat=repeat, steps=steps, weak=weak, out=folder, command=line)
        report = benchmark.run()
        page = None if report is None else write_bench_page(report, benchmark.path)
    if report is not None:
        show(report, Console())
        typer.echo(f"report   {page}")
    if benchmark.stopped_by:
        go_on = line if out else f"{line} --out {shlex.quote(str(benchmark.path))}"
        typer.echo(f"stopped  {benchmark.stopped_by}; what is measured is kept. Go on: {go_on}")
    if report is not None and as_json:
        typer.echo(json.dumps({"figures": figures(report), "environment": report.environment}))
    if benchmark.stopped_by:
        raise typer.Exit(EXIT_CODES.get(benchmark.stopped_by, 1))
    if benchmark.failures:
        # The rest was shown when they failed.
        first_lines = {title: error.partition("\n")[0] for title, error in benchmark.failures.items()}
        raise RunError("\n".join(f"{title} could not be measured: {error}" for title, error in first_lines.items()))


def _plans(text: str | None) -> list[str]:
    return [plan.strip() for plan in (text or "").split(";") if plan.strip()]


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,2", param_hint="--devices")
    return [int(word) for word in words]


COMMAND = Command(command, "Measure", "paceline bench examples/digits.yaml --devices 1,2 --repeat 3", starts_ranks=True)
