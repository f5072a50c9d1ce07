"""NaN or Inf in a step: where it came from, and each policy's error."""

from __future__ import annotations

import math
from typing import Literal

from paceline.comm import Group
from paceline.errors import NonFiniteError
from paceline.job.batch import Batch, nonfinite_rows

Policy = Literal["stop", "skip", "rewind"]
PATIENCE = 20  # updates left out in a row before the run is called broken


def explain(
    group: Group,
    batch: Batch | None,
    indices: list[int],
    *,
    step: int,
    loss: float,
    norm: float,
    rank: int | None = None,
) -> str:
    """One sentence naming the step, the quantity, and the rank and samples it came from.

    Args:
        group: the ranks whose loss and gradient it is; all of them call this.
        rank: this rank's number in the run, where that is not the one in `group`.
    """
    bad = nonfinite_rows(batch)
    names = [indices[row] for row in bad]
    findings = group.gather_json([group.rank if rank is None else rank, names[:8]])
    sources = [f"rank {number}'s share of the batch has it in samples {found}" for number, found in findings if found]
    what = "loss" if not math.isfinite(loss) else "gradient"
    value = loss if what == "loss" else norm
    where = (
        "; ".join(sources) if sources else "the data of the batch is finite, so the model or the learning rate made it"
    )
    return f"the {what} of step {step} is {value} ({where})"


def stop(problem: str) -> NonFiniteError:
    """The error of the `stop` policy."""
    return NonFiniteError(
        f"{problem}. Nothing was updated. Clean the data, lower the learning rate or set clip_norm; or let the job "
        "go on with `nonfinite: skip` (leave such updates out) or `nonfinite: rewind` (back to the last "
        "checkpoint, without that batch)."
    )


def gave_up(problem: str, skipped: int) -> NonFiniteError:
    """The error when leaving updates out does not help."""
    return NonFiniteError(
        f"{problem}, and {skipped} updates in a row were not finite: the model does not recover. "
        "Lower the learning rate, set clip_norm, or resume from an earlier checkpoint."
    )
