"""Runs with local steps resume exactly, end together, measure agreed parameters, and survive a NaN."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from model_families import family_job
from paceline.comm.backend import joined
from paceline.data.samples import held_out_batches
from paceline.engine.engine import RankEngine
from paceline.job.loss import LossSpec, build_metrics
from paceline.planning.plan import Plan
from paceline.run.build import build_engine, built, seed_all
from paceline.run.record.run import Run
from paceline.state.manifest import checkpoints
from paceline.state.reader import load_latest
from ranks import RankError, Ranks
from refusals import raises
from small_jobs import CLASSES, FEATURES, Points, new_run, points, small_job, train_as_rank, with_dropout

LOCAL, DILOCO = "dp=2 sync=local:4", "dp=2 sync=diloco:8,fragments=2,overlap=3"
EXACT: dict[str, Any] = {
    "model": {"factory": "small_jobs:with_dropout"},
    "data": points(held_out=0.25),
    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "clip_norm": 0.5,
    "metrics": ["accuracy"],
    "evaluate": {"every_steps": 5},
}


def train(path: Path, plan: str, ranks: Ranks, **changes: Any) -> Run:
    """Train, or continue."""
    new_run(path, small_job(**changes), plan)
    ranks(Plan.parse(plan).ranks, train_as_rank, path)
    return Run(path)


def facts(run: Run, rank: int) -> list[tuple[Any, ...]]:
    return [
        tuple(step[key] for key in ("step", "loss", "grad_norm", "lr", "local_samples")) for step in run.steps(rank)
    ]


def losses(run: Run) -> list[list[float]]:
    return [[step["loss"] for step in run.steps(rank)] for rank in range(2)]


# Resuming


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> dict[str, Run]:
    """Runs that nothing disturbs, by plan: exact ones of 24 steps, and a short one of local steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        DILOCO: train(folder / "diloco", DILOCO, ranks, **EXACT, stop={"steps": 24}),
        LOCAL: train(folder / "local", LOCAL, ranks),
    }


def assert_goes_on(path: Path, plan: str, ranks: Ranks, undisturbed: Run) -> None:
    # a fragment left in step 12 and arrives in 15
    train(path, plan, ranks, **EXACT, stop={"steps": 14})
    resumed = train(path, plan, ranks, **EXACT, stop={"steps": 24})
    assert [e["step"] for e in resumed.events() if e["event"] == "resume"] == [14]
    for rank in range(2):
        assert facts(resumed, rank) == facts(undisturbed, rank)
    assert resumed.metrics == undisturbed.metrics


def test_a_run_goes_on_bit_for_bit_from_the_middle_of_a_period(
    tmp_path: Path, ranks: Ranks, undisturbed: dict[str, Run]
) -> None:
    assert_goes_on(tmp_path / "resumed", DILOCO, ranks, undisturbed[DILOCO])


@pytest.mark.slow
def test_a_run_of_local_sgd_goes_on_bit_for_bit_from_the_middle_of_a_period(tmp_path: Path, ranks: Ranks) -> None:
    whole = train(tmp_path / "undisturbed", LOCAL, ranks, **EXACT, stop={"steps": 24})
    assert_goes_on(tmp_path / "resumed", LOCAL, ranks, whole)


def test_saving_and_measuring_change_no_later_step(tmp_path: Path, ranks: Ranks, undisturbed: dict[str, Run]) -> None:
    often = {**EXACT, "evaluate": {"every_steps": 2}, "checkpoint": {"every_steps": 3}, "stop": {"steps": 24}}
    run = train(tmp_path / "often", DILOCO, ranks, **often)
    for rank in range(2):
        assert facts(run, rank) == facts(undisturbed[DILOCO], rank)


def test_another_plan_goes_on_from_what_all_agreed_on_and_says_so(tmp_path: Path, ranks: Ranks) -> None:
    """A rule that has no state, one that has its own, and the same with another period."""
    first = train(tmp_path / "run", LOCAL, ranks, stop={"steps": 6})
    loaded = load_latest(first.checkpoints, rank=0, world=1, report=lambda *_: None)
    assert loaded is not None
    own = [loaded.of_rank(rank)["own/model/0.weight"] for rank in range(2)]
    assert not torch.equal(own[0], own[1])
    torch.testing.assert_close(loaded.shared["model/0.weight"], (own[0] + own[1]) / 2)
    for number, after in enumerate(("dp=1", DILOCO, "dp=2 sync=local:3")):
        shutil.copytree(first.path, tmp_path / str(number))
        run = train(tmp_path / str(number), after, ranks, stop={"steps": 40})
        said = [line for e in run.events() if e["event"] == "sync" for line in e["said"] if "left behind" in line]
        assert said == [
            "the state that each rank had of its own in step 6 is left behind: sync=local:4 saved it. Training "
            "goes on from what all agreed on"
        ]
        assert run.losses[-1] < 0.7 * run.losses[0]


# Votes and the stop rule


def test_replicas_have_losses_of_their_own_but_in_the_steps_that_agree(undisturbed: dict[str, Run]) -> None:
    run = undisturbed[LOCAL]
    [said] = [e["said"] for e in run.events() if e["event"] == "sync"]
    assert said[0].startswith("sync=local: ")
    one, two = losses(run)
    assert [a == b for a, b in zip(one, two, strict=True)] == [False, False, False, True] * 5


def test_a_loss_that_one_replica_sees_ends_no_run(tmp_path: Path, ranks: Ranks) -> None:
    run = train(tmp_path / "run", LOCAL, ranks, stop={"loss_below": 1e9})
    assert run.reason is not None
    assert run.reason.startswith("loss_below")
    assert [len(run.steps(rank)) for rank in range(2)] == [4, 4]


def test_a_signal_to_one_rank_ends_all_within_a_period_and_saves(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Run]
) -> None:
    monkeypatch.setenv("INTERRUPT", "1:38")  # between steps 9 and 10, as an epoch begins
    run = train(tmp_path / "run", LOCAL, ranks)
    *_, end = run.events()
    assert (end["reason"], end["interrupted"], end["step"]) == ("SIGTERM", True, 12)
    assert [len(run.steps(rank)) for rank in range(2)] == [12, 12]
    assert [step for step, _ in checkpoints(run.checkpoints)] == [12]
    monkeypatch.delenv("INTERRUPT")
    resumed = train(tmp_path / "run", LOCAL, ranks)
    for rank in range(2):
        assert facts(resumed, rank) == facts(undisturbed[LOCAL], rank)


def test_a_checkpoint_that_is_due_by_the_clock_is_made_where_all_know_of_it(tmp_path: Path, ranks: Ranks) -> None:
    run = train(tmp_path / "run", LOCAL, ranks, checkpoint={"every_seconds": 1e-6, "keep": 9}, stop={"steps": 13})
    assert [step for step, _ in checkpoints(run.checkpoints)] == [4, 8, 12, 13]


# What is not finite


@pytest.mark.parametrize("plan", [LOCAL, DILOCO])
def test_a_replica_that_leaves_an_update_out_holds_up_no_other(tmp_path: Path, ranks: Ranks, plan: str) -> None:
    run = train(tmp_path / "run", plan, ranks, data=points(nan_at=[5, 40]), nonfinite="skip", stop={"epochs": 3})
    left_out = [sum(step["grad_norm"] is None for step in run.steps(rank)) for rank in range(2)]
    assert sum(left_out) == 2 * 3  # each of two samples once an epoch, by the replica that has it
    assert [len(run.steps(rank)) for rank in range(2)] == [27, 27]
    assert run.losses[-1] < run.losses[0]


def test_a_replica_whose_loss_is_not_finite_ends_the_run_and_is_named(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(
        RankError,
        match=r"the loss of step \d+ is nan \(rank (0|1)'s share of the batch contains NaN or Inf in samples \[5\]\)",
    ):
        train(tmp_path / "run", LOCAL, ranks, data=points(nan_at=[5]))


# Measuring


def measured() -> dict[str, Any]:
    """Metrics in the middle of a period, and those of the mean of all replicas' parameters and statistics."""
    seed_all(0)
    model, loss = with_dropout(), LossSpec(name="cross_entropy").build()
    loader = DataLoader(Points(), batch_size=8)
    engine = paceline.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, loader=loader, plan="dp=2 sync=local:4"
    )
    for batch, _ in zip(engine.loader, range(6), strict=False):
        assert engine.step(batch).reduced == (engine.step_count % 4 == 0)
    held_out, before = Points(11), [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    parts = held_out_batches(held_out, batch=4, replica=engine.group.rank, replicas=2)
    metrics = engine.evaluate(parts, build_metrics(("accuracy",), loss))
    for one, other in zip(before, (*model.parameters(), *model.buffers()), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            engine.group.all_reduce(tensor, "mean")
        model.eval()
        output = model(held_out.inputs)
    return {"metrics": metrics, "loss": nn.functional.cross_entropy(output, held_out.labels).item()}


def test_an_evaluation_measures_what_all_agree_on_and_changes_nothing(ranks: Ranks) -> None:
    one, two = ranks(2, measured)
    assert one["metrics"] == two["metrics"]
    assert one["metrics"]["loss"] == pytest.approx(one["loss"], rel=1e-6)


def joined_in_every_step(batch_norm: Any) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Points(), batch_size=7)
    paceline.setup(
        model,
        optimizer,
        loss=nn.functional.cross_entropy,
        loader=loader,
        plan="dp=2 sync=local:4",
        batch_norm=batch_norm,
    )


def test_what_joins_replicas_in_every_step_is_refused(ranks: Ranks) -> None:
    with raises(RankError, "plan.joint_batch_under_local_rule", sync="local:4"):
        ranks(2, joined_in_every_step, "sync")


# Divided models


def by_step(folder: Path, text: str, steps: int) -> list[tuple[str, str, float, int]]:
    """Digests of parameters, norm and loss of each step, as this rank knows them.

    The parameters of this rank and those of the whole replica.
    """
    job, plan = family_job("gpt", folder), Plan.parse(text)
    with joined(deadline_s=60) as group:
        seed_all(0)
        data = job.data.build(input_shape=job.model.input_shape(), seed=0)
        engine = build_engine(job, plan, built(job, plan), data, group)
        found = []
        while engine.step_count < steps:
            for batch in engine.loader:
                result = engine.step(batch)
                found.append((digest(engine), result.loss, result.grad_norm, engine.replica.inner.size))
        engine.close()
        return found  # type: ignore[return-value]


def digest(engine: RankEngine) -> str:
    held: list[Tensor] = [p.detach().contiguous() for p in engine.named_parameters().values()]
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in held)).hexdigest()


@pytest.mark.parametrize(
    "split",
    [
        pytest.param("fsdp=2", marks=pytest.mark.slow),
        pytest.param("tp=2", marks=pytest.mark.slow),
        "pp=2 microbatches=2",
    ],
)
def test_replicas_that_are_divided_are_one_after_every_period(ranks: Ranks, tmp_path: Path, split: str) -> None:
    of_rank = ranks(4, by_step, tmp_path, f"dp=2 {split} sync=local:4", 8, backend="shm")
    for one, other in ((0, 2), (1, 3)):  # the same part of both replicas
        equal = [a[0] == b[0] for a, b in zip(of_rank[one], of_rank[other], strict=True)]
        assert equal == [False, False, False, True] * 2
    for first, second in ((0, 1), (2, 3)):  # the ranks of one replica clip alike, and know the same loss
        assert [step[1:3] for step in of_rank[first]] == [step[1:3] for step in of_rank[second]]
    assert [a[1] == b[1] for a, b in zip(of_rank[0], of_rank[2], strict=True)] == [False, False, False, True] * 2
    assert {step[3] for steps in of_rank for step in steps} == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 fsdp=2 sync=diloco:4,fragments=2,overlap=1",
        "dp=2 pp=2 microbatches=2 sync=diloco:4,fragments=2,overlap=1",
        "dp=2 tp=2 sync=local:4",
    ],
)
def test_a_divided_run_goes_on_bit_for_bit_from_the_middle_of_a_period(tmp_path: Path, ranks: Ranks, plan: str) -> None:
    def trained(path: Path, steps: int) -> Run:
        new_run(path, family_job("gpt", tmp_path, stop={"steps": steps}), plan)
        ranks(4, train_as_rank, path, backend="shm")
        return Run(path)

    undisturbed = trained(tmp_path / "undisturbed", 12)
    trained(tmp_path / "resumed", 6)
    resumed = trained(tmp_path / "resumed", 12)
    for rank in range(4):
        assert facts(resumed, rank) == facts(undisturbed, rank)


@pytest.mark.parametrize("plan", ["dp=1 remat=block", "dp=1 remat=block sync=local:2"])
def test_a_divided_model_on_one_rank_has_the_loss_of_a_whole_one(plan: str) -> None:
    def losses(plan: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)])
        inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
        loader: DataLoader[Any] = DataLoader(TensorDataset(inputs, inputs.argmax(dim=1)), batch_size=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = paceline.setup(model, optimizer, loss=nn.functional.cross_entropy, loader=loader, plan=plan)
        found = [engine.step(batch).loss for batch in engine.loader]
        engine.close()
        return found

    assert losses(plan) == pytest.approx(losses("dp=1"), rel=1e-5)
