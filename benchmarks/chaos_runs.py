"""Seeded chaos runs over jobs, plans and transports: how many held every promise.

    python benchmarks/chaos_runs.py [--json] [--runs N] [--out FILE] [--cases NAMES] [--first SEED] [--at-once N]

Each run is one `paceline chaos` with a seed of its own: a job of a few hundred short steps, on ranks of this machine or
(as root) on emulated hosts, under faults of the kinds that its case names. Two go side by side. What came of each is
written to a file (`chaos-runs.jsonl`), with which the script goes on when it is started again. Figures:
- `chaos_runs`, `chaos_held`: runs, and those that held every invariant; `chaos_faults` that were made in them.
- `chaos_broken_NAME`: runs of a case that did not. Their folders are kept beside the file, and their commands printed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import yaml

from measure import environment_line, parser_of, print_figures

BIN = Path(sys.executable).parent
LIMIT_S = 900.0
WHOLE = "kill,stop,oom,slow,disk-full,corrupt,store"
EXACT = "kill,stop,oom,slow,disk-full,store"  # no weights are changed, so every loss is compared
LINKS = "kill,stop,cut,partition,slow,store"
COMMON: dict[str, Any] = {"loss": "cross_entropy", "checkpoint": {"every_steps": 25}, "evaluate": {"every_steps": 30}}
OFTEN: dict[str, Any] = {"checkpoint": {"every_steps": 3}, "evaluate": {"every_steps": 4}}
TEXT = {"kind": "text", "path": "{stdlib}/pydoc_data", "context": 16, "held_out": 0.01}
JOBS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "cifar_cnn",
        "data": "digits",
        "global_batch": 16,
        "metrics": ["accuracy"],
        "optimizer": {"name": "adamw", "lr": 0.001},
    },
    "mlp": {
        "model": {"zoo": "mlp", "args": {"hidden": 32, "classes": 4}},
        "data": {"kind": "synthetic", "samples": 500, "shape": [1, 28, 28], "classes": 4},
        "global_batch": 48,
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    },
    "gpt": {
        "model": {"zoo": "gpt", "args": {"layers": 2, "hidden": 32, "heads": 2, "context": 16}},
        "data": TEXT,
        "global_batch": 12,
        "clip_norm": 1.0,
        "optimizer": {"name": "adamw", "lr": 0.003},
    },
}


@dataclass(frozen=True)
class Case:
    """A job, how it is trained, and what is done to it."""

    job: str
    plan: str
    kinds: str
    steps: int
    hosts: int = 0
    faults: int = 4
    often: bool = False  # checkpoints and evaluations, every few steps


CASES = {
    "digits-3": Case("digits", "dp=3", EXACT, 200),
    "mlp-4": Case("mlp", "dp=4", WHOLE, 600),
    "gpt-3": Case("gpt", "dp=3", EXACT, 300),
    "mlp-hosts-3": Case("mlp", "dp=3", LINKS, 400, hosts=3),
    "gpt-hosts-4": Case("gpt", "dp=4", LINKS, 250, hosts=4),
    "mlp-1": Case("mlp", "dp=1", WHOLE, 600),
    "gpt-fsdp": Case("gpt", "dp=2 fsdp=2", WHOLE, 200),
    "gpt-pp": Case("gpt", "dp=2 pp=2 microbatches=2", EXACT, 200),
    "gpt-tp": Case("gpt", "dp=2 tp=2", EXACT, 200),
    "mlp-often": Case("mlp", "dp=3", EXACT, 300, often=True),
    "mlp-storm": Case("mlp", "dp=4", "kill,stop,oom", 800, faults=12),
    "gpt-fsdp-hosts": Case("gpt", "dp=2 fsdp=2", LINKS, 200, hosts=4),
    "gpt-pp-hosts": Case("gpt", "dp=2 pp=2 microbatches=2", LINKS, 200, hosts=4),
    "gpt-tp-hosts": Case("gpt", "dp=2 tp=2", LINKS, 200, hosts=4),
    "mlp-hosts-storm": Case("mlp", "dp=4", LINKS, 600, hosts=4, faults=10),
}


@dataclass
class Results:
    """Runs so far, in a file with one line each."""

    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def read(self) -> None:
        """Take over what an earlier start of the script has written."""
        if self.file.exists():
            self.lines = [json.loads(line) for line in self.file.read_text().splitlines()]

    def add(self, line: dict[str, Any]) -> None:
        """Write down one run, and show it."""
        with self.lock:
            self.lines.append(line)
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{len(self.lines):4}  {line['case']:15} seed {line['seed']:<5} {said(line)}", file=sys.stderr)


def main() -> None:
    """Run what is still to be run, and print what came of all."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=300, help="in all, those of the file among them")
    parser.add_argument(
        "--out", type=Path, default=Path("chaos-runs.jsonl"), help="results; a file that exists goes on"
    )
    parser.add_argument("--cases", default=",".join(CASES), help="in turn")
    parser.add_argument("--first", type=int, default=1, help="seed")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    asked = parser.parse_args()
    names = [name for name in asked.cases.split(",") if os.geteuid() == 0 or not CASES[name].hosts]
    results = Results(asked.out.absolute())
    results.read()
    done = {(line["case"], line["seed"]) for line in results.lines}
    wanted = [(names[i % len(names)], asked.first + i) for i in range(asked.runs)]
    folder = results.file.with_suffix("")
    places = [folder / f"side-{number}" for number in range(asked.at_once)]
    free, lock = list(places), Lock()

    def run_one(what: tuple[str, int]) -> None:
        with lock:
            place = free.pop()
        try:
            results.add(run(*what, place, folder / "broken"))
        finally:
            with lock:
                free.append(place)

    with ThreadPoolExecutor(asked.at_once) as pool:
        for _ in pool.map(run_one, [what for what in wanted if what not in done]):
            pass
    show([line for line in results.lines if (line["case"], line["seed"]) in set(wanted)], as_json=asked.json)


def run(name: str, seed: int, folder: Path, broken: Path) -> dict[str, Any]:
    """Play one seed of a case; its folder is kept where a promise was broken."""
    case = CASES[name]
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    job = place / "job.yaml"
    settings = COMMON | (OFTEN if case.often else {}) | JOBS[case.job]
    job.write_text(yaml.safe_dump({"name": name, **settings, "stop": {"steps": case.steps}}))
    words = [
        str(job),
        "--plan",
        case.plan,
        "--faults",
        case.kinds,
        "--steps",
        str(case.steps),
        "--count",
        str(case.faults),
    ]
    words += ["--emulate", str(case.hosts)] if case.hosts else []
    words += [
        "--count",
        str(case.faults),
        "--seed",
        str(seed),
        "--tries",
        "0",
        "--out",
        str(place / "runs"),
        "--json",
    ]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [BIN / "paceline", "chaos", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        out, code = done.stdout, done.returncode
        problem = "" if out.rstrip().endswith("}") else done.stderr[-400:] or "it said nothing"
    except subprocess.TimeoutExpired:
        out, code, problem = "", 1, f"no end within {LIMIT_S:g} s"
    line: dict[str, Any] = {"case": name, "seed": seed, "code": code, "wall_s": round(time.monotonic() - begin, 1)}
    if problem:
        line["problem"] = problem
    else:
        found = json.loads(out.splitlines()[-1])
        line["held"] = found["held"]
        line["faults"] = [fault["fault"] for fault in found["faults"]]
        line["not_made"] = found["not_made"]
        line["commands"] = len(found["commands"])
        line["broken"] = {i["name"]: i["broken"] for i in found["invariants"] if i["broken"]}
    played = place / "runs" / f"seed-{seed}"
    if not line.get("held") and played.exists():
        broken.mkdir(parents=True, exist_ok=True)
        kept = broken / f"{name}-{seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(played, kept)
        line["again"] = f"paceline chaos {kept / 'job.yaml'} --schedule {kept / 'schedule.json'}"
    shutil.rmtree(played, ignore_errors=True)
    return line


def said(line: dict[str, Any]) -> str:
    """Outcome of a run in words."""
    if line.get("held"):
        return f"held, {len(line['faults'])} faults, {line['commands']} commands, {line['wall_s']:g} s"
    if "problem" in line:
        return f"NOT PLAYED: {line['problem']}"
    return f"BROKEN: {line['broken']}\n      again: {line.get('again')}"


def show(lines: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the table, and the figures."""
    made: Counter[str] = Counter(fault.split()[0] for line in lines for fault in line.get("faults", []))
    print(f"{'case':16}{'runs':>6}{'held':>6}")
    figures: dict[str, float] = {}
    for name in CASES:
        own = [line for line in lines if line["case"] == name]
        held = sum(bool(line.get("held")) for line in own)
        if own:
            print(f"{name:16}{len(own):6}{held:6}")
            figures[f"chaos_broken_{name}"] = len(own) - held
    for line in lines:
        if not line.get("held"):
            print(f"{line['case']} seed {line['seed']}: {said(line)}")
    print("faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(made.items())))
    held = sum(bool(line.get("held")) for line in lines)
    figures |= {"chaos_runs": len(lines), "chaos_held": held, "chaos_faults": made.total()}
    print(f"{held} of {len(lines)} runs held every promise")
    print(environment_line())
    if as_json:
        print_figures(figures)


if __name__ == "__main__":
    main()
