"""A state that one plan saved is taken up by any other.

Each rank gets its part of what there was, of weights and optimizer alike.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.split.layout import Part
from paceline.split.mesh import Mesh
from paceline.state.checkpoint import restore, snapshot
from paceline.state.reader import Loaded, load, load_latest
from refusals import assert_problem, raises
from single_process_mesh import SHAPES, meshes, own_parts, parts_of, random_tensors, save_all

ADAM: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=0.1)  # noqa: E731


class Counting(torch.optim.SGD):
    """Keeps a number that is not a tensor for every parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1
        return super().step(closure)


@dataclass
class Kept:
    """A loader or rule: gives and takes a state."""

    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class KeptRule(Kept):
    """A rule whose replicas never differ."""

    def shared_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()


class Held(nn.Module):
    """What a rank holds of a model, with a buffer on the first stage."""

    def __init__(self, own: dict[str, Tensor], mesh: Mesh) -> None:
        super().__init__()
        for name, tensor in own.items():
            self.register_parameter(name, nn.Parameter(tensor))
        if mesh.place["pp"] == 0:
            self.register_buffer("mean", torch.full((2,), float(mesh.data_rank)))
            self.register_buffer("scratch", torch.full((2,), -1.0), persistent=False)


def rank_of(
    mesh: Mesh, *, seed: int = 0, shapes: set[str] | None = None, optimizer: Callable[..., torch.optim.Optimizer] = ADAM
) -> Any:
    """As much of a rank's engine as a checkpoint sees."""
    parts = {name: part for name, part in parts_of(mesh).items() if shapes is None or name in shapes}
    model = Held(own_parts(random_tensors(seed), parts), mesh)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer(list(model.parameters())),
        loader=Kept(),
        rule=KeptRule(),
        plan=SimpleNamespace(sync="allreduce", compress="none"),
        local_steps=False,
        group=SimpleNamespace(rank=mesh.world.rank, size=mesh.world.size, gather_json=lambda value: [value]),
        settings=SimpleNamespace(seed=1, keeps_base=False),
        device=torch.device("cpu"),
        step_count=0,
        compute=SimpleNamespace(normalization=SimpleNamespace(items_per_sample=None), loss_scale=None),
        updates=0,
        guard=SimpleNamespace(spikes=None),
        average=None,
        copies=[],
        split=SimpleNamespace(mesh=mesh, aliases={"model/head": "model/embedding"}),
        parts=parts,
        extra={},
        named_parameters=lambda: dict(model.named_parameters()),
        named_buffers=lambda: dict(model.named_buffers()),
    )


def train(rank: Any, steps: int) -> None:
    """Some optimizer steps; every rank takes its part of the same gradients."""
    for _ in range(steps):
        gradients = own_parts(random_tensors(100 + rank.step_count), rank.parts)
        for name, parameter in rank.model.named_parameters():
            parameter.grad = gradients[name]
        rank.optimizer.step()
        rank.step_count += 1


def state_of(rank: Any) -> dict[str, Tensor]:
    named: dict[str, Tensor] = dict(rank.model.named_parameters())
    for name, parameter in rank.model.named_parameters():
        named |= {f"{name}.{key}": value for key, value in rank.optimizer.state[parameter].items()}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def saved(
    folder: Path, degrees: dict[str, int], steps: int = 2, optimizer: Callable[..., torch.optim.Optimizer] = ADAM
) -> Loaded:
    """A checkpoint of all ranks of a plan after some steps."""
    ranks = [rank_of(mesh, optimizer=optimizer) for mesh in meshes(**degrees)]
    for rank in ranks:
        rank.loader.state = {"epoch": 1, "step": 7}
        train(rank, steps)
    return load(save_all(folder, steps, [snapshot(rank, {"note": "ours"}) for rank in ranks]), rank=0, world=1)


def together(ranks: list[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Call `function` for all ranks at once, so that they can gather values; exceptions are results."""
    barrier, values = threading.Barrier(len(ranks), timeout=30), [None] * len(ranks)

    def call(rank: Any) -> Any:
        def gather(value: Any) -> list[Any]:
            values[rank.group.rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        rank.group.gather_json = gather
        try:
            return function(rank)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


PLANS: list[dict[str, int]] = [
    {},
    {"dp": 2, "tp": 2},
    {"fsdp": 2, "pp": 2},
    {"dp": 3},
    {"fsdp": 4},
    {"pp": 3},
    {"ep": 2, "tp": 2},
    {"cp": 2, "fsdp": 2},
]


@pytest.mark.parametrize("before", PLANS, ids=str)
def test_what_one_plan_saved_every_other_goes_on_with(tmp_path: Path, before: dict[str, int]) -> None:
    loaded = saved(tmp_path, before)
    whole = rank_of(next(meshes()))
    train(whole, 2)
    expected = state_of(whole)
    train(whole, 1)
    for after in PLANS:
        ranks = [rank_of(mesh, seed=5) for mesh in meshes(**after)]
        assert together(ranks, lambda rank: restore(rank, loaded)) == [{"note": "ours"}] * len(ranks)
        for rank in ranks:
            assert (rank.step_count, rank.loader.state) == (2, {"epoch": 1, "step": 7}), (
                "the place in the data is of all ranks"
            )
            assert_part(rank, expected)
            train(rank, 1)
            assert_part(rank, state_of(whole))


def assert_part(rank: Any, expected: dict[str, Tensor]) -> None:
    state = state_of(rank)
    assert state.keys() == {name for name in expected if name.split(".")[0] in rank.parts}
    for name, tensor in state.items():
        part: Part = rank.parts[name.split(".")[0]]
        wanted = expected[name] if name.endswith(".step") else part.layout.take(expected[name])
        assert torch.equal(tensor, wanted), f"{name} on {rank.split.mesh.place}"


@pytest.mark.parametrize("degrees", [{"dp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}], ids=str)
def test_on_the_same_mesh_every_rank_draws_on_and_keeps_its_buffers(tmp_path: Path, degrees: dict[str, int]) -> None:
    snapshots, expected = [], []
    for mesh in meshes(**degrees):
        rank = rank_of(mesh)
        torch.manual_seed(mesh.world.rank)
        snapshots.append(snapshot(rank, {}))
        expected.append(torch.rand(1))
    loaded = load(save_all(tmp_path, 1, snapshots), rank=0, world=1)
    for mesh in meshes(**degrees):
        rank = rank_of(mesh)
        buffers = {name: buffer.fill_(9.0) for name, buffer in rank.model.named_buffers()}
        rank.group.gather_json = lambda value: [
            {**{f"model/{n}": list(shape) for n, shape in SHAPES.items()}, "buffer/mean": [2]}
        ]
        restore(rank, loaded)
        assert torch.equal(torch.rand(1), expected[mesh.world.rank])
        assert {name: buffer.tolist() for name, buffer in buffers.items()} == (
            {"mean": [mesh.data_rank] * 2, "scratch": [9.0] * 2} if mesh.place["pp"] == 0 else {}
        )


def test_what_an_optimizer_keeps_and_is_no_tensor_moves_as_well(tmp_path: Path) -> None:
    """Under a pipeline no rank knows that of all parameters."""
    loaded = saved(tmp_path, {"pp": 2, "tp": 2}, optimizer=Counting)
    rank = rank_of(next(meshes()), optimizer=Counting)
    restore(rank, loaded)
    assert [rank.optimizer.state[p] for p in rank.model.parameters()] == [{"calls": 2}] * len(SHAPES)


def test_state_that_is_not_divided_like_its_parameter_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def adafactor(p: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(p)

    rank = rank_of(next(meshes(tp=2)), optimizer=adafactor)
    train(rank, 1)
    with raises(
        CheckpointError,
        "checkpoint.state_shape",
        axes=["tp"],
        name="optimizer/embedding/row_var",
        part=[5, 6],
        shape=[5, 1],
    ):
        snapshot(rank, {})
    loaded = saved(tmp_path, {}, optimizer=adafactor)
    restore(rank_of(next(meshes(dp=2)), optimizer=adafactor), loaded)
    with raises(CheckpointError, "checkpoint.state_not_divisible", axes=["tp"]):
        restore(rank_of(next(meshes(tp=2)), optimizer=adafactor), loaded)


def test_of_another_model_every_stage_says_the_same(tmp_path: Path) -> None:
    """No stage knows all names; if only one of them refused, the others would wait for it in the first step."""
    loaded = saved(tmp_path, {"tp": 2})
    before = random_tensors(3)
    ranks = [rank_of(mesh, seed=3, shapes={"embedding", "experts", "scale"}) for mesh in meshes(pp=2)]
    errors = together(ranks, lambda rank: restore(rank, loaded))
    assert {str(error) for error in errors} == {
        "the checkpoint of step 2 belongs to another model: norm is unknown to the model; qkv is unknown to the model"
    }
    for rank in ranks:
        assert all(torch.equal(p, before[name]) for name, p in rank.model.named_parameters()), "nothing was changed"


def test_ranks_check_a_share_of_the_files_each_and_fall_back_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage that one rank finds counts for all: else they would go on from different steps."""
    for steps in (1, 2):
        saved(tmp_path, {"dp": 2, "tp": 2}, steps)
    read: list[str] = []
    digest = hashlib.file_digest

    def noted(file: Any, kind: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", noted)

    def newest(rank: Any) -> int:
        found = load_latest(
            tmp_path,
            rank=rank.group.rank,
            world=rank.group.size,
            report=lambda *_: None,
            gather=lambda value: rank.group.gather_json(value),
        )
        assert found is not None
        return found.step

    ranks = [rank_of(mesh) for mesh in meshes(dp=3)]
    assert together(ranks, newest) == [2, 2, 2]
    assert sorted(read) == [f"rank-{r}.safetensors" for r in range(4)], "every file once"
    for rank in range(4):
        file = tmp_path / f"step-00000002/rank-{rank}.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert together(ranks, newest) == [1, 1, 1]
        file.write_bytes(whole)
    (tmp_path / "step-00000001/manifest.json").write_text("{")
    (tmp_path / "step-00000002/rank-3.safetensors").unlink()
    errors = together(ranks, newest)
    assert len({str(error) for error in errors}) == 1
    assert_problem(errors[0], "checkpoint.none_whole", reasons=re.compile(r"rank-3\.safetensors"))


@pytest.mark.parametrize(
    ("degrees", "sync", "expected"),
    [
        ({"dp": 2}, "allreduce", {"clock": 3, "feedback": [7.0, 7.0]}),
        ({"dp": 4}, "allreduce", {"clock": 3}),
        ({"dp": 2}, "local:4", {}),
    ],
    ids=["same", "another mesh", "another rule"],
)
def test_a_rule_gets_its_tensors_back_on_the_same_mesh_and_nothing_of_another_rules(
    tmp_path: Path, degrees: dict[str, int], sync: str, expected: dict[str, Any]
) -> None:
    ranks = [rank_of(mesh) for mesh in meshes(dp=2)]
    for rank in ranks:
        rank.rule.state = {"clock": 3, "feedback": torch.full((2,), 6.0 + rank.group.rank)}
    loaded = load(save_all(tmp_path, 0, [snapshot(rank, {}) for rank in ranks]), rank=0, world=1)
    reader = [rank_of(mesh) for mesh in meshes(**degrees)][1]
    reader.plan.sync = sync
    told: list[dict[str, Any]] = []
    restore(reader, loaded, lambda event, details: told.append({event: details}))
    assert {
        key: value.tolist() if isinstance(value, Tensor) else value for key, value in reader.rule.state.items()
    } == expected
    assert bool(told) == ("feedback" not in expected)
