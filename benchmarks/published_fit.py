"""How the cost model's fitted constants were found, so that anyone can find them again.

    python benchmarks/published_fit.py [--without-each] [--tables DIR]

The constants are those of `paceline.planning.cost.constants.ASSUMED`. They start from what data sheets and literature
say, and move from there only as far as published runs outweigh that: a robust least-squares fit of logarithms with a
prior. At most `MOST` rows of a table count, and a table with more rows weighs less for each.

Writes `paceline/planning/cost/fitted.py`. With `--without-each`, fits once more without each source in turn, and writes
`tables/fits.json`, with which `published.py` predicts the rows of that source.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from paceline.planning.cost import fitted
from paceline.planning.cost.compute import family_of
from paceline.planning.cost.constants import ASSUMED, STACKS
from paceline.planning.cost.estimate import step_time_s
from paceline.planning.cost.layout import Layout
from paceline.planning.tables.layouts import Row, read
from published_rows import TABLES, source

FITS = TABLES / "fits.json"
FITTED = Path(fitted.__file__)
MOST = 60  # rows of a table that are fitted on
ROUNDS = 2  # linearizations of the model
WEIGHT = 0.2  # a table of n rows has n to this power less weight for each, squared
CLIP = 0.10  # errors of logarithms beyond this weigh less and less
STEP = 0.02  # of logarithms, for derivatives
NAMES = tuple(ASSUMED)
Values = dict[str, float]


def main() -> None:
    """Fit, print, and with --without-each once without each source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--without-each", action="store_true", help="fit without each source, and write fits.json")
    options = parser.parse_args()
    rows = sample(read(sorted(options.tables.glob("*.csv")))[0])
    found, fits = fit(rows, without_each=options.without_each)
    for name, value in found.items():
        print(f"{name:20} {value:10.4g}  assumed {ASSUMED[name].value:.4g}")
    FITTED.write_text(as_module(found), encoding="utf-8")
    print(f"written: {FITTED}")
    if options.without_each:
        FITS.write_text(json.dumps(fits, indent=0) + "\n", encoding="utf-8")
        print(f"written: {FITS}")


def sample(rows: Sequence[Row]) -> list[Row]:
    """Return the timed rows to fit on: at most `MOST` of each table, chosen by the hash of their place."""
    by_table: dict[str, list[Row]] = {}
    for row in rows:
        if row.seconds:
            by_table.setdefault(row.table, []).append(row)
    chosen: list[Row] = []
    for own in by_table.values():
        own.sort(key=lambda row: sha256(f"fit {row.place}".encode()).digest())
        chosen += own[:MOST]
    return chosen


def fit(rows: Sequence[Row], *, without_each: bool = False) -> tuple[Values, dict[str, Values]]:
    """Return the values with the least errors of logarithms and deviations from what is assumed.

    Args:
        without_each: also fit without each source. These fits start from the values of all rows, with the same
            derivatives, and end with the errors of their own values.
    """
    sources = np.array([source(row.table) for row in rows])
    spreads = np.array([assumed.spread for assumed in ASSUMED.values()])
    moved, kept = _moved(spreads), np.ones(len(rows), dtype=bool)
    for _ in range(ROUNDS):
        errors, slopes = _errors(rows, moved, spreads), _slopes(rows, moved, spreads)
        moved = _solved(rows, errors, slopes, moved, kept)
    found = _values(moved, spreads)
    fits: dict[str, Values] = {}
    if without_each:
        errors = _errors(rows, moved, spreads)
        for name in sorted(set(sources)):
            kept = sources != name
            own, at = _solved(rows, errors, slopes, moved, kept), errors
            for _ in range(2):  # the model is not linear: correct by its errors at the values found
                at = _errors(rows, own, spreads)
                own = _solved(rows, at, slopes, own, kept)
            fits[name] = _values(own, spreads)
    return found, fits


def _moved(spreads: np.ndarray) -> np.ndarray:
    """Start from the values in the file."""
    ratios = [fitted.FITTED.get(name, each.value) / each.value for name, each in ASSUMED.items()]
    return np.asarray(np.log(ratios) / spreads)


def _values(moved: np.ndarray, spreads: np.ndarray) -> Values:
    assumed = np.array([each.value for each in ASSUMED.values()])
    return {name: float(f"{value:.4g}") for name, value in zip(NAMES, assumed * np.exp(moved * spreads), strict=True)}


def _errors(rows: Sequence[Row], moved: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    return np.asarray(np.array(_logs([row.layout for row in rows], _values(moved, spreads))) - _measured(rows))


def _measured(rows: Sequence[Row]) -> np.ndarray:
    return np.array([math.log(row.seconds or 1.0) for row in rows])


def _logs(layouts: Sequence[Layout], values: Mapping[str, float]) -> list[float]:
    return [math.log(step_time_s(layout, values)) for layout in layouts]


def _slopes(rows: Sequence[Row], moved: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """Return the derivative of each row's logarithm with respect to each constant, in its spreads."""
    values = _values(moved, spreads)
    slopes = np.zeros((len(rows), len(NAMES)))
    jobs = []
    for at, name in enumerate(NAMES):
        places = [place for place, row in enumerate(rows) if matters(name, row.layout)]
        jobs.append((at, places, name, values))
    _LAYOUTS[:] = [row.layout for row in rows]  # before the processes are forked, since layouts are large to send
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        for (at, places, *_), slope in zip(jobs, pool.map(_slope, jobs), strict=True):
            slopes[places, at] = np.array(slope) * spreads[at]
    return slopes


_LAYOUTS: list[Layout] = []


def _slope(job: tuple[int, list[int], str, Values]) -> list[float]:
    _, places, name, values = job
    layouts = [_LAYOUTS[place] for place in places]
    low, high = (_logs(layouts, values | {name: values[name] * math.exp(way * STEP)}) for way in (-1, 1))
    return [(above - below) / (2 * STEP) for below, above in zip(low, high, strict=True)]


def matters(name: str, layout: Layout) -> bool:
    """True if a constant can change the time of a layout."""
    if name.startswith("SUSTAINED_"):
        return name.endswith("_" + family_of(layout.machines.device))
    if name.startswith("VECTOR_") and name != "VECTOR_BACKWARD":
        return STACKS[layout.framework.stack].vector == name
    if name.startswith("KERNELS_"):
        return STACKS[layout.framework.stack].kernels == name
    blocks = layout.trace.blocks
    checks = {
        "CONV": lambda: any(gemm.read for block in blocks for gemm in block.gemms),
        "EXPERT": lambda: any(block.experts for block in blocks),
        "MIXTURE": lambda: any(block.experts for block in blocks),
        "SCAN": lambda: any(block.kind.startswith("mamba") for block in blocks),
        "LOW": lambda: bool(layout.products),
        "PIPELINE": lambda: layout.pp > 1,
        "HOSTS": lambda: layout.machines.hosts > 1,
        "LINK_TOP_BETWEEN": lambda: layout.machines.hosts > 1,
        "LAUNCH_TP": lambda: layout.tp > 1,
        "SCORES": lambda: not layout.framework.flash,
        "ATTENTION": lambda: layout.framework.flash,
    }
    return all(check() for start, check in checks.items() if name.startswith(start))


def _solved(
    rows: Sequence[Row], errors: np.ndarray, slopes: np.ndarray, moved: np.ndarray, kept: np.ndarray
) -> np.ndarray:
    """Return the best constants, in spreads from what is assumed, if the model were linear around `moved`."""
    counts = Counter(row.table for row, own in zip(rows, kept, strict=True) if own)
    weights = np.array([counts[row.table] ** -WEIGHT if counts[row.table] else 0.0 for row in rows])[kept]

    def residuals(place: np.ndarray) -> np.ndarray:
        left = errors[kept] + slopes[kept] @ (place - moved)
        return np.concatenate([_robust(left) * weights / CLIP, place])

    return np.asarray(least_squares(residuals, moved, max_nfev=50).x)


def _robust(errors: np.ndarray) -> np.ndarray:
    """Errors of which large ones count with their square root (Huber's, as residuals)."""
    scaled = errors / CLIP
    soft = np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
    return np.asarray(np.sign(scaled) * soft * CLIP)


def as_module(values: Mapping[str, float]) -> str:
    """The values as the module that the cost model reads."""
    about = "Values that `benchmarks/published_fit.py` fitted to published runs and wrote; change them there."
    lines = [f'"""{about}"""', "", "from __future__ import annotations", "", "FITTED: dict[str, float] = {"]
    return "\n".join([*lines, *(f'    "{name}": {value:.4g},' for name, value in values.items()), "}", ""])


if __name__ == "__main__":
    main()
