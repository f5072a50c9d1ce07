"""Growth of a run and its processes over a long run."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from paceline_lab.chaos.play import Growth, Sizes, courses

STEADY = Sizes(memory_mb=500, processes=9, descriptors=80, threads=12, files=20)


def grown(*samples: Sizes) -> list[str]:
    return [course.name for course in courses([(2.0 * i, sample) for i, sample in enumerate(samples)]) if course.grows]


@pytest.mark.parametrize("name", Sizes._fields)
def test_what_grows_is_named(name: str) -> None:
    assert grown(*(STEADY._replace(**{name: getattr(STEADY, name) * (1 + i / 100)}) for i in range(200))) == [name]


def test_what_comes_and_goes_does_not_grow() -> None:
    times = itertools.cycle((1, 1, 1, 3))
    assert grown(*(Sizes(*(value * next(times) for value in STEADY)) for _ in range(200))) == []


def test_a_course_says_the_size_early_and_late_and_what_is_added_a_minute() -> None:
    samples = [(2.0 * i, STEADY._replace(memory_mb=500 + i)) for i in range(120)]
    memory, processes, *_ = map(str, courses(samples))
    assert memory == "memory from 544.5 to 604.5 MB, +30 a minute"
    assert processes == "processes from 9 to 9, +0 a minute"


def test_a_short_run_tells_nothing_of_growth() -> None:
    assert courses([(0.0, STEADY), (1.0, STEADY._replace(files=1000))] * 5) == []


def test_a_process_is_sampled_while_its_ranks_train(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    growth = Growth(os.getpid(), 0, tmp_path)
    growth.sample(0, lambda: {"sync"})  # no step yet
    growth.sample(1, lambda: {"sync", "joining"})
    assert growth.samples == []
    growth.sample(1, lambda: {"sync"})
    growth.sample(2, lambda: {"sync"})  # too soon
    [(_, sizes)] = growth.samples
    assert sizes.files == 1
    assert min(sizes) > 0
    for other in (Growth(os.getpid(), 1, tmp_path), Growth(2**22 + 1, 0, tmp_path)):  # a rank is away; it has ended
        other.sample(1, lambda: {"sync"})
        assert other.samples == []
