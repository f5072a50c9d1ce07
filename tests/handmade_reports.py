"""Hand-made benchmark reports, as from a machine of two or four cores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from paceline.planning.shortlist import Trial
from paceline.stats import Interval
from paceline_lab.scaling.result import Curve, MeasuredSetting, RankUse, Report

ENVIRONMENT = {
    "python": "3.11.7",
    "paceline": "0.1.0",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "os": "Linux-6.18-x86_64-with-glibc2.36",
    "host": "vm",
    "cpu": "AMD EPYC",
    "cores": 4,
    "physical_cores": 4,
    "memory_bytes": 25276514304,
    "gpus": [],
    "gpu_driver": None,
    "load_average": [0.04, 0.17, 0.08],
    "git_commit": "e412a6333f573ff84e406535640cbe85dbebe53e",
    "variables": {"OMP_NUM_THREADS": "1"},
}


def report(**changes: Any) -> Report:
    """1, 2 and 4 devices, strong and weak; strong scaling suffers from exposed communication and a slow rank."""
    settings = [
        setting(1, "strong", 19.2, 0.002),
        setting(2, "strong", 11.3, 0.011),
        setting(4, "strong", 7.9, 0.02),
        setting(2, "weak", 20.6, 0.011),
        setting(4, "weak", 23.1, 0.02),
    ]
    values: dict[str, Any] = {
        "job": "digits",
        "command": "paceline bench examples/digits.yaml --devices 1,2,4 --repeat 5",
        "cluster": "this machine: 4 cores (AMD EPYC), 24 GiB memory, no GPU",
        "created": "2026-11-21 12:44",
        "repeats": 5,
        "steps": None,
        "target": "accuracy > 0.97",
        "settings": settings,
        "limits": [
            "On 4 devices, a step takes 7.9 ms; ideal would be 4.8 ms.",
            "Most of the difference is exposed communication: 1.8 ms, 23 % of the step.",
            "The others wait 0.7 ms a step for rank 2.",
        ],
        "warnings": [],
        "environment": ENVIRONMENT,
        "tried": [
            Trial("dp=2", "the plan to begin with", around(0.0198, 0.01), predicted_s=0.021),
            Trial("memory_format=channels_last", "kept", around(0.0113, 0.01), around(0.57, 0.01)),
            Trial("compile=on", "not kept: slower", around(0.031, 0.01), around(2.74, 0.01)),
        ],
        "reason": "dp=2 memory_format=channels_last, whose step takes 0.57 of that of dp=2",
    }
    return Report(**(values | changes))


def setting(devices: int, scaling: str, step_ms: float, spread: float, **changes: Any) -> MeasuredSetting:
    """A measured setting of some devices with a median step of `step_ms`.

    Its repeats spread by the share `spread`.
    """
    batch = 64 if scaling == "strong" or devices == 1 else 64 * devices
    step_s = around(step_ms / 1e3, spread)
    gain = around((batch / 64) * 19.2 / step_ms, spread)
    samples_per_s = around(batch / step_s.middle, spread)
    steps = 92
    seconds = [i * step_s.middle for i in range(1, steps + 1)]
    losses: list[float | None] = [
        2.3 * math.exp(-i / 18) + 0.08 + 0.06 * math.sin(7.0 * i + devices) / (1 + i / 20) for i in range(steps)
    ]
    values: dict[str, Any] = {
        "label": "1 device" if devices == 1 else f"{devices} devices",
        "plan": f"dp={devices}" + (" memory_format=channels_last" if devices == 4 else ""),
        "devices": devices,
        "scaling": scaling,
        "global_batch": batch,
        "step_time_s": step_s,
        "throughput": samples_per_s,
        "training_time_s": around(92 * step_s.middle, spread),
        "time_to_target_s": around(92 * step_s.middle, spread),
        "speedup": gain if devices > 1 else None,
        "is_speedup": devices > 1,
        "efficiency": around(gain.middle / devices, spread) if devices > 1 else None,
        "ranks": [rank_use(step_s.middle, devices, rank) for rank in range(devices)],
        "curve": Curve(list(range(1, steps + 1)), seconds, [batch * i for i in range(1, steps + 1)], losses),
        "runs": [f"runs/{devices}-{scaling}-{i}" for i in range(1, 6)],
        "pairs": [gain.middle * (1 + spread * (i - 2) / 4) for i in range(5)] if devices > 1 else [],
    }
    return MeasuredSetting(**(values | changes))


def rank_use(step_s: float, devices: int, rank: int) -> RankUse:
    """A step of which a tenth is communication on 2 devices and more on more.

    Rank 2, where there is one, is waited for.
    """
    waits = 0.0 if devices == 1 or rank == 2 else 0.09
    shares = {
        "data": 0.03,
        "bubble": 0.0,
        "comm": 0.0 if devices == 1 else 0.06 * devices,
        "imbalance": waits,
        "optimizer": 0.09,
        "checkpoint": 0.004,
    }
    shares["compute"] = 1 - sum(shares.values())
    return RankUse(
        {part: share * step_s for part, share in shares.items()},
        {"wire_bytes": 1_074_600.0 if devices > 1 else 0.0, "memory_bytes": 310_000_000 + rank * 4_000_000},
    )


def alike(**changes: Any) -> Report:
    """Two devices whose times overlap with those of one, on a machine with other load."""
    one = setting(1, "strong", 19.2, 0.2)
    two = dataclasses.replace(setting(2, "strong", 17.1, 0.25), is_speedup=False)
    warnings = [
        (
            "Other processes kept 1.7 cores busy before the benchmark: the intervals are wide. Repeat it on a "
            "quiet machine."
        )
    ]
    limits = ["1 and 2 devices take the same time within the intervals, so nothing is claimed."]
    return report(**({"settings": [one, two], "warnings": warnings, "limits": limits} | changes))


def around(middle: float, spread: float) -> Interval:
    """An interval of `spread` to each side."""
    return Interval(middle * (1 - spread), middle, middle * (1 + spread))
