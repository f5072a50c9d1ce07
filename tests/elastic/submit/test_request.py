"""Requests: what a user asks of a scheduler, and what of it cannot be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic.submit.scheduler import must_be_hosts, name_for, options_from, time_from
from paceline.errors import LaunchError
from refusals import raises


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5_400), ("1h30m", 5_400), ("2d", 172_800), ("3600s", 3_600), ("1d1h", 90_000)]
)
def test_a_time_is_read(text: str, seconds: int) -> None:
    assert time_from(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "1:30", "h", "1.5h", "-1h", "1h ", "30s", "99999d", "٣h", "1h\n"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(LaunchError, match="--time"):
        time_from(text)


@given(st.text("aZ9 _-.é/", max_size=80))
def test_a_name_is_one_of_a_pod_whatever_the_job_is_called(job_name: str) -> None:
    name = name_for(job_name)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 52, "a pod's name adds the numbers of replica and index, and ends at 63"


@pytest.mark.parametrize("count", [0, -1, 10**6])
def test_a_number_of_hosts_that_cannot_be_is_refused(count: int) -> None:
    with raises(LaunchError, "submit.hosts_out_of_range", count=count):
        must_be_hosts(count)


@pytest.mark.parametrize(
    ("pairs", "code"),
    [
        (["partition"], "submit.option_malformed"),
        (["partition="], "submit.option_malformed"),
        (["partiton=a"], "submit.option_unknown"),
        (["partition=a", "partition=b"], "submit.option_twice"),
        (["partition=a\n#SBATCH --x"], "submit.option_unprintable"),
    ],
)
def test_options_that_cannot_be_are_refused(pairs: list[str], code: str) -> None:
    with raises(LaunchError, code):
        options_from(pairs, {"partition": "", "account": ""}, "slurm")


def test_a_value_may_have_equals_signs() -> None:
    assert options_from(["setup=export A=1"], {"setup": ""}, "slurm") == {"setup": "export A=1"}
