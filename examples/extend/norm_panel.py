"""A panel of a run's page: the norm of the gradient over the steps."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.report import charts
from paceline.report.page import Chart
from paceline.report.run_page import PanelInfo
from paceline.report.run_record import RunRecord

INFO = PanelInfo("norm_panel:panel")


def panel(record: RunRecord) -> Iterator[Chart]:
    """One chart, where rank 0 has finished a step."""
    if steps := record.ranks.get(0):
        line = charts.Line("gradient norm", [s["step"] for s in steps], [s["grad_norm"] for s in steps])
        figure = charts.lines([line], "steps", "L2 norm", log_if_wide=True)
        yield Chart("gradient-norm", figure, "L2 norm of the gradient before clipping.", "Gradient norm")
