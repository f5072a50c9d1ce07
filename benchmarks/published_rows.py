"""Tables of published runs, and which of their rows constants and factors are fitted on."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from paceline.planning.tables.layouts import Row, Skipped, read

__all__ = ["TABLES", "Row", "Skipped", "read", "set_aside", "source"]

TABLES = Path(__file__).parent / "tables"


def set_aside(rows: Iterable[Row]) -> set[tuple[str, int]]:
    """A tenth of the timed rows of each table, at least one: those whose places have the lowest SHA-256.

    Of a table with one row none is.
    """
    by_table: dict[str, list[tuple[str, int]]] = {}
    for row in rows:
        if row.seconds:
            by_table.setdefault(row.table, []).append(row.place)
    aside: set[tuple[str, int]] = set()
    for places in by_table.values():
        places.sort(key=lambda place: sha256(f"{place[0]}:{place[1]}".encode()).digest())
        aside |= set(places[: max(len(places) // 10, 1)]) if len(places) > 1 else set()
    return aside


# tables of one publisher's runs with one code, by the start of their names
_SOURCES = ("korthikanti", "llmfoundry", "mlperf", "nvidia_dle", "ultrascale")


def source(table: str) -> str:
    """Return the name of the source of a table's runs, which may have several tables."""
    return next((start for start in _SOURCES if table.startswith(start)), table)
