"""Definitions of all figures, one each, printed with the label wherever a figure stands."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from paceline import units
from paceline.planning.cost.layout import PART_NAMES
from paceline.run.record.goodput import PARTS as WALL_NAMES
from paceline.run.record.run import WARM_UP_STEPS
from paceline.stats import LEAST_REPEATS
from paceline.units import Shown


@dataclass(frozen=True)
class Definition:
    """A figure's name in tables and captions, and what it is."""

    name: str
    text: str


SYNTHETIC = "The data is synthetic: speeds are real, losses and other metrics say nothing about a real task."
_PARTS = {  # those of `paceline.engine.meter.PARTS`, in its order
    "data": ("data wait", "The part of a step in which a rank waits for its next batch."),
    "compute": (
        "compute",
        (
            "The part of a step spent in the forward and backward pass. It is timed before the collective, so that "
            "a slow rank shows as slow."
        ),
    ),
    "bubble": ("pipeline bubble", "The part of a step in which a stage of a pipeline waits for its neighbours."),
    "comm": (
        "exposed communication",
        "The part of a step spent in collectives that no computation hides, without the wait for slower ranks.",
    ),
    "imbalance": (
        "imbalance wait",
        "The part of a step in which a rank is ready to communicate and waits for the slowest rank.",
    ),
    "optimizer": ("optimizer", "The part of a step in which the parameters are updated."),
    "checkpoint": ("checkpoint stall", "The part of a step in which training waits for a checkpoint."),
}
_FIGURES = {
    "throughput": (
        "throughput",
        "Samples per second = global batch / median step time, warm-up excluded. The overall speed is shown if "
        "it differs; it includes evaluations, checkpoints and pauses.",
    ),
    "tokens": ("token throughput", "Tokens per second = throughput × tokens per sample."),
    "round_time": ("round time", "Median wall-clock time of one round of clients, warm-up excluded."),
    "step_time": ("step time", "Median wall-clock time of one optimizer step, warm-up excluded."),
    "global_batch": ("global batch", "Samples per optimizer step, over all devices."),
    "training_time": (
        "training time",
        "Wall-clock time from the first step to the stop rule, evaluations and checkpoints included.",
    ),
    "time_to_target": (
        "time to target",
        "Wall-clock time from the first step until the loss or metric that the job names was reached.",
    ),
    "times_ours": (
        "times ours",
        "Step time of a system / that of paceline in the same round: above 1, paceline takes shorter steps.",
    ),
    "first_step": ("first step", "Wall-clock time from the command to the end of the first step."),
    "all_memory": (
        "memory in all",
        "The most that all processes of a run held together, read every two seconds; pages that several share count "
        "once.",
    ),
    "recovery": (
        "a rank killed",
        "In one more run a rank gets SIGKILL half-way: whether training goes on, and after which pause.",
    ),
    "changed_lines": (
        "lines changed",
        "Lines of the system’s script, as it ran here, that a plain PyTorch script of one process has not.",
    ),
    "same_losses": (
        "losses",
        "The same: the first losses agree with those of one process within 0.1 %. They are compared before anything is "
        "timed.",
    ),
    "other_losses": ("other losses", "A system whose losses differ from those of one process computes something else."),
    "speedup": (
        "speedup",
        "S(N) = T(1 device) / T(N devices) for the same job. T is the training time where the runs train to the job’s "
        "stop rule, else the time per sample. Strong: same global batch. Weak: same batch per device.",
    ),
    "strong_speedup": (
        "strong speedup",
        "Step time of a plain script of one process on one core / this one’s, at the same global batch.",
    ),
    "strong_efficiency": ("strong efficiency", "Strong speedup / number of ranks."),
    "weak_speedup": (
        "weak speedup",
        "Samples a second / those of a plain script of one process on one core, whose batch is that of one rank here.",
    ),
    "weak_efficiency": (
        "weak efficiency",
        "Step time of a plain script of one process on one core with the batch of one rank / that of all ranks with "
        "theirs: weak speedup / number of ranks.",
    ),
    "pairs": (
        "speedup by round",
        "The speedup within each round of interleaved runs, in which one device and N devices take turns.",
    ),
    "efficiency": ("efficiency", "S(N) / N: the share of the ideal speedup that is reached."),
    "ideal": (
        "ideal",
        "N devices train N times as fast as one: S(N) = N. A step then takes 1/N of the time at the same global batch "
        "(strong), and the same time at the same batch per device (weak).",
    ),
    "lost": (
        "lost to the ideal",
        (
            "What a part takes in a step of N devices, in the mean over the ranks, beyond 1/N of what it takes on "
            "one; less than 0 is a gain."
        ),
    ),
    "strong": ("strong scaling", "The same global batch on more devices: the same work, sooner."),
    "weak": ("weak scaling", "The same batch per device on more devices: more work in about the same time."),
    "goodput": (
        "goodput",
        "Useful step time / wall-clock, with restarts, replays and stalls counted against it. The wall-clock is that "
        "of all commands of the run; the time between an end and a resumption is left out.",
    ),
    "interval": (
        "95 % interval",
        "Interval of the median over the repeats (by order from 6 repeats on, Student's t of the logarithms below): at "
        "least 95 of 100 such intervals hold the true median. Of 3 repeats it is wide.",
    ),
    "no_difference": (
        "no difference",
        (
            f"The intervals of the two compared times overlap, or there are fewer than {LEAST_REPEATS} repeats: "
            "nothing is claimed."
        ),
    ),
    "links": ("bytes over a link", "All that went over an emulated host’s link, headers and other traffic included."),
    "memory_now": (
        "resident memory",
        "Memory of the rank’s process that is in use at that moment, as the system counts it.",
    ),
    "staleness": (
        "staleness",
        "Updates that servers made between a worker’s reading of the parameters and the update by its gradient.",
    ),
    "share": (
        "share of the batch",
        "Part of a global batch that a rank computes; it follows the measured speeds of the replicas (balance=auto).",
    ),
    "energy": ("energy per step", "Energy of all ranks in one step, from RAPL or NVML where the machine tells."),
    "warm_up": (
        "warm-up",
        f"The first {WARM_UP_STEPS} steps, left out of speeds and breakdowns: they allocate memory and fill caches.",
    ),
    "loss": ("training loss", "Mean loss over a step’s global batch, before the update of that step."),
    "final_loss": ("final loss", "Training loss in the mean over the last 10 steps; of several runs the median."),
    "held_out": ("validation metric", "A measure of the model on validation samples, which it is not trained on."),
    "knobs": (
        "knobs",
        "Settings that change the speed and not the result, tried on the real model; the fastest are kept.",
    ),
    "load": ("load average", "How many cores were busy or wanted, over 1, 5 and 15 minutes before the start."),
}
_PREDICTED = {  # on a plan's page
    "predicted_step": (
        "step time",
        "Of one optimizer step, all ranks together, as the cost model predicts it; not measured.",
    ),
    "predicted_throughput": ("throughput", "Samples per second = global batch / predicted step time."),
    "predicted_tokens": ("token throughput", "Tokens per second = throughput × tokens per sample."),
    "mfu": (
        "MFU",
        "Model FLOPs utilisation (Chowdhery et al., 2022, arXiv:2204.02311): FLOPs of the model, without those "
        "computed again, over what all devices could do at their peak in the time of a step.",
    ),
    "device_memory": ("memory", "The most that the fullest rank holds at once on its device, as predicted."),
    "cost": ("cost", "Price of a device for an hour, as you gave it, × devices × time."),
    "device_seconds": (
        "device-seconds",
        "Devices × predicted step time: what a step costs, in units of the price of a device.",
    ),
    "predicted_goodput": (
        "goodput",
        "Useful step time / wall-clock, as predicted for failures at random; start-up and evaluations are not counted.",
    ),
    "gap": (
        "optimality gap",
        "By what part of its time the best plan may miss the optimum of the whole space, as this model predicts it.",
    ),
    "pareto": (
        "not beaten in both",
        "No other plan that was found is better in time as well as in the other figure.",
    ),
    "predicted_scaling": (
        "strong scaling",
        "The same job, global batch included, on more devices of the same kind, each number of them with its best "
        "plan.",
    ),
    "predicted_speedup": (
        "speedup",
        "Step time on the fewest devices on which the job fits / step time on these.",
    ),
    "predicted_efficiency": (
        "efficiency",
        "Speedup / how many times the devices are. More than 100 % where more devices have the memory not to "
        "compute again.",
    ),
    "gain": (
        "gain",
        "Throughput of the best plan with the change over that without, less 1, by the same model.",
    ),
}
_SIMULATED = {  # on the page of `paceline bench --simulate`
    "simulated_speedup": (
        "speedup",
        "Predicted throughput / that on the fewest devices on which the job fits.",
    ),
    "simulated_efficiency": (
        "efficiency",
        "Speedup / how many times the devices are. More than 100 % where more devices have the memory not to compute "
        "again.",
    ),
    "simulated_goodput": (
        "goodput",
        "Useful step time / wall-clock: failures drawn at random, with the job’s own checkpoints.",
    ),
    "simulated_interval": (
        "80 % interval",
        "Holds what would be measured with a probability of 80 %: of step times by the error of the cost model on "
        "published runs, of speedups by what published curves lose beyond it, drawn together.",
    ),
    "simulated_weak": (
        "weak scaling",
        "The global batch grows with the devices: each has as many samples as in the best plan for the job’s own batch "
        "on the whole cluster.",
    ),
    "published": (
        "published curve",
        "Measured by others, on their machines and with their software; efficiency relative to their fewest devices. "
        "It stands beside for its shape; how it differs is said with it.",
    ),
    "half": ("50 %", "The efficiency below which half of what is paid for is lost."),
}
_WALL = {  # those of `paceline.run.record.goodput.PARTS`
    "useful": "Steps done for the first time, without their checkpoint stall.",
    "start": "From the start of the ranks to the first step, and what that step takes beyond the usual time.",
    "restart": "From the last step before a failure that stopped all ranks to the first one after it.",
    "recovery": "Rewinds, and beyond a step’s own time what a failure takes that the other ranks outlive.",
    "recut": "From the checkpoint at which a pipeline was cut anew to the first step with the new cut.",
    "replay": "Steps done again, because the state after them was lost.",
    "checkpoint": "Time in which training waits for a checkpoint, that at the end included.",
    "evaluation": "Measuring the validation set.",
    "between": "What else passes between two steps, such as writing the record.",
}
_PREDICTED_PARTS = {  # those of `paceline.planning.cost.layout.PARTS`
    "compute": "Forward and backward pass: products of matrices and other kernels.",
    "recompute": "What the backward pass computes again instead of keeping it (remat).",
    "launch": "Kernels that wait for the host to start them.",
    "tp": "Sums and gathers between the ranks that shard a layer’s matrices.",
    "cp": "Keys and values between the ranks that shard a sequence.",
    "ep": "Tokens on their way to experts and back.",
    "fsdp": "Gathering weights and scattering gradients, as far as computing does not hide it.",
    "pp": "Activations on their way from stage to stage, as far as they hold up the next one.",
    "bubble": "Stages of the pipeline that wait for their neighbours.",
    "dp": "Gradients between the replicas, as far as the backward pass does not hide it.",
    "optimizer": "The update of the parameters.",
    "other": "What every step takes beside.",
}
_LINKS = {  # on the page of `paceline links`
    "call_time": (
        "time",
        "The slowest rank’s median over the calls of a quarter of a second, after a warm-up; of fp32 numbers.",
    ),
    "algorithm_bandwidth": ("algorithm bandwidth", "Size / time, as nccl-tests define it."),
    "bus_bandwidth": (
        "bus bandwidth",
        "What a rank’s link has to carry each way per second, as nccl-tests define it: algorithm bandwidth × 2 "
        "(n − 1) / n over n ranks for an all-reduce, × (n − 1) / n for an all-gather, a reduce-scatter and an "
        "all-to-all, × 1 for a broadcast and a message.",
    ),
    "link_limit": (
        "limit",
        "The bus bandwidth that no algorithm can exceed on this hardware, from what was measured in the same "
        "run: copies of memory between processes of a host, and TCP streams between hosts, of which each host’s "
        "link has to carry its least share.",
    ),
    "share_of_limit": ("of the limit", "The least time that the limit allows / the time."),
    "latency": ("latency", "Half of the time for the smallest message there and back between two ranks."),
    "checked": ("checked", "Every collective’s result was held to the exact one, before and after it was timed."),
}

Lines = list[dict[str, Any]]  # of a rank's steps


@dataclass(frozen=True)
class RankFigure:
    """A figure of one rank.

    Attributes:
        name: key of results, with the unit.
        term: name of the figure's definition, and of its row in tables.
        title, text: the definition.
        read: reads the value from a run's lines; None if the run has none.
        over_runs: combines the values of several runs.
        shown: formats the value.
        absent: text of a cell without a value.
        only: runs that have the figure: those that compress, or those on accelerators; "": all.
    """

    name: str
    term: str
    title: str
    text: str
    read: Callable[[Lines], float | None]
    over_runs: Callable[[Sequence[float]], float]
    shown: Callable[[float], Shown] = units.size
    absent: str = "not available"
    only: Literal["", "compressed", "accelerators"] = ""


def per_step(lines: Lines, counter: str) -> float | None:
    """A counter's growth per step between first and last reading; None without two."""
    readings = [(line["step"], line["use"][counter]) for line in lines if counter in line.get("use", {})]
    if len(readings) < 2:
        return None
    return float(sum(grown for _, grown in readings[1:]) / (readings[-1][0] - readings[0][0]))


def _readings(lines: Lines, key: str) -> list[float]:
    return [line["use"][key] for line in lines if key in line.get("use", {})]


def _compression_error(lines: Lines) -> float | None:
    return statistics.median(found) if (found := _readings(lines, "compression_error")) else None


def _memory_bytes(lines: Lines) -> float | None:
    """Peak resident memory in bytes, corrected for shared pages by the newest reading.

    The correction is the difference between resident and proportional set size.
    """
    uses = [line["use"] for line in lines if "use" in line]
    peaks = [use.get("peak_memory_bytes", use.get("memory_bytes", 0)) for use in uses]
    shared = next((use["memory_bytes"] - use["pss_bytes"] for use in reversed(uses) if "pss_bytes" in use), 0)
    return max(peaks) - shared if peaks else None


def _gpu_memory_bytes(lines: Lines) -> float | None:
    return max(_readings(lines, "gpu_peak_memory_bytes"), default=None)


RANK_FIGURES = (
    RankFigure(
        "wire_bytes",
        "wire",
        "bytes on the wire",
        "What one rank sends to the other replicas in a step, as the sync rule counts it, after compression; in a "
        "table that of the rank with most.",
        partial(per_step, counter="wire_bytes"),
        statistics.median,
    ),
    RankFigure(
        "saved_bytes",
        "saved",
        "saved by compression",
        "Bytes that the same exchange would send more if it were not compressed, in a step of a rank.",
        partial(per_step, counter="saved_bytes"),
        statistics.median,
        only="compressed",
    ),
    RankFigure(
        "compression_error",
        "compression_error",
        "compression error",
        "L2 norm of what compression leaves out, over that of what is to be sent. Error feedback adds what was left "
        "out to the next exchange, so it comes later and is not lost.",
        _compression_error,
        statistics.median,
        shown=units.number,
        absent="not compressed",
        only="compressed",
    ),
    RankFigure(
        "memory_bytes",
        "memory",
        "memory per rank",
        "Largest resident memory seen, shared pages counted by their share where the system tells; that of the "
        "rank with most.",
        _memory_bytes,
        max,
    ),
    RankFigure(
        "gpu_memory_bytes",
        "gpu_memory",
        "GPU memory per rank",
        "Memory that the rank has allocated on its accelerator; in a table that of the rank with most.",
        _gpu_memory_bytes,
        max,
        only="accelerators",
    ),
)


def figures_of(lines: Lines) -> dict[str, float]:
    """All figures that a run's lines have, by name."""
    return {figure.name: value for figure in RANK_FIGURES if (value := figure.read(lines)) is not None}


def combined(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each figure over several runs, by name."""
    found = {figure: [run[figure.name] for run in runs if figure.name in run] for figure in RANK_FIGURES}
    return {figure.name: figure.over_runs(values) for figure, values in found.items() if values}


PARTS = {name: Definition(*words) for name, words in _PARTS.items()}
DEFINITIONS = PARTS | {
    name: Definition(*words) for name, words in (_FIGURES | _PREDICTED | _SIMULATED | _LINKS).items()
}
DEFINITIONS |= {figure.term: Definition(figure.title, figure.text) for figure in RANK_FIGURES}
DEFINITIONS |= {f"part_{part}": Definition(PART_NAMES[part], text) for part, text in _PREDICTED_PARTS.items()}
DEFINITIONS |= {f"wall_{part}": Definition(WALL_NAMES[part], text) for part, text in _WALL.items()}
