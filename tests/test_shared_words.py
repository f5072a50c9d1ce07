"""Words of shared memory are published and read in order on each processor, or shared memory is refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import shared_words
from paceline.comm.shm.segment import create
from paceline.errors import ClusterError
from paceline.shared_words import memory_order
from refusals import raises

ON_ARM64 = """
import platform, sys
machine, platform.machine = platform.machine, lambda: "aarch64"
from paceline import shared_words
platform.machine = machine
shared_words.SYS_FUTEX = int(sys.argv[3])  # the kernel is the one of this machine
fences = []
fence, shared_words.fence = shared_words.fence, lambda: fences.append(fence())

import torch, torch.distributed as dist
import paceline.comm.shm

rank = int(sys.argv[1])
dist.init_process_group("shm", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
for numel in (4, 3_000_000):
    tensor = torch.full((numel,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
before = len(fences)
message = torch.arange(1_000_000)
if rank == 0:
    dist.send(message, 1)
else:
    received = torch.empty_like(message)
    dist.recv(received, 0)
    assert torch.equal(received, message)
assert 0 < before < len(fences)
"""


@pytest.mark.needs_compiler  # whose packages contain libatomic
def test_ranks_share_memory_with_the_fences_of_arm64(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ON_ARM64]
    arguments = [str(tmp_path / "store"), str(shared_words.SYS_FUTEX)]
    started = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    errors = [process.communicate(timeout=100)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors


@pytest.mark.needs_compiler  # whose packages contain libatomic
def test_only_processors_with_a_known_order_share_memory() -> None:
    assert memory_order("x86_64").why_not is None
    assert memory_order("aarch64").why_not is None
    assert "riscv64" in (memory_order("riscv64").why_not or "")


def test_arm64_without_the_library_of_the_fence_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", absent)
    assert "apt install libatomic1" in (memory_order("arm64").why_not or "")


def test_no_segment_is_made_where_words_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_words, "_ORDER", memory_order("riscv64"))
    with raises(ClusterError, "memory.unavailable"):
        create(64, "test")
