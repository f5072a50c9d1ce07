"""A function on ranks: its request and its results keep their types, and whatever ends it ends all ranks."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_plan, run_on_ranks
from paceline.errors import LaunchError
from paceline.job.job import Job
from paceline.planning.plan import Plan
from refusals import raises
from small_jobs import small_job


@dataclass(frozen=True)
class Request:
    job: Job
    cluster: Cluster
    plan: Plan
    sizes: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Answer:
    rank: int
    request: Request
    threads: int


def echo(request: Request) -> Answer:
    return Answer(int(os.environ["RANK"]), request, int(os.environ["OMP_NUM_THREADS"]))


def count_to(last: int, report: Callable[[list[int]], None]) -> list[int]:
    """Reports every number before the last, and fails at 3."""
    counted: list[int] = []
    for number in range(last):
        counted.append(number)
        report(counted)
        time.sleep(0.3)
        if number == 3:
            raise ValueError("three is too much")
    return [*counted, last]


def leave(code: int) -> int:
    if os.environ["RANK"] == "1":
        sys.exit(code)
    return code


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_request_and_results_keep_their_types_and_come_in_the_order_of_ranks() -> None:
    job, cluster, plan = small_job(), discover(), Plan.parse("dp=2 threads=1 cut=blocks.1")
    request = Request(job, cluster, plan, {4: (1.5, math.inf)})
    assert run_on_plan(echo, request, job=job, cluster=cluster, plan=plan) == [
        Answer(rank, request, 1) for rank in (0, 1)
    ]


def test_results_so_far_arrive_the_last_one_too() -> None:
    seen: list[list[int]] = []
    assert run_on_ranks(count_to, 2, places=on_this_machine(2), on_partial=seen.append) == [[0, 1, 2]] * 2
    assert seen[-1] == [0, 1]
    assert sorted(seen, key=len) == seen


def test_a_result_so_far_is_there_before_the_error_is() -> None:
    seen: list[list[int]] = []
    with raises(LaunchError, "launch.rank_raised", message="ValueError: three is too much", type="ValueError"):
        run_on_ranks(count_to, 9, places=on_this_machine(1), on_partial=seen.append)
    assert seen[-1] == [0, 1, 2, 3]


def test_a_rank_that_leaves_without_a_result_is_named() -> None:
    with raises(LaunchError, "launch.rank_without_result", rank=1):
        run_on_ranks(leave, 0, places=on_this_machine(2))


def test_a_request_of_another_type_is_told_by_the_rank() -> None:
    with raises(LaunchError, "launch.rank_raised", type="ValidationError"):
        run_on_ranks(sleep, "long", places=on_this_machine(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_the_command(number: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run_on_ranks(interrupt, (os.getpid(), int(number)), places=on_this_machine(2))
    assert ended.value.code == 128 + number


def interrupt(launcher_and_signal: tuple[int, int]) -> None:
    if os.environ["RANK"] == "0":
        os.kill(*launcher_and_signal)
    time.sleep(60)
