"""Published measurements of how trainings scale, and which of them are like a simulated one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.cluster.catalogue import Accelerator
from paceline.errors import PlanError
from paceline.planning.cost.estimate import estimate
from paceline.planning.model.graph import ModelTrace
from paceline.planning.tables.layouts import Row, row_of
from paceline.units import digits
from paceline.yaml_file import FileKind, read_yaml
from paceline_lab.scaling.result import Scaling

FILE = Path(__file__).with_name("published_curves.yaml")
Kind = Literal["images", "language"]
_KIND = FileKind("list of published curves", "curves", "`curves: []`", PlanError)
# what another device, and another generation of devices, weigh against a factor of ten in the work of a sample
_OTHER_DEVICE, _OTHER_GENERATION = 1.0, 1.0


class PublishedCurve(BaseModel):
    """Measurements of one training on several numbers of devices, from one source.

    Attributes:
        run: cells of a table of runs that all points have in common; `points` has those that differ.
        scaling: `strong` at the same global batch, `weak` where it grows with the devices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    title: str
    kind: Kind
    scaling: Scaling
    source: str
    url: str
    run: dict[str, str | float]
    points: tuple[dict[str, str | float], ...] = Field(min_length=2)

    @property
    def cells(self) -> list[dict[str, str]]:
        """Cells of each point, as a table of runs has them."""
        return [{name: _text(value) for name, value in (self.run | point).items()} for point in self.points]

    @property
    def rows(self) -> list[Row]:
        """The points as measured runs. Raises as `row_of` does."""
        cells = self.cells
        return [row_of(self.id, at, own, cells) for at, own in enumerate(cells, start=1)]

    @property
    def devices(self) -> list[int]:
        """Number of devices of each point, ascending."""
        return [int(point["n_gpus"]) for point in self.points]


@dataclass(frozen=True)
class HeldAgainst:
    """A published curve beside what the cost model predicts of the same plans and machines.

    Attributes:
        efficiency: work per device and second relative to the first point, as measured.
        predicted: the same as predicted by the cost model, without anything that was measured.
        seconds, predicted_s: of a step.
    """

    curve: PublishedCurve
    rows: tuple[Row, ...]
    efficiency: tuple[float, ...]
    predicted: tuple[float, ...]
    seconds: tuple[float, ...]
    predicted_s: tuple[float, ...]

    @property
    def excess(self) -> float:
        """Logarithm of measured over predicted efficiency at the most devices, per root of the doublings.

        Errors of scaling grow with the number of times that the devices double, and not as fast: their root leaves the
        least error on curves that were left out (`benchmarks/scale_published.py`).
        """
        return math.log(self.efficiency[-1] / self.predicted[-1]) / math.sqrt(self.doublings(len(self.rows) - 1))

    def doublings(self, at: int) -> float:
        """Number of doublings from the first point to another one."""
        return math.log2(self.curve.devices[at] / self.curve.devices[0])


@cache
def published_curves() -> tuple[PublishedCurve, ...]:
    """All curves of the file, in its order."""
    values, _ = read_yaml(FILE, _KIND)
    return tuple(PublishedCurve.model_validate(curve) for curve in values["curves"])


@cache
def held_against() -> tuple[HeldAgainst, ...]:
    """All curves with their predictions; takes a few tenths of a second once."""
    return tuple(map(_held_against, published_curves()))


def _held_against(curve: PublishedCurve) -> HeldAgainst:
    rows = curve.rows
    measured = [row.seconds or math.nan for row in rows]
    predicted = [estimate(row.layout).step_time_s for row in rows]
    return HeldAgainst(
        curve,
        tuple(rows),
        tuple(_efficiencies(rows, measured)),
        tuple(_efficiencies(rows, predicted)),
        tuple(measured),
        tuple(predicted),
    )


def _efficiencies(rows: Sequence[Row], seconds: Sequence[float]) -> list[float]:
    """Work per device and second, relative to the first. Work is FLOPs, as some curves' models grow."""
    rates = [
        row.layout.trace.flops * row.layout.global_batch / row.layout.ranks / s
        for row, s in zip(rows, seconds, strict=True)
    ]
    return [rate / rates[0] for rate in rates]


@dataclass(frozen=True)
class Likeness:
    """A published curve beside a simulated one, with every way in which it differs.

    Attributes:
        distance: 0 if alike; larger for what is less so.
        differences: in words.
    """

    held: HeldAgainst
    distance: float
    differences: tuple[str, ...]


def kind_of(trace: ModelTrace) -> Kind | None:
    """Kind of a model: convolutions, or sequences of tokens; None if it is neither."""
    if any(gemm.read for block in trace.blocks for gemm in block.gemms):
        return "images"
    return "language" if trace.tokens > 1 else None


def alike(trace: ModelTrace, device: Accelerator, scaling: Scaling, most: int = 4) -> list[Likeness]:
    """The published curves of the same kind of model and scaling, the most alike first.

    One of each source before a second one, so that several systems stand beside each other.
    """
    same = [h for h in held_against() if h.curve.kind == kind_of(trace) and h.curve.scaling == scaling]
    found = sorted((_likeness(held, trace, device) for held in same), key=lambda one: one.distance)
    first: dict[str, Likeness] = {}
    for one in found:
        first.setdefault(one.held.curve.source, one)
    chosen = [*first.values(), *(one for one in found if one not in first.values())][:most]
    return sorted(chosen, key=lambda one: one.distance)


def _likeness(held: HeldAgainst, trace: ModelTrace, device: Accelerator) -> Likeness:
    first = held.rows[0].layout
    theirs, distance, differences = first.machines.device, 0.0, []
    if theirs.name != device.name:
        distance += _OTHER_DEVICE + (_OTHER_GENERATION if theirs.generation != device.generation else 0.0)
        differences.append(f"{theirs.name} instead of {device.name}")
    times = first.trace.flops / max(trace.flops, 1.0)
    if not 0.5 < times < 2:
        ratio = f"{digits(times)} times" if times > 1 else f"1/{digits(1 / times)} of"
        differences.append(f"{ratio} the work of a sample")
    system = held.curve.run.get("framework", "another system")
    return Likeness(held, distance + abs(math.log10(max(times, 1e-9))), (*differences, f"by {system}"))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and value == round(value, 4) else str(value)
