"""How the cost model's fitted constants were found, so that anyone can find them again.

    python benchmarks/published_fit.py

From timings of NCCL's all-reduce (`tables/calib_collectives.csv`): what links reach, and what starting a collective
takes. From a tenth of the rows of vTrain's table: what launching, starting kernels, vectors and the update take. Then,
from the rows of each table that are set aside, one derating a software stack: the median of those with which each row's
step takes what was measured. Prints the constants, to be written into `paceline/planner/cost/constants.py` and
`published_stacks.py`; changes no file.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq, least_squares

from paceline.cluster.catalogue.hardware import CATALOGUE
from paceline.planner.cost import compute, constants, stages
from paceline.planner.cost.estimate import estimate
from paceline.planner.cost.layout import Layout, Machines
from paceline.planner.cost.traffic import all_reduce_s, link_path
from paceline.trace.graph import ModelTrace
from published import TABLES
from published_rows import Row, read, set_aside

STACK_TABLE = "vtrain_single_a100"


@dataclass(frozen=True)
class Free:
    """A number that is fitted: of `constants`, or of the stack where its name is in lower case."""

    name: str
    start: float
    low: float
    high: float


LINKS = (Free("LINK_TOP_INSIDE", 0.78, 0.5, 1.0), Free("COLLECTIVE_S", 3e-5, 1e-6, 2e-4))
DEVICE = (
    Free("GEMM_START_K", 64, 16, 600),
    Free("UNALIGNED", 0.3, 0.2, 0.35),
    Free("VECTOR_TOP", 0.75, 0.6, 0.85),
    Free("KERNEL_S", 4e-6, 1e-6, 8e-6),
    Free("LAUNCH_TP", 0.03, 0.0, 0.1),
    Free("MEETING", 3.0, 2.0, 8.0),
    Free("STEP_S", 4e-3, 1e-3, 2e-2),
    Free("OPTIMIZER_PASSES", 1.0, 0.875, 3.0),
    Free("PIPELINE_S", 1e-4, 0.0, 2e-3),
    Free("derating", 0.9, 0.6, 1.3),
    Free("kernels", 5.0, 2.0, 8.0),
    Free("loss", 1.3, 0.5, 2.5),
)


def main() -> None:
    """Fit links, then the device, then each stack."""
    links = fit(LINKS, collectives())
    print("of timings of all-reduces:", _text(links))
    rows, _ = read(sorted(TABLES.glob("*.csv")))
    aside = set_aside(rows)
    kept = [row for row in rows if row.place in aside and row.seconds]
    found = fit(DEVICE, of_rows([row for row in kept if row.table == STACK_TABLE]))
    print(f"of {sum(row.table == STACK_TABLE for row in kept)} rows of {STACK_TABLE}:", _text(found))
    by_stack = defaultdict(list)
    for row in kept:
        if row.table != STACK_TABLE:
            by_stack[row.layout.framework.name].append(derating(row))
    for name, values in by_stack.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        print(f"derating of {name}: {statistics.median(values):.3f}, the median of {each}")


def fit(free: Sequence[Free], logs: Callable[[dict[str, float]], np.ndarray]) -> dict[str, float]:
    """The values with the least errors of logarithms, robustly; leaves them in `constants`."""
    start = np.array([each.start for each in free])

    def residuals(scaled: np.ndarray) -> np.ndarray:
        return logs(_set(free, scaled * start))

    bounds = (np.array([each.low for each in free]) / start, np.array([each.high for each in free]) / start)
    best = least_squares(residuals, np.ones(len(free)), bounds=bounds, loss="soft_l1", f_scale=0.05, diff_step=1e-3)
    return _set(free, best.x * start)


def collectives() -> Callable[[dict[str, float]], np.ndarray]:
    """Errors of all-reduces inside of one A100 host."""
    with (TABLES / "calib_collectives.csv").open(newline="", encoding="utf-8") as file:
        timed = [row for row in csv.DictReader(file) if row["source"] == "vTrain LUT" and row["gpu"] == "A100"]
    machines = Machines(CATALOGUE["A100-SXM-80"], 1, 8, CATALOGUE["A100-SXM-80"].network)

    def logs(_: dict[str, float]) -> np.ndarray:
        paths = {size: link_path(Layout(ModelTrace(()), machines, tp=size), "tp") for size in range(2, 9)}
        pairs = (
            (all_reduce_s(float(row["bytes"]), paths[int(row["group_size"])]), float(row["time_ms"]) / 1e3)
            for row in timed
        )
        return np.array([np.log(ours / measured) for ours, measured in pairs])

    return logs


def of_rows(rows: Sequence[Row]) -> Callable[[dict[str, float]], np.ndarray]:
    """Errors of whole steps."""

    def logs(values: dict[str, float]) -> np.ndarray:
        own = {name: value for name, value in values.items() if name.islower()}
        layouts = [replace(row.layout, framework=replace(row.layout.framework, **own)) for row in rows]  # type: ignore[arg-type]
        return np.array(
            [np.log(estimate(each).step_time_s / (row.seconds or 1)) for each, row in zip(layouts, rows, strict=True)]
        )

    return logs


def derating(row: Row) -> float:
    """With which the row's step takes what was measured."""

    def over(value: float) -> float:
        layout = replace(row.layout, framework=replace(row.layout.framework, derating=value))
        return estimate(layout).step_time_s - (row.seconds or 0.0)

    low, high = 0.2, 6.0
    return low if over(low) > 0 else high if over(high) < 0 else float(brentq(over, low, high, xtol=1e-3))


def _set(free: Sequence[Free], values: Sequence[float]) -> dict[str, float]:
    named = {each.name: float(value) for each, value in zip(free, values, strict=True)}
    for name, value in named.items():
        if name.isupper():
            setattr(constants, name, value)
    for memo in (compute.block_time, compute.product_s, stages.block_cost, stages.summed, stages._stage_times):
        memo.cache_clear()
    return named


def _text(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


if __name__ == "__main__":
    main()
