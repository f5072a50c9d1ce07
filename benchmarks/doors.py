"""What a script of DDP, Lightning or Accelerate gains by paceline's line.

    python benchmarks/doors.py [--json]

Each framework's own script (doors_scripts.py) as it is, over gloo, and with the line; two ranks on this machine, a CNN
of 268,650 parameters, 32 images a rank. Figures, each their script's step time / ours, the median over neighbouring
blocks that take turns:
- `ddp_shm_speedup`: `init_process_group()` of paceline.
- `lightning_speedup`: `strategy=PacelineStrategy()`. Left out where Lightning is not installed (`make engines`).
- `accelerate_speedup`: `init_process_group()` of paceline before `Accelerator()`.
- `ddp_int8_speedup`: the hook `CodecState("int8")`, over gloo, on two emulated hosts joined at 100 Mbit/s. Left out
  where this is not root.

Losses are compared before times: over shared memory the first ones to 1e-5, with a codec the mean of later ones to 5 %.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from measure import environment_line, parser_of, print_figures
from paceline.cluster.emulate import EmulatedHost, Emulation
from paceline.cluster.host import Emulate
from paceline.stats import Interval, median_interval
from paceline.units import seconds
from served import Ranks

RATE = "100mbit"
STARTS, BLOCKS, BLOCK_STEPS = 3, 7, 60
PROOF_STEPS, EXACT, CODED = 40, 1e-5, 0.05
HERE = Path(__file__).parent
FRAMEWORKS = HERE.parent / "build" / "frameworks" / "bin" / "python"
Blocks = list[tuple[float, float]]  # seconds a step, theirs and ours


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    options = parser.parse_args()
    go_where_lightning_is()
    print(environment_line())
    found: dict[str, Interval] = {}
    for figure, framework, way, rate in cases():
        found[figure] = ratio(blocks := measured(framework, way, rate))
        theirs, ours = (statistics.median(side) for side in zip(*blocks, strict=True))
        verdict = "" if found[figure].low > 1 or found[figure].high < 1 else "; no difference"
        print(f"{figure:20} {seconds(theirs)} a step as it is, {seconds(ours)} with our line: {found[figure]}{verdict}")
    if options.json:
        print_figures({k: v.middle for k, v in found.items()})


def go_where_lightning_is() -> None:
    """Begin again in the environment of `make engines`, where this one has no Lightning."""
    if importlib.util.find_spec("lightning") is None and FRAMEWORKS.exists():
        os.execv(FRAMEWORKS, [str(FRAMEWORKS), *sys.argv])


def cases() -> list[tuple[str, str, str, str | None]]:
    """Figure, framework, way and rate of the link (None: one host) of what can run here; says what cannot."""
    found: list[tuple[str, str, str, str | None]] = [("ddp_shm_speedup", "ddp", "shm", None)]
    for framework in ("lightning", "accelerate"):
        if importlib.util.find_spec(framework) is None:
            print(f"{framework} is left out: it is not installed (make engines)")
        else:
            found.append((f"{framework}_speedup", framework, "shm", None))
    if os.geteuid() == 0:
        found.append(("ddp_int8_speedup", "ddp", "int8", RATE))
    else:
        print("ddp_int8_speedup is left out: emulated hosts need root")
    return found


def measured(framework: str, way: str, rate: str | None) -> Blocks:
    """Seconds a step of neighbouring blocks, after the losses were compared."""
    blocks: Blocks = []
    for _ in range(STARTS):
        with ExitStack() as running:
            hosts: Sequence[EmulatedHost] = ()
            if rate is not None:
                hosts = running.enter_context(Emulation(Emulate(hosts=2, rate=rate))).hosts
            theirs, ours = (running.enter_context(script(framework, side, hosts)) for side in ("plain", way))
            prove_same_work(theirs, ours, exact=way == "shm")
            for block in range(BLOCKS):
                turn = (theirs, ours) if block % 2 else (ours, theirs)
                steps = BLOCK_STEPS if rate is None else BLOCK_STEPS // 4
                times = {side: max(side.ask(["steps", steps])) for side in turn}
                blocks.append((times[theirs], times[ours]))
    return blocks


def script(framework: str, way: str, hosts: Sequence[EmulatedHost]) -> Ranks:
    """The ranks of a script."""
    return Ranks([str(HERE / "doors_scripts.py"), framework, way], ranks=2, hosts=hosts)


def prove_same_work(theirs: Ranks, ours: Ranks, *, exact: bool) -> None:
    """Compare the losses of the first steps, in the mean over the ranks.

    Raises:
        SystemExit: they differ by more than rounding, or with a codec in the mean of the later ones by more than 5 %.
    """
    sides = [
        [statistics.fmean(step) for step in zip(*ranks.ask(["losses", PROOF_STEPS]), strict=True)]
        for ranks in (theirs, ours)
    ]
    if not exact:
        sides = [[statistics.fmean(losses[PROOF_STEPS // 2 :])] for losses in sides]
    worst = max(abs(a - b) / abs(a) for a, b in zip(*sides, strict=True))
    if worst > (EXACT if exact else CODED):
        raise SystemExit(f"{ours.command} does not do the work of {theirs.command}: losses differ by up to {worst:.1e}")


def ratio(blocks: Blocks) -> Interval:
    """Speedup: their time / ours, over neighbouring blocks."""
    return median_interval([theirs / ours for theirs, ours in blocks])


if __name__ == "__main__":
    main()
