"""PyTorch's own suite for the backends of torch.distributed, on gloo and on ours, test by test.

    [WORLD_SIZE=4] python tests/comm/shm/torch_suite.py [--on gloo,shm] [--json FILE] [TEST …]

The suite asks in a hundred places whether its backend is "gloo". So on our ranks everything is as with gloo, but for the one class that
torch makes a gloo group of: its place takes `StandIn`, a `ShmProcessGroup`. Every test thus takes gloo's branch over our transport, and
each rank checks that it has no other group.
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

from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]  # noqa: E402 - after what the suite reads
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend, get_profiling_event  # noqa: E402

from paceline.comm.shm import ShmProcessGroup  # noqa: E402

_GLOO_ONLY = "dist.monitored_barrier refuses every backend but gloo; here every collective names the ranks that did not come"
CANNOT_PASS = {  # what passes on gloo only, and why
    "test_monitored_barrier_failure_order": _GLOO_ONLY,
    "test_monitored_barrier_gloo": _GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": _GLOO_ONLY,
    "test_monitored_barrier_gloo_subgroup": _GLOO_ONLY,
    "test_monitored_barrier_wait_all_ranks": _GLOO_ONLY,
    "test_ddp_logging_data_cpu": "it wants DDP's log to name the backend gloo; the log names shm",
}

_fork_server = multiprocessing.get_context("forkserver")


def main() -> int:
    """Run the suite; the exit code tells whether all ended as `CANNOT_PASS` says."""
    asked = _arguments()
    common_distributed.TIMEOUT_OVERRIDE.clear()  # more than our deadline
    _fork_server.set_forkserver_preload(["torch.testing._internal.distributed.distributed_test", "torch._dynamo", "paceline.comm.shm"])
    forkserver.ensure_running()
    outcomes: dict[str, dict[str, Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        tempfile.tempdir = folder  # where the suite leaves files
        for name in asked.tests or unittest.TestLoader().getTestCaseNames(OnGloo):
            outcomes[name] = {backend: _run(_CASES[backend], name) for backend in asked.on}
            print(f"{name}: " + ", ".join(f"{backend} {o.how} {o.seconds:.1f} s" for backend, o in outcomes[name].items()), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({name: {b: asdict(o) for b, o in by.items()} for name, by in outcomes.items()}, indent=1))
    return _conclude(outcomes)


@dataclass(frozen=True)
class Outcome:
    """How a test ended. `how` is passed, skipped or failed; `why` is the reason of a skip or the ranks' tracebacks."""

    how: str
    why: str
    seconds: float


class OnGloo(TestDistBackend, DistributedTest._DistTestBase):
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
    if getattr(_method, "__unittest_skip_why__", "").startswith("Only MPI supports"):  # all-to-all, which gloo has learned by now
        _method.__unittest_skip__ = False


class OnShm(OnGloo):
    """The suite on our process group, which torch makes instead of gloo's."""

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        setattr(distributed_c10d, "ProcessGroupGloo", StandIn)  # noqa: B010 - an assignment to a type
        setattr(distributed_test, "get_profiling_event", _profiling_event)  # noqa: B010
        super()._run(*args, **kwargs)

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        """What every rank calls before a test and after it."""
        strangers = [group for group in distributed_c10d._world.pg_map if type(group) is not StandIn]
        assert not strangers, f"these groups are not ours: {strangers}"
        super()._barrier(*args, **kwargs)


class StandIn(ShmProcessGroup):
    """Ours, with what torch's Python code asks of gloo's class."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout, "")
        self.options = SimpleNamespace()

    def _set_sequence_number_for_group(self) -> None:
        """What only gloo needs."""


def _profiling_event(title: str, *args: Any, **kwargs: Any) -> Any:
    """Ours under the names of gloo's. Those of torch's C++ backends all say that they are asynchronous; ours say what they are."""
    events = get_profiling_event(title.replace("gloo:", "shm:"), *args, **kwargs)
    for event in events:
        event.name, event.is_async = event.name.replace("shm:", "gloo:"), True
    return events


_CASES: Mapping[str, type[OnGloo]] = {"gloo": OnGloo, "shm": OnShm}


def _rank(target: Callable[..., None], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForkServerProcess:
    return _fork_server.Process(target=_with_environment, name=name, args=(dict(os.environ), tempfile.gettempdir(), target, args, kwargs))


def _with_environment(environment: Mapping[str, str], folder: str, target: Callable[..., None], args: Any, kwargs: Any) -> None:
    os.environ.update(environment)
    os.environ["BACKEND"] = "mpi"  # read from here on only to skip the tests of groups of 2 where there are less than 8 ranks
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
    worse = [name for name, by in outcomes.items() if _is_worse(by)]
    for name in worse:
        print(f"passes on gloo only: {name}: {CANNOT_PASS.get(name) or outcomes[name]['shm'].why}")
    surprises = set(worse) ^ (CANNOT_PASS.keys() & outcomes.keys())
    return 1 if surprises and "shm" in next(iter(outcomes.values())) else 0


def _is_worse(by: Mapping[str, Outcome]) -> bool:
    if by.keys() == _CASES.keys():
        return by["gloo"].how == "passed" != by["shm"].how
    return "shm" in by and by["shm"].how == "failed"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument("--on", type=lambda text: text.split(","), default=list(_CASES))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
