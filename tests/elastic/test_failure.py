"""The rank to blame is found whatever the order in which ranks end."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic.failure import ErrorRecord, RankEnd, hang, killed, lost_device, root_cause
from paceline.errors import CheckpointError, DataError, LoaderProcessError, SyncError, note_xids
from paceline.wire.status import Phase, RankStatus


def end(
    rank: int,
    code: int | None,
    *,
    record: ErrorRecord | None = None,
    alive_at: float = 0.0,
    phase: Phase = "compute",
    stopped: bool = False,
) -> RankEnd:
    status = RankStatus(rank, pid=100 + rank, attempt=0, phase=phase, step=7, changed_ns=0)
    return RankEnd(status, 100 + rank, code, alive_at, record, stack="", stopped=stopped)


def record(rank: int, at: float, *, secondary: bool = False, explained: bool = False) -> ErrorRecord:
    return ErrorRecord(
        rank, "b", 100 + rank, at, "ValueError", f"error of rank {rank}", "its traceback", secondary, explained
    )


def caught(error: BaseException, cause: BaseException | None = None) -> ErrorRecord:
    try:
        raise error from cause
    except BaseException as raised:  # noqa: BLE001 - as the rank does
        return ErrorRecord.of(raised, 0)


@pytest.mark.parametrize(
    ("xids", "what"), [([], ""), ([13], ""), ([79], "lost"), ([31, 48], "memory"), ([94, 94], "memory")]
)
def test_an_xid_of_the_hardware_names_what_has_failed_and_is_shown(xids: list[int], what: str) -> None:
    error = torch.AcceleratorError("CUDA error: unspecified launch failure\nPass TORCH_USE_CUDA_DSA=1.")
    note_xids(error, xids)
    found = caught(error)
    assert found.device == what
    if what:
        shown = lost_device(end(0, 1, record=found))
        assert all(str(xid) in shown for xid in xids)
        assert "\n" not in shown


@given(st.permutations(range(4)), st.permutations([1.0, 2.0, 3.0, 4.0]))
def test_the_first_rank_that_failed_by_itself_is_blamed_in_any_order_of_ends(
    numbers: list[int], times: list[float]
) -> None:
    ends = [end(rank, 1, record=record(rank, at, secondary=rank < 2)) for rank, at in zip(numbers, times, strict=True)]
    own = {rank: at for rank, at in zip(numbers, times, strict=True) if rank >= 2}
    assert root_cause(ends, None).rank == min(own, key=own.__getitem__)


@pytest.mark.parametrize(
    "ends",
    [
        [end(0, 1, record=record(0, at=10.1)), end(1, -signal.SIGKILL, alive_at=10.0)],
        [end(0, -signal.SIGABRT, alive_at=9.9), end(1, 1, record=record(1, at=10.0))],
        [end(0, 1, record=record(0, at=10.0, secondary=True), phase="sync"), end(1, None, stopped=True)],
        [end(rank, 1, record=record(rank, at, secondary=True)) for rank, at in enumerate([3.0, 2.0])],
    ],
    ids=[
        "killed before an error that came after its last sign of life",
        "an abort is only the echo of an error",
        "stopped, when the others only lost patience",
        "the first, where every rank lost a peer",
    ],
)
def test_rank_1_is_blamed(ends: list[RankEnd]) -> None:
    assert root_cause(ends, None).rank == 1


@pytest.mark.parametrize(
    ("oom_kills", "words"),
    [(None, "maybe out of memory"), (0, "from outside"), (2, "use a smaller global_batch")],
)
def test_a_kill_is_explained_as_far_as_the_kernel_tells(oom_kills: int | None, words: str) -> None:
    assert words in str(root_cause([end(0, -signal.SIGKILL)], oom_kills))


def test_of_a_rank_that_is_replaced_it_is_told_that_memory_ran_out_and_no_guess() -> None:
    lost = end(0, -signal.SIGKILL)
    assert "out of memory" in killed(lost, 1)
    assert killed(lost, 0) == killed(lost, None)
    assert "memory" not in killed(lost, 0)


@pytest.mark.parametrize(
    ("cause", "final"),
    [
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (ValueError("label 11"), True),
        (None, True),
    ],
)
def test_what_may_pass_is_worth_another_attempt_also_where_it_explains_itself(
    cause: Exception | None, final: bool
) -> None:
    error = CheckpointError("test.planted", "the checkpoint of step 20 was not written")
    error.__cause__ = cause
    assert root_cause([end(0, 1, record=ErrorRecord.of(error, 0))], None).final is final
    assert not root_cause(
        [
            end(
                0,
                1,
                record=ErrorRecord.of(LoaderProcessError("test.planted", "rank 0: loader process 3 was killed"), 0),
            )
        ],
        None,
    ).final


def test_only_an_error_that_explains_itself_is_final() -> None:
    assert root_cause([end(0, 1, record=record(0, 1.0, explained=True))], None).final
    assert not root_cause([end(0, 1, record=record(0, 1.0))], None).final
    assert not root_cause([end(0, 1, record=record(0, 1.0, explained=True, secondary=True))], None).final


def test_a_hang_names_all_that_wait() -> None:
    ends = [end(0, None, phase="sync"), end(1, None), end(2, None, phase="sync"), end(3, 0, phase="done")]
    text = str(hang([ends[1]], ends, now_ns=60 * 10**9))
    assert "has been in compute of step 7 for 60 s while ranks 0 and 2 wait for it" in text


@pytest.mark.parametrize(
    "error",
    [
        SyncError("test.planted", "rank 0 waited 60 s"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4321"),
        ConnectionResetError("Connection reset by peer"),
    ],
)
def test_a_lost_connection_is_secondary_also_as_a_cause(error: Exception) -> None:
    assert caught(error).secondary
    assert caught(ValueError("no gradient came"), cause=error).secondary


def test_an_error_during_the_handling_of_a_lost_connection_is_not_blamed_on_it() -> None:
    assert not caught(ValueError("label 11")).secondary
    assert not caught(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).secondary


def test_a_record_crosses_the_process_boundary_whole(tmp_path: Path) -> None:
    written = caught(DataError("test.planted", "sample 3: no label — ñ"))
    written.write(tmp_path / "rank-0.error")
    assert ErrorRecord.read(tmp_path / "rank-0.error") == written
    assert (written.pid, written.explained, written.message) == (os.getpid(), True, "sample 3: no label — ñ")
    assert written.time <= time.time()
    assert os.listdir(tmp_path) == ["rank-0.error"]


def test_a_rank_without_a_record_has_none(tmp_path: Path) -> None:
    assert ErrorRecord.read(tmp_path / "rank-0.error") is None
