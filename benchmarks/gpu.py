"""What a simulated accelerator cannot show: correctness and speed on whatever accelerators are here, in ten minutes.

    python benchmarks/gpu.py [--json] [--minutes 10] [--devices N] [--device cpu] [--recovery] [--out DIR]

It uses up to eight accelerators of any type that the installed torch knows, and writes a page for you and a file to
send back: `report.html` and `result.json` in a new folder here. The file names neither the host nor a folder of it.

It checks every path: each split and their products, exact sync rules, codecs, precisions, settings, pinned loading,
asynchronous checkpoints and resuming, loops of users' own with fp16, recovery from a killed rank. Losses, gradients and
parameters of small models are held to one process on the CPU, in float64 where the devices have it. Then it measures a
GPT of 124 million parameters (smaller where memory is) and a CNN beside plain PyTorch, DDP and FSDP2, each with
paceline's prediction.

With `--recovery`, it checks recovery alone, which needs two devices.

Figures:
- `checks`, and of these `checks_holds`, `checks_differs`, `checks_crashed`, `checks_cannot_tell`, `checks_refused` (the
  device cannot do it, or the plan cannot run) and `checks_not_run` (no time was left).
- `gpt_ratio_to_plain`, `gpt_ddp_ratio_to_ddp`, `gpt_fsdp_ratio_to_fsdp2`, `cnn_ratio_to_plain`, `cnn_ddp_ratio_to_ddp`,
  `gpt_compiled_ratio_to_plain`: step time of PyTorch / ours. More than 1: ours is faster. Both ways live in the same
  processes and take turns in blocks of steps; a ratio is of neighbouring blocks (median, 95 % interval). The loop by
  hand reads no loss, so nothing in it waits for the device. Before any time is taken their first losses are compared.
- `…_samples_per_s`, `…_tokens_per_s`, `…_mfu` (where the device's peak is known), `…_memory_bytes` (the most in tensors
  of one device), `…_predicted_to_step`, `…_predicted_to_memory`: ours, and paceline's prediction / measured.
- `gpt_weak_efficiency`: samples per second of each of N devices / those of one alone.

A path that crashes is a row with its error, and the rest goes on. What no time is left for is "not run: time". Ctrl-C
keeps what is done. On simulated accelerators page and file are marked, and have no speeds. `--device cpu` tries the
script out on the CPU, and is marked, too. Without accelerators it ends with exit code 2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_checks import FIRST, LATER, PathChecks, cases_on
from gpu_loops import KILLED, LoopChecks
from gpu_page import write_results_page
from gpu_ranks import describe
from gpu_results import NO_TIME, CheckRow, Results, SpeedRow, public, without_places, without_speed
from gpu_speed import SpeedCase, measured, speeds_on
from measure import environment_line, parser_of
from paceline.cluster.discover import discover, environment
from paceline.device import ON_CPU
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.errors import PlanError

MOST_DEVICES = 8
# Of the time, until when each stage may go on; what did not fit is tried again at the end.
FIRST_UNTIL, LOOPS_UNTIL, SPEED_UNTIL, ALL_UNTIL = 0.35, 0.5, 0.85, 0.97
# seconds: of a check at most; of a start; to measure, at least and at most
ROW_S, START_S, LEAST_SPEED_S, MOST_SPEED_S = 90.0, 20.0, 4.0, 40.0


def main() -> None:
    """Check, measure, write page and file, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time to use, at most")
    parser.add_argument("--devices", type=int, default=MOST_DEVICES, help="devices to use, at most")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: only try this script")
    parser.add_argument("--recovery", action="store_true", help="only recovery from a killed rank")
    parser.add_argument("--out", type=Path, default=Path(f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"), help="new folder")
    arguments, started = parser.parse_args(), time.monotonic()
    if arguments.device == "cpu":
        os.environ.update(ON_CPU)
    os.environ.setdefault("TORCH_LOGS", "-dynamo")  # it would warn of what is hooked in to compare
    # Ranks find the modules beside this one, behind others: a device's plugin may have one of the name of ours.
    os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH') or Path.cwd()}{os.pathsep}{Path(__file__).parent}"
    described = run_on_ranks(describe, 0, places=on_this_machine(1), start_deadline_s=120.0)[0]
    if described.mode == "cpu" and arguments.device != "cpu":
        print(
            "torch finds no accelerator here. With some, this would check every path of paceline on them and measure "
            "it beside plain PyTorch, DDP and FSDP2. --device cpu tries the script out without any."
        )
        sys.exit(2)
    devices = max(1, min(arguments.devices, MOST_DEVICES, discover().devices, 2 if described.mode == "cpu" else 8))
    command = f"benchmarks/gpu.py --minutes {arguments.minutes:g}"
    results = Results(described, devices, arguments.minutes, command, public(environment()))
    if arguments.recovery and devices < 2:
        print("recovery needs two devices, and this machine has one.")
        sys.exit(2)
    arguments.out.mkdir(parents=True)
    found = Measurement(results, arguments.out, started, only=KILLED if arguments.recovery else "").run()
    print(f"\n{found.heading}\n{found.verdict}\n{environment_line()}")
    print(f"page: {arguments.out / 'report.html'}")
    sent = (
        ". To send it back, attach it to an issue of paceline's repository." if described.mode == "accelerators" else ""
    )
    print(f"file: {arguments.out / 'result.json'}{sent}")
    if arguments.json:
        print(json.dumps({"figures": found.figures(), "environment": found.environment}))
    sys.exit(130 if found.interrupted else 0)


class OutOfTimeError(Exception):
    """A row took longer than it may."""


@dataclass
class Pending:
    """A row that says "not run" until it is taken.

    Attributes:
        take: gets the seconds that are its share.
        limit_s: after which it is stopped.
    """

    rows: list[Any]
    at: int
    take: Callable[[float], CheckRow | SpeedRow]
    limit_s: float


class Measurement:
    """All stages, within the time. After every row the file is written anew.

    Args:
        results: with what is known of the machine.
        out: folder of page and file.
        started: by the monotonic clock.
        only: group of checks of whole runs to take alone; "" takes everything.
    """

    def __init__(self, results: Results, out: Path, started: float, *, only: str = "") -> None:
        self.results, self.out, self.started, self.only = results, out, started, only
        self.total_s = results.minutes * 60
        self._simulated = results.described.mode == "simulated"

    def run(self) -> Results:
        """Take all stages, and write the page; also after Ctrl-C."""
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="paceline-gpu-")))
            paths = PathChecks(self.results.described)
            for context in paths.contexts():
                held.enter_context(context)
            try:
                self.take(self._stages(paths, LoopChecks(self.results.described, self.results.devices, folder)))
            except (KeyboardInterrupt, SystemExit):  # the latter where ranks were stopped by it
                self.results.interrupted = True
                print("stopped; what was done is kept", flush=True)
        self._write()
        write_results_page(self.results, self.out / "report.html")
        return self.results

    def _stages(self, paths: PathChecks, loops: LoopChecks) -> list[tuple[float, list[Pending]]]:
        """Rows of every stage in the order of their value, with the share of the time until which it may go on."""
        devices, described = self.results.devices, self.results.described
        if self.only:
            return [(ALL_UNTIL, [self.pending(case, case.row) for case in loops.cases() if case.group == self.only])]
        first, later = ([self._path(case, paths) for case in cases_on(devices, cases)] for cases in (FIRST, LATER))
        loop_cases = list(loops.cases())
        own, rest = ([self.pending(case, case.row) for case in loop_cases if case.first is f] for f in (True, False))
        speeds = [self._speed(case) for case in speeds_on(devices, described)]
        return [(FIRST_UNTIL, first), (LOOPS_UNTIL, own), (SPEED_UNTIL, speeds), (ALL_UNTIL, later + rest)]

    def _path(self, case: Any, paths: PathChecks) -> Pending:
        return self.pending(case, partial(paths.row, case))

    def pending(self, case: Any, do: Callable[[], CheckRow]) -> Pending:
        rows = self.results.checks
        rows.append(CheckRow(case.group, case.name, case.plan, "not run", NO_TIME))
        return Pending(rows, len(rows) - 1, lambda _: do(), ROW_S)

    def _speed(self, case: SpeedCase) -> Pending:
        """A speed, which is measured for what its share leaves beside the start."""
        rows = self.results.speeds
        rows.append(replace(case.row, about=NO_TIME))

        def take(share_s: float) -> SpeedRow:
            return measured(case, min(MOST_SPEED_S, max(LEAST_SPEED_S, share_s - START_S)))

        return Pending(rows, len(rows) - 1, take, ROW_S + MOST_SPEED_S)

    def take(self, stages: Sequence[tuple[float, list[Pending]]]) -> None:
        """Every stage until its time is over, then what did not fit, in the same order."""
        left: list[Pending] = []
        for until, pending in stages:
            for number, row in enumerate(pending):
                left_s = self._left_s(until)
                if left_s > 0:
                    self._done(row, left_s / (len(pending) - number))
                else:
                    left.append(row)
        for row in left:
            if self._left_s(ALL_UNTIL) > START_S:
                self._done(row, self._left_s(ALL_UNTIL))

    def _left_s(self, share: float) -> float:
        """Seconds until a share of the time is over."""
        return self.started + share * self.total_s - time.monotonic()

    def _done(self, pending: Pending, share_s: float) -> None:
        """Take a row; keep, write and tell what came of it."""
        row, started, left_s = pending.rows[pending.at], time.monotonic(), self._left_s(1.0)
        try:
            with limited(max(1.0, min(pending.limit_s, left_s))):
                row = pending.take(share_s)
        except OutOfTimeError:
            if left_s >= pending.limit_s:
                row = replace(row, verdict="crashed", about=f"did not end within {pending.limit_s:g} s")
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows go on
            refused = isinstance(error, PlanError) or getattr(error, "rank_error", None) == "PlanError"
            text = str(error) if refused else f"{type(error).__name__}: {error}"
            row = replace(row, verdict="refused" if refused else "crashed", about=without_places(text))
        pending.rows[pending.at] = row = replace(row, took_s=round(time.monotonic() - started, 1))
        print(_line(without_speed(row) if self._simulated and isinstance(row, SpeedRow) else row), flush=True)
        self._write()

    def _write(self) -> None:
        self.results.took_s = round(time.monotonic() - self.started, 1)
        self.results.write(self.out / "result.json")


def _line(row: CheckRow | SpeedRow) -> str:
    """A row on the terminal; of a long text the first line."""
    about = row.about.splitlines()[0][:120] if row.about else ""
    if isinstance(row, SpeedRow) and row.ratio is not None:
        about = f"{row.beside} / paceline {row.ratio}; {about}"
    name = f"{row.group}: {row.name}" if isinstance(row, CheckRow) else f"Speed: {row.name}, beside {row.beside}"
    return f"{row.took_s:6.1f} s  {row.verdict:12} {name:60} {about}"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in here once so many seconds are over; ranks that were started end with it."""

    def over(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
