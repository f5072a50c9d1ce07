"""The page of `gpu.py`: the verdict, what every path computed, speeds beside PyTorch's, and how to send the file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gpu_checks import STEPS
from gpu_results import CheckRow, Results, SpeedRow, without_speed
from paceline import units
from paceline.report.charts import Panel, panelled
from paceline.report.page import Cell, Chart, Row, template, write_page

_TEMPLATE = Path(__file__).with_suffix(".html.j2")
_COUNTED = ("holds", "differs", "cannot tell", "refused", "crashed", "not run")


@dataclass(frozen=True)
class View:
    """What the template shows of the results."""

    results: Results

    @property
    def speeds(self) -> list[SpeedRow]:
        """Rows of speed; of simulated devices without any figure."""
        rows = self.results.speeds
        return [without_speed(row) for row in rows] if self.results.described.mode == "simulated" else rows

    @property
    def groups(self) -> list[tuple[str, list[CheckRow]]]:
        """Checks by heading, in the order in which headings came first."""
        order = list(dict.fromkeys(row.group for row in self.results.checks))
        rows = sorted(self.results.checks, key=lambda row: order.index(row.group))
        return [(group, list(of_group)) for group, of_group in groupby(rows, key=lambda row: row.group)]

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Verdicts and how many there are, without those that there are none of."""
        counts = self.results.counts()
        return [(name, counts[name]) for name in _COUNTED if counts[name]]

    @property
    def chart(self) -> Chart | None:
        """Throughput and the ratio to PyTorch; None without a measured speed."""
        rows = [row for row in self.speeds if row.ratio is not None]
        if not rows:
            return None
        panels = [
            Panel("ratio: PyTorch’s step time / ours", [_ratio(row) for row in rows]),
            Panel("our throughput, samples/s", [row.samples_per_s for row in rows]),
        ]
        names = [f"{row.name} · {row.beside}" for row in rows]
        return Chart("speeds", panelled(names, panels), "The ratio to PyTorch and our throughput, as bars.")

    @property
    def facts(self) -> dict[str, str]:
        """Entries of the list of the environment that the environment itself does not have."""
        described, results = self.results.described, self.results
        memory = "" if described.memory_bytes is None else f", {units.size(described.memory_bytes)} each"
        can = ", ".join(name.replace("_", " ") for name, there in described.capabilities.items() if there)
        cannot = ", ".join(name.replace("_", " ") for name, there in described.capabilities.items() if not there)
        return {
            "devices": f"{results.devices} × {described.name} ({described.type}){memory}",
            "they can": can,
            "they cannot": cannot,
            **described.versions,
            "command": results.command,
            "took": f"{units.seconds(results.took_s)} of {results.minutes:g} min",
        }

    @property
    def rows(self) -> list[Row]:
        """The table of speeds: a row for each figure, a column for each of `speeds`."""
        cells = [_cells(row) for row in self.speeds]
        names = dict.fromkeys(name for of_row in cells for name in of_row)
        return [Row(name, [of_row.get(name, "") for of_row in cells]) for name in names]

    @property
    def notes(self) -> dict[str, str]:
        """What the predictions do not know, by the name of the speed; each text once."""
        return {row.prediction_note: f"{row.name}, {row.plan}" for row in self.speeds if row.prediction_note}


def _cells(row: SpeedRow) -> dict[str, Cell]:
    """Cells of a column of speeds, by the name of the figure."""
    cells: dict[str, Cell] = {"batch": f"{row.global_batch}, {row.precision}"}
    if row.ours is None or row.theirs is None or row.ratio is None or row.samples_per_s is None:
        return cells
    predicted, none = row.predicted_step_s, "no prediction"
    memory = row.predicted_memory_bytes
    return cells | {
        "ratio": units.ratio(row.ratio),
        "step, ours": units.seconds(row.ours.step_s),
        "step, PyTorch": units.seconds(row.theirs.step_s),
        "step, predicted": none if predicted is None else units.seconds(predicted),
        "throughput": units.rate(row.samples_per_s),
        "tokens": units.rate(row.samples_per_s * row.tokens, "tokens/s") if row.tokens else "no tokens",
        "MFU": "peak not known" if row.mfu is None else units.percent(row.mfu),
        "memory, ours": _bytes(row.ours.memory_bytes),
        "memory, PyTorch": _bytes(row.theirs.memory_bytes),
        "memory, predicted": none if memory is None else units.size(memory),
    }


def _ratio(row: SpeedRow) -> float | None:
    return None if row.ratio is None else row.ratio.middle


def _bytes(memory_bytes: int | None) -> Cell:
    return "not counted" if memory_bytes is None else units.size(memory_bytes)


def write_results_page(results: Results, file: Path) -> Path:
    """Write the page.

    Raises:
        RunError: the file cannot be written.
    """
    view = View(results)
    look = template(_TEMPLATE.read_text())
    return write_page(
        file, look, facts=view.facts, environment=results.environment, view=view, results=results, steps=STEPS
    )
