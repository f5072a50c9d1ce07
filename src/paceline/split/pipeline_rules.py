"""What the arithmetic of a pipeline allows: microbatches, stages and cut points, checked before any process starts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.plan.plan import Plan

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}


def pipeline_reasons(plan: Plan, blocks: Sequence[str] | None = None, samples: int | None = None) -> list[str]:
    """Why the arithmetic of a pipeline cannot work, each with the values that would; empty where it can. Needs no process group.

    Args:
        blocks: names of the model's repeated blocks; None where they are not known.
        samples: rows of a replica's share of the batch that every microbatch is an equal part of; None where not known.
    """
    if plan.pp == 1:
        return [f"cut={plan.cut} divides a pipeline, and pp is 1; leave cut out, or set pp={plan.cut.count(',') + 2}"] if plan.cut else []
    stages, found = plan.pp * STAGES_PER_RANK[plan.schedule], []
    each = f"schedule={plan.schedule} has {stages} stages on pp={plan.pp} ranks"
    if plan.schedule != "gpipe" and plan.microbatches < plan.pp:
        found.append(
            f"schedule={plan.schedule} needs at least as many microbatches as ranks, {plan.pp}, and there are {plan.microbatches}: "
            f"microbatches={plan.pp} or more, or schedule=gpipe"
        )
    elif plan.schedule == "interleaved" and not interleaves(plan.pp, plan.microbatches):
        near = [m for m in range(plan.pp, 2 * plan.microbatches + 1) if interleaves(plan.pp, m)]
        near.sort(key=lambda m: abs(m - plan.microbatches))
        found.append(
            f"schedule=interleaved passes microbatches in equal rounds of {plan.pp} or a little more, and {plan.microbatches} cannot be: "
            f"microbatches={near[0]}" + (f" or {near[1]}" if len(near) > 1 else "")
        )
    if samples is not None and samples % plan.microbatches:
        fits = fitting_microbatches([samples], plan.microbatches)
        found.append(
            f"pp needs equal microbatches, and {samples} samples a replica are no multiple of {plan.microbatches}: microbatches={fits}"
        )
    if plan.schedule == "zero-bubble" and plan.compile != "off":
        found.append("schedule=zero-bubble splits the backward pass, which compiled code cannot: compile=off, or schedule=1f1b")
    if plan.cut:
        found += reasons_against_cut(plan.cut.split(","), stages, each)
    elif blocks is not None and len(blocks) + 2 < stages:
        most = (len(blocks) + 2) // STAGES_PER_RANK[plan.schedule]
        found.append(f"{each}, and the model has {len(blocks)} blocks and two ends: pp={max(most, 1)} or less")
    return found


def fitting_microbatches(shares: Sequence[int], wanted: int) -> int:
    """The largest number of microbatches up to `wanted` that divides what every reader has of a batch, so that all are equal."""
    some = [n for n in shares if n] or [1]
    return next(m for m in range(wanted, 0, -1) if not any(n % m for n in some))


def batch_norm_warning(model: nn.Module, rows: int) -> str | None:
    """What a pipeline does to batch-norm statistics, or None where the model has none.

    Args:
        rows: samples in a microbatch.
    """
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return None
    return (
        f"{len(layers)} batch-norm layers ({layers[0]}, …) take their mean and variance from a microbatch of {rows} samples, "
        "not from the whole batch, and update their running statistics once a microbatch, as gradient accumulation does: losses differ "
        "from those of one large batch. With fewer than about 16 samples the statistics are noisy: fewer microbatches, or group norm."
    )


def reasons_against_cut(names: Sequence[str], stages: int, each: str) -> list[str]:
    """What is wrong with the number of cut points; `each` says how many stages there are."""
    found = []
    if len(names) != stages - 1:
        found.append(f"{each}, so cut names the {stages - 1} modules that begin the second and later ones; it names {len(names)}")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        found.append(f"cut names {', '.join(twice)} twice; every stage begins elsewhere")
    return found


def interleaves(ranks: int, microbatches: int) -> bool:
    """Whether interleaved 1F1B can deal the microbatches into equal rounds of at least one for every rank, or all in one."""
    return microbatches % max(1, microbatches // ranks) == 0
