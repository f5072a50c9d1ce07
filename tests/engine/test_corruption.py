"""Silent corruption: a bit that flips on one of several replicas is found, named and healed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.backend import joined
from paceline.engine.replica_state import ReplicaState
from paceline.run.loop import train_in
from paceline.run.record.run import Run
from paceline.split.layout import local
from paceline.state.reader import load_latest
from ranks import RankError, Ranks
from small_jobs import new_run, small_job

# (update with a comparison, rank, bit, False: of a weight, before it; True: of the optimizer's state, after it)
Flip = tuple[int, int, int, bool]


def train_with(path: Path, flips: list[Flip]) -> None:
    """Train a run as one rank; bits flip between a gradient and its update."""
    before_update = ReplicaState.before_update

    def flip(self: ReplicaState, update: int, *, in_optimizer: bool) -> None:
        for at, rank, bit, there in flips:
            if (at, rank, there) == (update, self.engine.group.rank, in_optimizer):
                parameter = next(iter(self.engine.named_parameters().values()))
                held = self.engine.optimizer.state[parameter]["exp_avg"] if in_optimizer else parameter
                local(held).detach().view(torch.int32).view(-1)[0] ^= 1 << bit

    def flipping(self: ReplicaState, update: int) -> None:
        flip(self, update, in_optimizer=False)
        before_update(self, update)
        flip(self, update, in_optimizer=True)

    ReplicaState.before_update = flipping  # type: ignore[method-assign]
    try:
        with joined(deadline_s=30) as group:
            train_in(Run(path), group)
    finally:
        ReplicaState.before_update = before_update  # type: ignore[method-assign]


def trained(
    path: Path, ranks: Ranks, *flips: Flip, size: int = 3, plan: str = "dp=3 balance=off", **changes: object
) -> Run:
    job = small_job(optimizer={"name": "adamw", "lr": 0.01}, global_batch=12, stop={"steps": 12}, **changes)
    new_run(path, job, plan)
    ranks(size, train_with, path, list(flips))
    return Run(path)


def corruptions(run: Run) -> list[dict[str, Any]]:
    return [e for e in run.events() if e["event"] == "corruption"]


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """Weights and optimizer state at the end, of which every rank has saved a part."""
    found = load_latest(run.checkpoints, rank=0, world=1, report=lambda *_: None)
    assert found is not None
    return dict(found.shared)


def assert_same_end(run: Run, other: Run) -> None:
    ours, theirs = state_of(run), state_of(other)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_the_odd_one_out_is_named_and_healed_and_the_run_is_as_an_undisturbed_one(tmp_path: Path, ranks: Ranks) -> None:
    undisturbed = trained(tmp_path / "undisturbed", ranks)
    run = trained(tmp_path / "run", ranks, (4, 1, 20, False), (8, 0, 30, False))
    assert corruptions(undisturbed) == []
    first, second = corruptions(run)
    assert (first["rank"], first["step"], first["healed_from"], first["tensors"]) == (1, 4, 0, ["0.weight"])
    assert (second["rank"], second["step"], second["healed_from"]) == (0, 8, 1)
    assert first["host"] == socket.gethostname()
    assert run.losses == undisturbed.losses
    assert_same_end(run, undisturbed)


def test_a_flip_in_the_optimizers_state_is_healed_with_what_came_of_it(tmp_path: Path, ranks: Ranks) -> None:
    undisturbed = trained(tmp_path / "undisturbed", ranks)
    run = trained(tmp_path / "run", ranks, (4, 2, 22, True), compare_every=7)
    (found,) = corruptions(run)
    assert (found["rank"], found["step"], found["tensors"]) == (2, 7, ["0.weight"])
    assert run.losses[:4] == undisturbed.losses[:4]
    assert run.losses == pytest.approx(undisturbed.losses, rel=0.2)
    assert run.reason == "steps: 12 done"


def test_the_third_time_ends_the_run_and_names_the_host(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(RankError) as raised:
        trained(tmp_path / "run", ranks, *((at, 1, 20, False) for at in (2, 4, 8)))
    said = f"step 8: rank 1 (host {socket.gethostname()}) holds other values of '0.weight' than most ranks, for the 3rd"
    assert said in str(raised.value)
    assert "Check the memory of that host" in str(raised.value)
    assert len(corruptions(Run(tmp_path / "run"))) == 2


@pytest.mark.parametrize(("size", "flips"), [(2, [(4, 1, 20, False)]), (3, [(4, 1, 20, False), (4, 2, 21, False)])])
def test_without_a_majority_the_difference_ends_the_run(
    tmp_path: Path, ranks: Ranks, size: int, flips: list[Flip]
) -> None:
    with pytest.raises(RankError, match=r"step 4: parameter '0.weight' is different on rank .* than on rank 0"):
        trained(tmp_path / "run", ranks, *flips, size=size, plan=f"dp={size} balance=off")


@pytest.mark.slow
def test_a_part_of_a_divided_replica_is_healed_from_that_part_of_another(tmp_path: Path, ranks: Ranks) -> None:
    undisturbed = trained(tmp_path / "undisturbed", ranks, size=6, plan="dp=3 fsdp=2 balance=off")
    run = trained(tmp_path / "run", ranks, (4, 3, 20, False), size=6, plan="dp=3 fsdp=2 balance=off")
    (found,) = corruptions(run)
    assert (found["rank"], found["step"]) == (3, 4), "also where the first rank has another part"
    assert run.losses == undisturbed.losses
    assert_same_end(run, undisturbed)
