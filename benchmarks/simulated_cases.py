"""The table of trainings that the simulated accelerator is held to: plans, works, and orders of the streams.

A work is a job of a few steps, or a loop of a user's own (`simulated_loops.py`). Each case is trained on simulated
devices and, by the same plan, on the CPU; `simulated_ranks.py` is what their ranks do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

from paceline.extensions import ExtensionPoint
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.planning.sync_info import CODECS
from paceline.planning.sync_info import RULES as SYNC_RULES
from simulated_works import JOBS

Order = Literal["late", "random", "eager"]
STEPS = 4
EXTENSIONS = Path(__file__).resolve().parents[1] / "examples" / "extend"
_OF_A_USERS_OWN: dict[str, tuple[ExtensionPoint[Any], str]] = {
    "majority": (SYNC_RULES, "majority_info:INFO"),
    "exponent": (CODECS, "exponent:INFO"),
}


@contextmanager
def extensions() -> Iterator[None]:
    """Within, a sync rule and a codec of `examples/extend` are known, as if they were installed."""
    before = sys.path[:]
    sys.path.append(str(EXTENSIONS))
    for name, (point, value) in _OF_A_USERS_OWN.items():
        point.installed[name] = EntryPoint(name, value, point.group)
    try:
        yield
    finally:
        sys.path[:] = before
        for name, (point, _) in _OF_A_USERS_OWN.items():
            del point.installed[name]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        plan: its text.
        work: a key of `JOBS`, or the name of a loop in `simulated_loops.py`.
        features: keys of `FEATURES`; what the job does besides.
        order: in which order queued work runs: as late as it may, at random, or at once.
        seed: of the random order.
    """

    plan: str
    work: str = "gpt"
    features: tuple[str, ...] = ()
    order: Order = "late"
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Devices that the plan needs."""
        return Plan.parse(self.plan).ranks

    @property
    def training(self) -> str:
        """Text of the training, whatever the order of the streams."""
        return " + ".join((f"{self.work} {self.plan}", *self.features))

    @property
    def name(self) -> str:
        """Text of the whole case."""
        return f"{self.training}, {self.order}{f' {self.seed}' if self.order == 'random' else ''}"

    @property
    def reference(self) -> Case:
        """The case that this one is held to.

        Random numbers of a device are its own, so what draws some is compared with the device itself, in eager order
        and not interrupted.
        """
        uninterrupted = tuple(feature for feature in self.features if feature != "resume")
        return Case(self.plan, self.work, uninterrupted if self.draws else self.features, "eager")

    @property
    def draws(self) -> bool:
        """True if numbers that the device draws decide: those of dropout, and of a codec's coarse rounding."""
        return self.work == "dropout" or "int4" in self.plan

    @property
    def extended(self) -> bool:
        """True if the plan names what only `extensions` knows."""
        return any(name in self.plan for name in _OF_A_USERS_OWN)

    @property
    def own_loop(self) -> bool:
        """True for a loop of a user's own."""
        return self.work not in JOBS

    def job(self, steps: int = STEPS) -> Job:
        """The job; only for works that are one."""
        values: dict[str, Any] = {
            "name": "case",
            "global_batch": 8,
            "stop": {"steps": steps},
            "deadline_s": 60,
            **JOBS[self.work],
        }
        for feature in self.features:
            for key, value in FEATURES[feature].items():
                values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        return Job(**values)


FEATURES: dict[str, dict[str, Any]] = {
    "clip": {"clip_norm": 0.05},
    "evaluate": {"evaluate": {"every_steps": 1}, "metrics": ["accuracy"], "data": {"held_out": 0.25}},
    "checkpoints": {"checkpoint": {"every_steps": 1}},
    "resume": {},  # after half of the steps, by other engines in the same ranks
    "batch_norm: sync": {"batch_norm": "sync"},
    "skip": {"nonfinite": "skip", "data": {"args": {"nan_at": [5, 23]}}},
    "rewind": {"nonfinite": "rewind", "data": {"args": {"nan_at": [17]}}, "checkpoint": {"every_steps": 1}},
    # after every step, and the next one goes on while it is written: that is so where seconds are counted
    "slow disk": {"checkpoint": {"every_seconds": 1e-6}},
    "loader processes": {"data": {"num_workers": 1}},
    "small buckets": {},  # so that several are sent while the backward pass goes on
    "warm-up": {"schedule": {"name": "cosine", "warmup_steps": 2}},
    "lamb": {"optimizer": {"name": "lamb", "lr": 0.01}},
}


# The table

SPLITS = {  # by work: every split, and products of two and of three; those for more devices last
    "gpt": (
        "fsdp=2",
        "fsdp=2 zero=2 microbatches=2",
        "fsdp=2 zero=1 microbatches=2",
        "fsdp=2 offload=on",
        "fsdp=2 precision=bf16",
        "tp=2",
        "tp=2 sequence=on",
        "pp=2 schedule=gpipe microbatches=4",
        "pp=2 microbatches=4",
        "pp=2 cut=blocks.1 microbatches=2",
        "pp=2 schedule=interleaved microbatches=4",
        "pp=2 schedule=zero-bubble microbatches=4",
        "cp=2",
        "remat=block",
        "remat=selective",
        "dp=2 fsdp=2",
        "dp=2 tp=2",
        "dp=2 pp=2 microbatches=2",
        "dp=2 cp=2",
        "fsdp=2 tp=2 remat=block",
        "fsdp=2 pp=2 microbatches=2",
        "fsdp=2 cp=2",
        "tp=2 pp=2 microbatches=2",
        "cp=2 tp=2 sequence=on",
        "pp=4 microbatches=4",
        "dp=2 tp=2 pp=2 microbatches=2",
        "dp=2 fsdp=2 tp=2",
        "fsdp=2 tp=2 cp=2",
    ),
    "moe": ("ep=2", "dp=2 ep=2", "fsdp=2 ep=2", "ep=2 tp=2", "ep=2 pp=2 microbatches=2", "fsdp=2 ep=2 tp=2"),
    "bert": ("tp=2 sequence=on", "cp=2", "fsdp=2 pp=2 microbatches=2"),
    "vit": ("pp=2 microbatches=4", "fsdp=2 tp=2"),
    "t5": ("fsdp=2", "tp=2", "pp=2 microbatches=2"),
    "cnn": ("fsdp=2",),
    "lstm": ("fsdp=2",),
}
RULES = (
    "dp=2",
    "dp=2 sync=averaging",
    *(f"dp=4 sync=allreduce:{algorithm}" for algorithm in ("flat", "ring", "hierarchical")),
    # where a replica is divided, the algorithm is our own; else it is that of the accelerator's library
    "dp=2 fsdp=2 sync=allreduce:ring",
    "dp=2 tp=2 sync=allreduce:ring",
    "dp=2 sync=local:2",
    "dp=2 sync=diloco:2",
    "dp=2 sync=diloco:3,fragments=2,overlap=1",
    *(
        f"dp=2 compress={codec}"
        for codec in ("fp16", "bf16", "int8", "int4", "1bit", "topk:0.1+bf16", "powersgd:2", "auto")
    ),
    "dp=2 sync=diloco:2 compress=int8",
    "dp=2 fsdp=2 compress=bf16",
    "dp=2 tp=2 sync=local:2",
    # a codec of a user's own
    "dp=2 compress=exponent",
    "dp=2 compress=topk:0.5+exponent",
)
WORKS = (  # of what a job may have besides its plan
    ("dp=1", "mlp", ()),
    ("dp=1", "cnn", ("checkpoints",)),
    ("dp=1", "cnn", ("slow disk", "evaluate")),
    ("fsdp=2", "gpt", ("slow disk", "evaluate")),
    ("dp=1 microbatches=2", "cnn", ("evaluate",)),
    ("dp=1 precision=bf16", "gpt", ("clip",)),
    ("dp=1 fused=on", "gpt", ("warm-up",)),
    ("dp=1 memory_format=channels_last", "cnn", ()),
    ("dp=1", "mlp", ("skip",)),
    ("dp=1", "mlp", ("rewind",)),
    ("dp=1", "mlp", ("loader processes",)),
    ("dp=1", "lstm", ("resume",)),
    ("dp=1", "dropout", ("resume", "checkpoints")),
    ("dp=2", "dropout", ("resume", "evaluate")),
    ("fsdp=2", "dropout", ("resume",)),
    ("dp=1", "sparse", ()),
    ("dp=2", "sparse", ()),
    ("dp=2", "lstm", ("clip",)),
    ("dp=2", "branches", ("small buckets",)),
    ("dp=2", "gpt", ("small buckets", "checkpoints")),
    ("dp=2 microbatches=2", "gpt", ("small buckets", "clip")),
    ("dp=2", "cnn", ("batch_norm: sync",)),
    ("dp=2", "cnn", ("resume", "evaluate")),
    ("dp=2 fused=on precision=bf16", "cnn", ()),
    ("dp=2 compress=powersgd:2", "gpt", ("resume",)),
    ("dp=2 sync=diloco:2", "gpt", ("resume",)),
    ("dp=2 sync=local:3", "gpt", ("evaluate", "checkpoints")),
    ("dp=2", "mlp", ("skip", "loader processes")),
    ("fsdp=2", "gpt", ("resume", "checkpoints")),
    ("fsdp=2", "gpt", ("lamb",)),
    ("tp=2", "gpt", ("resume", "clip")),
    ("pp=2 microbatches=2", "gpt", ("resume", "evaluate")),
    ("ep=2", "moe", ("resume", "evaluate")),
)

LOOPS = (  # of `simulated_loops.py`
    ("dp=1", "steps_of_the_engine"),
    ("dp=2 microbatches=2", "steps_of_the_engine"),
    ("fsdp=2", "steps_of_the_engine"),
    # a rule of a user's own: signs, so that no gradient may be nought but for rounding
    ("dp=2 sync=majority:0.05", "steps_of_the_engine"),
    ("dp=1", "fp16_with_a_loss_scale"),
    ("dp=2", "fp16_with_a_loss_scale"),
    ("dp=1", "own_backward"),
    ("dp=2", "own_backward"),
    ("dp=2", "two_optimizers"),
    ("dp=2", "saved_and_loaded"),
    ("fsdp=2", "saved_and_loaded"),
)
# What `make test` runs of the table in late order, and in random order.
QUICK = {"gpt tp=2", "gpt fsdp=2 + resume + checkpoints", "own_backward dp=2"}
QUICK_AT_RANDOM = {"gpt dp=2 + small buckets + checkpoints", "gpt pp=2 microbatches=4"}


def quick_table() -> list[Case]:
    """The part of the table that `make test` runs."""
    orders = {"late": QUICK, "random": QUICK_AT_RANDOM}
    return [case for case in table() if case.training in orders.get(case.order, ())]


def table() -> list[Case]:
    """Every case, each of its own; those for the same number of devices are neighbours."""
    found = dict.fromkeys(_cases())
    return sorted(found, key=lambda case: case.ranks)


def _cases() -> Iterator[Case]:
    trainings = [
        *(Case(plan, work) for work, plans in SPLITS.items() for plan in plans),
        *(Case(plan) for plan in RULES),
        *(Case(plan, work, features) for plan, work, features in WORKS),
        *(Case(plan, work) for plan, work in LOOPS),
    ]
    for number, training in enumerate(trainings):
        yield training
        yield replace(training, order="random", seed=number)
        if number % 4 == 0 and not training.draws:
            yield replace(training, order="eager")
