"""Text of a benchmark's report: tables, named numbers, and sentences on what limits the scaling.

A plan or a batch size is recommended only if the interval of its measured gain excludes zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from paceline.engine.meter import PARTS
from paceline.job.job import Job
from paceline.report.run_record import excess_of, where_it_goes
from paceline.run.record.run import WARM_UP_STEPS
from paceline.stats import LEAST_REPEATS, Interval, differ, median_interval
from paceline.text import on_cores
from paceline.units import count, digits, joules, percent, seconds, size
from paceline_lab.scaling.result import AUTO, DEFAULT_STEPS, ONE, MeasuredSetting, Report, Setting
from paceline_lab.scaling.summary import FINAL_STEPS, WARN_CORES, FinishedRun, stolen_share

WIDTH = 100
_BAR = 14  # width in characters
_NEGLIGIBLE = 0.005  # fraction of a step
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
    """Print a report: findings, figures, the parts of a step, warnings, definitions, and the environment."""
    report = worded(report)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for i, sentence in enumerate(("", *report.limits, "")):
        console.print(Text(sentence, style="bold" if i == 1 else ""))
    _print(console, _results(report), _results(report, narrow=True))
    if any(setting.ranks for setting in report.settings):
        console.print(Text("\nWhere a step goes: ms, mean over the ranks", style="bold"))
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
    """Return the report for display; on a machine without accelerators, its texts call devices cores."""
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
    """Return a report's numbers by name: `throughput_2_devices`, `speedup_2_devices_weak`, …

    Speedup and efficiency are included only if the difference from one device is significant.
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
    """Yield the name and the definition of each column and row of the tables."""
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
    yield "on wire", "bytes that a rank sends to other replicas in a step; ? if runs are too short."
    if report.on_cores:
        yield "memory", "largest resident memory of a rank, shared pages by their share."
    else:
        yield "memory", "largest allocation of a rank on its accelerator; ? if torch does not report it."
    if any(s.energy_joules is not None for s in report.settings):
        yield "energy", "joules per step of the processor packages and GPUs, including other work on them."
    else:
        yield "energy", "not available: this machine has no counter (RAPL, NVML)."


def _print(console: Console, *forms: Table) -> None:
    """Print the first form of a table that fits the width of the terminal.

    If no form fits, the last form is printed with narrow gaps. Trailing spaces are removed.
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
    """Format a time as `42.6 ms (14.9–47.3)`, or without its interval if there are too few repeats."""
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


def limits_of(settings: list[MeasuredSetting], auto: str = "", auto_as_told: str = "") -> list[str]:
    """Describe the speedup of the plan of `auto`, the fixed layout and a larger batch.

    Args:
        auto: plan that `auto` chose, spelled as in the settings.
        auto_as_told: plan that `auto` chose, as `paceline train` prints it.
    """
    one = next((s for s in settings if s.devices == 1), None)
    many, layout = headline_of(settings, auto), headline_of(settings)
    if one is None or many is None or many.speedup is None or many.efficiency is None:
        return ["To show how the job scales, measure one device and several."]
    if min(len(one.runs), len(many.runs)) < LEAST_REPEATS:
        return [
            (
                f"Fewer than {LEAST_REPEATS} repeats cannot distinguish a difference from chance, so no speedup is "
                "reported. The default is --repeat 5."
            )
        ]
    assert layout is not None
    chosen = next((s for s in settings if s.plan == auto and s.scaling == "strong"), None)
    weak = next((s for s in settings if s.scaling == "weak" and s.devices == layout.devices), None)
    plan = f"{auto_as_told or auto}, the plan that auto chose" if many is chosen else many.plan
    return [*_limits(one, many, plan), *_about_auto(chosen, layout), *_about_larger_batch(layout, weak)]


def headline_of(settings: Sequence[MeasuredSetting], auto: str = "") -> MeasuredSetting | None:
    """Choose the setting for the headline of a report; None if none uses several devices.

    This is the setting with the plan that `auto` chose. If that plan was not measured on several devices, it is the
    fixed layout on the most devices. Without a fixed layout, it is the fastest plan on the most devices.
    """
    strong = [s for s in settings if s.scaling == "strong" and s.devices > 1]
    return max(strong, key=lambda s: (s.plan == auto, s.fixed, s.devices, s.throughput.middle), default=None)


def _limits(one: MeasuredSetting, many: MeasuredSetting, plan: str) -> list[str]:
    assert many.efficiency is not None
    headline = _headline(many, plan)
    if many.efficiency.high >= 1:
        enough = "Within the interval, this is the ideal speedup: no measurable time is lost."
        unclear = "The intervals are too wide to find what limits the speedup. Use more repeats, or reduce other load."
        return [headline, enough if many.is_speedup else unclear]
    lost = where_it_goes(_parts_of(one), _parts_of(many), many.devices) if one.ranks and many.ranks else None
    return [headline, lost] if lost else [headline]


def _about_auto(chosen: MeasuredSetting | None, many: MeasuredSetting) -> list[str]:
    if chosen is None or chosen is many:
        return []
    times = [s.training_time_s or s.step_time_s for s in (chosen, many)]
    repeats = min(len(chosen.runs), len(many.runs))
    ratio = times[1].middle / times[0].middle
    verdict = (
        "not measurably different from"
        if not differ(*times, repeats=repeats)
        else f"faster than ({digits(ratio)} ×)"
        if ratio > 1
        else f"slower than ({digits(ratio)} ×)"
    )
    plan = chosen.plan if chosen.fixed else chosen.label.removeprefix(AUTO)
    return [f"The plan that auto chose, {plan}, is {verdict} {_name(many)} with {many.plan}."]


def _about_larger_batch(many: MeasuredSetting, weak: MeasuredSetting | None) -> list[str]:
    gain = None if weak is None else _gain(many, weak)
    if weak is None or gain is None or gain.low <= 1 or many.throughput.overlaps(weak.throughput):
        return []
    low, middle, high = (percent(value - 1) for value in (gain.low, gain.middle, gain.high))
    return [
        f"A larger global batch gives more samples per second: {middle} more with {weak.global_batch} "
        f"instead of {many.global_batch} samples (95 % interval {low} to {high}). This changes the training: compare "
        "the losses."
    ]


def _gain(many: MeasuredSetting, weak: MeasuredSetting) -> Interval | None:
    """Return the throughput of weak scaling divided by that of strong scaling.

    The result is None if too few rounds contain a run of both.
    """
    samples = [s.throughput.middle * s.step_time_s.middle for s in (many, weak)]
    pairs = [
        (strong_s / samples[0]) / (weak_s / samples[1])
        for strong_s, weak_s in zip(many.rounds_s, weak.rounds_s, strict=False)
        if strong_s is not None and weak_s is not None
    ]
    return median_interval(pairs) if len(pairs) >= LEAST_REPEATS else None


def _headline(many: MeasuredSetting, plan: str) -> str:
    assert many.speedup is not None
    assert many.efficiency is not None
    interval = f"95 % interval {many.speedup.low:.2f} to {many.speedup.high:.2f}"
    if not many.is_speedup:
        return (
            f"No measurable difference between one device and {many.devices} devices with {plan}: the intervals of "
            f"their times overlap ({interval})."
        )
    if many.speedup.middle < 1:
        ratio = f"{many.speedup.middle:.2f}× its speed ({interval})"
        return f"{many.devices} devices are slower than one with {plan}: {ratio}."
    share = percent(many.efficiency.middle)
    return (
        f"{many.devices} devices are {many.speedup.middle:.2f}× as fast as one with {plan} ({interval}): {share} of "
        f"the ideal {many.devices}×."
    )


def _name(setting: MeasuredSetting) -> str:
    same = setting.label == f"{setting.devices} devices"
    return setting.label if same else f"{setting.devices} devices ({setting.label})"


def excess_s(one: MeasuredSetting, many: MeasuredSetting) -> dict[str, float]:
    """Return each part's step time on N devices, minus 1/N of its time on one.

    The times are in seconds, as means over the ranks.
    """
    return excess_of(_parts_of(one), _parts_of(many), many.devices)


def _parts_of(setting: MeasuredSetting) -> dict[str, float]:
    return {part: fmean(rank.parts_s[part] for rank in setting.ranks) for part in setting.ranks[0].parts_s}


_LAST = 10  # number of last steps whose mean loss is compared
# largest relative difference of losses in the first steps that rounding alone explains, by precision
_SAME = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 4e-2}


def caveats(
    job: Job, settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], *, repeat: int, cores: int
) -> list[str]:
    """List reasons to treat the figures of a benchmark with caution.

    Args:
        runs: finished runs by key of their setting.
    """
    found = [s for s in settings if runs.get(s.key)]
    return [
        *_unfinished(settings, runs, repeat),
        *_other_load(found, runs, cores),
        *_losses(job, found, runs),
        *_targets(found, runs),
        *_small_data(found, runs),
    ]


def _unfinished(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], repeat: int) -> Iterator[str]:
    done, due = sum(len(r) for r in runs.values()), repeat * len(settings)
    if done < due:
        yield f"{done} of {due} runs were measured."
    if repeat < LEAST_REPEATS:
        yield f"With {count(repeat, 'repeat')} there is no confidence interval, so no difference is reported."


def _other_load(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], cores: int) -> Iterator[str]:
    loads = {s.key: [run.other_cores for run in runs[s.key] if run.other_cores is not None] for s in settings}
    known = [load for each in loads.values() for load in each]
    if not known:
        yield "Other load on the machine is unknown: the system does not report how busy the cores are."
        return
    if max(known) < WARN_CORES:
        return
    stolen = {
        s.title: stolen_share(statistics.median(loads[s.key]), devices=s.devices, cores=cores)
        for s in settings
        if loads[s.key]
    }
    widened = [f"{title} by {percent(share)}" for title, share in stolen.items() if share]
    text = (
        f"Other processes kept {statistics.median(known):.2f} cores busy (median of the runs), and "
        f"{max(known):.2f} at most."
    )
    if widened:
        text += (
            " They may have slowed the ranks, so the intervals extend further towards shorter times: "
            f"{', '.join(widened)}."
        )
    yield text


def _losses(job: Job, settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    """Yield a warning if the losses of plans differ.

    All plans of a job should compute the same losses. If they do not, their times compare different work.
    """
    strong = [s for s in settings if s.scaling == "strong"]
    first = next((runs[s.key][0] for s in strong if s.key == ONE), runs[strong[0].key][0] if strong else None)
    if first is None:
        return
    differing: dict[str, tuple[float, int]] = {}
    for setting in strong:
        for run in runs[setting.key]:
            steps, apart = _apart(first.losses, run.losses)
            if apart > _SAME[setting.plan.precision_for(job)] and apart > differing.get(setting.label, (0.0, 0))[0]:
                differing[setting.label] = (apart, steps)
    if not differing:
        return
    named = ", ".join(
        f"{label} by {percent(apart, 2)} after {steps} steps" for label, (apart, steps) in differing.items()
    )
    yield (
        f"The losses differ from the first run on one device ({named}), so the runs do not do exactly the same work. "
        "Possible causes: layers that depend on a replica's share of the batch (dropout, batch_norm: local), another "
        "precision, gradient compression, and sync rules that do not communicate in every step."
    )


def _apart(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[int, float]:
    """Return the number of steps that two runs share, and their relative loss difference.

    The difference compares the mean losses of the last compared steps.
    """
    steps = min(len(one), len(other))
    pairs = [(a, b) for a, b in zip(one[:steps], other[:steps], strict=True) if a is not None and b is not None][
        -_LAST:
    ]
    if not pairs:
        return steps, 0.0
    a, b = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    return steps, abs(a - b) / max(abs(a), abs(b), 1e-12)


def _targets(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    to_target = [s for s in settings if s.steps is None]
    for setting in to_target:
        missed = [run for run in runs[setting.key] if not run.reached]
        if missed:
            yield (
                f"{len(missed)} of {len(runs[setting.key])} runs of {setting.label} did not reach the target "
                f"({missed[0].reason})."
            )
    needed = {s.label: sorted({run.steps for run in runs[s.key]}) for s in to_target}
    if len({steps for each in needed.values() for steps in each}) > 1:
        named = ", ".join(f"{label} {_span(steps)}" for label, steps in needed.items())
        yield (
            f"The runs needed different numbers of steps ({named}): training times include this difference; step "
            "times compare speed alone."
        )


def _span(steps: list[int]) -> str:
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _small_data(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    for setting in settings:
        samples = min(run.samples for run in runs[setting.key])
        if samples < setting.global_batch:
            yield (
                f"{setting.title}: most steps had {samples:g} samples instead of {setting.global_batch}, because the "
                "training set is small; the throughput counts the actual samples."
            )
