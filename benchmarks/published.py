"""Published measurements of other systems' training runs, predicted by paceline's cost model.

How far off, and how good is its choice?

    python benchmarks/published.py [--tables DIR] [--plot FILE] [--rows] [--json]

Of every table: rows used, rows that are not and why, the error of the step time (mean, median, 90th percentile), the
bias, Spearman's rank correlation, the error of the memory, and the *regret*: in each group of rows with equal model,
sequence, devices and global batch, the measured time of the plan that is predicted fastest / the best measured − 1.
Beside it stands the *null model*: one share of the peak, fitted to that very table, and the formula of the pipeline's
bubble.

All tables are predicted with one set of constants (`paceline/planner/cost/constants.py`) and one derating a software
stack (printed). They were found by `published_fit.py` from timings of collectives and from a tenth of vTrain's table;
deratings of other stacks from a tenth of each table. What was used to fit is set aside, printed, and not scored.
Figures: `mean_error`, `median_error`, `p90_error`, `mean_regret`, `rank_correlation`, `oom_missed`, `rows_used`, over
the discriminating tables, or over all that are there where none of them is; and `mean_error_elsewhere`, over the other
tables, of hardware and software that no constant was fitted to: the ± of plans for such machines.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from measure import environment_line
from paceline.planner.cost.estimate import estimate
from paceline.planner.cost.prediction import Prediction
from published_null import null_seconds
from published_rows import DISCRIMINATING, Row, Skipped, read, set_aside
from published_score import Predicted, Score, score
from published_stacks import STACKS

TABLES = Path(__file__).parent / "tables"
FIGURES = (
    "mean_error",
    "median_error",
    "p90_error",
    "mean_regret",
    "worst_regret",
    "rank_correlation",
    "oom_missed",
    "oom_false",
)
GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, compare, print."""
    options = _options(arguments)
    rows, skipped = read(sorted(options.tables.glob("*.csv")))
    if not rows:
        print(f"no table of runs in {options.tables} has a row that can be used", file=sys.stderr)
        return 1
    aside = set_aside(rows)
    kept = [row for row in rows if row.place not in aside]
    predicted = predict(kept)
    _print(predicted, skipped, [row for row in rows if row.place in aside], options.rows)
    main_rows = [each for each in predicted if each.row.table in DISCRIMINATING] or list(predicted)
    total = score(main_rows)
    if options.plot:
        from published_plot import write

        write(options.plot, predicted)
        print(f"\npredicted against measured: {options.plot}")
    if options.json:
        figures = {name: getattr(total, name) for name in FIGURES} | {
            "rows_used": total.rows,
            "null_mean_error": total.null_mean_error,
        }
        if others := _others(predicted):
            figures["mean_error_elsewhere"] = score(others).mean_error
        by_table = {
            f"{name}_of_{table}": value
            for table, found in _scores(predicted).items()
            for name, value in _few(found).items()
        }
        print(
            json.dumps({"figures": figures | by_table, "environment": {"machine": environment_line()}}, default=float)
        )
    return 0


def predict(rows: Sequence[Row]) -> list[Predicted]:
    """Ours, and the null model of each table."""
    null_s: dict[tuple[str, int], float] = {}
    for table in {row.table for row in rows}:
        timed = [row for row in rows if row.table == table and row.seconds]
        null_s |= {row.place: seconds for row, seconds in zip(timed, null_seconds(timed), strict=True)}
    found = []
    for row in rows:
        ours = estimate(row.layout)
        found.append(
            Predicted(row, ours.step_time_s, null_s.get(row.place, math.nan), _memory_gib(row, ours), ours.fits)
        )
    return found


def _memory_gib(row: Row, ours: Prediction) -> float:
    """As the row counts it: some count activations alone."""
    if "activation memory" in row.cells.get("notes", "").lower():
        return (ours.memory["activations"] + ours.memory.get("logits", 0.0)) / GIB
    return ours.memory_bytes / GIB


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES, help="a folder of tables (*.csv) in the same columns")
    parser.add_argument("--plot", type=Path, help="write the picture predicted against measured there (an HTML page)")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(arguments)


def _scores(predicted: Sequence[Predicted]) -> dict[str, Score]:
    tables = dict.fromkeys(each.row.table for each in predicted)
    return {table: score([each for each in predicted if each.row.table == table]) for table in tables}


def _others(predicted: Sequence[Predicted]) -> list[Predicted]:
    """Rows of hardware and software that no constant was fitted to."""
    return [each for each in predicted if each.row.table not in DISCRIMINATING]


def _few(found: Score) -> dict[str, float]:
    kept = (
        "rows",
        "mean_error",
        "p90_error",
        "bias",
        "mean_regret",
        "rank_correlation",
        "memory_median_error",
        "null_mean_error",
    )
    return {name: value for name, value in asdict(found).items() if name in kept and not math.isnan(value)}


def _print(predicted: Sequence[Predicted], skipped: Sequence[Skipped], aside: Sequence[Row], every: bool) -> None:
    scores = _scores(predicted)
    names = (
        ("mean", 7),
        ("median", 8),
        ("p90", 7),
        ("bias", 7),
        ("rank", 7),
        ("regret", 8),
        ("groups", 8),
        ("memory", 8),
    )
    print(f"{'table':32} rows" + "".join(name.rjust(width) for name, width in names) + "   null model")
    for table, found in scores.items():
        mark = "" if table in DISCRIMINATING else "  (not in the sums)"
        print(_line(table, found) + mark)
    judged = [each for each in predicted if each.row.table in DISCRIMINATING]
    if judged and len(scores) > 1:
        print(_line("the discriminating tables", score(judged)))
        print(_line("the other tables", score(_others(predicted))))
    print(_line("all tables", score(predicted)))
    _print_what_is_behind(predicted, skipped, aside)
    if every:
        for each in predicted:
            if each.row.seconds:
                print(
                    f"{each.row.table}:{each.row.number}  {each.row.seconds:10.4f} s  predicted "
                    f"{each.seconds:10.4f} s  {each.error:6.1%}"
                )


def _line(name: str, found: Score) -> str:
    ours = (
        f"{found.rows:5}{_percent(found.mean_error):>7}{_percent(found.median_error):>8}"
        f"{_percent(found.p90_error):>7}{found.bias:7.3f}"
    )
    choice = (
        f"{found.rank_correlation:7.3f}{_percent(found.mean_regret):>8}{found.groups:8}"
        f"{_percent(found.memory_median_error):>8}"
    )
    null = (
        f"   {_percent(found.null_mean_error)}, rank {found.null_rank_correlation:.3f}, regret "
        f"{_percent(found.null_mean_regret)}"
    )
    burst = f"; out of memory {found.out_of_memory}, missed {found.oom_missed}" if found.out_of_memory else ""
    false = f"; predicted not to fit but ran {found.oom_false}" if found.oom_false else ""
    return f"{name:32}{ours}{choice}{null}{burst}{false}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _print_what_is_behind(predicted: Sequence[Predicted], skipped: Sequence[Skipped], aside: Sequence[Row]) -> None:
    used = {each.row.layout.framework.name for each in predicted}
    print("\nderating of each software stack (computing takes so many times what the physics say):")
    print(
        "  "
        + ", ".join(f"{facts.stack.name} {facts.stack.derating:.2f}" for facts in STACKS if facts.stack.name in used)
    )
    if aside:
        print("\nset aside to fit, not scored (table: lines):")
    for table in dict.fromkeys(row.table for row in aside):
        print(f"  {table}: " + " ".join(str(row.number) for row in aside if row.table == table))
    if skipped:
        print("\nnot used:")
    for (table, why), count in Counter((each.table, each.why) for each in skipped).items():
        print(f"  {table}: {count} × {why}")


if __name__ == "__main__":
    sys.exit(main())
