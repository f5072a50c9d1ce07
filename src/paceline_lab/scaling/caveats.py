"""Caveats of a benchmark's figures, each a sentence with its number."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from paceline.job.job import Job
from paceline.stats import LEAST_REPEATS
from paceline.units import count, percent
from paceline_lab.scaling.load import WARN_CORES, stolen_share
from paceline_lab.scaling.settings import ONE, Setting
from paceline_lab.scaling.summary import FinishedRun

_LAST = 10  # steps whose mean loss is compared
_SAME = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 2e-2}  # how far rounding alone drives losses apart within the first steps


def caveats(
    job: Job, settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], *, repeat: int, cores: int
) -> list[str]:
    """Everything that a reader should know before believing the figures. `runs`: those of each setting that has any."""
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
        yield f"With {count(repeat, 'repeat')} there is no interval to speak of, so no difference is claimed."


def _other_load(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]], cores: int) -> Iterator[str]:
    loads = {s.key: [run.other_cores for run in runs[s.key] if run.other_cores is not None] for s in settings}
    known = [load for each in loads.values() for load in each]
    if not known:
        yield "Other load on the machine is not known: the system does not tell how busy the cores are."
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
        f"Other processes kept {statistics.median(known):.2f} cores busy in the median over the runs, and "
        f"{max(known):.2f} at most."
    )
    if widened:
        text += (
            " They may have slowed the ranks, so the intervals reach further towards shorter times: "
            f"{', '.join(widened)}."
        )
    yield text


def _losses(job: Job, settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    """Caveats where plans' losses differ.

    Plans of one job do the same work, so their losses agree; else the times compare different work.
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
        f"The losses are not those of the first run of one device ({named}), so the runs do not do quite the same "
        "work: layers that look at a replica's share only (dropout, batch_norm: local), other precisions, and sync "
        "rules that compress or agree only now and then do that."
    )


def _apart(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[int, float]:
    """The last step compared of two losses, and their relative difference before it.

    The difference is that of the means over the last steps.
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
            f"The runs needed different numbers of steps ({named}): training times compare that, too; step times "
            "compare speed alone."
        )


def _span(steps: list[int]) -> str:
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _small_data(settings: Sequence[Setting], runs: Mapping[str, Sequence[FinishedRun]]) -> Iterator[str]:
    for setting in settings:
        samples = min(run.samples for run in runs[setting.key])
        if samples < setting.global_batch:
            yield (
                f"{setting.title}: most steps had {samples:g} samples, not {setting.global_batch}, for the training "
                "set is small; throughput counts those there were."
            )
