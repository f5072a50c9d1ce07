"""Time to a loss on a slow network.

Paceline's sync rules beside PyTorch's DistributedDataParallel (DDP), on emulated hosts.

    python benchmarks/slow_network.py [--json] [--rates 25mbit,100mbit,1gbit,loopback] [--rules "bf16;int8;…"]
                                      [--out FILE.html]

A GPT of 3.3 million parameters learns real text byte by byte (Python's language reference, which comes with Python). 4
hosts with one rank of one thread each, 4 x 128 bytes a rank and step, AdamW at one learning rate for all. Needs root;
the hosts are network namespaces.

The target is the loss that synchronous fp32 training reaches after 150 steps, in the mean over the last 25 steps (400
windows of text: the next ones would give another mean by about 1 %); those losses are a single process's with the same
global batch, which DDP's first losses are compared with. Figures, at 25 Mbit/s each way:
- `bf16_speedup`, `int8_speedup`, `powersgd_speedup`, `diloco_speedup`: 150 x the median step of DDP over gloo / the
  time from a rule's first step until it reaches the target. That time is of one whole run; only rules that take more
  than 2 s a step are not waited for: theirs is the steps that they need, found without the slow network, x the mean
  step (the table marks them with *).
- `limit_speedup`: the same of 150 steps without any communication. `fp16_ddp_speedup`: of DDP with PyTorch's hook that
  sends 16 bits.
- `worst_compressed_loss_ratio`: the loss after 150 steps (in the mean over the last 25) / the synchronous one, of the
  worst of bf16, int8 and PowerSGD. 1-bit and top-k are in the tables beside them: under AdamW they learn more slowly,
  and no setting here makes up for it.
- `auto_to_best_…`, at each rate: the step of `compress=auto`, once it has chosen / the fastest step of what it chooses
  from, each measured alone. It asks a codec that loses more to be faster by 5 %, so up to 1.05 it is right.

Losses of a rule are the mean over its replicas, each before its step and under its own weights; beside it stands the
validation loss under the weights that they agree on. Losses do not depend on the network, so that for the other rates
the steps to the target are taken from one run and only the steps are timed again. Bytes are what a host's link carries
each way per step, counted at its interface.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import environment_line, parser_of, print_figures
from paceline.cluster.discover import discover, environment
from paceline.cluster.emulate import Emulation
from paceline.cluster.host import Emulate
from paceline.elastic.forkserver import ALLOCATOR
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run
from served import Ranks
from slow_network_page import Rates, RuleFigures, write_rules_page

HOSTS, TARGET_STEPS, SMOOTHED, MAX_STEPS = 4, 150, 25, 250
SLOWEST, LOOPBACK = "25mbit", "loopback"
RATES = (SLOWEST, "100mbit", "1gbit", LOOPBACK)
WARM_UP, TIMED, BLOCK = 2, 10, 10
WAITED_FOR_S = 2.0  # a step; a rule that is slower is timed over a few steps only
DDP, DDP_16, LIMIT = "DDP", "DDP, 16-bit hook", "no communication"
EXACT, AUTO = "exact", "auto"
COMPRESSED = ("bf16", "int8", "PowerSGD")
BY_HAND = (EXACT, *COMPRESSED)  # what compress=auto chooses from
TIMED_ONLY = (EXACT, AUTO)  # whose losses are known, or are those of the choice
# does the same in every step; the others are timed over more of them
EVERY_STEP = (*TIMED_ONLY, *COMPRESSED, "1-bit", "top-k")
SAME = 1e-3  # how far rounding alone drives losses apart within the first steps
Carried = Callable[[], list[int]]  # bytes of each host's link, of the direction that has more
RULES = {  # the plans beside `dp=4 threads=1`
    EXACT: "",
    "bf16": "compress=bf16",
    "int8": "compress=int8",
    "1-bit": "compress=1bit",
    "top-k": "compress=topk:0.05",
    "PowerSGD": "compress=powersgd:16+int8",
    "local SGD": "sync=local:8",
    # Short periods and little outer momentum: in a run of a few hundred steps, what arrives late or lingers costs more
    # than it brings.
    "DiLoCo": "sync=diloco:3,fragments=3,overlap=1,lr=1.0,momentum=0.1 compress=int4",
    AUTO: "compress=auto",
}
_RANKS = [str(Path(__file__).with_name("slow_network_ranks.py"))]
FIGURES = {"bf16": "bf16_speedup", "int8": "int8_speedup", "PowerSGD": "powersgd_speedup", "DiLoCo": "diloco_speedup"}
JOB: dict[str, Any] = {
    "model": {"zoo": "gpt", "args": {"layers": 4, "hidden": 256, "heads": 4, "context": 128}},
    "data": {"kind": "text", "path": f"{sysconfig.get_paths()['stdlib']}/pydoc_data", "context": 128, "held_out": 0.02},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1},
    "schedule": {"name": "constant", "warmup_steps": 20},
    "global_batch": 16,
    "clip_norm": 1.0,
    "evaluate": {"every_epochs": 10**6},
    "checkpoint": {"every_seconds": 1e9},
    "deadline_s": 300,
    "stop": {"steps": 10**9},
}


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rates", default=",".join(RATES), help="of the links, each way; loopback is this machine as it is"
    )
    parser.add_argument("--rules", default=";".join(RULES), help=f"which: {'; '.join(RULES)}")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the tables as a page with pictures")
    arguments = parser.parse_args()
    rates, rules = arguments.rates.split(","), arguments.rules.split(";")
    if unknown := [rule for rule in rules if rule not in RULES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {'; '.join(RULES)}")
    with tempfile.TemporaryDirectory(prefix="paceline-slow-network-") as folder:
        found = Comparison.made(Path(folder), rates, rules)
    print("\n".join(found.lines()))
    print(environment_line())
    if arguments.out is not None:
        print(f"page: {write_rules_page(found.page(), arguments.out)}")
    if arguments.json:
        print_figures({k: round(v, 4) for k, v in found.figures().items()})


# What was found


@dataclass
class Timing:
    """A rule, or another way to train, at one rate.

    Attributes:
        step_s: median of DDP, which does the same in every step; else the mean, over whole periods.
        link_bytes: per step, what the busiest host's link carried, each way; of loopback what the rule counts, None
            where it is not a rule.
        ended_s: of each step of a run that was waited for, seconds from its first step on.
    """

    step_s: float
    link_bytes: float | None
    said: list[str] = field(default_factory=list)
    ended_s: list[float] | None = None


@dataclass
class Learnt:
    """The losses of a rule's steps, and the loss on validation text at their end."""

    losses: list[float]
    held_out: float | None = None


@dataclass
class Comparison:
    """All that was measured: timings by rate and rule, losses by rule."""

    reference: list[float]
    timings: dict[str, dict[str, Timing]] = field(default_factory=dict)
    learnt: dict[str, Learnt] = field(default_factory=dict)

    @classmethod
    def made(cls, folder: Path, rates: Sequence[str], rules: Sequence[str]) -> Comparison:
        """Train and measure."""
        started = time.monotonic()
        found = cls(_reference(folder))
        _tell(f"target: loss {found.target:.4f}, of one process after {TARGET_STEPS} steps")
        for rate in rates:
            found.timings[rate] = _at(rate, folder, rules, found)
        missing = [rule for rule in rules if rule not in (*TIMED_ONLY, *found.learnt)]
        if missing:
            with _ranks(LOOPBACK, "auto") as (ranks, _):
                for rule in missing:
                    found.learnt[rule] = Course(
                        ranks, rule, _run(folder, plan_of(rule), JOB["global_batch"])
                    ).to_target(found.target)
                    _tell(f"losses of {rule}: target after {reached(found.learnt[rule].losses, found.target)} steps")
        _tell(f"measured in {(time.monotonic() - started) / 60:.0f} minutes")
        return found

    @property
    def target(self) -> float:
        """The loss to reach."""
        return smoothed(self.reference)[TARGET_STEPS - 1]

    def losses(self, name: str) -> list[float] | None:
        """Those of what does exactly what one process does are that one's; None where they are not known."""
        if name in self.learnt:
            return self.learnt[name].losses
        return self.reference if name in (EXACT, DDP) else None

    def final_loss(self, name: str) -> float | None:
        """After as many steps, and so samples, as define the target."""
        losses = self.losses(name)
        return smoothed(losses)[TARGET_STEPS - 1] if losses and len(losses) >= TARGET_STEPS else None

    def time_to_target_s(self, rate: str, name: str) -> float | None:
        """Seconds from the first step; None where the target was not reached, or nothing is known of losses."""
        timing = self.timings[rate][name]
        if name == LIMIT:
            return TARGET_STEPS * timing.step_s
        losses = self.losses(name)
        steps = reached(losses, self.target) if losses else None
        if steps is None:
            return None
        return timing.ended_s[steps - 1] if timing.ended_s is not None else steps * timing.step_s

    def figures(self) -> dict[str, float]:
        """The figures that the head of this file defines, as far as they were measured."""
        figures: dict[str, float] = {}
        if SLOWEST in self.timings:
            at = self.timings[SLOWEST]
            baseline_s = TARGET_STEPS * at[DDP].step_s
            figures = {"ddp_step_s": at[DDP].step_s, "limit_speedup": at[DDP].step_s / at[LIMIT].step_s}
            figures["fp16_ddp_speedup"] = at[DDP].step_s / at[DDP_16].step_s
            for name, figure in FIGURES.items():
                time_s = self.time_to_target_s(SLOWEST, name) if name in at else None
                if time_s is not None:
                    figures[figure] = baseline_s / time_s
        ratios = [loss / self.target for name in COMPRESSED if (loss := self.final_loss(name)) is not None]
        if ratios:
            figures["worst_compressed_loss_ratio"] = max(ratios)
        for rate, at in self.timings.items():
            by_hand = [at[name].step_s for name in BY_HAND if name in at]
            if AUTO in at and by_hand:
                figures[f"auto_to_best_{rate}"] = at[AUTO].step_s / min(by_hand)
        return figures

    def lines(self) -> Iterator[str]:
        """The tables."""
        yield (
            f"target: loss {self.target:.4f} (mean of {SMOOTHED} steps), which synchronous fp32 reaches after "
            f"{TARGET_STEPS} steps"
        )
        for rate, at in self.timings.items():
            yield (
                f"\n{rate}{'' if rate == LOOPBACK else ' each way'}, {HOSTS} {'ranks' if rate == LOOPBACK else 'hosts'}"
            )
            header = ("step", "kB/step", "steps", "to target", "speedup", "final loss", "held out")
            yield f"  {'':20}" + "".join(f"{name:>12}" for name in header)
            for name, timing in at.items():
                yield f"  {name:20}" + "".join(f"{cell:>12}" for cell in self._cells(rate, name, timing))
            for name in (EXACT, AUTO):
                if name in at and at[name].said:
                    yield f"  {name}: {'; '.join(at[name].said)}"
        yield "* steps to the target, taken from a run on another network, x the mean step here"

    def _cells(self, rate: str, name: str, timing: Timing) -> Iterator[str]:
        losses, time_s = self.losses(name), self.time_to_target_s(rate, name)
        steps = reached(losses, self.target) if losses else None
        held_out = self.learnt[name].held_out if name in self.learnt else None
        yield f"{timing.step_s:.3f} s"
        yield _text(None if timing.link_bytes is None else timing.link_bytes / 1e3, ",.0f")
        yield _text(steps, "d")
        yield (
            f"{_text(time_s, ',.1f')} s{'*' if timing.ended_s is None and name not in (DDP, LIMIT, EXACT) else ' '}"
            if time_s
            else "-"
        )
        yield _text(time_s and TARGET_STEPS * self.timings[rate][DDP].step_s / time_s, ".2f")
        yield _text(self.final_loss(name), ".4f")
        yield _text(held_out, ".4f")

    def page(self) -> Rates:
        """The same, for a page."""
        about = (
            f"A GPT of 3.3 million parameters on real text, {HOSTS} emulated hosts with one rank each. Target: "
            f"loss {self.target:.3f}, "
            f"which synchronous fp32 training reaches after {TARGET_STEPS} steps. Bytes are what the busiest "
            "host’s link carries each way."
        )
        at = {rate: [self._shown(rate, name) for name in timings] for rate, timings in self.timings.items()}
        return Rates("Time to a loss on a slow network", about, at, {"command": " ".join(sys.argv)}, environment())

    def _shown(self, rate: str, name: str) -> RuleFigures:
        timing, losses = self.timings[rate][name], self.losses(name) or []
        ended_s = timing.ended_s or [timing.step_s * (i + 1) for i in range(len(losses))]
        return RuleFigures(
            name=name,
            plan=str(plan_of(name)) if name in RULES else "",
            wire_bytes=timing.link_bytes,
            step_time_s=timing.step_s,
            time_to_target_s=self.time_to_target_s(rate, name),
            final_loss=self.final_loss(name),
            seconds=ended_s[: len(losses)],
            losses=smoothed(losses),
        )


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean over each step and the ones before, 25 in all where there are as many."""
    return [statistics.fmean(losses[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(losses))]


def reached(losses: Sequence[float], target: float) -> int | None:
    """After how many steps the smoothed loss is at the target for the first time; None where it never is."""
    means = smoothed(losses)
    return next((step for step in range(SMOOTHED, len(means) + 1) if means[step - 1] <= target), None)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# Measuring


def _reference(folder: Path) -> list[float]:
    """The losses of one process with the whole global batch: what synchronous training does."""
    with Ranks([*_RANKS, "auto"], ranks=1, environment={**ALLOCATOR}, deadline_s=600) as ranks:
        course = Course(ranks, "reference", _run(folder, Plan(threads=1), JOB["global_batch"]))
        course.take(TARGET_STEPS)
        return course.losses


def _at(rate: str, folder: Path, rules: Sequence[str], found: Comparison) -> dict[str, Timing]:
    """Every way to train at one rate; losses that are found on the way are kept."""
    timings: dict[str, Timing] = {}
    with _ranks(rate, "gloo") as (ranks, carried):
        for name, begun in ((DDP, "ddp"), (DDP_16, "ddp-fp16")):
            course = Course(ranks, begun, _run(folder, Plan(dp=HOSTS, threads=1), JOB["global_batch"]), carried)
            timing = course.timed(TIMED)
            timings[name] = replace(timing, step_s=statistics.median(course.steps_s[WARM_UP:]))
            if name == DDP:
                must_agree(name, course.losses, found.reference)
            _tell(f"{rate}: {name} {timings[name].step_s:.3f} s a step")
    with _ranks(rate, "auto") as (ranks, carried):
        alone = _run(folder, Plan(threads=1), JOB["global_batch"] // HOSTS, each=HOSTS)
        timings[LIMIT] = replace(Course(ranks, "alone", alone).timed(2 * TIMED), link_bytes=0.0)
        for rule in rules:
            timings[rule] = _of_rule(
                rate, Course(ranks, rule, _run(folder, plan_of(rule), JOB["global_batch"]), carried), found
            )
            _tell(f"{rate}: {rule} {timings[rule].step_s:.3f} s a step")
    return timings


def _of_rule(rate: str, course: Course, found: Comparison) -> Timing:
    """A rule's step, and at the slowest rate its whole run where that can be waited for."""
    rule = course.name
    timing = course.timed(TIMED if rule in EVERY_STEP else 4 * TIMED)
    if rule == EXACT:
        must_agree(rule, course.losses, found.reference)
    if rate != SLOWEST or timing.step_s > WAITED_FOR_S or rule in TIMED_ONLY:
        return timing
    found.learnt[rule] = course.to_target(found.target)
    steps = len(course.losses)
    _tell(
        f"{rate}: {rule} took {steps} steps in {course.ended_s[-1]:.0f} s; target after "
        f"{reached(course.losses, found.target)} steps"
    )
    return replace(timing, ended_s=course.ended_s)


class Course:
    """One way to train, begun anew on ranks that are up, and what it has done since.

    Attributes:
        losses: of each step, in the mean over the ranks.
        ended_s: when the last rank had ended it, from the beginning of the first step on.
        said: what the rule says of itself.
    """

    def __init__(self, ranks: Ranks, name: str, run: Path, carried: Carried | None = None) -> None:
        self.ranks, self.name, self.carried = ranks, name, carried
        self.losses: list[float] = []
        self.ended_s: list[float] = []
        self._began: float | None = None
        self._sent: list[int] = []
        self.said: list[str] = []
        ranks.ask({"begin": name, "run": str(run)})

    def take(self, steps: int) -> None:
        """So many steps more."""
        answers = self.ranks.ask({"steps": steps})
        if self._began is None:
            self._began = min(answer["began"] for answer in answers)
        self.losses += [
            statistics.fmean(of_ranks) for of_ranks in zip(*(answer["losses"] for answer in answers), strict=True)
        ]
        self.ended_s += [
            max(of_ranks) - self._began for of_ranks in zip(*(answer["ended"] for answer in answers), strict=True)
        ]
        self._sent = [answer["sent_bytes"] for answer in answers]
        self.said = answers[0]["said"]

    @property
    def steps_s(self) -> list[float]:
        """Seconds of each step."""
        return [end - begin for begin, end in pairwise([0.0, *self.ended_s])]

    def timed(self, steps: int) -> Timing:
        """Warm up, and measure so many steps; those of `auto` once it has made its choice."""
        self.take(WARM_UP)
        while self.name == AUTO and not any(said.startswith("compress=auto") for said in self.said):
            self.take(WARM_UP)
        sent, carried, began_s = self._sent, self.carried and self.carried(), self.ended_s[-1]
        self.take(steps)
        counted = self.carried() if self.carried else self._sent
        most = max(after - before for before, after in zip(carried or sent, counted, strict=True))
        return Timing((self.ended_s[-1] - began_s) / steps, most / steps or None, self.said)

    def to_target(self, target: float) -> Learnt:
        """Train until the target is reached, but as many steps at least as define it."""
        self.take(max(0, TARGET_STEPS - len(self.losses)))
        while reached(self.losses, target) is None and len(self.losses) < MAX_STEPS:
            self.take(BLOCK)
        return Learnt(
            list(self.losses), statistics.fmean(answer["loss"] for answer in self.ranks.ask({"held_out": True}))
        )


@contextmanager
def _ranks(rate: str, transport: str) -> Iterator[tuple[Ranks, Carried | None]]:
    """Ranks that wait for questions, and the counters of each host's link.

    On hosts of their own or on loopback.
    """
    start = partial(Ranks, [*_RANKS, transport], ranks=HOSTS, environment={**ALLOCATOR}, deadline_s=900)
    if rate == LOOPBACK:
        with start() as ranks:
            yield ranks, None
        return
    with Emulation(Emulate(hosts=HOSTS, rate=rate)) as emulation, start(hosts=emulation.hosts) as ranks:
        yield ranks, lambda: [max(link.sent_bytes, link.received_bytes) for link in emulation.carried().values()]


def plan_of(rule: str) -> Plan:
    """The plan of a rule, over four replicas of one thread."""
    return Plan.parse(f"dp={HOSTS} threads=1 {RULES[rule]}")


def _run(folder: Path, plan: Plan, global_batch: int, each: int = 0) -> Path:
    """A new run of the job; with `each`, as many, one for each rank that trains alone."""
    path = Path(tempfile.mkdtemp(dir=folder))
    for number in range(max(1, each)):
        Run.create(
            path / str(number) if each else path,
            Job.model_validate(JOB | {"global_batch": global_batch}),
            discover(),
            plan,
        )
    return path


def must_agree(name: str, losses: Sequence[float], reference: Sequence[float]) -> None:
    """The first losses are those of one process, so what is timed does its work.

    Raises:
        SystemExit: they are others.
    """
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=False))
    if worst > SAME:
        raise SystemExit(f"{name} does not do the work of one process: their losses differ by up to {worst:.1e}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
