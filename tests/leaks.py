"""What a test may leave behind: nothing.

Each kind of left-over is one small function that names those there are now.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from forked import template_pids
from paceline.cluster.cgroup import PREFIX, place_of_group, processes_of
from paceline.elastic.forkserver import shared_pids
from paceline.errors import ClusterError

_GRACE_S = 3.0  # for threads and processes that are about to end
_SEGMENT_PREFIXES = ("paceline", "torch_", "psm_", "sem.")  # ours, torch's, Python's
_MEMORY_FILES = ("/memfd:", "anon_inode:[pidfd]", "pidfd:")
_PR_SET_CHILD_SUBREAPER = 36
_KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
_ENVIRONMENT_OF_OTHERS = {  # set by whoever imports or runs them, once
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "TRITON_CACHE_DIR",
}
of_session: set[int] = set()  # processes that stay for the whole session, with all that they start
_TORCH_SETTINGS = {  # what reads it: what sets it
    "get_default_dtype": "set_default_dtype",
    "get_num_threads": "set_num_threads",
    "is_grad_enabled": "set_grad_enabled",
    "are_deterministic_algorithms_enabled": "use_deterministic_algorithms",
}


def adopt_orphans() -> None:
    """Have processes whose parent died become children of this one, where `children` sees them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource_tracker.ensure_running()  # so that it has its command line long before it is looked for


class Snapshot:
    """What there was before a test."""

    def __init__(self) -> None:
        self.pids = {child.pid for child in _descendants()}
        self.named = {kind: find() for kind, find in _KINDS.items()}
        _seen_segments.update(self.named.get("shared memory", ()))  # not looked up again for each test
        self.environment = _environment()
        self.folder = os.getcwd()
        self.torch = _torch_settings()

    def left_over(self) -> list[str]:
        """What is there now and was not before, in words. Left-over processes are killed, and settings are put back."""
        found = [f"{kind}: {', '.join(names)}" for kind, names in self._settled().items() if names]
        found += self._settings()
        if found:
            for child in _descendants():
                if child.pid not in self.pids:
                    child.kill()
        return found

    def _settled(self) -> dict[str, list[str]]:
        """The new names of each kind that stay through a grace for what is about to end.

        A name that comes during the grace belongs to somebody else, such as another worker of the test run.
        """
        until = time.monotonic() + _GRACE_S
        _reap()
        new = {kind: find() - self.named[kind] for kind, find in _KINDS.items()}
        while any(new.values()) and time.monotonic() < until:
            time.sleep(0.02)
            _reap()
            new = {kind: names & _KINDS[kind]() if names else names for kind, names in new.items()}
        return {kind: sorted(names) for kind, names in new.items()}

    def _settings(self) -> Iterator[str]:
        environment = _environment()
        for name in sorted({name for name, _ in environment.items() ^ self.environment.items()}):
            yield f"environment variable {name}: {self.environment.get(name)!r} became {environment.get(name)!r}"
            os.environ.pop(name, None)
        os.environ.update(self.environment)
        if os.getcwd() != self.folder:
            yield f"current folder: {self.folder} became {os.getcwd()}"
            os.chdir(self.folder)
        yield from self._settings_of_torch()

    def _settings_of_torch(self) -> Iterator[str]:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            yield "an initialised process group"
            torch.distributed.destroy_process_group()
        now = _torch_settings()
        for name, before in self.torch.items():
            if now[name] != before:
                yield f"torch.{name}: {before} became {now[name]}"
                getattr(torch, _TORCH_SETTINGS[name])(before)


def _children() -> set[str]:
    named = set()
    for child in _descendants():
        with suppress(psutil.NoSuchProcess):
            named.add(f"pid {child.pid} ({' '.join(child.cmdline())[:100] or child.name()})")
    return named


def _descendants() -> list[psutil.Process]:
    """Living processes that this one started, or adopted.

    Python's resource tracker, the forkservers and what commands are forked from belong to the whole session, and stay.
    """
    living = []
    for child in _children_of(os.getpid(), recursive=True):
        with suppress(psutil.NoSuchProcess):
            stays = child.pid in (*shared_pids(), *template_pids()) or any(
                "resource_tracker" in word for word in child.cmdline()
            )
            if child.status() != psutil.STATUS_ZOMBIE and not stays:
                living.append(child)
    return living


def _children_of(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """Children of a process, as psutil has them, but without looking at all processes of the machine."""
    if not _KERNEL_LISTS_CHILDREN:
        return [child for child in psutil.Process(pid).children(recursive) if not _is_of_session(child)]
    found = []
    for child in _listed_children(pid):
        if child in of_session:
            continue
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(child))
            found += _children_of(child, recursive=True) if recursive else []
    return found


def _is_of_session(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return not of_session.isdisjoint([process.pid, *(parent.pid for parent in process.parents())])
    return False


def _listed_children(pid: int) -> list[int]:
    """Children by the kernel's lists, which may leave one out while another one of them ends: until two agree."""
    before, now = None, list[int]()
    while now != before:
        before, now = now, []
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    now += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return now


def _threads() -> set[str]:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _listening() -> set[str]:
    """Own sockets that listen, each asked itself: the kernel's list has those of all processes, and is slow to read."""
    addresses = set()
    for fd in _entries(Path("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as own:
                    if own.family != socket.AF_UNIX and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        addresses.add("{}:{}".format(*own.getsockname()[:2]))
    return addresses


def _shared_memory() -> set[str]:
    """Segments in /dev/shm, without those of processes that are not ours: other users of the machine have some, too."""
    names = {name for name in _entries(Path("/dev/shm")) if name.startswith(_SEGMENT_PREFIXES)}
    new = names - _seen_segments
    if new:
        ours = {os.getpid(), *(child.pid for child in _children_of(os.getpid(), recursive=True))}
        _seen_segments.update(name for name in new if _used_by_others(name, ours))
    return names - _seen_segments


def _used_by_others(segment: str, ours: set[int]) -> bool:
    """True if another process maps the segment. By inode: a semaphore is mapped before it gets its name."""
    try:
        inode = str(os.stat(f"/dev/shm/{segment}").st_ino)
    except FileNotFoundError:
        return True
    for pid in set(psutil.pids()) - ours:
        with suppress(OSError):
            mapped = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
            if any(len(fields) > 5 and fields[4] == inode and fields[5].startswith("/dev/shm/") for fields in mapped):
                return True
    return False


def of_the_transport() -> Counter[str]:
    """What the transports of our own have in this process: mappings, descriptors and threads.

    None of it lies in /dev/shm.

    What a rank had when it began, to watch its launcher, is `before_the_transport`.
    """
    gc.collect()  # a traceback that a test has looked at may hold a tensor in a cycle
    threads = [thread.name for thread in threading.enumerate() if thread.name in ("paceline-shm", "paceline-tcp")]
    return Counter([*_mapped_memory_files(), *_open(_MEMORY_FILES), *threads]) - before_the_transport


def _memory_files() -> set[str]:
    """Mapped memory that has no name in the file system (memfd), and open descriptors of such and of processes."""
    return {*_mapped_memory_files(), *_open(_MEMORY_FILES)}


def _network_namespaces() -> set[str]:
    """Those that this process holds; one without a process or a holder does not exist."""
    return set(_open(("net:",)))


def _mapped_memory_files() -> set[str]:
    maps = Path("/proc/self/maps").read_bytes()
    if b"/memfd:paceline" not in maps:  # after nearly every test: a thousand lines are not taken apart
        return set()
    return {line.split(maxsplit=5)[5] for line in maps.decode().splitlines() if "/memfd:paceline" in line}


def _open(kinds: tuple[str, ...]) -> list[str]:
    links = []
    for fd in _entries(Path("/proc/self/fd")):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link.startswith(kinds)]


def _control_groups() -> set[str]:
    """Empty ones of emulated hosts, but for those of a living process that is not ours: there may be other users."""
    groups: list[Path] = []
    with suppress(ClusterError):  # none can be made here
        groups = [group for group in place_of_group("any").parent.glob(f"{PREFIX}*") if not processes_of(group)]
    ours = {os.getpid(), *(child.pid for child in _children_of(os.getpid(), recursive=True))} if groups else set()
    launchers = {group.name: int(group.name.split("-")[1]) for group in groups}
    return {name for name, pid in launchers.items() if pid in ours or not psutil.pid_exists(pid)}


def _temporary_files() -> set[str]:
    """Entries of this session's temporary folder, without torch.compile's cache.

    The first optimizer makes that.
    """
    return {name for name in _entries(Path(tempfile.gettempdir())) if not name.startswith("torchinductor_")}


def _entries(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


_KINDS: dict[str, Callable[[], set[str]]] = {
    "processes": _children,
    "threads": _threads,
    "listening ports": _listening,
    "shared memory": _shared_memory,
    "memory files": _memory_files,
    "network namespaces": _network_namespaces,
    "control groups": _control_groups,
    "temporary files": _temporary_files,
}
_seen_segments: set[str] = set()  # of other processes, or older than the test
before_the_transport: Counter[str] = Counter()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT_OF_OTHERS}


def _torch_settings() -> dict[str, object]:
    """torch's global settings, or nothing while it is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {name: getattr(torch, name)() for name in _TORCH_SETTINGS}


def _reap() -> None:
    """Take the exit codes of adopted orphans; nobody else will."""
    # Multiprocessing would take a process whose exit code it does not get for a living one, for good.
    own = {child.pid for child in multiprocessing.active_children()}
    for child in _children_of(os.getpid()):
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
