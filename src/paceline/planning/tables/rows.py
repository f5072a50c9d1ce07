"""Rows of tables of measured runs: the layout of each, and what was measured."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ClusterError
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.products import peak_flops
from paceline.planning.tables.cells import Cells, UnusableError, number
from paceline.planning.tables.layouts import layout_of

# what a plan does not change of a model: its trace has the vocabulary padded for tp
_MODEL = ("model", "n_layers", "hidden", "ffn", "n_heads", "n_kv_heads", "vocab")


@dataclass(frozen=True)
class Row:
    """One measured run: the plan, and what was measured of it.

    Attributes:
        table, number: the table's name and the row's line.
        cells: as they are written.
        seconds: of a step; None if it was not measured.
        memory_gib: of a device; None likewise.
        out_of_memory: True if the run ended so.
    """

    table: str
    number: int
    cells: Cells
    layout: Layout
    seconds: float | None
    memory_gib: float | None
    out_of_memory: bool

    @property
    def place(self) -> tuple[str, int]:
        """The table and the line."""
        return self.table, self.number

    @property
    def group(self) -> tuple[object, ...]:
        """Same work on the same machines: rows of a group differ in their plans."""
        layout = self.layout
        model = tuple(self.cells.get(name, "") for name in _MODEL)
        work = (layout.trace.tokens, round(layout.global_batch, 3), layout.precision, layout.products, layout.lora)
        device = layout.machines.device
        where = (device.name, device.memory_bytes, layout.ranks, layout.machines.between.bandwidth)
        return self.table, self.framework, *model, *work, *where

    @property
    def framework(self) -> str:
        """Its framework and version, without remarks that tell plans apart."""
        name = re.split(r"[;(]", self.cells.get("framework", ""))[0].strip().lower()
        return f"{name} {self.cells.get('source', '')}"

    @property
    def plan(self) -> tuple[object, ...]:
        """Part of the layout that a planner chooses."""
        layout = self.layout
        degrees = (layout.dp, layout.fsdp, layout.tp, layout.pp, layout.cp, layout.ep, layout.expert_ranks)
        return *degrees, layout.zero, layout.zero_dp, layout.samples, layout.chunks, layout.schedule, layout.remat


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be used."""

    table: str
    number: int
    why: str


def read(files: Iterable[Path]) -> tuple[list[Row], list[Skipped]]:
    """All rows of the tables that name a model and devices."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for path in files:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            table = [
                {key: (value or "").strip() for key, value in cells.items() if key} for cells in csv.DictReader(file)
            ]
        if not table or not {"model", "gpu"} <= table[0].keys():
            continue
        for at, cells in enumerate(table, start=2):
            try:
                rows.append(row_of(path.stem, at, cells, table))
            except UnusableError as unusable:
                skipped.append(Skipped(path.stem, at, str(unusable)))
            except (ClusterError, ValueError, ZeroDivisionError) as error:
                skipped.append(Skipped(path.stem, at, str(error).strip().splitlines()[-1]))
    return rows, skipped


def row_of(table: str, at: int, cells: Cells, others: Sequence[Cells]) -> Row:
    """Row of a table from its cells; its `others` tell what it leaves out.

    Raises:
        UnusableError: something is not stated that nothing else tells.
        ClusterError: its device is not in the catalogue.
    """
    out_of_memory = any(
        "oom" in cells.get(name, "").lower() for name in ("memory_gib", "step_time_s", "tokens_per_s_per_gpu")
    )
    layout = layout_of(cells, others)
    seconds = None if out_of_memory else _seconds(cells, layout)
    memory = None if out_of_memory else number(cells.get("memory_gib", ""))
    if seconds is None and memory is None and not out_of_memory:
        raise UnusableError("neither a time nor a memory was measured")
    return Row(table, at, cells, layout, seconds, memory, out_of_memory)


def _seconds(cells: Cells, layout: Layout) -> float | None:
    """A step's time, or what it is by the rate that was printed instead."""
    stated = number(cells.get("step_time_s", ""))
    if stated:
        return stated
    tokens, tflops, mfu = (number(cells.get(name, "")) for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"))
    if tokens:
        return layout.global_batch * layout.trace.tokens / tokens / layout.ranks
    recomputed = layout.remat == "block" and re.search(r"incl\w* recompute", cells.get("notes", ""))
    flops = (4 if recomputed and tflops else 3) * layout.trace.flops * layout.global_batch / layout.ranks
    if tflops:
        return flops / tflops / 1e12
    if mfu:
        return flops / peak_flops(layout.machines.device, layout.precision) / (mfu / 100 if mfu > 1 else mfu)
    return None
