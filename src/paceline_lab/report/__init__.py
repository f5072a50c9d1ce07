"""Report pages of benchmarks, comparisons and simulated scaling.

`paceline report` finds the pages of benchmarks and comparisons through the entry points `PAGE_OF_BENCHMARK` and
`PAGE_OF_COMPARISON`.
"""

from __future__ import annotations

import json
from pathlib import Path

from paceline.files import read_text
from paceline.report import DirectoryPage


def _is_benchmark(folder: Path) -> bool:
    return (folder / "report.json").is_file() and not _is_comparison(folder)


def _is_comparison(folder: Path) -> bool:
    """Return True if the directory contains a comparison of systems."""
    try:
        protocol = json.loads(read_text(folder / "protocol.json"))
    except (OSError, ValueError):
        return False
    return isinstance(protocol, dict) and "systems" in protocol and (folder / "report.json").is_file()


def _write_benchmark(folder: Path) -> Path:
    from paceline_lab.report.bench_view import write_bench_page
    from paceline_lab.scaling.result import Report

    return write_bench_page(Report.load(folder / "report.json"), folder)


def _write_comparison(folder: Path) -> Path:
    from paceline_lab.report.systems_view import write_kept_systems_page

    return write_kept_systems_page(folder)


PAGE_OF_BENCHMARK = DirectoryPage(_is_benchmark, _write_benchmark)
PAGE_OF_COMPARISON = DirectoryPage(_is_comparison, _write_comparison)
