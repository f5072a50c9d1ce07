"""Pictures of the documentation, drawn from measured data: `make pictures`.

    python docs/pictures.py [NAME ...] [--measure]

Charts are SVG files. Pages of paceline are photographed by headless Chromium. Data is in `docs/images/data` and
`docs/results/data`. `--measure` makes the benchmark of `report` and the run of `trace` again; the data of `shares` is
from a run of `benchmarks/balance.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from paceline.report.charts import (
    BLUE,
    SERIES,
    VERMILLION,
    Axis,
    Bars,
    Figure,
    Line,
    Mark,
    Note,
    Panel,
    Points,
    lines,
    panelled,
)
from paceline.report.figures import PARTS
from paceline.report.page import write_picture
from paceline_lab.report.bench_view import write_bench_page
from paceline_lab.scaling.result import Report

DOCS = Path(__file__).parent
IMAGES, DATA, RESULTS = DOCS / "images", DOCS / "images" / "data", DOCS / "results" / "data"
PACELINE = Path(sys.executable).with_name("paceline")
WIDTH = 860
_STEPS_OF_TRACE = 3
_LEAST_MS = 0.05  # parts that a picture shows


def main() -> None:
    """Draw the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} (default: all)")
    parser.add_argument("--measure", action="store_true", help="make the data again")
    arguments = parser.parse_args()
    for name in arguments.names or PICTURES:
        if arguments.measure and name in MEASURED:
            (DATA / f"{name}.json").write_text(json.dumps(MEASURED[name](), separators=(",", ":")) + "\n")
        file = PICTURES[name]()
        file.chmod(0o644)
        print(f"{file.relative_to(DOCS.parent)}  {file.stat().st_size / 1000:.0f} kB")


# Charts


def published() -> Path:
    """The error of each table of published runs."""
    columns, rows = _table("published")
    held_out, corrected = columns.index("held out"), columns.index("corrected")
    mean, tables = [row for row in rows if row[0].startswith("mean over the")], rows[:-2]
    shown = [*mean, *sorted(tables, key=lambda row: _number(row[corrected]))]
    places = list(range(len(shown)))
    names = [f"{row[0]} ({row[1]})" if row[1] else row[0] for row in shown]
    figure = Figure(
        Axis("mean error of the predicted step time, %", span=(0, 30)),
        Axis(span=(len(shown) - 0.4, -0.6), ticks=list(zip(places, names, strict=True)), grid=False),
        height=50 + 24 * len(shown),
    )
    marks = (
        ("held out", held_out, VERMILLION, "ring"),
        ("corrected by a tenth of the table", corrected, BLUE, "circle"),
    )
    for name, column, colour, symbol in marks:
        errors = [_number(row[column]) for row in shown]
        figure.traces.append(Points(name, errors, places, colour, width=0, marks=9, symbol=symbol))
    title = "Mean error of predicted step times, for each table of published runs (in parentheses: its rows)"
    return write_picture(IMAGES / "published.svg", figure, WIDTH, title)


def slow_network() -> Path:
    """Step time and time to a loss of each rule on links of 25 Mbit/s."""
    columns, rows = _table("slow_network")
    names = [row[0].replace("`", "").removeprefix("compress=").split(",")[0] for row in rows]

    def values(column: str) -> list[float | None]:
        return [_amount(row[columns.index(column)]) for row in rows]

    panels = [
        Panel("seconds of a step", values("step")),
        Panel(
            "seconds to the loss of 150 synchronous steps (no bar: not reached, or not measured)",
            values("time to the loss"),
        ),
    ]
    figure = panelled(names, panels)
    for panel in figure.panels:  # one colour: the names tell the rules apart
        for trace in panel.traces:
            trace.colour = BLUE
    return write_picture(IMAGES / "slow_network.svg", figure, 620, "Sync rules on links of 25 Mbit/s")


def shares() -> Path:
    """Share of the batch and throughput while a host is slow."""
    data = _data("shares")
    series = [
        Line(f"rank {rank}", data["steps"], share, SERIES[rank % len(SERIES)])
        for rank, share in enumerate(data["shares"])
    ]
    full_speed = [Mark(data["released"], "full speed again")]
    figure = lines(series, "step", "share of the batch, %", marks=full_speed)
    figure.height = 240
    speed = lines(
        [Line("throughput", data["steps"], data["samples_per_s"])], "step", "samples per second", marks=full_speed
    )
    speed.height = 200
    figure.y.span = (0, 35)
    title = "Shares of the batch, and throughput, while the host of rank 3 is slow"
    return write_picture(IMAGES / "shares.svg", Figure(panels=[figure, speed], traces=figure.traces), 760, title)


def trace() -> Path:
    """Parts of some steps on two ranks, and the critical path."""
    data = _data("trace")
    rows = [*data["ranks"], "critical path"]
    figure = Figure(
        Axis("milliseconds", span=(0, max(span["from_ms"] + span["ms"] for span in data["spans"]))),
        Axis(span=(len(rows) - 0.5, -0.9), ticks=list(enumerate(rows)), grid=False),
        height=60 + 46 * len(rows),
    )
    for part, about in PARTS.items():
        spans = [span for span in data["spans"] if span["part"] == part and span["ms"] >= _LEAST_MS]
        if spans:
            figure.traces.append(
                Bars(
                    about.name,
                    [span["ms"] for span in spans],
                    [span["row"] for span in spans],
                    about.colour,
                    starts=[span["from_ms"] for span in spans],
                    thick=0.55,
                )
            )
    figure.notes = [Note(f"steps {data['first']} to {data['first'] + _STEPS_OF_TRACE - 1}", -0.65)]
    return write_picture(IMAGES / "trace.svg", figure, WIDTH, "Timeline of two ranks and the critical path")


# Pages


def report() -> Path:
    """The top of the page of the demo's benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "report.json").write_text(json.dumps(_data("report")))
        page = write_bench_page(Report.load(Path(folder) / "report.json"), Path(folder))
        return _photograph(page, IMAGES / "report.png", width=1120, height=975)


def plan() -> Path:
    """The top of the page of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        job = DOCS.parent / "examples" / "plan" / "llama_70b.yaml"
        options = ["--cluster", "16x8xH100-SXM", "--no-measure", "--out", str(page)]
        subprocess.run([PACELINE, "plan", str(job), *options], check=True, stdout=subprocess.DEVNULL)
        return _photograph(page, IMAGES / "plan.png", width=1120, height=1055)


def contact_sheet() -> Path:
    """The contact sheet of a job's images."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        options = ["--samples", "12", "--page", str(page)]
        job = DOCS.parent / "examples" / "digits.yaml"
        subprocess.run([PACELINE, "data", "show", str(job), *options], check=True, stdout=subprocess.DEVNULL)
        return _photograph(page, IMAGES / "contact_sheet.png", width=900, height=620)


def _photograph(page: Path, file: Path, *, width: int, height: int) -> Path:
    """Photograph the top of a page, with few colours."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("a picture of a page needs Chromium on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        size = [f"--window-size={width},{height}", f"--screenshot={raw}", f"--user-data-dir={folder}/profile"]
        quiet = [
            "--headless=new",
            "--no-sandbox",
            "--hide-scrollbars",
            "--disable-gpu",
            "--force-prefers-reduced-motion",
        ]
        subprocess.run([chromium, *quiet, *size, page.as_uri()], check=True, capture_output=True)
        image = Image.open(raw).convert("RGB").quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        image.save(file, optimize=True)
    return file


# Data


def _table(name: str) -> tuple[list[str], list[list[str]]]:
    [table, *_] = json.loads((RESULTS / f"{name}.json").read_text())["tables"]
    return table["columns"], table["rows"]


def _data(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def _number(text: str) -> float:
    return float(text.split()[0])


def _amount(text: str) -> float | None:
    """MB or seconds of a cell, without its marks; None if nothing was measured."""
    value, _, unit = text.rstrip("†*").partition(" ")
    try:
        return float(value) * (60 if unit == "min" else 1)
    except ValueError:
        return None


def measured_report() -> Any:
    """The benchmark of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        job = DOCS.parent / "examples" / "digits.yaml"
        out = Path(folder) / "bench"
        subprocess.run([PACELINE, "bench", "scaling", str(job), "--repeat", "5", "--out", str(out)], check=True)
        return json.loads((out / "report.json").read_text()) | {
            "command": "paceline bench scaling examples/digits.yaml"
        }


def measured_trace() -> Any:
    """The last steps of a run whose rank 1 has three quarters of the batch."""
    job = {
        "name": "trace",
        "model": {"zoo": "mlp", "args": {"hidden": 512}},
        "data": {"kind": "synthetic", "samples": 4096, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch": 512,
        "partition": {"weights": [1, 3]},
        "stop": {"steps": 40},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(json.dumps(job))
        options = ["--plan", "dp=2 threads=1 balance=off"]
        run = folder / "run"
        train: list[str | Path] = [PACELINE, "train", str(folder / "job.yaml"), *options, "--run", str(run)]
        subprocess.run(train, check=True)
        subprocess.run([PACELINE, "trace", str(run), "--out", str(folder / "trace.json")], check=True)
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return _last_steps(events)


def _last_steps(events: list[dict[str, Any]]) -> Any:
    """The parts of the last steps of a trace, and its critical path, in milliseconds from their begin."""
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    last = max(event["args"]["step"] for event in slices if event["cat"] == "step")
    steps = range(last - _STEPS_OF_TRACE + 1, last + 1)
    inside = [event for event in slices if event["cat"] == "step" and event["args"]["step"] in steps]
    begin, end = min(e["ts"] for e in inside), max(e["ts"] + e["dur"] for e in inside)
    ranks = sorted({event["pid"] for event in inside})
    parts = {about.name: part for part, about in PARTS.items()}
    spans = []
    for event in slices:
        on_path = event["cat"] == "critical path"
        part = parts.get(event["name"]) or next((p for n, p in parts.items() if event["name"].startswith(n)), None)
        if part is None or not begin <= event["ts"] < end or not (on_path or event["cat"] == "part"):
            continue
        row = len(ranks) if on_path else ranks.index(event["pid"])
        span = {"row": row, "part": part, "from_ms": (event["ts"] - begin) / 1e3, "ms": event["dur"] / 1e3}
        spans.append({key: round(value, 3) if isinstance(value, float) else value for key, value in span.items()})
    return {"first": steps[0], "ranks": [named[rank].split(" (")[0] for rank in ranks], "spans": spans}


PICTURES: dict[str, Callable[[], Path]] = {
    "report": report,
    "plan": plan,
    "contact_sheet": contact_sheet,
    "published": published,
    "slow_network": slow_network,
    "shares": shares,
    "trace": trace,
}
MEASURED: dict[str, Callable[[], Any]] = {"report": measured_report, "trace": measured_trace}

if __name__ == "__main__":
    main()
