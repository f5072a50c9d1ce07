"""A report as tables on the screen for people, and named numbers for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from paceline.engine.meter import PARTS
from paceline.run.record.run import WARM_UP_STEPS
from paceline.stats import LEAST_REPEATS, Interval
from paceline.units import count, joules, on_cores, percent, seconds, size
from paceline_lab.scaling.result import AUTO, MeasuredSetting, Report
from paceline_lab.scaling.settings import DEFAULT_STEPS
from paceline_lab.scaling.summary import FINAL_STEPS

WIDTH = 100
_BAR = 14  # characters
_NEGLIGIBLE = 0.005  # of a step
_PART_NAMES = {part: "exposed" if part == "comm" else part for part in PARTS}
_DEFINITIONS_OF_PARTS = {
    "data": "waiting for the next batch.",
    "compute": "forward and backward pass, timed before communication.",
    "bubble": "waiting for the neighbours in a pipeline.",
    "exposed": "communication that no compute hides, without the wait for slower ranks.",
    "imbalance": "waiting for the slowest rank.",
    "optimizer": "clipping and the update of the weights.",
    "checkpoint": "waiting for a checkpoint.",
}


def show(report: Report, console: Console) -> None:
    """Print a report: findings, figures, step breakdown, caveats, definitions, and circumstances."""
    report = worded(report)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for i, sentence in enumerate(("", *report.limits, "")):
        console.print(Text(sentence, style="bold" if i == 1 else ""))
    _print(console, _results(report), _results(report, narrow=True))
    if any(setting.ranks for setting in report.settings):
        console.print(Text("\nWhere a step goes: ms, in the mean over the ranks", style="bold"))
        _print(console, _breakdown(report))
    console.print()
    for warning in report.warnings:
        console.print(Text(f"warning  {warning}\n", style="yellow"))
    for name, definition in definitions(report):
        definition = on_cores(definition) if report.on_cores else definition
        console.print(Text(f"{name:<12}{definition}", style="dim"), soft_wrap=True)
    console.print()
    for name, fact in _circumstances(report):
        console.print(Text(f"{name:<9}{fact}"), soft_wrap=True)


def worded(report: Report) -> Report:
    """The report in words for people: on a machine without GPUs, devices are called cores."""
    if not report.on_cores:
        return report
    settings = [replace(s, label=on_cores(s.label)) for s in report.settings]
    return replace(
        report,
        settings=settings,
        limits=list(map(on_cores, report.limits)),
        warnings=list(map(on_cores, report.warnings)),
    )


def figures(report: Report) -> dict[str, float]:
    """The numbers by name, for machines: `throughput_2_devices`, `speedup_2_devices_weak`, …

    A speedup is included only if there is one.
    """
    found: dict[str, float] = {}
    for setting in report.settings:
        label = "auto" if setting.label.startswith(AUTO) else setting.label
        name = label.replace(" ", "_") + ("_weak" if setting.scaling == "weak" else "")
        found[f"step_time_s_{name}"] = setting.step_time_s.middle
        found[f"throughput_{name}"] = setting.throughput.middle
        optional = {"training_time_s": setting.training_time_s, "time_to_target_s": setting.time_to_target_s}
        if setting.is_speedup:
            optional |= {"speedup": setting.speedup, "efficiency": setting.efficiency}
        found |= {f"{what}_{name}": value.middle for what, value in optional.items() if value is not None}
    return found


def definitions(report: Report) -> Iterator[tuple[str, str]]:
    """Definitions of the tables' columns and rows, a line each."""
    batch = report.settings[0].global_batch
    yield "strong", f"N devices share the global batch of {batch}."
    if any(s.scaling == "weak" for s in report.settings):
        steps = f", over {DEFAULT_STEPS} steps" if report.target else ""
        yield "weak", f"N devices have {batch} samples each, at the same learning rate: speed only{steps}."
    yield "step", f"median step time without the first {WARM_UP_STEPS}; median of the runs (95 % interval)."
    yield "samples/s", "global batch / median step time."
    if any(s.time_to_target_s for s in report.settings):
        yield "to target", "from the first step to the target, evaluations and checkpoints included."
    elif any(s.training_time_s for s in report.settings):
        yield "training", "from the first step to the stop rule, evaluations and checkpoints included."
    if any(s.final_loss is not None for s in report.settings):
        yield "loss", f"training loss, mean of the last {FINAL_STEPS} steps; median of the runs."
    whole = any(s.training_time_s for s in report.settings)
    yield (
        "speedup",
        f"{'training' if whole else 'step'} time of 1 device / that of N, in the same round; weak: per sample.",
    )
    yield "efficiency", "speedup / N; 100 % is ideal."
    yield from ((name, _DEFINITIONS_OF_PARTS[name]) for name in _parts(report).values())
    yield "on wire", "bytes that a rank sends to other replicas in a step; ? where runs are too short."
    if report.on_cores:
        yield "memory", "largest resident memory of a rank, shared pages by their share."
    else:
        yield "memory", "most that a rank had allocated on its accelerator; ? where torch does not count it."
    if any(s.energy_joules is not None for s in report.settings):
        yield "energy", "joules a step, of all that the processor packages and GPUs did meanwhile."
    else:
        yield "energy", "not available: this machine shows no counter (RAPL, NVML)."


def _print(console: Console, *forms: Table) -> None:
    """Print the first form of a table that fits the terminal.

    If none does, the last one has narrow gaps. Blanks at the ends of lines are left out.
    """
    room = console.options.update(width=10 * WIDTH)
    fitting = (form for form in forms if Measurement.get(console, room, form).maximum <= console.width)
    if (table := next(fitting, None)) is None:
        table = forms[-1]
        table.padding = (0, 1, 0, 0)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)


def _parts(report: Report) -> dict[str, str]:
    """Names of the parts that are no negligible share of a rank's step."""
    steps = [rank.parts_s for setting in report.settings for rank in setting.ranks]
    return {
        part: name
        for part, name in _PART_NAMES.items()
        if any(parts_s.get(part, 0.0) > _NEGLIGIBLE * sum(parts_s.values()) for parts_s in steps)
    }


def _results(report: Report, *, narrow: bool = False) -> Table:
    timed = any(s.training_time_s for s in report.settings)
    whole = "to target" if any(s.time_to_target_s for s in report.settings) else "training"
    losses = any(s.final_loss is not None for s in report.settings)
    columns = [*([whole] if timed else []), *(["loss"] if losses else []), "speedup", "efficiency"]
    table = _table("", "", "step", "samples/s", *columns)
    before = None
    for setting in report.settings:
        table.add_row(
            "" if setting.scaling == before else setting.scaling,
            setting.label,
            *_result(setting, timed=timed, losses=losses, before_interval="\n" if narrow else " "),
        )
        before = setting.scaling
    return table


def _result(setting: MeasuredSetting, *, timed: bool, losses: bool, before_interval: str) -> list[str | Text]:
    def time(of: Interval) -> str:
        return _time(of, len(setting.runs), before_interval)

    row: list[str | Text] = [time(setting.step_time_s), f"{setting.throughput.middle:,.0f}"]
    if timed:
        whole = setting.time_to_target_s or setting.training_time_s
        row.append(time(whole) if whole else "")
    if losses:
        row.append("" if setting.final_loss is None else f"{setting.final_loss:.4g}")
    if setting.speedup is None or setting.efficiency is None:
        return [*row, "1" if setting.devices == 1 else "?", ""]
    if not setting.is_speedup:
        return [*row, f"no{before_interval}difference", ""]
    style = "green" if setting.speedup.middle > 1 else "red"
    interval = f"({setting.speedup.low:.2f}–{setting.speedup.high:.2f})"
    speedup = f"{setting.speedup.middle:.2f}×{before_interval}{interval}"
    efficiency = f"{percent(setting.efficiency.middle, 0):>5}" if timed else _bar(setting.efficiency.middle)
    return [*row, Text(speedup, style=style), Text(efficiency, style=style)]


def _breakdown(report: Report) -> Table:
    energy = any(s.energy_joules is not None for s in report.settings)
    shown, own = _parts(report), "memory_bytes" if report.on_cores else "gpu_memory_bytes"
    table = _table("", "", *shown.values(), "on wire", "memory", *(["energy"] if energy else []))
    before = None
    for setting in (s for s in report.settings if s.ranks):
        parts = [fmean(rank.parts_s.get(part, 0.0) for rank in setting.ranks) * 1e3 for part in shown]
        wire, memory = (
            [rank.figures[name] for rank in setting.ranks if name in rank.figures] for name in ("wire_bytes", own)
        )
        row = [
            *(_milliseconds(part, sum(parts)) for part in parts),
            *(str(size(max(known))) if known else "?" for known in (wire, memory)),
        ]
        if energy:
            row.append("?" if setting.energy_joules is None else str(joules(setting.energy_joules)))
        table.add_row("" if setting.scaling == before else setting.scaling, setting.label, *row)
        before = setting.scaling
    return table


def _circumstances(report: Report) -> Iterator[tuple[str, str]]:
    """Facts on how and where the benchmark was measured."""
    each = f"{report.steps} steps" if report.steps else f"training to {report.target}"
    synthetic = ", on synthetic data" if report.synthetic else ""
    yield (
        "measured",
        f"{report.job}{synthetic}: {count(report.repeats, 'run')} of {each} per setting, interleaved, {report.created}",
    )
    plans = {s.plan.replace(f"dp={s.devices}", "dp=N") for s in report.settings if s.fixed and s.devices > 1}
    layout = " · ".join(sorted(plans) or [s.plan for s in report.settings[:1]])
    yield "layout", on_cores(layout) if report.on_cores else layout
    if (chosen := report.of_auto) is not None:
        where = f'the row "{chosen.label}"' if chosen.fixed else "a row of its own"
        yield "auto", f"{chosen.plan}, which `paceline train` chooses, is {where}"
    yield "machine", f"{report.cluster}; Python {report.environment['python']}, torch {report.environment['torch']}"
    yield "command", report.command


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i < 2 or column in ("speedup", "efficiency") else "right", overflow="fold"
        )
    return table


def _time(interval: Interval, repeats: int, before_interval: str) -> str:
    """`42.6 ms (14.9–47.3)`; without the interval where too few repeats give none."""
    shown = seconds(interval)
    if shown.interval is None or interval.low == interval.high or repeats < LEAST_REPEATS:
        return str(shown)
    return f"{shown}{before_interval}({shown.interval.replace(' to ', '–')})"


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR)
    return "█" * full + "░" * (_BAR - full) + f" {percent(share, 0):>5}"


def _milliseconds(part_ms: float, step_ms: float) -> str:
    digits = 2 if step_ms < 10 else 1 if step_ms < 100 else 0
    return f"{part_ms:.{digits}f}" if part_ms >= 0.5 * 10**-digits else "·"
