"""HTML figures and tables for notebooks, without JavaScript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from paceline import units
from paceline.planning.plan import AXES, MESH_AXES, REPLICA
from paceline.report import charts
from paceline.report.charts import SERIES, Figure
from paceline.report.svg import picture

if TYPE_CHECKING:
    from paceline.planning.plan import Plan
    from paceline.run.record.run import Run

_WIDTH = 560
# colours of the page; text uses the notebook's colour, which may be dark or light
_STYLE = (
    ".paceline .plot { --blue: #2b7ab8; --vermillion: #c9510a; --green: #1c8a66; --purple: #9c4f86; --ochre: #8f6c00;"
    " --azure: #2b82bd; --grey: #7d8794; color: inherit; max-width: 100%; overflow: visible }"
    " .paceline .plot .paper { fill: none } .paceline .plot svg { overflow: visible }"
    " .paceline .plot svg.in { overflow: hidden }"
    " .paceline .plot text { fill: currentColor; font: 12px sans-serif }"
    " .paceline .plot .grid { stroke: currentColor; stroke-opacity: .15 }"
    " .paceline .plot .axis { stroke: currentColor; stroke-opacity: .5 }"
    " .paceline .plot .line { fill: none; vector-effect: non-scaling-stroke }"
    " .paceline .plot .interval { fill: none; stroke: currentColor }"
    " .paceline .plot .unseen { fill: transparent }"
    " .paceline .plot .tier-1, .paceline .plot .tier-2 { display: none }"
)
# size of a rank and gap between ranks in pixels; largest number of ranks that are drawn
_SQUARE, _GAP, _MOST_DRAWN = 22, 4, 64


def shown(figure: Figure | None, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a figure and a table as HTML.

    Args:
        figure: figure above the table; None draws no figure.
        title: heading, which is also the figure's description for screen readers.
        head: headings of the table's columns; empty if the table has no headings.
        rows: cells of the table. All text is escaped.
    """
    drawn = Markup("") if figure is None else Markup(picture(figure, _WIDTH, title, _STYLE))
    return _framed(title, drawn, head, rows)


def run_html(run: Run) -> str:
    """Return the loss curve and the main figures of a run as HTML."""
    steps, events = run.steps(), run.events()
    training = charts.Line("training", [line["step"] for line in steps], [line["loss"] for line in steps])
    measured = [e for e in events if e["event"] == "evaluation" and "loss" in e["metrics"]]
    held_out = charts.Line(
        "validation",
        [event["step"] for event in measured],
        [event["metrics"]["loss"] for event in measured],
        charts.VERMILLION,
        marked=True,
    )
    series = [training, held_out] if measured else [training]
    figure = charts.lines(series, "steps", "loss", log_if_wide=True) if steps else None
    rows: list[tuple[str, object]] = [
        ("plan", run.plan),
        ("state", run.reason or "not ended"),
        ("steps", f"{steps[-1]['step']:,}" if steps else "0"),
        *((f"validation {name}", f"{value:.4g}") for name, value in run.metrics.items()),
        ("throughput", units.rate(run.throughput) if run.throughput else "too few steps"),
        *([("training time", units.span(run.training_time_s))] if run.training_time_s else []),
        ("directory", run.url or run.path),
    ]
    return shown(figure, f"Run {run.job.name}", (), rows)


def plan_html(plan: Plan) -> str:
    """Return the mesh of a plan's ranks and the plan's keys as HTML."""
    chosen = [tuple(word.split("=", 1)) for word in str(plan).split()]
    terms = {axis.name: axis.term for axis in MESH_AXES}
    rows = [(key, value, terms.get(key, "")) for key, value in chosen]
    title = f"{units.count(plan.ranks, 'rank')} in {units.count(plan.dp, 'replica')}"
    drawn = Markup(_mesh(plan, title)) if 1 < plan.ranks <= _MOST_DRAWN else Markup("")
    return _framed(title, drawn, ("key", "value", "meaning"), rows)


def _mesh(plan: Plan, title: str) -> str:
    """Draw each replica as a row of ranks. Each pipeline stage has its own colour."""
    places = [_place(plan, rank) for rank in range(plan.ranks)]
    across = plan.ranks // plan.dp
    width, height = across * (_SQUARE + _GAP) + 3 * _GAP, _SQUARE + 3 * _GAP
    parts = []
    for replica, ranks in groupby(range(plan.ranks), key=lambda rank: places[rank]["dp"]):
        top = replica * (height + _GAP)
        parts.append(
            f'<rect x="0.5" y="{top + 0.5}" width="{width - 1}" height="{height - 1}" rx="4" fill="none" '
            'stroke="currentColor" stroke-opacity=".4"/>'
        )
        for column, rank in enumerate(ranks):
            x, y = 2 * _GAP + column * (_SQUARE + _GAP), top + 1.5 * _GAP
            where = ", ".join(f"{axis}={places[rank][axis]}" for axis in AXES if getattr(plan, axis) > 1)
            colour = SERIES[places[rank]["pp"] % len(SERIES)]
            parts.append(
                f'<g><title>rank {rank}: {where}</title><rect x="{x}" y="{y}" width="{_SQUARE}" height="{_SQUARE}" '
                f'rx="3" style="fill: {colour}"/><text x="{x + _SQUARE / 2}" y="{y + 15}" text-anchor="middle" '
                f'style="fill: #fff">{rank}</text></g>'
            )
    total = plan.dp * (height + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" width="{width}" height="{total}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{''.join(parts)}</svg>"
    )


def _place(plan: Plan, rank: int) -> Mapping[str, int]:
    """Return the coordinates of a rank on the mesh. The last axis of the mesh varies fastest."""
    found, rest = {}, rank
    for axis in reversed(REPLICA):
        rest, found[axis] = divmod(rest, getattr(plan, axis))
    return found | {"dp": rest}


def _framed(title: str, drawn: Markup, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    heading = Markup("<tr>{}</tr>").format(Markup("").join(Markup("<th>{}</th>").format(name) for name in head))
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(str(cell)) for cell in row))
        for row in rows
    )
    table = Markup("<table>{}{}</table>").format(heading if head else "", body)
    return str(Markup('<div class="paceline"><b>{}</b><div>{}</div>{}</div>').format(title, drawn, table))
