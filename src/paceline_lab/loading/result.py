"""Result of measuring a loader: the limit that it reaches, and advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cluster.discover import discover
from paceline.job.job import Job
from paceline.stats import Interval, differ
from paceline.units import Shown, bandwidth, count, digits, percent, rate, ratio, seconds, size
from paceline_lab.loading.limits import DecoderLimit, DiskLimit, decoder_limit, disk_limit
from paceline_lab.loading.loader_speed import ROUNDS, LoaderSpeed, measure_loader

_WIDTH = 116
_MEANING = (
    f"Medians of {ROUNDS} rounds that take turns, with 95 % intervals. One rank reads whole batches.",
    "tensors: bytes of the batches. read: bytes that the loader reads from files. ms a batch: shortest step for which "
    "the loader is fast enough.",
)
_NEAR = 0.5  # from this share of a limit on, the limit counts as the cause of the loader's speed
_REQUEST_BYTES = 64  # bytes per sample that a loader process may read for its requests, without reading a file


@dataclass(frozen=True)
class LoaderReport:
    """Measured speeds of a job's loader, with the limits of the disk and of decoding.

    Attributes:
        batch: number of samples of a batch.
        num_workers: the job's number of loader processes, which is one of the settings.
        step_s: step time in seconds of the simulated consumer whose waiting was measured; None without a consumer.
        cores: number of cores that may decode.
    """

    name: str
    batch: int
    num_workers: int
    settings: list[LoaderSpeed]
    disk: DiskLimit
    decoder: DecoderLimit
    cores: int
    step_s: float | None = None

    @property
    def best(self) -> LoaderSpeed:
        """The fastest setting."""
        return max(self.settings, key=lambda setting: setting.samples_per_s.middle)

    @property
    def decoded_samples_per_s(self) -> float | None:
        """Samples per second that all cores can decode; None if not measured."""
        one = self.decoder.samples_per_s
        return None if one is None else one.middle * self.cores

    @property
    def disk_samples_per_s(self) -> float | None:
        """Samples per second that the disk can deliver; None if unknown or not needed."""
        per_sample = self.bytes_per_sample
        if self.disk.bytes_per_s is None or not per_sample:
            return None
        return self.disk.bytes_per_s.middle / per_sample

    @property
    def bytes_per_sample(self) -> float | None:
        """Bytes read from files per sample; 0 for data in memory, None if unknown."""
        least = min(self.settings, key=lambda one: one.num_workers)
        read = least.read_per_sample
        if self.disk.mapped and least.tokens is not None:
            # the kernel does not count pages of mapped files that are in the page cache
            return max(read or 0.0, 4 * least.tokens)
        # loader processes also read their requests, which contain the numbers of the samples
        negligible = _REQUEST_BYTES if least.num_workers else 1.0
        return read if read is None or read >= negligible else 0.0

    @property
    def verdict(self) -> str:
        """Sentence that names what limits the loader, and what to change."""
        best = self.best
        limits = {"disk": self.disk_samples_per_s, "decoder": self.decoded_samples_per_s}
        known = {name: limit for name, limit in limits.items() if limit}
        if not known:
            speed = rate(best.samples_per_s.middle)
            advice = f" To read faster, {more}." if (more := self._more_workers) else ""
            return f"No limit was measured: with num_workers {best.num_workers}, the loader reads {speed}.{advice}"
        name = min(known, key=lambda one: known[one])
        reached = best.samples_per_s.middle / known[name]
        of = f"what {count(self.cores, 'core')} decode" if name == "decoder" else "what the files deliver"
        share = f"with num_workers {best.num_workers}, the loader reaches {percent(reached, 0)} of {of}"
        if reached < _NEAR:
            cheaper = "use larger batches, because the fixed work per batch limits"
            return f"Neither the disk nor the decoder limits: {share}. To read faster, {self._more_workers or cheaper}."
        if name == "disk":
            which = "page cache" if self.disk.cached else "disk"
            cheaper = "store fewer bytes for each sample (compressed, tokenized or smaller), or use a faster disk"
            return f"The {which} limits: {share}. To read faster, {cheaper}."
        cheaper = "store samples that need less work (smaller images, tokens instead of text)"
        return f"The decoder limits: {share}. To read faster, {self._more_workers or cheaper}."

    @property
    def _more_workers(self) -> str:
        """Advice to change the number of loader processes; empty if that would not help."""
        best, own = self.best, self._own
        if best is not own and differ(best.samples_per_s, own.samples_per_s, repeats=ROUNDS):
            gain = ratio(best.samples_per_s.middle / own.samples_per_s.middle)
            return f"set data.num_workers: {best.num_workers}, which reads {gain} as many samples as {own.num_workers}"
        if best.num_workers == max(one.num_workers for one in self.settings) < self.cores:
            return f"try more loader processes (--num-workers {self.cores})"
        return ""

    @property
    def _own(self) -> LoaderSpeed:
        return next(one for one in self.settings if one.num_workers == self.num_workers)

    @property
    def waiting(self) -> str:
        """Sentence that states how long the model waits; empty without a step time."""
        waits = [(one.num_workers, one.waiting.middle) for one in self.settings if one.waiting is not None]
        if not waits or self.step_s is None or self._own.waiting is None:
            return ""
        workers, least = min(waits, key=lambda wait: wait[1])
        shown = percent(self._own.waiting.middle)
        other = f", and {percent(least)} with num_workers {workers}" if workers != self.num_workers else ""
        job = f"the job (num_workers {self.num_workers})"
        return f"If a step takes {seconds(self.step_s)}, {job} waits {shown} of the time{other}."

    def figures(self) -> dict[str, float]:
        """Return the medians by name."""
        found: dict[str, float] = {}
        for one in self.settings:
            values = {
                "samples_per_s": one.samples_per_s.middle,
                "tokens_per_s": None if one.tokens is None else one.tokens * one.samples_per_s.middle,
                "decoded_bytes_per_s": one.decoded_per_s.middle,
                "read_bytes_per_s": None if one.read_per_s is None else one.read_per_s.middle,
                "disk_share": one.disk_share,
                "waiting_share": None if one.waiting is None else one.waiting.middle,
            }
            found |= {f"{name}_workers_{one.num_workers}": value for name, value in values.items() if value is not None}
        optional = {
            "disk_bytes_per_s": None if self.disk.bytes_per_s is None else self.disk.bytes_per_s.middle,
            "disk_samples_per_s": self.disk_samples_per_s,
            "decoder_samples_per_s": self.decoded_samples_per_s,
        }
        return found | {name: value for name, value in optional.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return all settings with their intervals, as plain values."""

        def ends(values: Mapping[str, Interval | None]) -> dict[str, list[float]]:
            return {name: [v.low, v.middle, v.high] for name, v in values.items() if v is not None}

        settings = [
            {
                "num_workers": one.num_workers,
                "tokens_per_sample": one.tokens,
                "disk_share": one.disk_share,
                **ends(
                    {
                        "samples_per_s": one.samples_per_s,
                        "decoded_bytes_per_s": one.decoded_per_s,
                        "read_bytes_per_s": one.read_per_s,
                        "batch_s": one.batch_s,
                        "waiting_share": one.waiting,
                    }
                ),
            }
            for one in self.settings
        ]
        limits = ends({"disk_bytes_per_s": self.disk.bytes_per_s, "decoder_samples_per_s": self.decoder.samples_per_s})
        return {
            "settings": settings,
            "limits": {**limits, "cores": self.cores, "disk_is_cached": self.disk.cached},
            "batch": self.batch,
            "step_s": self.step_s,
            "verdict": self.verdict,
        }


def measured(
    job: Job,
    workers: Sequence[int] | None,
    *,
    seconds: float,
    step_s: float | None = None,
    say: Callable[[str], object] = str,
) -> LoaderReport:
    """Measure a job's loader and its limits.

    Args:
        workers: numbers of loader processes; None measures 0 and powers of two up to the cores.
        seconds: duration of each measurement.
        step_s: step time in seconds of a simulated consumer whose waiting is also measured.
        say: function that is called with the name of each phase.

    Raises:
        DataError: the data is missing or invalid, or a sample cannot be read.
    """
    say("opening the data")
    job.fetch()
    data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
    cores = discover().hosts[0].cores
    chosen = workers if workers is not None else [0, *(2**i for i in range(cores.bit_length()))]
    own = job.data.num_workers
    settings = measure_loader(job, data, sorted({*chosen, own}), seconds=seconds, step_s=step_s, say=say)
    say("measuring the decoder")
    decoder = decoder_limit(job, data, seconds)
    say("measuring the disk")
    disk = disk_limit(job, seconds)
    return LoaderReport(job.name, job.global_batch, own, settings, disk, decoder, cores, step_s)


def show(report: LoaderReport, console: Console) -> None:
    """Print the verdict, the settings and the limits."""
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    console.print(Text.assemble(("paceline bench data", "bold"), f" of {report.name} · batches of {report.batch:,}"))
    console.print()
    console.print(Text(report.verdict, "bold"))
    if report.waiting:
        console.print(Text(report.waiting))
    console.print()
    console.print(_settings(report))
    console.print()
    for name, text in _limits(report):
        console.print(Text.assemble((f"{name:<10}", "bold"), text))
    console.print()
    for line in _MEANING:
        console.print(Text(line, "dim"))


def _settings(report: LoaderReport) -> Table:
    columns: dict[str, Callable[[LoaderSpeed], str]] = {
        "num_workers": lambda one: f"{one.num_workers}{' (job)' if one.num_workers == report.num_workers else ''}",
        "samples/s": lambda one: _cell(rate(one.samples_per_s)),
        "tokens/s": lambda one: digits((one.tokens or 0.0) * one.samples_per_s.middle),
        "tensors": lambda one: str(bandwidth(one.decoded_per_s.middle)),
        "read": lambda one: "unknown" if one.read_per_s is None else str(bandwidth(one.read_per_s.middle)),
        "from the disk": lambda one: "–" if one.disk_share is None else str(percent(one.disk_share, 0)),
        "ms a batch": lambda one: _cell(rate(one.batch_s.times(1e3))),
        "waiting": lambda one: "–" if one.waiting is None else str(percent(one.waiting)),
    }
    if all(one.tokens is None for one in report.settings):
        del columns["tokens/s"]
    if report.step_s is None:
        del columns["waiting"]
    if not report.bytes_per_sample:  # only requests were read, no files
        del columns["read"], columns["from the disk"]
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for one in report.settings:
        table.add_row(*(text(one) for text in columns.values()))
    return table


def _limits(report: LoaderReport) -> list[tuple[str, str]]:
    disk, decoder, found = report.disk, report.decoder, []
    if disk.bytes_per_s is None:
        found.append(("disk", f"not measured: {disk.about}"))
    else:
        where = "page cache, because the system did not evict the files" if disk.cached else "disk"
        text = (
            f"{bandwidth(disk.bytes_per_s.middle)} in sequence from the {where} ({disk.about}, {size(disk.file_bytes)})"
        )
        if report.disk_samples_per_s and report.bytes_per_sample:
            text += f" = {rate(report.disk_samples_per_s)} of {size(report.bytes_per_sample)}"
        elif report.bytes_per_sample == 0:
            text += "; the job reads no file while it trains"
        found.append(("disk", text))
    if decoder.samples_per_s is None:
        found.append(("decoder", f"not measured: {decoder.why}"))
    else:
        one, all_cores = rate(decoder.samples_per_s.middle), rate(report.decoded_samples_per_s or 0.0)
        found.append(("decoder", f"{one} in one process × {count(report.cores, 'core')} = {all_cores}"))
    return found


def _cell(shown: Shown) -> str:
    return f"{shown.text} ({shown.interval})" if shown.interval else shown.text
