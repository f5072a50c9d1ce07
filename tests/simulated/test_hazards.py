"""Each mistake of synchronisation shows as a wrong number, and goes away with what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from simulated.environment import Order, Simulated

DEVICE = "sim"


def test_every_mistake_shows_in_late_order(simulated: Simulated) -> None:
    [shown] = simulated.ranks(1, mistakes_and_corrections)
    assert shown == dict.fromkeys(HAZARDS, (False, True))


def test_mistakes_stay_hidden_in_eager_order(simulated: Simulated) -> None:
    """As on many GPUs: this is what late order is for."""
    [shown] = simulated.ranks(1, mistakes_and_corrections, order="eager")
    assert shown == dict.fromkeys(HAZARDS, (True, True))


def test_random_order_finds_mistakes_too_and_no_others(simulated: Simulated) -> None:
    [shown] = simulated.ranks(1, mistakes_in_random_order, 30)
    assert all(right == 30 for _, right in shown.values())
    assert sum(wrong < 30 for wrong, _ in shown.values()) >= 4


@pytest.mark.parametrize("order", ["late", "random"])
def test_polling_an_event_makes_progress(simulated: Simulated, order: Order) -> None:
    assert simulated.ranks(1, polled, order=order) == [True]


def mistakes_and_corrections() -> dict[str, tuple[bool, bool]]:
    """By hazard: is the number right without, and with, the synchronisation?"""
    return {name: (hazard(False), hazard(True)) for name, hazard in HAZARDS.items()}


def mistakes_in_random_order(times: int) -> dict[str, tuple[int, int]]:
    """By hazard: number of runs with the right number, without and with the synchronisation."""
    sim: Any = torch.sim  # type: ignore[attr-defined]
    shown = {}
    for name, hazard in HAZARDS.items():
        right = [0, 0]
        for seed in range(times):
            sim.set_order("random", seed)
            for synchronized in (False, True):
                right[synchronized] += hazard(synchronized)
        shown[name] = (right[0], right[1])
    return shown


def side_stream_reads_early(synchronized: bool) -> bool:
    side, doubled = torch.Stream(DEVICE), torch.ones(64, device=DEVICE) * 2
    if synchronized:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        return (doubled + 1).sum().item() == 3 * 64


def main_stream_reads_early(synchronized: bool) -> bool:
    side, ones = torch.Stream(DEVICE), torch.ones(64, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tripled = ones * 3
    if synchronized:
        torch.accelerator.current_stream().wait_stream(side)
    return (tripled + 0).sum().item() == 3 * 64


def memory_is_reused_early(synchronized: bool) -> bool:
    side, twos = torch.Stream(DEVICE), torch.full((1024,), 2.0, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tripled = twos * 3
    if synchronized:
        twos.record_stream(side)
    del twos
    torch.zeros(1024, device=DEVICE)
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    with side:
        return tripled.sum().item() == 6 * 1024


def host_reads_pinned_memory_early(synchronized: bool) -> bool:
    fives, host = torch.full((64,), 5.0, device=DEVICE), torch.zeros(64, pin_memory=True)
    host.copy_(fives, non_blocking=True)
    event = torch.Event(DEVICE)
    event.record()
    if synchronized:
        event.synchronize()
    return host.sum().item() == 5 * 64


def pinned_memory_is_refilled_early(synchronized: bool) -> bool:
    host = torch.ones(64, pin_memory=True)
    copied = host.to(DEVICE, non_blocking=True)
    if synchronized:
        torch.accelerator.synchronize()
    host.fill_(9)
    return copied.sum().item() == 64


HAZARDS: dict[str, Callable[[bool], bool]] = {
    hazard.__name__: hazard
    for hazard in (
        side_stream_reads_early,
        main_stream_reads_early,
        memory_is_reused_early,
        host_reads_pinned_memory_early,
        pinned_memory_is_refilled_early,
    )
}


def polled() -> bool:
    event = torch.Event(DEVICE)
    for _ in range(9):
        torch.ones(9, device=DEVICE)
    event.record()
    return any(event.query() for _ in range(100))
