"""Operators of the simulated accelerator give the CPU's results, whatever the order in which streams run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, _chunk_cat, _foreach_add, _foreach_add_, _foreach_lerp_, _foreach_mul_, _foreach_norm, nn

from simulated.environment import Order, Simulated

DEVICE = "sim"


def test_operators_give_the_cpus_results(simulated: Simulated) -> None:
    assert simulated.ranks(1, differences) == [[]]


@pytest.mark.parametrize("order", ["late", "random", "eager"])
def test_models_train_as_on_the_cpu(simulated: Simulated, order: Order) -> None:
    assert simulated.ranks(1, training_differences, order=order, seed=5) == [[]]


def test_tensors_of_several_devices_are_refused_as_by_cuda(simulated: Simulated) -> None:
    assert simulated.ranks(1, accepted_mixtures, devices=2) == [[]]


def differences() -> list[str]:
    """Each computation whose result on the device is not the CPU's."""
    found = []
    for name, compute in computations().items():
        torch.manual_seed(1)
        expected = compute(torch.device("cpu"))
        torch.manual_seed(1)
        try:
            result = compute(torch.device(DEVICE))
        except Exception as error:  # noqa: BLE001 - told below, with all others
            found.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
            continue
        for one, other in zip(flat(expected), flat(result), strict=True):
            if other.device.type != DEVICE:
                found.append(f"{name}: a result is on {other.device}")
            elif one.shape != other.shape:
                found.append(f"{name}: {one.shape} on the CPU, {other.shape} here")
            elif one.dtype != other.dtype or not torch.allclose(one, other.cpu(), equal_nan=True, atol=1e-6):
                found.append(f"{name}: {one.flatten()[:4]} on the CPU, {other.cpu().flatten()[:4]} here")
    return found


def flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.to_dense().detach() if value.is_sparse else value.detach()
    else:
        for part in value:
            yield from flat(part)


def computations() -> dict[str, Callable[[torch.device], Any]]:
    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def with_gradients(module: nn.Module, *inputs: Tensor) -> Callable[[torch.device], Any]:
        def compute(device: torch.device) -> Any:
            torch.manual_seed(3)
            for parameter in module.parameters():
                parameter.data = numbers(*parameter.shape, dtype=parameter.dtype)
            here = module.to(device)
            leaves = [tensor.detach().to(device).requires_grad_(tensor.is_floating_point()) for tensor in inputs]
            for tensor in [*leaves, *here.parameters()]:
                tensor.grad = None
            output = here(*leaves)
            output = output[0] if isinstance(output, tuple) else output
            output.square().mean().backward()
            gradients = [t.grad.clone() for t in [*leaves, *here.parameters()] if t.grad is not None]
            result = [output.detach().clone(), *gradients]
            module.to("cpu")
            return result

        return compute

    def attention(**given: Any) -> Callable[[torch.device], Any]:
        query, key, value = (numbers(2, 2, 6, 8) + i for i in range(3))
        return lambda d: F.scaled_dot_product_attention(query.to(d), key.to(d), value.to(d), **given)

    def in_place(device: torch.device) -> Tensor:
        whole = numbers(4, 6).to(device)
        whole[1:3, ::2].mul_(2)
        whole[:, 0] = 7
        whole.t()[2].copy_(whole[:, 3])
        return whole

    def flash_attention(device: torch.device) -> list[Tensor]:
        query, key, value = ((numbers(2, 2, 6, 8) + i).to(device, torch.bfloat16) for i in range(3))
        name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if device.type == "cpu" else "")
        forward, backward = (getattr(torch.ops.aten, name + pass_) for pass_ in ("", "_backward"))
        mixed, sums, *others = forward(query, key, value, 0.0, True)
        gradients = backward(mixed, query, key, value, mixed, sums, *others[:4], 0.0, True, *others[4:6])
        return [mixed, sums, *gradients]

    def chunks_put_together(device: torch.device) -> Tensor:
        chunked = [numbers(4, 3, dtype=torch.bfloat16).to(device), numbers(2, 5, dtype=torch.bfloat16).to(device)]
        out = torch.empty(2, 11, device=device)
        # the CPU's kernel does not change the dtype
        same = chunked if device.type == DEVICE else [tensor.float() for tensor in chunked]
        return _chunk_cat(same, dim=0, num_chunks=2, out=out)

    def half_layer_norm(device: torch.device) -> list[Tensor]:
        x, weight = (numbers(*shape, dtype=torch.bfloat16).to(device).requires_grad_() for shape in ((3, 4), (4,)))
        F.layer_norm(x, (4,), weight).sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad]

    def foreach_in_place(device: torch.device) -> list[Tensor]:
        tensors = [numbers(2).to(device), numbers(3).to(device)]
        _foreach_mul_(tensors, torch.tensor(2.0))
        _foreach_lerp_(tensors, [tensor + 1 for tensor in tensors], 0.25)
        return tensors

    words = torch.tensor([[1, 2, 2], [5, 1, 0]])
    image = numbers(2, 3, 8, 8)
    return {
        "a view of another dtype": lambda d: numbers(4).to(d).view(torch.int32),
        "a view as real": lambda d: torch.view_as_real(torch.view_as_complex(numbers(3, 2).to(d)) * 2),
        "writes through views": in_place,
        "indexing by a mask": lambda d: numbers(9).to(d)[numbers(9).to(d) > 0],
        "indexing by the host's indices": lambda d: numbers(9).to(d)[torch.tensor([1, 3])],
        "nonzero": lambda d: numbers(3, 3).to(d).relu().nonzero(),
        "masked_scatter": lambda d: numbers(9).to(d).masked_scatter(numbers(9).to(d) > 0, torch.ones(9, device=d)),
        "unique": lambda d: torch.unique(words.to(d), return_inverse=True, return_counts=True),
        "bincount": lambda d: torch.bincount(words.to(d).flatten()),
        "topk": lambda d: numbers(9).to(d).topk(3),
        "sort": lambda d: numbers(4, 3).to(d).sort(0),
        "foreach": lambda d: _foreach_add([numbers(2).to(d), numbers(3).to(d)], 1.5),
        "foreach norm": lambda d: _foreach_norm([numbers(2).to(d), numbers(3).to(d)]),
        "foreach in place": foreach_in_place,
        "chunks put together as another dtype": chunks_put_together,
        "linalg": lambda d: torch.linalg.qr(numbers(3, 3).to(d)),
        "a number of the host": lambda d: numbers(3).to(d) * torch.tensor(2.0),
        "cumsum in float64": lambda d: numbers(9, dtype=torch.float64).to(d).cumsum(0),
        "bfloat16": lambda d: numbers(4, 4, dtype=torch.bfloat16).to(d) @ numbers(4, 4, dtype=torch.bfloat16).to(d),
        "layer norm in bfloat16": half_layer_norm,
        "float16": lambda d: numbers(4, 4, dtype=torch.float16).to(d).softmax(1),
        "channels last": lambda d: F.conv2d(
            image.to(d).to(memory_format=torch.channels_last), numbers(4, 3, 3, 3).to(d)
        ),
        "attention": attention(),
        "causal attention": attention(is_causal=True),
        "flash attention, the kernel": flash_attention,
        "a convolution": with_gradients(nn.Conv2d(3, 4, 3, stride=2, padding=1), image),
        "a transposed convolution": with_gradients(nn.ConvTranspose2d(3, 4, 3, groups=1), image),
        "batch normalisation": with_gradients(nn.BatchNorm2d(3), image),
        "batch normalisation, evaluated": with_gradients(nn.BatchNorm2d(3).eval(), image),
        "pooling": with_gradients(nn.MaxPool2d(2), image),
        "layer normalisation": with_gradients(nn.LayerNorm(8), numbers(4, 8)),
        "an embedding": with_gradients(nn.Embedding(6, 4), words),
        "an embedding with sparse gradients": with_gradients(nn.Embedding(6, 4, sparse=True), words),
        "an LSTM": with_gradients(nn.LSTM(5, 4, num_layers=2), numbers(3, 2, 5)),
        "an LSTM without bias": with_gradients(nn.LSTM(5, 4, bias=False), numbers(3, 2, 5)),
        "a GRU": with_gradients(nn.GRU(5, 4, num_layers=2), numbers(3, 2, 5)),
        "a transformer": with_gradients(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), numbers(3, 2, 8)),
        "recomputation": with_gradients(Recomputed(), numbers(3, 4)),
        "a traced module": with_gradients(Traced(), numbers(3, 4)),
    }


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, tensor: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        result: Tensor = checkpoint(self.inner, tensor, use_reentrant=False)
        return result


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, tensor: Tensor) -> Tensor:
        result: Tensor = torch.compile(self.inner, backend="aot_eager")(tensor)
        return result


def training_differences() -> list[str]:
    """Each way to train whose parameters after some steps are not the CPU's."""
    ways: dict[str, tuple[Callable[[], nn.Module], Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
        "SGD": (image_model, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        "AdamW, foreach": (image_model, lambda p: torch.optim.AdamW(p, 1e-2, foreach=True, eps=1e-3)),
        "AdamW, fused": (image_model, lambda p: torch.optim.AdamW(p, 1e-2, fused=True, eps=1e-3)),
        "SGD, fused": (image_model, lambda p: torch.optim.SGD(p, 0.1, fused=True)),
        "sparse SGD": (word_model, lambda p: torch.optim.SGD(p, 0.5)),
        "SparseAdam": (word_model, lambda p: torch.optim.SparseAdam(p, 0.1, eps=1e-3)),
    }
    found = []
    for name, (make, optimizer) in ways.items():
        try:
            ends = [trained(make, optimizer, device) for device in ("cpu", DEVICE)]
        except Exception as error:  # noqa: BLE001 - told below, with all others
            found.append(f"{name}: {type(error).__name__}: {error}")
            continue
        worst = max((one - other).abs().max().item() for one, other in zip(*ends, strict=True))
        if not worst < 1e-4:
            found.append(f"{name}: {worst}")
    return found + scaled_difference()


def image_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def word_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 5, sparse=True))


def trained(
    make: Callable[[], nn.Module], optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: str
) -> list[Tensor]:
    torch.manual_seed(0)
    model = make()
    sparse = isinstance(model, nn.Sequential) and isinstance(model[0], nn.Embedding)
    inputs = torch.randint(9, (6, 3)) if sparse else torch.randn(6, 1, 8, 8)
    targets = torch.randint(5, (18 if sparse else 6,)).to(device)
    model, inputs = model.to(device), inputs.to(device)
    steps = optimizer(list(model.parameters()))
    for _ in range(4):
        steps.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2) if sparse else model(inputs), targets).backward()
        steps.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def scaled_difference() -> list[str]:
    """Training in float16 with a scaler: a step with an infinite gradient is left out, the others are taken."""
    model = nn.Linear(3, 1).to(DEVICE)
    steps, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(DEVICE, init_scale=8.0)
    before = model.weight.detach().clone()
    for factor in (float("inf"), 1.0):
        steps.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            output = model(torch.ones(2, 3, device=DEVICE))
        if output.dtype != torch.float16:
            return [f"autocast gave {output.dtype}"]
        scaler.scale(output.float().sum() * factor).backward()
        scaler.step(steps)
        scaler.update()
        if torch.equal(before, model.weight) != (factor == float("inf")):
            return [f"the scaler took the wrong step at a gradient of {factor}"]
    return [] if scaler.get_scale() == 4.0 else [f"scale {scaler.get_scale()}"]


def accepted_mixtures() -> list[str]:
    """Calls with tensors of several devices that were not refused."""
    one = torch.randn(3, 3, device="sim:0")
    calls: dict[str, Callable[[], object]] = {
        "sim + cpu": lambda: one + torch.randn(3, 3),
        "sim:0 @ sim:1": lambda: one @ torch.randn(3, 3, device="sim:1"),
        "a module's input on the CPU": lambda: nn.Linear(3, 3).to("sim:0")(torch.randn(2, 3)),
        "an optimizer over both": lambda: _foreach_add_([one], [torch.randn(3, 3)]),
        "a device's index into the CPU's": lambda: torch.randn(3)[torch.tensor([0], device="sim:0")],
        "numpy": one.numpy,
        "sim:7": lambda: torch.randn(3, device="sim:7"),
    }
    words = {"numpy": "convert", "sim:7": "ordinal"}
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(name)
        except (RuntimeError, TypeError) as error:
            if words.get(name, "device") not in str(error):
                wrong.append(f"{name}: {error}")
    return wrong
