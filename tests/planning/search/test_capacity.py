"""A user whose model does not fit needs a number and a way out.

A way out that does not work costs an hour of a larger cluster.
"""

from __future__ import annotations

import re

import pytest

from model_families import LLAMA_70B
from paceline.cluster.cluster import named_cluster
from paceline.job.model import Dimensions
from paceline.planning.cost.layout import Layout
from paceline.planning.machines import machines
from paceline.planning.model.transformer import transformer
from paceline.planning.search.result import least, smallest_that_works

LARGE = transformer(LLAMA_70B)
SMALL = transformer(Dimensions(layers=4, hidden=256, heads=4, seq=128, vocab=1024))


_GIB = {"MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}


def on(cluster: str, trace: object = LARGE) -> Layout:
    return Layout(trace, machines(named_cluster(cluster)), precision="bf16")  # type: ignore[arg-type]


def test_what_fits_needs_no_words() -> None:
    assert smallest_that_works(on("64x8xH100-SXM"), 1024) == ""
    assert smallest_that_works(on("CPU", SMALL), 8) == ""


@pytest.mark.parametrize("cluster", ["8xH100-SXM", "2x8xA100-SXM-40", "RTX-4090", "4xGB200"])
def test_the_smallest_cluster_named_is_enough_and_one_host_less_is_not(cluster: str) -> None:
    text = smallest_that_works(on(cluster), 1024)
    needed, has, missing = (
        float(size.replace(",", "")) * _GIB[unit] for size, unit in re.findall(r"([\d.,]+) ([MGT]iB)", text)[:3]
    )
    assert missing == pytest.approx(needed - has, rel=0.02, abs=0.1)
    hosts, rest = re.findall(r"It fits on (\d+)x(\S+)", text)[0]
    assert least(on(f"{hosts}x{rest}"), 1024).fits
    assert not least(on(f"{int(hosts) - 1}x{rest}"), 1024).fits


def test_devices_with_more_memory_are_named_where_they_are_enough() -> None:
    text = smallest_that_works(on("2x8xA100-SXM-80"), 1024)
    [other] = re.findall(r"or on (\S+) with", text)
    assert least(on(other), 1024).fits


def test_a_sample_that_is_too_large_for_any_number_of_hosts_is_said_to_be() -> None:
    endless = transformer(Dimensions(layers=4, hidden=8192, heads=64, seq=3**14, vocab=128256))
    assert "More such hosts do not help" in smallest_that_works(on("8xH100-SXM", endless), 8)


def test_readers_are_no_more_than_samples() -> None:
    assert least(on("64x8xH100-SXM"), 2).layout.data_ranks <= 2


def test_a_rank_alone_on_a_host_has_all_of_its_memory() -> None:
    """4 cores with 4 GiB each: four ranks would not fit, one does."""
    found = least(on("4xCPU", transformer(Dimensions(layers=8, hidden=2048, heads=16, seq=512, vocab=32000))), 1)
    assert found.layout.ranks == 1
    assert found.fits
    assert found.room == 16 * 2**30
