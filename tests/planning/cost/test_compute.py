"""Time of a block on one rank: products in each precision, attention by generation, power, casts, adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.catalogue import CATALOGUE, Accelerator, at_power
from paceline.job.model import Dimensions
from paceline.planning.cost import constants
from paceline.planning.cost.compute import BlockTime, _casts_s, block_config, block_time, gemm_s, held_weights
from paceline.planning.cost.layout import FrameworkProfile, Layout, Machines
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.model.transformer import transformer

A100, H100 = CATALOGUE["A100-SXM-80"], CATALOGUE["H100-SXM"]
MACHINES = Machines(A100, 1, 8, A100.network)
TRACE = transformer(Dimensions(layers=1, hidden=8192, heads=64, seq=8192, vocab=50304, gated=True, dropout=False))
MIXTURE = transformer(
    Dimensions(layers=1, hidden=4096, heads=32, seq=4096, vocab=50304, experts=64, top_k=4, expert_ffn=2048)
)


def laid_out(device: Accelerator = H100, trace: ModelTrace = TRACE, **changed: Any) -> Layout:
    return replace(Layout(trace, Machines(device, 1, 8, device.network), precision="bf16"), **changed)


def layer(layout: Layout) -> BlockTime:
    """Time of the first layer."""
    return block_time(layout.trace.blocks[1], block_config(layout))


def passes_s(layout: Layout) -> float:
    """Both passes of the first layer."""
    time = layer(layout)
    return time.forward_s + time.backward_s


def test_a_large_product_reaches_what_is_measured_and_never_the_peak() -> None:
    """A block of nothing but products, as an A100's power lets them go on."""
    product = Gemm(rows=8192, n=8192, k=8192)
    block = BlockTrace("layer", gemms=(product,), matrices=8192**2)
    time = block_time(block, block_config(Layout(ModelTrace((block,)), MACHINES, precision="bf16")))
    assert 220 < product.flops / time.weights_s / 1e12 < 280


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


def test_products_in_eight_bits_are_faster_and_their_casts_are_counted() -> None:
    """Without the casts a small layer would gain as much as a large one."""
    plain, low = layer(laid_out()), layer(laid_out(products="fp8"))
    assert low.weights_s < 0.65 * plain.weights_s
    assert low.others_s > 1.1 * plain.others_s
    small = transformer(Dimensions(layers=1, hidden=1024, heads=8, seq=1024, vocab=50304))
    gains = [
        passes_s(laid_out(trace=trace)) / passes_s(laid_out(trace=trace, products="fp8")) for trace in (small, TRACE)
    ]
    assert gains[0] < gains[1] < 2


def test_eight_bits_where_a_device_has_none_cost_and_gain_nothing() -> None:
    assert layer(laid_out(A100, products="fp8")) == layer(laid_out(A100))


def test_the_head_stays_in_sixteen_bits() -> None:
    head = TRACE.blocks[-1]
    assert block_time(head, block_config(laid_out(products="fp8"))) == block_time(head, block_config(laid_out()))


_SOMETIMES_GATHERED: tuple[dict[str, Any], ...] = ({}, {"microbatches": 16}, {"microbatches": 16, "fsdp": 8})


def test_weights_are_cast_once_a_step_unless_they_are_gathered_for_each_microbatch() -> None:
    one, kept, gathered = (layer(laid_out(products="fp8", **changed)).others_s for changed in _SOMETIMES_GATHERED)
    assert kept < one == gathered


def test_folded_experts_cast_only_the_tokens_that_they_get() -> None:
    """Each rank of tp has its part of the tokens there; all of them would be counted `tp` times."""
    gemms = tuple(gemm for gemm in MIXTURE.blocks[1].gemms if gemm.experts)
    experts = ModelTrace((*MIXTURE.blocks[:1], BlockTrace("mixture", gemms=gemms)))

    def casts_s(tp: int) -> float:
        folded = laid_out(trace=experts, samples=64.0, expert_ranks=8, dp=8 // tp, tp=tp)
        low, plain = (block_config(replace(folded, products=products)) for products in ("fp8", ""))
        return _casts_s(gemms, experts.blocks[1], low)[0] - _casts_s(gemms, experts.blocks[1], plain)[0]

    assert casts_s(4) == pytest.approx(casts_s(1) / 4, rel=0.05)


@pytest.mark.parametrize(
    ("device", "first"), [("A100-SXM-80", 1), ("H100-SXM", 1), ("B200", 2), ("MI300X", 2), ("TPU-v5p", 2)]
)
def test_no_generation_of_attention_is_slower_than_the_one_before_it(device: str, first: int) -> None:
    times = [
        passes_s(laid_out(CATALOGUE[device], framework=FrameworkProfile(attention=generation)))
        for generation in range(first, 4)
    ]
    assert times == sorted(times, reverse=True)


def test_the_third_attention_gains_on_hopper_most() -> None:
    """FlashAttention 3 uses what only Hopper has; counted as the second one, long sequences were a half too slow."""
    long = transformer(Dimensions(layers=1, hidden=2048, heads=16, seq=32768, vocab=50304, dropout=False))
    gains = [
        passes_s(laid_out(device, long, framework=FrameworkProfile(attention=2)))
        / passes_s(laid_out(device, long, framework=FrameworkProfile(attention=3)))
        for device in (A100, H100)
    ]
    assert gains[0] == pytest.approx(1.0)
    assert gains[1] > 1.4


@given(st.floats(100, 700), st.floats(100, 700))
def test_a_device_with_less_power_is_never_faster(watts: float, others: float) -> None:
    """Also where its usual power's figure was found on runs: a device with one watt less must not lose that."""
    less, more = (passes_s(laid_out(at_power(H100, power))) for power in sorted((watts, others)))
    assert less >= more * (1 - 1e-12)
    assert passes_s(laid_out(at_power(H100, 500))) > 1.1 * passes_s(laid_out())


def test_a_layer_of_little_work_keeps_its_clock() -> None:
    """Power binds where products are all that a device does; others would be slowed for nothing."""
    small = transformer(Dimensions(layers=1, hidden=256, heads=4, seq=128, vocab=50304))
    weak = at_power(H100, 400)
    slow = [passes_s(laid_out(weak, trace)) / passes_s(laid_out(H100, trace)) for trace in (small, TRACE)]
    assert slow[0] < 1.05
    assert slow[1] > 1.15


def test_adapters_spare_the_gradients_of_weights_but_not_the_backward_pass() -> None:
    whole, adapted = layer(laid_out()), layer(laid_out(lora=16))
    assert adapted.forward_s == pytest.approx(whole.forward_s, rel=0.02)
    assert 0.4 < adapted.backward_s / whole.backward_s < 0.75


def test_a_divided_expert_does_the_same_work_on_more_ranks() -> None:
    """Four ranks that divide experts gather four times the tokens, for a quarter of the width."""
    experts = next(gemm for gemm in MIXTURE.blocks[1].gemms if gemm.experts)
    whole = laid_out(trace=MIXTURE, samples=64.0, tp=4, dp=8, expert_ranks=8)
    divided = replace(whole, expert_tp=4)
    assert gemm_s(experts, block_config(divided)) == pytest.approx(gemm_s(experts, block_config(whole)), rel=0.1)
    assert divided.expert_copies == whole.expert_copies / 4
    held, more = (held_weights(MIXTURE.blocks[1], block_config(each)) for each in (divided, whole))
    assert more - held == pytest.approx(MIXTURE.blocks[1].experts / 8 * 3 / 4)


@given(st.floats(1.0, 4.0))
def test_the_rank_with_the_busiest_experts_keeps_all_others_waiting(imbalance: float) -> None:
    even, uneven = (laid_out(trace=MIXTURE, ep=8, samples=8.0, imbalance=one) for one in (1.0, imbalance))
    experts = next(gemm for gemm in MIXTURE.blocks[1].gemms if gemm.experts)
    assert gemm_s(experts, block_config(even)) <= gemm_s(experts, block_config(uneven))
    assert layer(uneven).forward_s <= (imbalance + 0.01) * layer(even).forward_s  # whole lines of memory


def convolution(width: int, precision: str, spatial: int) -> float:
    """TFLOP/s of a convolution's products in the forward pass."""
    pixels = 56 * 56
    gemm = Gemm(rows=pixels, n=width, k=width * spatial, read=float(pixels * width), taps=spatial)
    layout = laid_out(A100, ModelTrace((BlockTrace("layer", gemms=(gemm,)),)), samples=64.0, precision=precision)
    return gemm.flops * 64 / gemm_s(gemm, block_config(layout)) / 1e12


def test_winograds_algorithm_spares_products_where_tensor_cores_do_not_multiply() -> None:
    """Without it fp32 convolutions would be predicted at twice their time, and with it everywhere at half."""
    assert convolution(256, "fp32", 9) > 1.8 * convolution(256, "fp32", 8)
    assert convolution(256, "bf16", 9) < 1.2 * convolution(256, "bf16", 8)


def test_a_convolution_reads_its_image_once_not_once_for_each_place_of_its_kernel() -> None:
    pixels = 112 * 112
    image = Gemm(rows=pixels, n=16, k=16 * 9, read=float(pixels * 16))
    unfolded = replace(image, read=0.0)
    once, again = (
        gemm_s(gemm, block_config(laid_out(A100, ModelTrace((BlockTrace("layer", gemms=(gemm,)),)), samples=64.0)))
        for gemm in (image, unfolded)
    )
    assert once < 0.6 * again


@given(st.integers(1, 8), st.sampled_from([1, 9, 27]), st.sampled_from(["bf16", "fp32"]))
def test_the_gradient_of_an_image_takes_as_long_as_the_convolution(width: int, taps: int, precision: str) -> None:
    """With as many channels as results; summed over these alone, narrow ones would seem to take three times as long."""
    width, pixels = 32 * width, 56 * 56
    gemm = Gemm(rows=pixels, n=width, k=width * taps, read=float(pixels * width), taps=taps)
    config = block_config(laid_out(A100, precision=precision, samples=16.0))
    forward, both = gemm_s(gemm, config), gemm_s(gemm, config, backward=True)
    weights = gemm_s(replace(gemm, data=True), config, backward=True)
    assert both - weights == pytest.approx(forward, rel=1e-6)


def test_the_gradient_of_a_convolution_with_strides_has_the_places_of_its_image() -> None:
    config = block_config(laid_out(A100, samples=16.0))
    strided = Gemm(rows=28 * 28, n=256, k=256 * 9, read=float(56 * 56 * 256), taps=9)
    as_products = replace(strided, taps=1)
    both, alike = (gemm_s(gemm, config, backward=True) for gemm in (strided, as_products))
    assert both == pytest.approx(alike, rel=0.25)  # as many FLOPs


def test_convolutions_over_three_dimensions_are_slower_where_tensor_cores_multiply() -> None:
    assert convolution(64, "bf16", 27) < 0.8 * convolution(64, "bf16", 9)
    assert convolution(64, "fp32", 27) > 0.9 * convolution(64, "fp32", 25)


def test_images_with_channels_first_are_turned_in_tf32() -> None:
    gemm = Gemm(rows=56 * 56, n=64, k=64 * 9, read=56.0 * 56 * 64, taps=9)
    whole = BlockTrace("layer", gemms=(gemm,), inside=1e7)
    passes = [
        block_time(replace(whole, inside=inside), block_config(laid_out(A100, precision=precision))).others_s
        for precision in ("tf32", "fp32")
        for inside in (whole.inside, 0.0)
    ]
    assert passes[0] - passes[1] == pytest.approx(constants.CONVOLUTION_TF32 * (passes[2] - passes[3]), rel=1e-6)


def test_a_layer_that_reads_data_has_no_gradient_of_its_input() -> None:
    config, inner = block_config(laid_out()), Gemm(4096, 4096, 4096)
    both, one = gemm_s(inner, config, backward=True), gemm_s(replace(inner, data=True), config, backward=True)
    assert one == pytest.approx(both / 2, rel=0.01)
