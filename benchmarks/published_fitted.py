"""The fitted values: what was assumed, what the fit found, and on which rows it rests.

    python benchmarks/published_fitted.py [--tables DIR]

A value rests on a set-aside row if the row's time changes by more than half a percent when the value changes by a
tenth.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

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


if __name__ == "__main__":
    main()
