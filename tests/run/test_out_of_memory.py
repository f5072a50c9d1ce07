"""An error for lack of memory is distinguished from others, and records whether another attempt may succeed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.device import Memory, wanted_bytes
from paceline.elastic.failure import ErrorRecord, RankEnd, root_cause
from paceline.errors import LaunchError, PlanError
from paceline.job.job import Job
from paceline.run import out_of_memory
from paceline.run.out_of_memory import add_table, shortage_explained
from paceline.wire.status import RankStatus
from small_jobs import new_run

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")
SHORTAGE = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1 GiB."
)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (SHORTAGE, 20 * MIB),
        (torch.OutOfMemoryError("sim out of memory. Tried to allocate 512 bytes."), 512),
        (torch.OutOfMemoryError("out of memory"), 0),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes."), 4000),
        (MemoryError(), 0),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (ValueError("label 11"), None),
    ],
)
def test_the_errors_of_devices_and_hosts_are_known(error: Exception, wanted: int | None) -> None:
    assert wanted_bytes(error) == wanted


def test_another_error_passes_unchanged() -> None:
    error = ValueError("label 11")
    with pytest.raises(ValueError, match="label 11") as raised, shortage_explained(CPU, lambda: None):
        raise error
    assert raised.value is error


def failure_of(cause: Callable[[], object], device: torch.device = CPU) -> LaunchError:
    """Return the launcher's error for a rank that ran out of memory."""
    with pytest.raises(PlanError) as raised, shortage_explained(device, lambda: None):
        cause()
    status = RankStatus(0, pid=100, attempt=0, phase="compute", step=7, changed_ns=0)
    record = ErrorRecord.of(raised.value, 0)
    return root_cause([RankEnd(status, 100, 1, 0.0, record, stack="", stopped=False)], None)


def wrapped() -> None:
    raise RuntimeError("the user's model failed") from SHORTAGE


def of_device() -> None:
    raise SHORTAGE


def test_an_error_that_a_shortage_caused_is_a_shortage() -> None:
    failure = failure_of(wrapped)
    assert failure.code == "plan.ran_out_of_memory"
    assert failure.fields["wanted_bytes"] == 20 * MIB
    assert failure.fields["on_host"]


@pytest.mark.parametrize(("free", "final"), [(0, True), (-10 * GIB, False)])
def test_only_if_other_processes_hold_the_memory_another_attempt_may_succeed(
    monkeypatch: pytest.MonkeyPatch, free: int, final: bool
) -> None:
    counted = Memory(60 * GIB, 70 * GIB, 78 * GIB, 79 * GIB, 2 * GIB + max(free, 0), 80 * GIB - min(free, 0))
    monkeypatch.setattr(out_of_memory, "memory", lambda device: counted)
    failure = failure_of(of_device, torch.device("cuda"))
    assert failure.final is final
    assert failure.fields["elsewhere_bytes"] == -free
    assert failure.fields["used_bytes"] == 79 * GIB


def test_a_kill_by_the_kernel_shows_the_last_record_of_the_rank_and_other_kills_nothing(tmp_path: Path) -> None:
    job = Job.model_validate(
        {
            "name": "small",
            "model": "mlp",
            "data": {"kind": "synthetic", "samples": 512, "held_out": 0},
            "loss": "cross_entropy",
            "optimizer": "sgd",
            "global_batch": 64,
            "stop": {"steps": 3},
        }
    )
    run = new_run(tmp_path / "run", job)
    use = {"weights_bytes": 4 * MIB, "gradients_bytes": 4 * MIB, "peak_memory_bytes": GIB}
    (run.path / "steps").mkdir(exist_ok=True)
    (run.path / "steps" / "rank-0.jsonl").write_text(json.dumps({"step": 1, "use": use}) + "\n")
    outside, kernel = (
        LaunchError("launch.rank_killed", "rank 0 was killed", out_of_memory=by_kernel, rank=0)
        for by_kernel in (False, True)
    )
    for failure in (outside, kernel):
        add_table(failure, run)
    assert "predicted" not in outside.fields
    assert str(outside) == "rank 0 was killed"
    assert kernel.code == "launch.rank_killed"
    assert kernel.fields["predicted"]["weights"] > 0
    assert "4 MiB" in str(kernel)
