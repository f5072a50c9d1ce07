"""Bytes on links.

Rings cost what they send, hosts share their network cards, and nothing travels where one rank is alone.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE, LinkSpec
from paceline.planning.cost.layout import Layout, Machines
from paceline.planning.cost.traffic import all_reduce_s, all_to_all_s, expert_path, gather_s, link_path, send_s
from paceline.planning.model.graph import ModelTrace

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


H800 = CATALOGUE["H800-SXM"]
# DeepSeek-V3 (arXiv:2412.19437, sections 3.1 and 4.2): 15,360 samples of 4,096 tokens on 2,048 devices; 16 stages of
# about four of its 58 layers with experts, ep=64 on 8 hosts, 8 experts for each token on at most 4 hosts
_TOKENS = 15_360 * 4096 / (2048 / 16)
_PASSES = 4 * 58 / 16  # there and back, in both passes


def exchange_s(copies: float = 8, node_limit: int = 0) -> float:
    """DeepSeek-V3's exchange of a step in bf16, none of it hidden."""
    path = link_path(Layout(ModelTrace(()), Machines(H800, 256, 8, H800.network), ep=64, pp=16, dp=2), "ep")
    return _PASSES * all_to_all_s(_TOKENS * copies * 7168 * 2, path, copies, node_limit)


def test_each_rank_of_an_exchange_over_hosts_has_one_network_card_not_its_hosts_eight() -> None:
    """With all eight DeepSeek-V3's exchange took 4 s a step; a copy for each expert takes many times that."""
    assert 15 < exchange_s() < 30
    crossing = _PASSES * _TOKENS * 8 * 7168 * 2 * 7 / 8
    assert exchange_s() > crossing / H800.network.bandwidth


def test_a_token_goes_once_to_each_of_its_few_hosts() -> None:
    """The limit of four hosts is why DeepSeek-V3's exchange can hide behind its computing at all."""
    assert 0.4 < exchange_s(node_limit=4) / exchange_s() < 0.51
    assert exchange_s(node_limit=2) < exchange_s(node_limit=4) <= exchange_s(node_limit=8) < exchange_s()


@given(st.floats(1e3, 1e10), st.sampled_from([2, 4, 8, 16, 64]), st.integers(1, 16), st.integers(0, 16))
def test_an_exchange_grows_with_its_bytes_and_with_its_limit(
    nbytes: float, ranks: int, copies: int, limit: int
) -> None:
    path = link_path(laid_out(8, ep=ranks), "ep")
    seconds = all_to_all_s(nbytes, path, copies, limit)
    assert 0 < seconds <= all_to_all_s(2 * nbytes, path, copies, limit)
    assert seconds <= all_to_all_s(nbytes, path, copies)
    if limit:
        assert seconds <= all_to_all_s(nbytes, path, copies, limit + 1)


def test_experts_that_are_folded_are_on_the_nearest_ranks_whatever_their_axis() -> None:
    folded = laid_out(4, tp=4, dp=8, expert_ranks=8)
    assert expert_path(folded).hosts == 1
    assert expert_path(laid_out(4, tp=4, dp=4, ep=2)).ranks == 2


def test_a_small_group_on_a_torus_has_the_links_of_one_dimension_only() -> None:
    tpu = CATALOGUE["TPU-v5p"]
    pod = Layout(ModelTrace(()), Machines(tpu, 1, 4096, tpu.network))
    line, plane, all_of_it = (link_path(replace(pod, tp=ranks), "tp") for ranks in (8, 256, 4096))
    assert line.bandwidth == pytest.approx(all_of_it.bandwidth / tpu.torus)
    assert plane.bandwidth == pytest.approx(all_of_it.bandwidth * 2 / tpu.torus)


def test_an_exchange_on_a_larger_torus_is_slower_for_each_rank() -> None:
    """Half of the data crosses the middle, whose links grow slower than the ranks; a switch has no middle."""
    tpu = CATALOGUE["TPU-v5p"]
    pod = Layout(ModelTrace(()), Machines(tpu, 1, 4096, tpu.network))
    rates = [link_path(replace(pod, ep=ranks), "ep").inside for ranks in (64, 512, 4096)]
    assert rates[0] > rates[1] > rates[2]
    assert len({link_path(laid_out(ep=ranks), "ep").inside for ranks in (2, 4, 8)}) == 1


def test_two_devices_of_a_mesh_have_only_the_links_between_them() -> None:
    mi300 = CATALOGUE["MI300X"]
    host = Layout(ModelTrace(()), Machines(mi300, 1, 8, mi300.network))
    rates = [link_path(replace(host, tp=ranks), "tp").bandwidth for ranks in (2, 4, 8)]
    assert rates == pytest.approx([rates[2] / 7, rates[2] * 3 / 7, rates[2]])


def test_groups_over_more_hosts_than_a_switch_joins_share_its_uplinks() -> None:
    slow = replace(laid_out(8), machines=replace(laid_out(8).machines, oversubscription=4.0, oversubscribed_beyond=4))
    near, far = (link_path(replace(slow, tp=8, dp=hosts), "dp").bandwidth for hosts in (4, 8))
    assert near == pytest.approx(4 * far)


@given(
    st.sampled_from(["tp", "cp", "ep", "fsdp", "dp"]),
    st.sampled_from([2, 4, 8, 16, 64]),
    st.floats(1e9, 1e12),
    st.floats(1.0, 10.0),
    st.floats(1e3, 1e10),
)
def test_a_faster_network_makes_no_collective_slower(
    axis: str, ranks: int, bandwidth: float, factor: float, nbytes: float
) -> None:
    slow, fast = (
        link_path(
            Layout(ModelTrace(()), Machines(A100, 8, 8, LinkSpec("net", rate, 1e-6)), **{axis: ranks}),  # type: ignore[arg-type]
            axis,
        )
        for rate in (bandwidth, factor * bandwidth)
    )
    for seconds in (all_reduce_s, gather_s, all_to_all_s):
        assert seconds(nbytes, fast) <= seconds(nbytes, slow)
