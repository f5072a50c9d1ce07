"""The check that every test gets does see what a test leaves behind."""

import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from leaks import _KINDS, Snapshot, _shared_memory, _used_by_others


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """What this process has. What the machine has changes under the tests of other workers, and the grace is short."""
    monkeypatch.setattr("leaks._GRACE_S", 0.1)
    own = {kind: find for kind, find in _KINDS.items() if kind not in ("shared memory", "control groups")}
    monkeypatch.setattr("leaks._KINDS", own)
    return Snapshot()


def test_a_process_is_seen_and_killed_also_when_its_parent_is_gone(before: Snapshot) -> None:
    orphan = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", orphan], check=True, stdout=subprocess.PIPE).stdout)
    assert before.left_over() == [f"processes: pid {pid} (sleep 60)"]
    psutil.Process(pid).wait(5)


def test_a_thread_is_seen(before: Snapshot) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten", daemon=True)
    thread.start()
    assert before.left_over() == [f"threads: forgotten ({thread.ident})"]
    done.set()
    thread.join()


def test_a_listening_port_is_seen(before: Snapshot) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert before.left_over() == [f"listening ports: 127.0.0.1:{server.getsockname()[1]}"]


def test_shared_memory_is_seen() -> None:
    before = _shared_memory()
    segment = SharedMemory(create=True, size=64)  # stays mapped, by which other workers know that it is not theirs
    try:
        assert segment.name in _shared_memory() - before
    finally:
        segment.close()
        segment.unlink()


def test_a_memory_file_is_seen_while_it_is_open_and_while_it_is_mapped(before: Snapshot) -> None:
    fd = os.memfd_create("paceline-forgotten")
    os.ftruncate(fd, 4096)
    expected = ["memory files: /memfd:paceline-forgotten (deleted)"]
    assert before.left_over() == expected
    mapped = mmap.mmap(fd, 4096)
    os.close(fd)
    assert before.left_over() == expected
    mapped.close()
    assert before.left_over() == []


def test_a_network_namespace_is_seen(before: Snapshot) -> None:
    fd = os.open("/proc/self/ns/net", os.O_RDONLY)
    assert before.left_over() == [f"network namespaces: net:[{os.fstat(fd).st_ino}]"]
    os.close(fd)


def test_a_temporary_file_is_seen(before: Snapshot) -> None:
    folder = Path(tempfile.mkdtemp())
    assert before.left_over() == [f"temporary files: {folder.name}"]
    folder.rmdir()


def test_changed_settings_are_seen_and_put_back(before: Snapshot) -> None:
    folder = os.getcwd()
    os.environ["PACELINE_NEW"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    assert before.left_over() == [
        "environment variable PACELINE_NEW: None became '1'",
        f"current folder: {folder} became /",
        "torch.get_default_dtype: torch.float32 became torch.float64",
    ]
    assert "PACELINE_NEW" not in os.environ
    assert os.getcwd() == folder
    assert torch.get_default_dtype() == torch.float32


def test_a_semaphore_is_whose_process_maps_it_though_it_is_mapped_under_another_name() -> None:
    lock: Any = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{vars(lock)['_semlock'].name.removeprefix('/')}"
    assert _used_by_others(name, ours=set())
    assert not _used_by_others(name, ours={os.getpid()})
