"""Plans that experts made, for the largest runs whose speed was published, held against ours.

    python benchmarks/experts.py [--rows NAME …] [--json]

Of each row of `experts/plans.csv`: is the published plan legal (`plan_errors`), does it fit the memory, what would it
take by the cost model against what was published, and how does the plan that `search` finds for the same job on the
same machines compare? That comparison is of plans alone: both are predicted as paceline's software would run them, and
the words are those of `paceline plan`. Where a plan has no key for a part of the published one, its legality is that of
the rest, and the part is compared as a number (printed).

Figures:
- `legal`, `fits`, `within_15_percent`: shares of the rows; `within_15_percent` by published time.
- `median_error`, `mean_error`: of predicted against published times.
- `worst_ours_to_theirs`: the largest of predicted time of our plan / of theirs; 1.05 is the most that is good. Over
  rows whose published plan fits where paceline holds its states; `worst_ours_to_theirs_anywhere` over all.
- `median_ours_to_theirs`: the same, of half of all rows.
- `slowest_search_s`: seconds of the longest search.
- `rows`, `unusable`: rows compared, and rows of hardware or of models that are not known.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from experts_rows import Expert, as_numbers, experts
from measure import parser_of
from paceline.errors import PacelineError
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.machines import machines
from paceline.planning.prediction import Layouts
from paceline.planning.search.result import Candidate, SearchResult, why_it_loses
from paceline.planning.search.search import search
from paceline.planning.tables.layouts import Skipped
from paceline.units import percent

CLOSE = 0.15
GIB = 2**30


@dataclass(frozen=True)
class Verdict:
    """A published plan, and what the planner says of it.

    Attributes:
        reasons: why the plan would be refused; empty if it is legal.
        fits: it fits the memory as published, with its own software's states.
        predicted_s: step time of the published plan in its own software.
        theirs: the published plan in our software; None if it cannot be predicted there.
        found: the search for the same job and cluster; None if nothing was found.
        why_not: what kept one of the two from being predicted.
    """

    expert: Expert
    reasons: list[str]
    fits: bool
    memory_gib: float
    predicted_s: float
    theirs: Candidate | None
    found: SearchResult | None
    why_not: str = ""

    @property
    def published_s(self) -> float:
        """The published step time."""
        return self.expert.row.seconds or math.nan

    @property
    def error(self) -> float:
        """Of the predicted step time, relative, with its sign."""
        return self.predicted_s / self.published_s - 1

    @property
    def ours(self) -> Candidate | None:
        """The plan that the search proposes."""
        return self.found.best[0] if self.found else None

    @property
    def ratio(self) -> float:
        """Predicted time of our plan / of theirs, in the same software; NaN if one is missing."""
        if not self.ours or not self.theirs:
            return math.nan
        return self.ours.prediction.step_time_s / self.theirs.prediction.step_time_s

    @property
    def comparable(self) -> bool:
        """Whether the published plan fits where paceline holds its states."""
        return self.theirs is not None and self.theirs.prediction.fits and not math.isnan(self.ratio)

    @property
    def words(self) -> str:
        """The difference between the two plans in a sentence."""
        if not self.ours or not self.theirs:
            return self.why_not
        apart = abs(1 / self.ratio - 1)
        if self.ratio <= 1:
            start = f"ours is {percent(apart)} faster; theirs"
            return f"{start} takes {why_it_loses(self.theirs, self.ours)}" if apart >= 0.005 else "as fast as theirs"
        fits = "" if self.comparable else ", which does not fit in paceline's states"
        return (
            f"theirs is {percent(1 - 1 / self.ratio)} faster{fits}; ours takes {why_it_loses(self.ours, self.theirs)}"
        )


def judge(expert: Expert) -> Verdict:
    """Check, predict and search for one published run."""
    as_published = predict_layout(expert.row.layout)
    theirs, found, problems = None, None, []
    try:
        theirs = _theirs(expert)
    except PacelineError as error:
        problems.append(f"theirs: {_first(error)}")
    try:
        found = search(expert.job, expert.cluster, top=1)
    except PacelineError as error:
        problems.append(f"ours: {_first(error)}")
    return Verdict(
        expert,
        expert.reasons,
        as_published.fits,
        as_published.memory_bytes / GIB,
        as_published.step_time_s,
        theirs,
        found,
        "; ".join(problems),
    )


def _theirs(expert: Expert) -> Candidate:
    """The published plan as our software would run it."""
    said = Layouts(expert.job, machines(expert.cluster)).of(expert.plan)
    layout = as_numbers(expert, said)
    return Candidate(expert.plan, layout, predict_layout(layout))


def _first(error: PacelineError) -> str:
    return str(error).splitlines()[0]


def figures(verdicts: Sequence[Verdict], unusable: int) -> dict[str, float]:
    """By name: over all rows, then of each row."""
    errors = [abs(each.error) for each in verdicts]
    ratios = [each.ratio for each in verdicts if not math.isnan(each.ratio)]
    searches = [each.found.seconds for each in verdicts if each.found]
    total = {
        "legal": statistics.fmean(not each.reasons for each in verdicts),
        "fits": statistics.fmean(each.fits for each in verdicts),
        "median_error": statistics.median(errors),
        "mean_error": statistics.fmean(errors),
        "within_15_percent": statistics.fmean(error <= CLOSE for error in errors),
        "worst_ours_to_theirs": max((each.ratio for each in verdicts if each.comparable), default=math.nan),
        "worst_ours_to_theirs_anywhere": max(ratios, default=math.nan),
        "median_ours_to_theirs": statistics.median(ratios) if ratios else math.nan,
        "slowest_search_s": max(searches, default=math.nan),
        "rows": len(verdicts),
        "unusable": unusable,
    }
    for each in verdicts:
        total[f"error_of_{each.expert.name}"] = each.error
        total[f"ours_to_theirs_of_{each.expert.name}"] = each.ratio
    return {name: float(value) for name, value in total.items() if not math.isnan(value)}


def _print(verdicts: Sequence[Verdict], skipped: Sequence[Skipped]) -> None:
    wide = max(len(each.expert.name) for each in verdicts)
    print(f"{'run':{wide}}  legal  fits  published  predicted   error  ours/theirs  search")
    for each in verdicts:
        legal = "yes" if not each.reasons else "no"
        seconds = f"{each.found.seconds:6.1f} s" if each.found else "     – "
        ratio = "–" if math.isnan(each.ratio) else f"{each.ratio:.3f}{'' if each.comparable else '*'}"
        print(
            f"{each.expert.name:{wide}}  {legal:5}  {'yes' if each.fits else 'no':4}  {each.published_s:7.2f} s  "
            f"{each.predicted_s:7.2f} s  {each.error:+6.1%}  {ratio:>11}  {seconds}"
        )
    print("\n* the published plan does not fit where paceline holds its states (fp32 parameters)\n")
    for each in verdicts:
        _print_plans(each)
    for one in skipped:
        print(f"not compared: line {one.number}: {one.why}")


def _print_plans(verdict: Verdict) -> None:
    expert = verdict.expert
    print(f"{expert.name} ({expert.row.cells['source']}), {verdict.memory_gib:.0f} GiB as published")
    apart = f" (not a key of a plan: {', '.join(expert.unsaid)})" if expert.unsaid else ""
    print(f"  theirs  {expert.plan}{apart}")
    for reason in verdict.reasons:
        print(f"          {reason}")
    if verdict.ours:
        print(f"  ours    {verdict.ours.plan}")
    print(f"  {verdict.words}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", default=(), metavar="NAME", help="rows by `id`; all by default")
    options = parser.parse_args(arguments)
    found, skipped = experts(names=options.rows)
    if not found:
        print("no row of experts/plans.csv can be compared; " + "; ".join(one.why for one in skipped), file=sys.stderr)
        return 1
    verdicts = [judge(expert) for expert in found]
    _print(verdicts, skipped)
    from measure import environment_line

    line = environment_line()
    print(f"\n{line}")
    if options.json:
        print(json.dumps({"figures": figures(verdicts, len(skipped)), "environment": {"machine": line}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
