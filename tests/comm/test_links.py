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


FAST, FASTEST = LinkSpeed(1 * MS, 10_000 * MB), LinkSpeed(1 * MS, 100_000 * MB)


@pytest.mark.parametrize(
    ("time_s", "expected_ms"),
    [
        pytest.param(BETWEEN.message_s(5 * MB), 51, id="a message: the latency and its bytes"),
        pytest.param(links(0, 0, 1, 1).flat_s(int(4 * MB)), 6 * (0.5 + 10), id="flat crosses the link once"),
        pytest.param(links(0, 1, 0, 1).flat_s(int(4 * MB)), 6 * (0.5 + 20), id="flat, dealt in turns: twice at once"),
        pytest.param(links(0, 0, 1, 1).ring_s(int(4 * MB)), 6 * (1 + 10), id="our ring crosses each link once"),
        pytest.param(links(0, 1, 0, 1).ring_s(int(4 * MB)), 6 * (1 + 10), id="however the ranks are dealt"),
        pytest.param(links(0, 0, 1, 1, between=FAST).ring_s(int(4 * MB)), 6 * (1 + 1), id="a slow inside slows it"),
        pytest.param(
            links(0, 1, 2, 3, between=FAST).ring_s(int(4 * MB)), 6 * (1 + 0.1), id="unless nothing goes inside a host"
        ),
        pytest.param(links(0, 0, 1, 1).hierarchical_s(int(4 * MB)), 0.04 + 2 + 40, id="by host: memory is hidden"),
        pytest.param(links(0, 0, 1, 1, 2, 2).hierarchical_s(int(3 * MB)), 0.04 + 4 + 40, id="over three hosts"),
        pytest.param(
            links(0, 0, 1, 1, between=FASTEST).hierarchical_s(int(40 * MB)), 0.04 + 2 + 4, id="as slow as the memory"
        ),
    ],
)
def test_the_formulas_give_what_is_counted_by_hand(time_s: float, expected_ms: float) -> None:
    assert time_s == pytest.approx(expected_ms * MS)


def test_large_tensors_want_the_hierarchy() -> None:
    eight = links(0, 0, 1, 1, 2, 2, 3, 3)
    large = int(100 * MB)
    assert eight.hierarchical_s(large) < min(eight.flat_s(large), eight.ring_s(large))
