"""Calibration on measured runs: tables, run directories, and logs of other systems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.cluster.cluster import Cluster
from paceline.errors import PacelineError, PlanError
from paceline.extensions import ExtensionPoint
from paceline.planning.cost.estimate import estimate
from paceline.planning.machines import Adjustment, adjustment
from paceline.planning.predict import layout_of
from paceline.planning.tables import layouts as tables
from paceline.planning.tables.layouts import Row, Skipped
from paceline.run.record.run import WARM_UP_STEPS, Run
from paceline.units import count, percent

Say = Callable[[str], object]
_LOGS = (".log", ".out", ".txt")
_FORMS = (
    "a table of runs (.csv, in the columns of docs/plan.md#calibrate-on-your-own-runs), a run directory of paceline, a "
    "log of Megatron-LM or torchtitan, or a folder of such"
)
_MOST_REASONS, _MOST_PLACES = 8, 6  # that are printed


@dataclass(frozen=True)
class LogReader:
    """Reader of the logs of another system.

    Attributes:
        read: takes a file and the cluster of its run, and returns the run. Raises PlanError if the file is not such a
            log, or does not describe the run.
    """

    read: Callable[[Path, Cluster | None], Row]


LOG_READERS = ExtensionPoint[LogReader]("reader of logs", "paceline.log_readers", LogReader, {}, PlanError)


class Runs(NamedTuple):
    """Measured runs, and what cannot be used, with reasons."""

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]


def calibrate_on(paths: Iterable[Path | str], cluster: Cluster | None = None, say: Say = str) -> Adjustment:
    """Return the factors by which measured runs differ from predictions.

    Args:
        paths: tables of runs (CSV), run directories, logs of Megatron-LM or torchtitan, or folders of these.
        cluster: cluster of the logs, which do not name it.
        say: called with a line for each reason why something was not used, and with the factors.

    Raises:
        PlanError: a path is none of these, or no run in them can be used; the message has every reason.
    """
    files = [Path(path) for path in paths]
    runs = read_runs(files, cluster)
    for line in _not_used(runs.skipped):
        say(line)
    if not runs.rows:
        raise PlanError(
            f"--calibrate-on {', '.join(map(str, files))}: no run in it can be used\n"
            + "\n".join(_not_used(runs.skipped) or [f"nothing was found. It takes {_FORMS}"])
        )
    found = adjustment(runs.rows, lambda layout: estimate(layout).step_time_s)
    say(_summary(runs, found))
    return found


def read_runs(paths: Iterable[Path], cluster: Cluster | None = None) -> Runs:
    """All runs with a measured step time.

    Raises:
        PlanError: a path does not exist, or is no form of runs.
    """
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for path in paths:
        for found in _found(path, cluster):
            if isinstance(found, Row):
                rows.append(found)
            else:
                skipped.append(found)
    return Runs(tuple(rows), tuple(skipped))


def _found(path: Path, cluster: Cluster | None) -> Iterator[Row | Skipped]:
    if not path.exists():
        raise PlanError(f"--calibrate-on {path}: there is no such file. It takes {_FORMS}")
    if not path.is_dir():
        yield from _of_file(path, cluster)
        return
    if (path / "job.yaml").is_file():
        yield _of_run(path)
        return
    for inside in sorted(path.iterdir()):
        if inside.is_dir() and (inside / "job.yaml").is_file():
            yield _of_run(inside)
        elif inside.is_file() and inside.suffix.lower() in (".csv", *_LOGS):
            yield from _of_file(inside, cluster)


def _of_file(file: Path, cluster: Cluster | None) -> Iterator[Row | Skipped]:
    if file.suffix.lower() != ".csv":
        reasons = []
        for reader in LOG_READERS.all().values():
            try:
                yield reader.read(file, cluster)
                return
            except PacelineError as error:
                reasons.append(str(error).splitlines()[0])
        yield Skipped(file.name, 0, "; ".join(reasons) or "no installed package reads logs")
        return
    try:
        rows, skipped = tables.read([file])
    except OSError as error:
        raise PlanError(f"--calibrate-on {file} cannot be read: {error.strerror or error}") from error
    if not rows and not skipped:
        yield Skipped(file.stem, 0, "it is no table of runs: it has no rows with the columns model and gpu")
    yield from skipped
    for row in rows:
        if row.seconds:
            yield row
        else:
            why = "it ran out of memory" if row.out_of_memory else "no time was measured"
            yield Skipped(row.table, row.number, why)


def _of_run(folder: Path) -> Row | Skipped:
    """A run directory of paceline, with its median step without warm-up."""
    try:
        run = Run(folder)
        if not run.throughput:
            return Skipped(folder.name, 0, f"it has no step with a time after the first {WARM_UP_STEPS}")
        layout = layout_of(run.job, run.cluster, run.plan)
        return Row(folder.name, 0, {}, layout, run.job.global_batch / run.throughput, None, False)
    except PacelineError as error:
        return Skipped(folder.name, 0, str(error).splitlines()[0])


# What is told


def _summary(runs: Runs, found: Adjustment) -> str:
    """One line: the number of runs, the factors, and what is left."""
    places = ", ".join(dict.fromkeys(row.table for row in runs.rows))
    left = math.exp(found.spread) - 1
    return (
        f"calibrated on {count(len(runs.rows), 'run')} of {places}: measured steps take {_times(found)} what is "
        f"predicted; ± {percent(left)} is left (standard deviation)"
    )


def _times(found: Adjustment) -> str:
    """The factor of all runs, and the range of those of each kind."""
    kinds = [math.exp(log) for key, log in found.logs.items() if len(key) == max(map(len, found.logs))]
    least, most = min(kinds), max(kinds)
    general = f"{math.exp(found.logs[()]):.2f} times"
    return general if most / least < 1.01 else f"{general} (by software and precision {least:.2f} to {most:.2f})"


def _not_used(skipped: Sequence[Skipped]) -> list[str]:
    """A line for each reason, with the rows."""
    lines = []
    reasons = list(dict.fromkeys(one.why for one in skipped))
    for why in reasons[:_MOST_REASONS]:
        places = [f"{one.table}:{one.number}" if one.number else one.table for one in skipped if one.why == why]
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        lines.append(f"not used: {', '.join(places[:_MOST_PLACES])}{more}: {why}")
    if (others := len(reasons) - _MOST_REASONS) > 0:
        lines.append(f"not used: further rows, for {count(others, 'other reason')}")
    return lines
