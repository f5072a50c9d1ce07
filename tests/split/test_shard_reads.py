"""Code that reads shards of parameters gives what one process gives, or is refused before the first update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from commands import paceline as command
from paceline.errors import PlanError
from paceline.job.zoo.models import GPT, MoE
from ranks import Ranks

VOCAB, TOKENS = 32, 8

Penalty = Callable[[nn.Module, dict[str, Tensor]], Any]


def squares(model: nn.Module, _: Any) -> Any:
    return sum(p.square().sum() for p in model.parameters())


def absolute(model: nn.Module, _: Any) -> Any:
    return sum(p.abs().sum() for p in model.parameters())


def consolidation(model: nn.Module, before: dict[str, Tensor]) -> Any:
    """Elastic weight consolidation: a distance to a copy, weighted by element."""
    return sum((before[n].abs() * (p - 0.9 * before[n]).square()).sum() for n, p in model.named_parameters())


def distance(model: nn.Module, _: Any) -> Any:
    return sum((p - p.detach().clone() * 0.9).square().sum() for p in model.parameters())


def orthogonality(model: Any, _: Any) -> Tensor:
    named = model.named_parameters()
    weight = [p for n, p in named if n.endswith(("experts.up", "attention.out.weight"))][-1].flatten(0, -2)
    total: Tensor = (weight.T @ weight).square().sum()
    return total


def gathered(model: nn.Module, _: Any) -> Any:
    weight: Any = model.get_parameter("blocks.0.attention.out.weight")
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).square().sum()


def without_gradient(model: nn.Module, before: Any) -> Any:
    return squares(model, before).detach()


def of_norms(model: nn.Module, _: Any) -> Any:
    """Of parameters that every rank holds."""
    return sum(p.square().sum() for n, p in model.named_parameters() if "norm" in n)


class WithPenalty(nn.Module):
    def __init__(self, model: nn.Module, penalty: Penalty, before: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.penalty, self.before = model, penalty, before

    def forward(self, x: Tensor) -> Any:
        return self.model(x), self.penalty(self.model, self.before)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab": VOCAB, "context": TOKENS, "layers": 2, "hidden": 8, "heads": 2}
    model = MoE(**size, experts=4, top_k=2, capacity=0.0, balance=0.0) if kind == "moe" else GPT(**size)
    return model.double()


def batches() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, VOCAB, (2, 10, TOKENS), generator=drawn)  # the last batch has 2
    return DataLoader(TensorDataset(x, y), batch_size=4)


def train(plan: str, kind: str, penalty: Penalty, where: str) -> list[float]:
    """Losses of three steps; the penalty is computed in the loop, in setup's loss, or in the forward pass."""
    net = network(kind)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    model = WithPenalty(net, penalty, before) if where == "forward" else net

    def loss(output: Any, y: Tensor) -> Tensor:
        whole: Tensor
        logits, added = output if where == "forward" else (output, penalty(net, before))
        whole = cross_entropy(logits, y) + 0.01 * added
        return whole

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(
        model, optimizer, loss=None if where == "loop" else loss, loader=batches(), plan=plan, precision="fp64"
    )
    losses = []
    for batch in engine.loader:
        if where == "loop":
            engine.backward(loss(model(batch[0]), batch[1]))
            losses.append(engine.update().loss)
        else:
            losses.append(engine.step(batch).loss)
    engine.close()
    return losses


def outcome(plan: str, kind: str, penalty: Penalty, where: str) -> list[float] | str:
    try:
        return train(plan, kind, penalty, where)
    except Exception as error:  # noqa: BLE001 - the test tells which it may be
        return type(error).__name__


def outcomes(cases: list[tuple[str, str, Penalty, str]]) -> list[list[float] | str]:
    """Outcomes of several cases, one after the other in the same processes."""
    return [outcome(*case) for case in cases]


REFUSED = ["PlanError"]
IN_FORWARD = (squares, consolidation, without_gradient)


@pytest.mark.parametrize(("plan", "kind"), [("tp=2", "gpt"), ("ep=2", "moe")])
def test_a_penalty_over_shards_is_refused(ranks: Ranks, plan: str, kind: str) -> None:
    of_loops = [(plan, kind, penalty, "loop") for penalty in (squares, absolute, orthogonality)]
    of_losses = [(plan, kind, penalty, "loss") for penalty in (squares, consolidation, without_gradient)]
    assert ranks(2, outcomes, [*of_loops, *of_losses]) == [6 * REFUSED] * 2


def test_fsdp_computes_a_penalty_where_parameters_are_gathered_and_refuses_it_elsewhere(ranks: Ranks) -> None:
    penalties = (squares, absolute, orthogonality, gathered, distance)
    ways = [("gpt", penalty, where) for penalty in penalties for where in ("loop", "loss")]
    alone = [train("dp=1", *way) for way in ways]
    cases = [(plan, *way) for plan in ("dp=2", "fsdp=2 zero=2", "fsdp=2") for way in ways]
    for found in ranks(2, outcomes, cases):
        for case, losses, expected in zip(cases, found, 2 * alone, strict=False):
            assert losses == pytest.approx(expected, rel=1e-9), case
        assert found[2 * len(ways) :] == len(ways) * REFUSED


def test_a_penalty_over_parameters_that_every_rank_holds_is_right(ranks: Ranks) -> None:
    kinds = [("tp=2", "gpt"), ("ep=2", "moe")]
    cases = [(plan, kind, of_norms, where) for plan, kind in kinds for where in ("loop", "loss")]
    cases.append(("cp=2", "gpt", of_norms, "loss"))
    alone = [train("dp=1", *case) for _, *case in cases]  # type: ignore[arg-type]
    for found in ranks(2, outcomes, cases):
        for case, losses, expected in zip(cases, found, alone, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9), case


def test_a_penalty_over_parameters_of_several_stages_is_refused(ranks: Ranks) -> None:
    found = ranks(2, outcome, "pp=2 microbatches=2", "gpt", squares, "loss")
    assert found[1] == "PlanError"
    assert isinstance(found[0], str)


def test_a_loop_without_a_loss_is_refused_by_setup_under_plans_that_compute_the_output(ranks: Ranks) -> None:
    cases = [(plan, "gpt", of_norms, "loop") for plan in ("pp=2", "cp=2")]
    assert ranks(2, outcomes, cases) == [2 * REFUSED] * 2


def test_a_penalty_in_the_forward_pass_is_right(ranks: Ranks) -> None:
    alone = [train("dp=1", "gpt", penalty, "forward") for penalty in IN_FORWARD]
    plans = ("fsdp=2", "tp=2", "pp=2 microbatches=2")
    cases = [(plan, "gpt", penalty, "forward") for plan in plans for penalty in IN_FORWARD]
    for found in ranks(2, outcomes, cases):
        for case, losses, expected in zip(cases, found, len(plans) * alone, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9), case


def test_experts_that_other_modules_read_are_refused(ranks: Ranks) -> None:
    cases = [("ep=2", "moe", penalty, "forward") for penalty in IN_FORWARD]
    assert ranks(2, outcomes, cases) == [3 * REFUSED] * 2


def keep(kept: list[Tensor], _: nn.Module, __: Any, output: Tensor) -> None:
    kept.append(output)


def in_loops(plan: str, way: str) -> list[float] | str:
    """Losses of a loop that has no penalty, but reads shards in some other way; the measure, or the error's name."""
    model: Any = network("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def twice(output: Tensor, y: Tensor) -> Tensor:
        again = model(torch.zeros(2, TOKENS, dtype=torch.int64))
        whole: Tensor = cross_entropy(output, y) + (again - 0.5).square().mean()
        return whole

    given = twice if way == "the loss calls the model" else None
    engine = paceline.setup(model, optimizer, loss=given, loader=batches(), plan=plan, precision="fp64")
    losses = []
    try:
        if way == "a measure":
            return [engine.evaluate(batches(), lambda _: {"norm": squares(model, {})})["norm"]]
        for batch in engine.loader:
            if given is not None:
                losses.append(engine.step(batch).loss)
                continue
            hidden: list[Tensor] = []
            handle = model.norm.register_forward_hook(partial(keep, hidden))
            logits = model(batch[0])
            handle.remove()
            if way == "layers by hand":
                logits = model.head(hidden[0])
            if way == "a tied weight by hand":
                logits = hidden[0] @ model.tokens.weight.T
            loss = cross_entropy(logits, batch[1] % 16)
            if way == "a gradient penalty":
                (slope,) = torch.autograd.grad(logits.square().sum(), hidden[0], create_graph=True)
                loss = loss + slope.square().mean()
            engine.backward(loss)
            losses.append(engine.update().loss)
    except PlanError as error:
        return type(error).__name__
    finally:
        engine.close()
    return losses


def each_in_loops(plan: str, ways: list[str]) -> list[list[float] | str]:
    return [in_loops(plan, way) for way in ways]


def test_calls_and_derivatives_of_the_model_are_no_reads_of_shards(ranks: Ranks) -> None:
    ways = ["a gradient penalty", "layers by hand", "the loss calls the model"]
    alone = each_in_loops("dp=1", ways)
    for found in ranks(2, each_in_loops, "tp=2", ways):
        for way, losses, expected in zip(ways, found, alone, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9), way


def test_other_reads_of_shards_are_refused(ranks: Ranks) -> None:
    assert ranks(2, each_in_loops, "tp=2", ["a measure", "a tied weight by hand"]) == [2 * REFUSED] * 2


OWN = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

made = []

def model():
    made.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)))
    return made[0]

def data():
    return TensorDataset(torch.randn(16, 6), torch.arange(16) % 3)

def loss(output, target):
    return F.cross_entropy(output, target) + sum(p.square().sum() for p in made[0].parameters())
"""
JOB = """
model: {factory: "own.py:model"}
data: {kind: dataset, factory: "own.py:data", held_out: 0}
loss: "own.py:loss"
optimizer: {name: sgd, lr: 0.1}
global_batch: 8
stop: {steps: 2}
"""


@pytest.mark.parametrize("plan", ["tp=2", pytest.param("pp=2 microbatches=2", marks=pytest.mark.slow)])
def test_a_job_with_such_a_loss_is_refused_before_its_first_update(tmp_path: Path, plan: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "job.yaml").write_text(JOB)
    ended = command("train", "job.yaml", "--plan", plan, "--run", "run", folder=tmp_path)
    assert "dp=2" in ended.error
    assert not any('"loss"' in file.read_text() for file in (tmp_path / "run" / "steps").glob("*"))
