"""What every test gets.

A check that it left nothing behind, real ranks, and a word on what cannot run on this machine.
"""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing.util
import os
import re
import shutil
import signal
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from forked import keep_environment
from hosts import Hosts, emulating
from leaks import Snapshot, adopt_orphans
from ranks import Ranks, run_joining, run_on_ranks, start_forkserver
from simulated.build import COMPILER, build
from simulated.environment import Simulated
from slurm_cluster import is_installed as slurm_is_installed
from sshd import SSHD

# before torch is imported: models in tests are too small to share among threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)
_PATH = [os.path.dirname(__file__), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_PATH))  # ranks find what tests share

# other tests run beside an example, so that none has a deadline
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.register_profile("slow", deadline=None)
hypothesis.settings.load_profile("quick")

NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "needs_root": ("the tests run as root", lambda: os.geteuid() == 0),
    "needs_iproute2": ("the command `ip` (package iproute2)", lambda: shutil.which("ip") is not None),
    "needs_git": ("the command `git` (package git)", lambda: shutil.which("git") is not None),
    "needs_chromium": (
        "the commands `chromium` and `chromedriver` (packages chromium, chromium-driver)",
        lambda: bool(shutil.which("chromium") and shutil.which("chromedriver")),
    ),
    "needs_sshd": (
        "the programs ssh and sshd (packages openssh-client, openssh-server)",
        lambda: bool(shutil.which("ssh") and SSHD),
    ),
    "needs_mpirun": (
        "the program mpirun of Open MPI (package openmpi-bin)",
        lambda: shutil.which("mpirun") is not None,
    ),
    "needs_compiler": (
        "a C++ compiler and Python's headers (packages g++, python3-dev)",
        lambda: bool(shutil.which(COMPILER)) and Path(sysconfig.get_path("include"), "Python.h").exists(),
    ),
    "needs_arm64_emulation": (
        "a C compiler and an emulator for arm64 (packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)",
        lambda: bool(shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    ),
    "needs_engines": (
        "Ray, SkyPilot, MPICH and kubernetes-validate (`make engines`)",
        lambda: Path(__file__).parent.parent.joinpath("build", "engines", "bin", "ray").exists(),
    ),
    "needs_flower": (
        "Flower (`make engines`)",
        lambda: Path(__file__).parent.parent.joinpath("build", "flower", "bin", "python").exists(),
    ),
    "needs_frameworks": (
        "Lightning, wandb, MLflow, Prometheus' client and OpenTelemetry (`make engines`)",
        lambda: Path(__file__).parent.parent.joinpath("build", "frameworks", "bin", "mlflow").exists(),
    ),
    "needs_slurm": ("root and Slurm (packages slurm-wlm, munge)", slurm_is_installed),
}
NEEDED_BY = {
    "simulated": "needs_compiler",
    "chromium": "needs_chromium",
}  # by fixture, so that no test can forget it
SLOW_S = 900  # for a slow test that names no longer time-out: ten times what such a test takes on a quiet machine
MUST_RUN_ALL = os.environ.get("CI") == "true"


@pytest.fixture(autouse=True)
def _leaves_nothing(_own_temporary_folder: None) -> Iterator[None]:
    """Begin with an empty cache; fail a test that leaves a process, thread, port, file or changed setting behind."""
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    before = Snapshot()
    yield
    if found := before.left_over():
        pytest.fail("the test left something behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def ranks(_seed: None) -> Ranks:
    """`ranks(4, function, *args, deadline_s=60)`.

    Call a function of the test file on 4 real ranks, over gloo or `backend="shm"`.
    """
    return run_on_ranks


@pytest.fixture
def launched(_seed: None) -> Callable[..., list[Any]]:
    """As `ranks`, for a function that joins the run itself, as a launched script does."""
    return run_joining


@pytest.fixture
def hosts(_seed: None) -> Iterator[Hosts]:
    """`hosts(2, rate="1gbit", ranks_per_host=2).run(function, *args)`: ranks on emulated hosts.

    For tests that are needs_root.
    """
    with emulating() as make:
        yield make


@pytest.fixture
def simulated(_seed: None) -> Simulated:
    """`simulated.ranks(2, function, *args, order="random")`: ranks with an accelerator each, over `simccl`.

    `simulated.environment(order="late")` is for commands. The process of pytest itself never has such a device.
    """
    return Simulated(run_on_ranks)


@pytest.fixture
def loader_processes_end() -> Iterator[None]:
    """Fail a test after which processes of a DataLoader live on."""
    yield
    gc.collect()
    for child in multiprocessing.active_children():
        child.join(20)
    assert not multiprocessing.active_children()


@pytest.fixture(scope="session")
def _seed(_own_temporary_folder: None) -> None:
    start_forkserver()


@pytest.fixture(scope="session")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder of this session alone, where whatever stays was left by a test, and a cache of its own."""
    tmp_path_factory.getbasetemp()  # stays where pytest keeps it
    multiprocessing.util.get_temp_dir()  # lives as long as this process
    adopt_orphans()
    folder = tempfile.mkdtemp(prefix="paceline-tests-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # not the user's
        keep_environment()
        yield
    shutil.rmtree(folder, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        hypothesis.settings.load_profile("slow")
    for marker, (what, _) in NEEDS.items():
        config.addinivalue_line(
            "markers", f"{marker}: needs {what}; fails where CI=true and skips elsewhere without it"
        )


def pytest_report_header() -> list[str]:
    absent = [what for what, there in NEEDS.values() if not there()]
    return [f"not installed, so that their tests are skipped: {', '.join(absent)}"] if absent else []


@functools.cache
def shared_fixtures(module: ModuleType) -> set[str]:
    """Names of the fixtures that all tests of a module share."""
    return set(re.findall(r'@pytest\.fixture\([^)]*scope="module"[^)]*\)\s+def (\w+)', inspect.getsource(module)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    in_browser = {item.nodeid.partition("::")[0] for item in items if "chromium" in getattr(item, "fixturenames", ())}
    for item in items:
        # With several workers, one runs all tests that share a module's fixture, so that it is made once. One runs all
        # files with tests in a browser, so that there is one browser.
        file, used = item.nodeid.partition("::")[0], set(getattr(item, "fixturenames", ()))
        if "chromium" in used:
            item.add_marker(pytest.mark.xdist_group("chromium"))
        elif isinstance(item, pytest.Function) and shared_fixtures(item.module) & used:
            item.add_marker(pytest.mark.xdist_group("chromium" if file in in_browser else file))
        for fixture in NEEDED_BY.keys() & used:
            item.add_marker(NEEDED_BY[fixture])
        own = item.get_closest_marker("timeout")
        if item.get_closest_marker("slow") and (own is None or own.args[0] < SLOW_S):
            item.add_marker(pytest.mark.timeout(SLOW_S), append=False)
    items.sort(key=lambda item: item.path.name != "test_tutorials.py")  # the longest tests, so that none is left last
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def pytest_collection_finish(session: pytest.Session) -> None:
    # What is imported by now stays; no collection of garbage need look at its million objects.
    gc.collect()
    gc.freeze()
    # here, where no test's time runs
    compiles = [item for item in session.items if item.get_closest_marker("needs_compiler")]
    if compiles and NEEDS["needs_compiler"][1]():
        with suppress(OSError, RuntimeError):  # told by the tests that need it
            build()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (what, there) in NEEDS.items():
        if item.get_closest_marker(marker) and not there():
            (pytest.fail if MUST_RUN_ALL else pytest.skip)(f"needs {what}")
