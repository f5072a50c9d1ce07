"""A plan that runs out of memory costs a start of the cluster.

One that is left out for memory that there is may have been the best.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.cluster.catalogue import CATALOGUE
from paceline.cluster.cluster import cluster_from
from paceline.job.job import Job
from paceline.job.model import Dimensions
from paceline.planning.cost.estimate import memory_fits, predict_layout
from paceline.planning.cost.layout import FrameworkProfile, Layout, Machines
from paceline.planning.cost.memory import HOLDERS, capacity_bytes, memory, offloaded_bytes
from paceline.planning.model.graph import BlockTrace, ModelTrace
from paceline.planning.model.model_info import model_info, trace
from paceline.planning.model.transformer import transformer
from paceline.planning.plan import Plan
from paceline.planning.prediction import layout_of
from paceline.run.dry_run.dry_run import MemoryWatch
from paceline.split.cross_entropy import chunked_cross_entropy
from planner_jobs import job_on_tokens

GIB = 2**30
A100 = Machines(CATALOGUE["A100-SXM-80"], 64, 8, CATALOGUE["A100-SXM-80"].network)
MEGATRON = FrameworkProfile("Megatron-LM", flash=False)
SMALL = transformer(Dimensions(layers=8, hidden=512, heads=8, seq=256, vocab=1024, tied=False))


def layers(trace: ModelTrace, stages: int) -> tuple[int, ...]:
    """As many layers for each stage, the embedding with the first and the head with the last."""
    each = (len(trace.blocks) - 2) // stages
    return (each + 1, *[each] * (stages - 2), each + 1) if stages > 1 else (each + 2,)


# Korthikanti et al., 2022, figures 1 and 7: GiB of activations on a GPU of the first stage
PUBLISHED = [
    (48, 6144, 64, 1, 1, 4, 4, "none", 59.25),
    (48, 6144, 64, 1, 1, 4, 4, "selective", 9.5625),
    (96, 12288, 96, 8, 3, 1, 64, "none", 66.84375),
    (96, 12288, 96, 8, 3, 1, 64, "selective", 12.3515625),
    (105, 20480, 128, 35, 3, 1, 280, "none", 114.0234375),
    (105, 20480, 128, 35, 3, 1, 280, "selective", 23.076171875),
    (128, 25600, 160, 64, 1, 1, 512, "none", 131.25),
    (128, 25600, 160, 64, 1, 1, 512, "selective", 26.5625),
]


@pytest.mark.parametrize(("depth", "hidden", "heads", "pp", "chunks", "samples", "batch", "remat", "gib"), PUBLISHED)
def test_activations_are_those_that_were_published(
    depth: int, hidden: int, heads: int, pp: int, chunks: int, samples: int, batch: int, remat: Any, gib: float
) -> None:
    trace = transformer(Dimensions(layers=depth, hidden=hidden, heads=heads, seq=2048, vocab=51200))
    schedule: Any = "interleaved" if chunks > 1 else "1f1b"
    layout = Layout(
        trace,
        A100,
        tp=8,
        pp=pp,
        chunks=chunks,
        schedule=schedule,
        samples=samples,
        microbatches=batch // samples,
        precision="fp16",
        remat=remat,
        sequence=remat == "selective",
        framework=MEGATRON,
        cut=layers(trace, pp * chunks),
    )
    held = memory(layout)
    assert (held["activations"] + held["logits"]) / GIB == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(
    "table", ["bloom_tr11_a100", "megatron_sc21_table1", "llmfoundry_mpt_a100", "vtrain_single_a100"]
)
def test_plans_that_ran_fit_and_those_that_ran_out_of_memory_do_not(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = Path(__file__).parents[3] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    rows, _ = importlib.import_module("published_rows").read([benchmarks / "tables" / f"{table}.csv"])
    assert rows
    wrong = [
        row.number
        for row in rows
        if (sum(memory(row.layout).values()) > capacity_bytes(row.layout)) is not row.out_of_memory
    ]
    assert wrong == []


def test_state_is_counted_once_and_tied_parameters_too() -> None:
    tied = transformer(Dimensions(layers=8, hidden=512, heads=8, seq=256, vocab=1024, tied=True))
    held = memory(Layout(tied, A100, parameter_bytes=2, gradient_bytes=4, optimizer_bytes=12))
    assert held["parameters"] == 2 * tied.parameters
    assert held["gradients"] == 4 * tied.parameters
    assert held["optimizer"] == 12 * tied.parameters


def test_fsdp_shares_out_state_and_gathers_what_it_computes_with() -> None:
    whole, shared = memory(Layout(SMALL, A100)), memory(Layout(SMALL, A100, fsdp=8))
    for holder in ("parameters", "gradients", "optimizer"):
        assert shared[holder] == pytest.approx(whole[holder] / 8)
    layer = SMALL.blocks[1].parameters
    assert whole["gathered"] == 0
    assert shared["gathered"] > 4 * 2 * layer
    assert memory(Layout(SMALL, A100, fsdp=8, zero=2))["gathered"] > 4 * SMALL.parameters


def test_gradients_that_add_up_before_they_are_scattered_are_whole() -> None:
    added = memory(Layout(SMALL, A100, fsdp=8, zero=1, microbatches=4))["gradients"]
    assert added == pytest.approx(4 * SMALL.parameters * (1 + 1 / 8))
    pipelined = Layout(SMALL, A100, fsdp=8, pp=2, microbatches=4, cut=layers(SMALL, 2))
    assert memory(pipelined)["gradients"] > 4 * SMALL.parameters / 2 * 0.9
    # zero=2 scatters those of each microbatch, but not if gradients of weights come later
    assert memory(replace(pipelined, zero=2))["gradients"] < 0.2 * memory(pipelined)["gradients"]
    late = replace(pipelined, schedule="zero-bubble", chunks=2, cut=())
    assert memory(replace(late, zero=2))["gradients"] == memory(late)["gradients"]


def test_a_pipeline_has_receive_buffers_for_microbatches_in_flight() -> None:
    few, many = (Layout(SMALL, A100, pp=2, microbatches=n, cut=layers(SMALL, 2)) for n in (8, 64))
    assert memory(few)["buffers"] == memory(many)["buffers"] > 0


def test_zero_1_over_replicas_shares_out_the_optimizer_alone() -> None:
    plain, shared = memory(Layout(SMALL, A100, dp=4)), memory(Layout(SMALL, A100, dp=4, zero_dp=True))
    assert shared["optimizer"] == plain["optimizer"] / 4
    assert shared["gradients"] == plain["gradients"]


def test_offloaded_state_is_not_on_the_device() -> None:
    held = memory(Layout(SMALL, A100, fsdp=2, offload=True))
    assert held["parameters"] == held["gradients"] == held["optimizer"] == 0
    assert held["gathered"] > 0


@pytest.mark.parametrize(
    ("schedule", "chunks", "flight"),
    [("gpipe", 1, 16), ("1f1b", 1, 4), ("interleaved", 2, 11), ("zero-bubble", 2, 9), ("dualpipe", 2, 9)],
)
def test_microbatches_in_flight_are_those_of_the_schedule(schedule: Any, chunks: int, flight: int) -> None:
    """Memory of equal blocks on the first of 4 stages, in chunks.

    Half a stage each where there are two.
    """
    block = BlockTrace("layer", kept_outside=1000.0, boundary=10.0, vectors=1)
    trace = ModelTrace((block,) * 8)
    layout = Layout(
        trace,
        A100,
        pp=4,
        schedule=schedule,
        chunks=chunks,
        microbatches=16,
        cut=(8 // 4 // chunks,) * (4 * chunks),
        framework=MEGATRON,
    )
    assert memory(layout)["activations"] == pytest.approx(4 * 1000 * flight * 8 / 4 / chunks)


def test_the_last_stage_can_be_the_fullest() -> None:
    """A vocabulary of a million: its logits outweigh what the first stage has in flight."""
    trace = transformer(Dimensions(layers=4, hidden=256, heads=4, seq=512, vocab=1_000_000, tied=False))
    held = memory(Layout(trace, A100, pp=4, microbatches=4, samples=4, cut=layers(trace, 4)))
    assert held["logits"] > held["activations"]


def test_recomputing_keeps_what_goes_from_block_to_block() -> None:
    layer = SMALL.blocks[1]
    kept = {
        remat: memory(Layout(SMALL, A100, dp=2, samples=4, remat=remat)) for remat in ("none", "selective", "block")
    }
    assert kept["block"]["activations"] < kept["selective"]["activations"] < kept["none"]["activations"]
    assert kept["block"]["activations"] >= 4 * 4 * 8 * layer.boundary
    assert kept["block"]["working"] > 0 == kept["none"]["working"]


def test_squares_of_attention_count_where_it_is_not_one_kernel() -> None:
    written = (
        memory(Layout(SMALL, A100, dp=2, framework=FrameworkProfile(flash=False)))["activations"]
        - memory(Layout(SMALL, A100, dp=2))["activations"]
    )
    assert written == pytest.approx(4 * 8 * SMALL.blocks[1].kept_scores)


def test_gradients_that_come_while_activations_go_do_not_add_up() -> None:
    wide = ModelTrace(
        (BlockTrace("a", kept_outside=1000.0, vectors=1), BlockTrace("b", kept_outside=1.0, vectors=1000))
    )
    held = memory(Layout(wide, A100))
    assert held["gradients"] + held["activations"] == pytest.approx(4 * (1001 + 1000))  # b's gradient comes first
    narrow = ModelTrace(tuple(reversed(wide.blocks)))
    held = memory(Layout(narrow, A100))
    assert held["gradients"] + held["activations"] == pytest.approx(4 * 1002)


def test_on_cpus_a_rank_has_its_part_of_the_hosts_memory() -> None:
    cores = Machines(replace(CATALOGUE["CPU"], memory_bytes=4 * GIB), 2, 4, CATALOGUE["CPU"].network)
    rooms = [capacity_bytes(Layout(SMALL, cores, dp=ranks)) / GIB for ranks in (1, 2, 4, 8, 16)]
    assert rooms == [16, 8, 4, 4, 2]  # the first host is filled first
    assert capacity_bytes(Layout(SMALL, A100)) == 80 * GIB


layouts = st.builds(
    lambda degrees, pp, remat, zero, microbatches, samples, sequence: Layout(
        SMALL,
        A100,
        **degrees,
        pp=pp,
        remat=remat,
        zero=zero,
        microbatches=microbatches,
        samples=samples,
        sequence=sequence,
        cut=layers(SMALL, pp),
    ),
    st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4]) for axis in ("dp", "fsdp", "tp", "cp")}),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["none", "selective", "block"]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1.0, 2.0, 16.0]),
    st.booleans(),
)


@given(layouts)
@settings(max_examples=50)
def test_every_holder_has_no_less_than_nothing_and_more_samples_take_no_less(layout: Layout) -> None:
    held = memory(layout)
    assert tuple(held) == HOLDERS
    assert min(held.values()) >= 0
    more = memory(replace(layout, samples=2 * layout.samples))
    assert sum(more.values()) >= sum(held.values())


@given(layouts)
@settings(max_examples=50)
def test_more_ranks_along_tp_never_take_more_of_each(layout: Layout) -> None:
    assert sum(memory(replace(layout, tp=2 * layout.tp)).values()) <= sum(memory(layout).values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_head_holds_what_torchs_cross_entropy_does(precision: Any) -> None:
    """Logits, log-probabilities and the gradients of both: more than what is saved of them."""
    samples, vocab, context = 4, 30_000, 16
    text = {"kind": "synthetic", "shape": [context], "vocab": vocab}
    args = {"vocab": vocab, "context": context, "layers": 2, "hidden": 8, "heads": 1}
    job = Job(
        model={"zoo": "gpt", "args": args},
        data=text,
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.1},
        stop={"steps": 1},
        global_batch=samples,
    )
    with FakeTensorMode(), MemoryWatch() as watch:
        head, states = torch.nn.Linear(8, vocab, bias=False), torch.zeros(samples * context, 8, requires_grad=True)
        labels = torch.zeros(samples * context, dtype=torch.long)
        before = watch.live_bytes
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = head(states)
            loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        held = watch.peak_bytes - before
    layout = Layout(trace(job, precision), A100, samples=samples, precision=precision)
    assert memory(layout)["logits"] == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_head_holds_the_logits_of_one_chunk(precision: Any) -> None:
    tokens, vocab, width = 4096, 30_000, 8
    args = {"vocab": vocab, "context": tokens, "layers": 2, "hidden": width, "heads": 1}
    job = Job(
        model={"zoo": "gpt", "args": args},
        data={"kind": "synthetic", "shape": [tokens], "vocab": vocab},
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.1},
        stop={"steps": 1},
        global_batch=1,
    )
    with FakeTensorMode(), MemoryWatch() as watch:
        states, labels = torch.zeros(tokens, width, requires_grad=True), torch.zeros(tokens, dtype=torch.long)
        head = torch.nn.Linear(width, vocab, bias=False)
        before = watch.live_bytes
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = chunked_cross_entropy(states, head.weight, None, labels, skips=False)
        held = watch.peak_bytes - before
        loss.backward(torch.ones(1, 1))
    whole = Layout(trace(job, precision), A100, samples=1, precision=precision)
    chunked = memory(replace(whole, loss_chunk=0))["logits"]
    # the gradient of the weight counts as a gradient
    assert chunked == pytest.approx(held - vocab * width * 4, rel=0.05)
    assert chunked < 0.1 * memory(whole)["logits"]
    assert memory(replace(whole, samples=1 / 4096, loss_chunk=0)) == memory(replace(whole, samples=1 / 4096))


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
    times = [predict_layout(layout).step_time_s for layout in (none, less, more, every)]
    assert times == pytest.approx(sorted(times))


def test_what_frameworks_keep_of_a_layer_lies_between_all_and_its_input() -> None:
    profiles = [FrameworkProfile("torchtitan", keeps="half"), FrameworkProfile("MaxText", keeps="products")]
    half, products = (laid_out(remat="selective", framework=profile) for profile in profiles)
    block, none = (laid_out(remat=remat, framework=profiles[0]) for remat in ("block", "none"))
    sizes = [memory(layout)["activations"] for layout in (block, half, products, none)]
    assert sizes == sorted(sizes)
    times = [predict_layout(layout).breakdown["recompute"] for layout in (none, products, half, block)]
    assert times == sorted(times)
    assert times[0] == 0 < times[1]


def test_activations_in_the_hosts_memory_leave_the_device_and_take_its_link() -> None:
    """Offload used to cost nothing, so that it seemed better than any recomputation."""
    slow = replace(H100, host_link=replace(H100.host_link, bandwidth=1e9))
    here, there = laid_out(samples=2.0), laid_out(samples=2.0, offload_activations=True)
    assert memory(there)["activations"] < 0.5 * memory(here)["activations"]
    assert predict_layout(there).step_time_s > predict_layout(here).step_time_s
    narrow = laid_out(samples=2.0, offload_activations=True, machines=replace(MACHINES, device=slow))
    assert predict_layout(narrow).step_time_s > predict_layout(there).step_time_s + 1.0


def test_what_is_kept_whole_takes_longer_to_the_host_than_layers_inputs_do() -> None:
    slow = replace(MACHINES, device=replace(H100, host_link=replace(H100.host_link, bandwidth=1e9)))
    whole, inputs = (
        predict_layout(laid_out(machines=slow, offload_activations=True, remat=remat)).breakdown["other"]
        for remat in ("none", "block")
    )
    assert whole > 5 * inputs


def test_activations_beyond_the_hosts_memory_do_not_fit() -> None:
    little = replace(MACHINES, device=replace(H100, host_memory_bytes=2**20))
    there = laid_out(offload_activations=True)
    assert predict_layout(there).fits
    assert memory_fits(there)
    beyond = replace(there, machines=little)
    assert not predict_layout(beyond).fits
    assert not memory_fits(beyond)
    assert offloaded_bytes(laid_out(offload_activations=True, remat="block")) < offloaded_bytes(there)


def test_adapters_need_neither_gradients_nor_state_of_the_weights() -> None:
    whole, adapted = memory(laid_out()), memory(laid_out(lora=16))
    assert adapted["parameters"] == whole["parameters"]
    assert adapted["gradients"] < 0.05 * whole["gradients"]
    assert adapted["optimizer"] < 0.05 * whole["optimizer"]
    ranks = [memory(laid_out(lora=rank))["optimizer"] for rank in (8, 64, 10**6)]
    assert ranks[0] < ranks[1] < ranks[2] == whole["optimizer"]


@pytest.mark.parametrize(
    "keys", [{"model": {"zoo": "gpt", "freeze": ["blocks.0", "blocks.1"]}}, {"adapter": {"lora": {"r": 4}}}], ids=str
)
def test_only_trained_parameters_of_a_job_need_gradients_and_optimizer_state(keys: dict[str, Any]) -> None:
    job = job_on_tokens(**keys)
    info = model_info(job.model)
    trained = sum(info.trained)
    assert trained < 0.9 * info.numel
    for plan, ranks in (("dp=1", 1), ("fsdp=2", 2)):
        held = memory(layout_of(job, cluster_from("2xH100-SXM"), Plan.parse(plan)))
        assert held["parameters"] == pytest.approx(4 * info.numel / ranks, rel=1e-3)
        assert held["gradients"] == pytest.approx(4 * trained / ranks, rel=1e-3)
        assert held["optimizer"] == pytest.approx(8 * trained / ranks, rel=1e-3)


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
        predict_layout(laid_out(trace=long, cp=8, samples=1.0, ulysses=ulysses)).breakdown["cp"]
        for ulysses in (False, True)
    )
    assert 0 < heads < ring
    two, eight = (predict_layout(laid_out(trace=long, cp=cp, ulysses=True)).breakdown["cp"] for cp in (2, 8))
    assert eight < two


def test_a_changed_layout_is_that_of_replacing_its_values_and_remembers_no_old_degrees() -> None:
    """A search that found a link by the old degrees' distances would price messages inside a host as between hosts."""
    layout = laid_out(tp=2, dp=4)
    assert layout.stride["dp"] == 2
    assert layout.changed(tp=4, dp=2) == replace(layout, tp=4, dp=2)
    assert layout.changed(tp=4, dp=2).stride["dp"] == 4
    assert layout.stride["dp"] == 2
