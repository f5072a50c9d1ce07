"""`onednn=on`: the same products, wherever they are computed, and torch's own again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.engine.calls import use_onednn


@pytest.fixture(autouse=True, scope="module")
def switched_on() -> Iterator[None]:
    use_onednn(True)
    yield
    use_onednn(False)


def exact(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).float()


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max() + 1e-6))


SIZES = st.integers(1, 130)
LAYOUTS = st.sampled_from(["rows", "columns", "every second column", "expanded", "part of a wider one"])


def matrix(rows: int, columns: int, layout: str) -> Tensor:
    if layout == "columns":
        return torch.randn(columns, rows).t()
    if layout == "every second column":
        return torch.randn(rows, 2 * columns)[:, ::2]
    if layout == "expanded":
        return torch.randn(1, columns).expand(rows, columns)
    if layout == "part of a wider one":
        return torch.randn(rows + 3, columns + 5)[1:-2, 2:-3]
    return torch.randn(rows, columns)


@given(SIZES, SIZES, SIZES, LAYOUTS, LAYOUTS)
def test_products_of_any_sizes_and_layouts_are_right(m: int, k: int, n: int, left: str, right: str) -> None:
    a, b = matrix(m, k, left), matrix(k, n, right)
    assert close(a @ b, exact(a, b))
    bias = torch.randn(n)
    assert close(torch.addmm(bias, a, b), exact(a, b) + bias)
    assert close(torch.addmm(bias, a, b, beta=0.5, alpha=2), exact(a, b) * 2 + 0.5 * bias)
    whole = torch.randn(m, n)
    assert close(torch.addmm(whole, a, b), exact(a, b) + whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_products_of_other_types_stay_torchs_own(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-3, 4, (128, 128)).to(dtype) for _ in range(2))
    assert torch.equal((a @ b).double(), a.double() @ b.double())


def test_a_layer_has_the_gradients_that_it_has_without() -> None:
    layer, inputs = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)), torch.randn(4, 32, 256)
    gradients = []
    for on in (True, False):
        use_onednn(on)
        layer.zero_grad()
        layer(inputs).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None])
    use_onednn(True)
    assert all(close(one, other) for one, other in zip(*gradients, strict=True))
    assert len(gradients[0]) == 4


def goes_to_onednn(rows: int) -> bool:
    a, b = torch.randn(rows, 64), torch.randn(64, rows)
    with torch.profiler.profile() as seen:
        _ = a @ b
    return any(event.name == "mkldnn::_linear_pointwise" for event in seen.events() or ())


def test_large_products_do_go_to_onednn_and_no_longer_once_it_is_off() -> None:
    assert goes_to_onednn(128)
    assert not goes_to_onednn(2), "the small one is not worth the way"
    use_onednn(False)
    assert not goes_to_onednn(128)
    use_onednn(True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    a, b = torch.randn(128, 64), torch.randn(64, 128)
    a[3, 5] = value
    found = a @ b
    assert not found[3].isfinite().any()
    assert found[torch.arange(128) != 3].isfinite().all()


def test_shapes_that_do_not_fit_are_torchs_own_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.randn(128, 64) @ torch.randn(65, 128)
