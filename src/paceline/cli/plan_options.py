"""Options of `paceline plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.where import not_at_a_url

_RUN, _WHICH, _OTHERS = "The whole training", "Which cluster", "Other systems"

JobPath = Annotated[
    Path, typer.Argument(metavar="JOB", help="YAML file that says what to train.", callback=not_at_a_url)
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help='Cluster file, or a name such as "64x8xH100-SXM, 400gbit".',
        show_default="this machine",
    ),
]
Top = Annotated[int, typer.Option(min=1, help="How many of the best plans to show.")]
Price = Annotated[float | None, typer.Option(min=0, help="Price of a device for an hour, in any currency.")]
Failures = Annotated[
    float | None,
    typer.Option(
        "--failures-per-host-day",
        min=0,
        metavar="X",
        help="Failures of a host in a day, e.g. 0.004: say what they cost, and how often to save.",
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="N", help="Tokens to train on, e.g. 15T: say time, cost, energy.", rich_help_panel=_RUN),
]
Samples = Annotated[str | None, typer.Option(metavar="N", help="Samples to train on, e.g. 300M.", rich_help_panel=_RUN)]
LossToReach = Annotated[
    float | None,
    typer.Option(metavar="X", help="Loss to reach, in nats per token, by scaling laws.", rich_help_panel=_RUN),
]
SpotPrice = Annotated[
    float | None,
    typer.Option(min=0, metavar="X", help="Price of a device for an hour as a spot machine.", rich_help_panel=_RUN),
]
Preemptions = Annotated[
    float | None,
    typer.Option(
        "--preemptions-per-host-day",
        min=0,
        metavar="X",
        help="How often a spot machine is taken away in a day.",
        rich_help_panel=_RUN,
    ),
]
StragglerSigma = Annotated[
    str | None,
    typer.Option(
        metavar="X|RUN",
        help="Standard deviation of a rank's step time, relative to it; or a run that has it.",
        rich_help_panel=_RUN,
    ),
]
Pue = Annotated[
    float | None,
    typer.Option(min=1, metavar="X", help="Power of the data centre over its machines'.", rich_help_panel=_RUN),
]
Carbon = Annotated[
    float | None,
    typer.Option(min=0, metavar="G/KWH", help="Grams of CO₂ for a kWh of electricity.", rich_help_panel=_RUN),
]
CatalogueFile = Annotated[
    str | None,
    typer.Option(
        metavar="[FILE]",
        help="Which of these offers (YAML or CSV) to take; without a file, of a list of examples.",
        rich_help_panel=_WHICH,
    ),
]
Budget = Annotated[
    float | None, typer.Option(min=0, metavar="X", help="The most that it may cost.", rich_help_panel=_WHICH)
]
Deadline = Annotated[
    str | None, typer.Option(metavar="TIME", help="The longest that it may take, e.g. 30d.", rich_help_panel=_WHICH)
]
Cheapest = Annotated[
    bool, typer.Option("--cheapest", help="Name the cheapest first, not the fastest.", rich_help_panel=_WHICH)
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="TEXT",
        help='Also with this changed: "one more host", "twice the memory", bf16, remat=none, …; may be repeated.',
    ),
]
MeasureFirst = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure",
        help="Measure this machine first, in seconds, once; or take the catalogue's figures.",
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
BatchAdvice = Annotated[
    bool, typer.Option("--batch-advice", help="Say how large a global batch is useful, and its learning rate.")
]
AcceptBatch = Annotated[
    Path | None,
    typer.Option(
        metavar="OUT.yaml", help="Write a job with the useful batch and its learning rate; JOB stays as it is."
    ),
]
PageFile = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with pictures.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON that has everything.")]
