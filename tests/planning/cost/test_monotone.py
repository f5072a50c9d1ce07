"""Predictions of any layout: finite and positive, and better hardware is never slower."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE, Accelerator
from paceline.job.model import Dimensions
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.frameworks import FRAMEWORKS, Framework
from paceline.planning.cost.layout import Layout, Machines
from paceline.planning.model.transformer import transformer

DENSE = transformer(Dimensions(layers=8, hidden=2048, heads=16, seq=2048, vocab=51200, gated=True))
MIXTURE = transformer(
    Dimensions(layers=4, hidden=1024, heads=16, kv_heads=4, seq=1024, vocab=32000, experts=16, top_k=2)
)
DEVICES = ("A100-SXM-80", "H100-SXM", "B200", "V100-SXM-32", "MI300X", "TPU-v5p", "L40S")


def any_layout(name: str, framework: Framework, mixture: bool, **values: Any) -> Layout:
    device = CATALOGUE[name]
    layout = Layout(MIXTURE if mixture else DENSE, Machines(device, 16, 8, device.network), **values)
    if framework.folds:  # experts are on ranks of the other axes, or on one
        ranks = layout.ranks // layout.pp // layout.ep
        layout = replace(layout, ep=1, expert_ranks=min(layout.ep, ranks) if mixture else 0)
    half = len(layout.trace.blocks) // 2  # the same cut, whatever the device: another one may suit it less
    cut = (half, len(layout.trace.blocks) - half) if layout.pp == 2 else ()
    return framework.laid_out(replace(layout, cut=cut))


LAYOUTS = st.builds(
    any_layout,
    st.sampled_from(DEVICES),
    st.sampled_from(FRAMEWORKS),
    st.booleans(),
    dp=st.sampled_from([1, 2, 8]),
    fsdp=st.sampled_from([1, 8]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 4]),
    zero=st.sampled_from([1, 2, 3]),
    zero_dp=st.booleans(),
    sequence=st.booleans(),
    samples=st.sampled_from([1.0, 2.0, 8.0]),
    microbatches=st.sampled_from([1, 4, 32]),
    remat=st.sampled_from(["none", "selective", "block"]),
    remat_share=st.sampled_from([0.5, 1.0]),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    products=st.sampled_from(["", "fp8", "fp8-block", "mxfp8", "fp4"]),
    ulysses=st.booleans(),
    lora=st.sampled_from([0, 16]),
    offload=st.booleans(),
    offload_activations=st.booleans(),
    gather_bytes=st.sampled_from([0.0, 1.0]),
    regather_ranks=st.sampled_from([0, 8]),
    imbalance=st.sampled_from([1.0, 1.3]),
)
_BETTER = {
    "memory": lambda device: replace(device, memory_bandwidth=1.5 * device.memory_bandwidth),
    "arithmetic": lambda device: replace(
        device, peak_flops={precision: 1.5 * flops for precision, flops in device.peak_flops.items()}
    ),
    "links": lambda device: replace(device, inside=replace(device.inside, bandwidth=1.5 * device.inside.bandwidth)),
    "host link": lambda device: replace(
        device, host_link=replace(device.host_link, bandwidth=1.5 * device.host_link.bandwidth)
    ),
}


def with_device(layout: Layout, device: Accelerator) -> Layout:
    return replace(layout, machines=replace(layout.machines, device=device))


# Two things keep predictions from being monotone everywhere. Where fsdp and dp both hide, they do so behind the same
# computing; and a device whose power is far from enough for its products (MI300X) is a little faster at these with
# more other work between them.
COMPARED = LAYOUTS.filter(
    lambda layout: (layout.dp == 1 or layout.fsdp == 1) and layout.machines.device.name != "MI300X"
)


def compared_s(layout: Layout) -> float:
    """Seconds of a step; of a pipeline without what depends on which of two stages is the slower by a hair."""
    found = estimate(layout)
    state = sum(found.breakdown[part] for part in ("fsdp", "dp", "optimizer", "other"))
    return found.step_time_s - (state if layout.pp > 1 else 0.0)


@settings(max_examples=150, deadline=None)
@given(LAYOUTS)
def test_every_prediction_is_finite_and_positive(layout: Layout) -> None:
    found = estimate(layout)
    assert isfinite(found.step_time_s)
    assert found.step_time_s > 0
    assert min(found.breakdown.values()) >= 0
    assert min(found.memory.values()) >= 0
    assert found.mfu is not None
    assert found.mfu < (1 if not layout.products and not layout.lora else 4)


@pytest.mark.parametrize("what", list(_BETTER))
@settings(max_examples=80, deadline=None)
@given(layout=COMPARED)
def test_a_better_device_is_never_slower(what: str, layout: Layout) -> None:
    """A search among devices ("which cluster for my model?") would name the worse one."""
    better = with_device(layout, _BETTER[what](layout.machines.device))
    assert compared_s(better) <= compared_s(layout) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(COMPARED, st.floats(1.0, 10.0))
def test_a_faster_network_is_never_slower(layout: Layout, factor: float) -> None:
    between = replace(layout.machines.between, bandwidth=factor * layout.machines.between.bandwidth)
    better = replace(layout, machines=replace(layout.machines, between=between))
    assert compared_s(better) <= compared_s(layout) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(LAYOUTS)
def test_twice_the_microbatches_take_longer_but_not_twice_as_long(layout: Layout) -> None:
    """What is paid once a step is shared by more samples: without that no batch would be worth accumulating."""
    once, twice = (estimate(replace(layout, microbatches=count * layout.microbatches)).step_time_s for count in (2, 4))
    assert once < twice <= 2 * once * (1 + 1e-9)
