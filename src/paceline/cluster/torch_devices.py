"""Accelerators that torch knows and NVML does not: AMD's, Intel's, Apple's, and those of plugins.

Torch is asked in a process of its own, and only where something says that it would know one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline import device, device_info
from paceline.cluster.cluster import Device
from paceline.errors import ClusterError

_DEADLINE_S = 120.0
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")  # the last line of a traceback
_PLUGINS = "torch.backends"  # the entry points that torch loads with itself


def torch_devices() -> tuple[Device, ...]:
    """Accelerators as torch finds them; none where nothing hints at any.

    Raises:
        ClusterError: something does, and torch cannot be imported, fails, or takes longer than two minutes.
    """
    if not hint():
        return ()
    if "torch" in sys.modules and device.is_started():
        found = accelerators()
    else:
        # what there is, whatever is wanted: `find_gpus` compares
        found = _asked(frozenset(pair for pair in os.environ.items() if pair[0] != device.DEVICE_VARIABLE))
    return tuple(Device.model_validate(one) for one in found)


def hint() -> str | None:
    """Reason to believe that torch knows an accelerator that NVML does not; None without one. Torch is not imported."""
    if plugins := _plugins(tuple(sys.path)):
        return f"the torch plugin {plugins[0]} is installed"
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "this is a Mac with a GPU"
    for name, maker in (("hip", "AMD"), ("xpu", "Intel")):
        if re.search(rf"^{name}\b[^=\n]*= *['\"]", _version_file(), re.MULTILINE):
            return f"torch is built for {maker}'s GPUs"
    return None


def accelerators() -> list[dict[str, Any]]:
    """Accelerators of this process's torch, as the values of a `Device` each."""
    import psutil
    import torch

    kind = device.accelerator_type()
    places = [torch.device(kind, index) for index in range(device.count())] if kind else []
    return [
        {
            "index": place.index,
            "kind": place.type,
            "name": device_info.name(place),
            # one that states none shares the host's
            "memory_bytes": device_info.total_memory(place) or psutil.virtual_memory().total,
            "bf16": device_info.states_bf16(place),
            "graphs": device.has_graphs(place),
        }
        for place in places
    ]


@lru_cache(maxsize=4)
def _asked(environment: frozenset[tuple[str, str]]) -> list[dict[str, Any]]:
    """Accelerators of a new process with this environment; asked once."""
    command = [sys.executable, "-P", "-m", "paceline.cluster.torch_devices"]
    without = f"Mend it, or set {device.DEVICE_VARIABLE}={device.CPU} to train on the CPU."
    try:
        answer = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{hint()}, but torch did not say within {_DEADLINE_S:g} s which devices it has. {without}"
        ) from None
    if answer.returncode != 0:
        errors = [line.rstrip(".") for line in answer.stderr.splitlines() if _ERROR.match(line)]
        said = ": ".join(dict.fromkeys(reversed(errors))) or f"exit code {answer.returncode}"
        raise ClusterError(f"{hint()}, but torch cannot say which devices it has: {said}. {without}")
    found: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return found


@lru_cache(maxsize=1)
def _plugins(path: tuple[str, ...]) -> list[str]:
    """Names of installed plugins on an import path; looking for them takes milliseconds."""
    return sorted(point.name for point in entry_points(group=_PLUGINS))


@lru_cache(maxsize=1)
def _version_file() -> str:
    """Text of the installed torch's version.py, which names what it is built for."""
    spec = find_spec("torch")
    try:
        return Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(accelerators()))
