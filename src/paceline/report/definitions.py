"""Definitions of all figures, one each, printed with the label wherever a figure stands."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.stats import LEAST_REPEATS
from paceline.training.record.run import WARM_UP_STEPS
from paceline.units import Shown


@dataclass(frozen=True)
class Definition:
    """A figure's name in tables and captions, and what it is."""

    name: str
    text: str


@dataclass(frozen=True)
class Card:
    """A big figure at the top of a page.

    Has a definition's name, a figure or words, and a comparison.
    """

    term: str
    cell: Shown | str
    note: str = ""


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
    "throughput": ("throughput", "Samples per second = global batch / median step time, warm-up excluded."),
    "tokens": ("token throughput", "Tokens per second = throughput × tokens per sample."),
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
    "speedup": (
        "speedup",
        "S(N) = T(1 device) / T(N devices) for the same job. T is the training time where the runs train to "
        "the job’s stop rule, else the "
        "time per sample. Strong: same global batch. Weak: same batch per device.",
    ),
    "pairs": (
        "speedup by round",
        "The speedup within each round of interleaved runs, in which one device and N devices take turns.",
    ),
    "efficiency": ("efficiency", "S(N) / N: the share of the ideal speedup that is reached."),
    "ideal": (
        "ideal",
        "N devices train N times as fast as one: S(N) = N. A step then takes 1/N of the time at the same "
        "global batch (strong), and the "
        "same time at the same batch per device (weak).",
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
    "interval": (
        "95 % interval",
        "Interval of the median over the repeats (by order from 6 repeats on, Student's t of the logarithms "
        "below): at least 95 of 100 "
        "such intervals hold the true median. Of 3 repeats it is wide.",
    ),
    "no_difference": (
        "no difference",
        (
            f"The intervals of the two compared times overlap, or there are fewer than {LEAST_REPEATS} repeats: "
            "nothing is claimed."
        ),
    ),
    "wire": (
        "bytes on the wire",
        "What one rank sends to the other replicas in a step, as the sync rule counts it, after compression; "
        "in a table that of the rank "
        "with most.",
    ),
    "saved": (
        "saved by compression",
        "Bytes that the same exchange would send more if it were not compressed, in a step of a rank.",
    ),
    "compression_error": (
        "compression error",
        "L2 norm of what compression leaves out, over that of what is to be sent. Error feedback adds what was "
        "left out to the next "
        "exchange, so it comes later and is not lost.",
    ),
    "links": ("bytes over a link", "All that went over an emulated host’s link, headers and other traffic included."),
    "memory": (
        "memory per rank",
        (
            "Largest resident memory seen, shared pages counted by their share where the system tells; that of the "
            "rank with most."
        ),
    ),
    "memory_now": (
        "resident memory",
        "Memory of the rank’s process that is in use at that moment, as the system counts it.",
    ),
    "gpu_memory": (
        "GPU memory per rank",
        "Memory that the rank has allocated on its GPU; in a table that of the rank with most.",
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

PARTS = {name: Definition(*words) for name, words in _PARTS.items()}
DEFINITIONS = PARTS | {name: Definition(*words) for name, words in _FIGURES.items()}


class Used:
    """Looks definitions up and remembers the used ones, in order, for the page's list."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> Definition:
        if name not in self.names:
            self.names.append(name)
        return DEFINITIONS[name]
