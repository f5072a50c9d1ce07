"""Self-contained HTML pages and their building blocks.

Pages load no other files. Only the live page has a script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from msgspec import MsgspecError

from paceline import text as words
from paceline.errors import RunError
from paceline.files import write_whole
from paceline.report.charts import SERIES, Figure
from paceline.report.figures import DEFINITIONS, PARTS, WALL, Definition
from paceline.report.svg import chart, picture
from paceline.units import Shown, size

PAGE = "report.html"
Cell = Shown | str
# Errors that values of wrong types or shapes cause.
_NOT_OURS = (ArithmeticError, AttributeError, LookupError, MsgspecError, RecursionError, TypeError, ValueError)
# Known entries of an environment, in the order of the pages.
_ENVIRONMENT = {
    "host": "host",
    "cpu": "CPU",
    "cores": "cores",
    "physical_cores": "physical cores",
    "memory_bytes": "memory",
    "gpus": "GPUs",
    "gpu_driver": "GPU driver",
    "load_average": "load average",
    "os": "operating system",
    "python": "Python",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "paceline": "paceline",
    "git_commit": "git commit",
    "variables": "environment variables",
}


@dataclass(frozen=True)
class Card:
    """Large figure at the top of a page.

    Attributes:
        term: key of the figure's definition.
        cell: value, or text in place of a value.
        note: text below the value.
    """

    term: str
    cell: Cell
    note: str = ""


@dataclass(frozen=True)
class Row:
    """Row of a table. `about` is a text below or beside the cells.

    `name` is the key of a definition, or the text of the row's head.
    """

    name: str
    cells: Sequence[Cell]
    about: str = ""
    loud: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of a page, with a description in words.

    Attributes:
        name: identifier that is unique on the page.
        label: description for screen readers.
        title, terms: heading of the caption, and keys of the definitions that it includes. Both are empty if the
            template writes the caption.
        note: text that follows the definitions in the caption.
    """

    name: str
    figure: Figure
    label: str
    title: str = ""
    terms: Sequence[str] = ()
    note: str = ""


class _UsedDefinitions:
    """Lookup of definitions that records which definitions a page uses, in order of first use."""

    def __init__(self, known: Mapping[str, Definition]) -> None:
        self.known, self.names = {**DEFINITIONS, **known}, list[str]()

    def __call__(self, name: str) -> Definition:
        if name not in self.names:
            self.names.append(name)
        return self.known[name]


@contextmanager
def not_by_paceline(folder: Path, writer: str) -> Iterator[None]:
    """Raise RunError in place of any error that an invalid file in a directory causes.

    Raises:
        RunError: a file in the directory contains values of wrong types or shapes.
    """
    try:
        yield
    except _NOT_OURS as error:
        raise RunError(
            "report.folder_invalid",
            "{folder} is not a valid {writer} directory. A file contains unexpected values: {error!r:.200}",
            folder=folder,
            writer=writer,
            error=error,
        ) from error


def write_page(
    file: Path,
    look: str | Template,
    *,
    facts: Mapping[str, str],
    environment: Mapping[str, Any] = {},
    on_cores: bool = False,
    definitions: Mapping[str, Definition] = {},
    **values: Any,
) -> Path:
    """Render a template to a file.

    Args:
        look: name of a template in this package, or a template that `template` returned.
        facts, environment: entries of the section "Environment" at the end of the page; see `described`.
        on_cores: whether the page says "cores" in place of "devices".
        definitions: definitions that only this page uses, by key.
        values: further variables of the template.

    Raises:
        RunError: the file cannot be written.
    """
    fixed = {"define": _UsedDefinitions(definitions)}
    listed = described(facts, environment)
    text = _templates().get_template(look).render(fixed, facts=listed, **values)
    text = words.on_cores(text) if on_cores else text
    try:
        write_whole(file, text)
    except OSError as error:
        raise RunError(
            "file.unwritable", "{file} cannot be written: {reason}", file=file, reason=error.strerror or error
        ) from error
    return file


def write_picture(file: Path, figure: Figure, width: int, title: str) -> Path:
    """Write a figure as an SVG file, in the colours of the light theme.

    Args:
        width: width of the picture in pixels.
        title: description for screen readers.
    """
    lines = _source("style.css").splitlines()
    colours = "".join(lines[: lines.index("}") + 1]).removesuffix("}") + "}"
    rules = "".join(line for line in lines if line.startswith(".plot "))
    own = ".plot { font-family: system-ui, 'DejaVu Sans', sans-serif; font-size: 13px; } .paper { fill: var(--card); }"
    write_whole(file, picture(figure, width, title, colours + rules + own))
    return file


def live_page() -> tuple[bytes, str]:
    """Return the live page and its Content-Security-Policy.

    The page contains no data of runs. The script of the page adds the data.
    """
    parts = [(part, about.name, about.colour, about.text) for part, about in PARTS.items()]
    known = {"parts": parts, "wall": {part: about.colour for part, about in WALL.items()}, "series": SERIES}
    script, style = _source("live.js"), _source("style.css") + _source("live.css")
    text = _templates().get_template("live.html.j2").render(style=Markup(style), script=Markup(script), words=known)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def template(source: str) -> Template:
    """Compile the template of another package.

    The template may use `page.html.j2` and `macros.html.j2`.
    """
    return _templates().from_string(source)


def described(facts: Mapping[str, str], environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return facts and environment entries as pairs of name and text, without empty values.

    Facts come first. Known entries of the environment follow, with readable names, and then all other entries.
    """
    names = [name for name in {**_ENVIRONMENT, **environment} if name in environment]
    lines = [(_ENVIRONMENT.get(name, name.replace("_", " ")), _text(name, environment[name])) for name in names]
    return [(name, text) for name, text in (*facts.items(), *lines) if text]


def _text(name: str, value: Any) -> str:
    match value:
        case None | "":
            return ""
        case dict() if not value:
            return ""
        case []:
            return "none" if name == "gpus" else ""
        case bool():
            return "yes" if value else "no"
        case int() | float() if name.endswith("_bytes"):
            return str(size(value))
        case list() if all(isinstance(entry, int | float) for entry in value):
            return ", ".join(f"{entry:g}" for entry in value)
        case [*_] if all(isinstance(entry, dict) and "name" in entry for entry in value):
            return ", ".join(
                f"{entry['name']} ({_text('memory_bytes', entry.get('memory_bytes')) or 'memory unknown'})"
                for entry in value
            )
        case dict():
            return ", ".join(f"{key}={_text(str(key), own)}" for key, own in value.items())
        case list():
            return ", ".join(_text("", own) for own in value)
    return str(value)


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["drawn"] = chart
    return made


def _source(name: str) -> str:
    """Read a file of this package's templates unchanged."""
    source, *_ = _templates().loader.get_source(_templates(), name)  # type: ignore[union-attr]
    return source


def _hash(script: str) -> str:
    """Return the hash of a script or style for the Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
