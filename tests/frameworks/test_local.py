"""Replicas that step alone in a plain loop, and agree by a rule of paceline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import PlanError
from paceline.frameworks.pytorch import LocalSteps, check_sync
from ranks import Ranks
from refusals import raises

STEPS = 40


def a_loop(sync: str, codec: str | None, count: int, state: dict[str, Any] | None = None) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # every replica would begin with weights of its own
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    steps = LocalSteps(model, sync, codec)
    if state is not None:
        steps.load_state_dict(state)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        inputs = torch.randn(32, 16, generator=generator)
        loss = F.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.stepped()
    own = weights(model)
    with steps.shared_parameters():
        agreed = weights(model)
    back, saved = weights(model), steps.state_dict()
    steps.end()
    return {"loss": float(loss.detach()), "own": own, "agreed": agreed, "back": back, "end": weights(model)} | saved


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


@pytest.mark.parametrize(("sync", "codec"), [("local:8", None), ("diloco:8,lr=1,momentum=0", "int8")])
def test_replicas_differ_between_agreements_and_end_alike(ranks: Ranks, sync: str, codec: str | None) -> None:
    first, second = ranks(2, a_loop, sync, codec, STEPS - 3, backend="shm")
    assert not torch.equal(first["own"], second["own"])
    assert torch.equal(first["back"], first["own"])
    assert torch.equal(first["agreed"], second["agreed"])
    torch.testing.assert_close(first["agreed"], (first["own"] + second["own"]) / 2)
    assert torch.equal(first["end"], second["end"])
    assert torch.equal(first["end"], first["agreed"])
    assert first["step"] == STEPS - 3
    begun = ranks(2, a_loop, sync, codec, 1, backend="shm")[0]
    assert first["loss"] < 0.5 * begun["loss"]


def test_after_an_agreement_the_replicas_are_alike(ranks: Ranks) -> None:
    first, second = ranks(2, a_loop, "local:8", None, STEPS, backend="shm")
    assert torch.equal(first["own"], second["own"])


def test_the_outer_optimizer_goes_on_from_a_saved_state(ranks: Ranks) -> None:
    saved = ranks(2, a_loop, "diloco:8", None, 16, backend="shm")[0]
    again = ranks(2, a_loop, "diloco:8", None, 8, {"step": 16, "outer": saved["outer"]}, backend="shm")[0]
    assert again["step"] == 24
    assert any("momentum" in key and bool(value.any()) for key, value in again["outer"].items())
    anew = ranks(2, a_loop, "diloco:8", None, 8, backend="shm")[0]
    assert any(not torch.equal(again["outer"][key], anew["outer"][key]) for key in again["outer"])


@pytest.mark.parametrize(
    ("sync", "codec", "code"),
    [
        ("locall:8", None, "plan.sync_refused"),
        ("server:staleness=2", None, "frameworks.rule_unsupported"),
        ("local:8", "int8", "frameworks.codec_of_parameters"),
        ("diloco:8", "int9", "plan.compress_refused"),
        ("allreduce", "none", "frameworks.codec_unknown"),
    ],
)
def test_what_cannot_work_is_refused_before_training(sync: str, codec: str | None, code: str) -> None:
    with raises(PlanError, code):
        check_sync(sync, codec)


def with_batch_norm() -> str:
    with pytest.raises(PlanError) as raised:
        LocalSteps(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "local:8")
    return str(raised.value)


def test_a_model_whose_statistics_would_stay_those_of_a_rank_is_refused(ranks: Ranks) -> None:
    assert "batch norm, and each rank would keep its own statistics" in ranks(2, with_batch_norm)[0]
