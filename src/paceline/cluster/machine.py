"""This machine as a host: cores, memory, accelerators, interfaces, emulated hosts."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from paceline import device
from paceline.cluster.cgroup import cpu_quota, memory_limit_bytes
from paceline.cluster.host import Device, Emulate, Host, Link
from paceline.cluster.launch_engines import HOST_DEVICES
from paceline.device import CPU, DEVICE_VARIABLE, GPU
from paceline.errors import ClusterError
from paceline.files import kernel_text
from paceline.rank_environment import MASTER_ADDR, MASTER_PORT, HostEntry, named_address


def this_host() -> Host:
    """Return the part of this machine that this process may use.

    Raises:
        ClusterError: the GPU driver does not work, or devices that PACELINE_HOST_DEVICES requires do not exist.
    """
    return _with_devices(host_with(find_gpus()), os.environ.get(HOST_DEVICES))


def cores_by_physical(cores: Iterable[int], root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """Return the logical cores, grouped by physical core, socket by socket.

    If the kernel exposes no topology, each core is a group of its own.
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


def host_with(gpus: Gpus) -> Host:
    import psutil

    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = cpu_quota()
    memory_bytes = psutil.virtual_memory().total
    name, flags = _cpu()
    return Host(
        name=socket.gethostname(),
        # the kernel would pause all threads if more of them were busy
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
    """Limit a host to its first `number` devices, like `--hosts b:2`; None keeps all."""
    if number is None:
        return host
    if not (number.isascii() and number.isdecimal() and 0 < int(number) <= len(host.devices)):
        raise ClusterError(
            "cluster.too_few_devices",
            "{wanted} devices of host {host} are requested (by --hosts, as in b:2, or by {variable}), but the host "
            "has {devices}",
            wanted=number,
            host=host.name,
            variable=HOST_DEVICES,
            devices=len(host.devices),
        )
    wanted = {"gpus": host.gpus[: int(number)]} if host.gpus else {"cores": int(number)}
    return host.model_copy(update=wanted)


def _cpu() -> tuple[str, set[str]]:
    """Return the name and features of the processor, from /proc/cpuinfo."""
    facts = {}
    for line in kernel_text(Path("/proc/cpuinfo")).partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    flags = facts.get("flags", facts.get("Features", "")).split()
    name = " ".join(facts.get("model name", platform.processor() or platform.machine()).split())
    return name, set(flags)


def _interfaces() -> list[Link]:
    """Return the network interfaces that are up and have an address.

    An unknown speed, which psutil reports as 0, becomes None.
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
    """Parse a list of cores in the kernel's format, such as `0-2,64`."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def emulated_hosts(emulate: Emulate) -> tuple[Host, ...]:
    """Create emulated hosts without GPUs, named `host-0` and so on.

    The number of cores of a host is its quota, or an equal share of the machine's cores without a quota. Each host has
    an equal share of the memory.

    Raises:
        ClusterError: the quota of a host is larger than the number of cores of this machine.
    """
    machine = this_host()
    hosts = []
    for i, (rate_bps, cores) in enumerate(zip(emulate.rates_bps, emulate.cores, strict=True)):
        if cores is not None and cores > machine.cores:
            raise ClusterError(
                "emulate.too_few_cores",
                "cpu: host-{host} should have {cores:g} cores, but this machine has only {available}",
                host=i,
                cores=cores,
                available=machine.cores,
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


# the last path is used in the Linux subsystem of Windows
_DRIVER_SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
# by generation, without the overhead of the line code
_PCIE_GBPS_PER_LANE = {1: 2.0, 2: 4.0, 3: 7.877, 4: 15.754, 5: 31.508, 6: 60.5}
# per link, by nvmlNvlinkVersion_t (7 is NVLink 5)
_NVLINK_GBPS = {1: 160.0, 2: 200.0, 3: 200.0, 4: 200.0, 5: 200.0, 6: 200.0, 7: 400.0}
_BF16_SINCE, _FP8_SINCE = (8, 0), (8, 9)  # compute capability


class Gpus(NamedTuple):
    """The GPUs that `find_gpus` found; `driver` is None if there is no driver."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    driver: str | None = None


def find_gpus() -> Gpus:
    """Find NVIDIA GPUs and their links, or else other accelerators of torch.

    Only the GPUs of `CUDA_VISIBLE_DEVICES` are included. The result is empty if PACELINE_DEVICE is `cpu`. As in torch,
    devices of a plugin have precedence over NVIDIA GPUs.

    Raises:
        ClusterError: the driver does not work (a run would otherwise use the cores without a warning), or
            PACELINE_DEVICE names a device that does not exist.
    """
    wanted = os.environ.get(DEVICE_VARIABLE)
    if wanted == CPU:
        return Gpus()
    others = torch_devices()
    found = Gpus(others) if others and others[0].kind != GPU else _nvidias()
    found = found if found.devices else Gpus(others)
    if wanted and (not found.devices or found.devices[0].kind != wanted):
        there = f"accelerators of type {found.devices[0].kind}" if found.devices else "no accelerator"
        raise ClusterError(
            "device.not_there",
            "{variable}={wanted}, but this machine has {there}. Unset the variable to use the available devices, or "
            "set {variable}={cpu}.",
            variable=DEVICE_VARIABLE,
            wanted=wanted,
            there=there,
            cpu=CPU,
        )
    return found


def _nvidias() -> Gpus:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or not any(os.path.exists(sign) for sign in _DRIVER_SIGNS):
        return Gpus()
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return read_gpus(pynvml, visible)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return Gpus()
        raise ClusterError(
            "device.driver_failed",
            "the NVIDIA driver does not work: {error}. Check whether nvidia-smi runs, or set {variable}={cpu} to "
            "train without GPUs",
            error=error,
            variable=DEVICE_VARIABLE,
            cpu=CPU,
        ) from error


def read_gpus(nvml: Any, visible: str | None) -> Gpus:
    """Read the GPUs of an initialized NVML (the module `pynvml`).

    `visible` is the value of `CUDA_VISIBLE_DEVICES`; None if the variable is not set.
    """
    handles = _visible(nvml, visible)
    devices = tuple(_device(nvml, index, handle) for index, handle in enumerate(handles))
    links = (*_pcie(nvml, handles), *_nvlinks(nvml, handles))
    return Gpus(devices, links, _ask(nvml, nvml.nvmlSystemGetDriverVersion))


def _visible(nvml: Any, visible: str | None) -> list[Any]:
    """Return GPU handles in the order of `CUDA_VISIBLE_DEVICES`, parsed as in CUDA.

    The variable lists numbers, UUIDs or prefixes of UUIDs. The first entry that names no GPU ends the list.

    NVML orders GPUs by bus, and CUDA orders them by speed. Both orders are equal if the GPUs of a host are identical.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return handles
    chosen = []
    for word in (w.strip() for w in visible.split(",")):
        if word.isdecimal():
            found = handles[int(word) : int(word) + 1]
        elif word.startswith("MIG-"):
            part = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, word)
            found = [part] if part is not None else []
        else:
            found = [h for h in handles if word and nvml.nvmlDeviceGetUUID(h).startswith(word)]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _device(nvml: Any, index: int, handle: Any) -> Device:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Device(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        # a GPU that shares the memory of the host reports no memory
        memory_bytes=memory.total if memory else _memory_of_the_host(),
        bf16=tuple(capability) >= _BF16_SINCE if capability else None,
        fp8=tuple(capability) >= _FP8_SINCE if capability else None,
    )


def _pcie(nvml: Any, handles: list[Any]) -> list[Link]:
    """Return one PCIe link per GPU, with the highest rate of GPU and slot.

    The current rate is not used, because it is lower while the link is idle.
    """
    links = []
    for index, handle in enumerate(handles):
        lane = _PCIE_GBPS_PER_LANE.get(_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle))
        lanes = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
        links.append(
            Link(name=f"cuda:{index}-host", kind="pcie", bandwidth_gbps=lane * lanes if lane and lanes else None)
        )
    return links


def _nvlinks(nvml: Any, handles: list[Any]) -> list[Link]:
    """Return the active NVLinks; rates of links between the same two ends are added."""
    places = [_ask(nvml, nvml.nvmlDeviceGetPciInfo, handle) for handle in handles]
    index_of = {place.busId.lower(): index for index, place in enumerate(places) if place}
    total_gbps: dict[str, float] = {}
    for index, handle in enumerate(handles):
        for number in range(nvml.NVML_NVLINK_MAX_LINKS):
            if _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, number) != nvml.NVML_NVLINK_STATE_ACTIVE:
                continue
            name = _ends(nvml, index, handle, number, index_of)
            if name is not None:
                gbps = _NVLINK_GBPS.get(_ask(nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, number), 0.0)
                total_gbps[name] = total_gbps.get(name, 0.0) + gbps
    return [Link(name=name, kind="nvlink", bandwidth_gbps=gbps or None) for name, gbps in total_gbps.items()]


def _ends(nvml: Any, index: int, handle: Any, number: int, index_of: dict[str, int]) -> str | None:
    """Return the name of a link, or None if it should not be listed.

    A link is not listed if it is already listed for its other end, or if it leads to a GPU that this process may not
    use.
    """
    if _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return f"cuda:{index}-switch"
    remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
    other = index_of.get(remote.busId.lower()) if remote else None
    return f"cuda:{index}-cuda:{other}" if other is not None and other > index else None


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's answer; None if the GPU does not support the query."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _memory_of_the_host() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


_DEADLINE_S = 120.0
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")  # the last line of a traceback
_PLUGINS = "torch.backends"  # the entry points that torch loads on import


def torch_devices() -> tuple[Device, ...]:
    """Find accelerators with torch, if there is a hint that one exists.

    Raises:
        ClusterError: a hint exists, but torch cannot be imported, fails, or takes longer than two minutes.
    """
    if not hint():
        return ()
    if "torch" in sys.modules and device.is_started():
        found = accelerators()
    else:
        # all devices; `find_gpus` compares them with the request
        found = _asked(frozenset(pair for pair in os.environ.items() if pair[0] != DEVICE_VARIABLE))
    return tuple(Device.model_validate(one) for one in found)


def hint() -> str | None:
    """Return a hint that torch supports an accelerator that NVML does not list, or None.

    torch is not imported.
    """
    if plugins := _plugins(tuple(sys.path)):
        return f"the torch plugin {plugins[0]} is installed"
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "this is a Mac with a GPU"
    for name, maker in (("hip", "AMD"), ("xpu", "Intel")):
        if re.search(rf"^{name}\b[^=\n]*= *['\"]", _version_file(), re.MULTILINE):
            return f"torch is built for {maker}'s GPUs"
    return None


def accelerators() -> list[dict[str, Any]]:
    """Return the accelerators that torch finds, each as the values of a `Device`."""
    import psutil
    import torch

    kind = device.accelerator_type()
    places = [torch.device(kind, index) for index in range(device.count())] if kind else []
    return [
        {
            "index": place.index,
            "kind": place.type,
            "name": device.name(place),
            # a device that reports no memory shares the memory of the host
            "memory_bytes": device.total_memory(place) or psutil.virtual_memory().total,
            "bf16": device.states_bf16(place),
            "graphs": device.has_graphs(place),
        }
        for place in places
    ]


@lru_cache(maxsize=4)
def _asked(environment: frozenset[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the accelerators that a new process with this environment finds."""
    command = [
        sys.executable,
        "-P",
        "-c",
        "import json, paceline.cluster.machine as m; print(json.dumps(m.accelerators()))",
    ]
    without = f"Mend it, or set {DEVICE_VARIABLE}={CPU} to train on the CPU."
    try:
        answer = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            "device.torch_timeout",
            "{hint}, but torch did not list its devices within {deadline_s:g} s. {advice}",
            hint=hint(),
            deadline_s=_DEADLINE_S,
            advice=without,
        ) from None
    if answer.returncode != 0:
        errors = [line.rstrip(".") for line in answer.stderr.splitlines() if _ERROR.match(line)]
        said = ": ".join(dict.fromkeys(reversed(errors))) or f"exit code {answer.returncode}"
        raise ClusterError(
            "device.unknown_to_torch",
            "{hint}, but torch cannot list its devices: {reason}. {advice}",
            hint=hint(),
            reason=said,
            advice=without,
        )
    found: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return found


@lru_cache(maxsize=1)
def _plugins(path: tuple[str, ...]) -> list[str]:
    """Return the names of installed torch plugins on an import path."""
    return sorted(point.name for point in entry_points(group=_PLUGINS))


@lru_cache(maxsize=1)
def _version_file() -> str:
    """Return the text of torch's version.py, which names the build target."""
    spec = find_spec("torch")
    try:
        return Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    except OSError:
        return ""


def host_identity() -> str:
    """Return an identity that is equal for processes with the same kernel and network namespace.

    Each emulated host has a network namespace of its own.
    """
    namespace = "/proc/self/ns/net"
    return f"{os.stat(namespace).st_ino if os.path.exists(namespace) else 0}@{boot_id()}@{socket.gethostname()}"


def boot_id() -> str:
    """Return the boot id of this kernel, or the host's name if there is none.

    Host names are not sufficient, because several hosts may have the same name, and containers of one host have
    different names.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address; None if it cannot be determined."""
    import psutil

    return next(
        (
            name
            for name, has in psutil.net_if_addrs().items()
            if any(a.address.partition("%")[0] == address for a in has)
        ),
        None,
    )


def own_address() -> str:
    """Return the address at which other hosts reach this process.

    The address is PACELINE_ADDRESS if it is set, or else the local address from which the rendezvous (MASTER_ADDR) is
    reachable, or else the loopback address.
    """
    if named := named_address():
        return named
    master = os.environ.get(MASTER_ADDR)
    if master is None:
        return "127.0.0.1"
    where = (master, int(os.environ.get(MASTER_PORT, "1")))
    family = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # connecting a UDP socket sends nothing
        address: str = probe.getsockname()[0]
        return address


def own_interface() -> str | None:
    """Return the network interface of `own_address`; None if it cannot be determined."""
    return interface_of(own_address())


def own_host() -> str:
    """Return the name of this host in errors and reports.

    An emulated host has a name of its own.
    """
    host = HostEntry.from_env()
    return host.name if host else socket.gethostname()
