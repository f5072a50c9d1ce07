"""Time of products by their shape: what shapes cost more than their FLOPs, as measured on real devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue.hardware import CATALOGUE
from paceline.job.read.dimensions import Dimensions
from paceline.planner.cost.compute import block_config, block_time, peak_flops, product_s
from paceline.planner.cost.layout import FrameworkProfile, Layout, Machines
from paceline.trace.transformer import transformer

A100 = CATALOGUE["A100-SXM-80"]
MACHINES = Machines(A100, 1, 8, A100.network)


def reached(m: int, n: int, k: int) -> float:
    """TFLOP/s of a product on an A100."""
    return 2 * m * n * k / product_s(A100, "bf16", m, n, k) / 1e12


def test_a_large_product_reaches_what_is_measured_and_never_the_peak() -> None:
    assert 220 < reached(8192, 8192, 8192) < 280


def test_small_products_reach_less() -> None:
    assert reached(256, 256, 256) < reached(1024, 1024, 1024) < reached(8192, 8192, 8192)


def test_widths_that_do_not_divide_cost_more() -> None:
    assert reached(4096, 4096, 4096) > reached(4096, 4104, 4096) > reached(4096, 4097, 4096)


def test_a_vector_is_bound_by_memory_not_by_arithmetic() -> None:
    moved = 2 * (8192 * 8192)
    assert product_s(A100, "bf16", 1, 8192, 8192) >= moved / A100.memory_bandwidth


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(["bf16", "fp32", "fp16", "tf32"])
)
def test_nothing_is_faster_than_the_peak_or_than_memory(m: int, n: int, k: int, precision: str) -> None:
    seconds = product_s(A100, precision, float(m), float(n), float(k))
    assert seconds >= 2 * m * n * k / peak_flops(A100, precision)  # type: ignore[arg-type]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1.0, 2.0, 8.0]))
def test_tensor_parallelism_divides_the_work_but_not_all_of_the_time(tp: int, samples: float) -> None:
    trace = transformer(Dimensions(layers=1, hidden=2048, heads=16, seq=1024, vocab=50304))
    alone = Layout(trace, MACHINES, samples=samples, precision="bf16", framework=FrameworkProfile(flash=False))
    whole, part = (block_time(trace.blocks[1], block_config(replace(alone, tp=ranks))) for ranks in (1, tp))
    assert whole.forward_s / tp <= part.forward_s * 1.0001 <= whole.forward_s * 1.0002


def test_attention_in_one_kernel_saves_the_traffic_of_its_squares() -> None:
    trace = transformer(Dimensions(layers=1, hidden=1024, heads=16, seq=4096, vocab=50304))
    fused, apart = (
        Layout(trace, MACHINES, precision="bf16", framework=FrameworkProfile(flash=flash)) for flash in (True, False)
    )
    assert (
        block_time(trace.blocks[1], block_config(fused)).forward_s
        < 0.7 * block_time(trace.blocks[1], block_config(apart)).forward_s
    )


def test_a_tiny_model_takes_as_long_as_launching_its_kernels() -> None:
    trace = transformer(Dimensions(layers=1, hidden=64, heads=4, seq=32, vocab=512))
    time = block_time(trace.blocks[1], block_config(Layout(trace, MACHINES, precision="bf16")))
    assert time.launch_forward_s > time.forward_s
    assert time.launch_forward_s == pytest.approx(trace.blocks[1].kernels * 7e-6)
