"""Screen of `paceline plan`: the best plan, its time and memory, alternatives, and possible improvements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from paceline.planning.cost.layout import PART_NAMES
from paceline.planning.explain.explain import LEAST
from paceline.planning.explain.which_cluster import EXAMPLES
from paceline.planning.search.result import equals
from paceline.text import on_cores
from paceline.units import count, digits, large, money, percent, seconds, size, span

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.job.job import Job
    from paceline.planning.explain.explain import Explanation
    from paceline.planning.explain.questions import BatchAdvice
    from paceline.planning.explain.training_run import TrainingRun
    from paceline.planning.explain.which_cluster import ClusterChoice, Offers, Option
    from paceline.planning.search.result import Candidate

_WIDTH = 120
_REFUSED = 8  # maximum number of lines for refused plans
_BAR = 32  # characters of a full bar
_EIGHTHS: tuple[str, ...] = ("", *"▏▎▍▌▋▊▉")
_LEAST_HELD = 0.02  # smallest share of the memory in use that is listed
GOOD, LOST, QUIET = "green", "yellow", "dim"
_USEFUL = ("compute", "optimizer")  # parts that every plan has


def fitted(console: Console) -> Console:
    """Limit the console to a readable width, also when piped."""
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    return console


def show_plans(found: Explanation, console: Console, *, top: int) -> None:
    """Show the best plans as a table, and a summary of the search."""
    show_head(found, console)
    _candidates(found, console, top)
    _search(found, console)


def show_explanation(one: Explanation, best: Explanation, console: Console) -> None:
    """Show where the time and memory of one plan go, and what would help.

    Args:
        best: the explanation of the best plan, which may be a different plan.
    """
    show_head(one, console)
    show_winner(one, console)
    if one is not best:
        _behind(one, best, console)
    show_time(one, console)
    show_memory(one, console)
    _excluded(best, console)
    _helps(one, console)
    _answers(one, console)
    _notes(one, console)
    _search(best, console)


def show_costs(found: Explanation, console: Console) -> None:
    """Show the time, cost, energy and failures of a whole training run."""
    show_head(found, console)
    console.print()
    print_inset(console, Text(str(found.winner.plan), style="bold cyan"))
    _run(found, console)
    _failures(found, console)
    _notes(found, console)


def show_advice(advice: BatchAdvice, console: Console) -> None:
    """Show the throughput of each batch, and the recommendation."""
    titled(console, "the global batch", "the best plan for each; a suggestion, nothing is changed")
    table = table_of("global batch", "samples/s", "of the best", "step", "plan")
    best = max(point.throughput for point in advice.points)
    for point in advice.points:
        mark = " ".join(word for word, one in (("now", advice.now), ("useful", advice.useful)) if point is one)
        table.add_row(
            f"{mark:>10} {point.global_batch:,}",
            digits(point.throughput),
            str(percent(point.throughput / best)),
            str(seconds(point.best.prediction.step_time_s)),
            Text(str(point.best.plan), style=QUIET),
            style="bold" if point is advice.useful else "",
        )
    print_inset(console, table)
    print_inset(console, Text(advice.line))
    for caution in (f"no larger batch was tried: {advice.stopped}", *advice.cautions):
        print_inset(console, Text(caution, style=QUIET))


# Best plan


def show_head(explanation: Explanation, console: Console) -> None:
    """Show the job, the cluster and the model."""
    trace, job = explanation.winner.layout.trace, explanation.job
    tokens = f", {explanation.tokens:,} tokens a sample" if explanation.tokens > 1 else ""
    about = (
        f"{large(trace.parameters)} parameters{tokens}, global batch {job.global_batch:,}, {job.optimizer.name}, "
        f"{job.precision}"
    )
    show_case(job, explanation.cluster, console)
    console.print(Text(about, style=QUIET))


def show_case(job: Job, cluster: Cluster, console: Console) -> None:
    """Show the job and the cluster in one line."""
    console.print(Text.assemble((job.name, "bold"), f" on {cluster.describe()}"))


def show_winner(explanation: Explanation, console: Console) -> None:
    """Show the first plan with its figures."""
    best = explanation.winner
    prediction, cost = best.prediction, explanation.cost(best)
    figures = [
        ("step", f"{seconds(prediction.step_time_s)} ± {percent(best.interval.relative, 0)}"),
        ("samples/s", digits(prediction.throughput)),
    ]
    if explanation.tokens > 1:
        figures.append(("tokens/s", digits(prediction.throughput * explanation.tokens)))
    if prediction.mfu is not None:
        figures.append(("MFU", str(percent(prediction.mfu))))
    likely = percent(min(prediction.fit_probability, 0.999), 0 if prediction.fit_probability < 0.99 else 1)
    figures.append((f"memory, fits with {likely}", str(size(prediction.memory_bytes))))
    if cost is not None:
        figures.append((cost.of, digits(cost.value)))
    table = Table.grid(padding=(0, 4, 0, 0))
    table.add_row(*(Text(value, style="bold") for _, value in figures))
    table.add_row(*(Text(name, style=QUIET) for name, _ in figures))
    console.print()
    print_inset(console, Text(str(best.plan), style="bold cyan"))
    console.print()
    print_inset(console, table)
    console.print()
    print_inset(console, Text(explanation.limit))
    known = best.interval
    print_inset(
        console,
        Text(
            f"with a probability of 80 % it is measured between {seconds(known.low_s)} and {seconds(known.high_s)}; "
            f"that rests on {known.rests_on}",
            style=QUIET,
        ),
    )


def show_time(explanation: Explanation, console: Console) -> None:
    """Show how the time of a step is divided."""
    titled(console, "where the step goes")
    table = _bars()
    for part in sorted((part for part in explanation.time if part.share >= LEAST), key=lambda part: -part.share):
        style = GOOD if part.name in _USEFUL else LOST
        table.add_row(
            PART_NAMES[part.name],
            str(seconds(part.value)),
            str(percent(part.share, 1)),
            Text(_bar(part.share), style=style),
        )
    print_inset(console, table)


def show_memory(explanation: Explanation, console: Console) -> None:
    """Show how the memory of the fullest rank is divided."""
    room = explanation.capacity_bytes
    titled(console, "what holds the memory", f"of the fullest rank, which has room for {size(room)}")
    table = _bars()
    for held in (held for held in explanation.memory if held.share >= _LEAST_HELD):
        share = held.value / room
        table.add_row(held.name, str(size(held.value)), str(percent(share, 1)), Text(_bar(share), style="cyan"))
    free = 1 - explanation.winner.prediction.memory_bytes / room
    if free < 0:
        table.add_row(Text("too much", style="red"), str(size(-free * room)), str(percent(-free, 1)), "")
        print_inset(console, table)
        return
    table.add_row(
        *(
            Text(text, style=QUIET)
            for text in ("free", str(size(free * room)), str(percent(free, 1)), "·" * round(free * _BAR))
        )
    )
    print_inset(console, table)


def _bars() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=max(map(len, PART_NAMES.values())))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    return table


def _bar(share: float) -> str:
    whole, eighths = divmod(round(min(share, 1.0) * _BAR * 8), 8)
    return "█" * whole + _EIGHTHS[eighths]


# Other plans


def _behind(one: Explanation, best: Explanation, console: Console) -> None:
    """Explain how much slower a plan is than the best one, and why."""
    more = one.winner.prediction.step_time_s / best.winner.prediction.step_time_s - 1
    how = f"{percent(more)} slower than" if more > 0 else "as fast as"
    print_inset(console, Text(f"{how} the best plan, {best.winner.plan}: {one.winner.why}"))


def _candidates(explanation: Explanation, console: Console, top: int) -> None:
    best, shown = explanation.winner, explanation.found.best[:top]
    priced = explanation.cost(best)
    columns = ["", "step", "slower", "memory", "MFU", *(["cost"] if priced else []), "plan"]
    table = table_of(*columns, box=SIMPLE_HEAD)
    alike = equals(explanation.found.best)
    for number, candidate in enumerate(shown, 1):
        table.add_row(
            *_row(explanation, number, candidate, alike=candidate in alike), style="" if number > 1 else "bold"
        )
    console.print()
    console.print(table)
    known = best.interval
    console.print(
        Text(f"step: predicted, ± {percent(known.relative, 0)} (80 %); that rests on {known.rests_on}", style=QUIET)
    )
    if priced:
        console.print(Text(f"cost: of {priced.of}", style=QUIET))
    if len([candidate for candidate in shown if candidate in alike]) > 1:
        why = "it has the fewest moving parts, then the fewest ranks, then the most free memory"
        console.print(Text(f"≈: the prediction cannot tell these plans apart. Plan 1 is recommended: {why}."))


def _row(explanation: Explanation, number: int, candidate: Candidate, *, alike: bool) -> list[RenderableType]:
    prediction, cost = candidate.prediction, explanation.cost(candidate)
    more = prediction.step_time_s / explanation.winner.prediction.step_time_s - 1
    slower = f"{'≈ ' if alike else ''}{'+' if more >= 0 else chr(0x2212)}{percent(abs(more))}"
    plan = Text(str(candidate.plan))
    if number > 1:
        plan.append(f"\n{candidate.why}", style=QUIET)
    return [
        str(number),
        str(seconds(prediction.step_time_s)),
        slower if number > 1 else "",
        str(size(prediction.memory_bytes)),
        "" if prediction.mfu is None else str(percent(prediction.mfu)),
        *([digits(cost.value)] if cost else []),
        plan,
    ]


def _excluded(explanation: Explanation, console: Console) -> None:
    if not explanation.found.excluded:
        return
    titled(console, "what was excluded, and why", "plans, by their first reason")
    table = table_of("plans", "what", "reason", heads=False)
    table.columns[1].justify = "left"
    for excluded in explanation.found.excluded:
        table.add_row(
            f"{excluded.plans:,}" if excluded.plans else "", excluded.what, Text(excluded.reason, style=QUIET)
        )
    print_inset(console, table)


# Possible improvements, and unknowns


def _helps(explanation: Explanation, console: Console) -> None:
    named = on_cores if explanation.winner.layout.machines.device.is_core else str
    rows = [(row.words, named(row.change), named(row.about)) for row in explanation.helps]
    _gains(console, "what would help most", "throughput, by the same model", rows)


def _answers(explanation: Explanation, console: Console) -> None:
    rows = [(answer.words, answer.question, answer.about) for answer in explanation.answers]
    _gains(console, "what if", "throughput, with the best plan for each", rows)


def _gains(console: Console, title: str, about: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Show changes with their gains as text; improvements are coloured."""
    if not rows:
        return
    titled(console, title, about)
    table = table_of("gain", "change", "what else", heads=False)
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for gain, change, more in rows:
        helps = gain.startswith("+")
        table.add_row(
            Text(gain, style=GOOD if helps else QUIET),
            Text(change, style="" if helps else QUIET),
            Text(more, style=QUIET),
        )
    print_inset(console, table)


def _run(explanation: Explanation, console: Console) -> None:
    if (run := explanation.run) is None:
        return
    about = f"{run.amount.words}, with this plan; ± {percent(run.error, 0)} (80 %), by {run.rests_on}"
    titled(console, "what the training takes", about)
    show_run(run, console)


def show_run(run: TrainingRun, console: Console) -> None:
    """Show the time, cost, energy and carbon of a training run, and the assumptions."""
    table = table_of("what", "value", "about", heads=False)
    table.columns[0].justify = "left"
    for name, value, about in run.rows:
        table.add_row(name, Text(value, style="bold"), Text(about, style=QUIET))
    print_inset(console, table)
    for note in (*run.amount.notes, *run.notes):
        print_inset(console, Text(note, style=QUIET))


def _failures(explanation: Explanation, console: Console) -> None:
    if (outlook := explanation.failures) is None:
        return
    hosts = count(outlook.hosts, "host")
    about = f"{outlook.per_host_day:g} a day on each of {hosts}: one in {seconds(outlook.costs.between_s)}, predicted"
    titled(console, "what failures cost", about)
    table = table_of("goodput", "way to go on", "what it costs")
    table.columns[1].justify = "left"
    for name, goodput, words in outlook.rows:
        table.add_row(str(percent(goodput, 2)), name, Text(words, style=QUIET))
    print_inset(console, table)
    for line in outlook.lines:
        print_inset(console, Text(line, style=QUIET if line.startswith("assumed") else ""))


def _notes(explanation: Explanation, console: Console) -> None:
    titled(console, "what the prediction does not know")
    for note in explanation.notes:
        print_inset(console, Text(note, style=QUIET))


def _search(explanation: Explanation, console: Console) -> None:
    found = explanation.found
    sure = (
        "none is faster by this model" if found.gap <= 0 else "another may be faster by this model by no more than that"
    )
    counted = f"{found.evaluated:,} predicted, {found.pruned:,} excluded by a bound; " if found.evaluated else ""
    console.print()
    console.print(
        Text(
            f"searched {found.considered:,} plans in {seconds(found.seconds)}: {counted}optimality gap "
            f"{percent(found.gap)}, {sure}"
        )
    )


# Choice of a cluster


def show_choice(choice: ClusterChoice, console: Console, *, cheapest: bool, bundled: bool) -> None:
    """Show the fastest and cheapest machines, the Pareto-optimal offers, and the unusable machines."""
    limits = [f"within {money(choice.budget)}"] if choice.budget is not None else []
    limits += [f"in {span(choice.deadline_s)}"] if choice.deadline_s is not None else []
    about = f"{choice.amount.words} {' and '.join(limits)}".strip()
    console.print(Text.assemble((choice.job.name, "bold"), f": which cluster for {about}?"))
    console.print(Text(_prices(choice.offers, bundled=bundled), style=QUIET))
    console.print()
    for what, option in _named(choice, cheapest=cheapest):
        print_inset(console, Text.assemble((f"{what}: ", QUIET), (_sentence(option), "bold cyan")))
        print_inset(console, Text(f"  {option.candidate.plan}"))
    if not choice.within:
        print_inset(console, Text(choice.nothing, style="bold yellow"))
    error = percent(choice.error, 0)
    titled(console, "time against cost", f"machines that no others beat in both; predicted, ± {error} (80 %)")
    table = table_of("", "time", "cost", "MFU", "goodput", "machines, and the best plan on them")
    inside = choice.within
    for option in choice.front:
        mfu = option.candidate.prediction.mfu
        machines = Text(option.words)
        machines.append(f"\n{option.candidate.plan}", style=QUIET)
        table.add_row(
            "" if option in inside else "beyond",
            str(span(option.bought.wall_s)),
            money(option.cost),
            "" if mfu is None else str(percent(mfu)),
            str(percent(option.bought.goodput, 1)),
            machines,
            style="" if option in inside else QUIET,
        )
    print_inset(console, table)
    _show_refused(choice, console)
    titled(console, "what it rests on")
    for note in choice.notes:
        print_inset(console, Text(note, style=QUIET))


def _show_refused(choice: ClusterChoice, console: Console) -> None:
    if not choice.refused:
        return
    titled(console, "where nothing runs")
    table = table_of("machines", "reason", heads=False)
    table.columns[0].justify = "left"
    for machines, reason in choice.refused[:_REFUSED]:
        table.add_row(machines, Text(reason, style=QUIET))
    print_inset(console, table)
    if (more := len(choice.refused) - _REFUSED) > 0:
        print_inset(console, Text(f"and {more} more", style=QUIET))


def _named(choice: ClusterChoice, *, cheapest: bool) -> list[tuple[str, Option]]:
    """Return the options to show first, each with its description."""
    fastest, least, alike = choice.fastest, choice.cheapest, choice.as_cheap
    if fastest is None or least is None:
        return []
    if fastest == least:
        return [("the fastest and the cheapest", fastest)]
    named = [("the cheapest", least), *([("about as cheap, and faster", alike)] if alike else [])]
    return [*named, ("the fastest", fastest)] if cheapest else [("the fastest", fastest), *named]


def _sentence(option: Option) -> str:
    return f"{option.words}: {span(option.bought.wall_s)}, {money(option.cost)}"


def _prices(offers: Offers, *, bundled: bool) -> str:
    about = ", ".join(filter(None, (offers.currency, f"of {offers.as_of}" if offers.as_of else "")))
    prices = f"prices in {about}" if about else "prices as listed"
    if not bundled:
        return prices
    return f"{prices}: examples, not offers to you; copy {EXAMPLES} and put in your own, then --catalogue FILE"


# Layout


def titled(console: Console, title: str, about: str = "") -> None:
    """Print a title line for the content that follows."""
    console.print()
    console.print(
        Rule(Text.assemble((title, "bold"), f"  {about}" if about else ""), align="left", style=QUIET, characters="─")
    )


def table_of(*columns: str, heads: bool = True, box: Box | None = None) -> Table:
    """Return a table of right-aligned figures, with a last column of text that may wrap."""
    padding = (0, 1, 0, 0) if box else (0, 2, 0, 0)
    table = Table(box=box, padding=padding, pad_edge=False, header_style=QUIET, show_header=heads)
    for column in columns[:-1]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(columns[-1], overflow="fold", ratio=1)
    return table


def print_inset(console: Console, shown: RenderableType) -> None:
    """Print an object with an indentation of two columns."""
    console.print(Padding(shown, (0, 0, 0, 2), expand=False), highlight=False, markup=False)
