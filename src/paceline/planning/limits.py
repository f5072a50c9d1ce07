"""Limits of plans: rules by which plans are refused, on numbers and names alone.

The check before the start applies them to what is known of a model without a forward pass, the split at run time to the
traced model. Each rule returns a sentence without its subject (`plan tp=3`, or `tp=3`), with the values that would
work, or None if the plan passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING

from paceline.partition import contiguous, starts
from paceline.planning.plan import DEGREES, V_SCHEDULES, stages_per_rank
from paceline.planning.sync_info import sync_info
from paceline.text import nearest
from paceline.units import count

if TYPE_CHECKING:
    from paceline.planning.plan import Plan

NO_ATTENTION = "divides the tokens of a sequence, but the model has no attention over tokens: cp=1."
NO_BLOCKS_TO_RECOMPUTE = (
    "recomputes blocks instead of keeping their activations, but the model has no repeated blocks: remat=none."
)


def other_world(plan: Plan, world: int) -> str | None:
    """Reason why a plan cannot run on the number of ranks that were started."""
    if plan.ranks == world:
        return None
    others = plan.ranks // plan.dp
    works = f"dp={world // others} here" if world % others == 0 else f"degrees that multiply to {world}"
    return f"needs {count(plan.ranks, 'rank')}{multiplied(plan)}, but {world} were started: {works}."


def undivided_heads(
    heads: Mapping[str, Sequence[int]], tp: int, shared: Mapping[str, Sequence[int]] | None = None
) -> str | None:
    """Reason why heads cannot be divided over `tp` ranks.

    Args:
        heads: the model's numbers of heads, by what they are, such as `attention heads`.
        shared: numbers of heads of keys and values, of which one may be on several ranks.
    """
    keys = shared or {}
    wrong = [f"{what} ({_numbers(found)})" for what, found in heads.items() if any(n % tp for n in found)]
    wrong += [f"{what} ({_numbers(found)})" for what, found in keys.items() if not shares_heads(found, tp)]
    if not wrong:
        return None
    divisors = _common_divisors([n for found in heads.values() for n in found])
    working = [n for n in divisors if all(shares_heads(found, n) for found in keys.values())]
    return f"divides the model's {' and '.join(wrong)} by {tp}, which leaves a remainder: {_one_of('tp', working)}."


def shares_heads(heads: Sequence[int], tp: int) -> bool:
    """True if each rank has whole heads of keys and values, or several share one."""
    return all(n % tp == 0 or tp % n == 0 for n in heads)


def undivided_experts(experts: Sequence[int], ep: int, where: str = "") -> str | None:
    """Reason why mixtures of experts cannot be divided over `ep` ranks.

    Args:
        experts: the mixtures' numbers of experts.
        where: the name of one that cannot be divided.
    """
    if not experts:
        return (
            f"divides experts, but the model has no mixture of experts in one tensor: ep=1 (fsdp={ep} "
            "shards any model)."
        )
    if not any(n % ep for n in experts):
        return None
    named = f"{_numbers(experts)} experts" + (f" ({where})" if where else "")
    return f"divides {named} over {ep} ranks: {_one_of('ep', _common_divisors(experts))}."


def undivided_tokens(tokens: int, key: str, degree: int, others: int = 1) -> str | None:
    """Reason why `degree` ranks along an axis cannot divide sequences of `tokens`.

    Args:
        key: `cp`, or `tp` for sequence parallelism.
        others: the number of ranks of another axis that divides them as well.
    """
    parts = degree * others
    if tokens % parts == 0:
        return None
    working = [n for n in range(1, tokens + 1) if tokens % (n * others) == 0]
    works = _one_of(key, working) if working else "cp=1" if key == "cp" else "sequence=off"
    # with causal attention, ranks of cp have equal work if each holds two equal parts
    step = 2 * parts if key == "cp" else parts
    lengths = " or ".join(f"{n:,}" for n in (tokens // step * step, -(-tokens // step) * step) if n)
    return (
        f"divides sequences of {tokens:,} tokens among {parts} ranks: {works}, or sequences of {lengths} tokens in "
        "the job's data."
    )


def wrong_cuts(plan: Plan, modules: Sequence[str], blocks: Sequence[str]) -> str | None:
    """Reason why a plan's cuts do not name the stages of a model.

    Args:
        modules: the names of all its modules.
        blocks: those of its repeated blocks.
    """
    cuts, stages = plan.cut.split(","), plan.stages
    wrong = [
        f'there is no module "{name}" in the model. {nearest(name, modules)}' for name in cuts if name not in modules
    ]
    wrong += [f"a stage begins at {name} once only." for name in dict.fromkeys(cuts) if cuts.count(name) > 1]
    if len(cuts) != stages - 1:
        proposal = f" cut={','.join(evenly)}" if (evenly := even_cuts(blocks, stages)) else f" name {stages - 1}"
        made = f"{stages} stages (schedule={plan.schedule})" if stages > plan.pp else f"{stages} stages"
        wrong.append(f"{made} have {count(stages - 1, 'cut')} between them, and there are {len(cuts)}:{proposal}.")
    return f"cuts at {', '.join(cuts)}: {' '.join(wrong)}" if wrong else None


def even_cuts(blocks: Sequence[str], stages: int) -> list[str]:
    """Names of the blocks that begin even stages; [] if there are too few."""
    return [blocks[start] for start in starts(contiguous([1] * len(blocks), stages))] if len(blocks) >= stages else []


def too_many_stages(plan: Plan, places: int, have: str) -> str | None:
    """Reason why a model has too few parts for a pipeline, without a full stop.

    Args:
        places: the number of stages that the model could be cut into.
        have: why there are no more, such as `the model has 4 repeated blocks`.
    """
    if places >= plan.stages:
        return None
    most, virtual = places // plan.stages_per_rank, places // plan.pp
    works = [f"pp is at most {most}" if most > 1 else "pp=1"]
    works = ["schedule=1f1b", *works] if virtual >= 1 else works
    works = [f"virtual is at most {virtual}", *works] if plan.schedule == "interleaved" and virtual >= 2 else works
    return f"makes {plan.stages} stages, but {have}: {', '.join(works)}"


def microbatches_fit(schedule: str, pp: int, microbatches: int) -> bool:
    """True if a schedule can run `microbatches` microbatches over `pp` ranks.

    These are the rules of the classes in `torch.distributed.pipelining`.
    """
    if schedule == "1f1b":
        return microbatches >= pp
    # in rounds of equal size, at least one microbatch of each rank
    if schedule == "interleaved":
        return microbatches >= pp and microbatches % (microbatches // pp) == 0
    if schedule == "dualpipe":
        return microbatches >= pp * stages_per_rank(schedule)
    return True


def unfit_microbatches(schedule: str, pp: int, microbatches: int) -> str | None:
    """Reason why a schedule cannot run a number of microbatches."""
    if microbatches_fit(schedule, pp, microbatches):
        return None
    fitting = [n for n in range(1, 2 * microbatches + pp) if microbatches_fit(schedule, pp, n)]
    nearby = sorted(sorted(fitting, key=lambda n: (abs(n - microbatches), n))[:2])
    rules = {"1f1b": "at least one for each", "dualpipe": "at least two for each"}
    rule = rules.get(schedule, f"equal rounds of {pp} or a few more")
    has = f"has {count(microbatches, 'microbatch', 'microbatches')} for {pp} pipeline ranks"
    return f"{has}; {schedule} needs {rule}: {_one_of('microbatches', nearby)}."


def fitting_microbatches(shares: Sequence[int], wanted: int) -> int:
    """The largest number of microbatches up to `wanted` that divides every rank's share.

    Shares are those of the data-parallel ranks.
    """
    return next(m for m in range(wanted, 0, -1) if not any(n % m for n in shares))


def sharded_twice(weight: str, schedule: str) -> str:
    """Reason why FSDP2 cannot shard a weight that two stages of a rank share.

    Each stage is sharded by itself.
    """
    works = "schedule=1f1b, gpipe or interleaved" if schedule in V_SCHEDULES else "schedule=1f1b or gpipe"
    return f"would shard {weight} twice, which two stages of a rank share: {works}, or fsdp=1."


def no_graphs(where: str) -> str:
    """Reason against `compile=reduce-overhead` on devices that cannot replay graphs."""
    return f"replays graphs of kernels, and {where} has no GPU that can: compile=on."


def whole_batch_in_parts(loss: str, microbatches: int) -> str:
    """Reason against microbatches with a loss that compares the samples of a batch."""
    return (
        f"computes a share in {microbatches} parts, but {loss} compares all samples of a batch with each other: "
        "microbatches=1."
    )


def no_balance(plan: Plan, kind: str) -> str | None:
    """Reason why the replicas' shares of a batch cannot follow their speeds.

    Args:
        kind: of the job's partition.
    """
    if plan.dp == 1:
        return "moves samples from slow replicas to fast ones, and there is only one: dp=2 or more, or balance=auto."
    if plan.pp > 1:
        return "cannot move samples between pipelines, whose microbatches have to be equal: balance=auto."
    if sync_info(plan.sync).local_steps:
        return f"cannot move samples between replicas that take steps of their own (sync={plan.sync}): balance=auto."
    if kind == "hierarchical":
        return "cannot move samples between hosts that read their own part (partition: hierarchical): balance=auto."
    return None


def no_automatic_balance(plan: Plan, kind: str, weighted: bool) -> str | None:
    """Reason why `balance=auto` leaves the replicas' shares as they are.

    Args:
        kind: of the job's partition; `weighted`: whether it has weights.
    """
    if weighted:
        return "keeps to the weights of the job's partition, unless balance=on."
    if plan.compile != "off":
        return f"keeps shares that compile={plan.compile} has compiled code for, unless balance=on."
    return no_balance(plan, kind)


def degrees(plan: Plan) -> str:
    """The degrees that multiply to the plan's ranks, such as `dp=2 · tp=3`."""
    return " · ".join(f"{key}={getattr(plan, key)}" for key in DEGREES if getattr(plan, key) > 1) or "dp=1"


def multiplied(plan: Plan) -> str:
    """The plan's degrees in parentheses, after a space; empty if only one is above 1."""
    return f" ({degrees(plan)})" if " · " in degrees(plan) else ""


def _one_of(key: str, values: Sequence[int]) -> str:
    return f"{key}={values[0]}" if len(values) == 1 else f"{key} is one of {_numbers(values)}"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")


def _common_divisors(numbers: Sequence[int]) -> list[int]:
    common = gcd(*numbers)
    return [n for n in range(1, common + 1) if common % n == 0]
