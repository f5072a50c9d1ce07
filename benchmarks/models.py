"""Number of models that each way of dividing works for, with the right results.

Right is what one process computes.

    python benchmarks/models.py [--only PATTERN] [--axes dp,tp,…] [--json]

Every model of `models_cases.py` (Hugging Face configurations, plain modules, and models of timm and torchvision where
these are installed) is checked by the code of `paceline check`, under a plan for each axis and under three products: a
few steps on real ranks against the same steps of one process in float64. An outcome is one of

- `agree`: loss, gradients, parameters and buffers are those of one process; where rounding in float32 is too large to
  say, the same plan is checked with `precision=fp64`, as `paceline check` advises;
- `cannot_tell`: that did not tell either;
- `refused_before_start`: paceline said before any rank was started why it cannot be, and what to do;
- `refused_late`: a rank was started, and then refused;
- `crashed`: a rank raised something else, died, or was not done in time;
- `wrong`: something else was computed.

Figures: the number of each outcome, over all models and plans; `models`, how many there were; and `agree_AXIS`, the
share of agreement among the models that the axis can mean anything for. That is part of the list of models, decided
before any is tried: `cp` for those with attention over tokens, patches or frames; `ep` for mixtures of experts; `dp`,
`fsdp` and `pp`, which all divide a batch, for all whose loss does not compare its samples with each other; `tp` for
all. The other models are tried all the same, and should be refused.

Ranks are forked from a process that has imported torch once. Each result is printed as it comes; with --json the last
line is for machines.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from measure import environment_line, parser_of, print_figures
from models_cases import Case, cases
from paceline.cluster.discover import discover
from paceline.elastic.forkserver import warm_up
from paceline.errors import LaunchError, PacelineError
from paceline.planning.plan import Plan
from paceline.run.parity.check import Checks

PLANS = {
    "dp": "dp=2",
    "fsdp": "fsdp=2",
    "tp": "tp=2",
    "pp": "pp=2 microbatches=2",
    "cp": "cp=2",
    "ep": "ep=2",
    "dp+tp": "dp=2 tp=2",
    "fsdp+pp": "fsdp=2 pp=2 microbatches=2",
    "dp+pp": "dp=2 pp=2 microbatches=2",
}
AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
OUTCOMES = ("agree", "cannot_tell", "refused_before_start", "refused_late", "crashed", "wrong")
STEPS = 2
_IMPORTS = (  # what ranks would otherwise each import; our own first, which sees to what torchvision lacks
    "models_libraries",
    *(
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ),
    *("numpy", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.masking_utils"),
    *("transformers.generation.utils", "transformers.modeling_layers", "transformers.loss.loss_utils"),
    *("paceline.run.loop", "paceline.run.parity.ranks", "paceline.engine.split_model"),
)
_REASON = 160  # characters of a reason that are printed


@dataclass(frozen=True)
class Result:
    """What came of one model under one plan."""

    case: Case
    axis: str
    outcome: str
    why: str
    seconds: float

    def line(self) -> str:
        """For people."""
        why = " ".join(self.why.split())
        line = f"{self.case.name:34} {self.axis:8} {self.outcome:21} {self.seconds:5.1f} s"
        return f"{line}  {why[:_REASON]}".rstrip()


def main() -> None:
    """Try the models, print each result and the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="", help="models whose name holds this regular expression")
    parser.add_argument("--axes", default=",".join(PLANS), help="which plans, by their names in the table")
    arguments = parser.parse_args()
    wanted = [case for case in cases() if re.search(arguments.only, case.name)]
    axes = arguments.axes.split(",")
    if unknown := [axis for axis in axes if axis not in PLANS]:
        parser.error(f"no axis {', '.join(unknown)}; there are {', '.join(PLANS)}")
    # where the forkserver finds models_libraries
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    warm_up(*_IMPORTS)
    results: list[Result] = []
    for case in wanted:
        for result in tried(case, axes):
            results.append(result)
            print(result.line(), flush=True)
    figures = figures_of(results)
    print(table(results, axes))
    print(environment_line())
    if arguments.json:
        print_figures(figures)


def tried(case: Case, axes: list[str]) -> list[Result]:
    """One model under the plan of each axis."""
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        try:
            job = case.job(Path(folder))
        except Exception as error:  # noqa: BLE001 - a model that cannot be described is an outcome as well
            return [Result(case, axis, "crashed", f"no job: {error}", 0.0) for axis in axes]
        results = []
        with Checks(job, discover(), steps=STEPS).opened() as checks:
            for axis in axes:
                started = time.monotonic()
                outcome, why = outcome_of(checks, Plan.parse(PLANS[axis]))
                results.append(Result(case, axis, outcome, why, time.monotonic() - started))
        return results


def outcome_of(checks: Checks, plan: Plan) -> tuple[str, str]:
    """The outcome of one check, and why; of another in float64 where rounding in float32 leaves it open."""
    try:
        parity = checks.check(plan)
        if parity.verdict == "cannot tell" and parity.undecided is None:
            parity = checks.check(replace(plan, precision="fp64"))
    except LaunchError as error:
        return ("refused_late" if error.explained else "crashed"), str(error)
    except PacelineError as error:
        return "refused_before_start", str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, a user would have seen it
        return "crashed", f"{type(error).__name__}: {error}"
    if parity.holds:
        return "agree", ""
    found = ", ".join(f"{name} {value:.1e}" for name, value in parity.largest._asdict().items())
    where = f"{found}; first {parity.first_module}"
    return ("cannot_tell" if parity.verdict == "cannot tell" else "wrong"), where


def figures_of(results: list[Result]) -> dict[str, float]:
    """The numbers of outcomes, and the shares of agreement."""
    counts = Counter(result.outcome for result in results)
    figures: dict[str, float] = {"models": len({result.case.name for result in results})}
    figures |= {outcome: counts[outcome] for outcome in OUTCOMES}
    for axis in AXES:
        meant = [result.outcome == "agree" for result in results if result.axis == axis and result.case.means(axis)]
        if meant:
            figures[f"agree_{axis}"] = round(sum(meant) / len(meant), 4)
    return figures


def table(results: list[Result], axes: list[str]) -> str:
    """Outcomes by axis, and the share of agreement among the models that the axis is meant for."""
    lines = [f"\n{'plan':30}" + "".join(f"{outcome:>22}" for outcome in OUTCOMES) + f"{'agree, where meant':>22}"]
    for axis in axes:
        of_axis = [result for result in results if result.axis == axis]
        counts = Counter(result.outcome for result in of_axis)
        meant = [
            result.outcome == "agree" for result in of_axis if all(result.case.means(part) for part in axis.split("+"))
        ]
        share = f"{sum(meant)} of {len(meant)}" if meant else "-"
        lines.append(f"{PLANS[axis]:30}" + "".join(f"{counts[outcome]:22}" for outcome in OUTCOMES) + f"{share:>22}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
