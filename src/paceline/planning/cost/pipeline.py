"""Time of a pipeline with unequal stages, by formula and by simulation of its schedule."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planning.cost import constants
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.prediction import Span
from paceline.planning.cost.stages import StageTimes
from paceline.planning.cost.traffic import send_s


def pipeline_s(
    forwards: Sequence[float],
    backwards: Sequence[float],
    microbatches: int,
    hop_s: float,
    ranks: int,
    schedule: str,
    overlaps: bool = False,
) -> float:
    """Seconds from the first microbatch's start to the last gradient's end.

    Every stage works on a microbatch once (Narayanan et al., 2021, arXiv:2104.04473): all of them in sequence fill and
    drain the pipeline, and the slowest rank determines the time between. Interleaved stages fill it by one chunk of
    each rank only.
    """
    times = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    if ranks == 1:
        return microbatches * sum(times)
    busy = [sum(times[rank::ranks]) for rank in range(ranks)]
    chunks = len(times) // ranks
    fill = (sum(times) - max(busy) * 1.0) / chunks
    if schedule == "zero-bubble":
        # the weights' gradients, a third of the work, fill it (Qi et al., 2023, arXiv:2401.10241)
        fill /= 3
    elif schedule == "dualpipe":
        fill = dualpipe_bubble_s(sum(forwards) / len(times), sum(backwards) / len(times), ranks)
    hops = 2 * (ranks - 1) + (0 if overlaps else (microbatches - 1) * chunks)
    return microbatches * max(busy) + fill + hops * hop_s


def dualpipe_bubble_s(forward_s: float, backward_s: float, ranks: int) -> float:
    """Bubble of DualPipe over `ranks` ranks with two stages each.

    It is (PP / 2 - 1) (F&B + B - 3 W) with PP stages (Liu et al., 2024, arXiv:2412.19437, table 2). A forward and a
    backward pass at once take the sum of both here, as torch runs one after the other. The weights' gradients are as
    many products as the forward pass.

    Args:
        forward_s, backward_s: seconds of a stage.
    """
    weights_s = min(forward_s, backward_s / 2)
    return (ranks - 1) * (forward_s + 2 * backward_s - 3 * weights_s)


def hop_s(layout: Layout) -> float:
    """Seconds to send one microbatch's activations to the next stage."""
    if layout.pp == 1:
        return 0.0
    boundary = max(block.boundary for block, _ in layout.trace.runs)
    numbers = (
        boundary * layout.samples / layout.cp / (layout.tp if layout.sequence or layout.framework.scatters_hops else 1)
    )
    return constants.PIPELINE_S + send_s(numbers * min(layout.number_bytes, 4), layout)


def simulated(layout: Layout, times: StageTimes, hop: float) -> list[Span]:
    """Spans of every rank in one step of a layout's schedule."""
    orders = [
        work_of(rank, layout.pp, layout.microbatches, layout.schedule, layout.chunks) for rank in range(layout.pp)
    ]
    return simulate(times.forwards, times.backwards, orders, hop)


# (kind, virtual stage, microbatch)
Work = tuple[str, int, int]


def simulate(
    forwards: Sequence[float], backwards: Sequence[float], orders: Sequence[Sequence[Work]], hop: float
) -> list[Span]:
    """Spans of each rank, which does its work in order as inputs arrive.

    Between two stages microbatches travel one after the other, independently in each direction: over a slow link they
    queue.
    """
    arrived: dict[Work, float] = {}
    clock, next_of, spans = [0.0] * len(orders), [0] * len(orders), []
    last, moved = len(forwards) - 1, True
    way_free: dict[tuple[str, int], float] = {}
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while next_of[rank] < len(order):
                what, stage, microbatch = work = order[next_of[rank]]
                needed = _needs(what, stage, microbatch, last)
                if any(need not in arrived for need in needed):
                    break
                start = max(clock[rank], *(arrived[need] for need in needed)) if needed else clock[rank]
                end = start + (forwards if what == "forward" else backwards)[stage]
                if start > clock[rank]:
                    spans.append(Span(rank, "wait", microbatch, clock[rank], start))
                spans.append(Span(rank, what, microbatch, start, end))
                stays = stage == (last if what == "forward" else 0)
                arrived[work] = end if stays else max(end, way_free.get((what, stage), 0.0)) + hop
                way_free[what, stage] = arrived[work]
                clock[rank], moved = end, True
                next_of[rank] += 1
    return spans


def _needs(what: str, stage: int, microbatch: int, last: int) -> list[Work]:
    if what == "forward":
        return [("forward", stage - 1, microbatch)] if stage else []
    before: Work = ("backward", stage + 1, microbatch) if stage < last else ("forward", stage, microbatch)
    return [before]


def work_of(rank: int, ranks: int, microbatches: int, schedule: str, chunks: int) -> list[Work]:
    """Order of work of one rank."""
    total = microbatches * chunks
    if chunks > 1:
        warmup = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
    else:
        warmup = min(ranks - rank - 1, total)
    if schedule == "gpipe":
        warmup = total
    forwards = [_piece("forward", index, rank, ranks, microbatches, chunks) for index in range(total)]
    backwards = [_piece("backward", index, rank, ranks, microbatches, chunks) for index in range(total)]
    order: list[Work] = forwards[:warmup]
    for index in range(total - warmup):
        order += [forwards[warmup + index], backwards[index]]
    return order + backwards[total - warmup :]


def _piece(what: str, index: int, rank: int, ranks: int, microbatches: int, chunks: int) -> Work:
    """A rank's forward or backward number `index`.

    `ranks` microbatches run through one chunk, then through the next one.
    """
    if chunks == 1:
        return (what, rank, index)
    group, inside = divmod(index, ranks * chunks)
    size = min(ranks, microbatches - group * ranks)
    chunk, offset = divmod(inside, size)
    chunk = chunk if what == "forward" else chunks - 1 - chunk
    return (what, chunk * ranks + rank, group * ranks + offset)
