"""What `gpu.py` found, as the file that a user can send back. Needs no torch.

`result.json` holds these classes by field. It names no user and no folder: `without_places` takes them out of texts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.files import write_whole
from paceline.stats import Interval

FORMAT = 1  # of the file
NO_TIME = "not run: time"
_HEAD, _TAIL = 1000, 3000  # characters of an error that are kept: what it says first, and its end
CheckVerdict = Literal["holds", "differs", "cannot tell", "refused", "crashed", "not run"]
SpeedVerdict = Literal["measured", "other losses", "refused", "crashed", "not run"]
Mode = Literal["accelerators", "simulated", "cpu"]


@dataclass(frozen=True)
class Described:
    """The devices, as a rank on the first of them sees it.

    Attributes:
        type: torch's, such as `cuda`.
        name: the maker's.
        memory_bytes: of the hardware of one; None where torch does not count it.
        float64: True if it computes in double precision.
        capabilities: `paceline.device.Capabilities` by name.
        versions: of the libraries that compute and communicate, where torch names them.
    """

    type: str
    name: str
    memory_bytes: int | None
    float64: bool
    capabilities: Mapping[str, bool | str | None]
    versions: Mapping[str, str]

    @property
    def mode(self) -> Mode:
        """Kind of the devices: their name says if they are simulated."""
        return "cpu" if self.type == "cpu" else "simulated" if "simulat" in self.name.lower() else "accelerators"


@dataclass(frozen=True)
class CheckRow:
    """Verdict on one path.

    Attributes:
        group: heading that it stands under.
        name: the path in words.
        plan: its text; "" for a loop of a user's own.
        about: the difference in words, or why there is none.
        differences, tolerances: relative, by `loss`, `gradient`, `parameter`, `buffer`.
        took_s: seconds, with the start of the ranks.
    """

    group: str
    name: str
    plan: str
    verdict: CheckVerdict
    about: str = ""
    differences: Mapping[str, float] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    took_s: float = 0.0


@dataclass(frozen=True)
class Side:
    """Figures of one of the two that are compared.

    Attributes:
        step_s: seconds of a step, median over blocks.
        memory_bytes: the most in tensors of a device while it trained; None where torch does not count it.
    """

    step_s: Interval
    memory_bytes: int | None


@dataclass(frozen=True)
class SpeedRow:
    """Measured speed of one plan beside plain PyTorch, DDP or FSDP2.

    Attributes:
        ratio: step time of PyTorch / ours over neighbouring blocks; more than 1: ours is faster.
        tokens: of a sample; 0 for images.
        peak_share: the prediction's MFU times its step time: MFU = this / step time. None where no peak is known.
        predicted_step_s, predicted_memory_bytes: by `paceline.estimate`, before anything was measured.
        about: difference of the losses, or why there is no figure.
    """

    key: str
    name: str
    plan: str
    beside: str
    devices: int
    global_batch: int
    verdict: SpeedVerdict
    about: str = ""
    precision: str = ""
    tokens: int = 0
    ours: Side | None = None
    theirs: Side | None = None
    ratio: Interval | None = None
    peak_share: float | None = None
    predicted_step_s: float | None = None
    predicted_memory_bytes: int | None = None
    prediction_note: str = ""
    took_s: float = 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of our side: global batch / median step time."""
        return None if self.ours is None else self.global_batch / self.ours.step_s.middle

    @property
    def mfu(self) -> float | None:
        """FLOPs of the model over the peak of all devices; None where the peak is not known."""
        return None if self.ours is None or not self.peak_share else self.peak_share / self.ours.step_s.middle


@dataclass
class Results:
    """All that one call of the script found.

    Attributes:
        devices: how many were used.
        minutes: the time that it had.
        interrupted: True if it was stopped before its end.
    """

    described: Described
    devices: int
    minutes: float
    command: str
    environment: Mapping[str, Any]
    checks: list[CheckRow] = field(default_factory=list)
    speeds: list[SpeedRow] = field(default_factory=list)
    took_s: float = 0.0
    interrupted: bool = False

    @property
    def heading(self) -> str:
        """What was run, where; the first words say so if it was no accelerator."""
        described = self.described
        what = f"{self.devices} × {described.name} ({described.type})"
        return {
            "accelerators": what,
            "simulated": f"SIMULATED, no accelerator: {what}",
            "cpu": f"A TRY ON THE CPU, no accelerator: {what}",
        }[described.mode]

    @property
    def verdict(self) -> str:
        """One sentence on the checks."""
        counts = self.counts()
        wrong = counts["differs"] + counts["crashed"]
        run = len(self.checks) - counts["not run"] - counts["refused"]
        if not run:
            return "No path was checked"
        if wrong:
            return f"{wrong} of {run} paths are wrong here: {counts['differs']} differ, {counts['crashed']} crashed"
        more = "".join(f", {counts[name]} {name}" for name in ("cannot tell", "not run") if counts[name])
        return f"{counts['holds']} of {run} paths compute what one CPU process computes{more}"

    def counts(self) -> dict[str, int]:
        """Number of checks of each verdict."""
        found = dict.fromkeys(("holds", "differs", "cannot tell", "refused", "crashed", "not run"), 0)
        for row in self.checks:
            found[row.verdict] += 1
        return found

    def figures(self) -> dict[str, float]:
        """Figures of the `--json` line: counts of checks, and speeds where a device has one to speak of."""
        found: dict[str, float] = {"checks": len(self.checks)}
        found |= {f"checks_{verdict.replace(' ', '_')}": n for verdict, n in self.counts().items()}
        if self.described.mode == "simulated":
            return found
        for row in self.speeds:
            found |= _figures(row)
        one, several = (next((r for r in self.speeds if r.key == key), None) for key in ("gpt", "gpt_ddp"))
        if one and several and one.samples_per_s and several.samples_per_s:
            found["gpt_weak_efficiency"] = several.samples_per_s / several.devices / one.samples_per_s
        return {name: float(f"{value:.6g}") for name, value in found.items()}

    def write(self, file: Path) -> None:
        """Write the file."""
        values = {"format": FORMAT, "heading": self.heading, "verdict": self.verdict, "figures": self.figures()}
        rows = values | asdict(self)
        if self.described.mode == "simulated":
            rows["speeds"] = [asdict(row) for row in map(without_speed, self.speeds)]
        write_whole(file, json.dumps(rows, indent=1) + "\n")


def without_speed(row: SpeedRow) -> SpeedRow:
    """A row of simulated devices, whose times say nothing: that it ran, and its losses."""
    return replace(
        row, ours=None, theirs=None, ratio=None, peak_share=None, predicted_step_s=None, predicted_memory_bytes=None
    )


def _figures(row: SpeedRow) -> dict[str, float]:
    if row.ours is None or row.ratio is None or row.samples_per_s is None:
        return {}
    beside = row.beside.split()[0].lower()
    found = {f"{row.key}_ratio_to_{beside}": row.ratio.middle, f"{row.key}_samples_per_s": row.samples_per_s}
    if row.tokens:
        found[f"{row.key}_tokens_per_s"] = row.samples_per_s * row.tokens
    if row.mfu is not None:
        found[f"{row.key}_mfu"] = row.mfu
    if row.ours.memory_bytes:
        found[f"{row.key}_memory_bytes"] = row.ours.memory_bytes
    if row.ours.memory_bytes and row.predicted_memory_bytes:
        found[f"{row.key}_predicted_to_memory"] = row.predicted_memory_bytes / row.ours.memory_bytes
    if row.predicted_step_s is not None:
        found[f"{row.key}_predicted_to_step"] = row.predicted_step_s / row.ours.step_s.middle
    return found


def without_places(text: str) -> str:
    """An error's text without folders of the machine, and without its middle where it is long."""
    for folder, name in ((Path(__file__).resolve().parents[1], "."), (sys.prefix, ".venv"), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    text = re.sub(r"(?<![\w.~])(?:/[\w.+-]+)+/(?=[\w.+-]+)", "…/", text)  # of absolute paths the file's name stays
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n…\n{text[-_TAIL:]}"


def public(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment without the name of the host and what only this start was given."""
    kept = {name: value for name, value in environment.items() if name != "host"}
    kept["variables"] = {
        name: without_places(str(value))
        for name, value in environment.get("variables", {}).items()
        if not name.startswith("MASTER_")
    }
    return kept
