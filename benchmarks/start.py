"""Time from a command to the end of the first step, and the cost of a further rank.

The ranks are forked from a forkserver process.

    python benchmarks/start.py [--json] [--repeats N]

Figures:
- `first_step_to_plain`: from the command `paceline train` on two ranks to the end of step 1 / from the command `python`
  to the end of the same step in a plain script of one process.
- `first_step_to_torchrun`: the same / that of `torchrun --nproc-per-node 2` of the script's DistributedDataParallel
  form.
- `command_to_plain`, `command_to_torchrun`: the same for whole commands, which train one step.
- `rank_start_to_import_torch`: from a further launch of one rank to its first line of code / `import torch` in a new
  interpreter.
- `memory_share_of_8_ranks`: proportional set size of 8 ranks forked from a forkserver, and of the forkserver / of 8
  interpreters with the same imports.

The three commands run in turn, so what else the machine does falls on all alike; each ratio is of neighbours, and the
median is shown with its 95 % interval. Their losses are compared first. Figures of a busy machine say little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure import parser_of, print_figures

PLAIN = Path(__file__).with_name("start_plain.py").resolve()
BIN = Path(sys.executable).parent
RANKS_APART, REPEATS, LAUNCHES = 8, 7, 10
JOB = {
    "name": "start",
    "model": {"factory": f"{PLAIN}:network"},
    "data": {"kind": "dataset", "factory": f"{PLAIN}:Images", "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
    "global_batch": 32,
    "stop": {"steps": 1},
}


def main() -> None:
    """Measure, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"rounds of the three commands (default {REPEATS})"
    )
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = {
        **commands(arguments.repeats),
        "rank_start_to_import_torch": rank_start(),
        "memory_share_of_8_ranks": memory_share(),
    }

    from measure import environment_line

    print(environment_line())
    if arguments.json:
        print_figures(figures)


# The three commands


def commands(repeats: int) -> dict[str, float]:
    """The ratios of first steps and of whole commands."""
    from paceline.stats import median_interval

    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(PLAIN)]
    times: dict[str, list[tuple[float, float]]] = {"plain script": [], "torchrun, DDP": [], "paceline train": []}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for number in range(-1, repeats):  # the first round reads files into memory, and is not counted
            found = {
                "plain script": _script([sys.executable, str(PLAIN)]),
                "torchrun, DDP": _script(torchrun),
                "paceline train": _paceline(Path(folder, f"run-{number}")),
            }
            losses = [loss for loss, _, _ in found.values()]
            if any(abs(loss - losses[0]) > 1e-5 * abs(losses[0]) for loss in losses):
                raise SystemExit(f"the commands do not do the same work: their losses are {losses}")
            for name, (_, first_s, whole_s) in found.items():
                times[name] += [(first_s, whole_s)] if number >= 0 else []
    print(
        f"from the command to the end of the first step, and to the end of the command; {repeats} rounds, "
        "median and 95 % interval"
    )
    for name, pairs in times.items():
        print(f"  {name:16} {median_interval([p[0] for p in pairs])} s   {median_interval([p[1] for p in pairs])} s")
    figures = {}
    for title, part in (("first_step", 0), ("command", 1)):
        for short, other in (("plain", "plain script"), ("torchrun", "torchrun, DDP")):
            ratios = [
                ours[part] / theirs[part] for ours, theirs in zip(times["paceline train"], times[other], strict=True)
            ]
            print(f"  {title}_to_{short:10} {median_interval(ratios)}")
            figures[f"{title}_to_{short}"] = median_interval(ratios).middle
    return figures


def _script(command: Sequence[str]) -> tuple[float, float, float]:
    """Loss, seconds to the end of the first step, and seconds to the end of the command."""
    started = time.time()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    whole_s = time.time() - started
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")
    loss, at = ended.stdout.split()[-2:]
    return float(loss), float(at) - started, whole_s


def _paceline(run: Path) -> tuple[float, float, float]:
    """The same of `paceline train`, from the run's record."""
    job = run.with_suffix(".yaml")
    job.write_text(json.dumps(JOB))
    started = time.time()
    command = [str(BIN / "paceline"), "train", str(job), "--plan", "dp=2", "--run", str(run)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    whole_s = time.time() - started
    step = json.loads((run / "steps" / "rank-0.jsonl").read_text().splitlines()[0])
    return step["loss"], step["time"] - started, whole_s


# Further ranks


def rank_start() -> float:
    """Seconds from a launch to a rank's first line / seconds of importing torch."""
    from paceline.elastic.attempt import launch
    from paceline.elastic.place import on_this_machine
    from paceline.elastic.ranks import Setting
    from paceline.stats import median_interval

    code = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
    starts, imports = [], []
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for number in range(-1, LAUNCHES):
            file = Path(folder, str(number))
            imports.append(
                float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
            )
            started = time.time()
            launch(Setting([f"{Path(__file__).resolve()}:arrive", str(file)], on_this_machine(1)))
            # the first one waits for the forkserver's imports
            starts += [float(file.read_text()) - started] if number >= 0 else []
    ratio = median_interval(starts).middle / median_interval(imports).middle
    print(
        f"a further rank: {median_interval(starts)} s to its first line; import torch: "
        f"{median_interval(imports)} s; ratio {ratio:.3f}"
    )
    return ratio


def arrive(arguments: list[str]) -> None:
    """As a rank: write the time of day."""
    now = time.time()
    Path(arguments[0]).write_text(str(now))


# Memory


def memory_share() -> float:
    """Memory of ranks that are forked / of as many interpreters."""
    forked, apart = _memory_bytes(fork=True), _memory_bytes(fork=False)
    print(
        f"{RANKS_APART} ranks: {forked / 2**20:,.0f} MiB forked, with their forkserver; {apart / 2**20:,.0f} MiB "
        f"apart; {forked / apart:.2f}"
    )
    return forked / apart


def _memory_bytes(*, fork: bool) -> int:
    import psutil

    from paceline.elastic.attempt import launch
    from paceline.elastic.place import on_this_machine
    from paceline.elastic.ranks import Setting

    measured: list[int] = []
    with tempfile.TemporaryDirectory(prefix="start-") as folder:

        def look() -> None:
            if not measured and len(list(Path(folder).glob("ready-*"))) == RANKS_APART:
                processes = psutil.Process().children(
                    recursive=True
                )  # the forkserver is one of them, where there is one
                named = [
                    p
                    for p in processes
                    if "paceline" in " ".join(p.cmdline()) and (fork or "forkserver_process" not in str(p.cmdline()))
                ]
                measured.append(sum(p.memory_full_info().pss for p in named))
                Path(folder, "measured").touch()

        os.environ["PACELINE_FORK"] = str(int(fork))
        target = [f"{Path(__file__).resolve()}:hold", folder]
        launch(Setting(target, on_this_machine(RANKS_APART), deadline_s=600), on_tick=look)
        del os.environ["PACELINE_FORK"]
    return measured[0]


def hold(arguments: list[str]) -> None:
    """As a rank: take a step alone, as training does, and wait until the memory has been measured."""
    import torch

    import paceline.run.loop  # noqa: F401
    from start_plain import Images, network

    model, data = network(), Images()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.nn.functional.cross_entropy(model(data.images), data.labels).backward()
    optimizer.step()
    Path(arguments[0], f"ready-{os.environ['RANK']}").touch()
    while not Path(arguments[0], "measured").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
