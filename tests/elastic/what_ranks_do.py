"""Functions for ranks to run in tests/elastic/test_local.py.

Without torch where it is not the point: ranks then start in no time.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from paceline.errors import JobError, SyncError, report_failure
from paceline.wire.status import Phase, StatusBoard

RANK = int(os.environ.get("RANK", 0))


def tell(arguments: list[str]) -> None:
    """Write what this rank was given: its environment and its cores."""
    told = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "torch": "torch" in sys.modules,
    }
    Path(arguments[0], f"rank-{RANK}.json").write_text(json.dumps(told))


def raise_on_rank_1(_: list[str]) -> None:
    if RANK == 1:
        raise ValueError("expected labels in 0..9, found 11")
    time.sleep(60)


def raise_a_job_error(arguments: list[str]) -> None:
    Path(arguments[0], f"attempt-{os.environ['PACELINE_ATTEMPT']}-{RANK}").touch()
    raise JobError("test.planted", "the data has 0 samples: name another folder")


def raise_while_a_thread_runs(_: list[str]) -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("first")


def lose_rank_1_in_an_all_reduce(_: list[str]) -> None:
    import torch

    from paceline.comm.backend import joined

    with joined(deadline_s=60) as group:
        group.all_reduce(torch.ones(4))
        if RANK == 1:
            raise ValueError("bad sample")
        group.all_reduce(torch.ones(4))


def list_listeners(arguments: list[str]) -> None:
    """Write the addresses that this rank listens on while all are joined."""
    import psutil

    from paceline.comm.backend import joined

    with joined(deadline_s=60) as group:
        group.barrier()
        connections = psutil.Process().net_connections("inet")
        addresses = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
        Path(arguments[0], f"rank-{RANK}.json").write_text(json.dumps(addresses))
        group.barrier()


def leave_with_code_3(_: list[str]) -> None:
    if RANK == 1:
        sys.exit(3)
    time.sleep(60)


def vanish_with_code_5(_: list[str]) -> None:
    os._exit(5)


def leave_early(_: list[str]) -> None:
    if RANK == 1:
        sys.exit()
    time.sleep(0.5)
    raise ConnectionError("Connection closed by peer")


def be_killed_on_rank_1(_: list[str]) -> None:
    StatusBoard.of_this_rank().mark("compute", 37)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fail_and_never_leave(_: list[str]) -> None:
    """Lose the link to the other host, and then wait for it in vain while the groups are left."""
    StatusBoard.of_this_rank().mark("sync", 37)
    waiting = f"rank {RANK} (host a{RANK}) for rank {1 - RANK} (host a{1 - RANK}): no answer"
    report_failure(SyncError("test.planted", "all-reduce: timeout after 1.0 s, waiting: {waiting}", waiting=waiting))
    time.sleep(60)


def crash(_: list[str]) -> None:
    ctypes.string_at(0)


def stand_still(arguments: list[str]) -> None:
    """Be in the phase that the arguments name for this rank, and go on no further.

    `stopped` is a compute phase that gets SIGSTOP.
    """
    phase: Phase | str = arguments[RANK]
    if phase == "stopped":
        StatusBoard.of_this_rank().mark("compute", 37)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif phase != "starting":
        StatusBoard.of_this_rank().mark(phase, 37)  # type: ignore[arg-type]
    time.sleep(60)


def stand_still_beside_threads(_: list[str]) -> None:
    """Stand still while other threads have so much in their stacks that it takes a while to write these."""

    def descend(frames: int) -> None:
        descend(frames - 1) if frames else time.sleep(60)

    for _thread in range(60):
        threading.Thread(target=descend, args=(80,), daemon=True).start()
    StatusBoard.of_this_rank().mark("compute", 37)
    time.sleep(60)


def save_on_sigterm(arguments: list[str]) -> None:
    """What a rank that trains does: end well on SIGTERM, after it has saved."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    Path(arguments[0], f"ready-{RANK}").write_text(str(os.getpid()))
    asked.wait(60)
    Path(arguments[0], f"saved-{RANK}").touch()


def meet_after_sigterm(arguments: list[str]) -> None:
    """What a rank does that needs the others to save: meet them on the network of their hosts."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    at = (os.environ["MASTER_ADDR"], 4711)
    server = socket.create_server(at) if RANK == 0 else None
    Path(arguments[0], f"ready-{RANK}").write_text(str(os.getpid()))
    asked.wait(60)
    time.sleep(1)  # whatever else dies with the launcher has died
    if server is not None:
        server.settimeout(20)
        server.accept()
    else:
        socket.create_connection(at, timeout=20)
    Path(arguments[0], f"saved-{RANK}").touch()


def ignore_sigterm(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(arguments[0], f"ready-{RANK}").write_text(str(os.getpid()))
    time.sleep(60)


def never_be_ready(arguments: list[str]) -> None:
    Path(arguments[0], f"ready-{RANK}").write_text(str(os.getpid()))
    time.sleep(60)


def fail_in_the_first_attempt(arguments: list[str]) -> None:
    attempt = os.environ["PACELINE_ATTEMPT"]
    Path(arguments[0], f"store-{attempt}").write_text(os.environ["PACELINE_STORE"])
    if attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def leave_a_child_behind(arguments: list[str]) -> None:
    child = subprocess.Popen(["sleep", "60"])
    Path(arguments[0], "child").write_text(str(child.pid))


def tell_of_the_fork(arguments: list[str]) -> None:
    """Write what an interpreter of its own would have of its own, and leave a file unflushed."""
    import random
    import resource

    import numpy as np
    import torch

    before = len(os.listdir("/proc/self/task"))
    large = torch.ones(512, 512)
    assert bool((large @ large == 512).all())
    descriptors = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    told = {
        "parent": os.getppid(),
        "on_sigterm": signal.getsignal(signal.SIGTERM),
        "threads": torch.get_num_threads(),
        "threads_of_a_product": len(os.listdir("/proc/self/task")) - before + 1,
        "random": [random.random(), np.random.rand()],
        "torch_seed": torch.initial_seed(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "folder": os.getcwd(),
        "path": sys.path,
        "session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "sockets": sum(name.rpartition("/")[2].startswith("socket:") for name in descriptors),
        "title": Path("/proc/self/cmdline").read_text().rstrip("\0"),
    }
    file = open(Path(arguments[0], f"fork-{os.environ['PACELINE_ATTEMPT']}-{RANK}.json"), "w")  # noqa: SIM115 - not to be closed
    json.dump(told, file)
    globals()["kept"] = file  # as code of users may keep a log


def tell_of_the_fork_and_fail_once(arguments: list[str]) -> None:
    tell_of_the_fork(arguments)
    globals()["kept"].close()
    if os.environ["PACELINE_ATTEMPT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def kill_the_parent(_: list[str]) -> None:
    if os.environ["RANK"] == "1":  # the last one to be forked
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
