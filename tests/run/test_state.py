"""The state of an engine.

What is saved comes back bit for bit, and a checkpoint of something else is refused with what differs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.engine.engine import RankEngine
from paceline.errors import CheckpointError, JobError
from paceline.state.checkpoint import restore, snapshot
from paceline.state.rank_state import numpy_state, python_state, random_tensors, restore_random
from paceline.state.reader import Loaded, load_latest
from paceline.state.writer import Checkpointer
from ranks import Ranks
from refusals import raises
from small_jobs import CLASSES, FEATURES, Points
from small_jobs import train_on as train


class Tied(nn.Module):
    """Two layers with one weight, batch norm, and a buffer that is not to be saved."""

    def __init__(self, width: int = FEATURES, extra: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(FEATURES, width)
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(FEATURES, width)
        self.up.weight = self.down.weight
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if extra:
            self.extra = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.up(self.norm(self.down(x))[:, :FEATURES]))
        return y


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def engine_of(optimizer: str = "adamw", model: nn.Module | None = None, groups: int = 1) -> RankEngine:
    model = model or Tied()
    parameters = list(model.parameters())
    grouped = [{"params": parameters[i::groups]} for i in range(groups)]
    return paceline.setup(
        model,
        OPTIMIZERS[optimizer](grouped),
        loss=F.cross_entropy,
        loader=DataLoader(Points(), batch_size=8, shuffle=True),
    )


def save(engine: RankEngine, folder: Path, values: dict[str, Any] | None = None) -> None:
    group = engine.group
    checkpointer = Checkpointer(
        folder, rank=group.rank, world=group.size, keep=1, deadline_s=30, report=lambda *_: None
    )
    group.barrier()  # rank 0 has removed what was left half-written
    checkpointer.save(engine.step_count, snapshot(engine, values or {}))
    checkpointer.close()
    group.barrier()


def loaded(folder: Path, rank: int = 0, world: int = 1) -> Loaded:
    found = load_latest(folder, rank=rank, world=world, report=lambda *_: None)
    assert found is not None
    return found


def everything(engine: RankEngine) -> dict[str, Any]:
    return copy.deepcopy({"model": engine.model.state_dict(), "optimizer": engine.optimizer.state_dict()["state"]})


def assert_same_bits(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_bits(one[key], other[key])
    else:
        assert one == other


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_engine_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path, optimizer: str) -> None:
    first = engine_of(optimizer)
    train(first, 12)
    save(first, tmp_path, {"note": [1, 2]})
    saved = everything(first)
    expected = train(first, 10)

    second = engine_of(optimizer)
    assert restore(second, loaded(tmp_path)) == {"note": [1, 2]}
    assert second.step_count == 12
    assert_same_bits(everything(second), saved)
    assert train(second, 10) == expected
    assert_same_bits(everything(second), everything(first))


def channels_last_engine(*, steps: int = 0) -> RankEngine:
    """An engine of a convolution, with a fused Adagrad that has taken steps of its own before."""
    torch.manual_seed(5)
    image, filters = (2, 4, 4), nn.Conv2d(2, 3, 3)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.Unflatten(1, image), filters, nn.Flatten(), nn.Linear(12, CLASSES)
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    for step in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    loader = DataLoader(Points(), batch_size=8, shuffle=True)
    return paceline.setup(
        model, optimizer, loss=F.cross_entropy, loader=loader, plan="memory_format=channels_last fused=on"
    )


def test_a_fused_optimizer_of_channels_last_weights_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = channels_last_engine()
    train(first, 3)
    save(first, tmp_path)
    expected = train(first, 6)
    second = channels_last_engine()
    restore(second, loaded(tmp_path))
    assert train(second, 6) == expected


def test_state_from_before_setup_belongs_to_the_same_weights_in_channels_last() -> None:
    engine = channels_last_engine(steps=2)
    found = train(engine, 6)
    engine = channels_last_engine(steps=2)
    [group] = engine.optimizer.param_groups
    group["fused"] = False
    assert found == pytest.approx(train(engine, 6), rel=1e-5)


def test_changed_hyper_parameters_come_back_with_the_state(tmp_path: Path) -> None:
    first = engine_of()
    first.optimizer.param_groups[0]["lr"] = 0.125
    train(first, 2)
    save(first, tmp_path)
    second = engine_of()
    restore(second, loaded(tmp_path))
    assert second.optimizer.param_groups[0]["lr"] == 0.125
    assert second.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_fused_optimizer_takes_over_from_one_that_was_not_and_stays_fused(tmp_path: Path) -> None:
    first = engine_of("adamw")
    train(first, 3)
    save(first, tmp_path)
    second = engine_of("fused")
    restore(second, loaded(tmp_path))
    assert second.optimizer.param_groups[0]["fused"] is True
    assert train(second, 4) == pytest.approx(train(first, 4), rel=1e-5)


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    engine = engine_of()
    train(engine, 1)
    save(engine, tmp_path)
    expected = [draw() for _ in range(3)]
    draw()
    restore(engine, loaded(tmp_path))
    assert [draw() for _ in range(3)] == expected


def test_what_is_not_to_be_saved_is_left_alone(tmp_path: Path) -> None:
    first, second = engine_of(), engine_of()
    first.model.get_buffer("scratch").fill_(1.0)
    second.model.get_buffer("scratch").fill_(2.0)
    train(first, 1)
    save(first, tmp_path)
    restore(second, loaded(tmp_path))
    assert second.model.get_buffer("scratch").tolist() == [2.0, 2.0]


def save_and_draw(folder: Path) -> tuple[float, list[float]]:
    """Each replica has buffers and random states of its own."""
    engine = engine_of()
    train(engine, 3)
    save(engine, folder)
    expected = draw()[0], engine.model.get_buffer("norm.running_mean").tolist()
    draw()
    engine.model.get_buffer("norm.running_mean").zero_()
    restore(engine, loaded(folder, engine.group.rank, engine.group.size))
    assert (draw()[0], engine.model.get_buffer("norm.running_mean").tolist()) == expected
    return expected


def test_every_replica_gets_its_own_buffers_and_random_states_back(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2, save_and_draw, tmp_path)
    assert first[0] != second[0]
    assert first[1] != second[1]


def restore_and_draw(folder: Path) -> float:
    engine = engine_of()
    restore(engine, loaded(folder, engine.group.rank, engine.group.size))
    return draw()[0]


def test_more_replicas_than_saved_draw_numbers_of_their_own(tmp_path: Path, ranks: Ranks) -> None:
    engine = engine_of()
    train(engine, 3)
    save(engine, tmp_path)
    drawn = ranks(3, restore_and_draw, tmp_path)
    assert len({*drawn, draw()[0]}) == 4


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (Tied(extra=True), "checkpoint.of_other_model"),
        (Tied(width=9), "checkpoint.of_other_model"),
        (
            nn.Linear(FEATURES, CLASSES),
            "checkpoint.of_other_model",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    tmp_path: Path, model: nn.Module, code: str
) -> None:
    first = engine_of()
    train(first, 1)
    save(first, tmp_path)
    with raises(CheckpointError, code):
        restore(engine_of(model=model), loaded(tmp_path))


def of_the_head_alone() -> RankEngine:
    model = Tied()
    optimizer = torch.optim.AdamW(model.head.parameters())
    return paceline.setup(model, optimizer, loss=F.cross_entropy, loader=DataLoader(Points(), batch_size=8))


@pytest.mark.parametrize(
    ("groups", "other", "code"),
    [
        (2, engine_of, "checkpoint.groups_differ"),
        (1, of_the_head_alone, "checkpoint.state_unknown"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, groups: int, other: Callable[[], RankEngine], code: str
) -> None:
    first = engine_of(groups=groups)
    train(first, 1)
    save(first, tmp_path)
    with raises(CheckpointError, code):
        restore(other(), loaded(tmp_path))


def test_a_checkpoint_of_another_device_resumes_without_that_devices_random_state() -> None:
    own = random_tensors(torch.device("cpu"))
    values = {"python": python_state(), "numpy": numpy_state()}
    torch.manual_seed(99)
    assert restore_random(torch.device("cpu"), own, values) == []
    assert torch.equal(torch.get_rng_state(), own["rng/torch"])
    (said,) = restore_random(torch.device("xpu", 0), own, values)
    assert "not of a xpu device" in said


class Residual(nn.Module):
    """Four alike blocks with a batch norm each."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm(8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.head(x)
        return y


def losses(plan: str, norm: type[nn.Module] = nn.BatchNorm1d, batch_norm: Any = "sync") -> list[float]:
    torch.manual_seed(1)
    model = Residual(norm).double()
    data = TensorDataset(torch.randn(32, 6).double(), torch.randint(0, 3, (32,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(
        model,
        optimizer,
        loss=F.cross_entropy,
        loader=DataLoader(data, batch_size=8),
        plan=plan,
        precision="fp64",
        batch_norm=batch_norm,
    )
    found = [engine.step(batch).loss for batch in engine.loader]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("ranks_of", "plan", "alike"),
    [
        (4, "dp=2 pp=2 microbatches=2", "dp=2 microbatches=2"),  # the statistics are of a microbatch of all replicas
        pytest.param(4, "dp=2 fsdp=2 remat=block", "dp=1", marks=pytest.mark.slow),
        (4, "dp=2 tp=2", "dp=1"),
    ],
)
def test_statistics_are_global_however_the_model_is_divided(ranks: Ranks, ranks_of: int, plan: str, alike: str) -> None:
    expected = losses(alike) if alike == "dp=1" else ranks(2, losses, alike, backend="shm")[0]
    for found in ranks(ranks_of, losses, plan, backend="shm"):
        assert found == pytest.approx(expected, rel=1e-9)


def told(plan: str, norm: type[nn.Module], batch_norm: str) -> list[float] | str:
    try:
        return losses(plan, norm, batch_norm)
    except JobError as error:
        return str(error)


def test_torchs_own_synchronised_layers_train_on_cpus_and_need_the_setting_that_says_so(ranks: Ranks) -> None:
    assert ranks(2, told, "dp=2", nn.SyncBatchNorm, "sync", backend="shm")[0] == pytest.approx(losses("dp=1"), rel=1e-9)
    assert all(
        "Set batch_norm: sync" in text for text in ranks(2, told, "dp=2", nn.SyncBatchNorm, "local", backend="shm")
    )
    assert losses("dp=1", nn.SyncBatchNorm, "local") == pytest.approx(losses("dp=1"), rel=1e-12)
