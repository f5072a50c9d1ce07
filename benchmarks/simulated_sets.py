"""Sets of ranks that train cases, on simulated devices or on the CPU, and the verdicts on what they computed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.device import ON_CPU
from paceline.elastic.forkserver import warm_up
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.errors import LaunchError
from paceline.files import scratch_folder
from paceline.planning.plan import Plan
from simulated.environment import simulated_environment
from simulated_cases import Case, table
from simulated_ranks import Outcome, Request, run_cases

Verdict = Literal["right", "wrong", "crashed", "late", "refused"]
DEADLINE_S = 90.0  # of one step, or between two cases
_IMPORTS = (
    "simulated_ranks",
    "simulated_loops",
    "torch._dynamo",
    "torch.export._trace",
    "torch.distributed.pipelining",
    "paceline.engine.split_model",
    "paceline.sync.compress",
    "paceline.run.own_loop.setup",
)


class Tolerance(NamedTuple):
    """Relative differences that are rounding.

    Attributes:
        least: no parameter is measured by less than this share of the norm of all: some vanish but for rounding.
    """

    loss: float
    parameter: float
    least: float


EXACT, HALF, CODED = Tolerance(1e-5, 1e-4, 1e-3), Tolerance(5e-3, 5e-2, 1e-2), Tolerance(1e-2, 5e-2, 5e-2)


@dataclass(frozen=True)
class Result:
    """Verdict on a case, and why; `difference` is the largest one as a share of what is allowed."""

    case: Case
    verdict: Verdict
    why: str = ""
    difference: float = 0.0


def references(cases: Sequence[Case], device: Mapping[str, str]) -> dict[Case, Outcome]:
    """What each `Case.reference` computes: on the CPU, or in eager order on the device where that draws numbers.

    Raises:
        LaunchError: one crashed there, which is a mistake of the table.
    """
    wanted = dict.fromkeys(case.reference for case in cases)
    found: dict[Case, Outcome] = {}
    for variables, draws in (ON_CPU, False), (device, True):
        with environment(variables):
            for of_size in _by_ranks([case for case in wanted if case.draws == draws]):
                outcomes = _train(of_size)
                if isinstance(outcomes[-1], LaunchError):
                    raise LaunchError(
                        "bench.reference_failed",
                        "{name}, as a reference: {outcome}",
                        name=of_size[len(outcomes) - 1].name,
                        outcome=outcomes[-1],
                    )
                found |= {c: o for c, o in zip(of_size, outcomes, strict=True) if isinstance(o, Outcome)}
    return found


def simulated(
    cases: Sequence[Case],
    expected: Mapping[Case, Outcome],
    device: Mapping[str, str],
    tell: Callable[[Result], bool] = lambda result: True,
) -> list[Result]:
    """Train cases on simulated devices and judge each.

    Args:
        expected: from `references`.
        device: environment variables of the simulated accelerator.
        tell: called with every result; False ends the table there.
    """
    found: list[Result] = []
    with environment(device):
        for of_size in _by_ranks(cases):
            left = list(of_size)
            while left:
                outcomes = _train(left)
                for case, outcome in zip(left, outcomes, strict=False):
                    found.append(judged(case, outcome, expected[case.reference]))
                    if not tell(found[-1]):
                        return found
                left = left[len(outcomes) :]
    return found


def device_variables() -> dict[str, str]:
    """Environment variables of the simulated accelerator; it is built first, if need be."""
    return simulated_environment(devices=max(case.ranks for case in table()))


def judged(case: Case, outcome: Outcome | LaunchError, expected: Outcome) -> Result:
    """The verdict on a case."""
    if isinstance(outcome, LaunchError):
        text = str(outcome)
        verdict: Verdict = "late" if " has been in " in text or "did not come" in text else "crashed"
        return Result(case, verdict, text)
    if outcome.refused or expected.refused:
        same = outcome.refused == expected.refused
        return Result(case, "refused", outcome.refused or "only in the reference: " + expected.refused, float(not same))
    allowed = _tolerance(case)
    found = [
        (_relative(ours, other) / allowed.loss, f"loss {i}: {ours} not {other}")
        for i, (ours, other) in enumerate(zip(outcome.losses, expected.losses, strict=False))
    ]
    if len(outcome.losses) != len(expected.losses) or not expected.parameters.keys() <= outcome.parameters.keys():
        return Result(case, "wrong", f"{len(outcome.losses)} losses, {len(outcome.parameters)} parameters", math.inf)
    least = allowed.least * math.hypot(*(norm for norm, _ in expected.parameters.values()))
    for name, (norm, projection) in expected.parameters.items():
        own = outcome.parameters[name]
        distance = max(abs(own[0] - norm), abs(own[1] - projection)) / max(norm, least)
        found.append((math.inf if math.isnan(distance) else distance / allowed.parameter, name))
    largest, where = max(found)
    return Result(case, "wrong" if largest > 1 else "right", where, largest)


def _relative(ours: float, other: float) -> float:
    if ours == other or (math.isnan(ours) and math.isnan(other)):
        return 0.0
    difference = abs(ours - other) / (abs(other) or 1.0)
    return math.inf if math.isnan(difference) else difference


def _tolerance(case: Case) -> Tolerance:
    plan = Plan.parse(case.plan)
    if plan.compress != "none" and not case.draws:
        return CODED
    return HALF if plan.precision == "bf16" or "fp16" in case.work else EXACT


def _train(cases: Sequence[Case]) -> list[Outcome | LaunchError]:
    """Outcomes of the cases; where ranks fail, the error stands in the place of that case, and is the last."""
    done: list[Outcome] = []
    with scratch_folder() as folder:
        warm_up(*_IMPORTS)
        try:
            results = run_on_ranks(
                run_cases,
                Request(list(cases), folder),
                places=on_this_machine(cases[0].ranks),
                deadline_s=DEADLINE_S,
                start_deadline_s=DEADLINE_S,
                on_partial=lambda outcomes: done.__setitem__(slice(None), outcomes),
            )
        except LaunchError as error:
            return [*done, error]
    return list(results[0])


def _by_ranks(cases: Iterator[Case] | Sequence[Case]) -> list[list[Case]]:
    ordered = sorted(cases, key=lambda case: case.ranks)
    return [list(group) for _, group in groupby(ordered, key=lambda case: case.ranks)]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within, this process has these variables as well, and its ranks find the modules of cases."""
    before = dict(os.environ)
    path = variables.get("PYTHONPATH", before.get("PYTHONPATH", ""))
    here = Path(__file__).resolve().parent
    places = [*filter(None, [path]), str(here.parent / "tests"), str(here)]
    os.environ.update({**variables, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
