"""Result of a trial, as ranks report it and the cache keeps it.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.planner.knobs import SHARE_OF_RUN, Trial
from paceline.planner.shortlist import Forecast

BEGINNING = "the plan to begin with"


@dataclass
class TuningResult:
    """Result of a trial so far; kept in a file, from which another trial continues.

    Attributes:
        default: the plan that it began with; `step_s` is the median of its steps, `run_s` the longest run with them.
        best: the fastest plan so far.
        tried: the first row is the default's.
        under_way: the knob that is being tried.
        gain: step time of the best plan over that of the default, by the measured ratios of kept changes.
        complete: True if every plan and knob that can help was tried for as long as it takes.
        forecasts: the plans with a predicted step time, the default's first if it is among them; the others are to be
            measured.
        share: largest fraction of the run that measuring may take.
        knobs: True if they are tried as well.
        before_s: longest possible duration of the job's earlier runs, in which nothing was measured.
    """

    default: str
    best: str
    tried: list[Trial] = field(default_factory=list)
    under_way: str | None = None
    step_s: float = 0.0
    steps_per_epoch: int = 0
    run_s: float | None = None
    budget_s: float = 0.0
    spent_s: float = 0.0
    gain: float = 1.0
    complete: bool = True
    forecasts: list[Forecast] = field(default_factory=list)
    share: float = SHARE_OF_RUN
    knobs: bool = True
    before_s: float = 0.0

    @property
    def measured(self) -> bool:
        """True if there was a trial; else the plan was chosen without."""
        return bool(self.tried)

    def forecast_of(self, plan: str) -> Forecast | None:
        """Prediction of a plan, or None."""
        return next((forecast for forecast in self.forecasts if forecast.plan == plan), None)
