"""Published measurements of other systems' training runs, predicted by paceline's cost model.

How far off, and how good is its choice?

    python benchmarks/published.py [--tables DIR] [--out FILE] [--rows] [--json]

Every usable row of every table counts, and is predicted twice. *Calibrated*: corrected as `paceline plan
--calibrate-on` does, by the tenth of the table's rows that are set aside for that and not scored: a factor for its
software and hardware, and what runs that are like it have in common beside that (`one_factor_` figures are without the
latter). *Cold*: with constants that were fitted without any row of the table (`tables/fits.json`, by
`published_fit.py --cold`; a table that is not there was never fitted), and without a factor.

Of every table: rows, error of the step time calibrated and cold, the null model (one share of the peak, fitted to the
very rows that it is scored on, and the formula of the pipeline's bubble), bias, rank correlation; the *regret*: in each
group of rows of equal model, batch, hardware, precision and framework with different plans, the measured time of the
plan that is predicted fastest / the best measured − 1; the error of the memory; how often the 80 % interval holds; and
rows that are not used, with why.

Figures: `mean_error`, `mean_over_tables`, `p90_error` (calibrated), `one_factor_mean_error`, `cold_mean_error`,
`cold_mean_over_tables`, `mean_regret`, `tables_worse_than_null` (calibrated), `false_oom` (share of the rows that ran
which are predicted not to fit), `missed_oom` (rows that ran out of memory and are predicted to fit), `fits_right`
(share of both kinds with the right verdict), `memory_coverage_80`,
`memory_median_error`, `coverage_80`, `unusable_share`; those of each table with `_of_` and its name.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from measure import environment_line, parser_of
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.layout import Layout
from paceline.planning.machines import adjustment
from paceline.planning.tables.row_memory import counted_bytes
from published_fit import cold_seconds
from published_null import null_seconds
from published_rows import TABLES, Row, Skipped, read, set_aside
from published_score import Predicted, Score, mean, score

GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, compare, print."""
    options = _options(arguments)
    rows, skipped = read(sorted(options.tables.glob("*.csv")))
    if not rows:
        print(f"no table of runs in {options.tables} has a row that can be used", file=sys.stderr)
        return 1
    aside = set_aside(rows)
    predicted = predict(rows, aside)
    _print(predicted, skipped, [row for row in rows if row.place in aside], options.rows)
    if options.out:
        _plot(options.out, predicted)
        print(f"\npredicted against measured: {options.out}")
    if options.json:
        found = figures(predicted, skipped)
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
    """Predictions of the rows that are not set aside, table by table."""
    ours = {row.place: predict_layout(row.layout) for row in rows}
    cold = cold_seconds([row for row in rows if row.seconds])
    found = []
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table]
        few = [row for row in own if row.place in aside]
        kept = [row for row in own if row.place not in aside]
        factors, factor_alone = adjustment(few, _seconds), adjustment(few, _seconds, rounds=0)
        timed = [row for row in kept if row.seconds]
        nulls = {row.place: seconds for row, seconds in zip(timed, null_seconds(timed), strict=True)}
        for row in kept:
            one = ours[row.place]
            seconds = one.step_time_s * factors.factor(row.layout)
            found.append(
                Predicted(
                    row,
                    seconds,
                    one.step_time_s * factor_alone.factor(row.layout),
                    cold.get(row.place, math.nan),
                    nulls.get(row.place, math.nan),
                    counted_bytes(row) / GIB,
                    one.fits,
                    factors.interval(row.layout, seconds),
                )
            )
    return found


def figures(predicted: Sequence[Predicted], skipped: Sequence[Skipped]) -> dict[str, float]:
    """The figures of all tables, and of each."""
    scores = _scores(predicted)
    timed = {table: found for table, found in scores.items() if found.rows}
    total = score(predicted)
    result = {
        "mean_error": total.mean_error,
        "mean_over_tables": mean([found.mean_error for found in timed.values()]),
        "p90_error": total.p90_error,
        "one_factor_mean_error": total.factor_error,
        "one_factor_mean_over_tables": mean([found.factor_error for found in timed.values()]),
        "one_factor_mean_regret": total.factor_regret,
        "cold_mean_error": total.cold_error,
        "cold_mean_over_tables": mean([found.cold_error for found in timed.values()]),
        "mean_regret": total.mean_regret,
        "tables_worse_than_null": sum(found.mean_error > found.null_mean_error for found in timed.values()),
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
    return result | {f"{name}_of_{table}": value for table, found in scores.items() for name, value in _few(found)}


def _seconds(layout: Layout) -> float:
    return predict_layout(layout).step_time_s


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
        "factor_error",
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
    "null": 7,
    "bias": 6,
    "cold bias": 10,
    "rank": 7,
    "regret": 8,
    "groups (ties)": 14,
    "80 %": 6,
    "memory": 8,
}


def _print(predicted: Sequence[Predicted], skipped: Sequence[Skipped], aside: Sequence[Row], every: bool) -> None:
    print(f"{'table':36}" + "".join(name.rjust(width) for name, width in _COLUMNS.items()))
    for table, found in _scores(predicted).items():
        print(_line(table, found))
    print(_line("all rows", score(predicted)))
    for name, value in figures(predicted, skipped).items():
        if "_of_" not in name:
            print(f"  {name} {value:.4g}")
    print("\nset aside to fit and to calibrate, not scored (table: lines):")
    for table in dict.fromkeys(row.table for row in aside):
        print(f"  {table}: " + " ".join(str(row.number) for row in aside if row.table == table))
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
