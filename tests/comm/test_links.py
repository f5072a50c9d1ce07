"""The formulas say what the model says.

Counted by hand for small cases, and in the order in which the ways really are fast.
"""

from __future__ import annotations

import pytest

from paceline.comm.links import GroupLinks, LinkSpeed

MS, MB = 1e-3, 1e6
BETWEEN, INSIDE, MEMORY = LinkSpeed(1 * MS, 100 * MB), LinkSpeed(0.1 * MS, 1000 * MB), LinkSpeed(0.02 * MS, 10_000 * MB)


def links(*hosts: int, between: LinkSpeed = BETWEEN) -> GroupLinks:
    """Ranks on these hosts, whose rings step in 1 ms and 0.5 ms."""
    return GroupLinks(hosts, between, INSIDE, MEMORY, step_s=1 * MS, flat_step_s=0.5 * MS)


def test_a_message_takes_the_latency_and_its_bytes() -> None:
    assert BETWEEN.message_s(int(5 * MB)) == pytest.approx(51 * MS)


def test_a_flat_ring_of_four_crosses_the_link_with_a_half_more_than_two_hosts_need() -> None:
    assert links(0, 0, 1, 1).flat_s(int(4 * MB)) == pytest.approx(6 * (0.5 * MS + 10 * MS))
    assert links(0, 1, 0, 1).flat_s(int(4 * MB)) == pytest.approx(6 * (0.5 * MS + 20 * MS)), (
        "ranks dealt in turns cross it twice at once"
    )


def test_our_ring_crosses_each_link_once_however_the_ranks_are_dealt() -> None:
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1)):
        assert links(*hosts).ring_s(int(4 * MB)) == pytest.approx(6 * (1 * MS + 10 * MS))


def test_a_slow_inside_slows_the_ring() -> None:
    fast = LinkSpeed(1 * MS, 10_000 * MB)
    assert links(0, 0, 1, 1, between=fast).ring_s(int(4 * MB)) == pytest.approx(6 * (1 * MS + 1 * MS))
    assert links(0, 1, 2, 3, between=fast).ring_s(int(4 * MB)) == pytest.approx(6 * (1 * MS + 0.1 * MS)), (
        "nothing goes inside a host"
    )


def test_by_host_only_what_must_crosses_the_link_and_memory_is_hidden() -> None:
    assert links(0, 0, 1, 1).hierarchical_s(int(4 * MB)) == pytest.approx(0.04 * MS + 2 * MS + 40 * MS)
    assert links(0, 0, 1, 1, 2, 2).hierarchical_s(int(3 * MB)) == pytest.approx(0.04 * MS + 4 * MS + 40 * MS)
    fast = LinkSpeed(1 * MS, 100_000 * MB)
    limited_by_memory = links(0, 0, 1, 1, between=fast)
    assert limited_by_memory.hierarchical_s(int(40 * MB)) == pytest.approx(0.04 * MS + 2 * MS + 4 * MS), (
        "as slow as the memory"
    )


def test_large_tensors_want_the_hierarchy() -> None:
    eight = links(0, 0, 1, 1, 2, 2, 3, 3)
    large = int(100 * MB)
    assert eight.hierarchical_s(large) < min(eight.flat_s(large), eight.ring_s(large))
