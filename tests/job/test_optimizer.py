"""Optimizers and schedules. A wrong update still trains, only worse, and nobody sees why."""

from __future__ import annotations

import copy
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.job.optimizer import OptimizerSpec
from paceline.job.schedule import ScheduleSpec
from refusals import raises


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    last = nn.Linear(3, 3)
    nn.init.zeros_(last.weight)  # a layer without a norm to scale by
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3), last).to(dtype)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(6, 1, 4, 4, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def spec(**values: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate(values)


def close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> bool:
    return len(ours) == len(theirs) and all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("values", "torch_optimizer", "torch_values"),
    [
        ({"name": "sgd", "lr": 0.1}, torch.optim.SGD, {}),
        (
            {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True},
        ),
        (
            {"name": "adam", "lr": 0.1, "weight_decay": 0.1, "betas": [0.8, 0.9]},
            torch.optim.Adam,
            {"betas": (0.8, 0.9)},
        ),
        ({"name": "adamw", "lr": 0.1, "weight_decay": 0.1, "eps": 1e-4}, torch.optim.AdamW, {"eps": 1e-4}),
    ],
)
def test_torchs_optimizers_do_what_they_do_without_us(
    values: dict[str, Any], torch_optimizer: type[torch.optim.Optimizer], torch_values: dict[str, Any], fused: bool
) -> None:
    ours, theirs = net(), net()
    optimizer = spec(**values).build(ours.parameters(), fused=fused)
    reference = torch_optimizer(
        theirs.parameters(), lr=0.1, weight_decay=values.get("weight_decay", 0.0), **torch_values
    )  # type: ignore[call-arg]
    assert bool(optimizer.defaults["fused"]) == fused
    assert close(trained(ours, optimizer), trained(theirs, reference))


def test_fused_is_left_out_where_torch_has_no_fused_step() -> None:
    model = nn.Linear(3, 3, dtype=torch.complex64)
    optimizer = spec(name="adam").build(model.parameters(), fused=True)
    assert not optimizer.defaults["fused"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("args", [{}, {"fused": True}], ids=["by the plan", "by the job"])
@pytest.mark.parametrize(
    "parameter",
    [torch.randn(4, 8)[:, ::2], torch.randn(4, 1).expand(4, 3)],
    ids=["gaps", "overlaps"],
)
def test_a_group_whose_memory_has_gaps_or_overlaps_is_not_fused(parameter: Tensor, args: dict[str, Any]) -> None:
    parameters = {"a": nn.Parameter(parameter), "b": nn.Parameter(torch.randn(3, 2).t())}
    made = spec(name="adamw", args=args, groups=[{"match": "b", "lr": 0.1}]).build(parameters, fused=True)
    assert [bool(group["fused"]) for group in made.param_groups] == [False, True]


def test_a_parameter_with_gaps_is_updated_as_one_without() -> None:
    start = torch.randn(4, 8)
    updated = []
    for tensor in (start.clone()[:, ::2], start[:, ::2].contiguous()):
        parameter = nn.Parameter(tensor)
        optimizer = spec(name="adamw", lr=0.1).build([parameter], fused=True)
        for step in range(3):
            parameter.grad = torch.full_like(parameter, step + 1.0) * start[:, 1::2]
            optimizer.step()
        updated.append(parameter.detach().clone())
    torch.testing.assert_close(*updated)


MOMENTUM_OF_A_GROUP = {"name": "sgd", "lr": 0.1, "groups": [{"match": ["*.bias"], "momentum": 0.9}]}


@pytest.mark.parametrize(
    ("values", "on_cpus", "on_accelerators"),
    [
        ({"name": "adam"}, True, True),
        ({"name": "adamw"}, True, True),
        ({"name": "Adagrad"}, True, True),
        ({"name": "sgd"}, False, True),
        ({"name": "sgd", "momentum": 0.9}, False, False),
        (MOMENTUM_OF_A_GROUP, False, False),
        ({"name": "RMSprop"}, False, False),
        ({"name": "adamw", "state": "int8"}, False, False),
        ({"name": "adamw", "args": {"fused": False}}, False, False),
        ({"name": "adamw", "args": {"foreach": True}}, False, False),
        ({"name": "adamw", "args": {"differentiable": True}}, False, False),
        ({"name": "adamw", "groups": [{"match": "bias", "foreach": True}]}, False, False),
    ],
    ids=str,
)
def test_a_job_fuses_where_torchs_fused_step_is_faster(
    values: dict[str, Any], on_cpus: bool, on_accelerators: bool
) -> None:
    found = spec(**values)
    assert [found.fuses(accelerators=accelerators) for accelerators in (False, True)] == [on_cpus, on_accelerators]


class ByHandLARS:
    """Algorithm 1 of the LARS paper, a parameter and a number at a time."""

    def __init__(self, model: nn.Module, lr: float, momentum: float, weight_decay: float, trust: float) -> None:
        self.parameters = list(model.parameters())
        self.velocity = [torch.zeros_like(p) for p in self.parameters]
        self.values = lr, momentum, weight_decay, trust

    def step(self) -> None:
        lr, momentum, decay, trust = self.values
        for i, w in enumerate(self.parameters):
            assert w.grad is not None
            direction, local = w.grad.clone(), 1.0
            if w.dim() > 1:
                w_norm, g_norm = float(w.detach().norm()), float(w.grad.norm())
                if w_norm > 0 and g_norm > 0:
                    local = trust * w_norm / (g_norm + decay * w_norm)
                direction = direction + decay * w.detach()
            self.velocity[i] = momentum * self.velocity[i] + lr * local * direction
            w.data = w.data - self.velocity[i]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


class ByHandLAMB(ByHandLARS):
    """Algorithm 2 of the LAMB paper, a parameter and a number at a time."""

    def __init__(
        self, model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.parameters = list(model.parameters())
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.lr, self.betas, self.eps, self.decay, self.t = lr, betas, eps, weight_decay, 0

    def step(self) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        for i, w in enumerate(self.parameters):
            assert w.grad is not None
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * w.grad
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * w.grad**2
            update = (self.m[i] / (1 - beta1**self.t)) / ((self.v[i] / (1 - beta2**self.t)).sqrt() + self.eps)
            ratio = 1.0
            if w.dim() > 1:
                update = update + self.decay * w.detach()
                w_norm, u_norm = float(w.detach().norm()), float(update.norm())
                ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
            w.data = w.data - self.lr * ratio * update


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lars_is_the_papers_algorithm(momentum: float, weight_decay: float) -> None:
    ours, by_hand = net(), net()
    optimizer = spec(name="lars", lr=2.0, momentum=momentum, weight_decay=weight_decay, trust=0.02).build(
        ours.parameters()
    )
    reference: Any = ByHandLARS(by_hand, 2.0, momentum, weight_decay, 0.02)
    assert close(trained(ours, optimizer), trained(by_hand, reference))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_is_the_papers_algorithm(weight_decay: float) -> None:
    ours, by_hand = net(), net()
    optimizer = spec(name="lamb", lr=0.05, betas=[0.8, 0.95], eps=1e-6, weight_decay=weight_decay).build(
        ours.parameters()
    )
    reference: Any = ByHandLAMB(by_hand, 0.05, (0.8, 0.95), 1e-6, weight_decay)
    assert close(
        trained(ours, optimizer), trained(by_hand, reference), tolerance=1e-9
    )  # Adam enlarges the rounding of gradients that are 0


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_large_batch_optimizers_train_in_bfloat16_and_with_closures(name: str) -> None:
    model = net(torch.bfloat16)
    optimizer = spec(name=name, lr=0.01).build(model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1, 4, 4, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        value: float = loss.item()
        return value

    losses = [optimizer.step(closure) for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb"])
def test_an_optimizer_restored_from_its_state_goes_on_bit_for_bit(name: str) -> None:
    values = {"name": name, "lr": 0.05, "weight_decay": 0.1} | ({"momentum": 0.9} if name in ("sgd", "lars") else {})
    undisturbed = net(torch.float32)
    optimizer = spec(**values).build(undisturbed.parameters())
    trained(undisturbed, optimizer, steps=3)
    resumed = copy.deepcopy(undisturbed)
    restored = spec(**values).build(resumed.parameters())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert close(trained(undisturbed, optimizer, seed=1), trained(resumed, restored, seed=1), tolerance=0.0)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_tied_weights_are_stepped_once_and_frozen_ones_never(name: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.frozen.requires_grad_(False)

    model = Tied()
    optimizer = spec(name=name, lr=0.1).build(model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in (model.first.weight, model.first.bias, model.second.bias)]


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_parameter_without_a_gradient_is_left_as_it_is(name: str) -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    before = [p.detach().clone() for p in model[1].parameters()]
    optimizer = spec(name=name, lr=0.1, weight_decay=0.5).build(model.parameters())
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert close([p.detach() for p in model[1].parameters()], before, tolerance=0.0)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with raises(JobError, "model.no_parameters"):
        spec(name="sgd").build(nn.ReLU().parameters())


@pytest.mark.parametrize(
    ("values", "code", "fields"),
    [
        ({"name": "adam", "momentum": 0.9}, "optimizer.argument_unknown", {"unused": "momentum"}),
        (
            {"name": "sgd", "betas": [0.5, 0.5], "trust": 0.1},
            "optimizer.argument_unknown",
            {"unused": re.compile("betas.*trust")},
        ),
        ({"name": "sgd", "nesterov": True}, "optimizer.nesterov_without_momentum", {}),
        ({"name": "adam", "betas": [0.5, 1.0]}, "optimizer.betas", {"betas": [0.5, 1.0]}),
    ],
)
def test_a_value_that_the_optimizer_would_ignore_or_misuse_is_refused(
    values: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(ValueError, code, **fields):
        spec(**values)


def schedule(**values: Any) -> ScheduleSpec:
    return ScheduleSpec.model_validate(values)


_schedules = st.one_of(
    st.builds(lambda warmup: {"name": "constant", "warmup_steps": warmup}, st.integers(0, 50)),
    st.builds(
        lambda name, warmup, final: {"name": name, "warmup_steps": warmup, "final": final},
        st.sampled_from(["linear", "cosine"]),
        st.integers(0, 50),
        st.floats(0, 1),
    ),
    st.builds(
        lambda m, factor: {"name": "step", "milestones": m, "factor": factor},
        st.lists(st.integers(0, 99), min_size=1),
        st.floats(0.1, 0.9),
    ),
)


@given(_schedules, st.integers(1, 120))
def test_the_rate_rises_through_the_warm_up_and_never_after_it(values: dict[str, Any], total: int) -> None:
    plan = schedule(**values)
    factors = [plan.factor_at(step, total) for step in range(total + 5)]
    rise, fall = factors[: plan.warmup_steps], factors[plan.warmup_steps :]
    assert all(0 <= f <= 1 for f in factors)
    assert all(a < b for a, b in pairwise(rise))
    assert all(a >= b - 1e-12 for a, b in pairwise(fall))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {0: 1.0, 99: 1.0}),
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0}),
        ({"name": "linear", "warmup_steps": 20, "final": 0.2}, {19: 1.0, 20: 1.0, 60: 0.6, 100: 0.2, 500: 0.2}),
        ({"name": "cosine", "decay_steps": 40}, {0: 1.0, 10: (1 + math.sqrt(0.5)) / 2, 20: 0.5, 40: 0.0, 41: 0.0}),
        ({"name": "step", "milestones": [10, 30], "factor": 0.5}, {9: 1.0, 10: 0.5, 29: 0.5, 30: 0.25}),
    ],
)
def test_each_schedule_has_the_values_that_its_formula_has(values: dict[str, Any], expected: dict[int, float]) -> None:
    plan = schedule(**values)
    assert {step: plan.factor_at(step, 100) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_decay_without_an_end_is_refused_and_one_with_an_end_is_not(name: str) -> None:
    with raises(JobError, "schedule.end_unknown", name=name):
        schedule(name=name).factor_at(0, None)
    assert schedule(name=name, decay_steps=10).factor_at(10, None) == pytest.approx(0)


@pytest.mark.parametrize(
    ("values", "code", "fields"),
    [
        ({"name": "step"}, "schedule.milestones", {}),
        ({"name": "cosine", "milestones": [3]}, "schedule.milestones", {}),
        ({"name": "constant", "final": 0.1}, "optimizer.argument_unknown", {"name": "constant", "unused": "final"}),
        (
            {"name": "linear", "warmup_steps": 10, "decay_steps": 10},
            "schedule.decay_before_warmup",
            {"warmup_steps": 10, "decay_steps": 10},
        ),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(
    values: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(ValueError, code, **fields):
        schedule(**values)
