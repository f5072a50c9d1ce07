"""Loops that compute their own loss, on accelerators: their batches arrive there."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm.backend import join
from paceline.engine.engine import StepResult
from paceline.errors import NonFiniteError
from paceline.job.batch import on_device, pinned, place, split
from paceline.planning.plan import Plan
from paceline.run.build import build_engine
from paceline.run.trackers import LoopTracker
from simulated.environment import Simulated
from small_jobs import small_job


class Pair(NamedTuple):
    """A batch whose parts have names."""

    inputs: Tensor
    labels: Tensor


def samples() -> list[Pair]:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(24, 8, generator=draw)
    return [Pair(row, row.argmax()) for row in inputs]


def as_dict(rows: list[Pair]) -> dict[str, Any]:
    return {
        "inputs": torch.stack([row.inputs for row in rows]),
        "more": [torch.stack([r.labels for r in rows])],
        "n": 8,
    }


def train(take: Callable[[Any], tuple[Tensor, Tensor]], loader: DataLoader[Any], *, alone: bool) -> list[float]:
    """Losses of three steps, by `setup` or in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = None if alone else paceline.setup(model, optimizer, loader=loader)
    losses = []
    for batch in loader if engine is None else engine.loader:
        inputs, labels = take(batch)
        loss = F.cross_entropy(model(inputs), labels)
        if engine is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            loss = engine.backward(loss)
            engine.update()
        losses.append(loss.item())
    if engine is not None:
        engine.close()
    return losses


def of_pairs(*, alone: bool = False) -> list[float]:
    return train(lambda batch: (batch.inputs, batch.labels), DataLoader(samples(), batch_size=8), alone=alone)  # type: ignore[arg-type]


def of_dicts(*, alone: bool = False) -> list[float]:
    loader: DataLoader[Any] = DataLoader(samples(), batch_size=8, collate_fn=as_dict)  # type: ignore[arg-type]
    return train(lambda batch: (batch["inputs"], batch["more"][0]), loader, alone=alone)


@pytest.mark.parametrize("order", ["late", "random"])
def test_batches_of_any_structure_arrive_on_the_device(simulated: Simulated, order: Any) -> None:
    assert simulated.ranks(1, of_pairs, order=order) == [pytest.approx(of_pairs(alone=True), rel=1e-5)]


def test_batches_in_a_dict_arrive_on_the_device(simulated: Simulated) -> None:
    assert simulated.ranks(1, of_dicts) == [pytest.approx(of_dicts(alone=True), rel=1e-5)]


def test_two_ranks_train_as_one_process(simulated: Simulated) -> None:
    assert simulated.ranks(2, of_pairs) == [pytest.approx(of_pairs(alone=True), rel=1e-5)] * 2


class Watched(NamedTuple):
    """What a rank saw.

    Attributes:
        losses: finite losses that `on_step` got.
        computed: number of batches before the error.
        code: code of the error.
    """

    losses: list[float]
    computed: int
    code: str


def until_an_error(way: str, bad: int) -> Watched:
    """Train until the NaN in batch `bad` raises an error; only the first rank reads every step's numbers."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
    inputs[bad * 8] = math.nan
    loader = DataLoader(TensorDataset(inputs, torch.arange(24) % 8), batch_size=8)
    loss: Any = F.cross_entropy if way == "step" else None
    seen: list[float] = []

    def look(result: StepResult) -> None:
        if engine.is_main:
            seen.append(result.loss)

    engine = paceline.setup(model, optimizer, loss=loss, loader=loader, on_step=[look])
    computed, code = 0, ""
    try:
        for batch in engine.loader:
            computed += 1
            if way == "step":
                engine.step(batch)
            else:
                engine.backward(F.cross_entropy(model(batch[0]), batch[1]))
                engine.update() if way == "update" else optimizer.step()
                optimizer.zero_grad()
        engine.close()
    except NonFiniteError as error:
        code = error.code
    return Watched([value for value in seen if math.isfinite(value)], computed, code)


@pytest.mark.parametrize("way", ["step", "update", "optimizer"])
@pytest.mark.parametrize("bad", [1, 2])
def test_a_loss_that_is_not_finite_ends_all_ranks_at_one_step(simulated: Simulated, way: str, bad: int) -> None:
    first, second = (Watched(*watched) for watched in simulated.ranks(2, until_an_error, way, bad))
    # the next step is queued before the numbers are checked; `close` checks the numbers of the last step
    assert (first.computed, first.code) == (second.computed, second.code) == (3, "nonfinite.stopped")
    assert len(first.losses) == (0 if way == "optimizer" else bad)


ENDS_WITH_NAN = """
import math, torch, torch.nn.functional as F, paceline
from torch.utils.data import DataLoader, TensorDataset

def train():
    model = torch.nn.Linear(2, 2)
    inputs = torch.ones(6, 2)
    inputs[4] = math.nan
    loader = DataLoader(TensorDataset(inputs, torch.zeros(6, dtype=torch.int64)), batch_size=2)
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=loader)
    for batch in engine.loader:
        engine.step(batch)
    print(engine.device.type, "end of the loop")

train()
"""


def test_a_script_whose_last_step_is_not_finite_fails(simulated: Simulated, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_WITH_NAN)
    environment = {**os.environ, **simulated.environment(devices=1)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "sim end of the loop\n"
    assert ended.returncode == 1, ended.stderr


def numbers_of_a_loss() -> list[float]:
    """Losses that a loop computes on the host, and changes afterwards; and the copy of a result."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    loader: DataLoader[Any] = DataLoader(samples(), batch_size=8)  # type: ignore[arg-type]
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
    found: list[float] = []
    for number, batch in enumerate(engine.loader):
        loss = F.cross_entropy(model(batch.inputs), batch.labels)
        if number == 0:
            loss = loss.cpu()
        found.append(loss.item())
        engine.backward(loss)
        loss.data.mul_(2)
        result = engine.update()
        found.append(pickle.loads(pickle.dumps(result)).loss if number == 2 else result.loss)
    engine.close()
    return found


def test_a_result_has_the_loss_that_was_passed(simulated: Simulated) -> None:
    ((*found,),) = simulated.ranks(1, numbers_of_a_loss)
    assert found[1::2] == pytest.approx(found[::2], rel=1e-6)


class Noting:
    """A tracker that keeps the numbers of the logged steps."""

    id = "noting"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps += [step] if all(map(math.isfinite, values.values())) else []

    def close(self, status: str) -> None:
        self.steps.append(-1)


def logged() -> list[int]:
    """Steps that a tracker got before it was closed, and the number of waits that left the device idle."""
    torch.manual_seed(0)
    model, tracker, module = nn.Linear(8, 8), Noting(), torch.get_device_module("sim")
    log = LoopTracker("noting", tracker)
    loader: DataLoader[Any] = DataLoader(samples(), batch_size=1)  # type: ignore[arg-type]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(model, sgd, loss=F.cross_entropy, loader=loader, on_step=[log])
    idle = 0
    for number, batch in enumerate(engine.loader):
        if number == 17:
            module.reset_counts()
        engine.step(batch)
        idle = module.counts()["idle_waits"]
    log.close()
    engine.close()
    return [*tracker.steps, idle]


def test_a_tracker_gets_every_step_and_makes_none_wait(simulated: Simulated) -> None:
    assert simulated.ranks(1, logged) == [[*range(1, 25), -1, 0]]


def kinds_of_steps(name: str) -> list[bool]:
    """Whether a job's optimizer is fused, and whether its state is on the device."""
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    run_job = small_job(optimizer={"name": name, "lr": 0.1, **momentum})
    data = run_job.data.build(input_shape=None, seed=0)
    group = join()
    engine = build_engine(run_job, Plan(dp=group.size), run_job.model.build(), data, group)
    for _, batch in zip(range(2), engine.loader, strict=False):
        engine.step(batch)
    state = [kept for held in engine.optimizer.state.values() for kept in held.values() if kept.dim()]
    engine.close()
    return [bool(engine.optimizer.defaults.get("fused")), {kept.device.type for kept in state} == {engine.device.type}]


@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("Adagrad", True), ("RMSprop", False), ("sgd", False)])
def test_jobs_on_accelerators_take_the_fused_step_where_torch_has_one(
    simulated: Simulated, name: str, fused: bool
) -> None:
    assert simulated.ranks(1, kinds_of_steps, name) == [[fused, True]]


def copies_of_a_batch() -> list[int]:
    """Number of copies to the device for each form of pinned batch, after a check of the copied values."""
    device, module = torch.device("sim", 0), torch.get_device_module("sim")
    inputs, labels = torch.randn(3, 5), torch.arange(3)
    batches: list[Any] = [(inputs, labels), {"x": inputs, "y": labels, "z": labels[:0]}, Pair(inputs, labels), inputs]
    found = []
    for batch in batches:
        for move in (on_device, partial(place, dtype=None, channels_last=False)):
            if batch is inputs and move is not on_device:
                continue
            module.reset_counts()
            moved: Any = move(pinned(batch), device)
            found.append(module.counts()["copies_to_device"])
            assert module.counts()["host_waits"] == 0
            for there, here in zip(tree_leaves(moved), tree_leaves(batch), strict=True):
                assert (there.dtype, there.device.type) == (here.dtype, "sim")
                assert torch.equal(there.cpu(), here)
    first, second = on_device(pinned((inputs, inputs)), device)
    weight = torch.ones((), device=device, requires_grad=True)
    products = weight * second
    first.add_(1)  # autograd must not take this for a change of `second`
    products.sum().backward()
    shares = list(split(pinned((inputs, labels)), 3))
    assert torch.equal(on_device(shares[1], device)[0].cpu(), inputs[1:2])
    return found


def test_a_pinned_batch_is_copied_to_the_device_at_once(simulated: Simulated) -> None:
    assert simulated.ranks(1, copies_of_a_batch) == [[1, 1, 1, 1, 2, 2, 1]]
