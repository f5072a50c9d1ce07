"""Bytes on links.

Rings cost what they send, hosts share their network cards, and nothing travels where one rank is alone.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE, LinkSpec
from paceline.job.model import Dimensions
from paceline.planning.cost.estimate import beside_passes_s
from paceline.planning.cost.frameworks import FSDP, MEGATRON_CORE
from paceline.planning.cost.layout import (
    FrameworkProfile,
    Layout,
    Machines,
    all_reduce_s,
    all_to_all_s,
    expert_path,
    gather_s,
    link_path,
    send_s,
)
from paceline.planning.cost.stages import StageCost
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.transformer import transformer

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


def test_ranks_that_divide_an_expert_stand_between_those_with_other_experts() -> None:
    whole, divided = laid_out(4, tp=4, dp=8, expert_ranks=8), laid_out(4, tp=4, dp=8, expert_ranks=8, expert_tp=4)
    assert (expert_path(whole).hosts, expert_path(divided).hosts) == (1, 4)
    assert expert_path(divided).ranks == 8


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
    plain = laid_out(8)
    slow = replace(plain, machines=replace(plain.machines, oversubscription=4.0, oversubscribed_beyond=4))
    near, far = (
        link_path(replace(plain, tp=8, dp=hosts), "dp").bandwidth
        / link_path(replace(slow, tp=8, dp=hosts), "dp").bandwidth
        for hosts in (4, 8)
    )
    assert near == 1
    assert far == pytest.approx(4)


def test_a_group_over_more_hosts_reaches_less_of_its_links_since_all_wait_for_the_slowest() -> None:
    few, more, many = (link_path(replace(laid_out(64), tp=8, dp=hosts), "dp").bandwidth for hosts in (2, 8, 64))
    assert 0.5 * few < many < more < few


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


H100 = CATALOGUE["H100-SXM"]
TRACE = transformer(Dimensions(layers=8, hidden=4096, heads=32, seq=4096, vocab=51200, gated=True))
MACHINES = Machines(H100, 8, 8, H100.network)
APART = FrameworkProfile(overlaps_gradients=False, overlaps_parameters=False)
IDLE = StageCost(parameters=1e9, blocks=16.0)  # computes nothing, so hides nothing
BUSY = StageCost(forward_s=100.0, backward_s=200.0, parameters=1e9, blocks=16.0)


def trained(**changed: Any) -> Layout:
    mixed = {"parameter_bytes": 2.0, "gradient_bytes": 4.0, "optimizer_bytes": 12.0, "sync_bytes": 4.0}
    return replace(Layout(TRACE, MACHINES, precision="bf16", **mixed), **changed)  # type: ignore[arg-type]


def fsdp_s(slow: StageCost, **changed: Any) -> float:
    return beside_passes_s(trained(**changed), slow)[0]


def dp_s(slow: StageCost, **changed: Any) -> float:
    return beside_passes_s(trained(**changed), slow)[1]


def test_a_sharded_optimizer_scatters_gradients_and_gathers_parameters_of_their_own_size() -> None:
    """As one all-reduce of gradients in four bytes it would send the new parameters, which have two, in four."""
    path = link_path(trained(dp=64), "dp")
    halves = gather_s(4e9, path) + gather_s(2e9, path)
    assert dp_s(IDLE, dp=64, zero_dp=True, framework=APART) == pytest.approx(halves)
    assert dp_s(IDLE, dp=64, framework=APART) == pytest.approx(all_reduce_s(4e9, path))


def test_each_half_hides_behind_its_own_pass() -> None:
    """Gradients travel in the backward pass and parameters in the next forward pass, where the framework does so."""
    apart = dp_s(BUSY, dp=64, zero_dp=True, framework=APART)
    one, other, both = (
        dp_s(BUSY, dp=64, zero_dp=True, framework=FrameworkProfile(overlaps_gradients=up, overlaps_parameters=down))
        for up, down in ((True, False), (False, True), (True, True))
    )
    assert both < one < other < apart  # gradients are the larger half


def test_ranks_of_cp_and_ep_sum_the_gradients_of_what_they_have_in_common() -> None:
    """As one replica (dp=1) they were predicted to send nothing, and searches took the traffic for free."""
    group = link_path(trained(dp=8), "dp")
    assert dp_s(IDLE, cp=8, framework=APART) == pytest.approx(all_reduce_s(4e9, group))
    experts = IDLE._replace(experts=9e8)
    assert dp_s(experts, ep=8, framework=APART) == pytest.approx(all_reduce_s(4e8, group))
    assert dp_s(experts, ep=2, cp=4, framework=APART) > dp_s(experts, ep=8, framework=APART)
    # as ranks of fsdp they have no weights in common
    assert dp_s(IDLE, cp=8, fsdp=8, shards_over_cp=True, framework=APART) == 0.0


def test_stages_in_chunks_hide_what_one_chunk_cannot() -> None:
    """The last stage's last chunk alone shows its gradients; those of all others travel behind it."""
    short = StageCost(forward_s=1e-3, backward_s=2e-3, parameters=1e9, blocks=16.0)
    shown = [dp_s(short, dp=8, pp=8, zero_dp=True, chunks=chunks) for chunks in (1, 2, 4)]
    assert shown[0] > shown[1] > shown[2]


def test_the_latency_of_fsdp_grows_with_blocks_and_with_the_group() -> None:
    """Many small blocks over many hosts wait for their collectives' starts, however fast the links are."""
    tiny = [StageCost(parameters=1.0, blocks=blocks) for blocks in (8.0, 64.0)]
    assert fsdp_s(tiny[1], fsdp=64) > 4 * fsdp_s(tiny[0], fsdp=64)
    times = [fsdp_s(tiny[0], fsdp=ranks) for ranks in (2, 8, 16, 64)]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_computing_hides_all_of_fsdp_but_the_first_and_last_block() -> None:
    shown, hidden = fsdp_s(IDLE, fsdp=64), fsdp_s(BUSY, fsdp=64)
    assert shown / 16 < hidden < 0.4 * shown


def test_each_microbatch_gathers_unless_parameters_stay() -> None:
    once, each, kept = (fsdp_s(IDLE, fsdp=8, microbatches=n, zero=zero) for n, zero in ((1, 3), (4, 3), (4, 1)))
    assert each == pytest.approx(4 * once)
    assert kept < 0.3 * each


def test_hybrid_sharding_gathers_inside_a_host_and_sums_between_hosts() -> None:
    """Over all ranks every microbatch's parameters cross hosts; in a host's shards gradients do, once a step."""
    slow = replace(MACHINES, between=replace(H100.network, bandwidth=H100.network.bandwidth / 8))
    everywhere, hybrid = (trained(machines=slow, fsdp=fsdp, dp=64 // fsdp, microbatches=8, zero=3) for fsdp in (64, 8))
    assert sum(beside_passes_s(hybrid, IDLE)[:2]) < 0.6 * sum(beside_passes_s(everywhere, IDLE)[:2])


def test_quantised_parameters_halve_what_is_gathered() -> None:
    """ZeRO++ (arXiv:2306.10209), first part: 8 bits in place of 16."""
    link = link_path(trained(fsdp=64), "fsdp")
    spared = fsdp_s(IDLE, fsdp=64) - fsdp_s(IDLE, fsdp=64, gather_bytes=1.0)
    assert spared == pytest.approx(2 * (gather_s(2e9, link, 16) - gather_s(1e9, link, 16)) * 17 / 16, rel=0.05)


def test_a_second_copy_on_each_host_spares_the_backward_gather_between_hosts() -> None:
    """ZeRO++, second part: only the forward pass gathers between hosts; of all three collectives a third is saved."""
    plain = fsdp_s(IDLE, fsdp=64)
    near = fsdp_s(IDLE, fsdp=64, regather_ranks=8)
    assert near < plain
    assert fsdp_s(IDLE, fsdp=64, regather_ranks=64) == pytest.approx(plain)
    assert fsdp_s(IDLE, fsdp=8, regather_ranks=8) == pytest.approx(fsdp_s(IDLE, fsdp=8))


def test_experts_with_one_copy_send_no_gradients() -> None:
    """On as many ranks as there are, each expert has one copy; counted as dense, gigabytes would be summed."""
    half = IDLE._replace(experts=0.5e9)
    single, twice = (dp_s(half, dp=64, expert_ranks=ranks, framework=APART) for ranks in (64, 32))
    assert single == pytest.approx(all_reduce_s(2e9, link_path(trained(dp=64), "dp")))
    assert twice == pytest.approx(all_reduce_s(4e9, link_path(trained(dp=64), "dp")))


def test_the_optimizer_updates_as_many_experts_as_have_copies() -> None:
    half = IDLE._replace(experts=0.5e9)
    folded, plain = (beside_passes_s(trained(dp=64, zero_dp=True, expert_ranks=ranks), half)[2] for ranks in (64, 0))
    assert folded > 10 * plain  # each rank has all of its own experts' state, and 1 / 64 of the rest's


@pytest.mark.parametrize(("moment_bytes", "state"), [(4.0, 12.0), (2.0, 8.0), (1.0, 6.0)], ids=["fp32", "bf16", "int8"])
def test_narrow_moments_shorten_the_update(moment_bytes: float, state: float) -> None:
    """One number says it: AdamW in 8 bits (arXiv:2110.02861) reads and writes half of the state."""
    narrow = MEGATRON_CORE.laid_out(trained(), moment_bytes=moment_bytes)
    assert narrow.optimizer_bytes == state
    assert FSDP.laid_out(trained(), moment_bytes=moment_bytes).optimizer_bytes == 2 * moment_bytes
    usual = MEGATRON_CORE.laid_out(trained())
    ratio = beside_passes_s(narrow, IDLE)[2] / beside_passes_s(usual, IDLE)[2]
    held = [2 * (one.parameter_bytes + one.gradient_bytes + one.optimizer_bytes) for one in (narrow, usual)]
    assert ratio == pytest.approx(held[0] / held[1])


def test_an_update_in_the_hosts_memory_is_priced_by_its_link() -> None:
    """Offload of the state looked free: gradients go to the host and parameters come back."""
    here, there = (beside_passes_s(trained(fsdp=8, offload=offload), IDLE)[2] for offload in (False, True))
    assert there > 5 * here
    assert there > 2 * 1e9 / 8 * 4 / H100.host_link.bandwidth


def test_adapters_send_and_update_almost_nothing() -> None:
    whole, adapted = (beside_passes_s(trained(dp=64, lora=rank, framework=APART), IDLE) for rank in (0, 16))
    assert adapted[1] < 0.1 * whole[1]
    assert adapted[2] < 0.1 * whole[2]


@given(st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.sampled_from([1, 2, 4]), st.booleans())
def test_nothing_hides_more_than_it_takes(forward: float, backward: float, chunks: int, sharded: bool) -> None:
    busy = StageCost(forward_s=forward, backward_s=backward, parameters=1e9, blocks=16.0)
    shown = dp_s(busy, dp=64, zero_dp=sharded, chunks=chunks)
    assert 0 < shown <= dp_s(busy, dp=64, zero_dp=sharded, framework=APART) * 17 / 16


def test_ranks_that_agree_in_cycles_wait_for_one() -> None:
    """Horovod's gradients of small models take milliseconds, however few bytes they have."""
    agreeing = FrameworkProfile(agrees_s=0.005)
    assert dp_s(BUSY, dp=8, framework=agreeing) == pytest.approx(dp_s(BUSY, dp=8) + 0.005)
    assert dp_s(BUSY, framework=agreeing) == 0.0
