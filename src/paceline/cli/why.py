"""`paceline why RUN`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.command import RunPath

if TYPE_CHECKING:
    from paceline.report.diagnosis import Diagnosis


def command(
    run: RunPath,
    one: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Run of the same job on one device to compare with.", show_default="a prediction"
        ),
    ] = None,
    tries: Annotated[
        int,
        typer.Option(
            "--try", metavar="N", min=0, help="Number of better plans to measure in turn with the plan of the run."
        ),
    ] = 0,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict/--no-predict",
            help="Predict other plans, which builds the model of the job, or only read the record.",
        ),
    ] = True,
) -> None:
    """Explain why a run is not faster, and what to try.

    The run is compared with training on one device. A change is advised only if its predicted gain exceeds the error
    of the prediction.
    """
    if tries and not predict:
        raise typer.BadParameter("it measures predicted plans: leave --no-predict out", param_hint="--try")
    from paceline.report.diagnosis import diagnosis_of
    from paceline.report.page import not_by_paceline
    from paceline.run.record.run import Run
    from paceline.text import printable

    read = Run(run)
    with not_by_paceline(read.path, "run"):
        found = diagnosis_of(read, one=None if one is None else Run(one), predicts=predict)
    for sentence in found.sentences:
        typer.echo(printable(sentence))
    if found.memory is not None:
        typer.echo("memory of the rank that needs the most:")
        for line in found.memory.lines():
            typer.echo(f"  {line}")
    _suggest(found)
    if tries:
        _try(found, tries)


def _suggest(found: Diagnosis) -> None:
    from paceline.text import printable

    advice = found.advice
    if advice:
        doubt = f" (± {100 * found.doubt:.0f} %)" if found.doubt else ""
        typer.echo(f"changes that help, with the predicted gain in samples a second{doubt}:")
    else:
        rests = f" (predictions may be off by ± {100 * found.doubt:.0f} %)" if found.doubt else ""
        typer.echo(f"no change is certain to help{rests}")
    for suggestion in advice:
        typer.echo(f"  {printable(suggestion.line())}")
    if others := [one.what for one in found.suggestions if one not in advice]:
        typer.echo(
            printable(f"may or may not help: {', '.join(others)}; --try N measures the first N plans of this list")
        )


def _try(found: Diagnosis, tries: int) -> None:
    from paceline.report.diagnosis import try_suggestions
    from paceline.text import printable

    for line in try_suggestions(found, tries, lambda text: typer.echo(printable(text), err=True)).lines:
        typer.echo(printable(line))
