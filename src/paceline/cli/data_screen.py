"""Screen of `paceline data show`: sets, tensors, classes, tokens, and the first samples."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from paceline.cli.plan_screen import fitted
from paceline.run.data_view import MOST_CLASSES, DataView, SetView
from paceline.run.token_view import Reading, histogram
from paceline.units import count, percent

_BAR = 24  # characters of a full bar
_EIGHTHS = ("", *"▏▎▍▌▋▊▉")
_CHARACTERS = 700  # largest number of characters of a sample's text
_MARGIN = "   │ "
_QUIET, _LOUD, _MARK = "dim", "bold red", "cyan"
# tensors that are shown as the text of a sample
_READ = ("input", "input_ids", "labels", "target", "position_ids", "attention_mask")


def show_data(view: DataView, console: Console) -> None:
    """Show what the model gets from the data of a job."""
    fitted(console)
    about = f" of {view.job.name} · kind: {view.job.data.kind} · {view.order}"
    console.print(Text.assemble(("paceline data", "bold"), about))
    if view.synthetic:
        console.print("This data is synthetic.", style="yellow")
    _sets(view.sets, console)
    _columns(view.sets, console)
    _classes(view, console)
    for found in view.sets:
        _tokens(found, console, histograms=found is view.sets[0])
    _samples(view, console)
    if view.notes:
        console.print()
    for note in view.notes:
        console.print(Text(f"note  {note}", style="yellow"))


def _sets(sets: Sequence[SetView], console: Console) -> None:
    table = _table("set", "samples", "batches", "statistics are of", right=(1, 2))
    for found in sets:
        sizes = ("unknown" if number is None else f"{number:,}" for number in (found.samples, found.batches))
        table.add_row(found.name, *sizes, found.statistics_of)
    console.print()
    console.print(table)


def _columns(sets: Sequence[SetView], console: Console) -> None:
    floats = any("float" in column.dtype for found in sets for column in found.columns.values())
    titles = ("set", "tensor", "type", "sample shape", "min", "max", *(("mean", "NaN", "Inf") if floats else ()))
    table = _table(*titles, right=range(4, 9))
    for found in sets:
        for place, column in enumerate(found.columns.values()):
            low, mean, high = column.statistics
            bad = (Text(f"{number:,}", _LOUD if number else _QUIET) for number in (column.nan, column.inf))
            cells: tuple[str | Text, ...] = (mean, *bad) if "float" in column.dtype else ()
            title = "" if place else found.name
            table.add_row(title, Text(column.name), column.dtype, column.shape, low, high, *cells)
    console.print()
    console.print(table)


def _classes(view: DataView, console: Console) -> None:
    train, *others = view.sets
    if not train.classes:
        return
    listed = train.listed_classes()
    table = _table("class", "", "train", "", *(found.name for found in others), right=range(2, 6))
    most = max(number for _, number in listed)
    for label, number in listed:
        name = view.class_name(label)
        title = f"{label} {name}" if name != str(label) else name
        share = str(percent(number / train.classes_of))
        table.add_row(
            Text(title), _bar(number / most), f"{number:,}", share, *(f"{found.classes[label]:,}" for found in others)
        )
    some = "; the most frequent and the rarest" if len(train.classes) > MOST_CLASSES else ""
    _head("Classes", f"{count(len(train.classes), 'class', 'classes')} in {train.classes_in}{some}", console)
    console.print(table)


def _tokens(found: SetView, console: Console, *, histograms: bool) -> None:
    tokens = found.tokens
    if not tokens.positions:
        return
    _head(f"Tokens of {found.name}", found.statistics_of, console)
    for name, text in tokens.facts:
        console.print(Text.assemble((f"{name:<11}", _QUIET), text))
    if not histograms:
        return
    for name, lengths in (("samples", tokens.lengths), ("documents", tokens.documents)):
        if bins := histogram(lengths):
            table = _table("tokens", "", name, right=(0, 2))
            most = max(one.number for one in bins)
            for one in bins:
                table.add_row(one.title, _bar(one.number / most), f"{one.number:,}")
            console.print()
            console.print(table)


def _samples(view: DataView, console: Console) -> None:
    how_many = "First sample" if len(view.samples) == 1 else f"First {len(view.samples):,} samples"
    _head(how_many, "of epoch 0, in the order of training", console)
    coloured = console.color_system is not None
    if any(sample.reading is not None and sample.reading.is_masked for sample in view.samples):
        how = "Dim text" if coloured else "Text in ⟦ ⟧"
        console.print(Text(f"{how} has labels that do not count in the loss.", _QUIET))
    for number, sample in enumerate(view.samples, 1):
        if number > 1 and sample.reading is not None:
            console.print()
        console.print(Text.assemble((f"{number}", "bold"), f"  {view.about(sample)}"))
        for value in sample.values:
            if sample.reading is not None and len(value.shape) == 1 and value.name in _READ:
                continue
            shape = " × ".join(map(str, value.shape))
            about = " ".join(filter(None, (value.name, value.dtype, shape)))
            console.print(Text(f"   {about}: {value.values}", _QUIET))
        if sample.reading is not None:
            # the margin makes blank lines and leading spaces visible
            for line in _text(sample.reading, coloured=coloured).wrap(console, console.width - len(_MARGIN)):
                console.print(Text.assemble((_MARGIN, _QUIET), line))


def _text(reading: Reading, *, coloured: bool) -> Text:
    text, left, document = Text(), _CHARACTERS, 0
    for stretch in reading.stretches:
        if stretch.document != document and len(reading.documents) > 1:
            document = stretch.document
            line_end = "\n" if text.plain and not text.plain.endswith("\n") else ""
            length = count(reading.documents[document - 1], "token")
            text.append(f"{line_end}── document {document} · {length}\n", _MARK)
        shown = stretch.text[:left]
        if stretch.counted:
            text.append(shown)
        else:
            text.append(shown if coloured else f"⟦{shown}⟧", _QUIET)
        left -= len(shown)
        if left <= 0:
            break
    if (left_out := len(reading.text) - _CHARACTERS) > 0:
        text.append(f" … and {left_out:,} more characters", _MARK)
    if reading.target:
        text.append("\ntarget: ", _MARK).append(reading.target[:_CHARACTERS])
    return text


def _bar(share: float) -> Text:
    eighths = max(1, round(share * _BAR * 8)) if share else 0
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8], style="blue")


def _head(title: str, about: str, console: Console) -> None:
    console.print()
    console.print(Rule(Text.assemble((title, "bold"), f" {about}"), align="left", style=_QUIET))


def _table(*titles: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_QUIET, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number in right else "left", overflow="fold")
    return table
