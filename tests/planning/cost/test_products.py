"""Time of matrix products by shape and precision: what shapes cost more than their FLOPs, as measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE, Accelerator
from paceline.planning.cost.compute import LOW, peak_flops, product_s

A100, H100, B200 = (CATALOGUE[name] for name in ("A100-SXM-80", "H100-SXM", "B200"))


def reached(m: int, n: int, k: int) -> float:
    """TFLOP/s of a product on an A100."""
    return 2 * m * n * k / product_s(A100, "bf16", m, n, k) / 1e12


def test_small_products_reach_less() -> None:
    assert reached(256, 256, 256) < reached(1024, 1024, 1024) < reached(8192, 8192, 8192)


def test_widths_that_do_not_divide_cost_more() -> None:
    assert reached(4096, 4096, 4096) > reached(4096, 4104, 4096) > reached(4096, 4097, 4096)


def test_a_vector_is_bound_by_memory_not_by_arithmetic() -> None:
    moved = 2 * (8192 * 8192)
    assert product_s(A100, "bf16", 1, 8192, 8192) >= moved / A100.memory_bandwidth


@given(
    st.sampled_from([A100, H100, B200]),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from(["bf16", "fp32", "fp16", "tf32", *LOW]),
)
def test_nothing_is_faster_than_the_peak_or_than_memory(
    device: Accelerator, m: int, n: int, k: int, precision: str
) -> None:
    seconds = product_s(device, precision, float(m), float(n), float(k))
    assert seconds >= 2 * m * n * k / peak_flops(device, precision)
    assert seconds >= 2 * m * n / device.memory_bandwidth


@pytest.mark.parametrize(
    ("precision", "tflops"), [("bf16", 706), ("fp8", 1320), ("fp8-row", 1150)], ids=["bf16", "fp8", "fp8-row"]
)
def test_an_h100_reaches_in_each_precision_what_was_measured_of_its_large_products(
    precision: str, tflops: float
) -> None:
    """Measured ones are within the device's power; ours has the clock of a first product, at most a third more."""
    ours = 2 * 8192**3 / product_s(H100, precision, 8192.0, 8192.0, 8192.0) / 1e12
    assert tflops <= ours < 1.35 * tflops


def test_one_scale_for_a_tensor_is_faster_than_scales_of_blocks_and_of_rows() -> None:
    times = [product_s(H100, precision, 8192.0, 8192.0, 8192.0) for precision in ("fp8", "fp8-block", "fp8-row")]
    assert times == sorted(times)
    assert times[-1] < product_s(H100, "bf16", 8192.0, 8192.0, 8192.0)


def test_a_device_without_a_precision_computes_in_the_next_wider_one() -> None:
    assert peak_flops(A100, "fp8") == peak_flops(A100, "bf16")
    assert peak_flops(H100, "fp4") == peak_flops(H100, "fp8") < peak_flops(B200, "fp4")


def test_what_a_convolution_reads_once_is_not_moved_for_every_row() -> None:
    moved = product_s(A100, "bf16", 1e6, 64.0, 576.0)
    spared = product_s(A100, "bf16", 1e6, 64.0, 576.0, 1.0, 1e6 * 576 * 8 / 9)
    assert spared < 0.5 * moved


def test_a_long_sum_is_split_among_idle_multiprocessors() -> None:
    """A first convolution's gradient has 32 × 9 results, each a sum over all positions of all images."""
    moved = 2 * (32 + 9) * 2**22
    assert product_s(A100, "bf16", 32.0, 16.0, 2.0**22) < 8 * moved / A100.memory_bandwidth
