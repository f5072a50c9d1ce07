"""PyTorch's own suite for the backends of torch.distributed, on gloo and on ours, test by test.

    [WORLD_SIZE=4] python tests/comm/shm/torch_suite.py [--on gloo,shm,tcp] [--json FILE] [TEST …]

The suite asks in a hundred places whether its backend is "gloo". So on our ranks everything is as with gloo, but for
the one class that torch makes a gloo group of: its place takes a stand-in, which is a process group of ours. Every test
thus takes gloo's branch over our transport, and each rank checks that it has no other group.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_DEADLINE_S = 90  # of a test
os.environ.update(BACKEND="gloo", INIT_METHOD="file://", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(_DEADLINE_S))
os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
os.environ.setdefault("WORLD_SIZE", "4")

# ruff: noqa: E402 - imported after what the suite reads
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_group, _world
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend, get_profiling_event

from paceline.comm.shm import ShmProcessGroup
from paceline.comm.tcp import TcpProcessGroup

_GLOO_ONLY = (
    "dist.monitored_barrier refuses every backend but gloo; here every collective names the ranks that did not come"
)
CANNOT_PASS = {  # what passes on gloo only, and why
    "test_monitored_barrier_failure_order": _GLOO_ONLY,
    "test_monitored_barrier_gloo": _GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": _GLOO_ONLY,
    "test_monitored_barrier_gloo_subgroup": _GLOO_ONLY,
    "test_monitored_barrier_wait_all_ranks": _GLOO_ONLY,
    "test_ddp_logging_data_cpu": "it wants DDP's log to name the backend gloo; the log names ours",
}

_fork_server = multiprocessing.get_context("forkserver")


def main() -> int:
    """Run the suite; the exit code tells whether all ended as `CANNOT_PASS` says."""
    asked = _arguments()
    common_distributed.TIMEOUT_OVERRIDE.clear()  # more than our deadline
    _fork_server.set_forkserver_preload(
        ["torch.testing._internal.distributed.distributed_test", "torch._dynamo", "paceline.comm.tcp"]
    )
    forkserver.ensure_running()
    outcomes: dict[str, dict[str, Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        tempfile.tempdir = folder  # where the suite leaves files
        for name in asked.tests or unittest.TestLoader().getTestCaseNames(OnGloo):
            outcomes[name] = {backend: _run(_CASES[backend], name) for backend in asked.on}
            print(
                f"{name}: "
                + ", ".join(f"{backend} {o.how} {o.seconds:.1f} s" for backend, o in outcomes[name].items()),
                flush=True,
            )
    if asked.json:
        asked.json.write_text(
            json.dumps({name: {b: asdict(o) for b, o in by.items()} for name, by in outcomes.items()}, indent=1)
        )
    return _conclude(outcomes)


@dataclass(frozen=True)
class Outcome:
    """How a test ended. `how` is passed, skipped or failed; `why` is the reason of a skip or the ranks' tracebacks."""

    how: str
    why: str
    seconds: float


class OnGloo(TestDistBackend, vars(DistributedTest)["_DistTestBase"]):  # type: ignore[misc]
    """The suite on torch's gloo. Its ranks are forked from a server that has torch imported, and killed at the end."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(_rank)

    def tearDown(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        super().tearDown()


for _name in unittest.TestLoader().getTestCaseNames(OnGloo):
    _method = getattr(OnGloo, _name)
    # all-to-all, which gloo has learned by now
    if getattr(_method, "__unittest_skip_why__", "").startswith("Only MPI supports"):
        _method.__unittest_skip__ = False


class OnOurs(OnGloo):
    """The suite on a process group of ours, which torch makes instead of gloo's."""

    stand_in: type[dist.ProcessGroup]

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        setattr(distributed_c10d, "ProcessGroupGloo", cls.stand_in)  # noqa: B010 - an assignment to a type
        setattr(distributed_test, "get_profiling_event", _profiling_event)  # noqa: B010
        super()._run(*args, **kwargs)

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        """What every rank calls before a test and after it."""
        strangers = [group for group in _world.pg_map if type(group) is not self.stand_in]
        assert not strangers, f"these groups are not ours: {strangers}"
        super()._barrier(*args, **kwargs)


class _AsGloo:
    """What torch's Python code asks of gloo's class."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout, "")  # type: ignore[call-arg]
        self.options = SimpleNamespace()

    def _set_sequence_number_for_group(self) -> None:
        """What only gloo needs."""


class ShmStandIn(_AsGloo, ShmProcessGroup):
    """Over shared memory."""


class TcpStandIn(_AsGloo, TcpProcessGroup):
    """Over TCP, though all ranks are on one host."""


class OnShm(OnOurs):
    """The suite over shared memory."""

    stand_in = ShmStandIn


class OnTcp(OnOurs):
    """The suite over TCP."""

    stand_in = TcpStandIn


def _profiling_event(title: str, *args: Any, **kwargs: Any) -> Any:
    """Ours under the names of gloo's.

    Those of torch's C++ backends all say that they are asynchronous; ours say what they are.
    """
    name = _get_default_group().getBackendName()  # type: ignore[attr-defined]  # of our classes
    events = get_profiling_event(title.replace("gloo:", f"{name}:"), *args, **kwargs)
    for event in events:
        event.name, event.is_async = event.name.replace(f"{name}:", "gloo:"), True
    return events


_CASES: Mapping[str, type[OnGloo]] = {"gloo": OnGloo, "shm": OnShm, "tcp": OnTcp}


def _rank(target: Callable[..., None], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForkServerProcess:
    return _fork_server.Process(
        target=_with_environment, name=name, args=(dict(os.environ), tempfile.gettempdir(), target, args, kwargs)
    )


def _with_environment(
    environment: Mapping[str, str], folder: str, target: Callable[..., None], args: Any, kwargs: Any
) -> None:
    os.environ.update(environment)
    # read from here on only to skip the tests of groups of 2 where there are less than 8 ranks
    os.environ["BACKEND"] = "mpi"
    tempfile.tempdir, distributed_test.INIT_METHOD = folder, environment["INIT_METHOD"]
    target(*args, **kwargs)


def _run(case: type[OnGloo], name: str) -> Outcome:
    result = unittest.TestResult()
    started = time.perf_counter()
    with redirect_stdout(sys.stderr):
        case(name).run(result)
    seconds = time.perf_counter() - started
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1], seconds)
    if wrong := result.errors + result.failures:
        return Outcome("failed", wrong[0][1], seconds)
    return Outcome("passed", "", seconds)


def _conclude(outcomes: Mapping[str, Mapping[str, Outcome]]) -> int:
    for backend in next(iter(outcomes.values())):
        how = Counter(by[backend].how for by in outcomes.values())
        print(f"{backend}: {how['passed']} passed, {how['failed']} failed, {how['skipped']} skipped")
    surprises: set[str] = set()
    for backend in ("shm", "tcp"):
        worse = {name for name, by in outcomes.items() if backend in by and _is_worse(by[backend], by.get("gloo"))}
        for name in sorted(worse):
            print(
                f"passes on gloo and not on {backend}: {name}: {CANNOT_PASS.get(name) or outcomes[name][backend].why}"
            )
        surprises |= worse ^ {name for name in CANNOT_PASS.keys() & outcomes.keys() if backend in outcomes[name]}
    return 1 if surprises else 0


def _is_worse(ours: Outcome, gloo: Outcome | None) -> bool:
    return ours.how == "failed" if gloo is None else gloo.how == "passed" != ours.how


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument("--on", type=lambda text: text.split(","), default=["gloo", "shm"])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
