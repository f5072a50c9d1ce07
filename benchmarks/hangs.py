"""Errors about hung collectives: do they name the rank, collective, layer and stack, and how soon?

    python benchmarks/hangs.py [--json] [--cases 50] [--seed 0] [--only TEXT]

Each case is a training in which one rank at one step, in one layer, sleeps, is stopped (SIGSTOP) or killed, leaves out
a collective of the layer, or calls it with another shape. The transports are shm, tcp (two emulated hosts, as root),
gloo, and the collectives of the simulated accelerator of `tests/simulated`. Recovery is off, because runs
would otherwise continue.

Figures:
- `cases`: how many were run.
- `named`: how many errors had the rank, the collective, the layer (of the collective, or else of the rank) and the
  step, and showed the stack of the rank. A killed rank has none.
- `in_time`: how many of these came within the deadline and a second.
- `named_s`: the longest time from the fault to the name, beyond the deadline.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import environment_line, parser_of, print_figures

PLANTED = Path(__file__).with_name("hangs_planted.py")
DEADLINE_S, MARGIN_S, LIMIT_S = 4.0, 1.0, 120.0
FAULTS = ("sleep", "stop", "kill")
CALLS = ("skip", "skip-own")
OTHERS = ("mismatch", "mismatch-own")  # of two ranks, nothing shows which one is wrong
# Transport, plan and kinds. A plan that divides the model takes no collective of the model's own. Of calls that differ,
# gloo ends a process by SIGABRT at once, and nothing hangs.
SETTINGS = [
    *((place, "dp=2", FAULTS + CALLS) for place in ("shm", "tcp", "sim")),
    *((place, "dp=3", CALLS + OTHERS) for place in ("shm", "sim")),
    ("gloo", "dp=2", (*FAULTS, "skip-own")),
    *((place, "fsdp=2", FAULTS) for place in ("shm", "gloo", "sim")),
    ("shm", "tp=2", FAULTS),
    ("shm", "pp=2 microbatches=2", FAULTS),
]
PLAY = """
import json, sys, time, paceline
from rich.console import Console
job, plan, cluster, run = json.loads(sys.argv[1])
try:
    paceline.train(job, plan, cluster=cluster, run=run, console=Console(quiet=True))
except paceline.PacelineError as error:
    print(json.dumps({"time": time.time(), "rank": getattr(error, "rank", None), **error.as_json()}))
"""


@dataclass(frozen=True)
class Case:
    """A fault of one run."""

    place: str
    plan: str
    kind: str
    layer: int
    rank: int
    step: int

    def __str__(self) -> str:
        """Describe the case."""
        return f"{self.place} {self.plan}: rank {self.rank} {self.kind} in body.{self.layer}, step {self.step}"


@dataclass(frozen=True)
class Named:
    """Error of a case; `late_s` is its time after the fault and the deadline, in seconds."""

    wrong: str
    late_s: float
    text: str = ""


def cases(count: int, seed: int) -> list[Case]:
    """Return cases of all settings and kinds in turn, each with a random rank, layer and step."""
    dice = random.Random(seed)
    kinds = [(place, plan, kind) for place, plan, of_setting in SETTINGS for kind in of_setting]
    dice.shuffle(kinds)
    made = []
    for place, plan, kind in (kinds * (count // len(kinds) + 1))[:count]:
        ranks = int(plan.split()[0][-1])
        # the layers before a pipeline's cut are on its first rank
        layer, rank = dice.randrange(1, 3), dice.randrange(ranks)
        if plan.startswith("pp"):
            layer = dice.randrange(2) + 2 * rank
        made.append(Case(place, plan, kind, layer, rank, dice.randrange(2, 9)))
    return made


def played(case: Case, folder: Path) -> Named:
    """Run a case, and compare its error with the fault."""
    job = {
        "name": "hangs",
        "model": {"factory": f"{PLANTED}:build", "args": _planted(case, folder)},
        "data": {"kind": "synthetic", "samples": 256, "shape": [2, 4, 4], "classes": 10},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.01},
        "global_batch": 24,
        "stop": {"steps": 40},
        "deadline_s": DEADLINE_S,
    }
    transport = f" transport={case.place}" if case.place == "gloo" else ""
    # a YAML file may hold JSON
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "cluster.yaml").write_text(json.dumps({"emulate": {"hosts": 2}}))
    told = json.dumps(["job.yaml", f"{case.plan}{transport}", "cluster.yaml" if case.place == "tcp" else None, "run"])
    command = [sys.executable, "-c", PLAY, told]
    done = subprocess.run(
        command, cwd=folder, env=_variables(case), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines or not (folder / "begun.json").exists():
        return Named("no error", 0.0, done.stdout + done.stderr)
    error, begun = json.loads(lines[-1]), json.loads((folder / "begun.json").read_text())["time"]
    hangs = [event for event in _events(folder / "run") if event["event"] == "hang"]
    late_s = (hangs[0] if hangs else error)["time"] - begun - DEADLINE_S
    return Named(_wrong(case, error), late_s, error["text"])


def _planted(case: Case, folder: Path) -> dict[str, Any]:
    return {"kind": case.kind, "layer": case.layer, "rank": case.rank, "step": case.step, "folder": str(folder)}


def _variables(case: Case) -> dict[str, str]:
    variables = {**os.environ, "PACELINE_RECOVERY": "off"}
    if case.place == "sim":
        from simulated.environment import simulated_environment

        variables |= simulated_environment(devices=3)
    return variables


def _events(run: Path) -> list[dict[str, Any]]:
    file = run / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _wrong(case: Case, error: dict[str, Any]) -> str:
    """Return the mistakes in the error; "" if there are none."""
    fields, wrong = error["fields"], []
    calls = case.kind in CALLS + OTHERS
    codes = {"kill": ["launch.rank_killed"]}.get(case.kind, ["launch.rank_hung"] + ["launch.calls_differ"] * calls)
    if error["code"] not in codes:
        wrong.append(f"code {error['code']}")
    if error["rank"] != case.rank:
        wrong.append(f"rank {error['rank']}")
    if not fields.get("collective") or not fields.get("group"):
        wrong.append("no collective")
    if fields.get("layer") not in layers(case):
        wrong.append(f"layer {fields.get('layer')!r}")
    step = (case.step + 1) // 2 if "microbatches=2" in case.plan else case.step  # the fault counts passes
    if fields.get("step") != step:
        wrong.append(f"step {fields.get('step')}")
    if case.kind != "kill" and not ("in forward" in error["text"] or calls):
        wrong.append("no stack")
    return ", ".join(wrong)


def layers(case: Case) -> set[str]:
    """Return the correct names: of the collective's layer, or of the layer in which the rank hangs."""
    own = f"body.{case.layer}"
    if case.plan.startswith("fsdp"):
        # gathers the next layer; the simulated device ends or stops with its process, before it does what it has queued
        queued = case.place == "sim" and case.kind in ("kill", "stop")
        # the unit of the model itself comes first, and has the head
        return {f"body.{case.layer + 1}", *(["head", *(f"body.{i}" for i in range(case.layer + 1))] if queued else [])}
    if case.plan.startswith("tp"):
        return {f"{own}.down"}
    return {own, ""} if case.kind == "kill" else {own}


def main() -> None:
    """Run the cases, and print a line for each."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their names")
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # there `simulated` is the accelerator
    found = []
    for case in [case for case in cases(asked.cases, asked.seed) if asked.only in str(case)]:
        with tempfile.TemporaryDirectory(prefix="paceline-hangs-") as folder:
            named = played(case, Path(folder))
        found.append(named)
        late = "" if named.late_s <= MARGIN_S else ", late"
        print(f"{case}: {named.wrong or 'right'}{late} ({named.late_s:+.2f} s)", flush=True)
        if named.wrong or late:
            print(named.text, file=sys.stderr, flush=True)
    right = [named for named in found if not named.wrong]
    in_time = [named for named in right if named.late_s <= MARGIN_S]
    print(f"{len(right)} of {len(found)} named, {len(in_time)} in time; {environment_line()}")
    if asked.json:
        worst = max((named.late_s for named in right), default=0.0)
        print_figures({"cases": len(found), "named": len(right), "in_time": len(in_time), "named_s": round(worst, 2)})


if __name__ == "__main__":
    main()
