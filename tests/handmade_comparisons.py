"""A hand-made comparison of systems, as from a machine of two cores."""

from __future__ import annotations

from typing import Any

from handmade_reports import ENVIRONMENT, around
from paceline_lab.systems.compared import ComparedWay, Comparison


def way(name: str, step_ms: float, label: str = "as documented", **changes: Any) -> ComparedWay:
    """A way to train with a median step of `step_ms`."""
    step = around(step_ms / 1e3, 0.02)
    values: dict[str, Any] = {
        "way": name,
        "system": name.partition("-")[0] if name.startswith("paceline") else name.removesuffix("-tuned"),
        "title": name.removesuffix("-tuned").replace("-", " "),
        "label": label,
        "lines": 6,
        "documentation": f"https://example.org/{name}",
        "difference": 1e-7,
        "same": True,
        "exact": True,
        "step_s": step,
        "speedup": around(19 / step_ms, 0.02),
        "efficiency": around(9.5 / step_ms, 0.02),
        "samples_per_s": around(64e3 / step_ms, 0.02),
        "first_step_s": around(3.0, 0.1),
        "memory_bytes": 600 * 2**20,
        "wire_bytes": None,
        "to_target_s": None,
        "ratio": None if name == "paceline" else around(step_ms / 10.0, 0.03),
        "recovery": "",
        "seconds": [i * step_ms / 1e3 for i in range(60)],
        "losses": [2.3 / (1 + i / 9) for i in range(60)],
    }
    return ComparedWay(**(values | changes))


def comparison(**changes: Any) -> Comparison:
    """paceline, one process, and three others, of which one computes something else."""
    ways = [
        way("paceline", 10.0, "--plan auto", lines=None, memory_bytes=300 * 2**20),
        way("plain", 19.0, "one core", lines=0),
        way("ddp", 14.0),
        way("ddp-tuned", 12.0, "tuned"),
        way("tf-server", 21.0, lines=None, same=False, difference=0.46),
    ]
    values: dict[str, Any] = {
        "job": "digits",
        "command": "paceline bench examples/digits.yaml --systems ddp,tf-server",
        "cluster": "this machine: 2 cores (AMD EPYC), 24 GiB memory, no GPU",
        "created": "2026-11-27T03:20:00+0000",
        "ranks": 2,
        "hosts": 1,
        "steps": 70,
        "repeats": 5,
        "global_batch": 64,
        "target": None,
        "plan": "dp=2 fused=on",
        "ways": ways,
        "best_other": "ddp-tuned",
        "left_out": {"Horovod": "its launcher starts ranks on other hosts by ssh"},
        "remarks": ["paceline takes the shortest steps; DDP takes 1.2 × as long."],
        "notes": ["tf server (as documented) computes something else."],
        "environment": ENVIRONMENT,
    }
    return Comparison(**(values | changes))
