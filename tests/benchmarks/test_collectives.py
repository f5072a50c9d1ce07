"""The benchmark of collectives compares right results, and its figures are what it says they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collectives
from ranks import Ranks


@pytest.mark.slow
def test_a_round_measures_every_form_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZES": [1024, 65536], "LARGE": 65536, "BLOCKS": 3, "STARTS": 1, "BLOCK_S": 0.001}.items():
        monkeypatch.setattr(collectives, name, value)
    found = {2: collectives.all_reduces(2)}
    for size, forms in ((1024, 3), (65536, 4)):
        assert len(found[2][size]) == forms
        assert all(len(blocks) == 3 and min(blocks) > 0 for blocks in found[2][size].values())
    assert min(collectives.figures(found).values()) > 0
    assert len([*collectives.lines(2, found[2])]) == 1 + 2 + 1


@pytest.mark.slow
def test_every_other_case_gives_the_result_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OTHER_SIZES": (1024,), "BLOCKS": 2, "BLOCK_S": 0.001}.items():
        monkeypatch.setattr(collectives, name, value)
    for ranks in (2, 3):
        names = [name for name, _ in collectives.other_cases(ranks)]
        assert [line.strip().split("  ")[0] for line in collectives.other_lines(ranks)][1:] == names


@pytest.mark.slow
def test_a_transport_with_wrong_results_is_not_timed(ranks: Ranks) -> None:
    assert ranks(2, _errors_of_wrong_transports) == [
        ["all-reduce, ours, private: rank 0 has another result than gloo's"] * 2,
        ["all-reduce, ours, private: rank 1 has another result than gloo's"] * 2,
    ]


def _errors_of_wrong_transports() -> list[str]:
    """What `check` says of an all-reduce that does nothing, and of one that is off by a little."""
    group: Any = dist.group.WORLD
    errors = []
    for wrong in (lambda tensor: None, lambda tensor: (dist.all_reduce(tensor), tensor.mul_(1.001))):
        first, second = torch.zeros(100), torch.zeros(100)
        calls = {
            collectives.GLOO: collectives.collective("all-reduce", first, group),
            collectives.PRIVATE: collectives.Call(second, second, partial(wrong, second)),
        }
        try:
            collectives.check(collectives.Case("all-reduce", 100), calls, group)
        except AssertionError as error:
            errors.append(str(error))
    return errors


def test_figures_are_the_smallest_and_the_median_ratio_of_neighbouring_blocks() -> None:
    def times_s(gloo: float, shared: float, private: float) -> dict[str, list[float]]:
        # The second block of all is ten times as slow: other work on the machine. Ratios of neighbours do not see it.
        return {
            name: [s, 10 * s, s]
            for name, s in zip(
                (collectives.GLOO, collectives.SHARED, collectives.PRIVATE), (gloo, shared, private), strict=True
            )
        }

    found = {2: {1024: times_s(8.0, 1.0, 2.0), 4096: times_s(9.0, 3.0, 9.0)}, 4: {1024: times_s(10.0, 2.0, 4.0)}}
    large = collectives.LARGE
    found[2][large] = times_s(20.0, 1.0, 4.0) | {collectives.COPY: [1.0, 10.0, 1.0]}
    figures = collectives.figures(found)
    assert figures["smallest_ratio_to_gloo"] == pytest.approx(3.0)
    assert figures["median_ratio_to_gloo"] == pytest.approx((5.0 + 8.0) / 2)
    assert figures["smallest_ratio_to_gloo_private"] == pytest.approx(1.0)
    copied = 2 * collectives.copying(2) * collectives.COPY_BYTES  # in 1 s: so many bytes a second
    assert figures["large_share_of_memory_bandwidth"] == pytest.approx(2 * 2 * large / copied)
