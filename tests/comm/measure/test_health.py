"""The health check on ranks. A mistake here misses a fault, or reports a healthy device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hosts import Hosts
from paceline.cluster.health import HealthReport
from paceline.comm.backend import joined
from paceline.comm.measure.health import check, device_faults
from ranks import Ranks
from simulated.environment import Simulated


def checked(fault: str = "", on_real_time: bool = False) -> HealthReport:
    """Check the ranks of this launch; rank 1 has a fault."""
    with joined(deadline_s=60) as group:
        if not on_real_time:
            count_time()
        if group.rank == 1 and fault:
            FAULTS[fault]()
        report = check(group)
        group.barrier()
        return report


def count_time(product_s: float = 1.0) -> None:
    """Replace the clock with one that only matrix products and readings advance.

    Other work on the machine then takes no time.
    """
    exact, now_s = torch.mm, 0.0

    def mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal now_s
        now_s += product_s
        return exact(*args, **kwargs)

    def perf_counter() -> float:
        nonlocal now_s
        now_s += 0.05
        return now_s

    torch.mm, time.perf_counter = mm, perf_counter


def wrong_sum() -> None:
    exact = torch.mm

    def mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = exact(*args, **kwargs)
        result[3, 5] += 1.0
        return result

    torch.mm = mm


def half_as_fast() -> None:
    count_time(product_s=2.0)


def forgetful_memory() -> None:
    torch.Tensor.bitwise_not_ = torch.Tensor.clone  # type: ignore[method-assign]


FAULTS = {"wrong": wrong_sum, "slow": half_as_fast, "memory": forgetful_memory}
FOUND = [("wrong", "device.wrong_result"), ("slow", "device.slow"), ("memory", "device.wrong_memory")]


def found(report: HealthReport) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.code, finding.ranks) for finding in report.findings]


def test_healthy_cores_have_no_findings_and_complete_readings(ranks: Ranks) -> None:
    first, *others = ranks(3, checked)
    assert found(first) == []
    assert all((other.devices, other.links) == (first.devices, first.links) for other in others)
    assert [(device.rank, device.device) for device in first.devices] == [(r, f"cpu:{r}") for r in range(3)]
    assert all(device.flops > 0 and device.memory_bytes > 0 for device in first.devices)
    assert {(link.source, link.target) for link in first.links} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    assert all(link.bytes_per_s > 0 and link.latency_s > 0 for link in first.links)


def test_one_rank_is_checked_alone(ranks: Ranks) -> None:
    [report] = ranks(1, checked, "", True)
    assert (found(report), report.links) == ([], [])


@pytest.mark.parametrize(("fault", "code"), FOUND)
def test_a_planted_fault_of_a_core_is_named(ranks: Ranks, fault: str, code: str) -> None:
    assert (code, (1,)) in found(ranks(3, checked, fault)[0])


@pytest.mark.parametrize(("fault", "code"), [("", ""), *FOUND])
def test_accelerators_are_checked_as_cores_are(simulated: Simulated, fault: str, code: str) -> None:
    report = simulated.ranks(3, checked, fault)[0]
    assert [device.device for device in report.devices] == ["sim:0", "sim:1", "sim:2"]
    assert report.transport == "simccl"
    assert (code, (1,)) in found(report) if code else not found(report)


def test_a_check_during_training_does_not_run_out_of_memory(simulated: Simulated) -> None:
    [(enough, too_little)] = simulated.ranks(1, faults_beside_a_training, memory_bytes=2**30)
    assert enough == {"wrong_numbers": 0, "wrong_words": 0}
    assert too_little == {"wrong_numbers": 0}


def faults_beside_a_training() -> tuple[dict[str, int], dict[str, int]]:
    device = torch.device("sim", 0)
    enough = device_faults(device)
    torch.accelerator.empty_cache()
    weights = torch.empty(2**30 - 2**26, dtype=torch.uint8, device=device)
    return enough, device_faults(weights.device)


@pytest.mark.needs_root
@pytest.mark.slow
def test_a_host_with_a_slow_link_is_named(hosts: Hosts) -> None:
    report = hosts(3, rate=("100mbit", "40mbit", "100mbit")).run(checked, "", True)[0]
    assert found(report) == [("link.slow", (1,))]
