"""The environment of a measurement as table lines: known names first, others as written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.units import size

_NAMES = {
    "host": "host",
    "cpu": "CPU",
    "cores": "cores",
    "physical_cores": "physical cores",
    "memory_bytes": "memory",
    "gpus": "GPUs",
    "gpu_driver": "GPU driver",
    "load_average": "load average",
    "os": "operating system",
    "python": "Python",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "paceline": "paceline",
    "git_commit": "git commit",
    "variables": "environment variables",
}


def described(facts: Mapping[str, str], environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values in words; `facts` first, then those of the environment that say anything."""
    known = [name for name in _NAMES if name in environment]
    other = [name for name in environment if name not in _NAMES]
    lines = [(_NAMES.get(name, name.replace("_", " ")), _text(name, environment[name])) for name in (*known, *other)]
    return [(name, text) for name, text in (*facts.items(), *lines) if text]


def _text(name: str, value: Any) -> str:
    match value:
        case None | "":
            return ""
        case dict() if not value:
            return ""
        case []:
            return "none" if name == "gpus" else ""
        case bool():
            return "yes" if value else "no"
        case int() | float() if name.endswith("_bytes"):
            return str(size(value))
        case list() if all(isinstance(entry, int | float) for entry in value):
            return ", ".join(f"{entry:g}" for entry in value)
        case [*_] if all(isinstance(entry, dict) and "name" in entry for entry in value):
            return ", ".join(
                f"{entry['name']} ({_text('memory_bytes', entry.get('memory_bytes')) or 'memory unknown'})"
                for entry in value
            )
        case dict() | list():
            return json.dumps(value, ensure_ascii=False)
    return str(value)
