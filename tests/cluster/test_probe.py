"""Measuring this machine.

Wrong here: a figure of the caches instead of the memory, or a broken torch that breaks who asks.
"""

from pathlib import Path

import pytest

from paceline.cluster.discover import discover
from paceline.cluster.probe import Probe, cache_bytes, copy_bytes
from paceline.errors import ClusterError
from refusals import raises

HOST = discover().hosts[0].model_copy(update={"gpus": ()})


def processor(root: Path, caches: dict[str, tuple[str, str, str]]) -> Path:
    """A processor of two cores whose caches are {index: (level, type, size)}; those of level 3 are shared."""
    for core in range(2):
        for index, (level, kind, size) in caches.items():
            folder = root / f"sys/devices/system/cpu/cpu{core}/cache/{index}"
            folder.mkdir(parents=True)
            shared = "0-1" if level == "3" else str(core)
            for name, text in {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}.items():
                (folder / name).write_text(f"{text}\n")
    return root


CACHES = {"index0": ("1", "Data", "32K"), "index1": ("1", "Instruction", "64K"), "index2": ("2", "Unified", "1024K")}
SHARED = CACHES | {"index3": ("3", "Unified", "524288K")}


def test_a_cache_that_cores_share_counts_once_and_instructions_not_at_all(tmp_path: Path) -> None:
    assert cache_bytes(processor(tmp_path, SHARED)) == {1: 2 * 32 * 2**10, 2: 2 * 2**20, 3: 512 * 2**20}


def test_a_copy_is_much_larger_than_the_largest_caches_and_fits_into_memory(tmp_path: Path) -> None:
    assert copy_bytes(2**40, processor(tmp_path, SHARED)) == 4 * 512 * 2**20
    assert copy_bytes(2**32, tmp_path) == 2**29
    assert copy_bytes(2**40, tmp_path / "hidden") == 2**26
    assert cache_bytes(tmp_path / "hidden") == {}


@pytest.mark.slow
def test_this_machine_is_measured_in_every_way_that_it_can_compute() -> None:
    with Probe(HOST) as probe:
        torch = probe.torch()
        speeds = list(probe.speeds())
    assert torch["version"].startswith("2.")
    dtypes = ["fp32", "bf16"] if HOST.cpu_bf16 else ["fp32"]
    threads = sorted({HOST.physical_cores, 1}, reverse=True)
    assert [(s.what, s.dtype, s.threads) for s in speeds] == [
        (what, dtype, number)
        for number in threads
        for what, dtype in [*(("matmul", d) for d in dtypes), ("copy", "fp32")]
    ]
    assert all(1e8 < (s.value or 0) < 1e15 for s in speeds)
    assert {s.why_not for s in speeds} == {None}


def test_what_cannot_be_measured_says_why_and_the_rest_goes_on() -> None:
    gpu = {"index": 99, "name": "absent", "memory_bytes": 2**30}
    host = discover().hosts[0].model_validate({"name": "host", "cores": 1, "memory_bytes": 2**30, "gpus": (gpu,)})
    with Probe(host) as probe:
        probe.torch()
        speeds = list(probe.speeds())
    assert [(s.what, s.device, s.value is None, s.why_not is None) for s in speeds] == [
        ("matmul", "cpu", False, True),
        ("copy", "cpu", False, True),
        ("matmul", "cuda:99", True, False),
        ("copy", "cuda:99", True, False),
    ]


def test_a_torch_that_cannot_be_imported_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Probe(HOST) as probe,
        raises(ClusterError, "cluster.probe_failed", code=1, task="import torch"),
    ):
        probe.torch()


def test_a_torch_that_crashes_or_hangs_ends_its_own_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 4)")
    with Probe(HOST) as probe, raises(ClusterError, "cluster.probe_failed", code=-4, task="import torch"):
        probe.torch()
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    with Probe(HOST, deadline_s=0.5) as probe, raises(ClusterError, "cluster.probe_failed", code=-9):
        probe.torch()
