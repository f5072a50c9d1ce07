"""What the pages of this package share: definitions of figures, and templates."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from jinja2 import Template

from paceline.report import plan_page
from paceline.report.figures import Definition
from paceline.report.page import template
from paceline.stats import LEAST_REPEATS

DEFINITIONS: Mapping[str, Definition] = {
    **plan_page.DEFINITIONS,
    "tokens": Definition("token throughput", "Tokens per second = throughput × tokens per sample."),
    "times_ours": Definition(
        "times ours",
        "Step time of a system / that of paceline in the same round: above 1, paceline takes shorter steps.",
    ),
    "first_step": Definition("first step", "Wall-clock time from the command to the end of the first step."),
    "all_memory": Definition(
        "memory in all",
        "The most that all processes of a run held together, read every two seconds; pages that several share count "
        "once.",
    ),
    "recovery": Definition(
        "a rank killed",
        "In one more run a rank gets SIGKILL half-way: whether training goes on, and after which pause.",
    ),
    "changed_lines": Definition(
        "lines changed",
        "Lines of the system’s script, as it ran here, that a plain PyTorch script of one process has not.",
    ),
    "same_losses": Definition(
        "losses",
        "The same: the first losses agree with those of one process within 0.1 %. They are compared before anything is "
        "timed.",
    ),
    "other_losses": Definition(
        "other losses", "A system whose losses differ from those of one process computes something else."
    ),
    "speedup": Definition(
        "speedup",
        "S(N) = T(1 device) / T(N devices) for the same job. T is the training time where the runs train to the job’s "
        "stop rule, else the time per sample. Strong: same global batch. Weak: same batch per device.",
    ),
    "strong_speedup": Definition(
        "strong speedup",
        "Step time of a plain script of one process on one core / this one’s, at the same global batch.",
    ),
    "strong_efficiency": Definition("strong efficiency", "Strong speedup / number of ranks."),
    "weak_speedup": Definition(
        "weak speedup",
        "Samples a second / those of a plain script of one process on one core, whose batch is that of one rank here.",
    ),
    "weak_efficiency": Definition(
        "weak efficiency",
        "Step time of a plain script of one process on one core with the batch of one rank / that of all ranks with "
        "theirs: weak speedup / number of ranks.",
    ),
    "pairs": Definition(
        "speedup by round",
        "The speedup within each round of interleaved runs, in which one device and N devices take turns.",
    ),
    "efficiency": Definition("efficiency", "S(N) / N: the share of the ideal speedup that is reached."),
    "ideal": Definition(
        "ideal",
        "N devices train N times as fast as one: S(N) = N. A step then takes 1/N of the time at the same global batch "
        "(strong), and the same time at the same batch per device (weak).",
    ),
    "lost": Definition(
        "lost to the ideal",
        "What a part takes in a step of N devices, in the mean over the ranks, beyond 1/N of what it takes on "
        "one; less than 0 is a gain.",
    ),
    "strong": Definition("strong scaling", "The same global batch on more devices: the same work, sooner."),
    "weak": Definition("weak scaling", "The same batch per device on more devices: more work in about the same time."),
    "no_difference": Definition(
        "no difference",
        f"The intervals of the two compared times overlap, or there are fewer than {LEAST_REPEATS} repeats: "
        "nothing is claimed.",
    ),
    "energy": Definition(
        "energy per step", "Energy of all ranks in one step, from RAPL or NVML where the machine tells."
    ),
    "final_loss": Definition(
        "final loss", "Training loss in the mean over the last 10 steps; of several runs the median."
    ),
    "setting": Definition(
        "setting", "A key of a plan that changes the speed and not the result; auto tries it on the real model."
    ),
    "ratio": Definition(
        "ratio to the best", "Step time / that of the best plan so far, measured in the same rounds; below 1 is faster."
    ),
    "simulated_speedup": Definition(
        "speedup", "Predicted throughput / that on the fewest devices on which the job fits."
    ),
    "simulated_efficiency": Definition(
        "efficiency",
        "Speedup / how many times the devices are. More than 100 % where more devices have the memory not to compute "
        "again.",
    ),
    "simulated_goodput": Definition(
        "goodput", "Useful step time / wall-clock: failures drawn at random, with the job’s own checkpoints."
    ),
    "simulated_interval": Definition(
        "80 % interval",
        "Holds what would be measured with a probability of 80 %: of step times by the error of the cost model on "
        "published runs, of speedups by what published curves lose beyond it, drawn together.",
    ),
    "simulated_weak": Definition(
        "weak scaling",
        "The global batch grows with the devices: each has as many samples as in the best plan for the job’s own batch "
        "on the whole cluster.",
    ),
    "published": Definition(
        "published curve",
        "Measured by others, on their machines and with their software; efficiency relative to their fewest devices. "
        "It stands beside for its shape; how it differs is said with it.",
    ),
    "half": Definition("50 %", "The efficiency below which half of what is paid for is lost."),
}


def template_named(name: str) -> Template:
    """Return a template of this package."""
    return template(files(__package__).joinpath("templates", name).read_text())
