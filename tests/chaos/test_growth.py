"""Growth of a run's own processes over a long run."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from paceline.chaos.growth import Growth, Sizes, grown

STEADY = Sizes(memory_mb=500, descriptors=80, threads=12, files=20)


@pytest.mark.parametrize("name", Sizes._fields)
def test_what_grows_is_named(name: str) -> None:
    samples = [STEADY._replace(**{name: getattr(STEADY, name) * (1 + i / 100)}) for i in range(200)]
    assert [word.split(" of ")[0] for word in grown(samples)] == [name.replace("_", " ")]


def test_what_comes_and_goes_does_not_grow() -> None:
    times = itertools.cycle((1, 1, 1, 3))
    assert grown([Sizes(*(value * next(times) for value in STEADY)) for _ in range(200)]) == []


def test_a_short_run_tells_nothing_of_growth() -> None:
    assert grown([STEADY, STEADY._replace(files=1000)] * 5) == []


def test_a_process_is_sampled_and_one_that_has_ended_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    growth = Growth(os.getpid(), tmp_path)
    growth.sample()
    growth.sample()
    [sizes] = growth.samples
    assert sizes.files == 1
    assert min(sizes) > 0
    (gone := Growth(2**22 + 1, tmp_path)).sample()
    assert gone.samples == []
