"""Faults while a checkpoint is written or stored: older ones stay loadable.

Run as a script, this file is the process that a test kills, limits or lets crash.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import python
from paceline.errors import CheckpointError
from paceline.state.reader import load, load_latest
from paceline.state.shard import MeshCoordinate
from paceline.state.writer import Checkpointer, Snapshot
from refusals import raises
from single_process_mesh import meshes, own_parts, parts_of, random_tensors, save_all

VALUES = 700_000  # float32: three pieces of a shard


def checkpointer(
    folder: Path, *, rank: int = 0, world: int = 1, keep: int = 3, deadline_s: float = 60.0
) -> Checkpointer:
    return Checkpointer(
        folder, rank=rank, world=world, keep=keep, deadline_s=deadline_s, report=lambda event, facts: None
    )


def state(value: float) -> Snapshot:
    return Snapshot({"model/w": torch.full((VALUES,), value)}, {"rng/torch": torch.arange(4)}, {"value": value})


def save(folder: Path, step: int, value: float | None = None, **options: Any) -> None:
    saving = checkpointer(folder, **options)
    saving.save(step, state(float(step) if value is None else value))
    saving.close()


def loaded_value(folder: Path, reports: list[str] | None = None) -> float:
    """The value of the newest whole checkpoint, after a look at every byte of it."""

    def report(event: str, facts: dict[str, Any]) -> None:
        assert reports is not None, f"damaged: {facts}"
        reports.append(f"{facts['path']}: {facts['reason']}")

    loaded = load_latest(folder, rank=0, world=1, report=report)
    assert loaded is not None
    value = float(loaded.values["value"])
    assert (loaded.shared["model/w"] == value).all()
    return value


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    """This file in a process of its own; what it does is named by the first argument."""
    words = [__file__, *map(str, arguments)]
    code = f"import runpy, sys; sys.argv = {words!r}; runpy.run_path({__file__!r}, run_name='__main__')"
    with python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


# A crash while writing


@pytest.mark.parametrize(
    "step", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["the_next_step", "the_same_step_again"]
)
def test_a_kill_at_any_line_of_the_writing_leaves_a_whole_checkpoint(tmp_path: Path, step: int) -> None:
    done = script("kill_after_every_change", tmp_path, step)
    assert done.returncode == 0, done.stderr
    kills, old, new = map(int, done.stdout.split())
    assert kills == old + new
    assert kills > 12, "the crashes are meant to cover the whole of the writing"
    assert old > 0
    assert new > 0


def kill_after_every_change(folder: Path, step: int) -> None:
    """Save `step` in a forked child that dies at the first line after the n-th change on the disk, for every n.

    A death at a line between two changes leaves the same files.
    """
    kills = old = new = 0
    before = folder / "before"
    save(before, 1, value=-1.0)
    folder = folder / "run"
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        child = os.fork()
        if child == 0:
            killer = _killer(folder, kills + 1)
            threading.settrace(killer)
            saving = checkpointer(folder, keep=1)
            saving.save(step, state(5.0))
            sys.settrace(killer)
            saving.close()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = loaded_value(folder)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert found == 5.0
            print(kills, old, new)
            return
        kills, old, new = kills + 1, old + (found == -1.0), new + (found == 5.0)
        if kills % 8 == 0:  # enough to meet each kind of leftover
            save(folder, step, value=6.0, keep=1)
            assert loaded_value(folder) == 6.0, "the run goes on as if nothing had happened"
            assert [path.name for path in folder.iterdir()] == [f"step-{step:08d}"]


def _killer(folder: Path, at_change: int) -> Callable[[FrameType, str, Any], Any]:
    files, changes = _files(folder), 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal files, changes
        # which touches no file
        if "paceline" not in frame.f_code.co_filename or frame.f_code.co_filename.endswith("division.py"):
            return None
        if event == "line" and (now := _files(folder)) != files:
            files, changes = now, changes + 1
            if changes == at_change:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def _files(folder: Path) -> set[tuple[str, int, int, int]]:
    """All files and folders in a folder, with what a change of their names or bytes changes."""
    found = set()
    for path in [folder, *folder.rglob("*")]:
        with suppress(FileNotFoundError):
            about = path.stat()
            found.add((str(path), about.st_ino, about.st_size, about.st_mtime_ns))
    return found


def test_only_rank_0_removes_what_a_crash_left_and_only_that(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".step-00000002.partial").mkdir()
    (tmp_path / ".step-00000002.partial/rank-0.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    checkpointer(tmp_path, rank=1, world=2)
    assert (tmp_path / ".step-00000002.partial").exists()
    checkpointer(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-00000001"]


# Damage on the disk


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated shard": (lambda d: cut(d / "rank-0.safetensors"), "truncated"),
    "missing shard": (lambda d: (d / "rank-0.safetensors").unlink(), "rank-0.safetensors is missing"),
    "truncated manifest": (lambda d: cut(d / "manifest.json"), "truncated"),
    "missing manifest": (lambda d: (d / "manifest.json").unlink(), "cannot be read: No such file"),
    "emptied manifest": (lambda d: os.truncate(d / "manifest.json", 0), "truncated or damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    harm, reason = DAMAGE[damage]
    harm(tmp_path / "step-00000002")
    reports: list[str] = []
    assert loaded_value(tmp_path, reports) == 1.0
    assert len(reports) == 1
    assert reports[0].startswith("step-00000002: ")
    assert reason in reports[0]


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the whole checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1)
    return folder


@pytest.mark.parametrize("file", ["rank-0.safetensors", "manifest.json"])
@settings(max_examples=40)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(saved_once: Path, file: str, where: float, bit: int) -> None:
    path = saved_once / "step-00000001" / file
    whole = path.read_bytes()
    position = int(where * len(whole))
    try:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :])
        with pytest.raises(CheckpointError) as caught:
            load(path.parent, rank=0, world=1)
        assert file in str(caught.value)
    finally:
        path.write_bytes(whole)
    assert loaded_value(saved_once) == 1.0


def test_training_that_falls_back_keeps_what_it_saves_from_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 9)
    cut(tmp_path / "step-00000009/rank-0.safetensors")
    save(tmp_path, 2, keep=1)
    assert loaded_value(tmp_path, []) == 2.0, (
        "a damaged step 9 counts for nothing, also when only one checkpoint is kept"
    )
    save(tmp_path, 9, keep=1)
    assert loaded_value(tmp_path) == 9.0


# No room, no permission


def test_a_full_disk_with_room_for_one_rank_says_that_the_others_need_theirs(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path, world=2)
    (tmp_path / ".step-00000001.partial").mkdir()
    (tmp_path / ".step-00000001.partial/rank-0.safetensors").symlink_to("/dev/full")
    saving.save(1, state(1.0))
    with raises(CheckpointError, "checkpoint.not_written"):
        saving.close()


def test_a_full_disk_is_named_with_what_was_needed_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    saving = checkpointer(tmp_path)
    (tmp_path / ".step-00000002.partial").mkdir()
    (tmp_path / ".step-00000002.partial/rank-0.safetensors").symlink_to("/dev/full")
    saving.save(2, state(2.0))
    with raises(CheckpointError, "checkpoint.not_written", step=2):
        saving.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert loaded_value(tmp_path) == 1.0
    saving.save(3, state(3.0))
    saving.close()
    assert loaded_value(tmp_path) == 3.0, "with room again, the run goes on saving"


def test_a_file_size_limit_is_an_error_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    done = script("save_with_a_limit", tmp_path)
    assert "CheckpointError" in done.stderr
    assert "File too large: rank 0 needs 2,800," in done.stderr
    assert done.returncode == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert loaded_value(tmp_path) == 1.0


def save_with_a_limit(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
    save(folder, 2)


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(CheckpointError, "checkpoint.folder_unusable"):
        checkpointer(tmp_path / "file" / "checkpoints")
    done = script("claim_without_permission", tmp_path)
    assert "CheckpointError" in done.stderr
    assert f"{tmp_path / 'read-only'}: Permission denied" in done.stderr


def claim_without_permission(parent: Path) -> None:
    folder = parent / "read-only"
    folder.mkdir(mode=0o555)
    if os.getuid() == 0:  # for whom permissions do not count
        os.setuid(65534)
    checkpointer(folder)


def test_a_folder_that_vanishes_is_an_error_not_a_hang(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    saving.save(1, state(1.0))
    saving.release()
    with raises(CheckpointError, "checkpoint.not_written", step=1):
        saving.close()


# Ranks that do not deliver


def test_ranks_that_never_deliver_are_named_after_the_deadline(tmp_path: Path) -> None:
    save(tmp_path, 1)
    one, zero = (checkpointer(tmp_path, rank=r, world=4, deadline_s=0.3) for r in (1, 0))
    one.save(2, state(2.0))
    one.close()
    zero.save(2, state(2.0))
    with raises(CheckpointError, "checkpoint.not_written", step=2):
        zero.close()
    assert loaded_value(tmp_path) == 1.0


def test_a_rank_that_fails_ends_the_wait_at_once_with_its_reason(tmp_path: Path) -> None:
    zero, one = (checkpointer(tmp_path, rank=r, world=2, deadline_s=600) for r in (0, 1))
    (tmp_path / ".step-00000002.partial").mkdir()
    (tmp_path / ".step-00000002.partial/rank-1.safetensors").symlink_to("/dev/full")
    shared = {f"model/{i}": torch.ones(300_000) for i in range(2)}
    for saving in (zero, one):
        saving.save(2, Snapshot(shared))
    with raises(CheckpointError, "checkpoint.not_written"):
        zero.close()
    with raises(CheckpointError, "checkpoint.not_written", step=2):
        one.close()
    assert not list(tmp_path.iterdir())


def test_a_divided_state_that_is_not_all_there_is_no_checkpoint(tmp_path: Path) -> None:
    """Every rank wrote what it should, but they do not agree on who holds what.

    Found now, and not when the weights are wanted.
    """
    save(tmp_path, 1)
    ranks = [(mesh, parts_of(mesh)) for mesh in meshes(fsdp=2)]
    layout = ranks[1][1]["qkv"].layout
    ranks[1][1]["qkv"].layout = layout.narrow(0, 1, layout.shape[0])
    snapshots = [
        Snapshot(own_parts(random_tensors(), parts), parts=parts, coordinate=MeshCoordinate.of(mesh))
        for mesh, parts in ranks
    ]
    with raises(CheckpointError, "checkpoint.not_written", step=2):
        save_all(tmp_path, 2, snapshots)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert loaded_value(tmp_path) == 1.0


def test_a_slow_rank_is_waited_for_as_long_as_its_bytes_arrive(tmp_path: Path) -> None:
    zero, one = (checkpointer(tmp_path, rank=r, world=2, deadline_s=2.0) for r in (0, 1))
    zero.save(2, Snapshot({"model/a": torch.ones(3), "model/b": torch.ones(4)}))
    slow = tmp_path / ".step-00000002.partial" / "rank-1.safetensors"
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        if slow.parent.exists():
            with slow.open("ab") as file:
                file.write(b"more")
        time.sleep(0.05)
    one.save(2, Snapshot({"model/a": torch.ones(3), "model/b": torch.ones(4)}))
    one.close()
    zero.close()
    assert load(tmp_path / "step-00000002", rank=1, world=2).shared.keys() == {"model/a", "model/b"}


@pytest.mark.slow
def test_a_rank_that_raises_does_not_linger_for_the_others(tmp_path: Path) -> None:
    done = script("raise_while_saving", tmp_path)
    assert "RuntimeError: the user's bug" in done.stderr
    assert done.returncode == 1


def raise_while_saving(folder: Path) -> None:
    saving = checkpointer(folder, world=2, deadline_s=100_000)
    saving.save(1, state(1.0))
    raise RuntimeError("the user's bug")


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    globals()[what](Path(where), *map(int, rest))
