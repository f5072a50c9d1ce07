"""Run a function of a test on several real ranks: processes that talk over gloo or shared memory, with a deadline.

They are started by `paceline.elastic.run_on_ranks`, as ranks of users are, from a forkserver that has what tests import
as well. A function is named by its file, so it may stand in any test file, which is not a module that a fresh process
could import.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import simulated
from forked import share_forkserver
from leaks import before_the_transport, of_the_transport
from paceline.deferred_compiler import COMPILER
from paceline.elastic.forkserver import wait_for_imports, warm_up
from paceline.elastic.place import RankPlace, on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks as run_rank_function
from paceline.errors import LaunchError, Problem
from paceline.rank_environment import RankEnvironment

Backend = Literal["gloo", "shm", "tcp", "simccl"]
_GRACE_S = 10.0  # for the other ranks to end after one has failed
IMPORTS = (
    "numpy.random",
    "pytest",
    "hypothesis",
    "ranks",
    COMPILER,
    "sympy",
    "torch.export._trace",
    "torch.distributed.pipelining",
    "paceline.comm.tcp",
    "paceline.engine.split_model",
    "paceline.run.parity.check",
    "paceline.sync.compress",
    "paceline.run.own_loop.setup",
    "paceline.job.zoo.datasets",
    "transformers.modeling_utils",
    "transformers.models.gpt2.modeling_gpt2",
)
_LAUNCHERS = {
    "PACELINE_STATUS",
    "PACELINE_ERROR_FILE",
    "PACELINE_LAUNCHER",
    "PACELINE_ATTEMPT",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
}
_environment: dict[str, str] = {}  # in which the forkserver was started


class RankError(AssertionError):
    """A rank raised, died, or did not end in time. The text is the first one's traceback, or each late one's stack.

    `problems` are those of the launch's error, which are the rank's own if it raised a PacelineError.
    """

    def __init__(self, text: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(text)
        self.problems = problems


class Ranks(Protocol):
    """The fixture `ranks`."""

    def __call__(
        self, size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0, backend: Backend = "gloo"
    ) -> list[Any]:
        """Call `function(*args)` on `size` ranks in an initialised group.

        Returns their results in rank order (pickled).
        """
        ...


def run_on_ranks(
    size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0, backend: Backend = "gloo"
) -> list[Any]:
    """Call `function(*args)` on `size` ranks, as `Ranks` says.

    The function must stand at the top level of its file. A rank finds RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE
    in its environment. Over shared memory, a rank fails that keeps a mapping, descriptor or thread of the transport
    after the group has ended.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    return run_in_places(on_this_machine(size), function, args, deadline_s, backend)


def run_joining(size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
    """Call a function on ranks that a launcher has started and that are in no process group yet."""
    return run_in_places(on_this_machine(size), function, args, deadline_s)


def run_in_places(
    places: Sequence[RankPlace],
    function: Callable[..., Any],
    args: Sequence[Any],
    deadline_s: float,
    backend: Backend | None = None,
) -> list[Any]:
    """Call `function(*args)` on a rank in each place, and return the results in their order.

    Args:
        backend: of the process group that they then are in; None leaves joining one to the function, which finds what a
            launcher sets.

    Raises:
        RankError: with the traceback of the rank that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        module, name = function.__module__, function.__qualname__
        arguments = _encoded(tuple(args))
        call = Call(
            function.__code__.co_filename, module, name, arguments, backend, Path(folder), dict(os.environ), sys.path
        )
        try:
            with _in(_environment or dict(os.environ)):
                start_forkserver()
                wait_for_imports()
                results = run_rank_function(
                    be_rank,
                    call,
                    places=places,
                    deadline_s=deadline_s,
                    start_deadline_s=deadline_s,
                    collect_s=_GRACE_S,
                )
        except SystemExit:  # Ctrl-C
            raise KeyboardInterrupt from None
        except LaunchError as error:
            raise RankError(_first_failure(Path(folder), len(places)) or str(error), error.problems) from None
        return [_decoded(result) for result in results]


@dataclass(frozen=True)
class Call:
    """A function and its arguments, for a process that cannot import the module under its name.

    Attributes:
        folder: for the store of the backend, and for failures.
        environment: of the test.
        path: `sys.path` of the test.
    """

    file: str
    module: str
    function: str
    arguments: str
    backend: Backend | None
    folder: Path
    environment: dict[str, str]
    path: list[str]

    def __call__(self) -> Any:
        return getattr(self._module(), self.function)(*_decoded(self.arguments))

    def _module(self) -> ModuleType:
        if self.module.startswith("paceline."):
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        *packages, _ = self.module.split(".")
        for depth in range(len(packages)):
            package = ".".join(packages[: depth + 1])
            sys.modules.setdefault(package, ModuleType(package))
        sys.modules[self.module] = module  # pickle finds the file's classes here
        spec.loader.exec_module(module)
        return module


def be_rank(call: Call) -> str:
    """Call the function on one rank, as an engine that is not paceline's would have started it."""
    import torch
    import torch.distributed as dist

    from paceline.comm import shm, tcp, transport  # noqa: F401 - registers the backends
    from paceline.comm.rendezvous import tell_all
    from paceline.elastic.failure import ErrorRecord

    before_the_transport.update(of_the_transport())
    own = {name: value for name, value in os.environ.items() if name in RankEnvironment.names() - _LAUNCHERS}
    own |= {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "PACELINE_DEVICE") if name in os.environ}
    if call.backend:  # no need of the launcher's rendezvous
        if (listener := own.get("PACELINE_STORE_FD")) is not None:
            os.close(int(listener))
        own = {
            name: own[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
        }
    os.environ.clear()
    os.environ.update({**call.environment, **own})
    sys.path[:] = call.path
    rank, size = int(own["RANK"]), int(own["WORLD_SIZE"])
    try:
        if simulated.load_if_asked():
            torch.accelerator.set_device_index(int(own["LOCAL_RANK"]))
        if call.backend:
            if call.backend == "tcp":  # between ranks of one host it would be shared memory
                transport.host_identity = lambda: f"the host of rank {rank}"
            dist.init_process_group(call.backend, init_method=f"file://{call.folder}/store", rank=rank, world_size=size)
            # Gloo returns when its own side has connected: a rank that ended now would fail one that still connects.
            store = dist.FileStore(f"{call.folder}/connected", size)  # type: ignore[attr-defined]
            tell_all(store, "connected", rank, size, timeout_s=60, value=True)
        result = _encoded(call())
        if dist.is_initialized():
            dist.destroy_process_group()
        if found := of_the_transport():
            raise AssertionError(f"still there after the end of the process group: {sorted(found)}")
    except BaseException as error:
        if not ErrorRecord.of(error, rank).secondary:
            (call.folder / f"failure-{rank}").write_text(traceback.format_exc())
        raise
    return result


def _first_failure(folder: Path, size: int) -> str | None:
    """Traceback of the rank whose function raised first, but for those that only lost another rank."""
    failures = sorted(folder.glob("failure-*"), key=lambda file: file.stat().st_mtime_ns)
    return (
        f"rank {failures[0].name.rpartition('-')[2]} of {size} failed first:\n{failures[0].read_text()}"
        if failures
        else None
    )


def _encoded(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _decoded(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


@contextmanager
def _in(environment: Mapping[str, str]) -> Iterator[None]:
    """Within, the process has the forkserver's environment, so that a test that changes its own needs no new one."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start_forkserver() -> None:
    """Start the process that ranks are forked from, with what tests import already there."""
    _environment.update(os.environ)
    share_forkserver()
    warm_up(*IMPORTS)  # a forkserver that other launches have displaced is started again
