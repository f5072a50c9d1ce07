"""What the forward pass keeps: recomputed in part, in the host's memory, by adapters, by folded experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE
from paceline.job.model import Dimensions
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.layout import FrameworkProfile, Layout, Machines
from paceline.planning.cost.memory import memory
from paceline.planning.model.transformer import transformer

H100 = CATALOGUE["H100-SXM"]
MACHINES = Machines(H100, 1, 8, H100.network)
TRACE = transformer(Dimensions(layers=8, hidden=4096, heads=32, seq=4096, vocab=51200, gated=True, dropout=False))
MIXTURE = transformer(
    Dimensions(layers=4, hidden=2048, heads=16, seq=2048, vocab=51200, experts=64, top_k=4, expert_ffn=1024)
)


def laid_out(**changed: Any) -> Layout:
    mixed = {"parameter_bytes": 2.0, "gradient_bytes": 4.0, "optimizer_bytes": 12.0}
    return replace(Layout(TRACE, MACHINES, precision="bf16", **mixed), **changed)  # type: ignore[arg-type]


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_recomputation_of_a_part_lies_between_none_and_all(share: float, other: float) -> None:
    """Runs that recompute some layers only were refused as too large, or predicted a third too slow."""
    less, more = (laid_out(remat="block", remat_share=part) for part in sorted((share, other)))
    none, every = laid_out(), laid_out(remat="block")
    kept = [memory(layout)["activations"] for layout in (every, more, less, none)]
    assert kept == pytest.approx(sorted(kept))
    times = [estimate(layout).step_time_s for layout in (none, less, more, every)]
    assert times == pytest.approx(sorted(times))


def test_what_frameworks_keep_of_a_layer_lies_between_all_and_its_input() -> None:
    profiles = [FrameworkProfile("torchtitan", keeps="half"), FrameworkProfile("MaxText", keeps="products")]
    half, products = (laid_out(remat="selective", framework=profile) for profile in profiles)
    block, none = (laid_out(remat=remat, framework=profiles[0]) for remat in ("block", "none"))
    sizes = [memory(layout)["activations"] for layout in (block, half, products, none)]
    assert sizes == sorted(sizes)
    times = [estimate(layout).breakdown["recompute"] for layout in (none, products, half, block)]
    assert times == sorted(times)
    assert times[0] == 0 < times[1]


def test_activations_in_the_hosts_memory_leave_the_device_and_take_its_link() -> None:
    """Offload used to cost nothing, so that it seemed better than any recomputation."""
    slow = replace(H100, host_link=replace(H100.host_link, bandwidth=1e9))
    here, there = laid_out(samples=2.0), laid_out(samples=2.0, offload_activations=True)
    assert memory(there)["activations"] < 0.5 * memory(here)["activations"]
    assert estimate(there).step_time_s > estimate(here).step_time_s
    narrow = laid_out(samples=2.0, offload_activations=True, machines=replace(MACHINES, device=slow))
    assert estimate(narrow).step_time_s > estimate(there).step_time_s + 1.0


def test_what_is_kept_whole_takes_longer_to_the_host_than_layers_inputs_do() -> None:
    slow = replace(MACHINES, device=replace(H100, host_link=replace(H100.host_link, bandwidth=1e9)))
    whole, inputs = (
        estimate(laid_out(machines=slow, offload_activations=True, remat=remat)).breakdown["other"]
        for remat in ("none", "block")
    )
    assert whole > 5 * inputs


def test_adapters_need_neither_gradients_nor_state_of_the_weights() -> None:
    whole, adapted = memory(laid_out()), memory(laid_out(lora=16))
    assert adapted["parameters"] == whole["parameters"]
    assert adapted["gradients"] < 0.05 * whole["gradients"]
    assert adapted["optimizer"] < 0.05 * whole["optimizer"]
    ranks = [memory(laid_out(lora=rank))["optimizer"] for rank in (8, 64, 10**6)]
    assert ranks[0] < ranks[1] < ranks[2] == whole["optimizer"]


def test_folded_experts_are_divided_among_ranks_of_any_axis() -> None:
    """Megatron Core's experts may be on all ranks of tp and dp; divided by `ep` alone they would not fit."""
    whole, eight, four = (
        memory(laid_out(trace=MIXTURE, tp=2, dp=4, expert_ranks=ranks))["parameters"] for ranks in (1, 8, 4)
    )
    experts = 2 * sum(block.experts for block in MIXTURE.blocks)
    assert whole - eight == pytest.approx(experts * 7 / 8)
    assert whole - four == pytest.approx(experts * 3 / 4)


@pytest.mark.parametrize("ep", [2, 4])
def test_ranks_of_ep_that_divide_experts_and_folded_ones_hold_as_much(ep: int) -> None:
    """Two ways to write one division: `ep`, where tp cuts each expert, and as many ranks with whole ones."""
    cut, folded = laid_out(trace=MIXTURE, tp=2, ep=ep), laid_out(trace=MIXTURE, tp=2, dp=ep, expert_ranks=2 * ep)
    assert cut.expert_parts == folded.expert_parts == 2 * ep
    assert memory(cut)["parameters"] == pytest.approx(memory(folded)["parameters"])


def test_a_second_copy_for_the_backward_pass_takes_memory() -> None:
    """ZeRO++ trades memory for traffic; without its copy it would be proposed everywhere."""
    plain, near = (memory(laid_out(fsdp=8, regather_ranks=ranks))["gathered"] for ranks in (0, 4))
    assert near - plain == pytest.approx(2 * TRACE.parameters / 4, rel=0.01)


def test_heads_exchanged_for_tokens_send_less_than_a_ring_of_keys_on_many_ranks() -> None:
    """Ulysses sends 1 / cp of the activations, a ring all of the keys, which grouped heads make small."""
    long = replace(TRACE, blocks=tuple(replace(block, keys=2 * block.boundary) for block in TRACE.blocks))
    ring, heads = (
        estimate(laid_out(trace=long, cp=8, samples=1.0, ulysses=ulysses)).breakdown["cp"] for ulysses in (False, True)
    )
    assert 0 < heads < ring
    two, eight = (estimate(laid_out(trace=long, cp=cp, ulysses=True)).breakdown["cp"] for cp in (2, 8))
    assert eight < two


def test_a_changed_layout_is_that_of_replacing_its_values_and_remembers_no_old_degrees() -> None:
    """A search that found a link by the old degrees' distances would price messages inside a host as between hosts."""
    layout = laid_out(tp=2, dp=4)
    assert layout.stride["dp"] == 2
    assert layout.changed(tp=4, dp=2) == replace(layout, tp=4, dp=2)
    assert layout.changed(tp=4, dp=2).stride["dp"] == 4
    assert layout.stride["dp"] == 2
