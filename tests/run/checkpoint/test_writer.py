"""What is saved comes back bit for bit, whatever the tensors look like and however many ranks wrote it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.split.layout import Part, ShardLayout
from paceline.split.mesh import Mesh
from paceline.state.manifest import MANIFEST
from paceline.state.reader import load, load_latest
from paceline.state.shard import CODES, MeshCoordinate
from paceline.state.writer import Checkpointer, Snapshot
from paceline.wire.status import GenerationOver, watch_generation
from refusals import raises
from single_process_mesh import meshes, own_parts, parts_of, random_tensors, save_all

Events = list[tuple[str, dict[str, Any]]]
DEADLINE_S = 30.0


def checkpointer(
    folder: Path, *, rank: int = 0, world: int = 1, keep: int = 3, events: Events | None = None
) -> Checkpointer:
    report = (lambda *event: None) if events is None else (lambda *event: events.append(event))
    return Checkpointer(folder, rank=rank, world=world, keep=keep, deadline_s=DEADLINE_S, report=report)


def save(folder: Path, step: int, snapshot: Snapshot, **options: Any) -> Path:
    saving = checkpointer(folder, **options)
    saving.save(step, snapshot)
    saving.close()
    return folder / f"step-{step:08d}"


def no_report(event: str, facts: dict[str, Any]) -> None:
    raise AssertionError(f"{event}: {facts}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    def as_bytes(t: Tensor) -> Tensor:
        return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random bits of any dtype, shape and memory layout.

    NaNs and denormals included; 0 to 4 dimensions, some empty.
    """
    dtype = draw(st.sampled_from(list(CODES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = math.prod(shape) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype == torch.bool:
        content = bytearray(b & 1 for b in content)
    tensor = torch.frombuffer(content, dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    layouts: list[Callable[[Tensor], Tensor]] = [lambda t: t]
    if len(shape) == 4:
        layouts.append(lambda t: t.contiguous(memory_format=torch.channels_last))
    if len(shape) >= 1:
        layouts += [
            lambda t: t.transpose(0, -1),
            lambda t: t[::2],
            lambda t: t[:1].expand(3, *t.shape[1:]) if t.shape[0] else t,
        ]
    return draw(st.sampled_from(layouts))(tensor)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)


@settings(max_examples=60)
@given(
    shared=st.dictionaries(NAMES.map("model/{}".format), tensors(), max_size=6),
    own=st.dictionaries(NAMES.map("rng/{}".format), tensors(), max_size=3),
    copies=st.booleans(),
)
def test_tensors_of_any_dtype_and_layout_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shared: dict[str, Tensor], own: dict[str, Tensor], copies: bool
) -> None:
    saving = checkpointer(folder := tmp_path_factory.mktemp("run"))
    saving.save(1, Snapshot(shared, own), copies=copies)
    saving.close()
    path = folder / "step-00000001"
    loaded = load(path, rank=0, world=1)
    assert loaded.shared.keys() == shared.keys()
    assert loaded.own.keys() == own.keys()
    assert all(same_bits(loaded.shared[n], t) for n, t in shared.items())
    assert all(same_bits(loaded.own[n], t) for n, t in own.items())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=40)
@given(
    values=st.dictionaries(st.text("abc", max_size=3), JSON, max_size=4),
    own_values=st.dictionaries(st.text("abc", max_size=3), JSON, max_size=4),
)
def test_values_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], own_values: dict[str, Any]
) -> None:
    path = save(
        tmp_path_factory.mktemp("run"), 7, Snapshot({}, {}, values, own_values, {"model/head": "model/embedding"})
    )
    loaded = load(path, rank=0, world=1)
    assert (loaded.step, loaded.values, loaded.own_values) == (7, values, [own_values])
    assert loaded.aliases == {"model/head": "model/embedding"}


def test_infinities_in_the_values_do_not_stop_a_checkpoint(tmp_path: Path) -> None:
    loaded = load(save(tmp_path, 1, Snapshot({}, values={"best": math.inf, "loss": math.nan})), rank=0, world=1)
    assert loaded.values["best"] == math.inf
    assert math.isnan(loaded.values["loss"])


def state_of(rank: int) -> Snapshot:
    generator = torch.Generator().manual_seed(5)
    shared = {f"model/{i}": torch.randn(i * 37, generator=generator) for i in range(9)} | {
        "optimizer/0/step": torch.tensor(11.0)
    }
    return Snapshot(shared, {"rng/torch": torch.arange(rank, rank + 8)}, {"epoch": 3}, {"worker": f"of rank {rank}"})


def write_three(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    saving = checkpointer(folder, rank=rank, world=world, keep=2)
    for step in (10, 20, 30):
        saving.save(step, state_of(rank))
        saving.release()
    saving.close()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_processes_of_their_own_write_one_checkpoint_together(tmp_path: Path, world: int) -> None:
    spawned = [
        get_context("fork").Process(target=write_three, args=(tmp_path, rank, world), daemon=True)
        for rank in range(world)
    ]
    for process in spawned:
        process.start()
    for process in spawned:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
    assert {p.name for p in (tmp_path / "step-00000030").iterdir()} == {
        MANIFEST,
        *(f"rank-{r}.safetensors" for r in range(world)),
    }
    for rank in range(world):
        loaded = load_latest(tmp_path, rank=rank, world=world, report=no_report)
        assert loaded is not None
        assert loaded.step == 30
        assert all(same_bits(loaded.shared[n], t) for n, t in state_of(0).shared.items())
        assert same_bits(loaded.own["rng/torch"], state_of(rank).own["rng/torch"])
        assert loaded.own_values == [{"worker": f"of rank {r}"} for r in range(world)]
    other = load_latest(tmp_path, rank=1, world=world + 5, report=no_report)
    assert other is not None
    assert same_bits(other.own["rng/torch"], state_of(0).own["rng/torch"]), (
        "with another number of ranks, rank 0's is what there is"
    )


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Mesh, Part]]:
    """How the ranks of a random plan hold a tensor.

    Divided equally, by sections or unevenly along random dimensions, in random order.
    """
    degrees = {axis: draw(st.integers(1, 3)) for axis in draw(st.permutations(["tp", "fsdp", "dp"]))[:2]}
    cuts = {
        axis: (draw(st.sampled_from(range(len(shape)))), draw(st.booleans()))
        for axis in degrees
        if shape and axis != "dp"
    }
    ranks = []
    for mesh in meshes(**degrees):
        part = Part("w", ShardLayout.whole(shape))
        for axis, (dim, halves) in cuts.items():
            own, of, index = part.layout.shape[dim], mesh.sizes[axis], mesh.place[axis]
            if own % (2 * of) == 0 and halves:
                part.layout = part.layout.divide(dim, index, of, (own // 2, own // 2))
            else:
                part.layout = part.layout.narrow(
                    dim, min(index * -(-own // of), own), min((index + 1) * -(-own // of), own)
                )
            part.sharded.add(axis)
        ranks.append((mesh, part))
    return ranks


@settings(max_examples=25)
@given(data=st.data(), shape=st.lists(st.integers(0, 8), max_size=3).map(tuple))
def test_every_element_comes_back_however_a_tensor_was_divided_and_is_divided_now(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    full = torch.randn(shape)
    before, after = data.draw(divisions(shape)), data.draw(divisions(shape))
    snapshots = [
        Snapshot(
            {"w": part.layout.take(full).clone()},
            parts={"w": part},
            coordinate=MeshCoordinate.of(mesh),
            values={"of": "all"},
        )
        for mesh, part in before
    ]
    loaded = load(save_all(tmp_path_factory.mktemp("run"), 1, snapshots), rank=0, world=1)
    assert same_bits(loaded.shared["w"], full)
    for _, part in after:
        own = torch.full(part.layout.shape, math.nan)
        loaded.shared.fill("w", own, part.layout)
        assert torch.equal(own, part.layout.take(full))


def test_a_divided_tensor_needs_no_rank_to_hold_more_than_its_part(tmp_path: Path) -> None:
    """Its file holds what the rank holds, and no other rank's."""
    full = random_tensors()
    ranks = [(mesh, parts_of(mesh)) for mesh in meshes(fsdp=2, tp=2)]
    path = save_all(
        tmp_path, 1, [Snapshot(own_parts(full, p), parts=p, coordinate=MeshCoordinate.of(m)) for m, p in ranks]
    )
    for mesh, parts in ranks:
        stored = load_file(path / f"rank-{mesh.world.rank}.safetensors")
        assert sum(t.numel() for t in stored.values()) <= sum(part.layout.numel for part in parts.values())


def test_the_checkpoint_holds_what_the_state_was_at_save_though_training_went_on(tmp_path: Path) -> None:
    weights, statistics, position = torch.zeros(1_000_000), torch.zeros(100), {"sample": 5}
    saving = checkpointer(tmp_path)
    saving.save(1, Snapshot({"model/w": weights}, {"buffer/mean": statistics}, {"position": position}))
    statistics.add_(1)  # the forward pass
    position["sample"] = 6
    assert saving.release() >= 0.0
    weights.add_(1)  # the optimizer step
    saving.close()
    loaded = load(tmp_path / "step-00000001", rank=0, world=1)
    assert not loaded.shared["model/w"].any()
    assert not loaded.own["buffer/mean"].any()
    assert loaded.values == {"position": {"sample": 5}}


def test_a_rank_that_changes_a_loaded_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state_of(0))
    load(path, rank=0, world=1).shared["model/5"].zero_()
    assert load(path, rank=0, world=1).shared["model/5"].any()


def test_a_checkpoint_is_completed_beside_training_though_nobody_waits_for_it(tmp_path: Path) -> None:
    written = threading.Event()
    saving = Checkpointer(
        tmp_path, rank=0, world=1, keep=1, deadline_s=DEADLINE_S, report=lambda event, facts: written.set()
    )
    saving.save(1, Snapshot({"model/w": torch.ones(3_000_000)}))
    saving.release()
    assert written.wait(60)
    assert load(tmp_path / "step-00000001", rank=0, world=1).shared["model/w"].all()
    saving.close()


def test_release_does_nothing_when_nothing_is_being_copied(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path)
    assert saving.release() == 0.0
    saving.save(1, state_of(0))
    saving.release()
    assert saving.release() == 0.0
    saving.close()


def test_a_rank_whose_file_went_away_leaves_no_checkpoint(tmp_path: Path) -> None:
    first, second = (checkpointer(tmp_path, rank=rank, world=2) for rank in range(2))
    second.save(3, Snapshot({"weight": torch.ones(4)}))
    second.close()
    [written] = tmp_path.glob(".step-*/rank-1.safetensors")
    written.unlink()
    first.save(3, Snapshot({"weight": torch.ones(4)}))
    with raises(CheckpointError, "checkpoint.not_written"):
        first.close()
    assert list(tmp_path.iterdir()) == []


def test_the_part_of_a_lost_rank_is_waited_for_no_longer_than_its_generation(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path, world=2)
    saving.save(3, Snapshot({"weight": torch.ones(4)}))
    over = threading.Event()
    with watch_generation(over.is_set):
        with ThreadPoolExecutor(1) as pool:
            completed = pool.submit(saving.complete)
            over.set()
            with raises(GenerationOver, "checkpoint.rank_lost"):
                completed.result()
        saving.abandon()
    save(tmp_path, 3, Snapshot({"weight": torch.ones(4)}))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_only_the_newest_are_kept_and_the_staging_buffer_fits_every_size(tmp_path: Path) -> None:
    events: Events = []
    saving = checkpointer(tmp_path, keep=2, events=events)
    for step, size in [(1, 10), (2, 1000), (3, 5), (4, 2000)]:
        saving.save(step, Snapshot({"model/w": torch.full((size,), float(step))}))
    saving.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert load(tmp_path / "step-00000003", 0, 1).shared["model/w"].tolist() == [3.0] * 5
    assert [(name, facts["step"]) for name, facts in events] == [("checkpoint_saved", step) for step in (1, 2, 3, 4)]


def test_a_step_that_is_trained_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, Snapshot({"model/w": torch.zeros(3)}))
    save(tmp_path, 2, Snapshot({"model/w": torch.zeros(3)}))
    save(tmp_path, 1, Snapshot({"model/w": torch.ones(3)}), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"], (
        "a later one is no older one: it stays"
    )
    assert load(tmp_path / "step-00000001", 0, 1).shared["model/w"].all()


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    before = threading.active_count()
    saving = checkpointer(tmp_path)
    for step in range(3):
        saving.save(step, state_of(0))
    saving.close()
    saving.close()
    assert threading.active_count() == before


def test_any_safetensors_reader_can_open_a_shard_and_any_json_reader_the_manifest(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state_of(0))
    assert load_file(path / "rank-0.safetensors").keys() == {*state_of(0).shared, "rng/torch"}
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["step"], manifest["world"], manifest["values"]) == (1, 1, {"epoch": 3})
    piece = {"shard": 0, "key": "model/2", "offset": [0], "shape": [74]}
    assert manifest["tensors"]["model/2"] == {"dtype": "F32", "shape": [74], "pieces": [piece]}


@pytest.mark.parametrize(
    ("snapshot", "code"),
    [
        (Snapshot({"model/w": torch.zeros(2, dtype=torch.complex128)}), "checkpoint.tensor_unsupported"),
        (Snapshot({"model/w": torch.eye(2).to_sparse()}), "checkpoint.tensor_unsupported"),
        (Snapshot({}, values={"step": 1, "lr": torch.tensor(1.0)}), "checkpoint.not_json"),
        (Snapshot({"a": torch.zeros(1)}, {"a": torch.zeros(1)}), "checkpoint.named_twice"),
    ],
    ids=["dtype", "sparse", "values", "twice"],
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(
    tmp_path: Path, snapshot: Snapshot, code: str
) -> None:
    saving = checkpointer(tmp_path)
    with raises(CheckpointError, code):
        saving.save(1, snapshot)
    assert saving.release() == 0.0
    saving.close()
    assert not list(tmp_path.iterdir())
