"""`engine.save`, `load`, `evaluate` and `export` in a loop of one's own: exact, whatever the ranks.

And fp16, callbacks and averages.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import paceline
from paceline.engine.engine import StepResult
from paceline.errors import CheckpointError, DataError, RunError
from paceline.run import trackers
from paceline.run.own_loop import state as own_state
from paceline.run.own_loop.state import decode, encode
from paceline.state.writer import Checkpointer
from ranks import Ranks
from refusals import raises

FEATURES, CLASSES, SAMPLES = 6, 3, 24


def dataset() -> TensorDataset:
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, torch.arange(SAMPLES) % CLASSES)


def network(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, outputs))


class Gan:
    """A loop with every kind of state, under way.

    Two models, two optimizers, a schedule with integer keys, an average, a second loader and a learned
    number.
    """

    def __init__(self) -> None:
        g, d = network(FEATURES), network(1)
        self.scale = nn.Parameter(torch.ones(()))
        self.of_g, self.of_d = Adam(g.parameters(), lr=0.05), SGD([*d.parameters(), self.scale], lr=0.1, momentum=0.9)
        self.engine = paceline.setup(
            {"g": g, "d": d}, [self.of_g, self.of_d], loader=DataLoader(dataset(), batch_size=6, shuffle=True)
        )
        self.second = self.engine.deal(DataLoader(dataset(), batch_size=6, shuffle=True))
        self.scheduler = MultiStepLR(self.of_g, [2, 5], 0.5)
        self.average = AveragedModel(g, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.g, self.d = g, d
        self.stream = self.batches()

    def batches(self) -> Any:
        while True:
            yield from zip(self.engine.loader, self.second, strict=True)

    def step(self) -> list[float]:
        engine, ((x, _), (other, _)) = self.engine, next(self.stream)
        fake = self.g(other)
        real = engine.backward(
            self.scale * (F.softplus(-self.d(x)) + F.softplus(self.d(fake.detach()))).mean(), self.of_d
        )
        engine.update(self.of_d)
        fooled = engine.backward(F.softplus(-self.d(fake)).mean(), self.of_g)
        engine.update(self.of_g, clip_norm=1.0)
        self.scheduler.step()
        self.average.update_parameters(self.g)
        return [
            float(real),
            float(fooled),
            self.of_g.param_groups[0]["lr"],
            float(next(self.average.parameters()).detach().sum()),
        ]

    def save(self, folder: str) -> None:
        self.engine.save(
            folder, scheduler=self.scheduler, average=self.average, note={"epoch": 3, "best": (0.5, float("inf"))}
        )

    def load(self, folder: str) -> Any:
        return self.engine.load(folder, scheduler=self.scheduler, average=self.average)


def undisturbed(folder: str) -> list[list[float]]:
    """Saves after three steps, in the middle of an epoch, and goes on."""
    run, found = Gan(), []
    assert run.load(folder) is None
    for step in range(8):
        found.append(run.step())
        if step == 2:
            run.save(folder)
    return found


def resumed(folder: str) -> list[list[float]]:
    run = Gan()
    assert run.load(folder) == {"note": {"epoch": 3, "best": (0.5, float("inf"))}}
    assert run.engine.step_count == 6  # two updates each
    return [run.step() for _ in range(5)]


def test_a_loop_goes_on_exactly_from_the_middle_of_an_epoch_on_other_ranks_too(ranks: Ranks, tmp_path: Path) -> None:
    alone = undisturbed(str(tmp_path / "one"))
    assert resumed(str(tmp_path / "one")) == alone[3:]
    on_two = ranks(2, undisturbed, str(tmp_path / "two"))[0]
    assert on_two == [pytest.approx(step, rel=1e-4) for step in alone]
    assert ranks(2, resumed, str(tmp_path / "two"))[0] == on_two[3:]
    assert resumed(str(tmp_path / "two")) == [pytest.approx(step, rel=1e-4) for step in alone[3:]]


class Stored(Dataset[tuple[Tensor, Tensor]]):
    """Samples in memory, or drawn anew at every reading."""

    def __init__(self, samples: int = SAMPLES, seed: int = 3, *, augmented: bool = False) -> None:
        self.inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(FEATURES) if self.augmented else 0.0
        return self.inputs[index] + noise, torch.tensor(index % CLASSES)


class Growing(Stored):
    """A buffer that the loop fills."""


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without a length."""

    def __init__(self, seed: int = 3) -> None:
        self.stored = Stored(seed=seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.stored[i] for i in range(SAMPLES))


def resumable(data: Any, folder: Path, epochs: int, *, sampled: bool = False, seed: int = 0) -> int:
    """Train `epochs` epochs more, save, and return the steps that the loop began at."""
    model = network()
    sampler = SubsetRandomSampler(range(12)) if sampled else None
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    engine = paceline.setup(
        model, SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss(), loader=loader, seed=seed
    )
    engine.load(folder)
    began = engine.step_count
    for _ in range(epochs):
        for batch in engine.loader:
            engine.step(batch)
    if isinstance(data, Growing):
        data.inputs = torch.cat([data.inputs, data.inputs])
    engine.save(folder)
    engine.close()
    return began


@pytest.mark.parametrize("sampled", [False, True], ids=["order of the data set", "sampler"])
@pytest.mark.parametrize("changed", [Stored(SAMPLES + 6), Stored(seed=4)], ids=["length", "samples"])
def test_a_loop_is_not_resumed_with_a_data_set_that_has_changed(tmp_path: Path, changed: Stored, sampled: bool) -> None:
    resumable(Stored(), tmp_path, 1, sampled=sampled)  # a whole epoch
    with raises(DataError, "data.changed_since_saved"):
        resumable(changed, tmp_path, 1, sampled=sampled)
    assert resumable(Stored(), tmp_path, 1, sampled=sampled) == (2 if sampled else 4)


def refused_on_every_rank(folder: str) -> bool:
    rank = int(os.environ["RANK"])
    resumable(Stored(), Path(folder), 1)
    try:
        resumable(Stored(seed=3 + rank), Path(folder), 1)
    except DataError:
        return True
    return False


def test_a_data_set_that_changed_on_one_rank_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, refused_on_every_rank, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Stored(augmented=True), Stored(augmented=True)),
        (Streamed(), Streamed(seed=4)),
        (Growing(), Growing(2 * SAMPLES)),
    ],
    ids=["augmented", "stream without a length", "filled by the loop"],
)
def test_data_that_cannot_be_compared_is_resumed(tmp_path: Path, first: Any, then: Any) -> None:
    resumable(first, tmp_path, 1)
    assert resumable(then, tmp_path, 1, seed=0 if isinstance(first, Streamed) else 1) == 4


def test_what_the_checkpoint_does_not_hold_is_named(tmp_path: Path) -> None:
    run = Gan()
    run.step()
    run.save(str(tmp_path))
    with raises(CheckpointError, "checkpoint.name_missing", name="ema", there="average, note, scheduler"):
        run.engine.load(tmp_path, ema=run.average)
    with raises(CheckpointError, "checkpoint.value_not_loadable", name="note"):
        run.engine.load(tmp_path, note=1)
    with raises(CheckpointError, "checkpoint.value_unsupported", module="builtins", name="extra/model"):
        run.engine.save(tmp_path, model=undisturbed)


def saves_what_differs(folder: str) -> str:
    engine = plain_engine()
    try:
        engine.save(folder, best=engine.group.rank)
    except CheckpointError as error:
        return str(error)
    return ""


def saves_elsewhere(folder: str) -> str:
    engine = plain_engine()
    try:
        engine.save(f"{folder}/{engine.group.rank}")
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_save_into_folders_of_their_own_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2, saves_elsewhere, str(tmp_path)):
        assert f"{tmp_path}/0 on rank 0 and {tmp_path}/1 on rank 1" in said


def saves_while_the_first_rank_is_late(folder: str) -> bool:
    """Rank 0 looks into the folder only when the others have had the time to write."""
    engine = plain_engine()

    def late(*args: Any, **settings: Any) -> Checkpointer:
        time.sleep(0.5 * (settings["rank"] == 0))
        return Checkpointer(*args, **settings)

    own_state.Checkpointer = late  # type: ignore[attr-defined, assignment]
    path = engine.save(folder)
    return bool((path / "manifest.json").exists())


def test_a_rank_that_is_late_removes_nothing_that_others_wrote(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, saves_while_the_first_rank_is_late, str(tmp_path), deadline_s=30) == [True, True]


def plain_engine(**settings: Any) -> Any:
    model = network()
    return paceline.setup(
        model,
        SGD(model.parameters(), lr=0.1),
        loss=F.cross_entropy,
        loader=DataLoader(dataset(), batch_size=6),
        **settings,
    )


def test_values_that_differ_between_ranks_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2, saves_what_differs, str(tmp_path)):
        assert "best differs between rank 0 and rank 1" in said


def test_plain_values_come_back_as_what_they_were() -> None:
    values = {
        "milestones": Counter({30: 1, 80: 2}),
        "betas": (0.9, [1, None, {"a": {1, 2}}]),
        "numbers": {1: True, "x": float("-inf")},
        "array": np.arange(3),
        "number": np.float32(0.5),
        "tensor": torch.ones(2),
        "!": "a key of ours",
    }
    tensors: dict[str, Tensor] = {}
    found = decode(encode(values, "extra/values", tensors), tensors.__getitem__)
    assert torch.equal(found.pop("tensor"), values.pop("tensor"))  # type: ignore[arg-type]
    assert np.array_equal(found.pop("array"), values.pop("array"))  # type: ignore[arg-type]
    assert found == values
    assert isinstance(found["milestones"], Counter)


# Evaluation


def measured() -> list[Any]:
    """By the loss, by measures of every kind, with a random sampler, and on fewer batches than ranks."""
    engine = plain_engine()
    torch.manual_seed(5 + engine.group.rank)
    held_out = DataLoader(dataset(), batch_size=5)
    some = DataLoader(dataset(), batch_size=4, sampler=SubsetRandomSampler(range(7)))

    def measure(batch: Any) -> dict[str, Any]:
        x, y = batch
        output = engine.model(x)
        assert not engine.model.training
        return {
            "mean": F.cross_entropy(output, y),
            "right": output.argmax(1) == y,
            "pair": (float(y.sum()), len(y)),
        }

    model_was_training = engine.model.training
    found = [engine.evaluate(held_out), engine.evaluate(held_out, measure), engine.evaluate(some, measure)["pair"]]
    found.append(engine.evaluate(DataLoader(dataset(), batch_size=SAMPLES), measure)["mean"])
    assert engine.model.training == model_was_training
    return found


def test_an_evaluation_gives_the_same_numbers_alone_and_on_two_ranks(ranks: Ranks) -> None:
    alone = measured()
    model = network()
    x, y = dataset().tensors
    model.eval()
    assert alone[0]["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    assert alone[1]["right"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    assert alone[2] == pytest.approx(6 / 7)  # labels of samples 0 to 6
    for found in ranks(2, measured):
        assert found[0] == pytest.approx(alone[0])
        assert found[1] == pytest.approx(alone[1])
        assert found[2:] == pytest.approx(alone[2:])


def measured_under(plan: str) -> float:
    model = network()
    engine = paceline.setup(
        model, SGD(model.parameters(), lr=0.1), loader=DataLoader(dataset(), batch_size=6), plan=plan
    )
    held_out = DataLoader(dataset(), batch_size=SAMPLES)
    return engine.evaluate(held_out, lambda batch: {"loss": F.cross_entropy(engine.model(batch[0]), batch[1])})["loss"]


def measured_under_splits() -> list[float]:
    return [measured_under("fsdp=2"), measured_under("tp=2")]


def test_a_rank_without_batches_computes_along_where_others_wait_for_it(ranks: Ranks) -> None:
    assert ranks(2, measured_under_splits) == [pytest.approx([measured_under("auto")] * 2, rel=1e-5)] * 2


# Export, fp16, callbacks


def exported(path: str, plan: str) -> float:
    engine = plain_engine(plan=plan)
    for batch in engine.loader:
        loss = engine.step(batch).loss
    engine.export(path)
    return float(loss)


def test_the_exported_model_is_the_trained_one(ranks: Ranks, tmp_path: Path) -> None:
    alone = exported(str(tmp_path / "alone"), "auto")
    assert ranks(2, exported, str(tmp_path / "two"), "fsdp=2") == pytest.approx([alone] * 2, rel=1e-5)
    one, two = load_file(tmp_path / "alone"), load_file(tmp_path / "two")
    network().load_state_dict(two)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "two"]
    assert all(torch.allclose(one[name], two[name], rtol=1e-4) for name in one)
    with raises(RunError, "export.file_exists"):
        exported(str(tmp_path / "alone"), "auto")


def in_fp16(by: str) -> list[Any]:
    """The first updates overflow, until the scale is small enough."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(
        model,
        optimizer,
        loss=lambda o, y: 64 * F.cross_entropy(o, y),
        loader=DataLoader(dataset(), batch_size=6),
        precision="fp16",
    )
    found = []
    for _ in range(3):
        for batch in engine.loader:
            if by == "step":
                result = engine.step(batch)
            else:
                with engine.autocast():
                    loss = 64 * F.cross_entropy(model(batch[0]), batch[1])
                engine.backward(loss)
                result = engine.update()
            found.append([result.problem is None, result.loss])
    assert engine.compute.loss_scale is not None
    return [*found, engine.compute.loss_scale.value]


@pytest.mark.parametrize("by", ["step", "backward"])
def test_fp16_finds_its_loss_scale_and_trains_alike_on_two_ranks(ranks: Ranks, by: str) -> None:
    *alone, scale = in_fp16(by)
    assert alone[0][0] is False
    assert alone[-1][0] is True
    for *found, other in ranks(2, in_fp16, by):
        assert other == scale
        assert [made for made, _ in found] == [made for made, _ in alone]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in alone], rel=0.02)


def test_every_step_and_update_is_told_to_the_trackers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen: list[StepResult] = []
    board = trackers.tensorboard(tmp_path)
    engine = plain_engine(on_step=[seen.append, board])
    for i, (x, y) in enumerate(engine.loader):
        if i % 2:
            engine.backward(F.cross_entropy(engine.model(x), y))
            engine.update()
        else:
            engine.step((x, y))
    assert [result.step for result in seen] == [1, 2, 3, 4]
    assert all(result.samples == 6 and result.grad_norm > 0 for result in seen)
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert logged == [(result.step, pytest.approx(result.loss)) for result in seen]


def test_only_the_first_rank_prints(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    engine = plain_engine()
    engine.print("hello", 1)
    assert capsys.readouterr().out == "hello 1\n"
    assert engine.is_main
