"""Definitions of figures and templates that all report pages of this package share."""

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
        "Step time of a system / step time of paceline in the same round. Above 1, paceline is faster.",
    ),
    "first_step": Definition("first step", "Wall-clock time from the command to the end of the first step."),
    "all_memory": Definition(
        "memory in all",
        "Largest memory of all processes of a run together, read every two seconds. Shared pages count once.",
    ),
    "recovery": Definition(
        "a rank killed",
        "One more run, in which a rank gets SIGKILL half-way. It shows if training goes on, and after which pause.",
    ),
    "changed_lines": Definition(
        "lines changed",
        "Lines of the system’s script that are not in a plain PyTorch script of one process.",
    ),
    "same_losses": Definition(
        "losses",
        "“The same” means: the first losses equal those of one process within 0.1 %. They are compared before anything "
        "is timed.",
    ),
    "other_losses": Definition(
        "other losses", "The system’s losses differ from those of one process, so it does other work."
    ),
    "speedup": Definition(
        "speedup",
        "S(N) = T(1 device) / T(N devices) for the same job. T is the training time if the runs train to the job’s "
        "stop rule, and otherwise the time per sample. Strong: same global batch. Weak: same batch per device.",
    ),
    "strong_speedup": Definition(
        "strong speedup",
        "Step time of a plain script of one process on one core / step time here, at the same global batch.",
    ),
    "strong_efficiency": Definition("strong efficiency", "Strong speedup / number of ranks."),
    "weak_speedup": Definition(
        "weak speedup",
        "Samples per second / samples per second of a plain script of one process on one core with the batch of one "
        "rank.",
    ),
    "weak_efficiency": Definition(
        "weak efficiency",
        "Weak speedup / number of ranks.",
    ),
    "pairs": Definition(
        "speedup by round",
        "The speedup in each round. In a round, one device and N devices take turns.",
    ),
    "efficiency": Definition("efficiency", "S(N) / N: the share of the ideal speedup that is reached."),
    "ideal": Definition(
        "ideal",
        "N devices are N times as fast as one: S(N) = N. At the same global batch (strong), a step then takes 1/N of "
        "the time; at the same batch per device (weak), it takes the same time.",
    ),
    "lost": Definition(
        "lost to the ideal",
        "Time of a part on N devices, mean over the ranks, minus 1/N of its time on one device. Less than 0 is a gain.",
    ),
    "strong": Definition("strong scaling", "The same global batch on more devices: the same work, sooner."),
    "weak": Definition("weak scaling", "The same batch per device on more devices: more work in about the same time."),
    "no_difference": Definition(
        "no difference",
        f"The intervals of the two times overlap, or there are fewer than {LEAST_REPEATS} repeats. So no difference is "
        "claimed.",
    ),
    "energy": Definition(
        "energy per step", "Energy of all ranks in one step, from RAPL or NVML if the machine has them."
    ),
    "final_loss": Definition("final loss", "Mean training loss of the last 10 steps; the median of several runs."),
    "setting": Definition(
        "setting", "A key of a plan that changes the speed and not the result; auto tries it on the real model."
    ),
    "ratio": Definition(
        "ratio to the first",
        "Step time / step time of the first plan in the same rounds; below 1 is faster. Changes that are measured last "
        "are compared with the best plan.",
    ),
    "simulated_speedup": Definition(
        "speedup", "Predicted throughput / predicted throughput on the fewest devices that the job fits on."
    ),
    "simulated_efficiency": Definition(
        "efficiency",
        "Speedup / the ratio of the numbers of devices. It exceeds 100 % if more devices have the memory to avoid "
        "recomputation.",
    ),
    "simulated_goodput": Definition(
        "goodput", "Useful step time / wall-clock time, with failures at random and the job’s own checkpoints."
    ),
    "simulated_interval": Definition(
        "80 % interval",
        "A measurement lies in it with a probability of 80 %. It follows from the errors of the cost model on "
        "published runs, and for speedups from those on published curves.",
    ),
    "simulated_weak": Definition(
        "weak scaling",
        "The global batch grows with the devices. Each device has as many samples as in the best plan for the job’s "
        "own batch on the whole cluster.",
    ),
    "published": Definition(
        "published curve",
        "Measured by others, on their machines and with their software. Its efficiency is relative to their fewest "
        "devices. Compare its shape; the table names the differences.",
    ),
    "half": Definition("50 %", "Efficiency below which more than half of the devices’ time is lost."),
}


def template_named(name: str) -> Template:
    """Return the Jinja template of this package with a given file name."""
    return template(files(__package__).joinpath("templates", name).read_text())
