"""Finished runs of benchmarks with figures made by hand, for tests of what is concluded from them."""

from __future__ import annotations

from typing import Any

from paceline.engine.meter import PARTS
from paceline.planning.plan import Plan
from paceline_lab.scaling.result import ONE, Curve, MeasuredSetting, RankUse, Setting
from paceline_lab.scaling.summary import FinishedRun, measured

STEPS = 20


def setting(devices: int = 1, scaling: str = "strong", **changes: Any) -> Setting:
    """A setting of a job with a global batch of 64, measured by its step times."""
    key = (ONE if devices == 1 else f"{devices}-devices") + ("-weak" if scaling == "weak" else "")
    values: dict[str, Any] = {
        "key": key,
        "label": "1 device" if devices == 1 else f"{devices} devices",
        "plan": Plan(dp=devices, threads=1),
        "devices": devices,
        "scaling": scaling,
        "global_batch": 64 * (devices if scaling == "weak" else 1),
        "steps": STEPS,
    }
    return Setting(**(values | changes))


def runs_of(
    what: Setting, *step_ms: float, parts_ms: dict[str, float] | None = None, **changes: Any
) -> list[FinishedRun]:
    """One run per step time, with one rank per device.

    All of a step is compute unless `parts_ms` tells otherwise.
    """
    return [_run(what, round_, ms / 1e3, parts_ms or {"compute": ms}, changes) for round_, ms in enumerate(step_ms)]


def result(what: Setting, runs: list[FinishedRun], one: list[FinishedRun], cores: int = 8) -> MeasuredSetting:
    """What the runs say together."""
    return measured(what, runs, one, cores=cores)


def _run(what: Setting, round_: int, step_s: float, parts_ms: dict[str, float], changes: dict[str, Any]) -> FinishedRun:
    values: dict[str, Any] = {
        "setting": what.key,
        "round": round_,
        "run": f"runs/{what.key}-r{round_ + 1}",
        "step_time_s": step_s,
        "samples": float(what.global_batch),
        "steps": STEPS,
        "training_time_s": step_s * STEPS,
        "reason": f"steps: {STEPS} done",
        "reached": False,
        "other_cores": 0.0,
        "energy_joules": None,
        "synthetic": False,
        "ranks": [RankUse({part: parts_ms.get(part, 0.0) / 1e3 for part in PARTS}) for _ in range(what.plan.ranks)],
        "losses": [2.0 - 0.01 * i for i in range(STEPS)],
        "curve": Curve([1, STEPS], [step_s, step_s * STEPS], [64, 64 * STEPS], [2.0, 1.8]),
    }
    return FinishedRun(**(values | changes))
