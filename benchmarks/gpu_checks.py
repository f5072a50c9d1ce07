"""Checks of `gpu.py`: which paths there are, and how each is held to one process on the CPU.

Splits, rules and settings go through `paceline.run.parity`: losses, gradients and parameters of a few steps against one
process in float64 on the CPU. Rules that are not exact, and whole runs, are held to the same run on CPU ranks, by
their losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_results import CheckRow, CheckVerdict, Described
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.parity.check import Checks, Tolerance

STEPS = 2
_COMMON: dict[str, Any] = {
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "global_batch": 8,
    "stop": {"steps": STEPS},
    "deadline_s": 60.0,
}
_TOKENS = {"kind": "synthetic", "samples": 32, "shape": [32], "vocab": 128, "held_out": 0}
_GPT = {"vocab": 128, "context": 32, "layers": 4, "hidden": 64, "heads": 4}
# Adam divides a gradient by its size, so that it makes large steps of what rounding alone left in a small one.
_ROUNDED: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 1e-2}}
JOBS: dict[str, dict[str, Any]] = {
    "cnn": _COMMON | {"model": "cifar_cnn", "data": {"kind": "synthetic", "samples": 32, "held_out": 0}},
    "gpt": _COMMON | {"model": {"zoo": "gpt", "args": _GPT}, "data": _TOKENS},
    "moe": _COMMON | {"model": {"zoo": "moe", "args": _GPT | {"layers": 2, "experts": 4}}, "data": _TOKENS},
}
ONE, SPLITS, RULES, PRECISION, PRODUCTS, KNOBS = (
    "One device",
    "Splits, two devices",
    "Exact sync rules, two devices",
    "Precisions",
    "Products of splits",
    "Compiled and replayed",
)


@dataclass(frozen=True)
class Case:
    """A plan of a job to check.

    Attributes:
        job: its name in `JOBS`.
        plan: without the precision; that of most is the most exact that the devices have.
        needs: capability of the device, by its name in `paceline.device.Capabilities`.
    """

    group: str
    name: str
    job: str
    plan: str
    needs: str = ""

    @property
    def ranks(self) -> int:
        """Number of devices that it takes."""
        return Plan.parse(self.plan).ranks


# The first are worth the most; what comes later is left out first where time is short.
FIRST = (
    Case(ONE, "GPT", "gpt", "dp=1"),
    Case(ONE, "CNN", "cnn", "dp=1"),
    Case(SPLITS, "data parallel, GPT", "gpt", "dp=2"),
    Case(SPLITS, "FSDP, ZeRO stage 3", "gpt", "fsdp=2"),
    Case(SPLITS, "tensor parallel", "gpt", "tp=2"),
    Case(SPLITS, "pipeline, 1F1B", "gpt", "pp=2 microbatches=4"),
    Case(SPLITS, "context parallel", "gpt", "cp=2"),
    Case(SPLITS, "expert parallel", "moe", "ep=2"),
    Case(PRECISION, "GPT, bf16", "gpt", "precision=bf16", needs="bf16"),
    Case(PRECISION, "GPT, fp32", "gpt", "precision=fp32"),
    Case(PRECISION, "CNN, fp32", "cnn", "precision=fp32"),
    Case(ONE, "fused optimizer", "gpt", "fused=on", needs="fused_optimizers"),
    Case(ONE, "recomputed activations", "gpt", "remat=block"),
    Case(ONE, "gradient accumulation", "gpt", "microbatches=4"),
    Case(ONE, "channels last", "cnn", "memory_format=channels_last"),
)
LATER = (
    Case(RULES, "ring", "gpt", "dp=2 sync=allreduce:ring"),
    Case(RULES, "flat", "gpt", "dp=2 sync=allreduce:flat"),
    Case(RULES, "hierarchical", "gpt", "dp=2 sync=allreduce:hierarchical"),
    Case(RULES, "averaging, the plainest one", "gpt", "dp=2 sync=averaging"),
    Case(RULES, "all-reduce, CNN", "cnn", "dp=2"),
    Case(SPLITS, "FSDP, ZeRO stage 2", "gpt", "fsdp=2 zero=2 microbatches=2"),
    Case(SPLITS, "FSDP, ZeRO stage 1", "gpt", "fsdp=2 zero=1 microbatches=2"),
    Case(SPLITS, "FSDP, shards in host memory", "gpt", "fsdp=2 offload=on"),
    Case(SPLITS, "tensor and sequence parallel", "gpt", "tp=2 sequence=on"),
    Case(SPLITS, "pipeline, GPipe", "gpt", "pp=2 microbatches=4 schedule=gpipe"),
    Case(SPLITS, "pipeline, interleaved", "gpt", "pp=2 microbatches=4 schedule=interleaved"),
    Case(SPLITS, "pipeline, zero bubble", "gpt", "pp=2 microbatches=4 schedule=zero-bubble"),
    Case(PRECISION, "data parallel, bf16", "gpt", "dp=2 precision=bf16", needs="bf16"),
    Case(PRECISION, "FSDP, bf16", "gpt", "fsdp=2 precision=bf16", needs="bf16"),
    Case(PRECISION, "tensor parallel, bf16", "gpt", "tp=2 precision=bf16", needs="bf16"),
    Case(PRECISION, "pipeline, bf16", "gpt", "pp=2 microbatches=4 precision=bf16", needs="bf16"),
    Case(PRECISION, "context parallel, bf16", "gpt", "cp=2 precision=bf16", needs="bf16"),
    Case(PRODUCTS, "data parallel × FSDP", "gpt", "dp=2 fsdp=2"),
    Case(PRODUCTS, "data × tensor parallel", "gpt", "dp=2 tp=2"),
    Case(PRODUCTS, "FSDP × tensor parallel", "gpt", "fsdp=2 tp=2"),
    Case(PRODUCTS, "data parallel × pipeline", "gpt", "dp=2 pp=2 microbatches=2"),
    Case(PRODUCTS, "tensor parallel × pipeline", "gpt", "tp=2 pp=2 microbatches=2"),
    Case(PRODUCTS, "data × context parallel", "gpt", "dp=2 cp=2"),
    Case(PRODUCTS, "data × expert parallel", "moe", "dp=2 ep=2"),
    Case(PRODUCTS, "data × tensor parallel × pipeline", "gpt", "dp=2 tp=2 pp=2 microbatches=2"),
    Case(PRODUCTS, "FSDP × tensor parallel × pipeline", "gpt", "fsdp=2 tp=2 pp=2 microbatches=2"),
    Case(PRODUCTS, "FSDP over eight", "gpt", "fsdp=8"),
    Case(KNOBS, "torch.compile", "gpt", "compile=on"),
    Case(KNOBS, "replayed graphs", "gpt", "compile=reduce-overhead", needs="graphs"),
    Case(KNOBS, "torch.compile, data parallel", "gpt", "dp=2 compile=on"),
)


def cases_on(devices: int, cases: tuple[Case, ...]) -> Iterator[Case]:
    """The cases that so many devices are enough for."""
    return (case for case in cases if case.ranks <= devices)


class PathChecks:
    """Checks of plans, with the steps of one process on the CPU taken once for each job.

    Use `opened` of each in `open`.
    """

    def __init__(self, described: Described) -> None:
        self.described = described
        self._checks = {
            (name, exact): Checks(Job(**(values | ({} if exact else _ROUNDED))), steps=STEPS)
            for name, values in JOBS.items()
            for exact in (True, False)
        }

    def contexts(self) -> Iterator[Any]:
        """Folders of the checks, to be entered before the first `row`."""
        return (checks.opened() for checks in self._checks.values())

    def row(self, case: Case) -> CheckRow:
        """Verdict on a case. Raises what starting and running its ranks raises."""
        exact = "fp64" if self.described.float64 else "fp32"
        plan = case.plan if "precision=" in case.plan else f"{case.plan} precision={exact}"
        text = str(Plan.parse(plan))
        if case.needs and not self.described.capabilities.get(case.needs):
            why = f"the device has no {case.needs.replace('_', ' ')}, as torch tells"
            return CheckRow(case.group, case.name, text, "refused", why)
        parity = self._checks[case.job, plan.endswith("fp64")].check(Plan.parse(plan))
        verdict: CheckVerdict = parity.verdict
        largest = parity.largest
        return CheckRow(
            case.group,
            case.name,
            text,
            verdict,
            _words(largest, parity.tolerance, parity.why_undecided, parity.first_module),
            _finite(largest),
            _finite(parity.tolerance),
        )


def _words(largest: Tolerance, limit: Tolerance, undecided: str | None, first: str | None) -> str:
    """The largest differences beside what is allowed, and where the first one is."""
    parts = [f"{name} {getattr(largest, name):.1e} of {getattr(limit, name):.0e}" for name in ("loss", "gradient")]
    more = [undecided] if undecided else [f"first in {first}"] if first else []
    return "; ".join([*parts, *more])


def _finite(values: Tolerance) -> Mapping[str, float]:
    """By name; JSON has no infinity, so the largest number stands for it."""
    return {name: min(value, 1e308) for name, value in values._asdict().items()}
