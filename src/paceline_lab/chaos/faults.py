"""Faults that are injected into a run's processes, links, disk and memory."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time as clock
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from msgspec.structs import replace

from paceline.cluster.cgroup import PREFIX, make_group, place_of_group, remove_group
from paceline.cluster.emulate import processes_in as processes_of_hosts
from paceline.cluster.network import OTHER_SIDE, Wire, call_libc, move, plug, unplug, wires
from paceline.errors import ClusterError, RunError
from paceline.files import private_folder
from paceline.run.record.run import read_lines
from paceline.state.manifest import MANIFEST
from paceline.text import nearest
from paceline_lab.chaos.schedule import KINDS, OF_HOSTS, Fault, Kind

FILLER = "filler"  # file that uses up the free space on the run's disk
_BIT, _BIT_OF_DOUBLE = 0x40, 0x08  # the highest bit of the mantissa, within the second-to-last byte of a float


@dataclass
class Scene:
    """A run under test, with everything that faults act on.

    Attributes:
        launcher: process id of the command that launched the run.
        ranks: number of ranks in the run's plan.
        hosts: number of emulated hosts; 0 if the ranks run directly on this machine.
        pids_of: function that returns the process ids of a rank.
        disk: folder of the run, on the file system that the fault `disk-full` fills.
        checkpoints: folder of the run's checkpoints.
        witness: folder with the files that `run/record/recorder.py:Witness` writes.
    """

    launcher: int
    ranks: int
    hosts: int
    pids_of: Callable[[int], list[int]]
    disk: Path
    checkpoints: Path
    witness: Path


@dataclass
class Injected:
    """A fault that has been injected.

    Attributes:
        time: Unix time of the fault.
        step: latest step of the run when the fault was injected.
        checkpoint: name of the damaged checkpoint; empty for other faults.
        hit: description of the affected process, host or file.
        undo: function that reverts the fault.
        until: monotonic time at which the fault is due to be reverted.
    """

    fault: Fault
    hit: str
    undo: Callable[[], None] = lambda: None
    time: float = field(default_factory=clock.time)
    until: float = field(default_factory=clock.monotonic)
    step: int = 0
    checkpoint: str = ""


def inject(fault: Fault, scene: Scene) -> Injected | None:
    """Inject a fault. Return None if its target does not exist at the moment."""
    try:
        injected = (_many if fault.target in ("others", "ranks") else _HOW[fault.kind])(fault, scene)
    except ClusterError:  # the target is starting, or has just ended
        return None
    if injected is not None:
        injected.until += fault.for_s
    return injected


def _many(fault: Fault, scene: Scene) -> Injected | None:
    """Inject a fault into all ranks, or into all ranks except one.

    Nothing is injected, and None is returned, if fewer than two of these ranks are running.
    """
    spared = fault.number if fault.target == "others" else None
    wanted = [rank for rank in range(scene.ranks) if rank != spared]
    there = [rank for rank in wanted if rank_process(scene, rank)]
    if len(there) < min(2, len(wanted)):
        return None
    each = [inject(replace(fault, target="rank", number=rank), scene) for rank in there]
    made = [injected for injected in each if injected is not None]

    def undo() -> None:
        for injected in made:
            with suppress(OSError, ClusterError):
                injected.undo()

    return Injected(fault, ", ".join(injected.hit for injected in made), undo, made[0].time) if made else None


def rank_process(scene: Scene, number: int) -> psutil.Process | None:
    """Find the process of a rank. Return None if the process is not running."""
    with suppress(psutil.Error, IndexError):
        for pid in scene.pids_of(number):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and process.cmdline()[0].startswith("paceline rank "):
                return process
    return None


def _kill(fault: Fault, scene: Scene) -> Injected | None:
    if fault.target == "host":
        return _kill_host(fault, scene)
    if fault.target == "command":
        injected = Injected(fault, _command(scene))
        os.kill(scene.launcher, signal.SIGKILL)
        return injected
    if (process := rank_process(scene, fault.number)) is None:
        return None
    injected = Injected(fault, _named(fault, process))
    with suppress(psutil.Error):
        process.kill()
    return injected


def _kill_host(fault: Fault, scene: Scene) -> Injected | None:
    """Send SIGKILL to every process of a host, as if the machine lost power."""
    links = _links(scene)
    pids = links.processes_in(fault.number) if links else set()
    if not any(_is_ours(pid) for pid in pids):  # the host is still starting
        return None
    injected = Injected(fault, f"the {len(pids)} processes of host {fault.number}")
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return injected


def _is_ours(pid: int) -> bool:
    with suppress(psutil.Error, IndexError):
        return psutil.Process(pid).cmdline()[0].startswith("paceline ")
    return False


def _stop(fault: Fault, scene: Scene) -> Injected | None:
    if (process := rank_process(scene, fault.number)) is None:
        return None

    def go_on() -> None:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)

    injected = Injected(fault, _named(fault, process), go_on)
    with suppress(psutil.Error):
        process.send_signal(signal.SIGSTOP)
    return injected


def _stop_store(fault: Fault, scene: Scene) -> Injected:
    """Stop the run's command, which also stops the store that all processes connect to."""
    injected = Injected(fault, _command(scene), lambda: os.kill(scene.launcher, signal.SIGCONT))
    os.kill(scene.launcher, signal.SIGSTOP)
    return injected


def _squeeze(how: Callable[[int], Squeezed]) -> Callable[[Fault, Scene], Injected | None]:
    def squeeze(fault: Fault, scene: Scene) -> Injected | None:
        if (process := rank_process(scene, fault.number)) is None:
            return None
        at = clock.time()
        squeezed = how(process.pid)
        return Injected(fault, _named(fault, process), squeezed.release, at)

    return squeeze


def _fill_disk(fault: Fault, scene: Scene) -> Injected:
    filler = scene.disk / FILLER
    injected = Injected(fault, f"disk of {scene.disk}", lambda: filler.unlink(missing_ok=True))
    with open(filler, "wb") as file:
        while room := _room(scene.disk):
            with suppress(OSError):  # another process took some of the space
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), room)
    return injected


def _room(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def _corrupt(fault: Fault, scene: Scene) -> Injected | None:
    return _corrupt_checkpoint(fault, scene) if fault.target == "checkpoint" else _corrupt_weights(fault, scene)


def _corrupt_weights(fault: Fault, scene: Scene) -> Injected | None:
    process = rank_process(scene, fault.number)
    told = None if process is None else _told_weights(scene.witness / f"{process.pid}.jsonl")
    if process is None or told is None:
        return None
    address, nbytes, width = max(told, key=lambda place: place[1])
    elements = nbytes // width
    place = address + elements // 2 * width + max(width - 2, 0)
    try:
        with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(place)
            byte = memory.read(1)[0]
            memory.seek(place)
            memory.write(bytes([byte ^ (_BIT_OF_DOUBLE if width == 8 else _BIT)]))
    except (OSError, IndexError):  # the process has just ended
        return None
    return Injected(fault, f"a bit of the weights of {_named(fault, process)}")


def _told_weights(file: Path) -> list[list[int]] | None:
    """Return the addresses of a process's weights.

    The result is None before the first step, because the first step may still move the weights.
    """
    lines = list(read_lines(file))
    told = [line["weights"] for line in lines if "weights" in line]
    return told[-1] if told and "step" in lines[-1] else None


def _corrupt_checkpoint(fault: Fault, scene: Scene) -> Injected | None:
    whole = sorted(path for path in scene.checkpoints.glob("step-*") if (path / MANIFEST).exists())
    if not whole:
        return None
    try:
        shard = max(whole[-1].glob("*.safetensors"), key=lambda path: path.stat().st_size)
        with open(shard, "r+b") as file:
            file.seek(shard.stat().st_size - 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ _BIT]))
    except (OSError, ValueError, IndexError):  # a newer checkpoint has just replaced the file
        return None
    return Injected(fault, f"a bit of {whole[-1].name}/{shard.name}", checkpoint=whole[-1].name)


def _cut(fault: Fault, scene: Scene) -> Injected | None:
    if (links := _links(scene)) is None:
        return None
    injected = Injected(fault, f"link of host {fault.number}", lambda: links.mend([fault.number]))
    links.cut(fault.number)
    return injected


def _part(fault: Fault, scene: Scene) -> Injected | None:
    if (links := _links(scene)) is None:
        return None
    apart = list(range(links.count))[-fault.number :]
    words = ", ".join(map(str, apart))
    injected = Injected(fault, f"hosts {words} apart from the others", lambda: links.mend(apart))
    links.part(apart)
    return injected


def _links(scene: Scene) -> Links | None:
    """Return the links of the hosts, or None until all links are up."""
    links = Links.of(scene.launcher)
    is_up = links is not None and links.count >= scene.hosts
    return links if is_up and any(rank_process(scene, rank) for rank in range(scene.ranks)) else None


def _command(scene: Scene) -> str:
    return f"the command (pid {scene.launcher})"


def _named(fault: Fault, process: psutil.Process) -> str:
    return f"rank {fault.number} (pid {process.pid})"


_MEMORY_BYTES = 128 * 1024
_CORES = 0.1
_numbers = itertools.count()
_TOPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # cgroup versions 1 and 2


@dataclass(frozen=True)
class Squeezed:
    """A process that was moved to a control group with tight limits.

    Attributes:
        before: control group to which the process returns.
    """

    pid: int
    group: Path
    before: Path

    def release(self) -> None:
        """Move the process back to its former control group, and remove the tight group."""
        for limit in ("memory.max", "memory.limit_in_bytes"):
            if (self.group / limit).exists():
                with suppress(OSError):  # if the kernel refuses, the memory is freed with the group
                    (self.group / limit).write_text("max" if limit == "memory.max" else "-1")
        with suppress(OSError):  # the kernel has killed the process
            (self.before / "cgroup.procs").write_text(str(self.pid))
        remove_group(self.group)


def little_memory(pid: int) -> Squeezed:
    """Deny a process any further memory.

    The kernel kills the process when it next needs a new page.
    """
    top = memory_groups()
    group = top / _name()
    group.mkdir()
    limit = group / "memory.max"
    # the limit is set while the group is empty: a limit below the current use may be refused
    (limit if limit.exists() else group / "memory.limit_in_bytes").write_text(str(_MEMORY_BYTES))
    _move(pid, group)
    return Squeezed(pid, group, top)


def little_time(pid: int) -> Squeezed:
    """Limit a process to a tenth of a core."""
    folder = place_of_group(_name())
    before = _group_of(pid, folder.parent)
    group = make_group(folder, _CORES)
    _move(pid, group)
    return Squeezed(pid, group, before)


def _move(pid: int, group: Path) -> None:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:  # the process has just ended
        remove_group(group)
        raise ClusterError(
            "chaos.not_moved",
            "process {pid} cannot be moved to the control group {group}: {error}",
            pid=pid,
            group=group,
            error=error,
        ) from error


def memory_groups() -> Path:
    """Find the folder in which memory control groups can be created.

    Raises:
        ClusterError: no control group with a memory limit can be created on this machine.
    """
    for top in _TOPS:
        limits = (top / "memory.limit_in_bytes").exists() or "memory" in _read(top / "cgroup.subtree_control").split()
        if limits and os.access(top, os.W_OK):
            return top
    raise ClusterError(
        "chaos.no_memory_control_group",
        "no control group with a memory limit can be created under /sys/fs/cgroup, which needs root",
    )


def _group_of(pid: int, top: Path) -> Path:
    """Find the CPU control group of a process. Return `top` if the group is not visible."""
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or not controllers:
            for above in (top, *top.parents):
                own = above / path.lstrip("/")
                if path != "/" and (own / "cgroup.procs").exists() and own.is_relative_to("/sys/fs/cgroup"):
                    return own
    return top


def _name() -> str:
    return f"{PREFIX}{os.getpid()}-chaos-{next(_numbers)}"


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Links:
    """Network links between emulated hosts, found through the namespaces that their launcher has open."""

    bridge: str
    wires: Sequence[Wire]

    @classmethod
    def of(cls, launcher: int) -> Links | None:
        """Find the links between a command's hosts. Return None if the links are not up."""
        held: dict[str, str] = {}
        with suppress(OSError):
            for entry in sorted(Path(f"/proc/{launcher}/fd").iterdir(), key=lambda entry: int(entry.name)):
                with suppress(FileNotFoundError):  # the launcher has just closed the file
                    held.setdefault(os.readlink(entry), str(entry))
        namespaces = [path for link, path in held.items() if link.startswith("net:[")]
        if len(namespaces) < 2:
            return None
        bridge, *hosts = namespaces
        return cls(bridge, wires(hosts, [None] * len(hosts)))

    @property
    def count(self) -> int:
        """Return the number of hosts."""
        return len(self.wires)

    def processes_in(self, host: int) -> set[int]:
        """Return the ids of all processes that run on a host."""
        return processes_of_hosts([os.stat(self.wires[host].namespace).st_ino], [])

    def cut(self, host: int) -> None:
        """Disconnect a host: its link no longer carries traffic."""
        unplug(self.bridge, self.wires[host])

    def part(self, hosts: Sequence[int]) -> None:
        """Partition the network: the given hosts reach only each other."""
        move(self.bridge, [self.wires[host] for host in hosts], OTHER_SIDE)

    def mend(self, hosts: Sequence[int]) -> None:
        """Reconnect the given hosts to all other hosts."""
        for host in hosts:
            plug(self.bridge, self.wires[host])


_CLONE_NEWNS = 0x00020000
_LEAST_BYTES, _TIMES = 48 * 2**20, 4


def keep_mounts_private() -> None:
    """Make the mounts of this process private, so that they disappear when the process ends."""
    call_libc("unshare", _CLONE_NEWNS)
    _mount("--make-rprivate", "/")


@contextmanager
def small_disk(folder: Path, like: Path) -> Iterator[Path]:
    """Mount an in-memory file system that is a few times as large as `like`.

    On exit, the folder `run` of the file system is copied to `folder`.
    """
    place = folder / "disk"
    private_folder(place)
    size = max(_LEAST_BYTES, _TIMES * sum(file.stat().st_size for file in like.rglob("*") if file.is_file()))
    _mount("-t", "tmpfs", "-o", f"size={size},mode=0700", "paceline-chaos", str(place))
    try:
        yield place
        if (place / "run").exists():
            shutil.copytree(place / "run", folder / "run")
    finally:
        subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)
        os.rmdir(place)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            "chaos.no_file_system",
            "no small file system can be created for the fault disk-full: {reason}. Omit this fault.",
            reason=done.stderr.strip(),
        )


def kinds_in(text: str) -> tuple[Kind, ...]:
    """Parse kinds of faults from a text such as `kill,stop`.

    Raises:
        ClusterError: a kind of fault is not known. The error suggests the closest name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in KINDS:
            raise ClusterError(
                "chaos.fault_unknown", "{name!r} is not a kind of fault. {hint}", name=name, hint=nearest(name, KINDS)
            )
    return tuple(kind for kind in KINDS if kind in names)


def possible_kinds(hosts: int) -> tuple[Kind, ...]:
    """List the kinds of faults that can be injected on this machine."""
    return tuple(kind for kind in KINDS if why_not(kind, hosts) is None)


def refuse_impossible(kinds: Sequence[Kind], hosts: int) -> None:
    """Refuse kinds of faults that cannot be injected on this machine.

    Raises:
        ClusterError: a kind of fault cannot be injected. The error names each such kind with the reason.
    """
    reasons = [f"{kind}: {reason}" for kind in kinds if (reason := why_not(kind, hosts))]
    if reasons:
        raise ClusterError(
            "chaos.faults_impossible",
            "these faults cannot be injected on this machine:\n{reasons}",
            reasons="\n".join(reasons),
        )


def why_not(kind: Kind, hosts: int) -> str | None:
    """Return the reason why a kind of fault cannot be injected on this machine."""
    if kind in OF_HOSTS and hosts < 2:
        return "it needs the links of emulated hosts: add --emulate 2 or more"
    return _WHY_NOT.get(kind, lambda: None)()


def _of_group(find: Callable[[], object]) -> str | None:
    try:
        find()
    except ClusterError as error:
        return str(error)
    return None


def _no_small_disk() -> str | None:
    if os.geteuid() == 0 and shutil.which("mount"):
        return None
    return "a small file system for the run needs root and the command mount"


_WHY_NOT: dict[str, Callable[[], str | None]] = {
    "oom": lambda: _of_group(memory_groups),
    "slow": lambda: _of_group(lambda: place_of_group("paceline-x")),
    "disk-full": _no_small_disk,
    "clock": lambda: (
        "Linux has one wall clock for all processes, so the fault would change this machine's clock; "
        "paceline measures times with the monotonic clock"
    ),
}


_HOW: dict[str, Callable[[Fault, Scene], Injected | None]] = {
    "kill": _kill,
    "stop": _stop,
    "store": _stop_store,
    "oom": _squeeze(little_memory),
    "slow": _squeeze(little_time),
    "disk-full": _fill_disk,
    "corrupt": _corrupt,
    "cut": _cut,
    "partition": _part,
}
