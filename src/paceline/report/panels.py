"""Panels of bars, one per figure, that compare plans or rules."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go

from paceline.report.charts import SERIES, empty_figure
from paceline.units import digits

_BAR_PX, _TITLE_PX = 24, 46
_LABEL_WIDTH = 26  # characters; a longer plan is broken into lines


@dataclass(frozen=True)
class Panel:
    """One figure for everything compared: values in the order of the names.

    None where there is no value; drawn times `factor`.
    """

    title: str
    values: Sequence[float | None]
    factor: float = 1.0


def panelled(names: Sequence[str], panels: Sequence[Panel]) -> go.Figure:
    """A bar per name in each panel, panels under each other, empty ones left out."""
    panels = [panel for panel in panels if any(value is not None for value in panel.values)]
    labels = ["<br>".join(escape(line) for line in textwrap.wrap(name, _LABEL_WIDTH)) for name in names]
    rows = sum(label.count("<br>") + 1 for label in labels)
    panel_px = _TITLE_PX + _BAR_PX * rows
    figure = empty_figure("", "")
    figure.update_layout(height=panel_px * len(panels), showlegend=False, margin={"l": 8, "r": 12, "t": 0, "b": 4})
    whole = 1.0 / len(panels)
    for number, panel in enumerate(panels):
        top = 1.0 - number * whole
        axis = "" if number == 0 else str(number + 1)
        shown = [None if value is None else value * panel.factor for value in panel.values]
        known = [value for value in shown if value is not None]
        figure.add_bar(
            x=shown,
            y=labels,
            orientation="h",
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            marker={"color": [SERIES[i % len(SERIES)] for i in range(len(names))]},
            text=["" if value is None else digits(value) for value in shown],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"%{{y}}<br>{escape(panel.title)} %{{x:,.4~g}}<extra></extra>",
        )
        common = figure.layout.xaxis.to_plotly_json()
        plain = {"showgrid": False, "showline": False, "automargin": True}
        figure.update_layout(
            {
                f"xaxis{axis}": common
                | plain
                | {"range": [0, 1.25 * max(known) or 1], "anchor": f"y{axis}", "showticklabels": False},
                f"yaxis{axis}": plain
                | {
                    "domain": [top - whole, top - whole * _TITLE_PX / panel_px],
                    "anchor": f"x{axis}",
                    "autorange": "reversed",
                },
            }
        )
        at = {
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": top - whole * 10 / panel_px,
            "xanchor": "left",
            "yanchor": "top",
        }
        figure.add_annotation(text=f"<b>{escape(panel.title)}</b>", showarrow=False, **at)
    return figure
