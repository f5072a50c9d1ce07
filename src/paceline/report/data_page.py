"""Page of `paceline data show`: what the model gets, with a contact sheet of images."""

from __future__ import annotations

import base64
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.discover import environment
from paceline.report.charts import BLUE, Axis, Bars, Figure
from paceline.report.figures import Definition
from paceline.report.page import Chart, write_page
from paceline.run.data_view import MOST_CLASSES, DataView, Picture, SampleView, SetView
from paceline.run.token_view import Reading, histogram
from paceline.text import printable
from paceline.units import count

_CHARACTERS = 6000  # characters of a sample's text that are shown
_ROW_PX = 22  # height of a bar of a chart
_AXIS_PX = 42
DEFINITIONS: Mapping[str, Definition] = {
    "uncounted_label": Definition(
        "labels that do not count", "Labels of −100, as in PyTorch’s cross-entropy: these positions have no loss."
    ),
    "document": Definition("document", "Tokens from one position 0 in `position_ids` to the next."),
    "padding": Definition(
        "padding",
        "Positions without a token: 0 in `attention_mask`, or else the tokenizer’s padding token at the end of a "
        "sample where no label counts.",
    ),
}


def write_data_page(view: DataView, command: str, file: Path) -> Path:
    """Write the page about a job's data.

    Raises:
        RunError: the file cannot be written.
    """
    values = {
        "job": view.job.name,
        "kind": view.job.data.kind,
        "order": view.order,
        "synthetic": view.synthetic,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "verdict": _verdict(view),
        "notes": [printable(note) for note in view.notes],
        "sets": view.sets,
        "columns": [
            (found.name, printable(column.name), column) for found in view.sets for column in found.columns.values()
        ],
        "classes": _classes(view),
        "tokens": [(found, list(_histograms(found))) for found in view.sets if found.tokens.positions],
        "pictures": [_shown(picture, view) for picture in view.pictures],
        "stretched": view.stretched,
        "samples": [_sample(sample, view) for sample in view.samples],
    }
    facts = {"command": command}
    return write_page(
        file, "data.html.j2", facts=facts, environment=environment(), definitions=DEFINITIONS, view=values
    )


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an image as PNG (ISO/IEC 15948), because Pillow is an optional package.

    Args:
        pixels: bytes of shape (height, width, channels), with 1 or 3 channels.
    """
    height, width, channels = pixels.shape

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    # each row begins with the number of its filter; 0 means that the row is stored unchanged
    lines = np.pad(pixels.reshape(height, width * channels), ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes())), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _verdict(view: DataView) -> str:
    train = view.sets[0]
    samples = "A stream of samples" if train.samples is None else count(train.samples, "training sample")
    if train.classes:
        return f"{samples} in {count(len(train.classes), 'class', 'classes')}"
    if len(lengths := train.tokens.lengths):
        return f"{samples} of {'up to ' if lengths.min() < lengths.max() else ''}{int(lengths.max()):,} tokens"
    return samples


def _classes(view: DataView) -> tuple[Chart, str] | None:
    """Return a chart of the classes with its caption."""
    train, *others = view.sets
    if not train.classes:
        return None
    names, numbers, words = [], [], []
    for label, number in train.listed_classes():
        names.append(_short(printable(view.class_name(label))))
        numbers.append(number)
        beside = "".join(f", {found.name} {found.classes[label]:,}" for found in others)
        words.append(f"{number:,}{beside}")
    some = " The most frequent and the rarest are shown." if len(train.classes) > MOST_CLASSES else ""
    return _bars("classes", "samples", names, numbers, words), f"Counted in {train.classes_in}.{some}"


def _histograms(found: SetView) -> Iterator[tuple[str, Chart]]:
    for name, lengths in (("samples", found.tokens.lengths), ("documents", found.tokens.documents)):
        if bins := histogram(lengths):
            words = [f"{one.number:,}" for one in bins]
            chart = _bars(
                f"{found.name.replace(' ', '-')}-{name}",
                name,
                [f"{one.title} tokens" for one in bins],
                [one.number for one in bins],
                words,
            )
            yield f"Lengths of {name}", chart


def _bars(name: str, unit: str, names: Sequence[str], numbers: Sequence[int], words: Sequence[str]) -> Chart:
    places = [place + 0.5 for place in range(len(names))]
    figure = Figure(
        Axis(unit, span=(0, 1.35 * max(numbers))),
        Axis(span=(len(names), 0), ticks=list(zip(places, names, strict=True)), grid=False),
        height=_ROW_PX * len(names) + _AXIS_PX,
        traces=[Bars(unit, numbers, places, BLUE, words=words)],
        legend=False,
    )
    return Chart(name, figure, "; ".join(f"{n}: {number:,}" for n, number in zip(names, numbers, strict=True)))


def _shown(picture: Picture, view: DataView) -> dict[str, str]:
    image = base64.b64encode(png(picture.pixels)).decode()
    name = "" if picture.label is None else printable(view.class_name(picture.label))
    number = "" if picture.index is None else f"sample {picture.index}"
    return {"image": f"data:image/png;base64,{image}", "name": name, "number": number}


def _sample(sample: SampleView, view: DataView) -> dict[str, Any]:
    return {
        "title": printable(view.about(sample)),
        "values": [(printable(value.name), value) for value in sample.values],
        "documents": [] if sample.reading is None else _documents(sample.reading),
        "target": "" if sample.reading is None else printable(sample.reading.target[:_CHARACTERS]),
        "left_out": 0 if sample.reading is None else max(0, len(sample.reading.text) - _CHARACTERS),
    }


def _documents(reading: Reading) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return the documents of a sample: a title, and texts with whether their labels count."""
    found: list[tuple[str, list[tuple[str, bool]]]] = []
    left, document = _CHARACTERS, 0
    for stretch in reading.stretches:
        if stretch.document != document:
            document = stretch.document
            several = len(reading.documents) > 1
            length = count(reading.documents[document - 1], "token") if several else ""
            found.append((f"document {document} · {length}" if several else "", []))
        found[-1][1].append((printable(stretch.text[:left]), stretch.counted))
        left -= len(stretch.text)
        if left <= 0:
            break
    return found


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"
