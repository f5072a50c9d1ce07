"""Errors of waits for other ranks are told from others when a generation ends."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from paceline.errors import ClusterError, SyncError
from paceline.wire.status import Generation, GenerationOver, ends_generation, generation_is_over, watch_generation


def test_a_process_has_the_place_that_is_left_for_it() -> None:
    assert [Generation(3, (0, 2, 5)).rank_of(member) for member in (0, 2, 5)] == [0, 1, 2]


@pytest.mark.parametrize(
    "error",
    [SyncError("test.planted", "gone"), ClusterError("test.planted", "no such memory"), dist.DistBackendError("gone")],
)
def test_an_error_of_a_wait_for_ranks_ends_the_generation_once_that_is_announced(error: Exception) -> None:
    looks = iter([False, False, True])
    with watch_generation(lambda: next(looks, True)):
        assert ends_generation(error)
        assert generation_is_over()
        assert ends_generation(GenerationOver("test.planted", "gone"))
    assert not generation_is_over()


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("label 11"), OSError("no room")])
def test_an_error_of_the_users_is_his_at_once(error: Exception) -> None:
    with watch_generation(lambda: True):
        assert not ends_generation(error)


def test_an_error_that_no_generations_end_explains_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr("paceline.wire.status._ANNOUNCED_WITHIN_S", 0.01)
    error = SyncError("test.planted", "they called different collectives")
    with watch_generation(lambda: False):
        assert not ends_generation(error)
        waited = len(waits)
        assert not ends_generation(error)
    assert 0 < waited == len(waits)


def test_without_generations_nothing_is_waited_for() -> None:
    assert not ends_generation(SyncError("test.planted", "gone"))
