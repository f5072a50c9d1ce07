"""Optimizers by class, and parameter groups. A wrong group or a wrong split trains another model unseen."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.optimizer import OptimizerSpec
from paceline.job.zoo.optimizer_trials import scope_of
from refusals import raises

ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
ARGS: dict[str, dict[str, Any]] = {
    "RMSprop": {"alpha": 0.9, "momentum": 0.5, "centered": True},
    "AdamW": {"amsgrad": True, "weight_decay": 0.0},
    "SGD": {"momentum": 0.9, "dampening": 0.1},
}


class Noisy(torch.optim.SGD):
    """Draws random numbers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p.grad))
        super().step()


class Coupled(torch.optim.SGD):
    """Divides by the norm over all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def spec(**values: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate(values)


def grouped(found: OptimizerSpec, model: nn.Module) -> list[tuple[dict[str, Any], list[str]]]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    optimizer = found.build(dict(model.named_parameters()))
    return [
        ({"lr": g["lr"], "weight_decay": g["weight_decay"]}, [names[p] for p in g["params"]])
        for g in optimizer.param_groups
    ]


@pytest.mark.parametrize("name", [*ELEMENTWISE, "Adafactor"])
def test_a_class_of_torch_takes_the_steps_that_it_takes_without_us(name: str) -> None:
    args = ARGS.get(name, {})
    ours, plain = net(), net()
    optimizer = spec(name=name, args=args).build(dict(ours.named_parameters()))
    reference = getattr(torch.optim, name)(plain.parameters(), **args)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    for own, expected in zip(trained(ours, optimizer), trained(plain, reference), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_is_known_of_a_short_name_is_what_a_trial_finds(name: str, momentum: float) -> None:
    keys = {"momentum": momentum} if name in ("sgd", "lars") else {}
    optimizer = OptimizerSpec(name=name, lr=0.1, **keys)
    matrix = 64 * 64 * 4
    assert round(optimizer.state_bytes((64, 64), 4) / matrix) == optimizer.state_tensors
    assert scope_of(optimizer.build) == optimizer.scope


def test_the_learning_rate_of_every_class_is_torchs_default() -> None:
    classes = {
        name: found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
    }
    for name, found in classes.items():
        assert spec(name=name).lr == inspect.signature(found).parameters["lr"].default


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_class_is_found_to_be_one(name: str) -> None:
    assert spec(name=name, args=ARGS.get(name, {})).scope == "element"


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("lars", "parameter"),
        ("lamb", "parameter"),
        ("Adafactor", "parameter"),
        ("Muon", "parameter"),
        (f"{__name__}:Coupled", "model"),
        (f"{__name__}:Noisy", "random"),
    ],
)
def test_what_an_update_depends_on_is_found_by_trying(name: str, scope: str) -> None:
    assert spec(name=name, lr=0.1).scope == scope


@pytest.mark.parametrize(
    ("name", "code"), [("LBFGS", "optimizer.needs_closure"), ("SparseAdam", "optimizer.takes_no_step")]
)
def test_a_class_that_a_job_cannot_step_is_refused(name: str, code: str) -> None:
    with raises(JobError, code):
        _ = spec(name=name).scope


@pytest.mark.parametrize("name", [*ELEMENTWISE, "Adafactor", "adamw", "lamb"])
def test_the_predicted_state_is_the_state_that_it_keeps(name: str) -> None:
    found = spec(name=name, args=ARGS.get(name, {}) if name[0].isupper() else {})
    for shape in [(), (5,), (40, 6), (8, 4, 3, 3)]:
        parameter = nn.Parameter(torch.ones(shape))
        optimizer = found.build([parameter])
        parameter.grad = torch.ones(shape)
        optimizer.step()
        held = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        assert found.state_bytes(shape, 4) == sum(value.nbytes for value in held)


def test_a_class_that_takes_matrices_only_says_so_of_vectors() -> None:
    found = spec(name="Muon")
    assert found.refusal(1)
    assert not found.refusal(2)


@pytest.mark.parametrize(
    "values",
    [
        {"name": "RMSprop", "args": {"alhpa": 0.9}},
        {"name": "RMSprop", "args": {"alpha": -1.0}},
        {"name": "torch.optim:Missing", "lr": 0.1},
        {"name": "torch.nn:Linear", "lr": 0.1},
        {"name": "sgd", "groups": [{"match": "bias", "momentun": 0.1}]},
    ],
)
def test_arguments_that_the_class_does_not_take_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        spec(**values).build(dict(net().named_parameters()))


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"name": "RMSprob"}, "optimizer.unknown"),
        ({"name": "pkg.mod:Class"}, "optimizer.no_learning_rate"),
        ({"name": "sgd", "groups": [{"match": "bias"}]}, "optimizer.empty_group"),
        ({"name": "AdamW", "betas": [0.5, 0.6], "args": {"betas": [0.5, 0.6]}}, "optimizer.key_twice"),
        ({"name": "sgd", "args": {"momentum": 0.9}}, "optimizer.key_in_args"),
    ],
)
def test_wrong_keys_are_refused_when_the_job_is_read(values: dict[str, Any], code: str) -> None:
    with raises(ValueError, code):
        spec(**values)


def test_a_group_without_a_pattern_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"groups\.0\.match"):
        spec(name="sgd", groups=[{"match": [], "lr": 0.1}])


@pytest.mark.parametrize(
    "values",
    [
        {"name": "AdamW", "weight_decay": 0.0},
        {"name": "RMSprop", "lr": 0.001},
        {"name": "SGD", "args": {"lr": 0.5}, "momentum": 0.9},
        {"name": "sgd", "groups": [{"match": "bias", "lr": 0.1, "dampening": 0.5}], "no_decay": "norm"},
    ],
)
@pytest.mark.parametrize("brief", [True, False])
def test_an_optimizer_that_is_written_and_read_again_is_the_same(values: dict[str, Any], brief: bool) -> None:
    first = spec(**values)
    again = spec(**json.loads(first.model_dump_json(exclude_defaults=brief)))
    assert again == first
    ours, expected = (
        (one.build([nn.Parameter(torch.ones(2, 2))]).defaults for one in (again, first))
        if not (first.groups)
        else ({}, {})
    )
    assert ours == expected


# Groups


def test_groups_are_by_patterns_and_what_no_group_names_comes_first() -> None:
    found = spec(
        name="adamw",
        lr=0.1,
        weight_decay=0.5,
        groups=[{"match": ["2.*"], "lr": 0.3}, {"match": "0.weight", "weight_decay": 0.7}],
        no_decay=["bias", "1"],
    )
    assert grouped(found, net()) == [
        ({"lr": 0.1, "weight_decay": 0.5}, []),
        ({"lr": 0.1, "weight_decay": 0.0}, ["0.bias", "1.weight", "1.bias"]),
        ({"lr": 0.3, "weight_decay": 0.5}, ["2.weight"]),
        ({"lr": 0.3, "weight_decay": 0.0}, ["2.bias"]),
        ({"lr": 0.1, "weight_decay": 0.7}, ["0.weight"]),
    ]


def test_a_rank_with_a_part_of_the_model_has_the_groups_of_the_whole() -> None:
    model = net()
    found = spec(name="sgd", lr=0.1, groups=[{"match": "0", "lr": 0.3}], no_decay="bias")
    names = {name: (name,) for name, _ in model.named_parameters()}
    part = {name: p for name, p in model.named_parameters() if name.startswith("2.")}
    whole, own = found.build(dict(model.named_parameters())), found.build(part, names=names)
    settings = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in (whole, own)]
    assert settings[0] == settings[1]
    assert sum(len(g["params"]) for g in own.param_groups) == 2


def test_a_tied_parameter_is_matched_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["tokens"].weight
    job = Job(
        model={
            "factory": "torch.nn:Linear",
            "args": {"in_features": 2, "out_features": 2},
            "freeze": ["weight"],
        },
        data="digits",
        loss="mse",
        optimizer={"name": "sgd", "no_decay": "bias"},
        global_batch=4,
        stop={"steps": 1},
    )
    assert [name for name, p in job.model.build().named_parameters() if p.requires_grad] == ["bias"]
    from paceline.job.parameters import matching, names_of

    assert matching("freeze", ["head"], names_of(model)) == ["tokens.weight"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["bias"], ["0.bias", "1.bias", "2.bias"]),
        (["1.weight"], ["1.weight"]),
        (["*.weight"], ["0.weight", "1.weight", "2.weight"]),
        (["[01]"], ["0.weight", "0.bias", "1.weight", "1.bias"]),
    ],
)
def test_patterns_match_whole_components_or_globs(patterns: Iterable[str], names: list[str]) -> None:
    from paceline.job.parameters import matching, names_of

    assert matching("freeze", patterns, names_of(net())) == names


@pytest.mark.parametrize(
    ("values", "code", "fields"),
    [
        ({"no_decay": ["norm"]}, "job.pattern_unmatched", {"key": "optimizer.no_decay", "pattern": "norm"}),
        ({"groups": [{"match": "wieght", "lr": 0.1}]}, "job.pattern_unmatched", {"hint": re.compile("weight")}),
        (
            {"groups": [{"match": "weight", "lr": 0.1}, {"match": "0", "lr": 0.2}]},
            "optimizer.groups_overlap",
            {"name": "0.weight"},
        ),
    ],
)
def test_a_pattern_without_a_parameter_and_a_parameter_with_two_groups_are_refused(
    values: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(JobError, code, **fields):
        spec(name="sgd", **values).build(dict(net().named_parameters()))
