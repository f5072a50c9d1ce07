"""Faults made from outside on the processes, links, disk and memory of a run."""

from __future__ import annotations

import os
import signal
import time as clock
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from msgspec.structs import replace

from paceline.errors import ClusterError
from paceline.run.checkpoint.manifest import MANIFEST
from paceline.run.record.run import read_lines
from paceline_lab.chaos.groups import Squeezed, little_memory, little_time
from paceline_lab.chaos.links import Links
from paceline_lab.chaos.schedule import Fault

FILLER = "filler"  # file beside the run, which takes what room the disk has left
_BIT, _BIT_OF_DOUBLE = 0x40, 0x08  # of the last byte but one of a float: the highest of its fraction


@dataclass
class Scene:
    """The run that is disturbed.

    Attributes:
        launcher: process id of its command.
        ranks: number of ranks that it trains with; `hosts` of emulated hosts.
        pids_of: process ids that a rank's status names.
        disk: folder of the file system that the run is written to, and that can be filled.
        checkpoints: folder.
        witness: folder of `training/record/witness.py`.
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
    """A fault that was made.

    Attributes:
        time: of the fault, Unix seconds.
        step: the newest one then.
        checkpoint: that was damaged.
        hit: process, host or file, in words.
        undo: takes it back.
        until: monotonic time at which that is due.
    """

    fault: Fault
    hit: str
    undo: Callable[[], None] = lambda: None
    time: float = field(default_factory=clock.time)
    until: float = field(default_factory=clock.monotonic)
    step: int = 0
    checkpoint: str = ""


def inject(fault: Fault, scene: Scene) -> Injected | None:
    """Make a fault; None where what it hits is not there yet."""
    try:
        injected = (_many if fault.target in ("others", "ranks") else _HOW[fault.kind])(fault, scene)
    except ClusterError:  # what it hits is being set up, or just gone
        return None
    if injected is not None:
        injected.until += fault.for_s
    return injected


def _many(fault: Fault, scene: Scene) -> Injected | None:
    """Hit all ranks, or all but one, that are there; none unless two are."""
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
    """The process of a rank; None where it has ended or is not started yet."""
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
    """SIGKILL for all that runs in a host, as where a machine is switched off."""
    links = _links(scene)
    pids = links.processes_in(fault.number) if links else set()
    if not any(_is_ours(pid) for pid in pids):  # it is only being set up
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
    """Stop the command: ranks and host processes meet at its store, and it answers nobody."""
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
            with suppress(OSError):  # another file took some of it
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
    except (OSError, IndexError):  # it has just ended
        return None
    return Injected(fault, f"a bit of the weights of {_named(fault, process)}")


def _told_weights(file: Path) -> list[list[int]] | None:
    """Places of a process's weights; None before its first step, which may still move them."""
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
    except (OSError, ValueError, IndexError):  # just replaced by a newer one
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
    """Links of the hosts; None until all are up, as they are for ranks."""
    links = Links.of(scene.launcher)
    is_up = links is not None and links.count >= scene.hosts
    return links if is_up and any(rank_process(scene, rank) for rank in range(scene.ranks)) else None


def _command(scene: Scene) -> str:
    return f"the command (pid {scene.launcher})"


def _named(fault: Fault, process: psutil.Process) -> str:
    return f"rank {fault.number} (pid {process.pid})"


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
