"""`paceline config explain` and `paceline config write`: configurations of other systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline.cli.command import Command
from paceline.cli.plan_options import AsJson, CalibrateOn, cluster_of, factors_of
from paceline.errors import PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.job.model import Dimensions
    from paceline.planning.machines import Adjustment
    from paceline.planning.plan import Plan
    from paceline_lab.configurations.systems import ConfiguredPlan

_WIDE = 3  # number of columns in the table of keys
_EXPLAIN = 'paceline config explain pretrain.sh --cluster "16x8xH100-SXM"'
_WRITE = 'paceline config write examples/plan/llama_70b.yaml megatron out.sh --cluster "16x8xH100-SXM"'
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="NAME|FILE", help='Cluster to plan for: a YAML file, or a name such as "8xH100-SXM".'
    ),
]


def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration of another system.")],
    cluster: ClusterName,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|JOB", help="Name of the model, or a job with its dimensions, if the file names no model."
        ),
    ] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of samples of a step.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of samples of a microbatch.")
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of tokens of a sample.")] = None,
    calibrate_on: CalibrateOn = None,
    write: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            metavar="SYSTEM OUT",
            help="System and file to write the better plan to: megatron, deepspeed, torchtitan or accelerate.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the speed of a configuration, and find a better plan."""
    from paceline.cli.plan_screen import fitted
    from paceline.console import Console

    console = fitted(Console())
    place, _ = cluster_of(cluster, None)
    factors = factors_of(calibrate_on, place, console)
    given = Given(model, global_batch, micro_batch, seq)
    explain_config(file, place, given, console, write, as_json=as_json, factors=factors)


def write(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML): what to train.")],
    system: Annotated[
        str, typer.Argument(metavar="SYSTEM", help="System: megatron, deepspeed, torchtitan or accelerate.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    cluster: ClusterName,
    plan: Annotated[
        str | None, typer.Option(help="Plan to write.", show_default="the fastest plan that the system supports")
    ] = None,
) -> None:
    """Write the plan of a job as a configuration of another system."""
    from paceline.cli.plan_screen import fitted
    from paceline.console import Console
    from paceline.job.job import Job
    from paceline.planning.plan import Plan
    from paceline.planning.prediction import layout_of
    from paceline.planning.search.search import search
    from paceline_lab.configurations.systems import writes

    what = Job.load(job)
    place, _ = cluster_of(cluster, None)
    with Console(stderr=True).status("searching"):
        # the fastest plan may divide the batch as the system cannot
        plans = [Plan.parse(plan)] if plan else [one.plan for one in search(what, place).best]
    parsed = next((one for one in plans if writes(system, one, what)), plans[0])
    per_host = layout_of(what, place, parsed).machines.per_host
    write_config(system, out, parsed, what, per_host, fitted(Console()))


class Given(NamedTuple):
    """Command-line options that add to or replace values of a configuration."""

    model: str | None
    global_batch: int | None
    micro_batch: int | None
    seq: int | None


def explain_config(
    file: Path,
    cluster: Cluster,
    given: Given,
    console: Console,
    wanted: tuple[str, Path] | None = None,
    *,
    as_json: bool,
    factors: Adjustment | None = None,
) -> None:
    """Read a configuration, predict its speed, search for a better plan, and print the result.

    Args:
        wanted: system in whose format the better plan is written, and the file to write; None writes nothing.
        factors: calibration factors from measured runs.
    """
    from dataclasses import replace

    from paceline.console import Console
    from paceline_lab.configurations.configuration import planned, with_batch
    from paceline_lab.configurations.systems import explain_configuration, read_configuration

    found = with_batch(read_configuration(file), given.global_batch, given.micro_batch)
    if given.model is not None:
        found = replace(found, model_name=given.model)
    if given.seq is not None:
        found = replace(found, dimensions={**found.dimensions, "seq": given.seq})
    if found.ranks is not None and found.ranks > cluster.devices:
        raise PlanError(
            "config.other_size",
            "{file} is for {ranks:,} ranks, but {cluster} has {devices:,} devices",
            file=file,
            ranks=found.ranks,
            cluster=cluster.name,
            devices=cluster.devices,
        )
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in file.stem) or "job"
    what = planned(found, cluster.devices, name, dimensions_of)
    with Console(stderr=True).status("searching a better plan"):
        explained = explain_configuration(found, what, cluster, factors)
    show_configured(explained, file, console)
    if wanted is not None:
        best = explained.best or explained.own.winner
        write_config(*wanted, best.plan, what.job, best.layout.machines.per_host, console)
    if as_json:
        typer.echo(json.dumps(explained.to_json()))


def dimensions_of(name: str) -> Dimensions | dict[str, Any]:
    """Look up a model's dimensions by name, or read the dimensions from a job file.

    Raises:
        PlanError: no model with this name is known, or the job's model has no dimensions.
        JobError: the file is not a valid job file.
    """
    if name.endswith((".yaml", ".yml")):
        from paceline.job.job import Job

        if (found := Job.load(Path(name)).model.transformer) is None:
            raise PlanError(
                "config.no_dimensions", "{name}: its model has no dimensions (model: {{transformer: …}})", name=name
            )
        return found
    from paceline.job.known import must_find_model

    try:
        return dict(must_find_model(name).dimensions)
    except ValueError as error:
        raise PlanError(
            "config.model_unknown", "{error} Or name a job with dimensions: --model job.yaml", error=error
        ) from None


def write_config(system: str, out: Path, plan: Plan, job: Job, per_host: int, console: Console) -> None:
    """Write a plan to a file as a configuration of another system."""
    from rich.text import Text

    from paceline.files import write_whole
    from paceline_lab.configurations.systems import write_configuration

    written = write_configuration(system, plan, job, per_host)
    try:
        write_whole(out, written.text)
    except OSError as error:
        raise PlanError(
            "file.unwritable", "{file} cannot be written: {reason}", file=out, reason=error.strerror or error
        ) from error
    launch = f"; start it {written.launch}" if written.launch.startswith("on ") else f", {written.launch}"
    console.print(Text(f"wrote     {out} for {system}{launch if written.launch else ''}"))


def show_configured(explained: ConfiguredPlan, file: Path, console: Console) -> None:
    """Print the plan of a configuration, its figures, a better plan, and the unknown keys."""
    from rich.text import Text

    from paceline.cli.plan_screen import QUIET, print_inset, show_head, show_memory, show_time, show_winner, titled

    one, own = explained.configuration, explained.own
    show_head(own, console)
    console.print(Text(f"{one.system}: {file}, as a plan of paceline", style=QUIET))
    show_winner(own, console)
    show_time(own, console)
    show_memory(own, console)
    _better(explained, console)
    _warnings(explained, console)
    titled(console, "what the file says")
    read = [f"{key}={value}" if value else key for key, value in one.read]
    print_inset(console, Text("  ".join(read), style=QUIET))
    if explained.notes or one.noted:
        titled(console, "what is predicted otherwise, or assumed")
        for note in explained.notes:
            print_inset(console, Text(note))
        for key, about in one.noted:
            print_inset(console, Text(f"{key}: {about}", style=QUIET))


def _better(explained: ConfiguredPlan, console: Console) -> None:
    from rich.text import Text

    from paceline.cli.plan_screen import GOOD, LOST, QUIET, print_inset, table_of, titled
    from paceline.units import percent, seconds

    titled(console, "what would be better", "of the plans for the same job on as many devices that this system can run")
    print_inset(console, Text(explained.verdict, style="bold"))
    if not explained.changes or explained.best is None or explained.best is explained.own.winner:
        return
    table = table_of("key", "now", "better", heads=False)
    table.columns[0].justify = "left"
    for key, now, better in explained.changes:
        table.add_row(key, now, Text(f"→ {better}"))
    print_inset(console, table)
    step_s = explained.own.winner.prediction.step_time_s
    table = table_of("saved", "of the step", "part", heads=False)
    for part, saved in explained.saved:
        sign, style = ("\N{MINUS SIGN}", GOOD) if saved > 0 else ("+", LOST)
        share = f"{sign}{percent(abs(saved) / step_s, 1)}"
        table.add_row(Text(f"{sign}{seconds(abs(saved))}", style=style), share, Text(part, style=QUIET))
    print_inset(console, table)


def _warnings(explained: ConfiguredPlan, console: Console) -> None:
    from rich.text import Text

    from paceline.cli.plan_screen import print_inset, titled

    one = explained.configuration
    if one.problems or explained.refused:
        titled(console, "what does not go together")
        for problem in one.problems:
            print_inset(console, Text(problem, style="yellow"))
        for reason in explained.refused:
            print_inset(console, Text(f"paceline itself would refuse it: {reason}"))
    if one.unknown:
        titled(console, "what was not understood", "and may change the prediction")
        print_inset(console, Text("  ".join(one.unknown), style="yellow"))


COMMAND = Command(
    "Read and write configurations of Megatron-LM, NeMo, DeepSpeed, torchtitan and Accelerate.",
    "Plan",
    _EXPLAIN,
    commands={"explain": Command(explain, example=_EXPLAIN), "write": Command(write, example=_WRITE)},
)
