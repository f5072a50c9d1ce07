"""What every cost is computed from: sums over a trace have to be right, and equal blocks have to be known as equal."""

from __future__ import annotations

from dataclasses import replace

from paceline.job.model import Dimensions
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.model.transformer import transformer

LAYER = BlockTrace(
    "layer", "layers.0", (Gemm(8, 4, 4, divided="n"), Gemm(8, 8, 2, batch=2, divided="batch")), matrices=16, vectors=4
)
HEAD = BlockTrace("head", "", (Gemm(8, 100, 4),), matrices=400)


def test_flops_are_two_for_each_multiplication_in_every_head_and_repetition() -> None:
    assert Gemm(8, 4, 5).flops == 2 * 8 * 4 * 5
    assert Gemm(8, 8, 2, batch=3, times=2).flops == 2 * 3 * 2 * 8 * 8 * 2
    assert Gemm(8, 8, 2, batch=3, causal=True).flops == Gemm(8, 8, 2, batch=3).flops
    assert LAYER.flops == 2 * 8 * 4 * 4 + 2 * 2 * 8 * 8 * 2
    assert ModelTrace((LAYER, LAYER, HEAD)).flops == 2 * LAYER.flops + HEAD.flops


def test_a_parameter_that_stands_in_two_blocks_counts_once() -> None:
    tied = ModelTrace((replace(HEAD, kind="embedding"), LAYER, HEAD), tied=400)
    assert tied.parameters == 400 + 20


def test_neighbours_that_are_equal_are_one_run() -> None:
    other = replace(LAYER, kernels=5)
    assert ModelTrace((LAYER, LAYER, other, LAYER, HEAD)).runs == ((LAYER, 2), (other, 1), (LAYER, 1), (HEAD, 1))
    assert list(ModelTrace((LAYER, HEAD))) == [LAYER, HEAD]


def test_sums_over_tp_are_as_wide_as_the_products_that_make_them() -> None:
    """A whole model as one block passes on one number, its loss, and sums far more in its middle."""
    model = replace(LAYER, gemms=(Gemm(1024, 256, 64, divided="n"), Gemm(1024, 64, 256, divided="k")), boundary=1.0)
    assert model.reduced == 1024 * 64
    layer = transformer(Dimensions(layers=2, hidden=64, heads=4, seq=16, vocab=100)).blocks[1]
    assert layer.reduced == layer.boundary
