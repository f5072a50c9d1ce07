"""Comparison of the ranks' machines: equal ones give bit-identical results for equal inputs."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.comm import Group


def same_machines(group: Group) -> bool:
    """True if the ranks have the same processors, threads and libraries. Every rank of the group calls it."""
    device = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else _processor()
    kinds = group.gather_json(
        [device, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), torch.__version__]
    )
    return all(kind == kinds[0] for kind in kinds)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    wanted = ("vendor_id", "cpu family", "model\t", "model name", "CPU implementer", "CPU part")
    return "; ".join(line for line in lines if line.startswith(wanted))
