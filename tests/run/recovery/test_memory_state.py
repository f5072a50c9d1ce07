"""States in memory: what goes back to one trains on bit for bit as before."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.engine.engine import RankEngine
from paceline.errors import CheckpointError
from paceline.state.rank_state import RankState
from ranks import Ranks
from refusals import raises
from small_jobs import Points, plain, with_dropout
from small_jobs import train_on as train

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def engine_of(optimizer: str = "adamw", model: nn.Module | None = None, plan: str = "dp=1") -> RankEngine:
    model = model or with_dropout()
    return paceline.setup(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        loss=F.cross_entropy,
        loader=DataLoader(Points(noise=0.1), batch_size=8, shuffle=True),
        plan=plan,
    )


def weights(engine: RankEngine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.named_parameters().values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 5])
def test_an_engine_that_goes_back_trains_as_if_nothing_had_happened(optimizer: str, at: int) -> None:
    engine = engine_of(optimizer)
    train(engine, at)
    state = RankState.of(engine, {"note": [1]}).copied()
    expected = train(engine, 12)
    trained = weights(engine)
    for _ in range(2):  # nothing that trains writes into the state
        assert state.restore(engine) == {"note": [1]}
        assert engine.step_count == at
        assert train(engine, 12) == expected
        assert all(map(torch.equal, weights(engine), trained))


def test_another_rank_takes_the_state_up_after_it_was_sent_as_json_and_tensors() -> None:
    first, second = engine_of(), engine_of()
    train(first, 5)
    taken = RankState.of(first).copied()
    tensors = {name: tensor.clone() for name, tensor in taken.tensors.items()}
    sent = RankState(taken.step, tensors, json.loads(json.dumps(taken.values)))
    expected = train(first, 6)
    sent.restore(second)
    assert train(second, 6) == expected


def test_the_memory_of_an_older_state_is_used_again() -> None:
    engine = engine_of()
    train(engine, 1)
    old = RankState.of(engine).copied()
    train(engine, 4)
    new = RankState.of(engine).copied(old)
    assert {t.data_ptr() for t in new.tensors.values()} == {t.data_ptr() for t in old.tensors.values()}
    expected = train(engine, 4)
    new.restore(engine)
    assert train(engine, 4) == expected


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    first, second = engine_of(model=nn.Linear(6, 3)), engine_of(model=plain())
    before = weights(second)
    with raises(CheckpointError, "recovery.state_of_other_model", held="nothing", name="model/0.weight", step=0):
        RankState.of(first).copied().restore(second)
    assert all(map(torch.equal, weights(second), before))


def back_and_again(plan: str) -> tuple[list[float], list[float]]:
    engine = engine_of("sgd", plan=plan)
    train(engine, 5)
    state = RankState.of(engine).copied()
    expected = train(engine, 9)
    state.restore(engine)
    again = train(engine, 9)
    engine.close()
    return expected, again


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "dp=2 compress=int8"),  # the rule keeps the errors of what it sent
        (2, "dp=2 sync=diloco:4"),  # replicas have parameters of their own
        pytest.param(2, "fsdp=2", marks=pytest.mark.slow),
        pytest.param(2, "pp=2 microbatches=2", marks=pytest.mark.slow),
    ],
)
def test_every_rank_of_a_plan_goes_back_to_its_own_part(ranks: Ranks, size: int, plan: str) -> None:
    for expected, again in ranks(size, back_and_again, plan):
        assert again == expected
