"""Health check of the devices and links of a launch, in seconds.

All devices multiply the same seeded matrices at the same time, so other work on a host does not affect only one
device's measurement. Then each device writes and reads patterns in its free memory, and neighbors exchange messages.
`cluster/health.py` judges the readings.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict

import torch
from pydantic import TypeAdapter
from torch import Tensor

from paceline.cluster.health import (
    BY_TIME,
    Counters,
    DeviceReading,
    HealthFinding,
    HealthReport,
    LinkReading,
    confirmed,
    counters_of,
    judge,
)
from paceline.cluster.machine import own_host
from paceline.cluster.named import known
from paceline.comm.backend import joined
from paceline.comm.checks import greatest, processor
from paceline.comm.group import Group
from paceline.device import built_for, device_module, has_bf16, is_accelerator, memory, synchronize
from paceline.device import name as device_name
from paceline.errors import ClusterError

ATTEMPTS, _PAUSE_S = 3, 0.5  # number of checks before a slow device or link is reported, and the time between them
# minimum time of a product, so that its launch is negligible; minimum and maximum number of rows
_PRODUCT_S, _SMALLEST, _LARGEST = 3e-4, 256, 16384
_ROUNDS, _WARM_UP = 12, 4  # rounds, which all devices begin together; the first rounds only warm the devices up
_LOAD_S, _LOAD_OF_A_CORE_S = 1.0, 0.4
_BLOCK = 1024  # rows of the random matrix that is repeated in a larger one
_MEMORY_S = 0.25  # maximum time for writing free memory once
_CHUNK, _CHUNK_OF_A_CORE = 2**26, 2**24
_MOST_OF_A_CORE = 2**28
# bytes of messages; the next size follows only if a message is faster than this, the last only between accelerators
_SIZES, _NEXT_SIZE_S = (2**18, 2**22, 2**26), 0.002
_MESSAGES, _PINGS = 5, 5
_STRIDES = 3  # a rank exchanges messages with its first, second and third neighbor in a ring
_PATTERN_PERIOD = 251


def check_on_rank(attempts: int) -> HealthReport:
    """Join the other ranks of the launch, and check their devices and links."""
    with joined(deadline_s=60) as group:
        report = check(group, attempts)
        group.barrier()
        return report


def check(group: Group, attempts: int = ATTEMPTS) -> HealthReport:
    """Check the device of every rank, and the links between neighbors.

    Every rank must call this function, and every rank gets the same report. A slow device or link is reported only if
    it is slow in each of several attempts.
    """
    started, findings = time.monotonic(), list[HealthFinding]()
    for attempt in range(attempts):
        if attempt:
            time.sleep(_PAUSE_S)
        devices, links = _readings(group)
        now = judge(devices, links)
        findings = confirmed(findings, now) if attempt else now
        if not any(finding.code in BY_TIME for finding in findings):
            break
    return HealthReport(devices, links, findings, group.transport.name, time.monotonic() - started)


def device_faults(device: torch.device) -> dict[str, int]:
    """Count wrong results and changed words in memory of one device.

    Unlike `check`, this takes less than a second and needs no other rank. A count is missing if a training has left too
    little memory for its check.
    """
    dtypes, found = dict.fromkeys((torch.float32, _dtype(device))), dict[str, int]()
    with suppress(torch.OutOfMemoryError):
        found["wrong_numbers"] = sum(_wrong(device, dtype) for dtype in dtypes)
        found["wrong_words"] = _memory(device, 1, most=_MOST_OF_A_CORE)[1]
    return found


def _readings(group: Group) -> tuple[list[DeviceReading], list[LinkReading]]:
    own = TypeAdapter(DeviceReading).dump_python(_device(group), mode="json")
    devices = TypeAdapter(list[DeviceReading]).validate_python(group.gather_json(own))
    links = [link for found in group.gather_json([asdict(link) for link in _links(group)]) for link in found]
    return devices, TypeAdapter(list[LinkReading]).validate_python(links)


# Devices


def _device(group: Group) -> DeviceReading:
    device, host = group.device, group.hosts[group.rank]
    number = group.hosts[: group.rank].count(host)
    if is_accelerator(device):
        place, name = str(device), device_name(device)
        ask = getattr(device_module(device), "get_device_properties", lambda _: None)
        kind = [name, built_for(), getattr(ask(device), "multi_processor_count", None)]
    else:
        place, details = f"cpu:{number}", processor()
        name = next((line.partition(": ")[2] for line in details.split("; ") if "model name" in line), "CPU")
        kind = [details, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    dtype = _dtype(device)
    n, product_s, digest, changed, counters = _timed_products(group, dtype)
    memory_bytes, memory_wrong = _memory(device, max(map(group.hosts.count, group.hosts)))
    return DeviceReading(
        rank=group.rank,
        host=host,
        host_name=own_host(),
        device=place,
        name=name,
        kind=hashlib.sha256(repr([kind, torch.__version__, str(dtype), n]).encode()).hexdigest()[:16],
        product_flops=2.0 * n**3,
        product_s=product_s,
        wrong=sum(_wrong(device, each) for each in dict.fromkeys((torch.float32, dtype))),
        changed=changed,
        digest=digest,
        memory_bytes=memory_bytes,
        memory_wrong=memory_wrong,
        expected_flops=_expected(name, dtype) if is_accelerator(device) else None,
        counters=counters,
    )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if is_accelerator(device) and has_bf16(device) else torch.float32


def _expected(name: str, dtype: torch.dtype) -> float | None:
    if (spec := known(name)) is None:
        return None
    try:
        return spec.peak("bf16" if dtype == torch.bfloat16 else "fp32") * spec.sustained
    except ClusterError:
        return None


def _timed_products(group: Group, dtype: torch.dtype) -> tuple[int, float, str, int, Counters]:
    """Multiply matrices in rounds that all ranks begin together.

    Returns:
        the number of rows, a low quantile of the times in seconds, a digest of the first result, the number of
        results with other bits, and the driver's counters under load. The quantile excludes interruptions by other
        work, which are frequent on CPU cores.
    """
    device, n = group.device, _SMALLEST
    while n < _LARGEST and min(_times_s(device, *_matrices(n, dtype, device), count=3)) < _PRODUCT_S:
        n *= 2
    n = int(greatest(group, n))
    a, b, first = _matrices(n, dtype, device)
    torch.mm(a, b, out=first)
    words, out = _words(first), torch.empty_like(first)
    changed, times_s, counters = torch.zeros((), dtype=torch.int64, device=device), list[float](), Counters()
    load_s = _LOAD_S if is_accelerator(device) else _LOAD_OF_A_CORE_S
    for number in range(_ROUNDS):
        group.barrier()
        until = time.perf_counter() + load_s / _ROUNDS
        while True:
            took_s = _times_s(device, a, b, out)
            changed += (_words(out) != words).any()
            if number >= _WARM_UP:
                times_s += took_s
            if time.perf_counter() > until:
                break
        if number == _ROUNDS // 2:
            torch.mm(a, b, out=out)  # the device is busy while its clock is read
            counters = counters_of(device)
    product_s = statistics.quantiles([*times_s, max(times_s)], n=4 if is_accelerator(device) else 10)[0]
    return n, product_s, _digest(words), int(changed.item()), counters


def _matrices(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return two matrices that are equal on every rank, and memory for their product."""
    random = torch.Generator().manual_seed(n)
    block, times = min(n, _BLOCK), max(1, n // _BLOCK)
    a, b = (torch.randn(block, block, generator=random).to(device, dtype).repeat(times, times) for _ in range(2))
    return a, b, torch.empty_like(a)


def _times_s(device: torch.device, a: Tensor, b: Tensor, out: Tensor, count: int = 1) -> list[float]:
    times_s = []
    synchronize(device)
    for _ in range(count):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        times_s.append(time.perf_counter() - started)
    return times_s


def _words(matrix: Tensor) -> Tensor:
    return matrix.view(torch.int16 if matrix.element_size() == 2 else torch.int32)


def _digest(words: Tensor) -> str:
    """Return a digest of a matrix's bits, from weighted sums of its rows and columns."""
    weights = torch.arange(1, 2 * len(words), 2, device=words.device)
    sums = [int((words.sum(dim, dtype=torch.int64) * weights).sum().item()) for dim in (0, 1)]
    return "-".join(f"{total % 2**64:016x}" for total in sums)


def _wrong(device: torch.device, dtype: torch.dtype) -> int:
    """Count wrong numbers in a product whose sums are exact in any order."""
    rows, largest = (512, 8) if dtype == torch.float32 else (256, 1)
    random = torch.Generator().manual_seed(rows)
    a, b = (torch.randint(-largest, largest + 1, (rows, rows), generator=random) for _ in range(2))
    result = torch.mm(a.to(device, dtype), b.to(device, dtype))
    return int((result.cpu() != torch.mm(a.double(), b.double()).to(dtype)).sum().item())


def _memory(device: torch.device, ranks_on_host: int, most: int | None = None) -> tuple[int, int]:
    """Write patterns to free memory, and count the words that differ.

    A pattern and its complement are each written to all of this memory before they are read. On an accelerator, at most
    half of the free memory is written. A time limit may end the writing earlier.

    Returns:
        the number of bytes that were written, and the number of words that differed.
    """
    if is_accelerator(device):
        seen = memory(device)
        chunk, limit = _CHUNK, seen.free // 2 if seen is not None else 4 * _CHUNK
    else:
        import psutil

        chunk = _CHUNK_OF_A_CORE
        limit = min(_MOST_OF_A_CORE, psutil.virtual_memory().available // (4 * ranks_on_host))
    pattern = torch.arange(chunk // 8, device=device) * -7046029254386353131  # 2^64 / the golden ratio, odd
    held = list(_chunks(pattern, min(limit, most or limit)))
    wrong, read = torch.zeros((), dtype=torch.int64, device=device), torch.empty_like(pattern)
    for flip in (0, -1):
        if flip:
            for part in held:
                part.bitwise_not_()
        for number, part in enumerate(held):  # only after all chunks were written, so that no cache answers
            torch.bitwise_xor(part, number ^ flip, out=read)
            wrong += (read != pattern).sum()
    return chunk * len(held), int(wrong.item())


def _chunks(pattern: Tensor, limit: int) -> Iterator[Tensor]:
    until, number = time.perf_counter() + _MEMORY_S, 0
    while (number + 1) * pattern.nbytes <= limit and (number == 0 or time.perf_counter() < until):
        try:
            yield pattern ^ number
        except torch.OutOfMemoryError:
            return
        synchronize(pattern.device)
        number += 1


# Links


def _links(group: Group) -> list[LinkReading]:
    """Measure messages to this rank from its neighbors. A rank takes part in one exchange at a time."""
    if group.size == 1:
        return []
    phases, measured = _phases(_neighbors(group.hosts)), dict[tuple[int, int], tuple[float, int]]()
    for size in _SIZES if is_accelerator(group.device) else _SIZES[:-1]:
        for phase in phases:
            group.barrier()
            for link in (link for link in phase if group.rank in link):
                if (found := _messages(group, link, size)) is not None:
                    measured[link] = found[0], measured.get(link, (0.0, 0))[1] + found[1]
        slowest_s = greatest(group, max((size / rate for rate, _ in measured.values()), default=0.0))
        if slowest_s > _NEXT_SIZE_S:
            break
    latencies_s = dict[tuple[int, int], float]()
    for phase in phases:
        group.barrier()
        latencies_s |= {link: _ping_s(group, link) for link in phase if group.rank in link}
    return [LinkReading(*link, rate, latencies_s[link], wrong) for link, (rate, wrong) in measured.items()]


def _neighbors(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the links to measure, in rings: one in each host, one between hosts."""
    rings = [[rank for rank, on in enumerate(hosts) if on == host] for host in dict.fromkeys(hosts)]
    rings.append([ring[0] for ring in rings])
    return [
        (ring[place], ring[(place + stride) % len(ring)])
        for ring in rings
        for stride in range(1, min(_STRIDES, len(ring) - 1) + 1)
        for place in range(len(ring))
    ]


def _phases(links: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide links into phases in which no rank has two links."""
    phases: list[list[tuple[int, int]]] = []
    for link in links:
        free = (phase for phase in phases if not {rank for each in phase for rank in each} & set(link))
        phase = next(free, None)
        if phase is None:
            phases.append(phase := [])
        phase.append(link)
    return phases


def _messages(group: Group, link: tuple[int, int], size: int) -> tuple[float, int] | None:
    """Send messages over a link at the request of the target.

    Returns:
        on the target, the bytes per second and the number of changed bytes; None on the source. The rate is that of
        the fastest message, because other work on the hosts only adds time.
    """
    source, target = link
    pattern = ((torch.arange(size, device=group.device) + source) % _PATTERN_PERIOD).to(torch.uint8)
    token, received, times_s = torch.zeros(1, device=group.device), torch.zeros_like(pattern), []
    for _ in range(_MESSAGES + 1):
        synchronize(group.device)
        started = time.perf_counter()
        if group.rank == source:
            group.receive(token, target)
            group.send(pattern, target)
            continue
        group.send(token, source)
        group.receive(received, source)
        synchronize(group.device)
        times_s.append(time.perf_counter() - started)
    if group.rank == source:
        synchronize(group.device)
        return None
    # the first message opens connections, and uses up the burst that a shaped link allows
    return size / max(min(times_s[1:]), 1e-9), int((received != pattern).sum().item())


def _ping_s(group: Group, link: tuple[int, int]) -> float:
    """Measure half of the median round-trip time of a small message."""
    source, target = link
    token, times_s = torch.zeros(1, device=group.device), []
    for _ in range(_PINGS + 1):
        started = time.perf_counter()
        if group.rank == target:
            group.send(token, source)
            group.receive(token, source)
        else:
            group.receive(token, target)
            group.send(token, target)
        synchronize(group.device)
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s[1:]) / 2
