"""Judgement of devices and links, which finds those that are slow or wrong.

A device is compared with the other devices of its name, and a link with the other links of its kind. The comparison
uses medians, so a few faulty devices hardly affect it. `comm/measure/health.py` takes the readings.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.device import CPU, nvidia_uuid
from paceline.errors import HARDWARE_XIDS
from paceline.units import bandwidth, count, flops, ratio

if TYPE_CHECKING:
    import torch

_SLOW = 1.18  # a device is slow from this multiple of its peers' time; chips of one model differ by up to a tenth
_SPREADS = 4.0  # … and if the difference is also this multiple of the peers' median deviation
_SLOW_LINK = 1.6  # the same for the time of a message over a link
_LEAST_OF_PEAK = 0.3  # a device below this share of the sustained peak in the catalogue is slow
_FEWEST = 3  # with fewer peers, a median cannot name the outlier
Level = Literal["problem", "note"]
BY_TIME = ("device.slow", "devices.differ", "link.slow")
"""Codes of findings that other work on the machine may cause. They count only if another check confirms them."""


@dataclass(frozen=True)
class Counters:
    """Counters that the driver reports for a device under load; None if unknown.

    Attributes:
        throttle: reasons for which the clock is lowered, the bits of `nvmlClocksEventReason…`.
        ecc_uncorrected: memory errors since the driver was loaded that could not be corrected.
        rows_pending: 1 if memory rows will be replaced at the next reset.
        rows_failed: 1 if a faulty memory row could not be replaced.
        xids: driver errors of this device in the kernel's log.
    """

    clock_mhz: int | None = None
    highest_clock_mhz: int | None = None
    throttle: int | None = None
    ecc_uncorrected: int | None = None
    rows_pending: int | None = None
    rows_failed: int | None = None
    xids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DeviceReading:
    """Measurements of the check on the device of one rank.

    Attributes:
        host: index of the host.
        device: torch's name of the device; on CPUs `cpu:` and the number of the rank on its host.
        kind: name and software of the device. Devices of one kind compute the same bits.
        product_flops: floating-point operations of the timed matrix product.
        product_s: low quantile of the product's times in seconds.
        wrong: number of wrong elements in matrix products whose exact result is known.
        changed: number of repetitions of the timed product whose bits differ from the first result.
        digest: digest of the first result.
        memory_bytes: memory that was written and read back; `memory_wrong` counts the words that differed.
        expected_flops: sustained peak of the catalogue in FLOP/s; None if unknown.
    """

    rank: int
    host: int
    host_name: str
    device: str
    name: str
    kind: str
    product_flops: float
    product_s: float
    wrong: int
    changed: int
    digest: str
    memory_bytes: int
    memory_wrong: int
    expected_flops: float | None
    counters: Counters

    @property
    def place(self) -> str:
        """Host and device, for messages."""
        return f"{self.host_name} {self.device}"

    @property
    def flops(self) -> float:
        """Measured rate in FLOP/s."""
        return self.product_flops / self.product_s


@dataclass(frozen=True)
class LinkReading:
    """Messages from rank `source` to rank `target`; `wrong` counts bytes that arrived changed."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float
    wrong: int = 0


@dataclass(frozen=True)
class HealthFinding:
    """One fault, with the ranks whose device or link has it. A `note` does not prevent a run."""

    code: str
    level: Level
    ranks: tuple[int, ...]
    text: str
    advice: str


@dataclass(frozen=True)
class HealthReport:
    """Result of one check, equal on every rank."""

    devices: list[DeviceReading]
    links: list[LinkReading]
    findings: list[HealthFinding]
    transport: str
    seconds: float

    @property
    def problems(self) -> list[HealthFinding]:
        """The findings that should prevent a run."""
        return [finding for finding in self.findings if finding.level == "problem"]


def judge(devices: Sequence[DeviceReading], links: Sequence[LinkReading]) -> list[HealthFinding]:
    """Return the faults that the readings show; empty if everything is healthy."""
    found = [*_wrong_results(devices), *_wrong_memory(devices), *_rates(devices), *_counted(devices)]
    slow = {rank for finding in found if finding.code == "device.slow" for rank in finding.ranks}
    return [*found, *_wrong_links(devices, links), *_slow_links(devices, links, slow)]


def confirmed(before: Sequence[HealthFinding], now: Sequence[HealthFinding]) -> list[HealthFinding]:
    """Merge the findings of two checks; findings that rest on times must be in both."""
    again, earlier = ({(f.code, f.ranks) for f in found} for found in (now, before))
    kept = [f for f in before if f.code not in BY_TIME or (f.code, f.ranks) in again]
    return kept + [f for f in now if f.code not in BY_TIME and (f.code, f.ranks) not in earlier]


def is_slow(own_s: float, others_s: Sequence[float], factor: float = _SLOW) -> bool:
    """Return True if a time is an outlier among two or more peers."""
    middle = statistics.median(others_s)
    spread = statistics.median(abs(other - middle) for other in others_s)
    return own_s > factor * middle and own_s - middle > _SPREADS * spread


# Devices

_REPLACE = "Do not train on this device. Leave its host out, and let the vendor's diagnosis (dcgmi diag -r 3) test it."
_COOL = "Check its temperature, power cap and clocks (nvidia-smi -q -d PERFORMANCE), or leave its host out."


def _wrong_results(devices: Sequence[DeviceReading]) -> Iterator[HealthFinding]:
    sound = []
    for device in devices:
        if device.wrong:
            text = f"{device.place} computes {count(device.wrong, 'wrong number')} in matrix products of small integers"
        elif device.changed:
            text = f"{device.place} repeated a matrix product with different bits, {count(device.changed, 'time')}"
        else:
            sound.append(device)
            continue
        yield HealthFinding("device.wrong_result", "problem", (device.rank,), text, _REPLACE)
    for alike in _grouped(sound, "kind"):
        votes = Counter(device.digest for device in alike)
        digest, most = votes.most_common(1)[0]
        odd = [device for device in alike if device.digest != digest]
        if odd and 2 * most > len(alike):
            for device in odd:
                text = f"{device.place} computes different bits from {count(most, 'device')} of the same kind"
                yield HealthFinding("device.wrong_result", "problem", (device.rank,), text, _REPLACE)
        elif odd:
            places = ", ".join(device.place for device in alike)
            text = f"these devices of one kind compute different bits, and no majority shows which is right: {places}"
            advice = "Check that all hosts have the same driver, or add a device of this kind and check again."
            yield HealthFinding("devices.bits_differ", "problem", _ranks(alike), text, advice)


def _wrong_memory(devices: Sequence[DeviceReading]) -> Iterator[HealthFinding]:
    for device in devices:
        if device.memory_wrong:
            text = f"{device.place} reads back {count(device.memory_wrong, 'wrong word')} from its memory"
            yield HealthFinding("device.wrong_memory", "problem", (device.rank,), text, _REPLACE)


def _rates(devices: Sequence[DeviceReading]) -> Iterator[HealthFinding]:
    for alike in _grouped(devices, "name"):
        slow = [d for d in alike if d.expected_flops is not None and d.flops < _LEAST_OF_PEAK * d.expected_flops]
        for device in slow:
            text = f"{device.place} reaches {flops(device.flops)}; the catalogue expects {_peak(device)}"
            yield HealthFinding("device.slow", "problem", (device.rank,), text, _COOL)
        rest = [device for device in alike if device not in slow]
        times = {device.rank: [other.product_s for other in alike if other is not device] for device in rest}
        if len(alike) >= _FEWEST:
            for device in (device for device in rest if is_slow(device.product_s, times[device.rank])):
                usual = statistics.median(times[device.rank])
                text = f"{device.place} is {ratio(device.product_s / usual)} slower than its peers"
                yield HealthFinding("device.slow", "problem", (device.rank,), text, _COOL)
        elif len(rest) == 2:
            fast, slower = sorted(rest, key=lambda device: device.product_s)
            if slower.product_s > _SLOW * fast.product_s:
                yield _two_differ(fast, slower)


def _two_differ(fast: DeviceReading, slower: DeviceReading) -> HealthFinding:
    times = ratio(slower.product_s / fast.product_s)
    if fast.expected_flops is not None:
        text = f"{slower.place} is {times} slower than {fast.place}, which reaches {flops(fast.flops)} of {_peak(fast)}"
        return HealthFinding("device.slow", "problem", (slower.rank,), text, _COOL)
    text = (
        f"{slower.place} and {fast.place} differ {times} in speed; with two devices and no known rate, the check "
        "cannot tell whether one is slow or the other has a higher limit"
    )
    return HealthFinding("devices.differ", "problem", (slower.rank, fast.rank), text, _COOL)


def _peak(device: DeviceReading) -> str:
    return f"up to {flops(device.expected_flops or 0.0)}"


# reasons of NVML; not those of idle, capped or configured devices, whose clock is lowered on purpose
_THROTTLED: dict[int, tuple[Level, str]] = {
    0x08: ("problem", "hardware slowdown"),
    0x40: ("problem", "too hot, slowed by the hardware"),
    0x80: ("problem", "power brake"),
    0x20: ("note", "too hot, slowed by the driver"),
}
_XIDS = {92, *HARDWARE_XIDS["lost"], *HARDWARE_XIDS["memory"]}  # 92: many corrected errors of the memory


def throttle_reasons(counters: Counters) -> list[tuple[Level, str]]:
    """Return the reasons for a lowered clock, each with its level.

    The list is empty if the clock is not lowered, if it is lowered on purpose, or if the reasons are unknown.
    """
    return [reason for bit, reason in _THROTTLED.items() if (counters.throttle or 0) & bit]


def _counted(devices: Sequence[DeviceReading]) -> Iterator[HealthFinding]:
    for device in devices:
        seen, rank = device.counters, (device.rank,)
        if reasons := throttle_reasons(seen):
            level: Level = "problem" if any(kind == "problem" for kind, _ in reasons) else "note"
            text = f"{device.place} lowers its clock: {', '.join(text for _, text in reasons)}"
            yield HealthFinding("device.throttled", level, rank, text, _COOL)
        if seen.ecc_uncorrected or seen.rows_pending:
            counted, errors = seen.ecc_uncorrected or 0, "has memory rows to replace at the next reset"
            if counted:
                errors = f"counts {count(counted, 'uncorrected memory error')}"
            advice = "End all processes on the device, and reset it (nvidia-smi --gpu-reset) or restart its host."
            yield HealthFinding("device.ecc", "problem", rank, f"{device.place} {errors}", advice)
        if seen.rows_failed:
            text = f"{device.place} could not replace a faulty memory row"
            yield HealthFinding("device.rows_failed", "problem", rank, text, _REPLACE)
        if xids := sorted(set(seen.xids or ()) & _XIDS):
            text = f"the kernel's log since boot has errors of {device.place}: XID {', '.join(map(str, xids))}"
            advice = "Restart the host if the device was not reset since then (docs.nvidia.com/deploy/xid-errors)."
            yield HealthFinding("device.xid", "note", rank, text, advice)


# Links


def _wrong_links(devices: Sequence[DeviceReading], links: Sequence[LinkReading]) -> Iterator[HealthFinding]:
    places = {device.rank: device.place for device in devices}
    for link in links:
        if link.wrong:
            text = f"{count(link.wrong, 'byte')} changed on the way from {places[link.source]} to {places[link.target]}"
            advice = "Do not train over this link. Check cables and adapters of both ends."
            yield HealthFinding("link.wrong_data", "problem", (link.source, link.target), text, advice)


def _slow_links(
    devices: Sequence[DeviceReading], links: Sequence[LinkReading], slow_devices: set[int]
) -> Iterator[HealthFinding]:
    """Name devices and hosts whose fastest link is slower than the peers' fastest links.

    A slow link of a device or host slows all its messages, but its neighbors also have other links. The cores of one
    host have no links.
    """
    by_rank = {device.rank: device for device in devices}
    best: dict[str, dict[int, float]] = {}
    for link in links:
        ends = by_rank[link.source], by_rank[link.target]
        within = ends[0].host == ends[1].host
        if within and ends[0].device.startswith(CPU):
            continue
        for end in ends:
            rates = best.setdefault(end.name if within else "", {})
            unit = end.rank if within else end.host
            rates[unit] = max(rates.get(unit, 0.0), link.bytes_per_s)
    for kind, rates in best.items():
        for unit, rate in rates.items() if len(rates) >= _FEWEST else ():
            others = [other for each, other in rates.items() if each != unit]
            if not is_slow(1 / rate, [1 / other for other in others], _SLOW_LINK) or (kind and unit in slow_devices):
                continue
            on_host = [device for device in devices if device.host == unit]
            ranks = (unit,) if kind else _ranks(on_host)
            of = f"the links of {by_rank[unit].place}" if kind else f"the network of host {on_host[0].host_name}"
            text = f"{of}: at most {bandwidth(rate)}; median of its peers: {bandwidth(statistics.median(others))}"
            advice = (
                "Compare `nvidia-smi topo -m` and `nvidia-smi nvlink --status` with a healthy host."
                if kind
                else "Check the rate and the errors of its network interface (ethtool, ibstat), or leave the host out."
            )
            yield HealthFinding("link.slow", "problem", ranks, text, advice)


def _grouped(devices: Iterable[DeviceReading], attribute: str) -> list[list[DeviceReading]]:
    groups: dict[str, list[DeviceReading]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute), []).append(device)
    return list(groups.values())


def _ranks(devices: Iterable[DeviceReading]) -> tuple[int, ...]:
    return tuple(device.rank for device in devices)


# Counters of the driver


def counters_of(device: torch.device) -> Counters:
    """Read the counters of an NVIDIA GPU; all are None for other devices."""
    if (uuid := nvidia_uuid(device)) is None:
        return Counters()
    import pynvml

    try:
        pynvml.nvmlInit()
        return read_counters(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
    except pynvml.NVMLError:
        return Counters()


def read_counters(nvml: Any, handle: Any, log: Path = Path("/dev/kmsg")) -> Counters:
    """Read the counters of a GPU of an initialized NVML; `log` is the kernel's log.

    NVML does not count past XIDs. On most systems, only root can read the kernel's log.
    """

    def ask(question: str, *arguments: int) -> Any:
        with suppress(nvml.NVMLError):
            return getattr(nvml, question)(handle, *arguments)

    rows = ask("nvmlDeviceGetRemappedRows")
    place = ask("nvmlDeviceGetPciInfo")
    return Counters(
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        highest_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        throttle=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        ecc_uncorrected=ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        rows_pending=rows[2] if rows else None,
        rows_failed=rows[3] if rows else None,
        xids=_xids(place.busId, log) if place else None,
    )


def _xids(bus_id: str | bytes, log: Path) -> tuple[int, ...] | None:
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    text = b""
    try:
        while record := os.read(descriptor, 2**13):  # one line per read; after the last line, a read fails
            text += record
    except OSError:
        pass
    finally:
        os.close(descriptor)
    wanted = _slot(bus_id.decode() if isinstance(bus_id, bytes) else bus_id)
    found = re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", text.decode(errors="replace"))
    return tuple(int(number) for slot, number in found if _slot(slot) == wanted)


def _slot(bus_id: str) -> tuple[int, ...]:
    """Return domain, bus and device as numbers, because NVML and the kernel format them differently."""
    return tuple(int(part, 16) for part in bus_id.partition(".")[0].split(":"))
