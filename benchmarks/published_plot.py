"""Plot of predicted against measured step times, one point a row.

One HTML page that works offline.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from published_score import Predicted


def write(path: Path, predicted: Sequence[Predicted]) -> None:
    """Both axes logarithmic; the line is where predictions are exact, the band where they are within 20 %."""
    timed = [each for each in predicted if each.row.seconds]
    low = 0.8 * min(min(each.seconds, each.row.seconds or each.seconds) for each in timed)
    high = 1.25 * max(max(each.seconds, each.row.seconds or each.seconds) for each in timed)
    figure = go.Figure()
    band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(x=[low, high], y=[0.8 * low, 0.8 * high], **band)
    figure.add_scatter(
        x=[low, high], y=[1.2 * low, 1.2 * high], fill="tonexty", fillcolor="rgba(120,120,120,0.15)", **band
    )
    figure.add_scatter(x=[low, high], y=[low, high], mode="lines", line={"color": "gray", "dash": "dot"}, name="exact")
    for table in dict.fromkeys(each.row.table for each in timed):
        rows = [each for each in timed if each.row.table == table]
        figure.add_scatter(
            x=[each.row.seconds for each in rows],
            y=[each.seconds for each in rows],
            mode="markers",
            marker={"size": 6, "opacity": 0.7},
            name=table,
            text=[f"line {each.row.number}: {each.row.cells.get('model', '')}, {each.error:.1%} off" for each in rows],
        )
    figure.update_xaxes(type="log", title="measured, seconds a step")
    figure.update_yaxes(type="log", title="predicted, seconds a step")
    figure.update_layout(
        template="plotly_white", width=900, height=800, title="Step times of published runs: predicted against measured"
    )
    figure.write_html(path, include_plotlyjs=True)
