"""The engine in a loop of one's own.

What a step does to the model, what it refuses, and what an evaluation measures and leaves alone.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.samples import held_out_batches
from paceline.engine.engine import RankEngine
from paceline.errors import DataError, NonFiniteError, PlanError, SyncError
from paceline.job.loss import LossSpec, build_metrics
from paceline.split.layout import hooked_parameters
from paceline.sync.allreduce import AllReduce
from paceline.sync.batchnorm import is_synchronised
from paceline.sync.rule import Replica
from paceline.wire.status import GenerationOver
from ranks import RankError, Ranks
from refusals import raises

SAMPLES, FEATURES, CLASSES, BATCH = 30, 6, 3, 10


def data(nan_at: int | None = None) -> TensorDataset:
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    if nan_at is not None:
        inputs[nan_at] = float("nan")
    return TensorDataset(inputs, torch.arange(SAMPLES) % CLASSES)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def engine_for(
    model: nn.Module, *, nan_at: int | None = None, loss: Any = F.cross_entropy, **settings: Any
) -> RankEngine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return paceline.setup(model, optimizer, loss=loss, loader=DataLoader(data(nan_at), batch_size=BATCH), **settings)


def state_of(engine: RankEngine) -> dict[str, Any]:
    """Weights, buffers and optimizer state, copied."""
    return copy.deepcopy({"model": engine.model.state_dict(), "optimizer": engine.optimizer.state_dict()})


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}.{key}")
    else:
        assert one == other, where


# Steps that are not finite


def skip_second_step() -> list[dict[str, Any]]:
    """The engine's state before and after a step that is left out, and the problem.

    Sample 15 is in the second batch.
    """
    engine = engine_for(network(), nan_at=15, nonfinite="skip")
    batches = iter(engine.loader)
    engine.step(next(batches))
    before = state_of(engine)
    result = engine.step(next(batches))
    after = state_of(engine)
    following = engine.step(next(batches))
    engine.close()
    return [
        before,
        after,
        {"problem": result.problem, "loss": result.loss, "step": result.step, "next": following.loss},
    ]


def assert_skipped(outcome: list[dict[str, Any]], rank: int) -> None:
    before, after, facts = outcome
    assert_same_bits(before, after)
    assert f"rank {rank}'s share of the batch contains NaN or Inf in samples [15]" in facts["problem"]
    assert (facts["step"], str(facts["loss"])) == (2, "nan")
    assert facts["next"] == facts["next"]


def test_a_skipped_step_leaves_weights_optimizer_and_buffers_as_they_were() -> None:
    assert_skipped(skip_second_step(), rank=0)


def test_a_skipped_step_leaves_every_replica_as_it_was(ranks: Ranks) -> None:
    for outcome in ranks(2, skip_second_step):
        assert_skipped(outcome, rank=1)


def test_stop_names_the_step_the_samples_and_the_ways_out() -> None:
    engine = engine_for(network(), nan_at=3)
    weights = copy.deepcopy(dict(engine.model.named_parameters()))
    with raises(NonFiniteError, "nonfinite.stopped", kept="Nothing was updated."):
        engine.step(next(iter(engine.loader)))
    assert_same_bits(weights, dict(engine.model.named_parameters()))


class Overflow(nn.Module):
    """Finite data and a finite loss, but an infinite gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        y.register_hook(lambda gradient: gradient * float("inf"))
        return y


def test_an_infinite_gradient_is_not_blamed_on_the_data() -> None:
    engine = engine_for(Overflow())
    with raises(NonFiniteError, "nonfinite.stopped"):
        engine.step(next(iter(engine.loader)))


def test_skipping_is_given_up_after_twenty_steps_in_a_row() -> None:
    engine = engine_for(Overflow(), nonfinite="skip")
    with raises(NonFiniteError, "nonfinite.not_recovering", skipped=20):
        deque((engine.step(batch) for _ in range(10) for batch in engine.loader), maxlen=0)
    assert engine.step_count == 19


# Batches


def test_a_local_step_stands_although_the_others_were_lost_before_they_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(network(), plan="dp=1 sync=local:2")
    batches = iter(engine.loader)
    engine.step(next(batches))
    before = state_of(engine)["model"]

    def lost(step: int) -> None:
        raise GenerationOver("test.planted", "a rank was lost in step {step}", step=step)

    monkeypatch.setattr(engine.rule, "after_step", lost)
    assert engine.step(next(batches)).step == engine.step_count == 2
    assert engine.sync_interrupted
    assert not torch.equal(engine.model.state_dict()["0.weight"], before["0.weight"])
    engine.close()


def test_a_batch_that_lost_samples_on_the_way_is_refused() -> None:
    engine = engine_for(network())
    inputs, labels = next(iter(engine.loader))
    with raises(DataError, "loop.other_batch", expected=10, rank=0, rows=4):
        engine.step((inputs[:4], labels[:4]))


def test_a_transformed_batch_is_taken() -> None:
    engine = engine_for(network())
    inputs, labels = next(iter(engine.loader))
    assert engine.step((inputs * 2, labels)).samples == BATCH


def test_a_batch_without_a_target_is_refused() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    alone = DataLoader(TensorDataset(torch.zeros(SAMPLES, FEATURES)), batch_size=BATCH)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=alone)
    with raises(DataError, "data.sample_without_target"):
        engine.step(next(iter(engine.loader)))


def test_closing_leaves_no_hook_in_the_model() -> None:
    engine = engine_for(network())
    engine.step(next(iter(engine.loader)))
    engine.close()
    assert not hooked_parameters(engine.model)


def what_a_half_made_engine_leaves() -> tuple[bool, dict[str, str]]:
    """Whether batch norms, and which hooks, are left where ranks are lost while the engine is made."""
    attach = AllReduce.attach

    def attach_in_vain(rule: AllReduce, replica: Replica) -> None:
        attach(rule, replica)
        assert is_synchronised(replica.model)
        raise SyncError("test.planted", "the other rank is gone")

    model = network()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "attach", attach_in_vain)
        with pytest.raises(SyncError, match="is gone"):
            engine_for(model, batch_norm="sync")
    return is_synchronised(model), hooked_parameters(model)


def test_an_engine_that_could_not_be_made_leaves_the_model_as_it_was(ranks: Ranks) -> None:
    assert ranks(2, what_a_half_made_engine_leaves) == [(False, {})] * 2


# Losses over the whole batch


class SpreadOut:
    """The mean distance of each output to the mean of the batch: it couples all samples."""

    whole_batch = True

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - output.mean(dim=0)).square().sum(dim=1) * (1.0 + target)).mean()


def trained_on_whole_batches() -> tuple[list[float], list[Tensor]]:
    """Losses and weights under a loss that needs the whole batch; the last batch of an epoch is smaller."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = DataLoader(data(), batch_size=13, shuffle=True)
    engine = paceline.setup(model, optimizer, loss=SpreadOut(), loader=loader, precision="fp64", clip_norm=0.2)
    losses = [engine.step(batch).loss for _ in range(3) for batch in engine.loader]
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_loss_over_the_whole_batch_is_the_same_on_any_number_of_replicas(ranks: Ranks, replicas: int) -> None:
    losses, weights = trained_on_whole_batches()
    for many_losses, many_weights in ranks(replicas, trained_on_whole_batches):
        assert many_losses == pytest.approx(losses, rel=1e-10)
        for one, other in zip(weights, many_weights, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)


def test_a_loss_over_the_whole_batch_refuses_microbatches() -> None:
    with raises(PlanError, "plan.whole_batch_in_parts"):
        engine_for(network(), loss=SpreadOut(), plan="dp=1 microbatches=2")


def sync_batch_norm_on_too_little(replicas: int) -> None:
    model = network()
    loader = DataLoader(TensorDataset(torch.zeros(9, FEATURES), torch.zeros(9, dtype=torch.long)), batch_size=8)
    paceline.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader, batch_norm="sync"
    )


def test_synchronised_batch_norm_refuses_a_batch_that_leaves_a_replica_without_samples(ranks: Ranks) -> None:
    with raises(RankError, "plan.replica_without_samples", batch="the last batch", replicas="2", samples="1"):
        ranks(2, sync_batch_norm_on_too_little, 2)


# Evaluation


def evaluation() -> dict[str, Any]:
    """Metrics of a validation set of 11 samples, and what the evaluation changed."""
    model = network()
    loss = LossSpec(name="cross_entropy").build()
    engine = engine_for(model, loss=loss)
    model.get_submodule("1").eval()  # a layer that its owner keeps frozen
    with torch.no_grad():
        model.get_buffer("1.running_mean").fill_(0.2 * (1 + engine.group.rank))  # 0.2, 0.4, …: its mean is known
    held_out = TensorDataset(
        torch.randn(11, FEATURES, generator=torch.Generator().manual_seed(9)), torch.arange(11) % CLASSES
    )
    before, random_before = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    metrics = engine.evaluate(
        held_out_batches(held_out, batch=4, replica=engine.group.rank, replicas=engine.group.size),
        build_metrics(("accuracy",), loss),
    )
    assert_same_bits(before, dict(model.named_buffers()))
    assert torch.equal(random_before, torch.get_rng_state())
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True]
    with torch.no_grad():
        model.get_buffer("1.running_mean").fill_(0.2 * sum(range(1, engine.group.size + 1)) / engine.group.size)
        model.eval()
        inputs, labels = held_out[:]
        output = model(inputs)
    expected = {
        "loss": F.cross_entropy(output, labels).item(),
        "accuracy": (output.argmax(1) == labels).float().mean().item(),
    }
    return {"metrics": metrics, "expected": expected}


def assert_measured(outcome: dict[str, Any]) -> None:
    assert outcome["metrics"] == pytest.approx(outcome["expected"], rel=1e-6)


def test_an_evaluation_is_exact_and_changes_nothing() -> None:
    assert_measured(evaluation())


@pytest.mark.parametrize("replicas", [2, 3])
def test_an_evaluation_over_uneven_parts_is_exact_and_changes_nothing(ranks: Ranks, replicas: int) -> None:
    outcomes = ranks(replicas, evaluation)
    for outcome in outcomes:
        assert_measured(outcome)
        assert outcome["metrics"] == outcomes[0]["metrics"]


# Precision


def test_bf16_computes_in_half_and_keeps_whole_weights() -> None:
    seen = []
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    engine = engine_for(model, precision="bf16")
    engine.step(next(iter(engine.loader)))
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_plan_decides_over_the_precision_of_the_job() -> None:
    assert engine_for(network(), precision="fp32", plan="dp=1 precision=bf16").precision == "bf16"


def test_channels_last_changes_the_layout_and_not_the_result() -> None:
    def losses(plan: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))
        images = TensorDataset(
            torch.randn(SAMPLES, 3, 4, 4, generator=torch.Generator().manual_seed(5)), torch.arange(SAMPLES) % CLASSES
        )
        engine = paceline.setup(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=F.cross_entropy,
            loader=DataLoader(images, batch_size=BATCH),
            plan=plan,
        )
        found = [engine.step(batch).loss for batch in engine.loader]
        assert model.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last) == (
            "channels_last" in plan
        )
        return found

    assert losses("dp=1 memory_format=channels_last") == pytest.approx(losses("dp=1"), rel=1e-5)


def test_gradients_of_a_step_are_freed_before_the_next_forward_pass() -> None:
    model = network()
    engine = engine_for(model)
    weight = next(model.parameters())
    gradients: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    model.register_forward_pre_hook(lambda *_: alive.extend(ref() is not None for ref in gradients))
    for batch in engine.loader:
        engine.step(batch)
        assert weight.grad is not None
        gradients[:] = [weakref.ref(weight.grad)]
    assert alive == [False] * (SAMPLES // BATCH - 1)
