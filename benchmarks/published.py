"""Published measurements of other systems' training runs, predicted by paceline's cost model.

How far off, and how good is its choice?

    python benchmarks/published.py [--tables DIR] [--out FILE] [--rows] [--json]

Every usable row of every table counts, and is predicted without its source: all fitted constants come from the runs of
other sources (`tables/fits.json`, by `published_fit.py --without-each`). *Calibrated*: corrected as `paceline plan
--calibrate-on` does, by the tenth of the table's rows that are set aside for that and not scored. *Cold*: without. The
baseline (`published_baseline.py`) has 19 fitted numbers; it is fitted, left out and calibrated by the same runs.

Of every table: rows, error of the step time calibrated and cold, the baseline, the null model (one share of the peak,
fitted to the very rows that it is scored on, and the formula of the pipeline's bubble), bias, rank correlation; the
*regret*: in each group of rows of equal model, batch, hardware, precision and framework with different plans, the
measured time of the plan that is predicted fastest / the best measured − 1; the error of the memory; how often the 80 %
interval holds; and rows that are not used, with why. Then the error by the number of rows that calibrate.

Figures: `mean_error`, `mean_over_tables`, `p90_error` (calibrated), `cold_mean_error`, `cold_mean_over_tables`,
`mean_regret`, `cold_mean_regret`, each also with `baseline_`; `sweep_cold_regret` and `sweep_regret` (groups of at
least ten plans, without rows of the source and with ten of them); `tables_worse_than_null` (share); `fits_right` (share
of the rows that ran or ran out of memory with the right verdict), `false_oom` (share of the rows that ran which are
predicted not to fit), `missed_oom` (rows that ran out of memory and are predicted to fit), `memory_median_error`,
`memory_coverage_80`, `coverage_80`, `cold_coverage_80`, `unusable_share`, `error_with_N_rows`; those of each table with
`_of_` and its name.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import published_baseline
from measure import environment_line, parser_of
from paceline.planning.cost import constants
from paceline.planning.cost.estimate import predict_layout, step_time_s
from paceline.planning.machines import Adjustment, adjustment
from paceline.planning.tables.row_memory import counted_bytes
from published_fit import FITS, sample
from published_null import null_seconds
from published_rows import TABLES, Row, Skipped, read, set_aside, source
from published_score import Predicted, Score, grouped, mean, score

GIB = 2**30
# rows that calibrate, for the curve of the error
COUNTS = (0, 1, 3, 10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, compare, print."""
    options = _options(arguments)
    rows, skipped = read(sorted(options.tables.glob("*.csv")))
    if not rows:
        print(f"no table of runs in {options.tables} has a row that can be used", file=sys.stderr)
        return 1
    aside = set_aside(rows)
    predicted = predict(rows, aside)
    counts, sweeps = by_count(rows), sweep_regret(rows)
    found = figures(predicted, skipped, counts, sweeps)
    _print(predicted, skipped, found, options.rows)
    for (name, cold), (_, lost) in zip(sweeps[0], sweeps[max(COUNTS)], strict=True):
        print(f"regret {cold:6.1%} cold, {lost:6.1%} with {max(COUNTS)} rows: {name}")
    if options.out:
        _plot(options.out, predicted)
        print(f"\npredicted against measured: {options.out}")
    if options.json:
        print(json.dumps({"figures": found, "environment": {"machine": environment_line()}}, default=float))
    return 0


def _plot(file: Path, predicted: Sequence[Predicted]) -> None:
    """Write the page of predicted against measured step times, a colour for each table."""
    from predicted_page import Compared, write_predicted_page

    groups: dict[str, list[Compared]] = {}
    for each in predicted:
        if each.row.seconds:
            about = f"line {each.row.number}: {each.row.cells.get('model', '')}, {each.error:.1%} off"
            groups.setdefault(each.row.table, []).append(Compared(each.row.seconds, each.seconds, about))
    write_predicted_page(file, "Step times of published runs: predicted against measured", groups)


def predict(rows: Sequence[Row], aside: set[tuple[str, int]]) -> list[Predicted]:
    """Predictions of the rows that are not set aside, each without its source."""
    fits = json.loads(FITS.read_text(encoding="utf-8"))
    simple = published_baseline.without_each(sample(rows))
    found = []
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table]
        few = [row for row in own if row.place in aside]
        kept = [row for row in own if row.place not in aside]
        with without(source(table), fits):
            factors = adjustment(few)
            cold = {row.place: predict_layout(row.layout) for row in kept}
            seconds = corrected(kept, factors)
        assumed = simple.get(source(table), published_baseline.ASSUMED)
        values, simple_factors = published_baseline.calibrated(few, assumed)
        nulls = dict(
            zip([row.place for row in kept if row.seconds], null_seconds([r for r in kept if r.seconds]), strict=True)
        )
        for row in kept:
            one, layout = cold[row.place], row.layout
            found.append(
                Predicted(
                    row,
                    seconds[row.place],
                    one.step_time_s,
                    Adjustment().interval(layout, one.step_time_s),
                    published_baseline.seconds(layout, values) * simple_factors.factor(layout),
                    published_baseline.seconds(layout, assumed),
                    nulls.get(row.place, math.nan),
                    counted_bytes(row) / GIB,
                    one.fits,
                    factors.interval(layout, seconds[row.place]),
                )
            )
    return found


@contextmanager
def without(name: str, fits: Mapping[str, Mapping[str, float]]) -> Iterator[None]:
    """Predict with the constants that were fitted without a source."""
    constants.fix(fits.get(name))
    try:
        yield
    finally:
        constants.fix()


def corrected(rows: Sequence[Row], factors: Adjustment) -> dict[tuple[str, int], float]:
    """Step times by the place of a row, as measured runs correct them."""
    return {row.place: step_time_s(row.layout, factors.constants) * factors.factor(row.layout) for row in rows}


def by_count(rows: Sequence[Row]) -> dict[int, float]:
    """Mean error over rows by the number of the table's rows that calibrate, which are not scored."""
    fits = json.loads(FITS.read_text(encoding="utf-8"))
    errors: dict[int, list[float]] = {count: [] for count in COUNTS}
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table and row.seconds]
        own.sort(key=lambda row: sha256(f"calibrate {row.place}".encode()).digest())
        if len(own) < 2 * max(COUNTS):
            continue
        kept = own[max(COUNTS) :]
        for count in COUNTS:
            with without(source(table), fits):
                seconds = corrected(kept, adjustment(own[:count]))
            errors[count].append(mean([abs(seconds[row.place] / (row.seconds or 1) - 1) for row in kept]))
    return {count: mean(found) for count, found in errors.items()}


def sweep_regret(rows: Sequence[Row]) -> dict[int, list[tuple[str, float]]]:
    """Regret in groups of at least ten plans, with no rows and with ten rows of the source; by number of rows.

    The ten rows are in other groups where there are enough.
    """
    fits = json.loads(FITS.read_text(encoding="utf-8"))
    found: dict[int, list[tuple[str, float]]] = {0: [], max(COUNTS): []}
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table and row.seconds]
        groups = [group for group in grouped(own) if len({row.plan for row in group}) >= max(COUNTS)]
        for group in groups:
            places = {row.place for row in group}
            others = [row for row in own if row.place not in places]
            others.sort(key=lambda row: sha256(f"calibrate {row.place}".encode()).digest())
            for count in found:
                with without(source(table), fits):
                    seconds = corrected(group, adjustment(others[:count]))
                chosen = min(group, key=lambda row: seconds[row.place])
                best = min(row.seconds or math.inf for row in group)
                name = f"{table} {chosen.cells.get('model', '')[:24]} on {chosen.layout.ranks}"
                found[count].append((name, (chosen.seconds or math.inf) / best - 1))
    return found


def figures(
    predicted: Sequence[Predicted],
    skipped: Sequence[Skipped],
    counts: Mapping[int, float],
    sweeps: Mapping[int, Sequence[tuple[str, float]]],
) -> dict[str, float]:
    """The figures of all tables, and of each."""
    scores = _scores(predicted)
    timed = {table: found for table, found in scores.items() if found.rows}
    total = score(predicted)
    result = {
        "mean_error": total.mean_error,
        "mean_over_tables": mean([found.mean_error for found in timed.values()]),
        "p90_error": total.p90_error,
        "cold_mean_error": total.cold_error,
        "cold_mean_over_tables": mean([found.cold_error for found in timed.values()]),
        "mean_regret": total.mean_regret,
        "cold_mean_regret": total.cold_regret,
        "baseline_mean_error": total.baseline_error,
        "baseline_mean_over_tables": mean([found.baseline_error for found in timed.values()]),
        "baseline_p90_error": total.baseline_p90_error,
        "baseline_cold_mean_error": total.baseline_cold_error,
        "baseline_cold_mean_over_tables": mean([found.baseline_cold_error for found in timed.values()]),
        "baseline_mean_regret": total.baseline_regret,
        "sweep_cold_regret": mean([lost for _, lost in sweeps[0]]),
        "sweep_regret": mean([lost for _, lost in sweeps[max(COUNTS)]]),
        "tables_worse_than_null": mean([float(found.mean_error > found.null_mean_error) for found in timed.values()]),
        "false_oom": total.oom_false / max(total.rows, 1),
        "missed_oom": total.oom_missed,
        "fits_right": 1 - (total.oom_false + total.oom_missed) / max(total.rows + total.out_of_memory, 1),
        "memory_coverage_80": total.memory_coverage,
        "memory_median_error": total.memory_median_error,
        "coverage_80": total.coverage,
        "cold_coverage_80": total.cold_coverage,
        "unusable_share": len(skipped) / max(len(skipped) + len(predicted), 1),
        "rows_used": total.rows,
        "null_mean_error": total.null_mean_error,
        "rank_correlation": total.rank_correlation,
    }
    result |= {f"error_with_{count}_rows": value for count, value in counts.items()}
    return result | {f"{name}_of_{table}": value for table, found in scores.items() for name, value in _few(found)}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tables", type=Path, default=TABLES, help="a folder of tables (*.csv) in the same columns")
    parser.add_argument("--out", type=Path, help="write the picture predicted against measured there (an HTML page)")
    parser.add_argument("--rows", action="store_true", help="print every row")
    return parser.parse_args(arguments)


def _scores(predicted: Sequence[Predicted]) -> dict[str, Score]:
    tables = dict.fromkeys(each.row.table for each in predicted)
    return {table: score([each for each in predicted if each.row.table == table]) for table in tables}


def _few(found: Score) -> list[tuple[str, float]]:
    kept = (
        "rows",
        "mean_error",
        "baseline_error",
        "cold_error",
        "mean_regret",
        "coverage",
        "memory_median_error",
        "null_mean_error",
    )
    return [(name, value) for name, value in asdict(found).items() if name in kept and not math.isnan(value)]


_COLUMNS: Mapping[str, int] = {
    "rows": 5,
    "error": 7,
    "p90": 7,
    "cold": 7,
    "simple": 8,
    "null": 7,
    "bias": 6,
    "cold bias": 10,
    "rank": 7,
    "regret": 8,
    "groups (ties)": 14,
    "80 %": 6,
    "memory": 8,
}


def _print(predicted: Sequence[Predicted], skipped: Sequence[Skipped], found: Mapping[str, float], every: bool) -> None:
    print(f"{'table':36}" + "".join(name.rjust(width) for name, width in _COLUMNS.items()))
    for table, scored in _scores(predicted).items():
        print(_line(table, scored))
    print(_line("all rows", score(predicted)))
    for name, value in found.items():
        if "_of_" not in name:
            print(f"  {name} {value:.4g}")
    if skipped:
        print("\nnot used:")
    for (table, why), count in Counter((each.table, each.why) for each in skipped).items():
        print(f"  {table}: {count} × {why}")
    for each in predicted if every else ():
        if each.row.seconds:
            print(
                f"{each.row.table}:{each.row.number}  {each.measured_s:10.4f} s  calibrated {each.seconds:10.4f} s "
                f"{each.error:6.1%}  cold {each.cold_s:10.4f} s"
            )


def _line(name: str, found: Score) -> str:
    values = (
        str(found.rows),
        _percent(found.mean_error),
        _percent(found.p90_error),
        _percent(found.cold_error),
        _percent(found.baseline_error),
        _percent(found.null_mean_error),
        f"{found.bias:.2f}",
        f"{found.cold_bias:.2f}",
        f"{found.rank_correlation:.3f}",
        _percent(found.mean_regret),
        f"{found.groups} ({found.ties})",
        f"{found.coverage:.2f}",
        _percent(found.memory_median_error),
    )
    line = "".join(value.rjust(width) for value, width in zip(values, _COLUMNS.values(), strict=True))
    burst = f"  out of memory {found.out_of_memory}, missed {found.oom_missed}" if found.out_of_memory else ""
    false = f"  predicted not to fit but ran {found.oom_false}" if found.oom_false else ""
    return f"{name:36}{line}{burst}{false}".replace("nan", "–")


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


if __name__ == "__main__":
    sys.exit(main())
