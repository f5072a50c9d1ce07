"""Discovery of this machine as a cluster, and the environment that a run records."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.machine import find_gpus, host_with, this_host
from paceline.device import DEVICE_VARIABLE, VISIBLE

_PACKAGES = ("paceline", "torch", "numpy", "transformers")
_VARIABLES = re.compile(  # variables that may change speed or results, and that cannot contain secrets
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|NCCL|TORCH_NCCL|GLOO|TP|TORCHELASTIC)_[A-Z0-9_]+|CUDA_(DEVICE_ORDER|LAUNCH_BLOCKING)"
    r"|CUBLAS_WORKSPACE_CONFIG|PYTORCH(_CUDA)?_ALLOC_CONF|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|LD_PRELOAD|PYTHONHASHSEED"
    rf"|{'|'.join(VISIBLE)}|{DEVICE_VARIABLE}"
)


def discover() -> Cluster:
    """Return this machine as a cluster of one host, with its devices and links.

    Only the cores and the memory that affinity and control groups allow are included.

    Raises:
        ClusterError: the GPU driver does not work, or devices that PACELINE_HOST_DEVICES requires do not exist.
    """
    return Cluster(name="this machine", hosts=(this_host(),))


def environment() -> dict[str, Any]:
    """Return the properties of this machine that influence a run, as plain JSON values.

    The load average is the mean number of busy cores over the last 1, 5 and 15 minutes.
    """
    gpus = find_gpus()
    host = host_with(gpus)
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Return the Git commit of the current folder; None outside of a repository.

    The text ends in `-dirty` if files differ from the commit.
    """
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
