"""Discovery of this machine's hardware, and the environment that a run records."""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster, Emulate, Host, Link
from paceline.cluster.emulate.cgroup import cpu_quota, memory_limit_bytes
from paceline.cluster.gpus import Gpus, find_gpus
from paceline.cluster.launch_engines.variables import HOST_DEVICES
from paceline.device import DEVICE_VARIABLE, VISIBLE
from paceline.errors import ClusterError
from paceline.files import kernel_text

_PACKAGES = ("paceline", "torch", "numpy")
_VARIABLES = re.compile(  # what changes speed or results; nothing that may hold a secret
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|NCCL|TORCH_NCCL|GLOO|TP|TORCHELASTIC)_[A-Z0-9_]+|CUDA_(DEVICE_ORDER|LAUNCH_BLOCKING)"
    r"|CUBLAS_WORKSPACE_CONFIG|PYTORCH(_CUDA)?_ALLOC_CONF|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|LD_PRELOAD|PYTHONHASHSEED"
    rf"|{'|'.join(VISIBLE)}|{DEVICE_VARIABLE}"
)


def discover() -> Cluster:
    """This machine as a cluster of one host: usable cores and memory, GPUs, links.

    Cores and memory are those that affinity and control groups leave.

    Raises:
        ClusterError: there is a driver of GPUs, but it does not work, or PACELINE_HOST_DEVICES are not there.
    """
    return Cluster(name="this machine", hosts=(_with_devices(_host(find_gpus()), os.environ.get(HOST_DEVICES)),))


def to_run_on(cluster: Cluster | None) -> Cluster:
    """The cluster, or this machine where none is named.

    Raises:
        ClusterError: it is a name from the catalogue of hardware, where nothing can run.
    """
    if cluster is None:
        return discover()
    if cluster.only_planned:
        raise ClusterError(
            f"{cluster.name} is a name from the catalogue of hardware: it can be planned for (paceline plan), and "
            "nothing can run on it. Leave the cluster out to use this machine, or name a cluster file."
        )
    return cluster


def environment() -> dict[str, Any]:
    """The environment that a run's figures depend on, as plain JSON values.

    Load average: busy cores over 1, 5 and 15 minutes.
    """
    gpus = find_gpus()
    host = _host(gpus)
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "os": platform.platform(),
        "host": host.name,
        "cpu": host.cpu,
        "cores": host.cores,
        "physical_cores": host.physical_cores,
        "memory_bytes": host.memory_bytes,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in gpus.devices],
        "gpu_driver": gpus.driver,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "git_commit": _git_commit(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    }


def cores_by_physical(cores: Iterable[int], root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """Logical cores, those of one physical core together, socket by socket.

    Where the kernel says nothing, each core is its own.
    """
    usable = set(cores)
    groups = []
    while usable:
        first = min(usable)
        topology = root / f"sys/devices/system/cpu/cpu{first}/topology"
        siblings = (_core_list(kernel_text(topology / "thread_siblings_list")) | {first}) & usable
        usable -= siblings
        socket_id = kernel_text(topology / "physical_package_id")
        groups.append((int(socket_id) if socket_id.isdecimal() else 0, tuple(sorted(siblings))))
    return tuple(group for _, group in sorted(groups))


def _host(gpus: Gpus) -> Host:
    import psutil

    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = cpu_quota()
    memory_bytes = psutil.virtual_memory().total
    name, flags = _cpu()
    return Host(
        name=socket.gethostname(),
        # more would be throttled together
        cores=max(1, min(len(affinity), math.floor(quota) if quota is not None else len(affinity))),
        memory_bytes=min(memory_bytes, memory_limit_bytes() or memory_bytes),
        cpu=name,
        cpu_bf16=bool({"avx512_bf16", "amx_bf16", "bf16"} & flags) if flags else None,
        cpu_avx512="avx512f" in flags if flags else None,
        affinity=cores_by_physical(affinity),
        gpus=gpus.devices,
        links=(*_interfaces(), *gpus.links),
    )


def _with_devices(host: Host, number: str | None) -> Host:
    """The host with so many of its devices, as `--hosts b:2` names; all with None."""
    if number is None:
        return host
    if not (number.isascii() and number.isdecimal() and 0 < int(number) <= len(host.devices)):
        raise ClusterError(
            f"{number} devices are to be used of host {host.name} (the 2 of --hosts b:2, or {HOST_DEVICES}), "
            f"but it has {len(host.devices)}"
        )
    wanted = {"gpus": host.gpus[: int(number)]} if host.gpus else {"cores": int(number)}
    return host.model_copy(update=wanted)


def _cpu() -> tuple[str, set[str]]:
    """The processor's name and features, from the first core's paragraph of /proc/cpuinfo."""
    facts = {}
    for line in kernel_text(Path("/proc/cpuinfo")).partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    flags = facts.get("flags", facts.get("Features", "")).split()
    name = " ".join(facts.get("model name", platform.processor() or platform.machine()).split())
    return name, set(flags)


def _interfaces() -> list[Link]:
    """Network interfaces that are up and have an address.

    A speed that the driver does not state (0) is None.
    """
    import psutil

    addresses = psutil.net_if_addrs()
    links = []
    for name, state in sorted(psutil.net_if_stats().items()):
        if state.isup and any(a.family in (socket.AF_INET, socket.AF_INET6) for a in addresses.get(name, ())):
            loopback = "loopback" in state.flags.split(",")
            links.append(
                Link(name=name, kind="loopback" if loopback else "ethernet", bandwidth_gbps=state.speed / 1000 or None)
            )
    return links


def _core_list(text: str) -> set[int]:
    """The kernel's form of a set of cores: `0-2,64`."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the current folder, or None outside a repository.

    It ends in `-dirty` if files differ from it.
    """
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def hosts_of(emulate: Emulate) -> tuple[Host, ...]:
    """Hosts `host-0` and so on, without GPUs.

    Each has the cores of its quota, or else its share of the machine's, and its share of the memory.

    Raises:
        ClusterError: a host is to have more cores than this machine.
    """
    machine = discover().hosts[0]
    hosts = []
    for i, (rate_bps, cores) in enumerate(zip(emulate.rates_bps, emulate.cores, strict=True)):
        if cores is not None and cores > machine.cores:
            raise ClusterError(
                f"cpu: host-{i} is to have {cores:g} cores, but this machine leaves only {machine.cores} to use"
            )
        link = Link(name="eth0", kind="ethernet", bandwidth_gbps=None if rate_bps is None else rate_bps / 10**9)
        changes = {
            "name": f"host-{i}",
            "cores": max(1, machine.cores // emulate.hosts) if cores is None else math.ceil(cores),
            "memory_bytes": max(1, machine.memory_bytes // emulate.hosts),
            "gpus": (),
            "links": (link,),
        }
        hosts.append(machine.model_copy(update=changes))
    return tuple(hosts)
