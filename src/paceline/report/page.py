"""Pages about a benchmark or a run: one self-contained HTML file each.

A page asks no host for anything.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from paceline.benchmark import words
from paceline.benchmark.result import Report
from paceline.errors import RunError
from paceline.files import write_whole
from paceline.report.bench_view import BenchView
from paceline.report.charts import PART_COLOURS
from paceline.report.definitions import Used
from paceline.report.environment import described
from paceline.report.run_charts import run_charts
from paceline.report.run_view import RunView
from paceline.training.record.run import Run

PAGE = "report.html"
# What values of wrong types and shapes end in; the directory may be anybody's.
_NOT_OURS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def write_bench_page(report: Report, folder: Path) -> Path:
    """Write `report.html` about a benchmark into its folder.

    The report's run directories are relative to that folder.

    Raises:
        RunError: nothing was measured, or the file cannot be written.
    """
    try:
        view = BenchView(report, folder)
        facts = {
            "machine": report.cluster,
            "command": report.command,
            "plans": " · ".join(dict.fromkeys(s.plan for s in report.settings)),
        }
        listed = described(facts, report.environment)
        return write_page(
            folder / PAGE, "bench.html.j2", on_cores=report.on_cores, report=report, view=view, facts=listed
        )
    except _NOT_OURS as error:
        raise RunError(
            f"{folder} holds what no benchmark of paceline writes, so there is no page of it: {error!r:.200}"
        ) from error


def write_run_page(run: Run) -> Path:
    """Write `report.html` about a run into its directory.

    Raises:
        RunError: the run has not finished a step, or the file cannot be written.
    """
    try:
        view = RunView(run)
        return write_page(
            run.path / PAGE,
            "run.html.j2",
            view=view,
            charts=[*run_charts(view.record), *view.sync.charts],
            facts=described(view.facts, view.environment),
        )
    except _NOT_OURS as error:
        raise RunError(
            f"{run.path} holds what no run of paceline writes, so there is no page of it: {error!r:.200}"
        ) from error


def write_page(file: Path, template: str, *, on_cores: bool = False, **values: Any) -> Path:
    """Render a template of this package to a file.

    `facts` are the entries of its list of the environment.

    With `on_cores`, the page calls devices cores.

    Raises:
        RunError: the file cannot be written.
    """
    plotly, script = _scripts()
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:"
    )
    scripts = {"plotly": plotly, "script": script}
    places = {name: Markup(f"[[{secrets.token_hex(8)}]]") for name in scripts}  # a reader's text cannot name one
    fixed = {"define": Used(), "colours": PART_COLOURS, "policy": policy, **places}
    text = _templates().get_template(template).render(fixed, **values)
    text = words.on_cores(text) if on_cores else text
    for name, code in scripts.items():
        text = text.replace(places[name], code)
    try:
        write_whole(file, text)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror or error}") from error
    return file


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _scripts() -> tuple[Markup, Markup]:
    """plotly.js, and ours; neither holds anything of a user's."""
    ours, *_ = _templates().loader.get_source(_templates(), "page.js")  # type: ignore[union-attr]
    return Markup(get_plotlyjs()), Markup(ours)


def _hash(script: str) -> str:
    """The hash by which the page's policy allows this script and no other.

    Others might slip in with a job's name.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
