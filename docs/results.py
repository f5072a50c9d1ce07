"""Write the pages of docs/results and the figures of the README from dated JSON.

    python docs/results.py            # or `make results`
    python docs/results.py --check    # say which files are behind, and write nothing

Each file of `docs/results/data` is one measurement. It has `title`, `method`, `command`, `date`, `commit`, `machine`,
`torch`, and numbers. `figures` are rows with a label, a value and a 95 % interval. `tables` have `columns` and rows of
cells; a cell is a text, or `[value, low, high]`. `marks` explains every mark of a table. `bold_below` prints a ratio in
bold if its whole interval is below it.

`data/pages.json` has the pages, `data/machines.json` the machines, `data/readme.json` the lines of the README.
"""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
DATA = RESULTS / "data"
README_BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
Record = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Write every generated text that has changed; with `--check`, name it instead."""
    behind = [path for path, text in generated().items() if not path.exists() or path.read_text() != text]
    for path in behind:
        if "--check" not in arguments:
            path.write_text(generated()[path])
        print(path.relative_to(ROOT))
    return 1 if behind and "--check" in arguments else 0


def generated() -> dict[Path, str]:
    """Return every generated text by its file."""
    records, machines = load_records(), load("machines")
    texts = {}
    for page in load("pages"):
        own = [record for record in records.values() if record["page"] == page["name"]]
        parts = [f"# {page['title']}", *page["text"], *(section(record, machines) for record in own)]
        texts[RESULTS / f"{page['name']}.md"] = "\n\n".join([*parts, *page.get("end", ())]) + "\n"
    readme = (ROOT / "README.md").read_text()
    lines = "\n".join(f"- {filled(line, records)}" for line in load("readme"))
    texts[ROOT / "README.md"] = README_BLOCK.sub(lambda found: f"{found[1]}{lines}\n{found[2]}", readme)
    return texts


def load(name: str) -> Any:
    """Return the content of one file of the data."""
    return json.loads((DATA / f"{name}.json").read_text(), parse_float=Decimal)  # 1.10 stays 1.10


def load_records() -> dict[str, Record]:
    """Return all measurements by name, in the order of their pages."""
    names = sorted(path.stem for path in DATA.glob("*.json") if path.stem not in ("pages", "machines", "readme"))
    found = {name: load(name) for name in names}
    return dict(sorted(found.items(), key=lambda item: (item[1]["page"], item[1]["order"])))


def section(record: Record, machines: dict[str, str]) -> str:
    """Return one measurement as a section of its page."""
    parts = [f"## {record['title']}", record["method"]]
    if record.get("figures"):
        parts.append("\n".join(f"- {figure['label']}: {number(figure)}" for figure in record["figures"].values()))
    for each in record.get("tables", ()):
        rows = [[cell(value, each.get("bold_below")) for value in row] for row in each["rows"]]
        parts.append(table(each["columns"], rows))
        marks = [f"{mark} {meaning}" for mark, meaning in each.get("marks", {}).items()]
        if each.get("bold_below"):
            marks.append(f"**Bold**: {each['bold_means']}")
        if marks:
            parts.append(" ".join(marks))
    parts += [*record.get("notes", ()), *(f"![{text}]({path})" for path, text in record.get("images", {}).items())]
    torch = f" · torch {record['torch']}" if record.get("torch") else ""
    parts.append(f"*{machines[record['machine']]}{torch} · {record['date']} · `{record['command']}`*")
    return "\n\n".join(parts)


def number(figure: Record) -> str:
    """Return a figure's value with its unit and 95 % interval."""
    unit = figure.get("unit", "")
    low_high = figure.get("interval")
    interval = f" ({plain(low_high[0])} to {plain(low_high[1])})" if low_high else ""
    return f"{plain(figure['value'])}{unit and ' ' + unit}{interval}"


def cell(value: Any, bold_below: float | None) -> str:
    """Return a cell of a table; a list is a value with its interval."""
    if not isinstance(value, list):
        return plain(value)
    shown = f"{plain(value[0])} ({plain(value[1])} to {plain(value[2])})"
    return f"**{shown}**" if bold_below is not None and value[2] < bold_below else shown


def plain(value: Any) -> str:
    """Return a number as the data writes it, with thousands separated; a text as it is."""
    if isinstance(value, bool | str) or value is None:
        return "" if value is None else str(value)
    return f"{value:,}"


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in [columns, *rows])
    return "\n".join([head, "|---" * len(columns) + "|", *body])


def filled(line: str, records: dict[str, Record]) -> str:
    """Replace each `{measurement.figure}` of a line by the figure's value."""
    return re.sub(r"\{(\w+)\.(\w+)\}", lambda found: number(records[found[1]]["figures"][found[2]]), line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
