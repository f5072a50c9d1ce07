"""This machine's accelerators.

NVIDIA's GPUs and what joins them are asked of the driver (NVML) without starting CUDA, others of torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.cluster.cluster import Device, Link
from paceline.cluster.torch_devices import torch_devices
from paceline.device import CPU, DEVICE_VARIABLE, GPU
from paceline.errors import ClusterError

_DRIVER_SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one: Windows' Linux subsystem
_PCIE_GBPS_PER_LANE = {1: 2.0, 2: 4.0, 3: 7.877, 4: 15.754, 5: 31.508, 6: 60.5}  # by generation, line code taken off
# per link, by nvmlNvlinkVersion_t (7: NVLink 5)
_NVLINK_GBPS = {1: 160.0, 2: 200.0, 3: 200.0, 4: 200.0, 5: 200.0, 6: 200.0, 7: 400.0}
_BF16_SINCE = (8, 0)  # compute capability


class Gpus(NamedTuple):
    """GPUs found by `find_gpus`; `driver` is None if there is no driver."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    driver: str | None = None


def find_gpus() -> Gpus:
    """NVIDIA's in `CUDA_VISIBLE_DEVICES`, in its order, with their links; without any, what else torch knows.

    None where PACELINE_DEVICE is `cpu`. A plugin's come before NVIDIA's, as in torch.

    Raises:
        ClusterError: there is a driver, but it does not work; a run would otherwise quietly take the cores. Or
            PACELINE_DEVICE names what is not there.
    """
    wanted = os.environ.get(DEVICE_VARIABLE)
    if wanted == CPU:
        return Gpus()
    others = torch_devices()
    found = Gpus(others) if others and others[0].kind != GPU else _nvidias()
    found = found if found.devices else Gpus(others)
    if wanted and (not found.devices or found.devices[0].kind != wanted):
        there = f"of type {found.devices[0].kind}" if found.devices else "not to be found"
        raise ClusterError(
            f"{DEVICE_VARIABLE}={wanted}, but the accelerators here are {there}. Unset it to use what there is, or "
            f"set {DEVICE_VARIABLE}={CPU}"
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
            f"the NVIDIA driver does not work: {error}. See whether nvidia-smi runs, or set "
            f"{DEVICE_VARIABLE}={CPU} to do without GPUs"
        ) from error


def read_gpus(nvml: Any, visible: str | None) -> Gpus:
    """The GPUs of an initialised NVML (the module `pynvml`).

    `visible` is the text of `CUDA_VISIBLE_DEVICES`, None where it is not set.
    """
    handles = _visible(nvml, visible)
    devices = tuple(_device(nvml, index, handle) for index, handle in enumerate(handles))
    links = (*_pcie(nvml, handles), *_nvlinks(nvml, handles))
    return Gpus(devices, links, _ask(nvml, nvml.nvmlSystemGetDriverVersion))


def _visible(nvml: Any, visible: str | None) -> list[Any]:
    """GPU handles in the variable's order, read as CUDA reads it.

    It holds numbers or UUIDs (their beginning is enough), up to the first that names no GPU.

    NVML numbers GPUs by bus, CUDA the fastest first: the same wherever the GPUs of a host are identical.
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
        # a GPU that shares the host's memory states none
        memory_bytes=memory.total if memory else _memory_of_the_host(),
        bf16=tuple(capability) >= _BF16_SINCE if capability else None,
    )


def _pcie(nvml: Any, handles: list[Any]) -> list[Link]:
    """PCIe links, one per GPU, with the highest rate of the GPU and its slot.

    At rest the current speed is a lower one.
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
    """The active links, those that join the same two ends added up."""
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
    """The name of a link, or None if it is not to be listed.

    It is not if it was counted from its other end or leads to a GPU that we may not use.
    """
    if _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return f"cuda:{index}-switch"
    remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
    other = index_of.get(remote.busId.lower()) if remote else None
    return f"cuda:{index}-cuda:{other}" if other is not None and other > index else None


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer, or None where this GPU has none (no NVLink, say)."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _memory_of_the_host() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
