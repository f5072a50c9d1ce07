"""Traffic of parameters and gradients beside a step's passes, and the update: what is sent, hidden and divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE
from paceline.job.model import Dimensions
from paceline.planning.cost.estimate import beside_passes_s
from paceline.planning.cost.frameworks import FSDP, MEGATRON_CORE
from paceline.planning.cost.layout import FrameworkProfile, Layout, Machines
from paceline.planning.cost.stages import StageCost
from paceline.planning.cost.traffic import all_reduce_s, gather_s, link_path
from paceline.planning.model.transformer import transformer

H100 = CATALOGUE["H100-SXM"]
TRACE = transformer(Dimensions(layers=8, hidden=4096, heads=32, seq=4096, vocab=51200, gated=True))
MACHINES = Machines(H100, 8, 8, H100.network)
APART = FrameworkProfile(overlaps_gradients=False, overlaps_parameters=False)
IDLE = StageCost(parameters=1e9, blocks=16.0)  # computes nothing, so hides nothing
BUSY = StageCost(forward_s=100.0, backward_s=200.0, parameters=1e9, blocks=16.0)


def laid_out(**changed: Any) -> Layout:
    mixed = {"parameter_bytes": 2.0, "gradient_bytes": 4.0, "optimizer_bytes": 12.0, "sync_bytes": 4.0}
    return replace(Layout(TRACE, MACHINES, precision="bf16", **mixed), **changed)  # type: ignore[arg-type]


def fsdp_s(slow: StageCost, **changed: Any) -> float:
    return beside_passes_s(laid_out(**changed), slow)[0]


def dp_s(slow: StageCost, **changed: Any) -> float:
    return beside_passes_s(laid_out(**changed), slow)[1]


def test_a_sharded_optimizer_scatters_gradients_and_gathers_parameters_of_their_own_size() -> None:
    """As one all-reduce of gradients in four bytes it would send the new parameters, which have two, in four."""
    path = link_path(laid_out(dp=64), "dp")
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
    group = link_path(laid_out(dp=8), "dp")
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
    everywhere, hybrid = (laid_out(machines=slow, fsdp=fsdp, dp=64 // fsdp, microbatches=8, zero=3) for fsdp in (64, 8))
    assert sum(beside_passes_s(hybrid, IDLE)[:2]) < 0.6 * sum(beside_passes_s(everywhere, IDLE)[:2])


def test_quantised_parameters_halve_what_is_gathered() -> None:
    """ZeRO++ (arXiv:2306.10209), first part: 8 bits in place of 16."""
    link = link_path(laid_out(fsdp=64), "fsdp")
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
    assert single == pytest.approx(all_reduce_s(2e9, link_path(laid_out(dp=64), "dp")))
    assert twice == pytest.approx(all_reduce_s(4e9, link_path(laid_out(dp=64), "dp")))


def test_the_optimizer_updates_as_many_experts_as_have_copies() -> None:
    half = IDLE._replace(experts=0.5e9)
    folded, plain = (beside_passes_s(laid_out(dp=64, zero_dp=True, expert_ranks=ranks), half)[2] for ranks in (64, 0))
    assert folded > 10 * plain  # each rank has all of its own experts' state, and 1 / 64 of the rest's


@pytest.mark.parametrize(("moment_bytes", "state"), [(4.0, 12.0), (2.0, 8.0), (1.0, 6.0)], ids=["fp32", "bf16", "int8"])
def test_narrow_moments_shorten_the_update(moment_bytes: float, state: float) -> None:
    """One number says it: AdamW in 8 bits (arXiv:2110.02861) reads and writes half of the state."""
    narrow = MEGATRON_CORE.laid_out(laid_out(), moment_bytes=moment_bytes)
    assert narrow.optimizer_bytes == state
    assert FSDP.laid_out(laid_out(), moment_bytes=moment_bytes).optimizer_bytes == 2 * moment_bytes
    usual = MEGATRON_CORE.laid_out(laid_out())
    ratio = beside_passes_s(narrow, IDLE)[2] / beside_passes_s(usual, IDLE)[2]
    held = [2 * (one.parameter_bytes + one.gradient_bytes + one.optimizer_bytes) for one in (narrow, usual)]
    assert ratio == pytest.approx(held[0] / held[1])


def test_an_update_in_the_hosts_memory_is_priced_by_its_link() -> None:
    """Offload of the state looked free: gradients go to the host and parameters come back."""
    here, there = (beside_passes_s(laid_out(fsdp=8, offload=offload), IDLE)[2] for offload in (False, True))
    assert there > 5 * here
    assert there > 2 * 1e9 / 8 * 4 / H100.host_link.bandwidth


def test_adapters_send_and_update_almost_nothing() -> None:
    whole, adapted = (beside_passes_s(laid_out(dp=64, lora=rank, framework=APART), IDLE) for rank in (0, 16))
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
