"""`paceline train job.yaml`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.train.run import Run

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


def command(
    job: Annotated[Path, typer.Argument(help="YAML file that says what to train.")],
    plan: Annotated[str, typer.Option(help='How to train, e.g. "dp=2 precision=bf16"; auto uses every device of this machine.')] = "auto",
    run: Annotated[Path | None, typer.Option(help="Directory of the run [default: runs/<job>-<time>].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --run, or else with the newest run of this job.")] = False,
    restarts: Annotated[int, typer.Option(min=0, help="How often to start again from the newest checkpoint after a failure.")] = 0,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the rendezvous on 127.0.0.1 [default: a free one].")] = None,
) -> None:
    """Train a job on every device of this machine, or on the ranks of a torchrun."""
    from paceline.launch.train import train

    record = train(job, plan=plan, run=run, resume=resume, restarts=restarts, port=port)
    if is_first_rank():
        typer.echo(summary(record))
    end = record.events()[-1]
    if end.get("interrupted"):
        raise typer.Exit(EXIT_CODES.get(end["reason"], 1))


def is_first_rank() -> bool:
    """Whether this process is the one that speaks: the launcher, or rank 0 of a torchrun."""
    import os

    return os.environ.get("RANK", "0") == "0"


def summary(run: Run) -> str:
    """What the run reached, how fast, why it ended and where it lies."""
    steps, events = run.steps(), run.events()
    end, start = events[-1], next(e for e in reversed(events) if e["event"] in ("start", "resume"))
    synthetic = " (synthetic data)" if start["synthetic"] else ""
    lines = [f"stopped      {end['reason']}"]
    if run.metrics:
        lines.append("held out     " + ", ".join(f"{name} {value:.4f}" for name, value in run.metrics.items()))
    if steps and steps[-1]["loss"] is not None:
        lines.append(f"training     loss {steps[-1]['loss']:.4f} after {end['step']} steps")
    lines.append(f"time         {end['elapsed_s']:.1f} s from the first step to the stop rule{synthetic}")
    lines.append(f"throughput   {run.throughput:,.0f} samples/s = global batch / median step time, plan {run.plan}{synthetic}")
    lines.append(f"run          {run.path}")
    if end.get("interrupted"):
        lines.append(f"continue     paceline train {run.path}/job.yaml --run {run.path} --resume")
    return "\n".join(lines)
