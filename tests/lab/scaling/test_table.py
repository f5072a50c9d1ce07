"""The table on the screen.

What one learns stands first, every column is defined, and no speedup is shown where there is none.
"""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from handmade_reports import alike, report, setting
from paceline.text import on_cores
from paceline_lab.scaling.result import Report
from paceline_lab.scaling.table import WIDTH, definitions, figures, show


def screen(of: Report, columns: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=columns, force_terminal=columns is not None, color_system=None)
    show(of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_fits_100_columns_without_colour_and_says_first_what_limits_the_job() -> None:
    text = screen(report(warnings=["Other processes kept 0.35 cores busy. " * 5]))
    assert "\x1b" not in text
    tables, _, _ = text.partition("\nstrong      N cores")
    assert max(map(len, tables.splitlines())) <= WIDTH
    assert text.strip().startswith(on_cores(report().limits[0]))
    assert all(on_cores(sentence) in " ".join(text.split()) for sentence in report().limits)
    assert "warning  Other processes kept" in text


def test_no_word_or_number_of_the_tables_is_broken_at_80_columns() -> None:
    known = report(settings=[replace(setting, final_loss=0.31234) for setting in report().settings])
    tables = screen(known, 80).partition("\nstrong      N cores")[0].partition("step")[2]
    assert max(map(len, tables.splitlines())) <= 80
    words = set(screen(known, 200).split())
    assert set(tables.split()) <= words, "each stands on a wide screen, too"


def test_every_column_has_a_definition_in_one_line() -> None:
    of = report()
    text = screen(of)
    defined = dict(definitions(of))
    headers = [line for line in text.splitlines() if line.lstrip().startswith(("step", "data"))]
    columns = headers[0].replace("to target", "to_target").split() + headers[1].replace("on wire", "on_wire").split()
    assert {column.replace("_", " ") for column in columns} <= defined.keys()
    assert max(len(line) for line in defined.values()) <= WIDTH - 12


def test_the_final_loss_stands_beside_the_times_where_it_is_known() -> None:
    known = report(
        settings=[setting(n, "strong", 20 / n, 0.01, final_loss=loss) for n, loss in ((1, 0.31234), (2, None))]
    )
    table = screen(known).partition("\nWhere a step goes")[0]
    assert "loss" in table
    assert "0.3123" in table
    assert "loss" in dict(definitions(known))
    assert "loss" not in dict(definitions(report()))


def test_times_that_do_not_differ_are_shown_as_no_difference() -> None:
    text = screen(alike())
    assert "no difference" in text
    assert "×" not in text.partition("\nWhere a step goes")[0].partition("efficiency\n")[2]
    assert not any(name.startswith(("speedup", "efficiency")) for name in figures(alike()))


def test_the_figures_have_names_that_tell_the_settings_apart() -> None:
    found = figures(report())
    assert found["speedup_4_devices"] != found["speedup_4_devices_weak"]
    assert {
        "throughput_1_device",
        "step_time_s_2_devices_weak",
        "efficiency_2_devices",
        "time_to_target_s_4_devices",
    } <= found.keys()
    assert "speedup_1_device" not in found


def test_on_accelerators_the_memory_is_theirs_and_unknown_where_torch_does_not_count_it() -> None:
    of = report(kind="mps")  # its ranks have host memory only
    assert not of.on_cores
    text = screen(of, 200)
    assert "? if torch does not report it" in text
    rows = [line for line in text.partition("Where a step goes")[2].splitlines() if " device" in line][:5]
    assert [row.split()[-1] for row in rows] == ["?"] * 5
    assert report(kind="cpu").on_cores
