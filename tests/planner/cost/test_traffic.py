"""Bytes on links.

Rings cost what they send, hosts share their network cards, and nothing travels where one rank is alone.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue.hardware import CATALOGUE
from paceline.planner.cost.layout import Layout, Machines
from paceline.planner.cost.traffic import all_reduce_s, gather_s, link_path, send_s
from paceline.trace.graph import ModelTrace

A100 = CATALOGUE["A100-SXM-80"]
TABLE = Path(__file__).parents[3] / "benchmarks" / "tables" / "calib_collectives.csv"


def laid_out(hosts: int = 4, **degrees: int) -> Layout:
    return Layout(ModelTrace(()), Machines(A100, hosts, 8, A100.network), **degrees)  # type: ignore[arg-type]


def test_all_reduces_inside_a_host_take_what_nccl_was_measured_to_take() -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "vTrain LUT" and row["gpu"] == "A100"]
    errors = []
    for row in rows:
        ours = all_reduce_s(float(row["bytes"]), link_path(laid_out(tp=int(row["group_size"])), "tp"))
        errors.append(abs(ours / (float(row["time_ms"]) / 1e3) - 1))
    assert median(errors) < 0.12
    assert max(errors) < 0.5


@given(st.sampled_from(["tp", "fsdp", "dp", "cp", "ep"]), st.floats(0, 1e12))
def test_one_rank_sends_nothing(axis: str, nbytes: float) -> None:
    assert all_reduce_s(nbytes, link_path(laid_out(), axis)) == gather_s(nbytes, link_path(laid_out(), axis)) == 0.0


@given(st.floats(1e3, 1e10), st.sampled_from([2, 4, 8, 16, 32]))
def test_an_all_reduce_is_at_most_a_scatter_and_a_gather(nbytes: float, ranks: int) -> None:
    there = link_path(laid_out(dp=ranks), "dp")
    assert all_reduce_s(nbytes, there) <= 2 * gather_s(nbytes, there)


def test_whole_hosts_share_all_of_their_network_cards() -> None:
    """A ring over 4 whole hosts leaves each host once for its 8 ranks.

    With tp inside, every rank's own ring leaves it.
    """
    whole = link_path(laid_out(fsdp=32), "fsdp")
    crossing = link_path(laid_out(tp=8, dp=4), "dp")
    assert whole.bandwidth == pytest.approx(min(8 * crossing.bandwidth, A100.inside.bandwidth), rel=0.35)
    assert crossing.hosts == whole.hosts == 4


def test_a_neighbour_in_the_same_host_is_nearer() -> None:
    assert send_s(1e8, laid_out(pp=8)) < send_s(1e8, laid_out(tp=8, pp=4))
