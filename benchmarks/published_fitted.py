"""The fitted values: what was assumed, what the fit found, and on which rows it rests.

    python benchmarks/published_fitted.py [--tables DIR]

A value rests on a set-aside row if the row's time changes by more than half a percent when the value changes by a
tenth. Then, for the spreads and lengths by which measured runs that are alike correct predictions
(`planning/shortlist.py`): the mean error of set-aside rows, each predicted by the others of its table, with a half of
the value, it, and twice it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.planning import shortlist as alike
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.machines import adjustment
from paceline.planning.tables.layouts import Row
from published_fit import free_of, in_use, predicted
from published_rows import TABLES, read, set_aside

# of a value, how much it is changed; of a row's time, what counts
CHANGED, COUNTS = 1.1, 0.005


def main() -> None:
    """Change each value, and print a line of a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES)
    rows, _ = read(sorted(parser.parse_args().tables.glob("*.csv")))
    aside = set_aside(rows)
    kept = [row for row in rows if row.place in aside and row.seconds]
    values = in_use()
    before = [seconds for _, seconds in predicted(kept, values)]
    print("| value | assumed | fitted | rests on set-aside rows |\n|---|---|---|---|")
    for free in free_of(kept):
        if free.name in values:
            after = predicted(kept, values | {free.name: values[free.name] * CHANGED})
            moved = Counter(
                row.table for (row, late), early in zip(after, before, strict=True) if abs(late / early - 1) > COUNTS
            )
            told = ", ".join(f"{count} of {table}" for table, count in moved.most_common(3))
            more = (
                f" and {sum(moved.values()) - sum(dict(moved.most_common(3)).values())} more" if len(moved) > 3 else ""
            )
            print(f"| `{free.name}` | {free.assumed:.3g} | {values[free.name]:.3g} | {told + more or 'none'} |")
    predicted([], values)
    print("\n| beside factors | half | as it is | twice |\n|---|---|---|---|")
    for name in ("COMMON", "OWN", "SHAPES", "WORK", "OTHERS"):
        value = getattr(alike, name)
        tried = []
        for times in (0.5, 1.0, 2.0):
            setattr(alike, name, value * times)
            tried.append(f"{left_out(kept):.2%}")
        setattr(alike, name, value)
        print(f"| `{name}` = {value:g} | {' | '.join(tried)} |")


def left_out(rows: Sequence[Row]) -> float:
    """Mean error of rows, each predicted by the others of its table."""
    errors: list[float] = []
    for table in dict.fromkeys(row.table for row in rows):
        found = adjustment(
            [row for row in rows if row.table == table], lambda layout: predict_layout(layout).step_time_s
        )
        errors += np.abs(np.expm1(found.errors)).tolist()
    return float(np.mean(errors))


if __name__ == "__main__":
    main()
