"""Judgement of readings. A mistake here leaves out a healthy device, or trains on a faulty one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.health import Counters, DeviceReading, LinkReading, confirmed, judge, read_counters

NOISE = st.floats(1.0, 1.15)  # of healthy devices, as a multiple of their fastest time
PLANTED_NOISE = st.floats(1.0, 1.05)
TIMES = st.lists(NOISE, min_size=3, max_size=16)


def reading(rank: int, **changes: Any) -> DeviceReading:
    healthy = DeviceReading(
        rank=rank,
        host=rank // 2,
        host_name=f"host-{rank // 2}",
        device=f"cuda:{rank % 2}",
        name="Some GPU",
        kind="some software",
        product_flops=1e12,
        product_s=1e-3,
        wrong=0,
        changed=0,
        digest="right",
        memory_bytes=2**30,
        memory_wrong=0,
        expected_flops=None,
        counters=Counters(),
    )
    return replace(healthy, **changes)


def named(devices: list[DeviceReading], links: Sequence[LinkReading] = ()) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.code, finding.ranks) for finding in judge(devices, links)]


def ring(rates: dict[int, float]) -> list[LinkReading]:
    """Links between the first ranks of hosts; a link has the rate of its slower end."""
    ranks = [2 * host for host in rates]
    pairs = {(a, ranks[(place + stride) % len(ranks)]) for place, a in enumerate(ranks) for stride in (1, 2)}
    return [LinkReading(a, b, min(rates[a // 2], rates[b // 2]), 1e-4) for a, b in sorted(pairs)]


@given(TIMES)
def test_noise_is_no_fault(times: list[float]) -> None:
    assert named([reading(rank, product_s=time) for rank, time in enumerate(times)]) == []


@given(st.lists(PLANTED_NOISE, min_size=3, max_size=16), st.data())
def test_a_device_that_lost_a_quarter_of_its_rate_is_named(times: list[float], data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, len(times) - 1))
    devices = [reading(rank, product_s=time / (0.75 if rank == slow else 1)) for rank, time in enumerate(times)]
    assert named(devices) == [("device.slow", (slow,))]


@given(st.lists(st.floats(0.8, 1.0), min_size=3, max_size=9), st.data())
def test_the_host_with_half_the_rate_is_named_and_not_its_neighbors(rates: list[float], data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, len(rates) - 1))
    links = {host: rate * (0.5 * 0.8 if host == slow else 1) for host, rate in enumerate(rates)}
    devices = [reading(rank) for rank in range(2 * len(rates))]
    assert named(devices, ring(dict(enumerate(rates)))) == []
    assert named(devices, ring(links)) == [("link.slow", (2 * slow, 2 * slow + 1))]


def test_of_two_devices_the_slow_one_is_named_only_if_the_rate_is_known() -> None:
    pair = [reading(0), reading(1, product_s=1.5e-3)]
    assert named(pair) == [("devices.differ", (1, 0))]
    assert named([replace(device, expected_flops=1.3e15) for device in pair]) == [("device.slow", (1,))]


def test_a_device_alone_is_held_to_the_catalogue() -> None:
    assert named([reading(0, expected_flops=1.3e15)]) == []
    assert named([reading(0, expected_flops=9e15)]) == [("device.slow", (0,))]
    assert named([reading(0)]) == []


@pytest.mark.parametrize("fault", [{"wrong": 3}, {"changed": 1}, {"digest": "other"}])
def test_wrong_arithmetic_is_named(fault: dict[str, Any]) -> None:
    devices = [reading(rank, **(fault if rank == 2 else {})) for rank in range(4)]
    assert named(devices) == [("device.wrong_result", (2,))]


def test_of_two_devices_with_different_bits_the_one_with_wrong_numbers_is_named() -> None:
    assert named([reading(0), reading(1, digest="other")]) == [("devices.bits_differ", (0, 1))]
    assert named([reading(0), reading(1, digest="other", wrong=1)]) == [("device.wrong_result", (1,))]
    assert named([reading(0), reading(1, digest="other", kind="other software")]) == []


@pytest.mark.parametrize(("device", "found"), [("cuda", [("link.slow", (0,))]), ("cpu", [])])
def test_accelerators_of_one_host_have_links_and_its_cores_do_not(device: str, found: list[Any]) -> None:
    devices = [reading(rank, host=0, device=f"{device}:{rank}") for rank in range(3)]
    links = [LinkReading(a, b, 1e9 if 0 in (a, b) else 9e9, 1e-5) for a in range(3) for b in range(3) if a != b]
    assert named(devices, links) == found


def test_wrong_memory_and_changed_messages_are_named() -> None:
    devices = [reading(0), reading(1, memory_wrong=1), reading(2)]
    links = [LinkReading(0, 2, 1e9, 1e-5, wrong=5)]
    assert named(devices, links) == [("device.wrong_memory", (1,)), ("link.wrong_data", (0, 2))]


def test_counters_of_the_driver_are_judged_and_unknown_ones_are_not() -> None:
    counters = [
        Counters(),
        Counters(1980, 1980, 0x4, 0, 0, 0, (13, 31)),  # at its power cap, with errors of a program
        Counters(throttle=0x40),
        Counters(ecc_uncorrected=1),
        Counters(rows_failed=1),
        Counters(xids=(79,)),
    ]
    codes = ["device.throttled", "device.ecc", "device.rows_failed", "device.xid"]
    assert named([reading(rank, counters=counted) for rank, counted in enumerate(counters)]) == [
        (code, (rank,)) for rank, code in enumerate(codes, 2)
    ]


def test_a_time_must_be_found_again_and_a_wrong_result_must_not() -> None:
    slow, wrong = reading(1, product_s=1.0), reading(2, wrong=1)
    first, second = judge([reading(0), slow, wrong], []), judge([reading(0), reading(1), wrong], [])
    assert [finding.code for finding in confirmed(first, second)] == ["device.wrong_result"]
    assert [finding.code for finding in confirmed(second, first)] == ["device.wrong_result"]
    assert {finding.code for finding in confirmed(first, first)} == {"device.slow", "device.wrong_result"}


class Driver:
    """NVML of one GPU, without counters of memory errors."""

    NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 1, 0

    class NVMLError(Exception):
        """The counter is not supported."""

    def nvmlDeviceGetClockInfo(self, _: Any, clock: int) -> int:
        return 1200

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: Any) -> int:
        return 4

    def nvmlDeviceGetRemappedRows(self, _: Any) -> tuple[int, ...]:
        return 2, 0, 1, 0

    def nvmlDeviceGetTotalEccErrors(self, *_: Any) -> int:
        raise self.NVMLError

    def nvmlDeviceGetPciInfo(self, _: Any) -> SimpleNamespace:
        return SimpleNamespace(busId="00000000:3B:00.0")


def test_counters_are_read_and_absent_ones_are_unknown(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("NVRM: Xid (PCI:0000:3b:00): 79, pid=1\nNVRM: Xid (PCI:0000:5e:00): 48, pid=1\n")
    assert read_counters(Driver(), None, log) == Counters(1200, 1200, 4, None, 1, 0, (79,))
    assert read_counters(Driver(), None, tmp_path / "none").xids is None
