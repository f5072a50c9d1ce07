"""Code of the model's own that a division could break.

Hooks, autograd functions, caches, kept results, noise, gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.job.batch import Batch
from paceline.split.layout import whole_parts
from paceline.split.tensor_parallel import shard_tensors
from ranks import Ranks
from tensor_parity import Made, call, gradients_agree, loss_of, output_of, own_group, seeded

WIDTH, INNER = 8, 16


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x


class Layers(nn.Module):
    """Two divisible layers with a subclass's code between them, and two more behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.plain = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, 4))

    def between(self, y: Tensor) -> Tensor:
        return torch.tanh(y)

    def forward(self, x: Tensor) -> Any:
        return self.plain(self.down(self.between(self.up(x))))


def hooked_parameters() -> Made:
    """Each hook needs the whole gradient."""
    model = Layers()
    model.up.weight.register_hook(lambda gradient: gradient / gradient.norm())
    model.down.bias.register_hook(lambda gradient: gradient * 0.5)
    model.down.weight.register_post_accumulate_grad_hook(_halve)
    return model, batch()


def _normalised(_: nn.Module, gradients: Any, __: Any) -> Any:
    return (gradients[0] / gradients[0].norm(),)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= parameter.grad.norm()


def hooked_modules() -> Made:
    model = Layers()
    model.down.register_full_backward_hook(_normalised)
    return model, batch()


class HookedActivation(Layers):
    def between(self, y: Tensor) -> Tensor:
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.norm())
        return torch.tanh(y)


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.norm()


class Gelu(torch.autograd.Function):
    """As in Bloom: element by element, there and back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y))
        return gradient * (0.5 * y * ((1 - t * t) * (0.79788456 + 0.1070322243 * y * y)) + 0.5 * (1 + t))


class Counting(torch.autograd.Function):
    """Its gradient depends on how many features there are, of which a rank has a part."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.shape[-1]


class PointwiseFunction(Layers):
    def between(self, y: Tensor) -> Tensor:
        result: Tensor = Gelu.apply(y)
        return result


class CountingFunction(Layers):
    def between(self, y: Tensor) -> Tensor:
        result: Tensor = Counting.apply(y)
        return result


class OwnFunction(Layers):
    def between(self, y: Tensor) -> Tensor:
        result: Tensor = Normalised.apply(y)
        return result


class Complex(Layers):
    """A whole parameter of complex numbers takes part in the divided work."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def between(self, y: Tensor) -> Tensor:
        waves = torch.complex(y, y)
        return (waves * self.turn[0]).real + (waves * self.turn[1]).imag


class Noisy(Layers):
    def between(self, y: Tensor) -> Tensor:
        return torch.tanh(y) + torch.randn(y.shape, dtype=y.dtype) + torch.randn_like(y)


@dataclass
class Result:
    """A result that is not a container of torch's."""

    inner: Tensor
    logits: Tensor


class ReturnsInner(Layers):
    def forward(self, x: Tensor) -> Result:
        y = torch.tanh(self.up(x))
        return Result(y, self.plain(self.down(y)))


class KeepsInner(Layers):
    """Somebody's loss reads what the model has kept."""

    def between(self, y: Tensor) -> Tensor:
        self.kept = torch.tanh(y)
        return self.kept


@cache
def ramp(size: int) -> Tensor:
    return torch.arange(size) / size


class Caches(Layers):
    """Keeps what it has computed once: in an attribute, a dict, and a function of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None
        self.known: dict[int, Tensor] = {}

    def between(self, y: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.ones(y.shape[-1], dtype=y.dtype)
        known = self.known.setdefault(y.shape[-1], torch.zeros_like(y[0]))
        return y * self.scale + known

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * ramp(x.shape[-1]))


class Untraceable(Layers):
    """Looks at values, and reads a layer's weight elsewhere: large ones were divided all the same."""

    def forward(self, x: Tensor) -> Any:
        y = self.plain(self.down(self.between(self.up(x))))
        return y * self.up.weight.sum() if y.abs().max() > 0 else y


class Reader(nn.Module):
    """Looks at the values of a tensor that is not an argument, and returns something made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = self.shelf.pop().square().mean()
        return x * inner if inner > 0 else x


class ReadsBesides(Layers):
    """A module that cannot be traced reads divided features past its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.up(x))
        self.reader.shelf.append(y)
        return self.plain(self.reader(self.down(y)))


def in_inner(model: nn.Module, of: Batch) -> Tensor:
    """The loss with what lies inside the divided layers."""
    result = model(of[0])  # type: ignore[index]
    inner: Any = result.inner if isinstance(result, Result) else model.kept
    loss: Tensor = loss_of(model, of) + inner.square().mean()
    return loss


def with_penalty(model: nn.Module, of: Batch) -> Tensor:
    """The loss with a gradient penalty, as physics-informed losses have it."""
    x = of[0].detach().requires_grad_()  # type: ignore[index]
    out = output_of(model, (x, x))
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return loss_of(model, of) + 0.01 * slope.square().mean()


Case = tuple[Callable[[], Made], Callable[[nn.Module, Batch], Tensor]]
MODELS = (
    *(HookedActivation, OwnFunction, PointwiseFunction, CountingFunction, Complex, Noisy),
    *(ReturnsInner, KeepsInner, Caches, Untraceable, ReadsBesides),
)


def made(kind: type[Layers]) -> Made:
    return kind(), batch()


def all_agree() -> dict[str, set[str]]:
    cases: dict[str, Case] = {kind.__name__: (lambda kind=kind: made(kind), loss_of) for kind in MODELS}  # type: ignore[misc]
    cases |= {make.__name__: (make, loss_of) for make in (hooked_parameters, hooked_modules)}
    cases |= {kind.__name__: (lambda kind=kind: made(kind), in_inner) for kind in (ReturnsInner, KeepsInner)}  # type: ignore[misc]
    cases["penalty"] = (lambda: made(Layers), with_penalty)
    cases["penalty of functional code"] = (lambda: made(FunctionalInput), with_penalty)
    divided, wrong = {}, []
    for name, (make, loss) in cases.items():
        try:
            divided[name] = set(gradients_agree(make, loss, large=0 if name == "Untraceable" else 1 << 40).done)
        except Exception as error:  # noqa: BLE001 - all that are wrong are told of
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)
    return divided


class FunctionalInput(Layers):
    """The input takes part in divided work outside of any layer."""

    def forward(self, x: Tensor) -> Any:
        y = self.up(x) * x.sum(-1, keepdim=True)
        return self.plain(self.down(F.gelu(y)))


def test_layers_whose_own_code_needs_whole_tensors_stay_whole_and_all_learn_as_in_one_process(ranks: Ranks) -> None:
    divided = ranks(2, all_agree)[0]
    whole = {
        "HookedActivation",
        "OwnFunction",
        "CountingFunction",
        "Noisy",
        "ReturnsInner",
        "KeepsInner",
        "Untraceable",
        "ReadsBesides",
    }
    whole |= {"Caches", "Complex", "hooked_parameters", "hooked_modules"}
    for name, layers in divided.items():
        assert ("up" in layers) == (name not in whole), name
        assert layers or name == "Untraceable", name


class Drops(Layers):
    """Drops out divided features in a layer and in functional code, and whole ones inside of that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.mixed = nn.Dropout(0.5), nn.Dropout(0.5), DropsInside()

    def forward(self, x: Tensor) -> Any:
        y = self.outer(self.down(self.inner(self.up(x))))
        return self.plain(y + self.mixed(y))


class DropsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.outer = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped = F.dropout(torch.ones_like(self.up(x)) + self.up(x), 0.5, self.training)
        out: Tensor = self.outer(self.down(self.dropped))
        del self.dropped
        return out


def masks() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What this rank drops of divided tensors and of whole ones, and its output.

    The same when the pass is made once more.
    """
    model, of = seeded(lambda: made(Drops))
    shard_tensors(model, whole_parts(model), own_group(), of, call)
    divided: list[Tensor] = []
    whole: list[Tensor] = []
    for path, found in (("inner", divided), ("outer", whole), ("mixed.outer", whole)):
        model.get_submodule(path).register_forward_hook(lambda _, __, y, found=found: found.append(y == 0))
    model.get_submodule("mixed.down").register_forward_pre_hook(lambda _, x: divided.append(x[0] == 0))
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(output_of(model, of).detach())
    assert torch.equal(outputs[0], outputs[1])
    return divided, whole, outputs[0]


def test_dropout_differs_between_ranks_where_tensors_are_divided_and_nowhere_else(ranks: Ranks) -> None:
    (divided, whole, output), (others, same, other_output) = ranks(2, masks)
    assert {mask.shape[-1] for mask in divided} == {INNER // 2}
    assert not any(torch.equal(a, b) for a, b in zip(divided, others, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole, same, strict=True))
    assert torch.equal(output, other_output)
