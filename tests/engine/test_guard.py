"""Losses and gradients that are NaN, Inf or a spike: what is told, and what is left out; fp16's loss scale."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.engine.guard import LossSpikes, explain, gave_up, stop
from paceline.errors import JobError, NonFiniteError
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.job.stop import SpikeSpec
from paceline.run.record.run import Run
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, points, small_job, train_as_rank, train_here


def batch(*bad: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.zeros(size, 2)
    inputs[list(bad), 1] = math.inf
    return inputs, torch.zeros(size, dtype=torch.long)


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (math.nan, 1.0, "the loss of step 7 is nan"),
        (math.inf, math.nan, "the loss of step 7 is inf"),
        (1.0, math.inf, "the gradient of step 7 is inf"),
    ],
)
def test_the_quantity_and_the_step_are_named(loss: float, norm: float, what: str) -> None:
    said = explain(Group(), batch(), list(range(12)), step=7, loss=loss, norm=norm)
    assert said == f"{what} (the data of the batch is finite, so the cause is the model or the learning rate)"


def test_samples_are_named_by_their_index_in_the_data_set_and_at_most_eight() -> None:
    said = explain(Group(), batch(1, 3), [100 + i for i in range(12)], step=1, loss=math.nan, norm=0.0)
    assert "rank 0's share of the batch contains NaN or Inf in samples [101, 103]" in said
    said = explain(Group(), batch(*range(12)), list(range(12)), step=1, loss=math.nan, norm=0.0)
    assert "in samples [0, 1, 2, 3, 4, 5, 6, 7]" in said


def explained() -> str:
    """Ranks 1 and 2 have bad samples, rank 3 has none at all."""
    with joined(deadline_s=30) as group:
        shares = [batch(), batch(0), batch(2, 5), None]
        return explain(
            group, shares[group.rank], [20 * group.rank + i for i in range(12)], step=4, loss=math.nan, norm=1.0
        )


def test_every_rank_says_the_same_of_all_ranks(ranks: Ranks) -> None:
    said = ranks(4, explained)
    assert len(set(said)) == 1
    assert (
        "(rank 1's share of the batch contains NaN or Inf in samples [20]; "
        "rank 2's share of the batch contains NaN or Inf in samples [42, 45])" in said[0]
    )


def test_the_errors_say_what_to_do() -> None:
    assert "Nothing was updated" in str(stop("problem"))
    for way_out in ("Clean the data", "clip_norm", "`nonfinite: skip`", "`nonfinite: rewind`"):
        assert way_out in str(stop("problem"))
    assert str(gave_up("problem", 20)).startswith("problem, and the model has not recovered after 20 skipped updates")


def falling(seed: int, noise: float, slope: float, multiplies: bool, steps: int = 300) -> list[float]:
    """Losses that fall to a level, with normal noise that is added or multiplied."""
    drawn = random.Random(seed)
    clean = [0.2 + 5.0 * math.exp(-slope * step) for step in range(steps)]
    noises = [max(-3.5, min(3.5, drawn.gauss(0, 1))) * noise for _ in clean]
    return [x * math.exp(n) if multiplies else x + n for x, n in zip(clean, noises, strict=True)]


noisy = st.builds(falling, st.integers(0, 10**6), st.floats(0.0, 0.3), st.floats(0.0, 0.5), st.booleans())


@given(noisy)
def test_noise_on_a_falling_loss_is_no_spike(losses: list[float]) -> None:
    spikes = LossSpikes(SpikeSpec())
    assert [spikes.problem(step, loss) for step, loss in enumerate(losses, 1)] == [None] * len(losses)


@given(noisy, st.integers(60, 299))
def test_a_loss_far_beyond_the_noise_is_one(losses: list[float], at: int) -> None:
    spikes = LossSpikes(SpikeSpec())
    losses[at] = 4 * max(losses[at - 50 : at]) + 20
    found = [spikes.problem(step, loss) for step, loss in enumerate(losses)]
    assert [step for step, said in enumerate(found) if said] == [at]
    assert f"the loss of step {at} is {losses[at]:.6g}, a spike" in str(found[at])


def test_nothing_is_a_spike_before_as_many_losses_are_known_as_the_window_has() -> None:
    spikes = LossSpikes(SpikeSpec(window=10))
    assert [spikes.problem(step, loss) for step, loss in enumerate([1.0, 1e9] * 5)] == [None] * 10


def test_the_last_losses_come_back_with_a_state() -> None:
    first, second = LossSpikes(SpikeSpec(window=10)), LossSpikes(SpikeSpec(window=10))
    for step in range(30):
        first.problem(step, 1 + step % 3)
    second.load_state_dict(first.state_dict())
    assert second.limit == first.limit < math.inf


@pytest.mark.parametrize("written", ["spike: off", "spike: {policy: off}", "", "spike: {policy: 'off'}"])
def test_off_is_what_yaml_reads_as_false(tmp_path: Path, written: str) -> None:
    (tmp_path / "job.yaml").write_text(small_job().to_yaml() + written + "\n")
    assert Job.load(tmp_path / "job.yaml") == small_job()


def test_a_misspelled_policy_is_refused() -> None:
    with raises(JobError, "file.choice_unknown"):
        small_job(spike="ignore")


# In a run

STEP = 15  # of the spike, in the second epoch


def spiking() -> int:
    """A sample of that step's batch."""
    dealt = Partition(PartitionSpec(), samples=70, global_batch=8, seed=0, replica=0, replicas=1)
    return int(list(dealt.batches(1))[STEP - 10][0])


def job_of(policy: str, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": {"factory": "torch.nn:Linear", "args": {"in_features": 6, "out_features": 3}},
        "data": points(spike_at=[spiking()]),
        "spike": {"policy": policy, "window": 10},
        "checkpoint": {"memory_every_steps": 3},
    }
    return small_job(**(values | changes))


def told(run: Run, event: str) -> list[dict[str, Any]]:
    return [e for e in run.events() if e["event"] == event]


def test_a_step_with_a_spike_is_left_out_and_told_by_either_policy(tmp_path: Path) -> None:
    runs = {policy: train_here(tmp_path / policy, job_of(policy)) for policy in ("off", "skip", "rewind")}
    assert [[e["step"] for e in told(run, "spike")] for run in runs.values()] == [[], [STEP], [STEP]]
    assert [e["kept"] for e in told(runs["rewind"], "rewind")] == ["memory"]
    assert runs["skip"].losses[:STEP] == runs["off"].losses[:STEP]
    assert runs["skip"].losses[STEP - 1] > 50
    assert max(runs["skip"].losses[STEP:]) < 2 < max(runs["off"].losses[STEP:])
    assert runs["rewind"].losses == runs["skip"].losses


def test_all_ranks_leave_the_same_step_out(tmp_path: Path, ranks: Ranks) -> None:
    for policy in ("skip", "rewind"):
        new_run(tmp_path / policy, job_of(policy), "dp=2")
        ranks(2, train_as_rank, tmp_path / policy)
        run = Run(tmp_path / policy)
        assert [e["step"] for e in told(run, "spike")] == [STEP]
        assert run.reason == "steps: 20 done"
        assert max(run.losses[STEP:]) < 2


def test_a_resumed_run_knows_the_losses_before(tmp_path: Path) -> None:
    train_here(tmp_path / "run", job_of("skip", stop={"steps": STEP - 1}))
    run = train_here(tmp_path / "run", job_of("skip"))
    assert [e["step"] for e in told(run, "spike")] == [STEP]


def test_a_loss_that_stays_high_ends_the_run(tmp_path: Path) -> None:
    with raises(NonFiniteError, "nonfinite.not_recovering", skipped=20):
        train_here(
            tmp_path / "run", job_of("skip", data=points(samples=210, spike_at=list(range(210))), stop={"steps": 90})
        )


STEPS = 60


class Root(nn.Module):
    """A finite output with an infinite gradient at zero, like a norm or a standard deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sqrt()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(model: nn.Module, **settings: Any) -> Any:
    data = TensorDataset(torch.ones(STEPS, 1), torch.full((STEPS, 1), 100.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = paceline.setup(
        model, optimizer, loss=mean, loader=DataLoader(data, batch_size=1), precision="fp16", **settings
    )
    return [engine.step(batch) for batch in engine.loader]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_gradients_that_no_scale_makes_finite_end_the_run(policy: str) -> None:
    with pytest.raises(NonFiniteError):
        train(Root(), nonfinite=policy)


def test_an_overflow_lowers_the_scale_until_gradients_are_finite() -> None:
    model = nn.Linear(1, 1)
    results = train(model)
    left_out = [result.problem is not None for result in results]
    assert left_out[0]  # 2 x 100 x 2**16 is more than fp16 has
    assert not any(left_out[20:])
    assert model(torch.ones(1)) > 1.0
