"""Direct calls do what torch's own methods do, with all hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

import paceline
from paceline.direct_calls import backward, take_step


class Halving(SGD):
    """An optimizer whose step is not torch's."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)


def made(kind: Callable[..., Optimizer] = SGD) -> tuple[nn.Linear, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [SGD, AdamW, Adagrad, Halving])
def test_weights_equal_those_of_torchs_calls(kind: Callable[..., Optimizer]) -> None:
    (ours, our_optimizer), (torchs, optimizer) = made(kind), made(kind)
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        backward(ours(x).square().mean())
        take_step(our_optimizer)
        torchs(x).square().mean().backward()
        optimizer.step()
    assert torch.equal(ours.weight, torchs.weight)
    assert torch.equal(ours.weight.grad, torchs.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["before", "after", "before any", "after any"])
def test_hooks_are_called(which: str) -> None:
    model, optimizer = made()
    backward(model(torch.ones(3)).sum())
    calls: list[object] = []
    register = {
        "before": optimizer.register_step_pre_hook,
        "after": optimizer.register_step_post_hook,
        "before any": register_optimizer_step_pre_hook,
        "after any": register_optimizer_step_post_hook,
    }[which]
    hook = register(lambda *of: calls.append(of[0]))
    take_step(optimizer)
    hook.remove()
    take_step(optimizer)
    assert calls == [optimizer]


def test_the_engine_of_a_loop_calls_the_hooks_of_the_user() -> None:
    model, optimizer = made()
    engine = paceline.setup(model, optimizer)
    calls: list[object] = []
    for _ in range(2):
        engine.backward(model(torch.ones(2, 3)).square().mean(), items=2)
        engine.update()
        optimizer.register_step_post_hook(lambda *of: calls.append(of[0]))
    engine.close()
    assert calls == [optimizer]


def test_schedulers_of_torch_see_each_step() -> None:
    model, optimizer = made()
    scheduler = StepLR(optimizer, 1)
    backward(model(torch.ones(3)).sum())
    take_step(optimizer)
    scheduler.step()  # warns, and thus fails, if the optimizer has not stepped
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_profilers_see_each_step() -> None:
    model, optimizer = made()
    backward(model(torch.ones(3)).sum())
    with profile() as profiled:
        take_step(optimizer)
    assert any("Optimizer.step" in event.key for event in profiled.key_averages())


def test_a_graph_is_kept_only_on_request() -> None:
    model, _ = made()
    loss = model(torch.ones(3)).square().sum()
    backward(loss, retain_graph=True)
    backward(loss)
    with pytest.raises(RuntimeError):
        backward(loss)


@pytest.mark.parametrize("loss", [torch.zeros(2, requires_grad=True), torch.tensor(1.0)], ids=["vector", "constant"])
def test_torch_refuses_what_has_no_gradient(loss: Tensor) -> None:
    with pytest.raises(RuntimeError):
        backward(loss)


def test_a_function_that_changes_its_gradient_in_place_does_not_change_the_next_step() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient.mul_(2)

    x = torch.ones((), requires_grad=True)
    for _ in range(2):
        x.grad = None
        backward(Doubled.apply(x))
        assert x.grad == 2
